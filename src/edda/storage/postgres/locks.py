"""Advisory transaction locks: between acceptors of events and registrations of waits, and between outbox relayers.

They are taken in the message that begins the transaction, before any statement that reads: the snapshot of a statement
is as old as its start, not as its locks. Types come before keys, each sorted, so that no two transactions deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

from edda.core.model import Wait

from .connection import BEGIN

BUCKETS = 256
"""A lock for every key would fill the server's lock table."""

# 4712 are types, 4713 are keys, 4714 is the outbox.
LOCK_TYPES_SHARED = "SELECT pg_advisory_xact_lock_shared(4712, bucket) FROM unnest('{buckets}'::int[]) bucket"
LOCK_TYPES = LOCK_TYPES_SHARED.replace("_shared", "")
LOCK_KEYS_SHARED = LOCK_TYPES_SHARED.replace("4712", "4713")
LOCK_KEYS = LOCK_KEYS_SHARED.replace("_shared", "")
# Both kinds in one order: two transactions that take both kinds in two statements could deadlock.
LOCK_KEYS_MIXED = """
SELECT CASE WHEN bucket = ANY ('{exclusive}'::int[]) THEN pg_advisory_xact_lock(4713, bucket)
            ELSE pg_advisory_xact_lock_shared(4713, bucket) END FROM unnest('{buckets}'::int[]) bucket"""

LOCK_OUTBOX = f"{BEGIN}; SELECT pg_advisory_xact_lock(4714, 0)"
"""For transactions that claim outbox events or record results: none may send past an event that another postpones."""


def lock_wait_keys(waits: Sequence[Wait]) -> str:
    """For registering waits: shared, but exclusive for the keys of exclusive waits, which take messages away."""
    keys = [key for wait in waits for key in (wait.key, wait.target_key)]
    exclusive = [key for wait in waits if wait.exclusive for key in (wait.key, wait.target_key)]
    if not exclusive:
        return f"{BEGIN}; {LOCK_KEYS_SHARED.replace('buckets', _buckets(keys))}"
    locks = LOCK_KEYS_MIXED.replace("buckets", _buckets(keys)).replace("exclusive", _buckets(exclusive))
    return f"{BEGIN}; {locks}"


def lock_event_keys(types: Iterable[str], keys: Iterable[bytes]) -> str:
    """For storing events: no match paths of their types may be registered at the same time."""
    lock_types = LOCK_TYPES_SHARED.replace("buckets", _buckets(map(_encoded, types)))
    return f"{BEGIN}; {lock_types}; {LOCK_KEYS.replace('buckets', _buckets(keys))}"


def lock_key(key: bytes) -> str:
    """For taking a message without a wait."""
    return f"{BEGIN}; {LOCK_KEYS.replace('buckets', _buckets([key]))}"


def lock_type(type: str) -> str:
    """For registering match paths."""
    return f"{BEGIN}; {LOCK_TYPES.replace('buckets', _buckets([_encoded(type)]))}"


def _buckets(names: Iterable[bytes]) -> str:
    return ",".join(map(str, sorted({crc32(name) % BUCKETS for name in names})))


def _encoded(type: str) -> bytes:
    return type.encode("utf-8", "surrogatepass")  # the database refuses invalid text with a clear error
