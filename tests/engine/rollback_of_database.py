"""A database that goes back to what it held before, as a failover to a standby does that had not got the last commits.

Not the workers' own rows: a heartbeat that comes in the middle of going back would take its worker for dead.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.conftest import Database, InFile, OnServer
from tests.databases import MySQLServer

TABLES = ("fence", "claim", "run", "open_run", "history", "result", "inbox", "step_commit", "wait")

Row = Sequence[Any]


class Access(ABC):
    """One transaction of an outsider."""

    mark: str

    @abstractmethod
    async def fetch(self, sql: str) -> Sequence[Row]: ...

    @abstractmethod
    async def insert(self, sql: str, rows: Sequence[Row]) -> None: ...

    @abstractmethod
    async def columns(self, table: str) -> list[str]: ...


class InSQLite(Access):
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def fetch(self, sql: str) -> Sequence[Row]:
        return self._connection.execute(sql).fetchall()

    async def insert(self, sql: str, rows: Sequence[Row]) -> None:
        marks = ", ".join("?" * len(rows[0]))
        self._connection.executemany(f"{sql} VALUES ({marks})", rows)

    async def columns(self, table: str) -> list[str]:
        return [row[1] for row in await self.fetch(f"PRAGMA table_info({table})")]


class InPostgres(Access):
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def fetch(self, sql: str) -> Sequence[Row]:
        rows: Sequence[Row] = await self._connection.fetch(sql)
        return rows

    async def insert(self, sql: str, rows: Sequence[Row]) -> None:
        marks = ", ".join(f"${number}" for number in range(1, len(rows[0]) + 1))
        await self._connection.executemany(f"{sql} VALUES ({marks})", rows)

    async def columns(self, table: str) -> list[str]:
        rows = await self.fetch(f"SELECT column_name FROM information_schema.columns WHERE table_name = '{table}'")
        return [row[0] for row in rows]


class InMySQL(Access):
    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    async def fetch(self, sql: str) -> Sequence[Row]:
        await self._cursor.execute(sql)
        rows: Sequence[Row] = await self._cursor.fetchall()
        return rows

    async def insert(self, sql: str, rows: Sequence[Row]) -> None:
        marks = ", ".join(["%s"] * len(rows[0]))
        await self._cursor.executemany(f"{sql} VALUES ({marks})", rows)

    async def columns(self, table: str) -> list[str]:
        rows = await self.fetch(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = DATABASE()"
            f" AND table_name = '{table}' AND extra NOT LIKE '%GENERATED%'"
        )
        return [f"`{row[0]}`" for row in rows]


@asynccontextmanager
async def access(database: Database) -> AsyncIterator[Access]:
    if isinstance(database, InFile):
        connection = sqlite3.connect(database.path, isolation_level=None, timeout=30)
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield InSQLite(connection)
            connection.execute("COMMIT")
        finally:
            connection.close()
        return
    assert isinstance(database, OnServer)
    if isinstance(database.server, MySQLServer):
        async with database.server._cursor(database.url) as cursor:
            yield InMySQL(cursor)
        return
    import asyncpg

    outsider = await asyncpg.connect(database.url)
    try:
        async with outsider.transaction():
            yield InPostgres(outsider)
    finally:
        await outsider.close()


class Past:
    """What the tables held when it was made."""

    def __init__(self, database: Database, rows: dict[tuple[str, str], Sequence[Row]]) -> None:
        self._database = database
        self._rows = rows

    @classmethod
    async def of(cls, database: Database) -> Past:
        rows: dict[tuple[str, str], Sequence[Row]] = {}
        async with access(database) as outsider:
            for name in TABLES:
                names = ", ".join(await outsider.columns(f"edda_{name}"))
                assert names, f"there is no table edda_{name}"
                rows[f"edda_{name}", names] = await outsider.fetch(f"SELECT {names} FROM edda_{name}")
        return cls(database, rows)

    async def restore(self) -> None:
        async with access(self._database) as outsider:
            for (table, names), rows in self._rows.items():
                await outsider.fetch(f"DELETE FROM {table}")
                if rows:
                    await outsider.insert(f"INSERT INTO {table} ({names})", [tuple(row) for row in rows])
