"""Deaths are counted when runs are freed from dead workers; suspects are claimed apart from other runs."""

from __future__ import annotations

from msgspec.structs import replace

from edda.core.model import Crashes, EntryKind, RunId, Suspend
from edda.core.states import RunStatus
from edda.storage.ports import Storage

from .conftest import MakeWorker
from .records import LAPSED, LATER, WORKFLOW, entry, run_write, start
from .worker import Worker

R1 = RunId("run-1")


async def deaths_of(storage: Storage, run_id: RunId = R1) -> int:
    record = await storage.get(run_id)
    assert record is not None
    return record.deaths


async def die(storage: Storage, make_worker: MakeWorker, name: str, *, alone: bool = False) -> Crashes:
    """A worker claims the run and its process dies; returns what the claim said of earlier deaths."""
    worker = await make_worker(name)
    claim = await worker.claim()
    if not claim.runs:
        claim = await storage.claim_suspects(worker.id, [WORKFLOW], 10, alone)
    assert len(claim.runs) == 1
    await storage.remove_worker(worker.id, died=True)
    return claim.runs[0].crashes


async def test_each_death_of_an_owner_is_counted_and_two_make_a_suspect(
    storage: Storage, make_worker: MakeWorker, worker: Worker
) -> None:
    await storage.start([start("run-1")])
    assert await die(storage, make_worker, "a") == Crashes()
    assert await storage.next_due([WORKFLOW]) == 0
    assert not await storage.has_suspects([WORKFLOW])
    assert await die(storage, make_worker, "b") == Crashes(1, 0, 0)
    assert await storage.has_suspects([WORKFLOW])
    assert not await storage.has_suspects(["other"])
    assert await storage.next_due([WORKFLOW]) is None, "a worker that claims as usual does not see it"
    assert (await worker.claim()).runs == ()
    assert await die(storage, make_worker, "c", alone=True) == Crashes(2, 0, 0)
    assert await die(storage, make_worker, "d", alone=True) == Crashes(3, 1, 0)
    assert await die(storage, make_worker, "e", alone=False) == Crashes(4, 2, 0)
    assert await deaths_of(storage) == 5


async def test_a_group_is_not_alone_and_company_ends_being_alone(storage: Storage, make_worker: MakeWorker) -> None:
    await storage.start([start("run-1")])
    for name in ("a", "b", "c"):
        await die(storage, make_worker, name)
    worker = await make_worker("d")
    (claimed,) = (await storage.claim_suspects(worker.id, [WORKFLOW], 10, True)).runs
    assert claimed.crashes == Crashes(3, 0, 0)
    await storage.keep_company(worker.id)
    await storage.remove_worker(worker.id, died=True)
    assert await die(storage, make_worker, "e", alone=False) == Crashes(4, 0, 0)
    assert await die(storage, make_worker, "f", alone=False) == Crashes(5, 0, 0)


async def claim_group(storage: Storage, worker: Worker, few: int = 100) -> dict[str, Crashes]:
    runs = (await storage.claim_suspects(worker.id, [WORKFLOW], few, True)).runs
    return {run.run_id: run.crashes for run in runs}


async def make_suspects(storage: Storage, make_worker: MakeWorker, count: int) -> None:
    await storage.start([start(f"run-{number:02}") for number in range(count)])
    for name in ("a", "b"):
        worker = await make_worker(name)
        assert len((await worker.claim()).runs) == count
        await storage.remove_worker(worker.id, died=True)


async def test_runs_that_died_together_come_in_groups_and_a_group_that_dies_is_divided(
    storage: Storage, make_worker: MakeWorker
) -> None:
    await make_suspects(storage, make_worker, 10)
    worker = await make_worker("c")
    assert await claim_group(storage, worker) == dict.fromkeys(("run-00", "run-08", "run-09"), Crashes(2, 0, 0))
    await storage.remove_worker(worker.id, died=True)
    worker = await make_worker("d")
    assert await claim_group(storage, worker) == {"run-00": Crashes(3, 0, 0)}, "of the group that died"
    await storage.remove_worker(worker.id, died=True)
    worker = await make_worker("e")
    assert await claim_group(storage, worker) == {"run-00": Crashes(4, 1, 0)}, "it was the only one"
    groups = [await claim_group(storage, worker) for _ in range(6)]
    assert [list(group) for group in groups] == [
        ["run-08"],
        ["run-09"],
        ["run-01", "run-02"],
        ["run-03", "run-04", "run-05"],
        ["run-06", "run-07"],
        [],
    ]
    assert not await storage.has_suspects([WORKFLOW])
    await storage.keep_company(worker.id)
    await storage.remove_worker(worker.id, died=True)
    worker = await make_worker("f")
    assert await claim_group(storage, worker) == {"run-00": Crashes(5, 1, 0)}, "those first that ever died alone"
    assert set(await claim_group(storage, worker)) < {f"run-{number:02}" for number in range(1, 8)}, "fewer deaths"


