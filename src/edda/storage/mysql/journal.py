"""The journal: one message is one batch is one commit, behind a compare-and-set on the worker's fence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edda.core.model import Bundle, Fence, Release, RunId, WorkerId

from .batch import compose
from .pool import Pool
from .rows import run_id
from .session import ExpectationMissedError, Reply

READ_FENCE = b"SELECT batch_no, moves FROM edda_fence WHERE worker = %b"
OWNED = b"SELECT run_id, epoch FROM edda_sched WHERE owner = %b"


class MySQLJournal:
    _journal: Pool
    """A line of its own: a batch never waits behind a reader."""
    _pool: Pool

    async def write(self, fence: Fence, batch: Sequence[Bundle]) -> frozenset[RunId] | None:
        try:
            async with self._journal.session() as session:
                # All of it before the first is sent: bad data is refused here.
                statements = list(compose(fence, batch, session.limit))
                replies = await session.send(*statements)
        except ExpectationMissedError:
            return None
        return frozenset(_with_mail(batch, replies))

    async def read_fence(self, worker: WorkerId) -> Fence | None:
        rows = (await self._pool.run(READ_FENCE, worker)).rows
        return Fence(worker, *rows[0]) if rows else None

    async def owned(self, worker: WorkerId) -> dict[RunId, int]:
        return {run_id(run): epoch for run, epoch in (await self._pool.run(OWNED, worker)).rows}


def _with_mail(batch: Sequence[Bundle], replies: Iterable[Reply]) -> Iterable[RunId]:
    """The only rows in a batch's replies are those of its locked runs."""
    delivered = {run_id(run): n for reply in replies for run, n in reply.rows}
    for bundle in batch:
        if (
            isinstance(bundle.move, Release)
            and delivered.get(bundle.run_id, bundle.move.absorbed) != bundle.move.absorbed
        ):
            yield bundle.run_id
