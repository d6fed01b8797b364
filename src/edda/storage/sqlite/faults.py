"""What the errors of SQLite and of its driver mean to the engine: one table.

Only what the *data* is refused for may fail a run. Whatever else is wrong (a missing table, a file that cannot be
written, a full disk, no memory) is a fault of the infrastructure: the engine asks again until it is over.
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
"""The first that fits."""
DUPLICATES = (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE)
"""Result codes of an `IntegrityError` for a key that is there already."""
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
"""Primary result codes that no statement of a user's causes: the file, its folder, the disk, the memory."""
DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
LITTLE_SPACE = 1 << 20
"""Bytes: with less, SQLite cannot write its log or its shared memory, and an I/O error means that the disk is full."""
TRANSIENT = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""Result codes of an `OperationalError` after which the same may be sent again."""


def translate(error: BaseException, path: str = "") -> BaseException:
    """An error that is none of the driver's is passed on as it is."""
    if isinstance(error, sqlite3.InterfaceError | sqlite3.ProgrammingError) and "binding" in str(error).lower():
        return StorageRejectedError(str(error))  # a value of a type that SQLite does not know
    # The primary result code: its extensions say where, not what. Errors of the driver itself have none.
    if isinstance(error, sqlite3.OperationalError) and getattr(error, "sqlite_errorcode", 0) & 0xFF in TRANSIENT:
        return StorageConflictError(str(error))
    if isinstance(error, sqlite3.IntegrityError) and getattr(error, "sqlite_errorcode", 0) in DUPLICATES:
        return StorageDuplicateError(str(error))
    if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY:
        return StorageUnavailableError(
            f"{path}: {error}; this process must be allowed to write to the file and to its folder, where SQLite keeps "
            "-wal and -shm"
        )
    if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in DISK:
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
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in AWAY