async def test_few_deaths_and_rounds_find_the_run_that_kills_among_many(
    storage: Storage, make_worker: MakeWorker
) -> None:
    """Processes that run one group after the other. Runs that finish their steps stay with their process."""
    count, killer = 40, "run-23"
    await make_suspects(storage, make_worker, count)
    deaths, turns, cleared = 2, 0, set[str]()
    alone = 0
    while alone < 2:
        worker, owned = await make_worker(f"process-{deaths}"), 0
        while killer not in (group := await claim_group(storage, worker)):
            assert group
            assert all(crashes.alone == 0 for crashes in group.values()), "no death was that of an innocent run"
            for run_id in group:
                await storage.clear_deaths(RunId(run_id), 3 + group[run_id].deaths - 2)
            await storage.keep_company(worker.id)
            owned, turns, cleared = owned + len(group), turns + 1, cleared | group.keys()
        if owned:
            await storage.keep_company(worker.id)
        deaths, turns = deaths + 1, turns + 1
        await storage.remove_worker(worker.id, died=True)
        alone += len(group) == 1 and not owned
    assert deaths <= 8
    assert turns <= 12
    for run_id in cleared:
        assert await deaths_of(storage, RunId(run_id)) <= 1, "they go on among the others"
    worker = await make_worker("last")
    assert await claim_group(storage, worker) == {killer: Crashes(deaths, 2, 0)}
    while await claim_group(storage, worker):
        turns += 1
    assert turns <= 16


async def test_a_group_that_is_too_large_for_a_claim_is_claimed_by_and_by(
    storage: Storage, make_worker: MakeWorker
) -> None:
    await make_suspects(storage, make_worker, 10)
    worker = await make_worker("c")
    assert list(await claim_group(storage, worker, 2)) == ["run-00", "run-08"]
    assert list(await claim_group(storage, worker, 2)) == ["run-09"]


async def test_a_worker_that_leaves_in_order_is_no_death(storage: Storage, make_worker: MakeWorker) -> None:
    await storage.start([start("run-1")])
    for name in "abc":
        worker = await make_worker(name)
        assert len((await worker.claim()).runs) == 1
        await storage.remove_worker(worker.id)
    assert await deaths_of(storage) == 0


async def test_a_lapsed_lease_and_an_orphan_are_deaths(storage: Storage, make_worker: MakeWorker) -> None:
    await storage.start([start("run-1")])
    worker = await make_worker("dead", LAPSED)
    assert len((await worker.claim()).runs) == 1
    other = await make_worker("other")
    takeover = await storage.take_over(other.id)
    assert takeover is not None
    assert takeover.moved == 1
    assert await deaths_of(storage) == 1


async def test_a_death_keeps_the_last_entry_before_the_first_death(storage: Storage, make_worker: MakeWorker) -> None:
    """Only the owner knows which steps were in flight at the first death and have ended since."""
    await storage.start([start("run-1")])
    for number, name in enumerate("abc", 1):
        worker = await make_worker(name)
        runs = (await worker.claim()).runs or (await storage.claim_suspects(worker.id, [WORKFLOW], 10, False)).runs
        await worker.write(run_write("run-1", entry(number), epoch=runs[0].epoch))
        await storage.remove_worker(worker.id, died=True)
    assert await die(storage, make_worker, "d") == Crashes(3, 0, 1)
    worker = await make_worker("e")
    (claimed,) = (await storage.claim_suspects(worker.id, [WORKFLOW], 10, False)).runs
    await storage.clear_deaths(R1, claimed.epoch)
    await storage.remove_worker(worker.id, died=True)
    assert await die(storage, make_worker, "f") == Crashes(1, 0, 3), "the first one since they were cleared"


