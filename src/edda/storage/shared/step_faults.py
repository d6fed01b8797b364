"""Which errors in a step's transaction are faults of the database, and not of the step's code.

The engine does not count an attempt that ends by such a fault as failed, and runs the step again. The meaning of an
error code is in one table per database, `faults.py`. An error may come from the driver, from SQLAlchemy, which wraps
the driver's, or from Edda's own statements. While the user's code runs, only the codes in `AWAY` are faults, because
the user's statements may cause any other; for Edda's own statements every code is a fault unless the table says that
the database refused the data.
"""

from __future__ import annotations

import sqlite3
from enum import Enum

from edda.errors import MigrationError, StorageConflictError, StorageUnavailableError
from edda.storage.ports import Dialect


class Fault(Enum):
    CONFLICT = "conflict"
    """The database rolled the transaction back because of another one: a deadlock, or a COMMIT that a cluster
    refused."""
    LOST = "lost"
    """The connection was lost in the middle of the transaction. The step may be the cause: one whose transaction is
    idle for longer than the server allows loses the connection every time."""
    AWAY = "away"
    """The database cannot be reached, or accepts no writes."""


_LIBRARIES = frozenset({"aiomysql", "aiosqlite", "asyncmy", "asyncpg", "psycopg", "pymysql", "sqlalchemy", "sqlite3"})


def find_fault(
    error: BaseException, dialect: Dialect | None, *, is_lost: bool = False, is_unopened: bool = False, is_ours: bool
) -> Fault | None:
    """None for an error of the step's own code. `dialect` is that of the step's transaction, if it had one; `is_lost`
    means that its connection is lost, `is_unopened` that its BEGIN has not succeeded, and `is_ours` that a statement of
    Edda raised the error."""
    if isinstance(error, StorageUnavailableError | MigrationError):
        return Fault.LOST if is_lost and is_ours else Fault.AWAY
    if isinstance(error, StorageConflictError):  # without a cause Edda raised it, not the server
        return None if error.__cause__ is None else Fault.CONFLICT
    if dialect is None:
        return None
    inner = getattr(error, "orig", None) or error  # SQLAlchemy's errors wrap the driver's
    meaning = _FAULTS[dialect](inner, is_ours)
    if meaning is Fault.CONFLICT:
        return meaning
    if is_lost and _is_of_connection(error):
        return Fault.LOST
    if is_unopened and _is_of_connection(error) and getattr(error, "statement", None) is None:
        return Fault.AWAY
    return meaning


def is_conflict(error: BaseException, dialect: Dialect) -> bool:
    return find_fault(error, dialect, is_ours=False) is Fault.CONFLICT


def _is_of_connection(error: BaseException) -> bool:
    """Whether a driver, SQLAlchemy or a socket raised it. A time-out of the user's code is an `OSError` too."""
    if isinstance(error, OSError | EOFError):
        return not isinstance(error, TimeoutError) or type(error).__module__.partition(".")[0] in _LIBRARIES
    return type(error).__module__.partition(".")[0] in _LIBRARIES


def _postgres_fault(error: BaseException, is_ours: bool) -> Fault | None:
    from edda.storage.postgres import faults

    states = (getattr(each, "sqlstate", None) for each in (error, error.__cause__))
    state = next((each for each in states if isinstance(each, str)), None)
    if state is None:
        return None
    if faults.meaning_of(state) is StorageConflictError:
        return Fault.CONFLICT
    if faults.is_away(state):
        return Fault.AWAY
    is_unlisted = faults.meaning_of(state) is StorageUnavailableError and state not in faults.ENDED
    return Fault.AWAY if is_ours and is_unlisted else None


def _mysql_fault(error: BaseException, is_ours: bool) -> Fault | None:
    from edda.storage.mysql import faults

    number = error.args[0] if error.args else None
    if not isinstance(number, int):
        return None
    meaning = faults.meaning_of(number, str(getattr(error, "sqlstate", "")))
    if meaning is StorageConflictError:
        return Fault.CONFLICT
    if number in faults.LOST:
        return Fault.LOST
    if faults.is_away(number, str(error)) or (is_ours and meaning is StorageUnavailableError):
        return Fault.AWAY
    return None


def _sqlite_fault(error: BaseException, is_ours: bool) -> Fault | None:
    from edda.storage.sqlite import faults

    if not isinstance(error, sqlite3.Error):
        return None
    if faults.is_away(error) or (is_ours and isinstance(error, sqlite3.OperationalError)):
        return Fault.AWAY
    return None


_FAULTS = {"postgresql": _postgres_fault, "mysql": _mysql_fault, "sqlite": _sqlite_fault}
