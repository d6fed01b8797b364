"""Transactions that a Galera cluster refused: another node's came first, and nothing of them is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from edda.errors import StorageConflictError

from .pool import Pool
from .session import is_from_server

P = ParamSpec("P")
T = TypeVar("T")

_PAUSES = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.25, 0.25)
"""Seconds, at most. Callers have longer pauses of their own, and say so in the log: these are for the daily case."""


class _OnServer(Protocol):
    @property
    def _pool(self) -> Pool: ...


Self = TypeVar("Self", bound=_OnServer)


def repeated(
    method: Callable[Concatenate[Self, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Self, P], Coroutine[Any, Any, T]]:
    """For methods that are one transaction, or several of which each can be repeated. On a cluster a transaction is
    refused whenever another node writes one of its rows at the same time, which is no fault: it is sent again."""

    @wraps(method)
    async def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        for longest in _PAUSES:
            try:
                return await method(self, *args, **kwargs)
            except StorageConflictError as error:
                if not (self._pool.is_certified and is_from_server(error)):
                    raise
            await asyncio.sleep(longest * random.random())
        return await method(self, *args, **kwargs)

    return call
