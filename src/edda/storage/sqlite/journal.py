"""Batches of runs: step commits, signals to other runs, refused ends, entries and transitions."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from typing import Any

from edda.core.model import (
    AckInbox,
    BatchResult,
    End,
    Entry,
    Fence,
    Recur,
    RunId,
    RunWrite,
    Start,
    StepCommit,
    Suspend,
    WorkerId,
)
from edda.core.states import RunStatus

from . import outbox, runs, staged_events, waits
from .connection import Connection
from .runs import INSERT, as_row

FORGET = "DELETE FROM edda_done WHERE run_id = ? AND gen = ? AND step = ?"
_FIND = "SELECT step, attempt, value, at FROM edda_done WHERE run_id = ? AND gen = ? AND step = ?"


def find(db: Connection, run_id: RunId, gen: int, step: str) -> StepCommit | None:
    row = db.row(_FIND, (run_id, gen, step))
    return StepCommit(*row) if row else None


_WATCHED = """
SELECT s.run_id FROM json_each(?) i CROSS JOIN edda_sched s ON s.run_id = i.key WHERE s.watchers <> i.value"""
_RUN_SIGNALLED = """
SELECT s.run_id FROM json_each(?) i CROSS JOIN edda_sched s ON s.run_id = i.key WHERE s.delivered <> i.value"""


def refused_runs(db: Connection, batch: Sequence[RunWrite]) -> frozenset[RunId]:
    """Ends that do not know all who watch, and what would leave mail unread."""
    watched: dict[RunId, int] = {}
    mailed: dict[RunId, int] = {}
    for bundle in batch:
        match bundle.move:
            case End(watchers=watchers, settled=settled) if bundle.start is None:
                watched[bundle.run_id] = watchers
                if settled is not None:
                    mailed[bundle.run_id] = settled
            case Recur(absorbed=absorbed) if bundle.start is None:
                mailed[bundle.run_id] = absorbed
    return frozenset(_differing(db, _WATCHED, watched) + _differing(db, _RUN_SIGNALLED, mailed))


def _differing(db: Connection, sql: str, believed: dict[RunId, int]) -> list[RunId]:
    return [run_id for (run_id,) in db.rows(sql, (json.dumps(believed),))] if believed else []


def write_to_other_runs(db: Connection, batch: Sequence[RunWrite], refused: Container[RunId], now: int) -> None:
    """What a batch brings to other runs."""
    if children := [child for bundle in batch for child in bundle.children]:
        runs.start(db, children, now)
    for bundle in batch:
        for letter in bundle.letters if bundle.run_id not in refused else ():
            runs.put(db, letter, now)


_Row = tuple[Any, ...]

_BUMP = """
UPDATE edda_fence SET batch_no = batch_no + 1, token = ?6
 WHERE worker = ?1 AND batch_no = ?2 AND moves = ?3 AND token = ?4
   AND EXISTS (SELECT 1 FROM edda_claim WHERE worker = ?1 AND n >= ?5)"""
_FENCE = """
SELECT f.worker, f.batch_no, f.moves, f.token, c.n FROM edda_fence f JOIN edda_claim c ON c.worker = f.worker
 WHERE f.worker = ?"""
_OWNED = "SELECT run_id, epoch FROM edda_sched WHERE owner = ?"

_NEXT_RUN = """
INSERT INTO edda_run (id, gen, workflow, input, created_at, deadline, parent, parent_step, depth)
SELECT id, gen + 1, workflow, ?3, ?4, deadline, parent, parent_step, depth FROM edda_run WHERE id = ?1 AND gen = ?2"""
_SCHED = """
INSERT INTO edda_sched
       (run_id, gen, epoch, workflow, owner, ready_at, status, reason, absorbed, attempts, start_seq)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT coalesce(max(seq), 0) FROM edda_event))"""
_HIST = """
INSERT INTO edda_hist (run_id, gen, epoch, seq, kind, step, name, ok, at, attempt, n, event, input, value)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_RESULT = "INSERT INTO edda_result (run_id, gen, status, value, ended_at) VALUES (?, ?, ?, ?, ?)"
_END = "DELETE FROM edda_sched WHERE run_id = ?"
_DROP_WAITS = "DELETE FROM edda_wait WHERE run_id = ?"
_DROP_WATCHERS = "DELETE FROM edda_watcher WHERE run_id = ?"
_UNDO = "UPDATE edda_sched SET undoing = 1 WHERE run_id = ?"
_RECUR = """
UPDATE edda_sched
   SET gen = gen + 1, absorbed = ?, cancelled = 0, attempts = 0, undoing = 0, end_if_parked = 0, deaths = 0,
       deaths_alone = 0, died_seq = NULL
 WHERE run_id = ?"""
