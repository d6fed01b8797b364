"""The event log and the waits for its events: what an accepted event wakes and starts, and which waits of a batch find
an event in the log already."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from edda.core.model import (
    AcceptResult,
    AckInbox,
    EntryKind,
    Event,
    EventKey,
    MatchPaths,
    NewEvent,
    RunId,
    RunWrite,
    StagedEventRow,
    StagedKind,
    StoredEvent,
    Suspend,
    Wait,
)
from edda.errors import StorageConflictError
from edda.storage.shared.batches import receivers_of
from edda.storage.shared.rows import to_match_paths, to_staged_event, to_stored_event, to_wait

from . import runs
from .connection import Connection
from .threads import Part, read, transaction

_VERSION = "SELECT version FROM edda_event_type WHERE type = ?"
_INSERT = """
INSERT INTO edda_event (source, id, type, target, received_at, body) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (source, id) DO NOTHING RETURNING seq"""
# Not for an event that was pruned meanwhile: a key without its event must never be found.
_INSERT_KEY = """
INSERT INTO edda_event_key (key, seq) SELECT ?1, seq FROM edda_event WHERE seq = ?2
    ON CONFLICT (key, seq) DO NOTHING"""
_WAITING_RUNS = """
SELECT run_id, min(step) FROM edda_wait INDEXED BY edda_wait_key WHERE key = ? GROUP BY run_id"""
_TARGET_WAIT = """
SELECT run_id, step FROM edda_wait WHERE run_id = ?2 AND key = ?1 ORDER BY step LIMIT 1"""
_EXCLUSIVE_WAITS = f"{_WAITING_RUNS} ORDER BY run_id LIMIT ?"

_MATCH_PATHS = """
SELECT t.type, t.version, s.paths
  FROM json_each(?) i
 CROSS JOIN edda_event_type t ON t.type = i.value
 CROSS JOIN edda_match_paths s ON s.type = t.type
 ORDER BY t.type, s.paths"""
_FILLED_FROM = "SELECT filled_from FROM edda_match_paths WHERE type = ? AND paths = ?"
_INSERT_MATCH_PATHS = """
INSERT INTO edda_match_paths (type, paths, filled_from) VALUES (?, ?, (SELECT coalesce(max(seq), 0) FROM edda_event))"""
_RAISE_VERSION = """
INSERT INTO edda_event_type (type, version) VALUES (?, 1) ON CONFLICT (type) DO UPDATE SET version = version + 1"""
_SET_FILLED_FROM = "UPDATE edda_match_paths SET filled_from = min(filled_from, ?) WHERE type = ? AND paths = ?"

STORED_EVENT = "SELECT seq, received_at, source, id, type, target, body FROM edda_event"
_OF_TYPE = f"{STORED_EVENT} WHERE type = ? AND seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
_UNDER_KEY = """
SELECT e.seq, e.received_at, e.source, e.id, e.type, e.target, e.body
  FROM edda_event_key k CROSS JOIN edda_event e ON e.seq = k.seq
 WHERE k.key = ? AND k.seq > ? ORDER BY k.seq LIMIT ?"""
_BY_ID = f"{STORED_EVENT} WHERE source = ? AND id = ?"
_NEWEST = "SELECT max(seq) FROM edda_event"
_NEWEST_BEFORE = "SELECT seq FROM edda_event WHERE received_at < ? ORDER BY received_at DESC, seq DESC LIMIT 1"

INSERT_STAGED = "INSERT INTO edda_staged_event (kind, body) VALUES (?, ?)"
_FIRST_STAGED_DUE = "SELECT min(due) FROM edda_staged_event"
# By number, not by the index on `due`: few rows are not due yet, and no more rows are read than are wanted.
_STAGED = """
SELECT seq, kind, body FROM edda_staged_event NOT INDEXED WHERE seq > 0 AND due <= ? ORDER BY seq LIMIT ?"""
_DELETE_STAGED = "DELETE FROM edda_staged_event WHERE seq IN (SELECT value FROM json_each(?))"
_FIRST_MESSAGE = """
SELECT k.seq, k.key, e.body FROM edda_event_key k CROSS JOIN edda_event e ON e.seq = k.seq
 WHERE k.key = ? ORDER BY k.seq LIMIT 1"""
_STAGE_REDELIVERY = "INSERT INTO edda_staged_event (kind, body, due) VALUES ('redelivery', ?, ?) RETURNING seq"

_CANCEL_WAIT = "DELETE FROM edda_wait WHERE run_id = ? AND step = ?"
_RELEASE_ITEM = "UPDATE edda_inbox SET event = NULL, kind = 'late_event' WHERE run_id = ? AND inbox_no = ?"
_INBOX = "SELECT inbox_count, event_cursor FROM edda_open_run WHERE run_id = ?"
# The lowest number above the cursor that this run has not received.
_FIND_UNRECEIVED = """
SELECT k.seq FROM edda_event_key k
 WHERE k.key = ?1 AND k.seq > ?2
   AND NOT EXISTS (SELECT 1 FROM edda_inbox d WHERE d.event = k.seq AND d.run_id = ?3)
 ORDER BY k.seq LIMIT 1"""
# The same without a cursor.
_FIND_EXCLUSIVE = """
SELECT k.seq, k.key FROM edda_event_key k
 WHERE k.key = ?1 AND NOT EXISTS (SELECT 1 FROM edda_inbox d WHERE d.event = k.seq AND d.run_id = ?2)
 ORDER BY k.seq LIMIT ?3"""
_TAKE_MESSAGE = "DELETE FROM edda_event_key WHERE seq = ? AND key = ?"
# A batch whose answer was lost registers its waits again.
_REGISTER = """
INSERT INTO edda_wait (run_id, step, key, target_key, type, match, due, exclusive) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (run_id, step) DO NOTHING"""
_WAITS = "SELECT step, key, target_key, type, match, due, exclusive FROM edda_wait WHERE run_id = ? ORDER BY step"
_INSERT_EVENT_ITEM = """
INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value, event)
SELECT run_id, inbox_count, ?2, ?3, ?4, x'', ?5 FROM edda_open_run WHERE run_id = ?1"""


class SQLiteEvents(Part):
    @transaction
    def accept(
        self, db: Connection, events: Sequence[NewEvent], versions: Mapping[str, int], staged: Sequence[int] = ()
    ) -> AcceptResult | None:
        for type in {incoming.event.type for incoming in events}:
            row = db.row(_VERSION, (type,))
            if (row[0] if row else 0) != versions.get(type, 0):
                return None
        numbers = set(staged)
        if numbers and db.run(_DELETE_STAGED, (json.dumps(sorted(numbers)),)) != len(numbers):
            raise StorageConflictError("another process has moved some of these staged events into the log")
        now = self._now()
        new: set[int] = set()
        woke = False
        for position, incoming in enumerate(events):
            event = incoming.event
            row = db.row(_INSERT, (event.source, event.id, event.type, event.target, now, event.body))
            if row is not None:
                new.add(position)
                woke |= _deliver(db, incoming, int(row[0]), now)
        return AcceptResult(frozenset(new), woke)

    @read
    def match_paths(self, db: Connection, types: Sequence[str]) -> dict[str, MatchPaths]:
        return to_match_paths(db.rows(_MATCH_PATHS, (json.dumps(list(types)),)))

    @transaction
    def register_match_paths(self, db: Connection, type: str, paths: str) -> int:
        row = db.row(_FILLED_FROM, (type, paths))
        if row is None:
            db.run(_INSERT_MATCH_PATHS, (type, paths))
            db.run(_RAISE_VERSION, (type,))
            row = db.row(_FILLED_FROM, (type, paths))
        assert row is not None
        return int(row[0])

    @transaction
    def backfill_keys(
        self, db: Connection, type: str, paths: str, keys: Sequence[tuple[bytes, int]], after: int
    ) -> None:
        db.run_many(_INSERT_KEY, keys)
        db.run(_SET_FILLED_FROM, (after, type, paths))

    @read
    def events_of_type(self, db: Connection, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
        return tuple(map(to_stored_event, db.rows(_OF_TYPE, (type, after, upto, limit))))

    @read
    def events_under_key(self, db: Connection, key: bytes, after: int, limit: int) -> tuple[StoredEvent, ...]:
        return tuple(map(to_stored_event, db.rows(_UNDER_KEY, (key, after, limit))))

    @read
    def last_event(self, db: Connection, before: int | None = None) -> int:
        return last_event(db, before)

    @read
    def find_event(self, db: Connection, source: str, id: str) -> StoredEvent | None:
        row = db.row(_BY_ID, (source, id))
        return to_stored_event(row) if row else None

    @read
    def staged_events(self, db: Connection, limit: int) -> tuple[StagedEventRow, ...]:
        due, now = self._pool.cache.get(db, _first_staged_due), self._now()
        if due is None or due > now:
            return ()
        return tuple(map(to_staged_event, db.rows(_STAGED, (now, limit))))

    @read
    def waits(self, db: Connection, run_id: RunId) -> tuple[Wait, ...]:
        return tuple(map(to_wait, db.rows(_WAITS, (run_id,))))

    async def take_message(self, key: bytes, lease: int) -> StagedEventRow | None:
        """Reads first: without a message no other writer has to wait for this call."""
        if not await self._pool.cached_read(_has_message, key):
            return None
        return await self._take_message(key, lease)

    @transaction
    def _take_message(self, db: Connection, key: bytes, lease: int) -> StagedEventRow | None:
        first = db.row(_FIRST_MESSAGE, (key,))
        if first is None:
            return None
        *place, body = first
        db.run(_TAKE_MESSAGE, place)
        ((seq,),) = db.rows(_STAGE_REDELIVERY, (body, self._now() + lease))
        return StagedEventRow(seq, StagedKind.REDELIVERY, body)


def _deliver(db: Connection, incoming: NewEvent, seq: int, now: int) -> bool:
    """Whether a run received or was started by the event."""
    receivers = _waiting_runs(db, incoming)
    if receivers:
        deliver(db, EntryKind.EVENT, seq, sorted(receivers.items()), now)
    served = set(receivers)
    stored_keys = [
        key.stored_key
        for key in incoming.keys
        if not (key.exclusive and _deliver_exclusive(db, key, incoming.event, seq, served, now))
    ]
    if stored_keys:
        db.run_many(_INSERT_KEY, [(key, seq) for key in stored_keys])
    started = runs.start_runs(db, incoming.starts, now)  # their cursor is the newest event, which is this one
    return bool(served or started)


def _waiting_runs(db: Connection, incoming: NewEvent) -> dict[RunId, str]:
    """The runs that wait under a shared key of the event, each with its first waiting step."""
    receivers: dict[RunId, str] = {}
    target = incoming.event.target
    for key in incoming.keys:
        if key.exclusive:
            continue
        if target is None:
            found = db.rows(_WAITING_RUNS, (key.wait_key,))
        else:
            found = db.rows(_TARGET_WAIT, (key.wait_key, target))
        for run_id, step in found:
            receivers[run_id] = min(step, receivers.get(run_id, step))
    return receivers


def _deliver_exclusive(db: Connection, key: EventKey, event: Event, seq: int, served: set[RunId], now: int) -> bool:
    """Give the event to one run that waits under the key and has not received it by another key."""
    if event.target is None:
        found = db.rows(_EXCLUSIVE_WAITS, (key.wait_key, len(served) + 1))
    else:
        found = db.rows(_TARGET_WAIT, (key.wait_key, event.target))
    for run_id, step in found:
        if run_id not in served:
            deliver(db, EntryKind.MESSAGE, seq, [(run_id, step)], now)
            served.add(run_id)
            return True
    return False


def last_event(db: Connection, before: int | None) -> int:
    row = db.row(_NEWEST) if before is None else db.row(_NEWEST_BEFORE, (before,))
    return (row[0] or 0) if row else 0


def _first_staged_due(db: Connection) -> int | None:
    due: int | None = db.rows(_FIRST_STAGED_DUE)[0][0]
    return due


def _has_message(db: Connection, key: bytes) -> bool:
    return db.row(_FIRST_MESSAGE, (key,)) is not None


class FoundEvent(Struct, frozen=True):
    """An event that was in the log before the wait for it."""

    run_id: RunId
    seq: int
    step: str
    kind: EntryKind


def register_waits(db: Connection, batch: Sequence[RunWrite]) -> tuple[dict[RunId, frozenset[str]], list[FoundEvent]]:
    """Cancel waits, release inbox items and register waits of a batch.

    Returns the steps that were not registered, because their runs have inbox items to read first, and the events to
    deliver once the rest of the batch is written: before that a new run has no inbox.
    """
    unregistered: dict[RunId, frozenset[str]] = {}
    found: list[FoundEvent] = []
    for write in batch:
        if write.cancelled_waits:
            db.run_many(_CANCEL_WAIT, [(write.run_id, step) for step in write.cancelled_waits])
        if write.released_items:
            db.run_many(_RELEASE_ITEM, [(write.run_id, inbox_no) for inbox_no in write.released_items])
        if write.waits and (steps := _register_run(db, write, found)):
            unregistered[write.run_id] = steps
    return unregistered, found


def _register_run(db: Connection, write: RunWrite, found: list[FoundEvent]) -> frozenset[str]:
    numbers: dict[str, int] = {}
    if write.start is None:  # a new run has no event behind its cursor
        inbox = db.row(_INBOX, (write.run_id,))
        if inbox is None:
            return frozenset()
        inbox_count, event_cursor = inbox
        if isinstance(write.transition, AckInbox | Suspend) and write.transition.inbox_read != inbox_count:
            return frozenset(wait.step for wait in write.waits)
        for wait in write.waits:
            cursor = event_cursor if wait.cursor is None else wait.cursor
            keys = () if wait.exclusive else (wait.key, wait.target_key)
            events = [row[0] for key in keys if (row := db.row(_FIND_UNRECEIVED, (key, cursor, write.run_id)))]
            if events:
                numbers[wait.step] = min(events)
    steps = receivers_of(numbers)
    delivered = [FoundEvent(write.run_id, seq, step, EntryKind.EVENT) for seq, step in steps.items()]
    delivered += _take_exclusive(db, write, set(steps))
    found += sorted(delivered, key=lambda event: event.seq)
    unregistered = frozenset(numbers).union(event.step for event in delivered)
    waits = [wait for wait in write.waits if wait.step not in unregistered]
    rows = [(write.run_id, w.step, w.key, w.target_key, w.type, w.match, w.due, int(w.exclusive)) for w in waits]
    db.run_many(_REGISTER, rows)
    return unregistered


def _take_exclusive(db: Connection, write: RunWrite, received: set[int]) -> list[FoundEvent]:
    """Take a message for each exclusive wait, and none that another step of the run received."""
    taken: list[FoundEvent] = []
    for wait in write.waits:
        if wait.exclusive and (seq := _take(db, write.run_id, wait, received)):
            taken.append(FoundEvent(write.run_id, seq, wait.step, EntryKind.MESSAGE))
            received.add(seq)
    return taken


def _take(db: Connection, run_id: RunId, wait: Wait, received: Collection[int]) -> int | None:
    limit = len(received) + 1
    rows = [row for key in (wait.key, wait.target_key) for row in db.rows(_FIND_EXCLUSIVE, (key, run_id, limit))]
    lowest: tuple[int, bytes] | None = min((row for row in rows if row[0] not in received), default=None)
    if lowest is None:
        return None
    db.run(_TAKE_MESSAGE, lowest)
    return lowest[0]


def deliver(db: Connection, kind: EntryKind, seq: int, receivers: Sequence[tuple[RunId, str]], now: int) -> None:
    """Put one event into the inbox of each (run, step), and delete the waits of these steps."""
    db.run_many(_CANCEL_WAIT, receivers)
    db.run_many(runs.WAKE, [(run_id,) for run_id, _ in receivers])
    db.run_many(_INSERT_EVENT_ITEM, [(run_id, kind.value, step, now, seq) for run_id, step in receivers])
