"""The journal: one message is one batch is one commit, behind a compare-and-set on the worker's fence.

Only a batch in which something depends on what is found (runs that ask for events, letters, ends that others watch, new
generations) takes two, and three the rare one whose first message hoped in vain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from edda.core.model import BatchResult, Fence, RunId, RunWrite, Suspend, WorkerId
from edda.core.states import RunStatus
from edda.errors import StorageConflictError

from .batch import build_batch, build_undecided, children_of, lock_and_fence
from .batch_sql import FIND_EXISTING, LOCK_AND_LOOK, LOCK_SCHED, locked
from .decisions import BatchDecision, needs_locked_rows
from .exclusive_messages import FIND_MESSAGE
from .locks import repeated
from .pool import Pool
from .rows import run_id
from .session import AssertionFailedError, ReplyRows, Session
from .statement import Statement, bind
from .waits import FIND_EVENT

READ_FENCE = b"""SELECT f.batch_no, f.moves, f.token, c.n FROM edda_fence f
    JOIN edda_claim c ON c.worker = f.worker WHERE f.worker = %b"""
OWNED = b"SELECT run_id, epoch FROM edda_sched WHERE owner = %b"
EXISTING = b"SELECT run_id FROM edda_sched WHERE run_id IN (%b)"
UNLOCKED = b"SELECT run_id FROM edda_sched FORCE INDEX (PRIMARY) WHERE run_id IN (%b) FOR UPDATE SKIP LOCKED"


class MySQLJournal:
    _journal: Pool
    """A line of its own: a batch never waits behind a reader."""
    _pool: Pool

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
        return {run_id(run): epoch for run, epoch in (await self._pool.run(OWNED, worker)).rows}

    async def locked(self, runs: Collection[RunId]) -> frozenset[RunId]:
        """A row that does not exist is not locked."""
        existing, free = await self._journal.send(bind(EXISTING, sorted(runs)), bind(UNLOCKED, sorted(runs)))
        return frozenset(run_id(row[0]) for row in existing.rows) - {run_id(row[0]) for row in free.rows}


async def _write_optimistic(session: Session, fence: Fence, batch: Sequence[RunWrite], token: int) -> BatchResult:
    # All of it before the first is sent: bad data is refused here.
    statements = list(build_batch(fence, batch, session.limit, token, session.node))
    answers = await session.query(*statements)
    if any(map(needs_locked_rows, batch)):
        return await _write_decided(session, batch, answers)
    return BatchResult(frozenset(_runs_with_inbox(batch, {run_id(run): n for run, n in answers.rows_of(LOCK_SCHED)})))


async def _write_locked(session: Session, fence: Fence, batch: Sequence[RunWrite], token: int) -> BatchResult:
    """Look before anything is decided: all that is expected then is the fence."""
    wanted = [child.run_id for child in children_of(batch)]
    look = await session.query(*lock_and_fence(fence, batch, token, session.node), bind(FIND_EXISTING, wanted))
    children = children_of(batch, {run_id(row[0]) for row in look.rows_of(FIND_EXISTING)})
    statements = list(build_undecided(fence.worker, batch, children, session.limit))
    answers = await _send_or_conflict(session, statements, "somebody else starts a run with the same id")
    return await _write_decided(session, batch, answers)


async def _write_decided(session: Session, batch: Sequence[RunWrite], answers: ReplyRows) -> BatchResult:
    rows = locked(answers.rows_of(LOCK_AND_LOOK))
    judgement = BatchDecision(batch, rows, answers.rows_of(FIND_EVENT), answers.rows_of(FIND_MESSAGE))
    statements = list(judgement.statements(session.limit))
    await _send_or_conflict(session, statements, "an event that was found has been pruned meanwhile")
    delivered = {run: row.delivered for run, row in rows.items()}
    return BatchResult(frozenset(_runs_with_inbox(batch, delivered)), judgement.unmet)


async def _send_or_conflict(session: Session, statements: Sequence[Statement], otherwise: str) -> ReplyRows:
    """Behind the fence a missed expectation says nothing of the fence."""
    try:
        return await session.query(*statements)
    except AssertionFailedError as error:
        raise StorageConflictError(otherwise) from error


def _runs_with_inbox(batch: Sequence[RunWrite], delivered: Mapping[RunId, int]) -> Iterable[RunId]:
    for bundle in batch:
        if (
            isinstance(bundle.move, Suspend)
            and bundle.move.status is not RunStatus.PARKED
            and not bundle.waits
            and delivered.get(bundle.run_id, bundle.move.absorbed) != bundle.move.absorbed
        ):
            yield bundle.run_id