async def test_no_entry_by_itself_makes_a_death_void(storage: Storage, make_worker: MakeWorker) -> None:
    await storage.start([start("run-1")])
    for number, kind in enumerate((EntryKind.STEP, EntryKind.TIMER, EntryKind.EVENT), 1):
        worker = await make_worker(f"w{number}")
        claim = await worker.claim()
        runs = claim.runs or (await storage.claim_suspects(worker.id, [WORKFLOW], 10, False)).runs
        assert runs[0].crashes.deaths == number - 1
        await worker.write(run_write("run-1", replace(entry(number), kind=kind), epoch=runs[0].epoch))
        await storage.remove_worker(worker.id, died=True)
    assert await deaths_of(storage) == 3


async def test_deaths_are_cleared_by_the_owner_alone(storage: Storage, make_worker: MakeWorker) -> None:
    await storage.start([start("run-1")])
    await die(storage, make_worker, "a")
    worker = await make_worker("b")
    (claimed,) = (await worker.claim()).runs
    await storage.clear_deaths(R1, claimed.epoch - 1)
    assert await deaths_of(storage) == 1
    await storage.clear_deaths(R1, claimed.epoch)
    assert await deaths_of(storage) == 0


async def test_a_release_clears_deaths_unless_it_parks(storage: Storage, make_worker: MakeWorker) -> None:
    await storage.start([start("run-1"), start("run-2")])
    for name in "ab":
        worker = await make_worker(name)
        assert len((await worker.claim()).runs) == 2
        await storage.remove_worker(worker.id, died=True)
    worker = await make_worker("c")
    for _ in range(2):
        (claimed,) = (await storage.claim_suspects(worker.id, [WORKFLOW], 9, False)).runs
    epoch = claimed.epoch
    await worker.write(
        run_write("run-1", transition=Suspend(0, LATER, RunStatus.WAITING_FOR_TIMER, "timer"), epoch=epoch),
        run_write("run-2", transition=Suspend(0, None, RunStatus.PARKED, "died"), epoch=epoch),
    )
    assert await deaths_of(storage) == 0
    assert await deaths_of(storage, RunId("run-2")) == 2
    assert await storage.resume(RunId("run-2"))
    assert await deaths_of(storage, RunId("run-2")) == 0


async def test_what_arrives_does_not_bring_a_suspect_among_the_others(
    storage: Storage, make_worker: MakeWorker, worker: Worker
) -> None:
    await storage.start([start("run-1")])
    for name in "ab":
        await die(storage, make_worker, name)
    await storage.cancel(R1, b"stop")
    assert (await worker.claim()).runs == ()
    (claimed,) = (await storage.claim_suspects(worker.id, [WORKFLOW], 9, False)).runs
    assert len(claimed.inbox) == 1


async def test_a_worker_without_a_fence_gets_no_suspects(storage: Storage, make_worker: MakeWorker) -> None:
    await storage.start([start("run-1")])
    for name in "ab":
        await die(storage, make_worker, name)
    assert (await storage.claim_suspects(Worker(storage, "nobody").id, [WORKFLOW], 9, True)).runs == ()
    assert await storage.has_suspects([WORKFLOW])


async def test_a_claim_of_suspects_is_counted_like_any_other(storage: Storage, make_worker: MakeWorker) -> None:
    await storage.start([start("run-1")])
    for name in ("a", "b"):
        ghost = await make_worker(name)
        assert len((await ghost.claim()).runs) == 1
        await storage.remove_worker(ghost.id, died=True)
    worker = await make_worker("c")
    first = await storage.claim(worker.id, [WORKFLOW], 10)
    assert first.number == 1
    lost = await storage.claim_suspects(worker.id, [WORKFLOW], 10, False, 2)
    assert (lost.number, lost.runs) == (None, ()), "the database knows of fewer claims than were answered"
    suspects = await storage.claim_suspects(worker.id, [WORKFLOW], 10, False, 1)
    assert (suspects.number, len(suspects.runs)) == (2, 1)
    assert (await storage.claim_suspects(worker.id, [WORKFLOW], 10, False, 2)).number == 3, "one that finds nothing too"
    fence = await storage.read_fence(worker.id)
    assert fence is not None
    assert fence.claims == 3
