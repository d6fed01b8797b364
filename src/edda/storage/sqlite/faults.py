"""What the errors of SQLite and of its driver mean to the engine: one table.

Only an error that refuses the data itself (`StorageRejectedError`) may fail a run. Any other error (a missing table, a
file that cannot be written, a full disk, no memory) is a fault of the infrastructure: the engine tries again until the
fault is over.
"""

from __future__ import annotations

import os
import sqlite3

from edda.errors import (
    StorageConflictError,
    StorageDuplicateError,
    StorageError,
    StorageRejectedError,
    StorageUnavailableError,
)

MEANINGS: tuple[tuple[type[BaseException], type[StorageError]], ...] = (
    (sqlite3.IntegrityError, StorageRejectedError),  # a constraint
    (sqlite3.DataError, StorageRejectedError),  # too large
    (OverflowError, StorageRejectedError),  # a number of more than 64 bits
    (UnicodeError, StorageRejectedError),  # text that is not Unicode
    (sqlite3.Error, StorageUnavailableError),
    (MemoryError, StorageUnavailableError),
)
"""The first row whose type fits decides."""
DUPLICATES = (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE)
"""Result codes of an `IntegrityError` for a key that exists already."""
AWAY = frozenset(
    {
        sqlite3.SQLITE_BUSY,  # another program writes to the file, or copies it
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOTADB,
    }
)
"""Primary result codes that the text of a statement cannot cause: the file, its folder, the disk or the memory does."""
DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
LITTLE_SPACE = 1 << 20
"""Bytes: with less free space SQLite cannot write its WAL or its shared memory, and an I/O error means a full disk."""
TRANSIENT = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""Result codes of an `OperationalError` after which the same transaction may be tried again."""


def translate(error: BaseException, path: str = "") -> BaseException:
    """The error to raise instead; an error that the driver did not raise is returned as it is."""
    if isinstance(error, sqlite3.InterfaceError | sqlite3.ProgrammingError) and "binding" in str(error).lower():
        return StorageRejectedError(str(error))  # a value of a type that SQLite does not know
    code = _primary_code(error)
    if isinstance(error, sqlite3.OperationalError) and code in TRANSIENT:
        return StorageConflictError(str(error))
    if isinstance(error, sqlite3.IntegrityError) and getattr(error, "sqlite_errorcode", 0) in DUPLICATES:
        return StorageDuplicateError(str(error))
    if code == sqlite3.SQLITE_READONLY:
        return StorageUnavailableError(
            f"{path}: {error}; this process must be allowed to write to the file and to its folder, where SQLite keeps "
            "-wal and -shm"
        )
    if code in DISK:
        return StorageUnavailableError(f"{path}: {error}{_explain_disk(path)}" if path else str(error))
    for kind, meaning in MEANINGS:
        if isinstance(error, kind):
            return meaning(str(error) or repr(error))
    return error


def _explain_disk(path: str) -> str:
    try:
        about = os.statvfs(os.path.dirname(path) or ".")
    except (OSError, AttributeError):  # the folder is gone, or this is no POSIX system
        return ""
    free = about.f_bavail * about.f_frsize
    if free >= LITTLE_SPACE:
        return ""
    return f"; the disk is full, {free:,} bytes are free: make room, and writing goes on by itself"


def is_away(error: sqlite3.Error) -> bool:
    return _primary_code(error) in AWAY


def _primary_code(error: BaseException) -> int:
    """Without the extended part, which says where the error happened; 0 if the driver itself raised the error."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF if isinstance(error, sqlite3.Error) else 0
