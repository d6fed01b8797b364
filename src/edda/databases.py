"""Which database a URL means, and what else follows from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from edda.core.urls import show_url
from edda.engine.settings import Settings
from edda.errors import AppError, ConfigurationError
from edda.storage.ports import StatementProbe, Storage
from edda.storage.shared.url_options import refuse_unknown_options, split_options

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from edda.storage.sqlalchemy_sessions import Sessions


def settings_for(url: str) -> Settings:
    """A file has no server that could restart, and a dead process is known at once by its lock."""
    local = urlsplit(url).scheme.partition("+")[0] in {"sqlite", "memory"}
    return Settings(takeover_grace=0.0, sweep=0.5) if local else Settings()


def open_storage(
    url: str,
    *,
    pool_size: int = 5,
    probe: StatementProbe | None = None,
    now: Callable[[], int] = lambda: time.time_ns() // 1000,
) -> Storage:
    """The adapter for a database URL, plain or with a driver's name in it."""
    scheme = urlsplit(url).scheme
    kind = scheme.partition("+")[0]
    plain = url.replace(scheme, kind, 1)
    if kind == "sqlite":
        from edda.storage.sqlite import SQLiteStorage

        return SQLiteStorage(_sqlite_path(plain), now=now, probe=probe)
    if "://" not in url:
        kind = ""
    _check_place(url)
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
    quoted = "; leave out the quotes" if url.strip()[:1] in ("'", '"') else _file_hint(url)
    raise ValueError(
        f"db_url {show_url(url)!r}: expected sqlite:///file.db, postgresql://..., mysql://... or memory://{quoted}"
    )


def _file_hint(url: str) -> str:
    """The name of a file is given as it is to many other libraries."""
    is_file = "://" not in url and url.endswith((".db", ".sqlite", ".sqlite3"))
    return f"; of this file it is sqlite:///{url}" if is_file else ""


@contextmanager
def _driver(package: str, extra: str) -> Iterator[None]:
    """Around the import of what needs it."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise AppError(
            f"{extra} databases need the driver {package}, which is not installed: pip install "
            f"'edda-framework[{extra}]'"
        ) from error


def max_connections(pool_size: int = 5) -> int:
    """That one app opens to a server, if it uses everything at once.

    What it reads and claims with, `ctx.transaction()`, and people who look have `pool_size` each, and the sessions of
    steps three times as many. The journal, the heartbeat, the listener and migrations have one each.
    """
    return 6 * pool_size + 4


def open_sessions(
    storage: Storage, engine: AsyncEngine | None, pool_size: int, probe: StatementProbe | None
) -> Sessions:
    """SQLAlchemy on the storage's own database; imported only now."""
    target = storage.session_target()
    try:
        from edda.storage.sqlalchemy_sessions import Sessions
    except ImportError as error:
        raise ConfigurationError("ctx.session needs SQLAlchemy: pip install 'edda-framework[sqlalchemy]'") from error
    return Sessions(target, storage, engine=engine, pool_size=pool_size, probe=probe)


def url_of(engine: AsyncEngine) -> str:
    """Of the database that a user's engine is on. Options that only its driver understands are left out."""
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
        from edda.storage.mysql import pool

        return pool.KNOWN_OPTIONS
    return frozenset()


async def check_engine(url: str, engine: AsyncEngine, worker: str) -> None:
    """Whether the user's engine leads to the database of the runs: there, and nowhere else, is this worker's row.

    Elsewhere the record of a step that uses `ctx.session` would not find its run, and the step begin again, for ever.
    """
    from sqlalchemy import text
    from sqlalchemy.exc import DBAPIError

    where = engine.url.render_as_string(hide_password=True)
    try:
        async with engine.connect() as connection:
            found = await connection.execute(text("SELECT id FROM edda_worker WHERE id = :id"), {"id": worker})
            is_there, why = found.first() is not None, "the row of this app's worker is not in its edda_worker"
    except DBAPIError as error:
        is_there, why = False, f"edda_worker cannot be read there ({error.orig})"
    if not is_there:
        raise AppError(
            f"engine= leads to {where}, and db_url to {show_url(url)}, which is another database: {why}. "
            "Steps write into the database of their runs: give both the same one, or leave out one of them."
        )


def _check_place(url: str) -> None:
    """Python's own words for a port that is none repeat it, and it may be the half of a password with a `/` in it."""
    try:
        parts = urlsplit(url)
        is_odd = "," not in parts.netloc and parts.port == 0
    except ValueError:
        is_odd = True
    if is_odd:
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
