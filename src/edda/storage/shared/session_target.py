"""What a storage tells SQLAlchemy about its database, so that `ctx.session` is connected as the storage itself is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from edda.storage.ports import Dialect


class Connect(Protocol):
    def __call__(self) -> Awaitable[Any]: ...


def _no_arguments() -> Mapping[str, Any]:
    return {}


def _never() -> bool:
    return False


class SessionTarget(Struct, frozen=True):
    dialect: Dialect
    path: str = ""
    """The file, on SQLite."""
    connect: Connect | None = None
    """A new connection of the driver, on a server."""
    arguments: Callable[[], Mapping[str, Any]] = _no_arguments
    """For SQLAlchemy's adapter of that driver, asked for each connection."""
    is_pooled: Callable[[], bool] = _never
    """Whether consecutive transactions of one connection may run on different server connections."""