_ABSORB = "UPDATE edda_sched SET absorbed = ? WHERE run_id = ?"
# Mail that came meanwhile makes the run ready at once.
_RELEASE = """
UPDATE edda_sched
   SET absorbed = ?2, owner = NULL,
       status = CASE WHEN delivered = ?2 THEN ?4 ELSE 'running' END,
       reason = CASE WHEN delivered = ?2 THEN ?5 END,
       ready_at = CASE WHEN delivered = ?2 THEN ?3 ELSE 0 END,
       attempts = 0, parked_at = NULL, end_if_parked = 0, deaths = 0, deaths_alone = 0, died_seq = NULL, alone = 0
 WHERE run_id = ?1"""
# A parked run rests whatever is in its inbox: it could not read it.
_PARK = """
UPDATE edda_sched
   SET absorbed = ?2, owner = NULL, status = 'parked', reason = ?4, ready_at = ?3, attempts = attempts + 1,
       parked_at = ?5, alone = 0
 WHERE run_id = ?1"""
_MAILED = """
SELECT s.run_id FROM json_each(?) i CROSS JOIN edda_sched s ON s.run_id = i.value
 WHERE s.delivered <> s.absorbed"""


def write(db: Connection, fence: Fence, batch: Sequence[RunWrite], token: int, now: int) -> BatchResult | None:
    if db.run(_BUMP, (fence.worker, fence.batch_no, fence.moves, fence.token, fence.claims, token)) != 1:
        return None
    refused = refused_runs(db, batch)
    unmet, finds = waits.register_batch(db, batch)
    unmet |= dict.fromkeys(refused, frozenset())
    rows = _Rows(fence.worker, now)
    for bundle in batch:
        rows.add(bundle, stays=bundle.run_id in unmet)
    rows.send(db)
    waits.deliver_found(db, finds, now)
    write_to_other_runs(db, batch, refused, now)
    return BatchResult(rows.runs_with_inbox(db), unmet)


def read_fence(db: Connection, worker: WorkerId) -> Fence | None:
    row = db.row(_FENCE, (worker,))
    return Fence(*row) if row else None


def owned(db: Connection, worker: WorkerId) -> dict[RunId, int]:
    return dict(db.rows(_OWNED, (worker,)))


