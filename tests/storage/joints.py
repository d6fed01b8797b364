"""Transactions that a user's code and Edda share, as tests open them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from edda.core.model import Dispatch, Done, Outgoing, RunId, WorkerId
from edda.storage import joint as joints
from edda.storage.joint import StepRecord
from edda.storage.ports import Joint, Storage

SQL_KINDS = ("sqlite", "postgres", "mysql")


@asynccontextmanager
async def transaction(storage: Storage) -> AsyncIterator[Joint]:
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
    dispatches: Sequence[Dispatch] = (),
    outgoing: Sequence[Outgoing] = (),
    taken: Sequence[int] = (),
) -> StepRecord:
    done = Done(step, 2, value, 4_000)
    said = tuple(dispatches), tuple(outgoing), tuple(taken)
    return StepRecord(WorkerId(worker), RunId(run_id), epoch, gen, done, *said)


async def record(storage: Storage, *records: StepRecord) -> None:
    async with transaction(storage) as joint:
        for each in records:
            await joints.record(joint, each)
