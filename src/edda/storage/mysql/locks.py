"""Locks on rows of `edda_lock_bucket`, and the retry of transactions that a Galera cluster refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator, Set
from functools import wraps
from itertools import groupby
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from zlib import crc32

from edda.errors import StorageConflictError

from .connection import MySQLPool, is_from_server
from .statement import Statement, bind, quote_text

P = ParamSpec("P")
T = TypeVar("T")

_PAUSES = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.25, 0.25)
"""Seconds, at most. The callers' own retries have longer pauses and write log lines; refusals on a cluster are
normal."""


class _OnServer(Protocol):
    @property
    def _pool(self) -> MySQLPool: ...


Self = TypeVar("Self", bound=_OnServer)


def repeated(
    method: Callable[Concatenate[Self, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Self, P], Coroutine[Any, Any, T]]:
    """For methods that are one transaction, or several that can each be repeated. A cluster refuses a transaction
    whenever another node writes one of its rows at the same time; the method is then called again."""

    @wraps(method)
    async def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        for pause in _PAUSES:
            try:
                return await method(self, *args, **kwargs)
            except StorageConflictError as error:
                if not (self._pool.is_certified and is_from_server(error)):
                    raise
            await asyncio.sleep(pause * random.random())
        return await method(self, *args, **kwargs)

    return call


# FORCE INDEX: the optimizer likes to scan the small table, which would wait for every other lock.
LOCK_SHARED = b"SELECT b FROM edda_lock_bucket FORCE INDEX (PRIMARY) WHERE b IN (%b) ORDER BY b LOCK IN SHARE MODE"
LOCK_EXCLUSIVE = b"SELECT b FROM edda_lock_bucket FORCE INDEX (PRIMARY) WHERE b IN (%b) ORDER BY b FOR UPDATE"
WRITE = b"UPDATE edda_lock_bucket FORCE INDEX (PRIMARY) SET version = version + 1 WHERE b IN (%b) ORDER BY b"

_SIZE = 256
_KEYS, _IDS = _SIZE, 2 * _SIZE
"""The first buckets of keys and of events' ids; the buckets of types begin at 0."""
OUTBOX = 3 * _SIZE
"""One bucket for the whole outbox."""
EVENT_LOG = OUTBOX + 1
"""One bucket for pruning events and for backfilling their keys."""
_SLOTS = 8


def of_types(types: Iterable[str]) -> set[int]:
    return {crc32(quote_text(type)) % _SIZE for type in types}


def of_keys(keys: Iterable[bytes]) -> set[int]:
    return {_KEYS + crc32(key) % _SIZE for key in keys}


def of_ids(ids: Iterable[tuple[str, str]]) -> set[int]:
    return {_IDS + crc32(quote_text(source) + quote_text(id)) % _SIZE for source, id in ids}


def lock_shared(buckets: Iterable[int]) -> Statement:
    return bind(LOCK_SHARED, sorted(buckets))


def lock_exclusive(buckets: Iterable[int]) -> Statement:
    return bind(LOCK_EXCLUSIVE, sorted(buckets))


def write(buckets: Iterable[int]) -> Statement:
    return bind(WRITE, sorted(buckets))


def certify(bucket: int, node: int | None) -> Iterator[Statement]:
    """For a transaction that has locked a bucket and changes rows under it: on a cluster it writes the bucket too."""
    if node is not None:
        yield write([bucket])


def lock_types_shared(types: Iterable[str], node: int | None) -> Statement:
    """For accepting events. `node` is `MySQLSession.node`, here and below: None outside of a cluster."""
    if node is None:
        return lock_shared(of_types(types))
    return write(group + node % _SLOTS for group in _groups(types))


def lock_type(type: str, node: int | None) -> Statement:
    """For registering match paths."""
    if node is None:
        return lock_exclusive(of_types([type]))
    return write(group + slot for group in _groups([type]) for slot in range(_SLOTS))


def _groups(types: Iterable[str]) -> set[int]:
    """The first bucket of each type's group."""
    return {bucket - bucket % _SLOTS for bucket in of_types(types)}


def lock_events(keys: Iterable[bytes], ids: Iterable[tuple[str, str]], node: int | None) -> Statement:
    """For accepting events."""
    lock = lock_exclusive if node is None else write
    return lock(of_keys(keys) | of_ids(ids))


def lock_waits(keys: Iterable[bytes], exclusive: Iterable[bytes], node: int | None) -> Iterator[Statement]:
    """For registering waits: shared, but exclusive for the keys of exclusive waits, which take messages away."""
    if node is None:
        yield from lock_mixed(of_keys(keys), of_keys(exclusive))
    else:
        yield write(of_keys(keys))


def lock_mixed(shared: Set[int], exclusive: Set[int]) -> Iterator[Statement]:
    """Both kinds in one order: with one statement for each kind, two transactions could deadlock."""
    for is_exclusive, buckets in groupby(sorted(shared | exclusive), exclusive.__contains__):
        lock = lock_exclusive if is_exclusive else lock_shared
        yield lock(buckets)
