"""Which errors in a step's transaction are faults of Edda's own database, and not of the step's code.

A step that ends by such a fault is not counted as failed: the engine runs it again. What a code means is in the one
table per database, `faults.py`. Errors may come from the driver itself, from SQLAlchemy, which wraps the driver's, or
from Edda's own statements. While the user's code runs only the codes in `AWAY` are faults, because any other may be
caused by its statements; for the statements that Edda adds, all that the table does not know as a refusal of data is.
"""

from __future__ import annotations

import sqlite3
from enum import Enum

from edda.errors import MigrationError, StorageConflictError, StorageUnavailableError
from edda.storage.ports import Dialect


class Fault(Enum):
    CONFLICT = "conflict"
    """The database rolled the transaction back for another transaction's sake: a deadlock, or a COMMIT that a cluster
    refused. Nothing of it is left."""
    LOST = "lost"
    """The connection was lost in the middle of the transaction. The step may be the cause: one that rests in its
    transaction for longer than the server allows loses it every time."""
    AWAY = "away"
    """The database cannot be reached, or takes no writes."""


_LIBRARIES = frozenset({"aiomysql", "aiosqlite", "asyncmy", "asyncpg", "psycopg", "pymysql", "sqlalchemy", "sqlite3"})


def find_fault(
    error: BaseException, dialect: Dialect | None, *, is_lost: bool = False, is_unopened: bool = False, is_ours: bool
) -> Fault | None:
    """None if it is an error of the step's own. `dialect` is that of its transaction, if it had one; `is_lost` says
    that the connection of that one is gone, `is_unopened` that the transaction was asked for and has not begun, and
    `is_ours` that a statement of Edda's raised the error."""
    if isinstance(error, StorageUnavailableError | MigrationError):
        return Fault.LOST if is_lost and is_ours else Fault.AWAY
    if isinstance(error, StorageConflictError):  # without a cause it is no answer of a server but a finding of Edda's
        return None if error.__cause__ is None else Fault.CONFLICT
    if dialect is None:
        return None
    inner = getattr(error, "orig", None) or error  # SQLAlchemy's errors wrap the driver's
    meaning = _MEANINGS[dialect](inner, is_ours)
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
    """Whether a driver, SQLAlchemy or a socket raised it. The user's own time-outs are `OSError` too."""
    if isinstance(error, OSError | EOFError):
        return not isinstance(error, TimeoutError) or type(error).__module__.partition(".")[0] in _LIBRARIES
    return type(error).__module__.partition(".")[0] in _LIBRARIES


def _judge_postgres(error: BaseException, is_ours: bool) -> Fault | None:
    from edda.storage.postgres import faults

    states = (getattr(one, "sqlstate", None) for one in (error, error.__cause__))
    state = next((one for one in states if isinstance(one, str)), None)
    if state is None:
        return None
    if faults.meaning_of(state) is StorageConflictError:
        return Fault.CONFLICT
    if faults.is_away(state):
        return Fault.AWAY
    is_unlisted = faults.meaning_of(state) is StorageUnavailableError and state not in faults.ENDED
    return Fault.AWAY if is_ours and is_unlisted else None


def _judge_mysql(error: BaseException, is_ours: bool) -> Fault | None:
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


def _judge_sqlite(error: BaseException, is_ours: bool) -> Fault | None:
    from edda.storage.sqlite import faults

    if not isinstance(error, sqlite3.Error):
        return None
    if faults.is_away(error) or (is_ours and isinstance(error, sqlite3.OperationalError)):
        return Fault.AWAY
    return None


_MEANINGS = {"postgresql": _judge_postgres, "mysql": _judge_mysql, "sqlite": _judge_sqlite}
