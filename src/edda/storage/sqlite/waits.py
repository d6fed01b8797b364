"""Waits for events: registered with a batch, or answered by an event that is there already."""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import Absorb, Bundle, Release, RunId, Wait

from .connection import Connection
from .inbox import WAKE

_DROP = "DELETE FROM edda_wait WHERE run_id = ? AND step = ?"
_FREE = "UPDATE edda_delivery SET event = NULL, kind = 'stray' WHERE run_id = ? AND n = ?"
_INBOX = "SELECT delivered, start_seq FROM edda_sched WHERE run_id = ?"
# The lowest number that this run has not had.
_FIND = """
SELECT k.seq FROM edda_event_key k
 WHERE k.key = ?1 AND k.seq > ?2
   AND NOT EXISTS (SELECT 1 FROM edda_delivery d WHERE d.event = k.seq AND d.run_id = ?3)
 ORDER BY k.seq LIMIT 1"""
# A batch whose answer was lost asks again.
_REGISTER = """
INSERT INTO edda_wait (run_id, step, key, own_key, type, match, due) VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (run_id, step) DO NOTHING"""
_WAITS = "SELECT step, key, own_key, type, match, due FROM edda_wait WHERE run_id = ? ORDER BY step"

_LETTER = """
INSERT INTO edda_delivery (run_id, n, kind, step, at, value, event)
SELECT run_id, delivered, 'event', ?2, ?3, x'', ?4 FROM edda_sched WHERE run_id = ?1"""


def settle(db: Connection, batch: Sequence[Bundle], now: int) -> dict[RunId, frozenset[str]]:
    """What a batch drops, gives back and asks for; returns the steps that have mail instead of a wait."""
    unmet: dict[RunId, frozenset[str]] = {}
    for bundle in batch:
        if bundle.drops:
            db.many(_DROP, [(bundle.run_id, step) for step in bundle.drops])
        if bundle.frees:
            db.many(_FREE, [(bundle.run_id, n) for n in bundle.frees])
        if bundle.waits and (steps := _ask(db, bundle, now)):
            unmet[bundle.run_id] = steps
    return unmet


def _ask(db: Connection, bundle: Bundle, now: int) -> frozenset[str]:
    if bundle.start:  # nothing can have come since
        _register(db, bundle.run_id, bundle.waits)
        return frozenset()
    inbox = db.row(_INBOX, (bundle.run_id,))
    if inbox is None:
        return frozenset()
    delivered, start_seq = inbox
    if isinstance(bundle.move, Absorb | Release) and bundle.move.absorbed != delivered:
        return frozenset(wait.step for wait in bundle.waits)
    found = {wait.step: seq for wait in bundle.waits if (seq := _find(db, bundle.run_id, wait, start_seq))}
    _register(db, bundle.run_id, [wait for wait in bundle.waits if wait.step not in found])
    # Of steps that found the same event the first gets it; the others ask again.
    takers = {seq: step for step, seq in sorted(found.items(), reverse=True)}
    for seq, step in sorted(takers.items()):
        deliver(db, seq, [(bundle.run_id, step)], now)
    return frozenset(found)


def _find(db: Connection, run_id: RunId, wait: Wait, start_seq: int) -> int | None:
    floor = start_seq if wait.floor is None else wait.floor
    rows = [db.row(_FIND, (key, floor, run_id)) for key in (wait.key, wait.own_key)]
    return min((row[0] for row in rows if row), default=None)


def _register(db: Connection, run_id: RunId, waits: Sequence[Wait]) -> None:
    db.many(_REGISTER, [(run_id, w.step, w.key, w.own_key, w.type, w.match, w.due) for w in waits])


def deliver(db: Connection, seq: int, takers: Sequence[tuple[RunId, str]], now: int) -> None:
    """Give one event to a step of each of these runs, which waits no longer."""
    db.many(_DROP, takers)
    db.many(WAKE, [(run_id,) for run_id, _ in takers])
    db.many(_LETTER, [(run_id, step, now, seq) for run_id, step in takers])


def of_run(db: Connection, run_id: RunId) -> tuple[Wait, ...]:
    return tuple(Wait(*row) for row in db.rows(_WAITS, (run_id,)))
