"""How SQLAlchemy connects to the storage's database, so that `ctx.session` has the same hosts, options and settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import Struct

from edda.storage.ports import Dialect


class SessionTarget(Struct, frozen=True):
    dialect: Dialect
    path: str = ""
    """SQLite's file."""
    connect: Callable[[], Awaitable[Any]] | None = None
    """Makes a new connection of the driver; None on SQLite."""
    arguments: Callable[[], Mapping[str, Any]] = dict
    """The arguments of SQLAlchemy's adapter of the driver, called for each connection."""
    is_pooled: Callable[[], bool] = lambda: False
    """Whether consecutive transactions of one connection may run on different server connections."""
