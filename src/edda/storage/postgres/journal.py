"""The journal: one connection of its own, one statement per batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

import asyncpg
from msgspec.structs import replace

from edda.core.model import AckInbox, BatchResult, Fence, RunId, RunWrite, Wait, WorkerId

from .batch import build_batch
from .batch_sql import FENCE, FENCE_ALREADY_TAKEN
from .locks import lock_wait_keys
from .pool import Pool
from .session import Session

READ_FENCE = """
SELECT f.batch_no, f.moves, f.token, c.n FROM edda_fence f JOIN edda_claim c USING (worker) WHERE worker = $1"""
OWNED = "SELECT run_id, epoch FROM edda_sched WHERE owner = $1"
# A row that does not exist is not locked.
LOCKED = """
WITH free AS MATERIALIZED (
    SELECT run_id FROM edda_sched WHERE run_id = ANY ($1::text[]) FOR UPDATE SKIP LOCKED)
SELECT s.run_id FROM edda_sched s
 WHERE s.run_id = ANY ($1::text[]) AND NOT EXISTS (SELECT FROM free WHERE free.run_id = s.run_id)"""


class PostgresJournal:
    _journal: Pool

    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        waits = [wait for bundle in batch for wait in bundle.waits]
        later: list[RunWrite] = []
        if waits:
            batch, later = _split_exclusive_starts(batch)
        statement, values = build_batch(fence.worker, batch)
        known = (fence.worker, fence.batch_no, fence.moves, fence.token, fence.claims, token)
        async with self._journal.session() as session, _lock_keys(session, waits):
            rows = await session.fetch(statement, *known, *values)
            if rows and later:
                rows += await _write_second_pass(session, fence.worker, known, later)
        return _written(rows) if rows else None

    async def read_fence(self, worker: WorkerId) -> Fence | None:
        async with self._journal.session() as session:
            rows = await session.fetch(READ_FENCE, worker)
        return Fence(worker, *rows[0]) if rows else None

    async def owned_runs(self, worker: WorkerId) -> dict[RunId, int]:
        async with self._journal.session() as session:
            rows = await session.fetch(OWNED, worker)
        return {row["run_id"]: row["epoch"] for row in rows}

    async def locked(self, runs: Collection[RunId]) -> frozenset[RunId]:
        async with self._journal.session() as session:
            rows = await session.fetch(LOCKED, list(runs))
        return frozenset(row["run_id"] for row in rows)


def _lock_keys(session: Session, waits: Sequence[Wait]) -> AbstractAsyncContextManager[None]:
    """If the fence says no, nothing was written, and the commit at the end is as good as a rollback."""
    return session.transaction(lock_wait_keys(waits)) if waits else nullcontext()


def _split_exclusive_starts(batch: Sequence[RunWrite]) -> tuple[list[RunWrite], list[RunWrite]]:
    """A new run may find a message, which changes how it stands: it is born first, and looks in a second statement."""
    first, later = [], []
    for bundle in batch:
        if bundle.start is not None and any(wait.once for wait in bundle.waits):
            first.append(replace(bundle, move=None, waits=()))
            move = bundle.move or AckInbox(0)
            later.append(RunWrite(bundle.run_id, bundle.epoch, bundle.gen, move=move, waits=bundle.waits))
        else:
            first.append(bundle)
    return first, later


async def _write_second_pass(
    session: Session, worker: WorkerId, known: tuple[object, ...], batch: Sequence[RunWrite]
) -> list[asyncpg.Record]:
    statement, values = build_batch(worker, batch)
    return await session.fetch(statement.replace(FENCE, FENCE_ALREADY_TAKEN), *known, *values)


def _written(rows: Iterable[asyncpg.Record]) -> BatchResult:
    """One row is the fence's, one for each run that is ready again, and one for each wait that is not met.

    A move that did not happen has a row without the name of a step.
    """
    ready: set[RunId] = set()
    unmet: defaultdict[RunId, set[str]] = defaultdict(set)
    for run_id, step in rows:
        if step is not None:
            unmet[run_id].update([step] if step else ())
        elif run_id is not None:
            ready.add(run_id)
    return BatchResult(frozenset(ready), {run_id: frozenset(steps) for run_id, steps in unmet.items()})
