"""What acceptors and registrars lock before they look, always types before all else, and in this order.

InnoDB queues for a row's lock, so neither side starves the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from itertools import groupby
from zlib import crc32

from .statement import Statement, bind, text

# FORCE: a scan of the whole table, which is small, would wait for everybody.
SHARE = b"SELECT b FROM edda_bucket FORCE INDEX (PRIMARY) WHERE b IN (%b) ORDER BY b LOCK IN SHARE MODE"
HOLD = b"SELECT b FROM edda_bucket FORCE INDEX (PRIMARY) WHERE b IN (%b) ORDER BY b FOR UPDATE"

_SIZE = 256
_KEYS, _IDS = _SIZE, 2 * _SIZE
"""Where the buckets of keys and of events' ids begin; those of types come first."""
OUTBOX = 3 * _SIZE
"""One for all that is on its way out."""


def of_types(types: Iterable[str]) -> set[int]:
    return {crc32(text(type)) % _SIZE for type in types}


def of_keys(keys: Iterable[bytes]) -> set[int]:
    return {_KEYS + crc32(key) % _SIZE for key in keys}


def of_ids(ids: Iterable[tuple[str, str]]) -> set[int]:
    return {_IDS + crc32(text(source) + text(id)) % _SIZE for source, id in ids}


def share(buckets: Iterable[int]) -> Statement:
    return bind(SHARE, sorted(buckets))


def hold(buckets: Iterable[int]) -> Statement:
    return bind(HOLD, sorted(buckets))


def lock(shared: Set[int], held: Set[int]) -> Iterator[Statement]:
    """Both kinds in one order: two statements, one for each, could wait for each other's second."""
    for is_held, buckets in groupby(sorted(shared | held), held.__contains__):
        take = hold if is_held else share
        yield take(buckets)
