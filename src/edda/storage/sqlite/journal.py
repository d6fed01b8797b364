"""The journal: one batch of run writes per transaction, if the worker's fence row is still the one it knows."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
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
    Suspend,
    Transition,
    WorkerId,
)
from edda.core.states import RunStatus

from . import events, outbox, runs
from .connection import Connection
from .threads import Part, transaction
from .transactions import HeldTransactions

SLOW_WRITE_SECONDS = 1.0
"""A write that waits longer is logged, and again after twice as long, and so on."""
LOOP_STALL_SECONDS = 0.25
"""A log timer that fires later than this ran on a blocked event loop. That time does not count: the write may be done,
and the loop could not tell the journal yet."""

logger = logging.getLogger(__name__)

_Row = tuple[Any, ...]

_BUMP_FENCE = """
UPDATE edda_fence SET batch_no = batch_no + 1, token = ?6
 WHERE worker = ?1 AND batch_no = ?2 AND ownership_version = ?3 AND token = ?4
   AND EXISTS (SELECT 1 FROM edda_claim WHERE worker = ?1 AND claims >= ?5)"""
_FENCE = """
SELECT f.worker, f.batch_no, f.ownership_version, f.token, c.claims FROM edda_fence f JOIN edda_claim c
    ON c.worker = f.worker
 WHERE f.worker = ?"""
_OWNED = "SELECT run_id, epoch FROM edda_open_run WHERE owner = ?"

_OTHER_WATCHERS = """
SELECT s.run_id FROM json_each(?) i CROSS JOIN edda_open_run s ON s.run_id = i.key WHERE s.watchers <> i.value"""
_OTHER_INBOX_COUNT = """
SELECT s.run_id FROM json_each(?) i CROSS JOIN edda_open_run s ON s.run_id = i.key WHERE s.inbox_count <> i.value"""

_INSERT_NEXT_GENERATION = """
INSERT INTO edda_run (id, generation, workflow, input, created_at, deadline, parent, parent_step, depth)
SELECT id, generation + 1, workflow, ?3, ?4, deadline, parent, parent_step, depth FROM edda_run WHERE id = ?1
    AND generation = ?2"""
_INSERT_OPEN_RUN = """
INSERT INTO edda_open_run
       (run_id, generation, epoch, workflow, owner, ready_at, status, reason, inbox_read, attempts, event_cursor)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT coalesce(max(seq), 0) FROM edda_event))"""
_INSERT_ENTRY = """
INSERT INTO edda_history (run_id, generation, epoch, seq, kind, step, name, ok, at, attempt, inbox_no, event, input,
    value)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_INSERT_RESULT = "INSERT INTO edda_result (run_id, generation, status, value, ended_at) VALUES (?, ?, ?, ?, ?)"
_DELETE_OPEN_RUN = "DELETE FROM edda_open_run WHERE run_id = ?"
_DELETE_WAITS = "DELETE FROM edda_wait WHERE run_id = ?"
_DELETE_WATCHERS = "DELETE FROM edda_watcher WHERE run_id = ?"
_DELETE_STEP_COMMIT = "DELETE FROM edda_step_commit WHERE run_id = ? AND generation = ? AND step = ?"
_COMPENSATE = "UPDATE edda_open_run SET compensating = 1 WHERE run_id = ?"
_RECUR = """
UPDATE edda_open_run
   SET generation = generation + 1, inbox_read = ?, cancelled = 0, attempts = 0, compensating = 0, end_if_parked = 0,
       deaths = 0, deaths_alone = 0, died_seq = NULL
 WHERE run_id = ?"""
_ACK_INBOX = "UPDATE edda_open_run SET inbox_read = ? WHERE run_id = ?"
# An item that arrived meanwhile makes the run ready at once.
_SUSPEND = """
UPDATE edda_open_run
   SET inbox_read = ?2, owner = NULL,
       status = CASE WHEN inbox_count = ?2 THEN ?4 ELSE 'running' END,
       reason = CASE WHEN inbox_count = ?2 THEN ?5 END,
       ready_at = CASE WHEN inbox_count = ?2 THEN ?3 ELSE 0 END,
       attempts = 0, parked_at = NULL, end_if_parked = 0, deaths = 0, deaths_alone = 0, died_seq = NULL, alone = 0
 WHERE run_id = ?1"""
# A parked run keeps its time even if its inbox has unread items: it could not read them.
_PARK = """
UPDATE edda_open_run
   SET inbox_read = ?2, owner = NULL, status = 'parked', reason = ?4, ready_at = ?3, attempts = attempts + 1,
       parked_at = ?5, alone = 0
 WHERE run_id = ?1"""
