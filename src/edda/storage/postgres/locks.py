"""Locks between those who store events and those who wait for them.

They are taken in the message that begins the transaction, ahead of any look: a statement sees what was committed when
it began, not when its locks came. Types come before keys, and each sorted, so nobody waits in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from .session import BEGIN

BUCKETS = 256
"""A lock for every key would fill the server's table of locks."""

# 4712 are types, 4713 are keys.
SHARE_TYPES = "SELECT pg_advisory_xact_lock_shared(4712, bucket) FROM unnest('{buckets}'::int[]) bucket"
HOLD_TYPES = SHARE_TYPES.replace("_shared", "")
SHARE_KEYS = SHARE_TYPES.replace("4712", "4713")
HOLD_KEYS = SHARE_KEYS.replace("_shared", "")


def share_keys(keys: Iterable[bytes]) -> str:
    """For those who register waits."""
    return _begin(_fill(SHARE_KEYS, keys))


def hold_keys(types: Iterable[str], keys: Iterable[bytes]) -> str:
    """For those who store events; nobody may learn a shape of their types meanwhile."""
    return _begin(_fill(SHARE_TYPES, map(_encoded, types)), _fill(HOLD_KEYS, keys))


def hold_type(type: str) -> str:
    """For those who learn a shape."""
    return _begin(_fill(HOLD_TYPES, [_encoded(type)]))


def _begin(*locks: str) -> str:
    return "; ".join((BEGIN, *locks))


def _fill(statement: str, names: Iterable[bytes]) -> str:
    buckets = sorted({crc32(name) % BUCKETS for name in names})
    return statement.replace("buckets", ",".join(map(str, buckets)))


def _encoded(type: str) -> bytes:
    return type.encode("utf-8", "surrogatepass")  # what is no text is refused by the database, with a name for it
