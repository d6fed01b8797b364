"""The log of events: what is accepted, what it wakes and starts, and what it is found by."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edda.core.model import AcceptResult, EntryKind, Event, EventKey, MatchPaths, NewEvent, RunId, StoredEvent

from . import runs, staged_events, waits
from .connection import Connection

_VERSION = "SELECT version FROM edda_event_type WHERE type = ?"
_INSERT = """
INSERT INTO edda_event (source, id, type, target, received_at, body) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (source, id) DO NOTHING RETURNING seq"""
# Not for an event that was pruned meanwhile: a key without its event must never be found.
_KEY = """
INSERT INTO edda_event_key (key, seq) SELECT ?1, seq FROM edda_event WHERE seq = ?2
    ON CONFLICT (key, seq) DO NOTHING"""
_TAKERS = """
SELECT run_id, min(step) FROM edda_wait INDEXED BY edda_wait_key WHERE key = ? GROUP BY run_id"""
_TARGET = """
SELECT run_id, step FROM edda_wait WHERE run_id = ?2 AND key = ?1 ORDER BY step LIMIT 1"""
_COMPETING_WAITS = f"{_TAKERS} ORDER BY run_id LIMIT ?"

_SHAPES = """
SELECT t.type, t.version, s.shape
  FROM json_each(?) i
 CROSS JOIN edda_event_type t ON t.type = i.value
 CROSS JOIN edda_shape s ON s.type = t.type
 ORDER BY t.type, s.shape"""
_FILLED = "SELECT filled_from FROM edda_shape WHERE type = ? AND shape = ?"
_LEARN = """
INSERT INTO edda_shape (type, shape, filled_from) VALUES (?, ?, (SELECT coalesce(max(seq), 0) FROM edda_event))"""
_RAISE = """
INSERT INTO edda_event_type (type, version) VALUES (?, 1) ON CONFLICT (type) DO UPDATE SET version = version + 1"""
_FILL = "UPDATE edda_shape SET filled_from = min(filled_from, ?) WHERE type = ? AND shape = ?"

STORED = "SELECT seq, received_at, source, id, type, target, body FROM edda_event"
_LOG = f"{STORED} WHERE type = ? AND seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
_PAGE = """
SELECT e.seq, e.received_at, e.source, e.id, e.type, e.target, e.body
  FROM edda_event_key k CROSS JOIN edda_event e ON e.seq = k.seq
 WHERE k.key = ? AND k.seq > ? ORDER BY k.seq LIMIT ?"""
_BY_ID = f"{STORED} WHERE source = ? AND id = ?"
_NEWEST = "SELECT max(seq) FROM edda_event"
_NEWEST_BEFORE = "SELECT seq FROM edda_event WHERE received_at < ? ORDER BY received_at DESC, seq DESC LIMIT 1"


def accept(
    db: Connection, post: Sequence[NewEvent], versions: Mapping[str, int], forwarded: Sequence[int], now: int
) -> AcceptResult | None:
    if not _is_current(db, post, versions):
        return None
    staged_events.remove(db, forwarded)
    fresh: set[int] = set()
    woke = False
    for position, incoming in enumerate(post):
        seq = _insert(db, incoming.event, now)
        if seq is not None:
            fresh.add(position)
            woke |= _deliver(db, incoming, seq, now)
    return AcceptResult(frozenset(fresh), woke)


def _is_current(db: Connection, post: Iterable[NewEvent], versions: Mapping[str, int]) -> bool:
    for type in {incoming.event.type for incoming in post}:
        row = db.row(_VERSION, (type,))
        if (row[0] if row else 0) != versions.get(type, 0):
            return False
    return True


def _insert(db: Connection, event: Event, now: int) -> int | None:
    row = db.row(_INSERT, (event.source, event.id, event.type, event.target, now, event.body))
    return int(row[0]) if row else None


def _deliver(db: Connection, incoming: NewEvent, seq: int, now: int) -> bool:
    """Whether there is something to do for somebody."""
    takers = _waiting_runs(db, incoming)
    if takers:
        waits.deliver(db, EntryKind.EVENT, seq, sorted(takers.items()), now)
    had = set(takers)
    kept = [
        key.kept
        for key in incoming.keys
        if not (key.once and _deliver_exclusive(db, key, incoming.event, seq, had, now))
    ]
    if kept:
        db.run_many(_KEY, [(key, seq) for key in kept])
    started = runs.start(db, incoming.starts, now)  # they see what comes after the newest event, which is this one
    return bool(had or started)


def _waiting_runs(db: Connection, incoming: NewEvent) -> dict[RunId, str]:
    """At most one wait of each run: that of the first step."""
    takers: dict[RunId, str] = {}
    target = incoming.event.target
    for key in incoming.keys:
        if key.once:
            continue
        found = db.rows(_TAKERS, (key.plain,)) if target is None else db.rows(_TARGET, (key.plain, target))
        for run_id, step in found:
            takers[run_id] = min(step, takers.get(run_id, step))
    return takers


def _deliver_exclusive(db: Connection, key: EventKey, event: Event, seq: int, had: set[RunId], now: int) -> bool:
    """To one of those who wait under the key, but not to one who has the event by another."""
    if event.target is None:
        found = db.rows(_COMPETING_WAITS, (key.plain, len(had) + 1))
    else:
        found = db.rows(_TARGET, (key.plain, event.target))
    for run_id, step in found:
        if run_id not in had:
            waits.deliver(db, EntryKind.MESSAGE, seq, [(run_id, step)], now)
            had.add(run_id)
            return True
    return False


def shapes(db: Connection, types: Sequence[str]) -> dict[str, MatchPaths]:
    versions: dict[str, int] = {}
    known: defaultdict[str, list[str]] = defaultdict(list)
    for type, version, shape in db.rows(_SHAPES, (json.dumps(list(types)),)):
        versions[type] = version
        known[type].append(shape)
    return {type: MatchPaths(version, tuple(known[type])) for type, version in versions.items()}


def learn(db: Connection, type: str, shape: str) -> int:
    row = db.row(_FILLED, (type, shape))
    if row is None:
        db.run(_LEARN, (type, shape))
        db.run(_RAISE, (type,))
        row = db.row(_FILLED, (type, shape))
    assert row is not None
    return int(row[0])


def fill(db: Connection, type: str, shape: str, keys: Sequence[tuple[bytes, int]], after: int) -> None:
    db.run_many(_KEY, keys)
    db.run(_FILL, (after, type, shape))


def log(db: Connection, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
    return tuple(map(row_to_event, db.rows(_LOG, (type, after, upto, limit))))


def page(db: Connection, key: bytes, after: int, limit: int) -> tuple[StoredEvent, ...]:
    return tuple(map(row_to_event, db.rows(_PAGE, (key, after, limit))))


def last_event(db: Connection, before: int | None) -> int:
    row = db.row(_NEWEST) if before is None else db.row(_NEWEST_BEFORE, (before,))
    return (row[0] or 0) if row else 0


def find_event(db: Connection, source: str, id: str) -> StoredEvent | None:
    row = db.row(_BY_ID, (source, id))
    return row_to_event(row) if row else None


def row_to_event(row: Sequence[Any]) -> StoredEvent:
    seq, received_at, *event = row
    return StoredEvent(seq, received_at, Event(*event))
