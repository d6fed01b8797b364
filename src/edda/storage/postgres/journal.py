"""The journal: one connection of its own, one statement per batch."""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import Bundle, Fence, RunId, WorkerId

from .batch import compose
from .pool import Pool

READ_FENCE = "SELECT batch_no, moves FROM edda_fence WHERE worker = $1"
OWNED = "SELECT run_id, epoch FROM edda_sched WHERE owner = $1"


class PostgresJournal:
    _journal: Pool

    async def write(self, fence: Fence, batch: Sequence[Bundle]) -> frozenset[RunId] | None:
        statement, values = compose(fence.worker, batch)
        async with self._journal.session() as session:
            rows = await session.fetch(statement, fence.worker, fence.batch_no, fence.moves, *values)
        if not rows:
            return None
        return frozenset(row[0] for row in rows if row[0] is not None)

    async def read_fence(self, worker: WorkerId) -> Fence | None:
        async with self._journal.session() as session:
            rows = await session.fetch(READ_FENCE, worker)
        return Fence(worker, *rows[0]) if rows else None

    async def owned(self, worker: WorkerId) -> dict[RunId, int]:
        async with self._journal.session() as session:
            rows = await session.fetch(OWNED, worker)
        return {row["run_id"]: row["epoch"] for row in rows}
