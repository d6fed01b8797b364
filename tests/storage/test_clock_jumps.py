"""After the database's clock was set back, `mend_times` corrects leases and due times, and leaves timers."""

from __future__ import annotations

from edda.core.model import MICROSECONDS, Fence, OutboxEvent, RunId, Suspend, WorkerId, WorkerInfo
from edda.core.states import RunStatus
from edda.storage.ports import RECLAIM, Storage

from .records import HOUR, WORKFLOW, run_write, start

LEASE = 15 * MICROSECONDS


async def claimable(storage: Storage, worker: WorkerId) -> set[str]:
    return {run.run_id for run in (await storage.claim(worker, [WORKFLOW], 100)).runs}


async def test_runs_that_were_ready_are_ready_again_and_timers_keep_their_time(storage: Storage) -> None:
    worker = WorkerId("w1")
    await storage.register(WorkerInfo(worker, "shop", "host/1", 1), LEASE)
    before = await storage.now() + HOUR  # the time before the clock was set back
    assert not await storage.is_ahead()
    await storage.start([start("ready", created_at=before, ready_at=before)])
    await storage.start([start("delayed", created_at=before, ready_at=before + HOUR)])
    suspended = run_write(
        "asleep", start=start("asleep", created_at=before), transition=Suspend(0, before, RunStatus.WAITING_FOR_TIMER)
    )
    handed_back = run_write("handed back", start=start("handed back"), transition=Suspend(0, before, RunStatus.RUNNING))
    assert await storage.write(Fence(worker, 0, 0), [suspended, handed_back]) is not None
    assert await storage.is_ahead()
    assert await claimable(storage, worker) == set()
    assert await storage.mend_times(LEASE) == 2
    assert await storage.mend_times(LEASE) == 0
    assert await claimable(storage, worker) == {"ready", "handed back"}
    record = await storage.get(RunId("asleep"))
    assert record is not None
    assert record.ready_at == before


async def test_a_lease_ends_no_later_than_a_new_one(storage: Storage) -> None:
    far, near = WorkerId("w1"), WorkerId("w2")
    await storage.register(WorkerInfo(far, "shop", "host/1", 1), HOUR)
    await storage.register(WorkerInfo(near, "shop", "host/1", 1), LEASE // 2)
    await storage.mend_times(-HOUR)  # a lease that is over at once, so that no test has to wait for it
    assert {one.info.id: one.is_lapsed for one in await storage.registered_workers()} == {far: True, near: True}
    heartbeat = await storage.open_heartbeat()
    try:
        assert await heartbeat.beat(near, LEASE) is not None  # a live worker prolongs it
    finally:
        await heartbeat.close()
    assert {one.info.id: one.is_lapsed for one in await storage.registered_workers()} == {far: True, near: False}


async def test_claimed_events_of_the_outbox_are_due_within_a_minute(storage: Storage) -> None:
    now = await storage.now()
    await storage.enqueue([OutboxEvent("e1", "key", "type", "/source", b"{}", now)])
    assert len(await storage.claim_outbox(10, HOUR)) == 1
    await storage.mend_times(LEASE)
    due = await storage.next_outbox_due()
    assert due is not None
    assert due <= RECLAIM
