"""What each error of each driver means: only refused data may fail a run, and no fault of the infrastructure does."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import asyncpg
import pytest
from asyncmy.errors import DatabaseError, MySQLError

from edda.core.model import RunId
from edda.errors import (
    StorageConflictError,
    StorageDuplicateError,
    StorageError,
    StorageLockedError,
    StorageRejectedError,
    StorageUnavailableError,
)
from edda.storage.mysql import faults as mysql_faults
from edda.storage.ports import Storage
from edda.storage.postgres import faults as postgres_faults
from edda.storage.sqlite import faults as sqlite_faults
from tests.conftest import Database, OnServer

CONFLICT, REJECTED, AWAY = StorageConflictError, StorageRejectedError, StorageUnavailableError
LOCKED, DUPLICATE = StorageLockedError, StorageDuplicateError

POSTGRES = {
    "40001": CONFLICT,
    "40P01": CONFLICT,
    "55P03": LOCKED,
    "22021": REJECTED,  # a character that is not allowed
    "22003": REJECTED,  # a number out of range
    "23505": DUPLICATE,  # unique
    "23514": REJECTED,  # check
    "54000": REJECTED,  # index row too long
    "42P01": AWAY,  # undefined table
    "42703": AWAY,  # undefined column
    "42883": AWAY,  # undefined function
    "42501": AWAY,  # permission denied
    "25006": AWAY,  # read-only transaction
    "25P03": AWAY,  # idle in transaction
    "53100": AWAY,  # disk full
    "53200": AWAY,  # out of memory
    "53300": AWAY,  # too many connections
    "53400": AWAY,  # configuration limit
    "57014": AWAY,  # statement cancelled
    "57P01": AWAY,  # shutdown
    "57P03": AWAY,  # starting up
    "58030": AWAY,  # I/O error
    "40003": AWAY,  # outcome unknown
    "0A000": AWAY,  # the plan of a statement is no longer valid, after a migration
    "08006": AWAY,  # connection failure
    "28P01": AWAY,  # wrong password
    "3D000": AWAY,  # no such database
    "XX000": AWAY,  # internal error
    "XX001": AWAY,  # corrupted
}

MYSQL: dict[tuple[int, str], type[StorageError]] = {
    (1020, "HY000"): CONFLICT,
    (1205, "HY000"): LOCKED,
    (1213, "40001"): CONFLICT,
    (1614, "XA102"): CONFLICT,
    (3101, "40000"): CONFLICT,
    (3572, "HY000"): LOCKED,
    (1062, "23000"): DUPLICATE,
    (1022, "23000"): DUPLICATE,
    (1169, "23000"): DUPLICATE,
    (1586, "23000"): DUPLICATE,
    (1452, "23000"): REJECTED,  # foreign key
    (1118, "42000"): REJECTED,
    (1153, "08S01"): REJECTED,
    (1264, "22003"): REJECTED,
    (1300, "HY000"): REJECTED,
    (1366, "22007"): REJECTED,
    (1366, "HY000"): REJECTED,
    (1406, "22001"): REJECTED,
    (3819, "HY000"): REJECTED,
    (4025, "23000"): REJECTED,  # CHECK on MariaDB
    (1146, "42S02"): AWAY,  # no such table
    (1054, "42S22"): AWAY,  # unknown column
    (1142, "42000"): AWAY,  # command denied
    (1044, "42000"): AWAY,  # access to the database denied
    (1045, "28000"): AWAY,  # wrong password
    (1049, "42000"): AWAY,  # no such database
    (1290, "HY000"): AWAY,  # --read-only
    (1792, "25006"): AWAY,  # read-only transaction
    (1836, "HY000"): AWAY,  # read-only mode
    (1040, "08004"): AWAY,  # too many connections
    (1203, "42000"): AWAY,  # too many connections of one user
    (1226, "42000"): AWAY,  # over the account's resources
    (1021, "HY000"): AWAY,  # disk full
    (1114, "HY000"): AWAY,  # table full
    (1030, "HY000"): AWAY,  # error of the storage engine
    (1037, "HY001"): AWAY,  # out of memory
    (1041, "HY000"): AWAY,  # out of resources
    (1047, "08S01"): AWAY,  # not in the cluster's majority
    (1053, "08S01"): AWAY,  # shutdown
    (1180, "HY000"): AWAY,  # error during COMMIT
    (1317, "70100"): AWAY,  # interrupted
    (1412, "HY000"): AWAY,  # table definition has changed
    (1927, "70100"): AWAY,  # connection killed
    (1969, "70100"): AWAY,  # max_statement_time
    (2006, "HY000"): AWAY,
    (2013, "HY000"): AWAY,
    (0, "None"): AWAY,
}


@pytest.mark.parametrize(("state", "meaning"), POSTGRES.items(), ids=POSTGRES)
def test_postgres(state: str, meaning: type[StorageError]) -> None:
    error = asyncpg.PostgresError.new({"C": state, "M": "told"})
    translated = postgres_faults.translate(error)
    assert type(translated) is meaning
    assert "told" in str(translated)


@pytest.mark.parametrize(("about", "meaning"), MYSQL.items(), ids=lambda value: str(value))
def test_mysql(about: tuple[int, str], meaning: type[StorageError]) -> None:
    number, state = about
    error = type("Told", (DatabaseError,), {"sqlstate": state})(number, "told")
    assert isinstance(error, MySQLError)
    translated = mysql_faults.translate(error)
    assert type(translated) is meaning
    assert "told" in str(translated)


def test_every_row_of_the_tables_is_tested() -> None:
    states = {state for known in POSTGRES for state in (known, known[:2])}
    assert postgres_faults.MEANINGS.keys() | postgres_faults.HINTS.keys() <= states
    numbers = {number for number, _ in MYSQL} | {state[:2] for _, state in MYSQL}
    assert mysql_faults.MEANINGS.keys() | mysql_faults.HINTS.keys() <= numbers


def sqlite_error(*statements: str, values: tuple[object, ...] = (), path: Path | None = None) -> BaseException:
    """The error that the last of the statements raises."""
    database = sqlite3.connect(path or ":memory:", isolation_level=None)
    try:
        for statement in statements[:-1]:
            database.execute(statement)
        database.execute(statements[-1], values)
    except Exception as error:
        return error
    finally:
        database.close()
    raise AssertionError("no error")


TABLE = "CREATE TABLE t (a INTEGER PRIMARY KEY, b BLOB CHECK (length(b) < 10))"
INSERT = "INSERT INTO t VALUES (?, ?)"


def test_sqlite(tmp_path: Path) -> None:
    full = tmp_path / "full.db"
    cases: list[tuple[BaseException, type[StorageError]]] = [
        (sqlite_error(TABLE, INSERT, values=(1, b"x" * 10)), REJECTED),
        (sqlite_error(TABLE, "INSERT INTO t VALUES (1, NULL)", INSERT, values=(1, b"")), DUPLICATE),
        (sqlite_error(TABLE, INSERT, values=(1 << 70, b"")), REJECTED),
        (sqlite_error(TABLE, INSERT, values=(1, "\ud800")), REJECTED),
        (sqlite_error(TABLE, INSERT, values=(1, object())), REJECTED),
        (sqlite_error("SELECT * FROM missing"), AWAY),
        (sqlite_error(TABLE, "SELECT missing FROM t"), AWAY),
        (sqlite_error(TABLE, "PRAGMA query_only = ON", INSERT, values=(1, b"")), AWAY),
        (sqlite_error(TABLE, "PRAGMA max_page_count = 2", "CREATE TABLE u (a, b, c)", path=full), AWAY),
        (sqlite3.OperationalError("disk I/O error"), AWAY),
        (sqlite3.DatabaseError("database disk image is malformed"), AWAY),
        (sqlite3.InterfaceError("bad parameter or other API misuse"), AWAY),
        (sqlite3.ProgrammingError("Cannot operate on a closed database."), AWAY),
        (MemoryError(), AWAY),
    ]
    assert [type(sqlite_faults.translate(error)) for error, _ in cases] == [meaning for _, meaning in cases]
    bug = KeyError("a bug stays what it is")
    assert sqlite_faults.translate(bug) is bug


def test_a_busy_sqlite_file_is_a_conflict(tmp_path: Path) -> None:
    path = tmp_path / "busy.db"
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    other = sqlite3.connect(path, timeout=0, isolation_level=None)
    with pytest.raises(sqlite3.OperationalError) as caught:
        other.execute("BEGIN IMMEDIATE")
    assert type(sqlite_faults.translate(caught.value)) is CONFLICT
    other.close()
    holder.close()


# On real servers

FAULTS = {
    "postgres": {
        "no table": ("ALTER TABLE edda_result RENAME TO gone", "ALTER TABLE gone RENAME TO edda_result"),
    },
    "mysql": {
        "no table": ("RENAME TABLE edda_result TO gone", "RENAME TABLE gone TO edda_result"),
    },
}


@pytest.mark.parametrize("database", ["postgres", "mysql"], indirect=True)
async def test_a_table_that_is_away_is_no_answer_and_is_there_again_later(database: Database, storage: Storage) -> None:
    assert isinstance(database, OnServer)
    away, back = FAULTS[database.kind]["no table"]
    database.execute(away)
    try:
        with pytest.raises(StorageUnavailableError, match="edda migrate"):
            await storage.get(RunId("a"))
    finally:
        database.execute(back)
    assert await storage.get(RunId("a")) is None
