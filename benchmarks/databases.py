"""A fresh database for every measurement, gone afterwards."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from tests.databases import Server, own_mysql, postgres

POSTGRES = "postgresql"
SQLITE = "sqlite"
MYSQL = "mysql"
KINDS = (POSTGRES, SQLITE, MYSQL)

COMMITS = "SELECT xact_commit FROM pg_stat_database WHERE datname = $1"
EVENTS = "SELECT count(*) FROM edda_event"
SETTINGS = "SELECT name, setting FROM pg_settings WHERE name = ANY ($1)"
SETTINGS_OF_INTEREST = ("server_version", "fsync", "synchronous_commit", "shared_buffers", "max_connections")


@dataclass(frozen=True)
class Database:
    kind: str
    url: str


def server() -> Server:
    found = postgres()
    if found is None:
        raise SystemExit("no PostgreSQL found and none installed: set EDDA_TEST_POSTGRES_URL or use --databases sqlite")
    return found


def mysql_server() -> Server:
    """One of our own: queries are counted by the server as a whole, so nobody else may use it."""
    found = own_mysql()
    if found is None:
        raise SystemExit("neither MariaDB nor MySQL is installed: use --databases postgresql,sqlite")
    return found


SERVERS = {POSTGRES: server, MYSQL: mysql_server}


def find(kinds: Iterable[str]) -> None:
    """What is missing is said before an hour of measuring, not in the middle of it."""
    for kind in SERVERS.keys() & set(kinds):
        SERVERS[kind]()


def fresh(kind: str) -> AbstractContextManager[Database]:
    return fresh_on(SERVERS[kind](), kind) if kind in SERVERS else fresh_sqlite()


@contextmanager
def fresh_on(found: Server, kind: str) -> Iterator[Database]:
    url = found.create()
    try:
        yield Database(kind, url)
    finally:
        found.drop(url)


@contextmanager
def fresh_sqlite() -> Iterator[Database]:
    with tempfile.TemporaryDirectory(prefix="edda_bench_") as directory:
        path = Path(directory) / "bench.db"
        # WAL stays with the file: peers that do not ask for it get it too, and are up to twice as fast.
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        yield Database(SQLITE, f"sqlite:///{path}")


async def commits(database: Database) -> int | None:
    """Exact only when the sessions that committed are closed: a server process reports its count when it ends."""
    if database.kind != POSTGRES:
        return None
    ((count,),) = await ask_server(COMMITS, urlsplit(database.url).path[1:])
    return int(count)


async def count_events(database: Database) -> int:
    if database.kind == SQLITE:
        with closing(sqlite3.connect(database.url.removeprefix("sqlite:///"))) as connection:
            return int(connection.execute(EVENTS).fetchone()[0])
    connected = await asyncpg.connect(database.url)
    try:
        return int(await connected.fetchval(EVENTS))
    finally:
        await connected.close()


async def server_settings() -> dict[str, str]:
    return {row["name"]: row["setting"] for row in await ask_server(SETTINGS, SETTINGS_OF_INTEREST)}


async def ask_server(query: str, argument: object) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(server().url)
    try:
        return await connection.fetch(query, argument)
    finally:
        await connection.close()
