"""The journal: a batch is one message and one commit, which begins with a compare-and-set on the worker's fence.

A batch that depends on rows which it has to lock first (waits, signals, ends of watched runs, new generations) takes
two messages; three if an assertion of the first message failed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter

from msgspec.structs import replace

from edda.core.model import BatchResult, End, Fence, Recur, RunId, RunWrite, Start, Suspend, Transition, WorkerId
from edda.core.states import RunStatus
from edda.errors import StorageConflictError
from edda.storage.shared.batches import children_of
from edda.storage.shared.rows import to_run_id

from .batch_sql import (
    ASSERT_NONE_EXISTS,
    COUNT_EXISTING,
    DROP_WAIT,
    FIND_EXISTING,
    INSERT_HISTORY,
    INSERT_OLD_GENERATION,
    INSERT_OPEN_RUN,
    INSERT_RESULT,
    INSERT_RUN,
    LAST_EVENT,
    LOCK_AND_READ,
    LOCK_OPEN_RUNS,
    READ_LAST_EVENT,
    SET_COMPENSATING,
    TransitionWriter,
    history_rows,
    insert_unowned,
    locked,
    open_run_row,
    result_row,
    run_row,
)
from .connection import ASSERT_ROW_COUNT, BEGIN, COMMIT, AssertionFailedError, MySQLPool, MySQLSession, ReplyRows
from .decisions import (
    FIND_EVENT,
    FIND_MESSAGE,
    INSERT_WAIT,
    KEEP_EXISTING,
    BatchDecision,
    find_events,
    is_decided_later,
    needs_locked_rows,
    registers_waits,
    wait_row,
)
from .events import INSERT_STAGED, staged_row
from .locks import lock_waits, repeated
from .outbox import INSERT_OUTBOX, outbox_row
from .runs import INSERT_RUN_VALUE, REPLACE_EXISTING, run_value_row
from .statement import NOW, Statement, bind, inserts, join_values, quote_text

READ_FENCE = b"""SELECT f.batch_no, f.ownership_version, f.token, c.claims FROM edda_fence f
    JOIN edda_claim c ON c.worker = f.worker WHERE f.worker = %b"""
OWNED = b"SELECT run_id, epoch FROM edda_open_run WHERE owner = %b"
EXISTING = b"SELECT run_id FROM edda_open_run WHERE run_id IN (%b)"
UNLOCKED = b"SELECT run_id FROM edda_open_run FORCE INDEX (PRIMARY) WHERE run_id IN (%b) FOR UPDATE SKIP LOCKED"


class MySQLJournal:
    _journal: MySQLPool
    """A connection of its own, so that a batch never waits for a reader."""
    _pool: MySQLPool

    @repeated
    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        for way in (_write_optimistic, _write_locked):
            with suppress(AssertionFailedError):
                async with self._journal.session() as session:
                    return await way(session, fence, batch, token)
        return None

    async def read_fence(self, worker: WorkerId) -> Fence | None:
        rows = (await self._pool.run(READ_FENCE, worker)).rows
        return Fence(worker, *rows[0]) if rows else None

    async def owned_runs(self, worker: WorkerId) -> dict[RunId, int]:
        return {to_run_id(run): epoch for run, epoch in (await self._pool.run(OWNED, worker)).rows}

    async def locked(self, runs: Collection[RunId]) -> frozenset[RunId]:
        """A row that does not exist is not locked."""
        existing, free = await self._journal.send(bind(EXISTING, sorted(runs)), bind(UNLOCKED, sorted(runs)))
        return frozenset(to_run_id(row[0]) for row in existing.rows) - {to_run_id(row[0]) for row in free.rows}


async def _write_optimistic(session: MySQLSession, fence: Fence, batch: Sequence[RunWrite], token: int) -> BatchResult:
    # All statements are built before the first is sent, so that invalid data is refused here.
    statements = list(build_batch(fence, batch, session.limit, token, session.node))
    answers = await session.query(*statements)
    if any(map(needs_locked_rows, batch)):
        return await _write_decided(session, batch, answers)
    return BatchResult(_runs_with_inbox(batch, {to_run_id(run): n for run, n in answers.rows_of(LOCK_OPEN_RUNS)}))


async def _write_locked(session: MySQLSession, fence: Fence, batch: Sequence[RunWrite], token: int) -> BatchResult:
    """Read which children exist before anything is written: then only the fence is an assertion."""
    ids = [child.run_id for child in children_of(batch)]
    found = await session.query(*lock_and_fence(fence, batch, token, session.node), bind(FIND_EXISTING, ids))
    children = children_of(batch, {to_run_id(row[0]) for row in found.rows_of(FIND_EXISTING)})
    statements = list(build_undecided(fence.worker, batch, children, session.limit))
    answers = await _send_or_conflict(session, statements, "another process starts a run with the same id")
    return await _write_decided(session, batch, answers)


async def _write_decided(session: MySQLSession, batch: Sequence[RunWrite], answers: ReplyRows) -> BatchResult:
    rows = locked(answers.rows_of(LOCK_AND_READ))
    decision = BatchDecision(batch, rows, answers.rows_of(FIND_EVENT), answers.rows_of(FIND_MESSAGE))
    statements = list(decision.statements(session.limit))
    await _send_or_conflict(session, statements, "an event that a wait found was pruned meanwhile")
    inbox_count = {run: row.inbox_count for run, row in rows.items()}
    return BatchResult(_runs_with_inbox(batch, inbox_count), decision.refused)


async def _send_or_conflict(session: MySQLSession, statements: Sequence[Statement], conflict: str) -> ReplyRows:
    """The fence was checked before: an assertion that fails here is a conflict."""
    try:
        return await session.query(*statements)
    except AssertionFailedError as error:
        raise StorageConflictError(conflict) from error


def _runs_with_inbox(batch: Sequence[RunWrite], inbox_count: Mapping[RunId, int]) -> frozenset[RunId]:
    suspends = ((write.run_id, write.transition) for write in batch if not write.waits)
    return frozenset(
        run_id
        for run_id, suspend in suspends
        if isinstance(suspend, Suspend) and suspend.status is not RunStatus.PARKED
        if inbox_count.get(run_id, suspend.inbox_read) != suspend.inbox_read
    )


# The count of claims is read without a lock. That is enough: it only grows, and the claims that this worker knows of
# were acknowledged before, so a lower count means that the database lost commits.
BUMP_FENCE = b"""UPDATE edda_fence SET batch_no = batch_no + 1, token = %b
    WHERE worker = %b AND batch_no = %b AND ownership_version = %b AND token = %b
      AND EXISTS (SELECT 1 FROM edda_claim c WHERE c.worker = %b AND c.claims >= %b)"""
RELEASE_ITEM = b"""UPDATE (%b) v STRAIGHT_JOIN edda_inbox d ON d.run_id = v.run_id AND d.inbox_no = v.inbox_no
    SET d.event = NULL, d.kind = 'late_event'"""


def build_batch(
    fence: Fence, batch: Sequence[RunWrite], limit: int, token: int = 0, node: int | None = None
) -> Iterator[Statement]:
    """The whole batch if nothing in it depends on locked rows; otherwise the part that does not, without the COMMIT. It
    is optimistic: an assertion fails if a child exists already, or if an ending run has other watchers than it knows.
    """
    yield from lock_and_fence(fence, batch, token, node)
    children = children_of(batch)
    if children:
        yield bind(COUNT_EXISTING, [child.run_id for child in children])
        yield bind(ASSERT_NONE_EXISTS)
    if any(map(needs_locked_rows, batch)):
        yield from build_undecided(fence.worker, batch, children, limit)
    else:
        yield from _Rows(fence.worker, batch, children).statements(limit)
        yield bind(COMMIT)


def lock_and_fence(fence: Fence, batch: Sequence[RunWrite], token: int, node: int | None) -> Iterator[Statement]:
    yield bind(BEGIN)
    if waits := [wait for write in batch for wait in write.waits]:
        exclusive = [key for wait in waits if wait.exclusive for key in (wait.key, wait.target_key)]
        yield from lock_waits([key for wait in waits for key in (wait.key, wait.target_key)], exclusive, node)
    expected = (fence.worker, fence.batch_no, fence.ownership_version, fence.token, fence.worker, fence.claims)
    yield bind(BUMP_FENCE, token, *expected)
    yield bind(ASSERT_ROW_COUNT, 1)


def build_undecided(
    worker: WorkerId, batch: Sequence[RunWrite], children: Sequence[Start], limit: int
) -> Iterator[Statement]:
    """All that does not depend on locked rows, and the reads that decide the rest."""
    yield from _Rows(worker, batch, children, is_undecided=True).statements(limit)
    yield from find_events([write for write in batch if registers_waits(write)])


class _Rows:
    """The rows of a batch by table, sorted by run, which is the lock order."""

    def __init__(
        self, worker: WorkerId, batch: Sequence[RunWrite], children: Sequence[Start], *, is_undecided: bool = False
    ) -> None:
        self._batch = batch
        self._worker = quote_text(worker)
        self._children = [(child, LAST_EVENT) for child in children]
        self._is_undecided = is_undecided
        self._rows: defaultdict[bytes, list[bytes]] = defaultdict(list)
        self._locked_runs: list[bytes] = []
        self._transitions = TransitionWriter()
        for write in sorted(batch, key=attrgetter("run_id")):
            self._add(write, quote_text(write.run_id))

    def _add(self, write: RunWrite, run_id: bytes) -> None:
        if write.entries:
            self._rows[INSERT_HISTORY] += history_rows(run_id, write.generation, write.epoch, write.entries)
        if write.start:
            self._add_new_run(write, write.start, run_id)
        elif write.transition:
            self._add_transition(write, write.transition, run_id)
        if write.signals:
            self._locked_runs += [quote_text(signal.run_id) for signal in write.signals]

    def _add_new_run(self, write: RunWrite, start: Start, run_id: bytes) -> None:
        rows, generation = self._rows, write.generation
        rows[INSERT_RUN].append(run_row(start, generation))
        match write.transition:
            case End() as end:
                rows[INSERT_RESULT].append(result_row(run_id, generation, end))
                return
            case Recur() as recur:
                rows[INSERT_RUN].append(run_row(replace(start, input=recur.input, created_at=recur.at), generation + 1))
                rows[INSERT_OLD_GENERATION].append(b"(%b,%d,%d)" % (run_id, generation, recur.at))
                rows[INSERT_HISTORY] += history_rows(run_id, generation + 1, write.epoch, [recur.entry])
            case _ if write.compensating:
                rows[SET_COMPENSATING].append(b"SELECT %b AS run_id" % run_id)
        if registers_waits(write):  # the messages it finds decide whether it is suspended
            rows[INSERT_OPEN_RUN].append(open_run_row(replace(write, transition=None), start, self._worker))
            self._locked_runs.append(run_id)
            return
        rows[INSERT_OPEN_RUN].append(open_run_row(write, start, self._worker))
        rows[INSERT_WAIT] += [wait_row(run_id, wait) for wait in write.waits]

    def _add_transition(self, write: RunWrite, transition: Transition, run_id: bytes) -> None:
        self._locked_runs.append(run_id)
        if write.compensating:
            self._rows[SET_COMPENSATING].append(b"SELECT %b AS run_id" % run_id)
        self._rows[DROP_WAIT] += [
            b"SELECT %b AS run_id, %b AS step" % (run_id, quote_text(step)) for step in write.cancelled_waits
        ]
        self._rows[RELEASE_ITEM] += [
            b"SELECT %b AS run_id, %d AS inbox_no" % (run_id, inbox_no) for inbox_no in write.released_items
        ]
        if self._is_undecided and is_decided_later(write):
            return
        if isinstance(transition, End):
            self._rows[INSERT_RESULT].append(result_row(run_id, write.generation, transition))
        self._transitions.add(run_id, transition)

    def statements(self, limit: int) -> Iterator[Statement]:
        rows = self._rows
        yield from inserts(INSERT_RUN, rows[INSERT_RUN], limit)
        if rows[INSERT_OPEN_RUN] or self._children:
            yield bind(READ_LAST_EVENT)
        yield from insert_unowned(self._children, NOW, limit)
        yield from inserts(INSERT_OPEN_RUN, rows[INSERT_OPEN_RUN], limit)
        if self._locked_runs:
            lock = LOCK_AND_READ if self._is_undecided else LOCK_OPEN_RUNS
            yield Statement(lock.decode(), lock % b",".join(self._locked_runs))
        for template in (SET_COMPENSATING, DROP_WAIT, RELEASE_ITEM):
            yield from join_values(template, rows[template])
        yield from inserts(INSERT_WAIT, rows[INSERT_WAIT], limit, KEEP_EXISTING)
        yield from self._transitions.statements()
        for head in (INSERT_OLD_GENERATION, INSERT_HISTORY, INSERT_RESULT):
            yield from inserts(head, rows[head], limit)
        yield from insert_side_effects(self._batch, limit)


DELETE_RECORDED = b"""DELETE d FROM (%b) v
    STRAIGHT_JOIN edda_step_commit d ON d.run_id = v.run_id AND d.generation = v.generation AND d.step = v.step"""


def insert_side_effects(batch: Sequence[RunWrite], limit: int) -> Iterator[Statement]:
    yield from inserts(INSERT_STAGED, [staged_row(event) for write in batch for event in write.staged_events], limit)
    yield from inserts(INSERT_OUTBOX, [outbox_row(event) for write in batch for event in write.outbox_events], limit)
    yield from inserts(
        INSERT_RUN_VALUE,
        [run_value_row(write.run_id, value) for write in batch for value in write.values],
        limit,
        REPLACE_EXISTING,
    )
    recorded = [
        b"SELECT %b AS run_id, %d AS generation, %b AS step"
        % (quote_text(write.run_id), write.generation, quote_text(step))
        for write in batch
        for step in write.recorded_steps
    ]
    yield from join_values(DELETE_RECORDED, recorded)