class _Rows:
    """The batch by table, so that each table is written by one statement."""

    def __init__(self, worker: WorkerId, now: int) -> None:
        self.worker = worker
        self.now = now
        self.runs: list[_Row] = []
        self.scheds: list[_Row] = []
        self.hists: list[_Row] = []
        self.absorbed: list[_Row] = []
        self.released: list[_Row] = []
        self.parked: list[_Row] = []
        self.results: list[_Row] = []
        self.ended: list[_Row] = []
        self.unwatched: list[_Row] = []
        self.undoing: list[_Row] = []
        self.followers: list[_Row] = []
        self.recurred: list[_Row] = []
        self.unwaiting: list[_Row] = []
        self.dispatches: list[_Row] = []
        self.outgoing: list[_Row] = []
        self.facts: list[_Row] = []
        self.recorded: list[_Row] = []

    def add(self, bundle: RunWrite, stays: bool) -> None:
        """A run that stays is not released and does not end: it has mail to read, or more to tell its end."""
        if bundle.entries:
            self._add_entries(bundle, bundle.gen, bundle.entries)
        if bundle.start is not None:
            self._add_start(bundle, bundle.start, stays)
        if bundle.undoing:
            self.undoing.append((bundle.run_id,))
        if bundle.dispatches or bundle.outgoing or bundle.facts or bundle.recorded:
            self._add_side_effects(bundle)
        run_id = bundle.run_id
        match bundle.move:
            case End() as move if not stays:
                self._add_end(bundle, move)
            case Recur() as move if not stays:
                self._add_recur(bundle, move)
            case Suspend(status=RunStatus.PARKED) as move if bundle.start is None and not stays:
                self.parked.append((run_id, move.absorbed, move.ready_at, move.reason, self.now))
            case Suspend() as move if bundle.start is None and not stays:
                self.released.append((run_id, move.absorbed, move.ready_at, move.status.value, move.reason))
            case AckInbox() | Suspend() | Recur() | End() as move if bundle.start is None and move.absorbed is not None:
                self.absorbed.append((move.absorbed, run_id))

    def _add_entries(self, bundle: RunWrite, gen: int, entries: Iterable[Entry]) -> None:
        # Enumerations and booleans as plain values: the driver looks long for how to adapt anything else.
        run, epoch = bundle.run_id, bundle.epoch
        for e in entries:
            ok, kind = int(e.ok), e.kind.value
            self.hists.append(
                (run, gen, epoch, e.seq, kind, e.step, e.name, ok, e.at, e.attempt, e.n, e.event, e.input, e.value)
            )

    def _add_side_effects(self, bundle: RunWrite) -> None:
        run_id = bundle.run_id
        self.dispatches += [(dispatch.kind.value, dispatch.body) for dispatch in bundle.dispatches]
        self.outgoing += map(outbox.as_row, bundle.outgoing)
        self.facts += [(run_id, fact.name, fact.value, self.now) for fact in bundle.facts]
        self.recorded += [(run_id, bundle.gen, step) for step in bundle.recorded]

    def _add_start(self, bundle: RunWrite, start: Start, stays: bool) -> None:
        self.runs.append(as_row(start, bundle.gen))
        if not isinstance(bundle.move, End):
            place = self._initial_state(bundle, start, stays)
            self.scheds.append((start.run_id, bundle.gen, bundle.epoch, start.workflow, *place))

    def _initial_state(self, bundle: RunWrite, start: Start, stays: bool) -> _Row:
        """Owner, due time, status, reason, absorbed, attempts of a run that is new in this batch."""
        match bundle.move:
            case Suspend(absorbed=absorbed, ready_at=ready_at, status=status, reason=reason) if not stays:
                return (None, ready_at, status.value, reason, absorbed, int(status is RunStatus.PARKED))
            case AckInbox(absorbed=absorbed) | Suspend(absorbed=absorbed):
                pass
            case _:
                absorbed = 0
        owner = self.worker if start.ready_at is None else None
        return (owner, start.ready_at, "running", None, absorbed, 0)

    def _add_end(self, bundle: RunWrite, move: End) -> None:
        self.results.append((bundle.run_id, bundle.gen, move.status.value, move.value, move.at))
        self.ended.append((bundle.run_id,))
        self.unwaiting.append((bundle.run_id,))
        if move.watchers:
            self.unwatched.append((bundle.run_id,))

    def _add_recur(self, bundle: RunWrite, move: Recur) -> None:
        self.followers.append((bundle.run_id, bundle.gen, move.input, move.at))
        self._add_entries(bundle, bundle.gen + 1, (move.entry,))
        self.recurred.append((move.absorbed, bundle.run_id))
        self.unwaiting.append((bundle.run_id,))

    def send(self, db: Connection) -> None:
        for sql, rows in (
            (INSERT, self.runs),
            (_NEXT_RUN, self.followers),
            (_SCHED, self.scheds),
            (_UNDO, self.undoing),
            (_HIST, self.hists),
            (_ABSORB, self.absorbed),
            (_RELEASE, self.released),
            (_PARK, self.parked),
            (_RECUR, self.recurred),
            (_RESULT, self.results),
            (_END, self.ended),
            (_DROP_WAITS, self.unwaiting),
            (_DROP_WATCHERS, self.unwatched),
            (staged_events.INSERT, self.dispatches),
            (outbox.INSERT, self.outgoing),
            (runs.SAY, self.facts),
            (FORGET, self.recorded),
        ):
            if rows:
                db.run_many(sql, rows)

    def runs_with_inbox(self, db: Connection) -> frozenset[RunId]:
        if not self.released:
            return frozenset()
        ids = json.dumps([row[0] for row in self.released])
        return frozenset(run_id for (run_id,) in db.rows(_MAILED, (ids,)))