_WITH_UNREAD_ITEMS = """
SELECT s.run_id FROM json_each(?) i CROSS JOIN edda_open_run s ON s.run_id = i.value
 WHERE s.inbox_count <> s.inbox_read"""


class SQLiteJournal(Part):
    _held: HeldTransactions

    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        with SlowWriteLog(self._pool.path, lambda: self._held.holder):
            return await self._write(fence, batch, token)

    @transaction
    def _write(self, db: Connection, fence: Fence, batch: Sequence[RunWrite], token: int) -> BatchResult | None:
        expected = (fence.worker, fence.batch_no, fence.ownership_version, fence.token, fence.claims)
        if db.run(_BUMP_FENCE, (*expected, token)) != 1:
            return None
        now = self._now()
        refused = _refused_runs(db, batch)
        unregistered, found = events.register_waits(db, batch)
        unregistered |= dict.fromkeys(refused, frozenset())
        statements = _BatchStatements(fence.worker, now)
        for write in batch:
            statements.add(write, stays=write.run_id in unregistered)
        for sql in _IN_ORDER:
            if rows := statements.rows.get(sql):
                db.run_many(sql, rows)
        for event in found:
            events.deliver(db, event.kind, event.seq, [(event.run_id, event.step)], now)
        if children := [child for write in batch for child in write.children]:
            runs.start_runs(db, children, now)
        for write in batch:
            for signal in write.signals if write.run_id not in refused else ():
                runs.put_signal(db, signal, now)
        ready: list[tuple[RunId]] = []
        if suspended := statements.rows.get(_SUSPEND):  # of these, the ones that are ready again at once
            ready = db.rows(_WITH_UNREAD_ITEMS, (json.dumps([row[0] for row in suspended]),))
        return BatchResult(frozenset(run_id for (run_id,) in ready), unregistered)

    async def read_fence(self, worker: WorkerId) -> Fence | None:
        row = await self._pool.read_after_writes(lambda db: db.row(_FENCE, (worker,)))
        return Fence(*row) if row else None

    async def owned_runs(self, worker: WorkerId) -> dict[RunId, int]:
        return dict(await self._pool.read_after_writes(lambda db: db.rows(_OWNED, (worker,))))

    async def locked(self, runs: Collection[RunId]) -> frozenset[RunId]:
        """Empty: SQLite locks the whole file, and `write` waits for that lock."""
        return frozenset()


def _refused_runs(db: Connection, batch: Sequence[RunWrite]) -> frozenset[RunId]:
    """Runs whose End does not know all watchers, or whose End or Recur would leave an inbox item unread."""
    watchers: dict[RunId, int] = {}
    inbox_counts: dict[RunId, int] = {}
    for write in batch:
        match write.transition:
            case End(watchers=known, expected_inbox_count=expected) if write.start is None:
                watchers[write.run_id] = known
                if expected is not None:
                    inbox_counts[write.run_id] = expected
            case Recur(inbox_read=inbox_read) if write.start is None:
                inbox_counts[write.run_id] = inbox_read
    return frozenset(_differing(db, _OTHER_WATCHERS, watchers) + _differing(db, _OTHER_INBOX_COUNT, inbox_counts))


def _differing(db: Connection, sql: str, expected: dict[RunId, int]) -> list[RunId]:
    return [run_id for (run_id,) in db.rows(sql, (json.dumps(expected),))] if expected else []


