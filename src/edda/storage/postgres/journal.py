"""The journal: a batch is one statement on a connection of its own, the fence first and everything else joined to it.

Parts of one statement do not see each other's rows, so a run that starts and waits, ends or recurs in the same batch is
folded into one row here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import asyncpg
from msgspec import Struct, field
from msgspec.structs import replace

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
    Wait,
    WorkerId,
)
from edda.core.states import RunStatus
from edda.storage.shared.batches import children_of

from .batch_sql import FENCE, FENCE_ALREADY_TAKEN, SECTIONS, SINGLE, Row, batch_statement, outbox_row, start_row
from .locks import lock_wait_keys
from .pool import PostgresPool

READ_FENCE = """
SELECT f.batch_no, f.ownership_version, f.token, c.claims FROM edda_fence f JOIN edda_claim c USING (worker)
    WHERE worker = $1"""
OWNED = "SELECT run_id, epoch FROM edda_open_run WHERE owner = $1"
# A row that does not exist is not locked.
LOCKED = """
WITH free AS MATERIALIZED (
    SELECT run_id FROM edda_open_run WHERE run_id = ANY ($1::text[]) FOR UPDATE SKIP LOCKED)
SELECT s.run_id FROM edda_open_run s
 WHERE s.run_id = ANY ($1::text[]) AND NOT EXISTS (SELECT FROM free WHERE free.run_id = s.run_id)"""


class PostgresJournal:
    _journal: PostgresPool

    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        waits = [wait for write in batch for wait in write.waits]
        second_pass: list[RunWrite] = []
        if waits:
            batch, second_pass = _split_exclusive_starts(batch)
        statement, values = build_batch(fence.worker, batch)
        fence_values = (fence.worker, fence.batch_no, fence.ownership_version, fence.token, fence.claims, token)
        session = await self._journal.acquire()
        try:
            if not waits:
                rows = await session.fetch(statement, *fence_values, *values)
            else:
                # If the fence does not match, the batch writes nothing, and the COMMIT at the end changes nothing.
                async with session.transaction(lock_wait_keys(waits)):
                    rows = await session.fetch(statement, *fence_values, *values)
                    if rows and second_pass:
                        statement, values = build_batch(fence.worker, second_pass)
                        statement = statement.replace(FENCE, FENCE_ALREADY_TAKEN)
                        rows += await session.fetch(statement, *fence_values, *values)
        finally:
            self._journal.release(session)
        if len(rows) > 1:
            return _to_result(rows)
        return BatchResult(frozenset(), {}) if rows else None

    async def read_fence(self, worker: WorkerId) -> Fence | None:
        rows = await self._journal.fetch(READ_FENCE, worker)
        return Fence(worker, *rows[0]) if rows else None

    async def owned_runs(self, worker: WorkerId) -> dict[RunId, int]:
        rows = await self._journal.fetch(OWNED, worker)
        return {row["run_id"]: row["epoch"] for row in rows}

    async def locked(self, runs: Collection[RunId]) -> frozenset[RunId]:
        rows = await self._journal.fetch(LOCKED, list(runs))
        return frozenset(row["run_id"] for row in rows)


def _split_exclusive_starts(batch: Sequence[RunWrite]) -> tuple[list[RunWrite], list[RunWrite]]:
    """A new run with an exclusive wait may find a message, which changes its state: the first statement creates the run
    without its waits, and a second one registers them."""
    first, second = [], []
    for write in batch:
        if write.start is not None and any(wait.exclusive for wait in write.waits):
            first.append(replace(write, transition=None, waits=()))
            transition = write.transition or AckInbox(0)
            second.append(
                RunWrite(write.run_id, write.epoch, write.generation, transition=transition, waits=write.waits)
            )
        else:
            first.append(write)
    return first, second


def _to_result(rows: Iterable[asyncpg.Record]) -> BatchResult:
    """One row is the fence's, one for each run that is ready again, and one for each wait that was refused.

    A refused transition has a row with an empty step.
    """
    ready: set[RunId] = set()
    refused: defaultdict[RunId, set[str]] = defaultdict(set)
    for run_id, step in rows:
        if step is not None:
            refused[run_id].update([step] if step else ())
        elif run_id is not None:
            ready.add(run_id)
    return BatchResult(frozenset(ready), {run_id: frozenset(steps) for run_id, steps in refused.items()})


def build_batch(worker: WorkerId, batch: Sequence[RunWrite]) -> tuple[str, list[object]]:
    """The statement for this batch and its values, which follow $1 to $6 of the fence."""
    sections = _BatchSections(worker)
    for write in batch:
        sections.add(write)
    rows, implied = sections.rows, sections.implied
    if any(write.children for write in batch):
        rows["children"] = [start_row(child) for child in children_of(batch)]
    if signals := rows.get("signal"):
        rows["locked"] += [(target, "signal", *_NO_TRANSITION) for target in {row[2] for row in signals}]
    if requested := rows.get("requested_wait"):  # one section locks all runs
        requested += [(*row, *_NO_WAIT) for row in rows.pop("locked", ())]
    if "candidate" in implied:
        implied.discard("matched")
    if "deleted_run" in implied:
        rows["guarded_result"] = rows.pop("result")
    names = tuple(name for name in SECTIONS if rows.get(name) or name in implied)
    if names == ("history",) and len(rows["history"]) == 1:
        return SINGLE, list(rows["history"][0])
    return batch_statement(names), [rows[name] for name in names if SECTIONS[name].row]


_NO_TRANSITION = (None,) * 7
_NO_WAIT = (None,) * 8


class _BatchSections(Struct):
    worker: WorkerId
    rows: defaultdict[str, list[Row]] = field(default_factory=partial(defaultdict, list))
    """The rows of each section of `SECTIONS` that has rows."""
    implied: set[str] = field(default_factory=set)
    """The sections without rows of their own that follow from others."""

    def add(self, write: RunWrite) -> None:
        rows, run_id = self.rows, write.run_id
        if write.entries:
            rows["history"] += _history_rows(write, write.generation, write.entries)
        if isinstance(end := write.transition, End):
            rows["result"].append((run_id, write.generation, end.status, end.value, end.at))
        if write.start is not None:
            self._add_start(write, write.start)
        elif write.transition is not None:
            self._add_transition(write, write.transition)
        if write.signals:
            rows["signal"] += [
                (place, run_id, signal.run_id, signal.kind, signal.step, signal.value)
                for place, signal in enumerate(write.signals, len(rows["signal"]) + 1)
            ]
            self.implied |= {"inserted_signal", "woken"}
        if write.recorded_steps:
            rows["recorded_step"] += [(run_id, write.generation, step) for step in write.recorded_steps]
        if write.staged_events:
            rows["staged_event"] += [(event.kind, event.body) for event in write.staged_events]
        if write.outbox_events:
            rows["outbox_event"] += map(outbox_row, write.outbox_events)
        if write.values:
            rows["saved_value"] += [(run_id, value.name, value.value) for value in write.values]

    def _add_start(self, write: RunWrite, start: Start) -> None:
        generation, inbox_read, compensating = write.generation, 0, write.compensating
        family = (start.deadline, start.parent, start.parent_step, start.depth)
        self.rows["run"].append((start.run_id, generation, start.workflow, start.input, start.created_at, *family))
        # The columns of the open-run row from `owner` to `attempts`.
        state: Row = (self.worker if start.ready_at is None else None, RunStatus.RUNNING, None, start.ready_at)
        match write.transition:
            case End():
                return  # it ends in the batch that starts it, and is never open
            case Suspend(inbox_read, ready_at, status, reason):
                state = (None, status, reason, ready_at)
            case AckInbox(inbox_read):
                pass
            case Recur(inbox_read, input, at, entry):
                generation, compensating = generation + 1, False
                self.rows["run"].append((start.run_id, generation, start.workflow, input, at, *family))
                self.rows["history"] += _history_rows(write, generation, [entry])
        attempts = int(state[1] is RunStatus.PARKED)
        version = (start.run_id, start.workflow, generation, write.epoch)
        self.rows["open_run"].append((*version, *state, inbox_read, attempts, compensating))
        if write.waits:
            self.rows["initial_wait"] += [(start.run_id, *_wait_columns(wait)) for wait in write.waits]

    def _add_transition(self, write: RunWrite, transition: Transition) -> None:
        rows, run_id = self.rows, write.run_id
        if write.cancelled_waits:
            rows["cancelled_wait"] += [(run_id, step) for step in write.cancelled_waits]
        if write.released_items:
            rows["released_item"] += [(run_id, inbox_no) for inbox_no in write.released_items]
        match transition:
            case AckInbox(inbox_read):
                self._lock(write, ("ack", inbox_read, None, None, None))
                self.implied.add("acked")
            case Suspend(inbox_read, ready_at, status, reason):
                self._lock(write, ("suspend", inbox_read, ready_at, status, reason))
                self.implied.add("suspended")
            case End(watchers=watchers, inbox_read=inbox_read, expected_inbox_count=expected):
                conditions = (write.compensating, watchers, expected)
                rows["locked"].append((run_id, "end", inbox_read, None, None, None, *conditions))
                self.implied |= {"deleted_run", "deleted_waits"}
                if watchers:
                    self.implied.add("deleted_watchers")
                if write.compensating or inbox_read is not None:  # written if the end is refused
                    self.implied.add("acked")
            case Recur(inbox_read, input, at, entry):
                self._lock(write, ("recur", inbox_read, None, None, None))
                rows["next_generation"].append((run_id, write.generation, input, at))
                rows["first_entry"] += _history_rows(write, write.generation + 1, [entry])
                self.implied |= {"recurred", "deleted_waits", "acked"}

    def _lock(self, write: RunWrite, transition: Row) -> None:
        row = (write.run_id, *transition, write.compensating, None, None)
        if not write.waits:
            self.rows["locked"].append(row)
            return
        self.rows["requested_wait"] += [(*row, *_wait_columns(wait), wait.cursor) for wait in write.waits]
        self.implied |= {"decided", "registered", "inbox_item", "ended_wait", "acked"}
        if any(wait.exclusive for wait in write.waits):
            self.implied |= {"candidate", "taken_message"}
        else:
            self.implied.add("matched")


def _history_rows(write: RunWrite, generation: int, entries: Iterable[Entry]) -> list[Row]:
    place = (write.run_id, generation, write.epoch)
    return [
        (*place, e.seq, e.kind, e.step, e.name, e.ok, e.at, e.attempt, e.inbox_no, e.event, e.input, e.value)
        for e in entries
    ]


def _wait_columns(wait: Wait) -> Row:
    return (wait.step, wait.key, wait.target_key, wait.type, wait.match, wait.due, wait.exclusive)
