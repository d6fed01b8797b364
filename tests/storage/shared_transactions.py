"""Transactions that a user's code and Edda share, as tests open them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from edda.core.model import OutboxEvent, RunId, StagedEvent, StepCommit, WorkerId
from edda.storage.ports import SharedTransaction, Storage
from edda.storage.shared import step_commit
from edda.storage.shared.step_commit import StepCommitWrite

SQL_KINDS = ("sqlite", "postgres", "mysql")


@asynccontextmanager
async def transaction(storage: Storage) -> AsyncIterator[SharedTransaction]:
    """Committed at the end, rolled back after any error."""
    shared = await storage.begin()
    try:
        yield shared
    except BaseException:
        await shared.rollback()
        raise
    await shared.commit()


def step_record(
    run_id: str,
    step: str = "pay:1",
    *,
    worker: str = "worker-1",
    epoch: int = 1,
    generation: int = 0,
    value: bytes = b"paid",
    staged_events: Sequence[StagedEvent] = (),
    outbox_events: Sequence[OutboxEvent] = (),
    taken: Sequence[int] = (),
) -> StepCommitWrite:
    done = StepCommit(step, 2, value, 4_000)
    effects = tuple(staged_events), tuple(outbox_events), tuple(taken)
    return StepCommitWrite(WorkerId(worker), RunId(run_id), epoch, generation, done, *effects)


async def record(storage: Storage, *records: StepCommitWrite) -> None:
    async with transaction(storage) as shared:
        for each in records:
            await step_commit.write_step_commit(shared, each)
