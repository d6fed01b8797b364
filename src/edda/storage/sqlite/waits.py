"""Waits for events: registered with a batch, or answered by an event that is there already."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from msgspec import Struct

from edda.core.model import AckInbox, EntryKind, RunId, RunWrite, Suspend, Wait

from .connection import Connection
from .runs import WAKE

_DROP = "DELETE FROM edda_wait WHERE run_id = ? AND step = ?"
_FREE = "UPDATE edda_delivery SET event = NULL, kind = 'stray' WHERE run_id = ? AND n = ?"
_INBOX = "SELECT delivered, start_seq FROM edda_sched WHERE run_id = ?"
# The lowest number that this run has not had.
_FIND = """
SELECT k.seq FROM edda_event_key k
 WHERE k.key = ?1 AND k.seq > ?2
   AND NOT EXISTS (SELECT 1 FROM edda_delivery d WHERE d.event = k.seq AND d.run_id = ?3)
 ORDER BY k.seq LIMIT 1"""
# The same, whatever its floor.
_KEPT = """
SELECT k.seq, k.key FROM edda_event_key k
 WHERE k.key = ?1 AND NOT EXISTS (SELECT 1 FROM edda_delivery d WHERE d.event = k.seq AND d.run_id = ?2)
 ORDER BY k.seq LIMIT ?3"""
_TAKE = "DELETE FROM edda_event_key WHERE seq = ? AND key = ?"
# A batch whose answer was lost asks again.
_REGISTER = """
INSERT INTO edda_wait (run_id, step, key, own_key, type, match, due, once) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (run_id, step) DO NOTHING"""
_WAITS = "SELECT step, key, own_key, type, match, due, once FROM edda_wait WHERE run_id = ? ORDER BY step"

_LETTER = """
INSERT INTO edda_delivery (run_id, n, kind, step, at, value, event)
SELECT run_id, delivered, ?2, ?3, ?4, x'', ?5 FROM edda_sched WHERE run_id = ?1"""


class FoundEvent(Struct, frozen=True):
    """An event that was there before the wait for it."""

    run_id: RunId
    seq: int
    step: str
    kind: EntryKind


def register_batch(db: Connection, batch: Sequence[RunWrite]) -> tuple[dict[RunId, frozenset[str]], list[FoundEvent]]:
    """What a batch drops, gives back and asks for; returns the steps that have mail instead of a wait, and what to
    bring when the rest is written: a run that is new has no inbox before."""
    unmet: dict[RunId, frozenset[str]] = {}
    finds: list[FoundEvent] = []
    for bundle in batch:
        if bundle.drops:
            db.run_many(_DROP, [(bundle.run_id, step) for step in bundle.drops])
        if bundle.frees:
            db.run_many(_FREE, [(bundle.run_id, n) for n in bundle.frees])
        if bundle.waits and (steps := _register_one(db, bundle, finds)):
            unmet[bundle.run_id] = steps
    return unmet, finds


def deliver_found(db: Connection, finds: Iterable[FoundEvent], now: int) -> None:
    for find in finds:
        deliver(db, find.kind, find.seq, [(find.run_id, find.step)], now)


def _register_one(db: Connection, bundle: RunWrite, finds: list[FoundEvent]) -> frozenset[str]:
    found: dict[str, int] = {}
    if bundle.start is None:  # else no event can have come since
        inbox = db.row(_INBOX, (bundle.run_id,))
        if inbox is None:
            return frozenset()
        delivered, start_seq = inbox
        if isinstance(bundle.move, AckInbox | Suspend) and bundle.move.absorbed != delivered:
            return frozenset(wait.step for wait in bundle.waits)
        found = {w.step: seq for w in bundle.waits if not w.once and (seq := _find(db, bundle.run_id, w, start_seq))}
    # Of steps that found the same event the first gets it; the others ask again.
    takers = {seq: step for step, seq in sorted(found.items(), reverse=True)}
    brought = [FoundEvent(bundle.run_id, seq, step, EntryKind.EVENT) for seq, step in takers.items()]
    brought += _take_exclusive(db, bundle, set(takers))
    finds += sorted(brought, key=lambda find: find.seq)
    unmet = frozenset(found).union(find.step for find in brought)
    _register(db, bundle.run_id, [wait for wait in bundle.waits if wait.step not in unmet])
    return unmet


def _find(db: Connection, run_id: RunId, wait: Wait, start_seq: int) -> int | None:
    floor = start_seq if wait.floor is None else wait.floor
    rows = [db.row(_FIND, (key, floor, run_id)) for key in (wait.key, wait.own_key)]
    return min((row[0] for row in rows if row), default=None)


def _take_exclusive(db: Connection, bundle: RunWrite, had: set[int]) -> list[FoundEvent]:
    """What nobody else will get; not one of those that the run has by another step."""
    taken: list[FoundEvent] = []
    for wait in bundle.waits:
        if wait.once and (seq := _take(db, bundle.run_id, wait, had)):
            taken.append(FoundEvent(bundle.run_id, seq, wait.step, EntryKind.MESSAGE))
            had.add(seq)
    return taken


def _take(db: Connection, run_id: RunId, wait: Wait, had: Collection[int]) -> int | None:
    rows = [row for key in (wait.key, wait.own_key) for row in db.rows(_KEPT, (key, run_id, len(had) + 1))]
    lowest: tuple[int, bytes] | None = min((row for row in rows if row[0] not in had), default=None)
    if lowest is None:
        return None
    db.run(_TAKE, lowest)
    return lowest[0]


def _register(db: Connection, run_id: RunId, waits: Sequence[Wait]) -> None:
    rows = [(run_id, w.step, w.key, w.own_key, w.type, w.match, w.due, int(w.once)) for w in waits]
    db.run_many(_REGISTER, rows)


def deliver(db: Connection, kind: EntryKind, seq: int, takers: Sequence[tuple[RunId, str]], now: int) -> None:
    """Give one event to a step of each of these runs, which waits no longer."""
    db.run_many(_DROP, takers)
    db.run_many(WAKE, [(run_id,) for run_id, _ in takers])
    db.run_many(_LETTER, [(run_id, kind.value, step, now, seq) for run_id, step in takers])


def of_run(db: Connection, run_id: RunId) -> tuple[Wait, ...]:
    return tuple(map(row_to_wait, db.rows(_WAITS, (run_id,))))


def row_to_wait(row: Sequence[Any]) -> Wait:
    step, key, own_key, type, match, due, once = row
    return Wait(step, key, own_key, type, match, due, once=bool(once))
