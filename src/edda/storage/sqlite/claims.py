"""Claiming runs, with the number of their watchers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from edda.core.model import (
    Claim,
    ClaimedRun,
    Crashes,
    EndWatcher,
    Entry,
    EntryKind,
    InboxItem,
    RunId,
    StepCommit,
    WorkerId,
)

from .connection import Connection

_WATCH = """
INSERT INTO edda_watcher (run_id, watcher, step) SELECT run_id, ?2, ?3 FROM edda_sched WHERE run_id = ?1
    ON CONFLICT (run_id, watcher, step) DO NOTHING"""
_COUNT_WATCHERS = "UPDATE edda_sched SET watchers = watchers + 1 WHERE run_id = ?"
_WATCHERS = "SELECT watcher, step FROM edda_watcher WHERE run_id = ? ORDER BY watcher, step"


def add(db: Connection, run_id: RunId, watcher: EndWatcher) -> None:
    """Nobody is told the end of a run that has ended."""
    if db.run(_WATCH, (run_id, watcher.run_id, watcher.step)):
        db.run(_COUNT_WATCHERS, (run_id,))


def of_run(db: Connection, run_id: RunId) -> tuple[EndWatcher, ...]:
    return tuple(EndWatcher(*row) for row in db.rows(_WATCHERS, (run_id,)))


_COUNT = """
UPDATE edda_claim SET n = n + 1
 WHERE worker = ?1 AND n >= ?2 AND EXISTS (SELECT 1 FROM edda_fence WHERE worker = ?1)"""
_COUNTED = "SELECT n FROM edda_claim WHERE worker = ?"
_DUE = """
SELECT ready_at, run_id FROM edda_sched INDEXED BY edda_sched_ready
 WHERE owner IS NULL AND workflow = ? AND ready_at <= ? ORDER BY ready_at LIMIT ?"""
_TAKE = """
UPDATE edda_sched SET owner = ?, epoch = epoch + 1, ready_at = NULL, status = 'running', reason = NULL
 WHERE run_id = ?"""
# The group that is first of those that died last.
_SUSPECTS = """
SELECT run_id FROM edda_sched INDEXED BY edda_sched_suspect
 WHERE suspect_at = (SELECT max(suspect_at) FROM edda_sched INDEXED BY edda_sched_suspect
                      WHERE suspect_at IS NOT NULL AND workflow IN (SELECT value FROM json_each(?1)))
   AND workflow IN (SELECT value FROM json_each(?1))
 ORDER BY run_id LIMIT ?2"""
_TAKE_SUSPECT = """
UPDATE edda_sched
   SET owner = ?, epoch = epoch + 1, ready_at = NULL, suspect_at = NULL, status = 'running', reason = NULL, alone = ?
 WHERE run_id = ?"""
_HAS_SUSPECTS = """
SELECT 1 FROM edda_sched INDEXED BY edda_sched_suspect
 WHERE suspect_at IS NOT NULL AND workflow IN (SELECT value FROM json_each(?)) LIMIT 1"""
_TAKEN = """
SELECT r.id, r.workflow, r.gen, s.epoch, r.input, r.created_at, r.deadline, s.absorbed, s.attempts,
       s.start_seq, r.parent, r.parent_step, r.depth, s.watchers, s.undoing, s.end_if_parked,
       s.deaths, s.deaths_alone, s.died_seq
  FROM json_each(?) i
 CROSS JOIN edda_sched s ON s.run_id = i.value
 CROSS JOIN edda_run r ON r.id = s.run_id AND r.gen = s.gen
 ORDER BY i.key"""
_HISTORY = """
SELECT h.run_id, h.seq, h.kind, h.step, h.name, h.ok, h.at, h.input, h.value, h.attempt, h.n, h.event
  FROM json_each(?) i
 CROSS JOIN edda_sched s ON s.run_id = i.value
 CROSS JOIN edda_hist h ON h.run_id = s.run_id AND h.gen = s.gen
 ORDER BY i.key, h.seq"""
_DONE = """
SELECT d.run_id, d.step, d.attempt, d.value, d.at
  FROM json_each(?) i
 CROSS JOIN edda_sched s ON s.run_id = i.value
 CROSS JOIN edda_done d ON d.run_id = s.run_id AND d.gen = s.gen
 ORDER BY i.key, d.step"""
_WAITS = """
SELECT w.run_id, w.step, w.key FROM json_each(?) i CROSS JOIN edda_wait w ON w.run_id = i.value
 ORDER BY w.run_id, w.step"""
# The letter of an event has only its number.
_LETTER = "SELECT d.run_id, d.n, d.kind, d.at, d.step, coalesce(e.body, d.value), d.event"
_UNREAD = f"""{_LETTER}
  FROM json_each(?) i
 CROSS JOIN edda_sched s ON s.run_id = i.value
 CROSS JOIN edda_delivery d ON d.run_id = s.run_id AND d.n > s.absorbed
  LEFT JOIN edda_event e ON e.seq = d.event
 ORDER BY i.key, d.n"""
_NEXT = """
SELECT ready_at FROM edda_sched INDEXED BY edda_sched_ready
 WHERE owner IS NULL AND workflow = ? AND ready_at IS NOT NULL ORDER BY ready_at LIMIT 1"""
# As `unpark_pause` says.
_UNPARKED_AT = "max(?1, CASE WHEN attempts < 3 THEN 0 ELSE coalesce(parked_at, 0) + (100000 << min(attempts, 8)) END)"
_UNPARK = """
UPDATE edda_sched INDEXED BY edda_sched_parked SET ready_at = {due}
 WHERE status = 'parked' AND owner IS NULL AND ready_at > {due}
   AND workflow IN (SELECT value FROM json_each(?2))""".replace("{due}", _UNPARKED_AT)
_MAIL = f"""{_LETTER}
  FROM edda_sched s INDEXED BY edda_sched_mail
 CROSS JOIN edda_delivery d ON d.run_id = s.run_id AND d.n > s.absorbed
  LEFT JOIN edda_event e ON e.seq = d.event
 WHERE s.owner = ? AND s.delivered > s.absorbed
 ORDER BY d.run_id, d.n"""

_KINDS = {kind.value: kind for kind in EntryKind}


def claim(db: Connection, worker: WorkerId, workflows: Iterable[str], limit: int, seen: int, now: int) -> Claim:
    """One transaction that nobody can write beside, so history and row always fit: no claim is ever void."""
    number = _count(db, worker, seen)
    if number is None:
        return Claim(now, ())
    due = _due(db, workflows, limit, now)
    if not due:
        return Claim(now, (), number)
    db.run_many(_TAKE, [(worker, run_id) for run_id in due])
    return Claim(now, _load(db, due), number)


def _count(db: Connection, worker: WorkerId, seen: int) -> int | None:
    """The number of this claim; None if the worker was taken over, or some of its claims are lost."""
    if not db.run(_COUNT, (worker, seen)):
        return None
    ((number,),) = db.rows(_COUNTED, (worker,))
    return int(number)


def claim_suspects(
    db: Connection, worker: WorkerId, workflows: Sequence[str], few: int, alone: bool, seen: int, now: int
) -> Claim:
    number = _count(db, worker, seen)
    if number is None:
        return Claim(now, ())
    chosen = [run_id for (run_id,) in db.rows(_SUSPECTS, (json.dumps(list(workflows)), few))]
    is_alone = alone and len(chosen) == 1
    db.run_many(_TAKE_SUSPECT, [(worker, int(is_alone), run_id) for run_id in chosen])
    return Claim(now, _load(db, chosen) if chosen else (), number)


def has_suspects(db: Connection, workflows: tuple[str, ...]) -> bool:
    return db.row(_HAS_SUSPECTS, (json.dumps(workflows),)) is not None


def _due(db: Connection, workflows: Iterable[str], limit: int, now: int) -> list[RunId]:
    """The oldest of all names: each name has its own range of the index."""
    found: list[tuple[int, RunId]] = []
    for workflow in workflows:
        found += db.rows(_DUE, (workflow, now, limit))
    return [run_id for _, run_id in sorted(found)[:limit]]


def _load(db: Connection, run_ids: list[RunId]) -> tuple[ClaimedRun, ...]:
    ids = (json.dumps(run_ids),)
    waits: defaultdict[RunId, list[tuple[str, bytes]]] = defaultdict(list)
    for run_id, step, key in db.rows(_WAITS, ids):
        waits[run_id].append((step, key))
    entries: defaultdict[RunId, list[Entry]] = defaultdict(list)
    for run_id, *row in db.rows(_HISTORY, ids):
        entries[run_id].append(as_entry(row))
    done: defaultdict[RunId, list[StepCommit]] = defaultdict(list)
    for run_id, *row in db.rows(_DONE, ids):
        done[run_id].append(StepCommit(*row))
    mail: defaultdict[RunId, list[InboxItem]] = defaultdict(list)
    for delivery in _deliveries(db.rows(_UNREAD, ids)):
        mail[delivery.run_id].append(delivery)
    runs = []
    for *row, start_seq, parent, parent_step, depth, watched, undoing, ends, deaths, alone, seq in db.rows(_TAKEN, ids):
        run_id = row[0]
        inputs = (tuple(entries[run_id]), tuple(mail[run_id]), tuple(waits[run_id]))
        told = of_run(db, run_id) if watched else ()
        state = (bool(undoing), bool(ends), Crashes(deaths, alone, seq))
        values = (*row, *inputs, start_seq, parent, parent_step, depth, told, tuple(done[run_id]), *state)
        runs.append(ClaimedRun(*values))
    return tuple(runs)


def next_ready(db: Connection, workflows: tuple[str, ...]) -> int | None:
    """When the first run without an owner is due."""
    return min((row[0] for workflow in workflows if (row := db.row(_NEXT, (workflow,)))), default=None)


def unpark(db: Connection, workflows: Sequence[str], now: int) -> int:
    return db.run(_UNPARK, (now, json.dumps(list(workflows))))


def mail(db: Connection, worker: WorkerId) -> tuple[InboxItem, ...]:
    return _deliveries(db.rows(_MAIL, (worker,)))


def as_entry(row: Sequence[Any]) -> Entry:
    seq, kind, step, name, ok, *rest = row
    return Entry(seq, _KINDS[kind], step, name, bool(ok), *rest)


def _deliveries(rows: Iterable[Sequence[Any]]) -> tuple[InboxItem, ...]:
    return tuple(InboxItem(run_id, n, _KINDS[kind], *rest) for run_id, n, kind, *rest in rows)
