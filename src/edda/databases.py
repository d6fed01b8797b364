"""Opens the storage and the SQLAlchemy sessions for a database URL."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from edda.core.redact import show_url
from edda.engine.client import CallLimit
from edda.engine.settings import Settings
from edda.errors import AppError, ConfigurationError, MigrationError
from edda.storage.ports import StatementProbe, Storage
from edda.storage.shared.url_options import refuse_unknown_options, split_options

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from edda.storage.sqlalchemy_sessions import Sessions


DEFAULT_URL = "sqlite:///edda.db"


def system_time() -> int:
    return time.time_ns() // 1000


def choose_url(owner: str, given: str | None, engine: AsyncEngine | None = None) -> str:
    """The URL that was given to the constructor `owner`, else that of the engine, of EDDA_DB_URL, or the default."""
    if given is not None and not isinstance(given, str):  # its text is not shown: it may have a password
        raise TypeError(
            f"{owner}(db_url=...): expected the URL of the database as a str, not {type(given).__name__}; write it "
            'like db_url="sqlite:///shop.db" or db_url="postgresql://user@host/shop"'
        )
    if given == "":  # usually from an unset variable: the default would silently select another database
        raise ValueError(f"{owner}(db_url=''): the URL of the database is empty; leave it out for EDDA_DB_URL")
    return given or (url_of(engine) if engine is not None else None) or os.environ.get("EDDA_DB_URL") or DEFAULT_URL


def settings_for(url: str) -> Settings:
    """On a file or in memory no server restarts, and a process that died is noticed at once by its lock file."""
    is_local = urlsplit(url).scheme.partition("+")[0] in {"sqlite", "memory"}
    return Settings(takeover_grace=0.0, sweep=0.5) if is_local else Settings()


def open_storage(
    url: str,
    *,
    pool_size: int = 5,
    probe: StatementProbe | None = None,
    now: Callable[[], int] = system_time,
) -> Storage:
    """The storage for a database URL, with or without the name of a driver in its scheme."""
    scheme = urlsplit(url).scheme
    kind = scheme.partition("+")[0]
    plain = url.replace(scheme, kind, 1)
    if kind == "sqlite":
        from edda.storage.sqlite import SQLiteStorage

        return SQLiteStorage(_sqlite_path(plain), now=now, probe=probe)
    if "://" not in url:
        kind = ""
    _check_host_and_port(url)
    _check_database(url, kind)
    if kind in {"postgresql", "postgres"}:
        with _driver("asyncpg", "postgres"):
            from edda.storage.postgres import PostgresStorage

        return PostgresStorage(plain, pool_size=pool_size, probe=probe)
    if kind in {"mysql", "mariadb"}:
        with _driver("asyncmy", "mysql"):
            from edda.storage.mysql import MySQLStorage

        return MySQLStorage(plain, pool_size=pool_size, probe=probe)
    if kind == "memory":
        from edda.storage.memory.storage import MemoryStorage

        refuse_unknown_options(split_options(url)[1], (), "memory://")
        return MemoryStorage(now=now, probe=probe)
    hint = ""
    if url.strip()[:1] in ("'", '"'):
        hint = "; leave out the quotes"
    elif "://" not in url and url.endswith((".db", ".sqlite", ".sqlite3")):  # many libraries take the name of a file
        hint = f"; for this file it is sqlite:///{url}"
    raise ValueError(
        f"db_url {show_url(url)!r}: expected sqlite:///file.db, postgresql://..., mysql://... or memory://{hint}"
    )


def _check_database(url: str, kind: str) -> None:
    """MySQL would fail later with an error that names another cause; PostgreSQL's client library would connect to the
    database with the name of the operating system's user, and the app would create its tables there."""
    parts = urlsplit(url)
    has_database = parts.path.strip("/") != ""
    if kind in {"mysql", "mariadb"} and not has_database:
        raise ValueError(f"db_url {show_url(url)!r}: no database is named; expected mysql://user@host/DATABASE")
    if kind in {"postgresql", "postgres"} and not (parts.netloc or has_database or parts.query):
        raise ValueError(f"db_url {show_url(url)!r}: no database is named; expected postgresql://user@host/DATABASE")


