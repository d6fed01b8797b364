"""Registration, leases, take-over and release: runs are never lost and never written twice."""

from __future__ import annotations

import asyncio

from edda.core.model import Fence, RunId, Takeover, WorkerId, WorkerInfo, WorkerStatus
from edda.core.states import RunStatus
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .conftest import MakeWorker
from .records import HOUR, LAPSED, WORKFLOW, entry, new_run, run_write
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")


async def expect_ready(storage: Storage, run_id: RunId) -> None:
    run = await storage.get(run_id)
    assert run is not None
    assert (run.owner, run.status) == (None, RunStatus.RUNNING)
    assert await storage.next_due([WORKFLOW]) == 0


async def test_a_registered_worker_has_a_fresh_fence(storage: Storage, worker: Worker) -> None:
    assert await storage.read_fence(worker.id) == Fence(worker.id, 0, 0)
    assert await storage.owned_runs(worker.id) == {}


async def test_registering_returns_the_time_of_the_database(storage: Storage) -> None:
    before = await storage.now()
    registered = await storage.register(WorkerInfo(WorkerId("w"), "shop", "host", 1), HOUR)
    assert before <= registered <= await storage.now()


async def test_a_heartbeat_returns_the_time_of_the_database(storage: Storage, worker: Worker) -> None:
    before = await storage.now()
    beat = await worker.beat()
    assert beat is not None
    assert before <= beat <= await storage.now()


async def test_a_worker_within_its_lease_is_not_taken_over(storage: Storage, make_worker: MakeWorker) -> None:
    await make_worker("live")
    taker = await make_worker("taker")
    assert await storage.take_over(taker.id) is None


async def test_a_beat_prolongs_the_lease(storage: Storage, make_worker: MakeWorker) -> None:
    lapsed, taker = await make_worker("lapsed", LAPSED), await make_worker("taker")
    assert await lapsed.beat(HOUR) is not None
    assert await storage.take_over(taker.id) is None


async def test_a_beat_may_also_end_the_lease(storage: Storage, make_worker: MakeWorker) -> None:
    worker, taker = await make_worker("worker"), await make_worker("taker")
    await worker.beat(LAPSED)
    assert await storage.take_over(taker.id) == Takeover(worker.id, 0)


async def test_a_pulse_beats_more_than_once(storage: Storage, worker: Worker) -> None:
    heartbeat = await storage.open_heartbeat()
    first = await heartbeat.beat(worker.id, HOUR)
    second = await heartbeat.beat(worker.id, HOUR)
    await heartbeat.close()
    assert first is not None
    assert second is not None
    assert first <= second


async def test_a_pulse_works_in_the_loop_of_another_thread(storage: Storage, worker: Worker) -> None:
    async def beat() -> int | None:
        heartbeat = await storage.open_heartbeat()
        try:
            return await heartbeat.beat(worker.id, HOUR)
        finally:
            await heartbeat.close()

    assert await asyncio.to_thread(asyncio.run, beat()) is not None


async def test_no_worker_takes_over_itself(storage: Storage, make_worker: MakeWorker) -> None:
    me = await make_worker("me", LAPSED)
    assert await storage.take_over(me.id) is None
    assert await storage.read_fence(me.id) == me.fence


async def test_the_runs_of_a_lapsed_worker_are_ready_for_others(storage: Storage, make_worker: MakeWorker) -> None:
    lapsed, taker = await make_worker("lapsed"), await make_worker("taker")
    await lapsed.write(new_run("run-1", entry(1)), new_run("run-2"))
    await lapsed.beat(LAPSED)
    assert await storage.take_over(taker.id) == Takeover(lapsed.id, 2)
    await expect_ready(storage, R1)
    await expect_ready(storage, R2)
    runs = {run.run_id: run for run in (await taker.claim()).runs}
    assert set(runs) == {R1, R2}
    assert (runs[R1].epoch, runs[R1].entries) == (2, (entry(1),))


async def test_a_taken_over_worker_can_do_nothing_more(storage: Storage, make_worker: MakeWorker) -> None:
    zombie, taker = await make_worker("zombie"), await make_worker("taker")
    await zombie.write(new_run("run-1"))
    await zombie.beat(LAPSED)
    await storage.take_over(taker.id)
    assert await zombie.beat() is None
    assert await storage.read_fence(zombie.id) is None
    assert await zombie.write(run_write("run-1", entry(1)), new_run("run-2")) is None
    assert (await zombie.claim()).runs == ()
    assert await storage.owned_runs(zombie.id) == {}
    assert await storage.history(R1) == ()
    assert await storage.get(R2) is None


async def test_one_worker_is_taken_over_at_a_time_until_none_is_left(storage: Storage, make_worker: MakeWorker) -> None:
    for name in ("a", "b", "c"):
        await make_worker(name, LAPSED)
    taker = await make_worker("taker")
    taken = [await storage.take_over(taker.id) for _ in range(4)]
    assert {each.worker for each in taken[:3] if each} == {"a", "b", "c"}
    assert taken[3] is None


