"""The bare driver: what the database gives when each row is a commit. The limit, not a competitor."""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable, Coroutine

import asyncpg

from benchmarks.figures import Commits, Opened

from .pipe import serve_pipe

CREATE = "CREATE TABLE IF NOT EXISTS line (body TEXT NOT NULL)"
INSERT_POSTGRES = "INSERT INTO line (body) VALUES ($1)"
INSERT_SQLITE = "INSERT INTO line (body) VALUES (?)"
BODY = '{"step": "charge:1", "value": 42}'

Insert = Callable[[], Coroutine[None, None, None]]


class PostgresRows:
    def __init__(self, url: str) -> None:
        self.url = url
        self.connections: list[asyncpg.Connection] = []

    async def open(self) -> None:
        await (await self._connect()).execute(CREATE)

    async def _connect(self) -> asyncpg.Connection:
        connection = await asyncpg.connect(self.url)
        self.connections.append(connection)
        return connection

    async def inserts(self, in_flight: int) -> list[Insert]:
        """One per connection, prepared."""
        while len(self.connections) < in_flight:
            await self._connect()
        return [await self._prepare(connection) for connection in self.connections[:in_flight]]

    async def _prepare(self, connection: asyncpg.Connection) -> Insert:
        statement = await connection.prepare(INSERT_POSTGRES)

        async def insert() -> None:
            await statement.fetch(BODY)

        return insert

    async def close(self) -> None:
        for connection in self.connections:
            await connection.close()


class SqliteRows:
    """SQLite has one writer: more in flight would only queue, so the connection is used directly."""

    def __init__(self, url: str) -> None:
        self.connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)

    async def open(self) -> None:
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute(CREATE)

    async def inserts(self, in_flight: int) -> list[Insert]:
        async def insert() -> None:
            self.connection.execute(INSERT_SQLITE, (BODY,))

        return [insert]

    async def close(self) -> None:
        self.connection.close()


class RawSession:
    def __init__(self, rows: PostgresRows | SqliteRows) -> None:
        self.rows = rows

    async def open(self, worker: bool) -> Opened:
        await self.rows.open()
        return Opened()

    async def commits(self, seconds: float, in_flight: int) -> Commits:
        inserts = await self.rows.inserts(in_flight)
        started, cpu = time.perf_counter(), time.process_time()
        times = await asyncio.gather(*(_repeat(insert, started + seconds) for insert in inserts))
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
        each = [one for series in times for one in series]
        return Commits(len(each) / elapsed, 1000 * statistics.median(each), len(inserts), 1000 * cpu / len(each))

    async def close(self) -> None:
        await self.rows.close()


async def _repeat(insert: Insert, deadline: float) -> list[float]:
    times = []
    while (before := time.perf_counter()) < deadline:
        await insert()
        times.append(time.perf_counter() - before)
    return times


if __name__ == "__main__":
    rows = PostgresRows(sys.argv[1]) if sys.argv[1].startswith("postgresql") else SqliteRows(sys.argv[1])
    session = RawSession(rows)
    serve_pipe({"open": session.open, "commits": session.commits}, session.close, uvloop=True)
