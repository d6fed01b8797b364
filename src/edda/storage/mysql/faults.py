"""What the errors of MariaDB and MySQL mean to the engine: one table, by number and by class of SQLSTATE.

The journal sends a batch again after a conflict; after an error that leaves the outcome open it first reads the fence;
and only an error that refuses the *data* may fail a run. Every number that is not listed counts as a fault of the
infrastructure: missing tables, missing rights, a full disk, a read-only server, too many connections. Runs wait then.
"""

from __future__ import annotations

from asyncmy.errors import MySQLError

from edda.errors import (
    StorageConflictError,
    StorageDuplicateError,
    StorageError,
    StorageLockedError,
    StorageRejectedError,
    StorageUnavailableError,
)

MEANINGS: dict[int | str, type[StorageError]] = {
    1020: StorageConflictError,  # record changed since it was read
    1205: StorageLockedError,  # lock wait time-out
    1213: StorageConflictError,  # deadlock; on a cluster also a refused COMMIT
    1614: StorageConflictError,  # rolled back by the server (XA deadlock)
    3101: StorageConflictError,  # the replication group refused the COMMIT
    3572: StorageLockedError,  # NOWAIT
    1022: StorageDuplicateError,  # the key exists already, here and below
    1062: StorageDuplicateError,
    1169: StorageDuplicateError,
    1586: StorageDuplicateError,
    1118: StorageRejectedError,  # row too large
    1153: StorageRejectedError,  # packet too large
    1300: StorageRejectedError,  # bad text
    1366: StorageRejectedError,  # bad value
    1406: StorageRejectedError,  # value too long
    3819: StorageRejectedError,  # CHECK
    "22": StorageRejectedError,  # a value that the column does not take
    "23": StorageRejectedError,  # a constraint
}
"""By number, which comes first, or by class of SQLSTATE."""

LOST = frozenset({1152, 1158, 1159, 1160, 1161, 1927, 2006, 2013, 2014, 2045, 2055, 4031})
"""The connection is gone."""
AWAY = frozenset({1021, 1040, 1047, 1053, 1114, 1129, 1203, 1226, 1792, 1836, 2001, 2002, 2003, 2005, 2012})
"""Numbers that no statement of a user causes: disk full, no connection left, shutdown, read-only server, a node outside
of the cluster's majority."""

HINTS = {
    1146: "the database is not migrated to this release, or its tables are being replaced: run `edda migrate`",
    1054: "the database is not migrated to this release: run `edda migrate`",
    1142: "the database's account lacks a right on Edda's tables",
    1021: "the server's disk is full",
    1114: "the server's disk or table space is full",
    1290: "the server takes no writes: is it a replica?",
    1792: "the server takes no writes: is it a replica?",
    1040: "the server has no connection left: lower `pool_size`, or raise `max_connections`",
    1047: "the node is not part of the cluster's majority",
}


def translate(error: MySQLError) -> StorageError:
    number = number_of(error)
    kind = meaning_of(number, str(error.sqlstate))
    hint = f": {HINTS[number]}" if number in HINTS else ""
    return kind(f"{error}{hint}")


def number_of(error: MySQLError) -> int:
    number = error.args[0] if error.args else 0
    return number if isinstance(number, int) else 0


def meaning_of(number: int, state: str) -> type[StorageError]:
    return MEANINGS.get(number) or MEANINGS.get(state[:2], StorageUnavailableError)


def is_away(number: int, message: str) -> bool:
    """1290 is any option that forbids a statement and 1030 any error of a storage engine, so their message decides."""
    if number == 1290:
        return "read-only" in message or "read_only" in message
    if number == 1030:
        return "No space left" in message
    return number in AWAY
