"""Plain SQL to the database under fire: it is looked at without a word of the product's code."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

Row = tuple[Any, ...]

PATIENCE = 60.0
"""Seconds that a database may be away."""


class Line(ABC):
    def __init__(self, url: str) -> None:
        self._url = url

    @abstractmethod
    async def _connect(self) -> None: ...

    @abstractmethod
    async def _send(self, sql: str) -> list[Row]: ...

    @abstractmethod
    def close(self) -> None: ...

    async def rows(self, sql: str) -> list[Row]:
        """For what may be asked twice: while the database is away it is asked again."""
        give_up = time.monotonic() + PATIENCE
        while True:
            try:
                return await self.once(sql)
            except Exception:  # whatever a driver raises when its server dies; if it stays away, this is raised
                if time.monotonic() > give_up:
                    raise
                self.close()
                await asyncio.sleep(0.1)

    async def until(self, count: str, fact: Callable[[int], bool], within: float) -> bool:
        """Whether the number that this counts is as it should be, in time."""
        give_up = time.monotonic() + within
        while True:
            if fact((await self.rows(count))[0][0]):
                return True
            if time.monotonic() > give_up:
                return False
            await asyncio.sleep(0.05)

    async def once(self, sql: str) -> list[Row]:
        await self._connect()
        return await self._send(sql)


class PostgresLine(Line):
    _connection: Any = None

    async def _connect(self) -> None:
        import asyncpg

        if self._connection is None or self._connection.is_closed():
            self._connection = await asyncpg.connect(self._url, timeout=5, command_timeout=30)

    async def _send(self, sql: str) -> list[Row]:
        return [tuple(row) for row in await self._connection.fetch(sql)]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None


class MySQLLine(Line):
    _connection: Any = None

    async def _connect(self) -> None:
        import asyncmy

        if self._connection is None:
            parts = urlsplit(self._url)
            where = {"host": parts.hostname, "port": parts.port or 3306, "database": parts.path[1:]}
            self._connection = await asyncmy.connect(user=parts.username or "root", autocommit=True, **where)
            if any(value == "ON" for _, value in await self._send("SHOW VARIABLES LIKE 'wsrep_on'")):
                await self._send("SET SESSION wsrep_sync_wait = 7")  # a node of a cluster: all that others committed

    async def _send(self, sql: str) -> list[Row]:
        async with asyncio.timeout(30), self._connection.cursor() as cursor:
            await cursor.execute(sql)
            return list(await cursor.fetchall()) if cursor.description else []

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class SQLiteLine(Line):
    """Writes only before anybody else is there: a second writer would be outside the product's rules."""

    _connection: sqlite3.Connection | None = None

    async def _connect(self) -> None:
        if self._connection is None:
            path = self._url.removeprefix("sqlite:///")
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=30)
            self._connection.execute("PRAGMA wal_autocheckpoint = 0")

    async def _send(self, sql: str) -> list[Row]:
        assert self._connection is not None
        return self._connection.execute(sql).fetchall()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


LINES: dict[str, type[Line]] = {"postgres": PostgresLine, "mysql": MySQLLine, "sqlite": SQLiteLine}


def text(value: Any) -> Any:
    """Ids as one database keeps them are bytes."""
    return value.decode() if isinstance(value, bytes) else value
