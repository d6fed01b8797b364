"""Transactions that a user's code and Edda share, as tests open them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from edda.core.model import OutboxEvent, RunId, StagedEvent, StepCommit, WorkerId
from edda.storage.ports import SharedTransaction, Storage
from edda.storage.shared import step_commit as joints
from edda.storage.shared.step_commit import StepCommitWrite

SQL_KINDS = ("sqlite", "postgres", "mysql")


@asynccontextmanager
async def transaction(storage: Storage) -> AsyncIterator[SharedTransaction]:
    """Committed at its end, and rolled back by any error."""
    joint = await storage.begin()
    try:
        yield joint
    except BaseException:
        await joint.rollback()
        raise
    await joint.commit()


def step_record(
    run_id: str,
    step: str = "pay:1",
    *,
    worker: str = "worker-1",
    epoch: int = 1,
    gen: int = 0,
    value: bytes = b"paid",
    dispatches: Sequence[StagedEvent] = (),
    outgoing: Sequence[OutboxEvent] = (),
    taken: Sequence[int] = (),
) -> StepCommitWrite:
    done = StepCommit(step, 2, value, 4_000)
    said = tuple(dispatches), tuple(outgoing), tuple(taken)
    return StepCommitWrite(WorkerId(worker), RunId(run_id), epoch, gen, done, *said)


async def record(storage: Storage, *records: StepCommitWrite) -> None:
    async with transaction(storage) as joint:
        for each in records:
            await joints.write_step_commit(joint, each)
