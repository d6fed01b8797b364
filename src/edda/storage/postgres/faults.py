"""What the errors of PostgreSQL and of its driver mean to the engine: one table, by SQLSTATE.

A batch is sent again after a conflict; after an error that leaves its outcome open it is asked for and sent again; and
only what the *data* is refused for may fail a run. Whatever is not listed is a fault of the infrastructure: missing
tables, missing rights, a full disk, a read-only server, too many connections. A run waits until it is over.
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
    "23505": StorageDuplicateError,  # a key that is there already
    "22": StorageRejectedError,  # a value that the column does not take
    "23": StorageRejectedError,  # a constraint
    "54": StorageRejectedError,  # over a limit of the database, as an index row that is too long
}
"""By the whole state, or by its class."""

AWAY = frozenset({"08", "58", "25006", "53000", "53100", "53200", "53300", "57P01", "57P02", "57P03", "57P04", "57P05"})
"""States, or classes of them, that no statement of a user's causes: the connection, the machine, a read-only server, no
room, no connection left, a shutdown. Others of class 53 and 57 are limits that the user has set for a statement."""
ENDED = frozenset({"25P01", "25P02"})
"""The transaction was ended, or made useless, by a statement of the user's before this one."""

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
