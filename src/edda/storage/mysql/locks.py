"""Locks on rows of `edda_bucket`, and transactions that a Galera cluster did not certify."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator, Set
from functools import wraps
from itertools import groupby
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from zlib import crc32

from edda.errors import StorageConflictError

from .pool import Pool
from .session import is_from_server
from .statement import Statement, bind, quote_text

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


# FORCE: a scan of the whole table, which is small, would wait for everybody.
SHARE = b"SELECT b FROM edda_bucket FORCE INDEX (PRIMARY) WHERE b IN (%b) ORDER BY b LOCK IN SHARE MODE"
HOLD = b"SELECT b FROM edda_bucket FORCE INDEX (PRIMARY) WHERE b IN (%b) ORDER BY b FOR UPDATE"
WRITE = b"UPDATE edda_bucket FORCE INDEX (PRIMARY) SET turn = turn + 1 WHERE b IN (%b) ORDER BY b"

_SIZE = 256
_KEYS, _IDS = _SIZE, 2 * _SIZE
"""Where the buckets of keys and of events' ids begin; those of types come first."""
OUTBOX = 3 * _SIZE
"""One for all that is on its way out."""
LOG = OUTBOX + 1
"""One for those who remove old events or give them keys."""
_SLOTS = 8


def of_types(types: Iterable[str]) -> set[int]:
    return {crc32(quote_text(type)) % _SIZE for type in types}


def of_keys(keys: Iterable[bytes]) -> set[int]:
    return {_KEYS + crc32(key) % _SIZE for key in keys}


def of_ids(ids: Iterable[tuple[str, str]]) -> set[int]:
    return {_IDS + crc32(quote_text(source) + quote_text(id)) % _SIZE for source, id in ids}


def lock_shared(buckets: Iterable[int]) -> Statement:
    return bind(SHARE, sorted(buckets))


def lock_exclusive(buckets: Iterable[int]) -> Statement:
    return bind(HOLD, sorted(buckets))


def write(buckets: Iterable[int]) -> Statement:
    return bind(WRITE, sorted(buckets))


def certify(bucket: int, node: int | None) -> Iterator[Statement]:
    """For who holds a bucket and goes on to change what it stands for."""
    if node is not None:
        yield write([bucket])


def share_types(types: Iterable[str], node: int | None) -> Statement:
    """For who brings events. `node` is the session's, here and below: None outside of a cluster."""
    if node is None:
        return lock_shared(of_types(types))
    return write(group + node % _SLOTS for group in _groups(types))


def hold_type(type: str, node: int | None) -> Statement:
    """For who learns a shape."""
    if node is None:
        return lock_exclusive(of_types([type]))
    return write(group + slot for group in _groups([type]) for slot in range(_SLOTS))


def _groups(types: Iterable[str]) -> set[int]:
    """The first bucket of each type's group."""
    return {bucket - bucket % _SLOTS for bucket in of_types(types)}


def hold_events(keys: Iterable[bytes], ids: Iterable[tuple[str, str]], node: int | None) -> Statement:
    """For who brings events."""
    take = lock_exclusive if node is None else write
    return take(of_keys(keys) | of_ids(ids))


def lock_waits(keys: Iterable[bytes], single: Iterable[bytes], node: int | None) -> Iterator[Statement]:
    """For who registers waits: shared, but alone with keys whose messages it may take away."""
    if node is None:
        yield from lock_mixed(of_keys(keys), of_keys(single))
    else:
        yield write(of_keys(keys))


def lock_mixed(shared: Set[int], held: Set[int]) -> Iterator[Statement]:
    """Both kinds in one order: two statements, one for each, could wait for each other's second."""
    for is_held, buckets in groupby(sorted(shared | held), held.__contains__):
        take = lock_exclusive if is_held else lock_shared
        yield take(buckets)
