"""What the errors of PostgreSQL and of its driver mean to the engine: one table, by SQLSTATE.

The journal sends a batch again after a conflict; after an error that leaves the outcome open it first reads the fence;
and only an error that refuses the *data* may fail a run. Every state that is not listed counts as a fault of the
infrastructure: missing tables, missing rights, a full disk, a read-only server, too many connections. Runs wait then.
"""

from __future__ import annotations

import asyncpg

from edda.errors import (
    StorageConflictError,
    StorageDuplicateError,
    StorageError,
    StorageLockedError,
    StorageRejectedError,
    StorageUnavailableError,
)

MEANINGS: dict[str, type[StorageError]] = {
    "40001": StorageConflictError,  # serialization failure
    "40P01": StorageConflictError,  # deadlock
    "55P03": StorageLockedError,  # lock time-out
    "23505": StorageDuplicateError,  # the key exists already
    "22": StorageRejectedError,  # a value that the column does not take
    "23": StorageRejectedError,  # a constraint
    "54": StorageRejectedError,  # over a limit of the database, such as an index row that is too long
}
"""By the whole SQLSTATE, or by its class."""

AWAY = frozenset({"08", "58", "25006", "53000", "53100", "53200", "53300", "57P01", "57P02", "57P03", "57P04", "57P05"})
"""States, or classes of them, that no statement of a user causes: connection, system error, read-only server, disk or
memory full, no connection left, shutdown. Other states of the classes 53 and 57 are limits that the user has set."""
ENDED = frozenset({"25P01", "25P02"})
"""An earlier statement of the user ended the transaction, or failed in it."""

HINTS = {
    "42P01": "the database is not migrated to this release, or its tables are being replaced: run `edda migrate`",
    "42703": "the database is not migrated to this release: run `edda migrate`",
    "42501": "the database's account lacks a right on Edda's tables",
    "25006": "the server is a standby or was made read-only; connect to the primary, or name all hosts in the URL with "
    "target_session_attrs=read-write",
    "53100": "the server's disk is full",
    "53300": "the server has no connection left: lower `pool_size`, or raise `max_connections`",
}


def translate(error: asyncpg.PostgresError) -> StorageError:
    state = error.sqlstate or ""
    kind = meaning_of(state)
    if kind is not StorageUnavailableError:
        return kind(str(error))
    hint = f": {HINTS[state]}" if state in HINTS else ""
    return StorageUnavailableError(f"{error} ({state}){hint}")


def meaning_of(state: str) -> type[StorageError]:
    return MEANINGS.get(state) or MEANINGS.get(state[:2], StorageUnavailableError)


def is_away(state: str) -> bool:
    return state in AWAY or state[:2] in AWAY