async def test_two_takers_take_different_workers(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    for number in range(8):
        lapsed = await make_worker(f"lapsed-{number}", LAPSED)
        await lapsed.write(new_run(f"run-{number}"))
    other = await make_storage()

    async def sweep(storage: Storage, me: str) -> list[Takeover]:
        taken = []
        while took := await storage.take_over(WorkerId(me)):
            taken.append(took)
        return taken

    one, two = await asyncio.gather(sweep(storage, "one"), sweep(other, "two"))
    # A take-over may end early because the other process works on the last worker; together they leave none.
    taken = one + two + await sweep(storage, "one")
    assert sorted(each.worker for each in taken) == [f"lapsed-{number}" for number in range(8)]
    assert all(each.moved == 1 for each in taken)


async def test_a_retired_worker_leaves_its_runs_to_others(storage: Storage, make_worker: MakeWorker) -> None:
    leaver, other = await make_worker("leaver"), await make_worker("other")
    await leaver.write(new_run("run-1", entry(1)))
    await storage.remove_worker(leaver.id)
    await expect_ready(storage, R1)
    assert await storage.read_fence(leaver.id) is None
    assert await leaver.beat() is None
    assert await leaver.write(run_write("run-1", entry(2))) is None
    assert [run.run_id for run in (await other.claim()).runs] == [R1]
    assert await storage.take_over(other.id) is None


async def test_removing_a_worker_leaves_the_runs_of_others(storage: Storage, make_worker: MakeWorker) -> None:
    leaver, other = await make_worker("leaver"), await make_worker("other")
    await other.write(new_run("run-1"))
    await storage.remove_worker(leaver.id)
    assert await storage.owned_runs(other.id) == {R1: 1}


async def test_retiring_twice_is_harmless(storage: Storage, worker: Worker) -> None:
    await storage.remove_worker(worker.id)
    await storage.remove_worker(worker.id)
    assert await storage.read_fence(worker.id) is None


async def test_there_are_no_orphans_where_every_owner_has_a_fence(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    assert await storage.free_orphans() == 0
    assert await storage.owned_runs(worker.id) == {R1: 1}


async def test_what_a_takeover_leaves_over_is_found_as_orphans(storage: Storage, make_worker: MakeWorker) -> None:
    lapsed, taker = await make_worker("lapsed"), await make_worker("taker")
    for thousand in range(6):
        await lapsed.write(*(new_run(f"run-{thousand}-{number}") for number in range(1_000)))
    await lapsed.beat(LAPSED)
    assert await storage.take_over(taker.id) == Takeover(lapsed.id, 5_000)
    assert len(await storage.owned_runs(lapsed.id)) == 1_000
    assert await lapsed.write(run_write("run-5-999", entry(1))) is None
    assert await storage.free_orphans() == 1_000
    assert await storage.owned_runs(lapsed.id) == {}
    assert await storage.free_orphans() == 0


async def test_a_released_run_is_ready_and_its_owners_fence_changes(storage: Storage, make_worker: MakeWorker) -> None:
    owner, other = await make_worker("owner"), await make_worker("other")
    await owner.write(new_run("run-1"), new_run("run-2"))
    assert await storage.release_run(R1)
    await expect_ready(storage, R1)
    assert await storage.read_fence(owner.id) == Fence(owner.id, 1, 1)
    assert await owner.write(run_write("run-1", entry(1)), run_write("run-2", entry(1))) is None
    assert await storage.owned_runs(owner.id) == {R2: 1}
    owner.fence = Fence(owner.id, 1, 1)
    assert await owner.write(run_write("run-2", entry(1))) == frozenset()
    assert [(run.run_id, run.epoch) for run in (await other.claim()).runs] == [(R1, 2)]


async def test_a_run_without_an_owner_cannot_be_disowned(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    assert await storage.release_run(R1)
    assert not await storage.release_run(R1)
    assert not await storage.release_run(RunId("unknown"))
    assert await storage.read_fence(worker.id) == Fence(worker.id, 1, 1)


async def test_a_batch_and_a_disown_at_once_leave_no_row_of_a_zombie(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    owner = await make_worker("owner")
    other = await make_storage()
    for number in range(10):
        run = f"run-{number}"
        await owner.write(new_run(run))
        fence = await storage.read_fence(owner.id)
        assert fence is not None
        wrote, _ = await asyncio.gather(storage.write(fence, [run_write(run, entry(1))]), other.release_run(RunId(run)))
        assert await storage.history(RunId(run)) == (() if wrote is None else (entry(1),))
        fence = await storage.read_fence(owner.id)
        assert fence is not None
        assert fence.ownership_version == number + 1
        owner.fence = fence


async def test_registered_workers_shows_whose_lease_is_over(storage: Storage) -> None:
    for name, lease in (("a", HOUR), ("b", HOUR), ("c", LAPSED)):
        await storage.register(WorkerInfo(WorkerId(name), "service", "here", 42), lease)
    assert {(one.info.id, one.is_lapsed) for one in await storage.registered_workers()} == {
        ("a", False),
        ("b", False),
        ("c", True),
    }
    await storage.remove_worker(WorkerId("a"))
    await storage.remove_worker(WorkerId("c"))
    assert await storage.registered_workers() == (
        WorkerStatus(WorkerInfo(WorkerId("b"), "service", "here", 42), is_lapsed=False),
    )
