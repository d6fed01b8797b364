"""Locks between those who store events and those who wait for them, and between those who send events to others.

They are taken in the message that begins the transaction, ahead of any look: a statement sees what was committed when
it began, not when its locks came. Types come before keys, and each sorted, so nobody waits in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

from edda.core.model import Wait

from .session import BEGIN

BUCKETS = 256
"""A lock for every key would fill the server's table of locks."""

# 4712 are types, 4713 are keys, 4714 is the outbox.
SHARE_TYPES = "SELECT pg_advisory_xact_lock_shared(4712, bucket) FROM unnest('{buckets}'::int[]) bucket"
HOLD_TYPES = SHARE_TYPES.replace("_shared", "")
SHARE_KEYS = SHARE_TYPES.replace("4712", "4713")
HOLD_KEYS = SHARE_KEYS.replace("_shared", "")
# In one order, whatever the kind: two who take both kinds would else wait for each other.
TAKE_KEYS = """
SELECT CASE WHEN bucket = ANY ('{alone}'::int[]) THEN pg_advisory_xact_lock(4713, bucket)
            ELSE pg_advisory_xact_lock_shared(4713, bucket) END FROM unnest('{buckets}'::int[]) bucket"""

HOLD_OUTBOX = f"{BEGIN}; SELECT pg_advisory_xact_lock(4714, 0)"
"""For those who claim and settle: what one of them holds up, no other may send meanwhile."""


def lock_wait_keys(waits: Iterable[Wait]) -> str:
    """For those who register waits; who takes a message away from the others has its keys alone."""
    keys: dict[bytes, bool] = {}
    for wait in waits:
        for key in (wait.key, wait.own_key):
            keys[key] = keys.get(key, False) or wait.once
    alone = [key for key, once in keys.items() if once]
    if not alone:
        return _begin(_fill(SHARE_KEYS, keys))
    return _begin(_fill(TAKE_KEYS, keys).replace("alone", _buckets(alone)))


def lock_event_keys(types: Iterable[str], keys: Iterable[bytes]) -> str:
    """For those who store events; nobody may learn a shape of their types meanwhile."""
    return _begin(_fill(SHARE_TYPES, map(_encoded, types)), _fill(HOLD_KEYS, keys))


def lock_key(key: bytes) -> str:
    """For those who take a message without waiting."""
    return _begin(_fill(HOLD_KEYS, [key]))


def lock_type(type: str) -> str:
    """For those who learn a shape."""
    return _begin(_fill(HOLD_TYPES, [_encoded(type)]))


def _begin(*locks: str) -> str:
    return "; ".join((BEGIN, *locks))


def _fill(statement: str, names: Iterable[bytes]) -> str:
    return statement.replace("buckets", _buckets(names))


def _buckets(names: Iterable[bytes]) -> str:
    return ",".join(map(str, sorted({crc32(name) % BUCKETS for name in names})))


def _encoded(type: str) -> bytes:
    return type.encode("utf-8", "surrogatepass")  # what is no text is refused by the database, with a name for it
