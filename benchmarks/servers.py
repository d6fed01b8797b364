"""How many queries a database server counts, told by the server itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import asyncmy
import asyncpg

from .databases import MYSQL, POSTGRES, Database, server

TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1"
QUESTIONS = "SHOW GLOBAL STATUS LIKE 'Questions'"


class Counter(Protocol):
    async def read(self) -> int | None: ...


class Nobody:
    async def read(self) -> int | None:
        return None


class PostgresCounter:
    """Counts one database; the counter itself is connected to another."""

    def __init__(self, connection: asyncpg.Connection, name: str) -> None:
        self.connection = connection
        self.name = name

    async def read(self) -> int | None:
        return int(await self.connection.fetchval(TRANSACTIONS, self.name))


class MySQLCounter:
    """Counts the whole server, which must be used by nobody else; not its own questions."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.own = 0

    async def read(self) -> int | None:
        async with self.connection.cursor() as cursor:
            await cursor.execute(QUESTIONS)
            ((_, count),) = await cursor.fetchall()
        self.own += 1
        return int(count) - self.own


@asynccontextmanager
async def open_counter(database: Database) -> AsyncIterator[Counter]:
    parts = urlsplit(database.url)
    if database.kind == POSTGRES:
        connection = await asyncpg.connect(server().url)
        try:
            yield PostgresCounter(connection, parts.path[1:])
        finally:
            await connection.close()
    elif database.kind == MYSQL:
        opened = await asyncmy.connect(
            host=parts.hostname,
            port=parts.port or 3306,
            user=unquote(parts.username or "root"),
            password=unquote(parts.password or ""),
            autocommit=True,
        )
        try:
            yield MySQLCounter(opened)
        finally:
            opened.close()
    else:
        yield Nobody()