@contextmanager
def _driver(package: str, extra: str) -> Iterator[None]:
    """Around an import that needs the driver: a missing driver becomes an error that says what to install."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise AppError(
            f"{extra} databases need the driver {package}, which is not installed: pip install "
            f"'edda-framework[{extra}]'"
        ) from error


async def prepare_schema(storage: Storage, limit: CallLimit, owner: str, auto_migrate: bool) -> None:
    """Apply pending migrations of the open storage, or raise `MigrationError`."""
    async with limit.call(f"starting {owner}: reading the version of its tables"):
        pending = await storage.pending_migrations()
    if pending and auto_migrate:
        await storage.migrate()  # without a time limit: it may change a large table
    elif pending:
        raise MigrationError(
            f"{owner}: the database lacks {', '.join(pending)}: run `edda migrate`, or use auto_migrate=True"
        )


async def close_storage(storage: Storage, limit: CallLimit) -> None:
    try:
        async with asyncio.timeout(limit.seconds):
            await storage.close()
    except TimeoutError:  # the server does not answer, or another process has locked the file
        storage.kill()


def max_connections(pool_size: int = 5) -> int:
    """How many connections one app opens to a server at most.

    Reads and claims, `ctx.transaction()`, and the queries of people have a pool of `pool_size` each; the sessions of
    steps have one of three times that size. The journal, the heartbeat, the listener and migrations have one connection
    each.
    """
    return 6 * pool_size + 4


def open_sessions(
    storage: Storage, engine: AsyncEngine | None, pool_size: int, probe: StatementProbe | None
) -> Sessions:
    """Sessions on the storage's database. Imports SQLAlchemy, which is an optional dependency."""
    target = storage.session_target()
    try:
        from edda.storage.sqlalchemy_sessions import Sessions
    except ImportError as error:
        raise ConfigurationError("ctx.session needs SQLAlchemy: pip install 'edda-framework[sqlalchemy]'") from error
    return Sessions(target, storage, engine=engine, pool_size=pool_size, probe=probe)


def url_of(engine: AsyncEngine) -> str:
    """The URL of the database of a user's engine, without options that only its driver understands."""
    url = engine.url.render_as_string(hide_password=False)
    known = _options_of(urlsplit(url).scheme.partition("+")[0])
    bare, options = split_options(url)
    kept = [(name, value) for name, values in options.items() if name in known for value in values]
    return f"{bare}?{urlencode(kept)}" if kept else bare


def _options_of(kind: str) -> frozenset[str]:
    if kind in {"postgresql", "postgres"}:
        from edda.storage.postgres import target

        return target.KNOWN_OPTIONS
    if kind in {"mysql", "mariadb"}:
        from edda.storage.mysql import connection

        return connection.KNOWN_OPTIONS
    return frozenset()


async def check_engine(url: str, engine: AsyncEngine, worker: str) -> None:
    """Raise `AppError` unless the user's engine leads to the database of the runs, which has this worker's row.

    In another database the step commit of a step that uses `ctx.session` would never find its run, and the engine would
    run the step again and again.
    """
    from sqlalchemy import text
    from sqlalchemy.exc import DBAPIError

    engine_url = engine.url.render_as_string(hide_password=True)
    try:
        async with engine.connect() as connection:
            found = await connection.execute(text("SELECT id FROM edda_worker WHERE id = :id"), {"id": worker})
            is_found, why = found.first() is not None, "the row of this app's worker is not in its edda_worker"
    except DBAPIError as error:
        is_found, why = False, f"edda_worker cannot be read there ({error.orig})"
    if not is_found:
        raise AppError(
            f"engine= leads to {engine_url}, and db_url to {show_url(url)}, which is another database: {why}. "
            "Steps write into the database of their runs: give both the same one, or leave out one of them."
        )


def _check_host_and_port(url: str) -> None:
    """Raise an error without the text of the port: Python's own error repeats it, and it may be the half of a password
    that has a `/` in it."""
    try:
        parts = urlsplit(url)
        is_unreadable = "," not in parts.netloc and parts.port == 0
    except ValueError:
        is_unreadable = True
    if is_unreadable:
        raise ValueError(
            f"db_url {show_url(url)!r}: its host and port cannot be read; write special characters of the password "
            "percent-encoded: / is %2F, @ is %40, # is %23, ? is %3F, : is %3A"
        ) from None


def _sqlite_path(url: str) -> str:
    bare, options = split_options(url)
    refuse_unknown_options(options, (), "SQLite")
    path = bare.removeprefix("sqlite://")
    if not path.startswith("/"):
        raise ValueError(
            f"db_url {show_url(url)!r}: a relative file is sqlite:///name.db, an absolute one sqlite:////dir/name.db"
        )
    return path[1:]
