"""Which database a URL means, and what else follows from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from edda.engine.settings import Settings
from edda.errors import AppError
from edda.storage.ports import Probe, Storage

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from edda.storage.alchemy import Sessions


def settings_for(url: str) -> Settings:
    """A file has no server that could restart, and a dead process is known at once by its lock."""
    local = urlsplit(url).scheme.partition("+")[0] in {"sqlite", "memory"}
    return Settings(takeover_grace=0.0, sweep=0.5) if local else Settings()


def open_storage(
    url: str, *, pool_size: int = 5, probe: Probe | None = None, now: Callable[[], int] = lambda: time.time_ns() // 1000
) -> Storage:
    """The adapter for a database URL, plain or with a driver's name in it."""
    scheme = urlsplit(url).scheme
    kind = scheme.partition("+")[0]
    plain = url.replace(scheme, kind, 1)
    if kind == "sqlite":
        from edda.storage.sqlite import SQLiteStorage

        return SQLiteStorage(_sqlite_path(plain), now=now, probe=probe)
    if kind in {"postgresql", "postgres"}:
        from edda.storage.postgres import PostgresStorage

        return PostgresStorage(plain, pool_size=pool_size, probe=probe)
    if kind in {"mysql", "mariadb"}:
        from edda.storage.mysql import MySQLStorage

        return MySQLStorage(plain, pool_size=pool_size, probe=probe)
    if kind == "memory":
        from edda.storage.memory import MemoryStorage

        return MemoryStorage(now=now, probe=probe)
    raise ValueError(
        f"db_url {_without_password(url)!r}: expected sqlite:///file.db, postgresql://..., mysql://... or memory://"
    )


def most_connections(pool_size: int = 5) -> int:
    """That one app opens to a server, if it uses everything at once.

    What it reads and claims with, `ctx.transaction()`, and people who look have `pool_size` each, and the sessions of
    steps three times as many. The journal, the heartbeat, the listener and migrations have one each.
    """
    return 6 * pool_size + 4


def open_sessions(
    url: str, storage: Storage, engine: AsyncEngine | None, pool_size: int, probe: Probe | None
) -> Sessions:
    """SQLAlchemy on the same database; imported only now."""
    if urlsplit(url).scheme.partition("+")[0] == "memory":
        raise AppError("ctx.session needs a database: memory:// has none; use sqlite:///file.db")
    try:
        from edda.storage.alchemy import Sessions
    except ImportError as error:
        raise AppError("ctx.session needs SQLAlchemy: pip install 'edda-framework[sqlalchemy]'") from error
    return Sessions(url, storage, engine=engine, pool_size=pool_size, probe=probe)


def _sqlite_path(url: str) -> str:
    path = url.removeprefix("sqlite://").partition("?")[0]
    if not path.startswith("/"):
        raise ValueError(
            f"db_url {url!r}: a relative file is sqlite:///name.db, an absolute one sqlite:////dir/name.db"
        )
    return path[1:]


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return url if parts.password is None else url.replace(f":{parts.password}@", ":***@", 1)