class _BatchStatements:
    """The rows of a batch by statement, so that each statement is sent once for all runs."""

    def __init__(self, worker: WorkerId, now: int) -> None:
        self.rows: defaultdict[str, list[_Row]] = defaultdict(list)
        self._worker = worker
        self._now = now

    def add(self, write: RunWrite, stays: bool) -> None:
        """`stays`: the transition is refused, because the run has inbox items to read or more watchers to signal."""
        rows, run_id = self.rows, write.run_id
        if write.entries:
            self._add_entries(write, write.generation, write.entries)
        if write.start is not None:
            rows[runs.INSERT_RUN].append(runs.start_to_row(write.start, write.generation))
            if not isinstance(write.transition, End):
                self._add_open_run(write, write.start, stays)
        if write.compensating:
            rows[_COMPENSATE].append((run_id,))
        if write.staged_events:
            rows[events.INSERT_STAGED] += [(staged.kind.value, staged.body) for staged in write.staged_events]
        if write.outbox_events:
            rows[outbox.INSERT] += map(outbox.event_to_row, write.outbox_events)
        if write.values:
            rows[runs.SET_VALUE] += [(run_id, value.name, value.value, self._now) for value in write.values]
        if write.recorded_steps:
            rows[_DELETE_STEP_COMMIT] += [(run_id, write.generation, step) for step in write.recorded_steps]
        if write.transition is not None:
            self._add_transition(write, write.transition, stays)

    def _add_entries(self, write: RunWrite, generation: int, entries: Iterable[Entry]) -> None:
        place = (write.run_id, generation, write.epoch)
        # Enumerations and booleans as plain values: the driver searches for an adapter of any other type.
        for e in entries:
            known = (e.seq, e.kind.value, e.step, e.name, int(e.ok), e.at, e.attempt, e.inbox_no, e.event)
            self.rows[_INSERT_ENTRY].append((*place, *known, e.input, e.value))

    def _add_open_run(self, write: RunWrite, start: Start, stays: bool) -> None:
        """Owner, ready_at, status, reason, inbox_read and attempts of a run that is new in this batch."""
        owner, inbox_read = self._worker if start.ready_at is None else None, 0
        state: _Row = (owner, start.ready_at, "running", None)
        match write.transition:
            case Suspend(inbox_read=inbox_read, ready_at=ready_at, status=status, reason=reason) if not stays:
                state = (None, ready_at, status.value, reason)
            case AckInbox(inbox_read=inbox_read) | Suspend(inbox_read=inbox_read):
                pass
        version = (start.run_id, write.generation, write.epoch, start.workflow)
        self.rows[_INSERT_OPEN_RUN].append((*version, *state, inbox_read, int(state[2] == RunStatus.PARKED)))

    def _add_transition(self, write: RunWrite, transition: Transition, stays: bool) -> None:
        rows, run_id, is_new = self.rows, write.run_id, write.start is not None
        match transition:
            case End() as end if not stays:
                rows[_INSERT_RESULT].append((run_id, write.generation, end.status.value, end.value, end.at))
                rows[_DELETE_OPEN_RUN].append((run_id,))
                rows[_DELETE_WAITS].append((run_id,))
                if end.watchers:
                    rows[_DELETE_WATCHERS].append((run_id,))
            case Recur() as recur if not stays:
                rows[_INSERT_NEXT_GENERATION].append((run_id, write.generation, recur.input, recur.at))
                self._add_entries(write, write.generation + 1, (recur.entry,))
                rows[_RECUR].append((recur.inbox_read, run_id))
                rows[_DELETE_WAITS].append((run_id,))
            case _ if is_new:
                pass  # the row of the new run has it
            case Suspend(status=RunStatus.PARKED) as park if not stays:
                rows[_PARK].append((run_id, park.inbox_read, park.ready_at, park.reason, self._now))
            case Suspend() as suspend if not stays:
                status = suspend.status.value
                rows[_SUSPEND].append((run_id, suspend.inbox_read, suspend.ready_at, status, suspend.reason))
            case AckInbox() | Suspend() | Recur() | End() as refused if refused.inbox_read is not None:
                rows[_ACK_INBOX].append((refused.inbox_read, run_id))


_IN_ORDER = (
    *(runs.INSERT_RUN, _INSERT_NEXT_GENERATION, _INSERT_OPEN_RUN, _COMPENSATE, _INSERT_ENTRY, _ACK_INBOX, _SUSPEND),
    *(_PARK, _RECUR, _INSERT_RESULT, _DELETE_OPEN_RUN, _DELETE_WAITS, _DELETE_WATCHERS, events.INSERT_STAGED),
    *(outbox.INSERT, runs.SET_VALUE, _DELETE_STEP_COMMIT),
)


class SlowWriteLog:
    """A context manager around a write: logs which holder of the write lock it waits for, and for how long."""

    def __init__(self, path: str, name_holder: Callable[[], str]) -> None:
        self._path = path
        self._name_holder = name_holder
        self._pause = SLOW_WRITE_SECONDS

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun = time.monotonic()
        self._set_timer(SLOW_WRITE_SECONDS)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()

    def _set_timer(self, pause: float) -> None:
        self._due = time.monotonic() + pause
        self._timer = self._loop.call_later(pause, self._log)

    def _log(self) -> None:
        late = time.monotonic() - self._due
        if late > LOOP_STALL_SECONDS:
            self._begun += late
            self._set_timer(LOOP_STALL_SECONDS)
            return
        holder = self._name_holder()
        logger.warning(
            "journal: nothing has been written to %s for %.0f s: %s; all runs of this worker wait until it ends",
            self._path,
            time.monotonic() - self._begun,
            f"{holder} holds its transaction open"
            if holder
            else "another process or thread writes, or the disk is slow",
        )
        self._pause *= 2
        self._set_timer(self._pause)
