"""Claims: each due run goes to one worker, with everything needed to replay it."""

from __future__ import annotations

import asyncio

from edda.core.model import EntryKind, RunId, Suspend
from edda.core.states import RunStatus
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .conftest import MakeWorker
from .records import LATER, WORKFLOW, entry, new_run, run_write, start
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")


async def test_a_claimed_run_is_owned_under_a_new_epoch(storage: Storage, worker: Worker) -> None:
    await storage.start([start("run-1")])
    claim = await worker.claim()
    assert [(run.run_id, run.epoch, run.attempts, run.inbox_read) for run in claim.runs] == [(R1, 1, 0, 0)]
    assert await storage.owned_runs(worker.id) == {R1: 1}
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.owner, run.ready_at) == (RunStatus.RUNNING, worker.id, None)


async def test_a_claim_brings_the_time_of_the_database(storage: Storage, worker: Worker) -> None:
    before = await storage.now()
    claim = await worker.claim()
    assert before <= claim.now <= await storage.now()


async def test_a_run_is_claimed_once(storage: Storage, make_worker: MakeWorker) -> None:
    one, two = await make_worker("one"), await make_worker("two")
    await storage.start([start("run-1")])
    assert len((await one.claim()).runs) == 1
    assert (await two.claim()).runs == ()
    assert (await one.claim()).runs == ()


async def test_claiming_nothing_is_fine(worker: Worker) -> None:
    assert (await worker.claim()).runs == ()
    assert (await worker.storage.claim(worker.id, [], 10)).runs == ()


async def test_an_unregistered_worker_claims_nothing(storage: Storage) -> None:
    await storage.start([start("run-1")])
    assert (await Worker(storage, "nobody").claim()).runs == ()
    run = await storage.get(R1)
    assert run is not None
    assert run.owner is None


async def test_the_oldest_run_is_claimed_first(storage: Storage, worker: Worker) -> None:
    await storage.start([start(f"run-{number}", ready_at=100 - number) for number in range(10)])
    claimed = [(await worker.claim(limit=1)).runs[0].run_id for _ in range(10)]
    assert claimed == [f"run-{number}" for number in reversed(range(10))]


async def test_a_claim_takes_no_more_than_its_limit(storage: Storage, worker: Worker) -> None:
    await storage.start([start(f"run-{number}", ready_at=number + 1) for number in range(10)])
    assert {run.run_id for run in (await worker.claim(limit=3)).runs} == {"run-0", "run-1", "run-2"}
    assert len((await worker.claim(limit=100)).runs) == 7


async def test_the_limit_counts_over_all_workflows(storage: Storage, worker: Worker) -> None:
    await storage.start([start(f"a-{number}", workflow="a") for number in range(5)])
    await storage.start([start(f"b-{number}", workflow="b") for number in range(5)])
    first, second = (await worker.claim("a", "b", limit=7)).runs, (await worker.claim("a", "b", limit=7)).runs
    assert (len(first), len(second)) == (7, 3)
    assert len({run.run_id for run in first + second}) == 10


async def test_only_workflows_the_worker_knows_are_claimed(storage: Storage, worker: Worker) -> None:
    await storage.start([start("a", workflow="a"), start("b", workflow="b"), start("c", workflow="c")])
    assert {run.run_id for run in (await worker.claim("a", "c", "unknown")).runs} == {"a", "c"}
    assert (await worker.claim("a", "c")).runs == ()


async def test_a_run_is_not_claimed_before_its_time(storage: Storage, worker: Worker) -> None:
    await storage.start([start("later", ready_at=LATER), start("past", ready_at=1), start("now")])
    assert {run.run_id for run in (await worker.claim()).runs} == {"past", "now"}


async def test_a_claim_carries_all_that_was_given_at_the_start(storage: Storage, worker: Worker) -> None:
    given = start("run-1", created_at=123)
    await storage.start([given])
    (run,) = (await worker.claim()).runs
    assert (run.workflow, run.generation, run.input, run.created_at, run.deadline) == (
        WORKFLOW,
        0,
        given.input,
        123,
        None,
    )


async def test_claims_carry_the_history_of_each_run_in_order(storage: Storage, worker: Worker) -> None:
    rest = Suspend(0, 0, RunStatus.WAITING_FOR_TIMER)
    await worker.write(new_run("run-1", entry(2), entry(1)), new_run("run-2", entry(1, b"other"), transition=rest))
    await worker.write(run_write("run-1", entry(10), entry(3), transition=rest))
    runs = {run.run_id: run.entries for run in (await worker.claim()).runs}
    assert runs == {R1: (entry(1), entry(2), entry(3), entry(10)), R2: (entry(1, b"other"),)}


async def test_a_claim_carries_the_inbox_not_read_yet(storage: Storage, worker: Worker) -> None:
    await storage.start([start("run-1", ready_at=LATER)])
    await storage.cancel(R1, b"stop")
    (run,) = (await worker.claim()).runs
    (item,) = run.inbox
    assert (item.run_id, item.inbox_no, item.kind, item.value) == (R1, 1, EntryKind.CANCEL, b"stop")
    assert run.inbox_read == 0


async def test_a_claim_leaves_out_the_inbox_that_was_read(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"stop")
    await worker.write(run_write("run-1", entry(1, n=1), transition=Suspend(1, 0, RunStatus.WAITING_FOR_TIMER)))
    (run,) = (await worker.claim()).runs
    assert (run.inbox_read, run.inbox, run.entries) == (1, (), (entry(1, n=1),))


async def test_claimers_at_the_same_time_get_different_runs(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    ids = {f"run-{number:02}" for number in range(60)}
    await storage.start([start(run_id) for run_id in ids])
    workers = [await make_worker("one"), await make_worker("two", on=await make_storage())]
    claimed: list[str] = []

    async def claim_all(worker: Worker) -> None:
        while len(claimed) < len(ids):
            claimed.extend(run.run_id for run in (await worker.claim(limit=7)).runs)

    await asyncio.gather(*(claim_all(worker) for worker in workers))
    assert sorted(claimed) == sorted(ids)
    owned = [await storage.owned_runs(worker.id) for worker in workers]
    assert len(owned[0]) + len(owned[1]) == len(ids)


async def test_nothing_is_due_where_nothing_waits(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    assert await storage.next_due([WORKFLOW]) is None
    assert await storage.next_due([]) is None


async def test_what_is_ready_is_due_now(storage: Storage) -> None:
    await storage.start([start("run-1", ready_at=LATER), start("run-2", ready_at=1)])
    assert await storage.next_due([WORKFLOW]) == 0


async def test_the_next_due_time_is_that_of_the_first_run_of_these_workflows(storage: Storage) -> None:
    await storage.start(
        [
            start("last", ready_at=LATER + 50),
            start("first", ready_at=LATER),
            start("other", ready_at=1, workflow="other"),
        ]
    )
    before = await storage.now()
    due = await storage.next_due([WORKFLOW])
    assert due is not None
    assert LATER - await storage.now() <= due <= LATER - before


async def test_unparking_makes_parked_runs_claimable(storage: Storage, worker: Worker) -> None:
    park = Suspend(0, LATER, RunStatus.PARKED, "the code changed")
    await worker.write(
        new_run("parked", transition=park),
        new_run("other", transition=park, workflow="other"),
        new_run("asleep", transition=Suspend(0, LATER, RunStatus.WAITING_FOR_TIMER)),
    )
    assert (await worker.claim()).runs == ()
    assert await storage.wake_parked([WORKFLOW]) == 1
    assert [(run.run_id, run.attempts) for run in (await worker.claim()).runs] == [("parked", 1)]
    assert await storage.wake_parked([WORKFLOW]) == 0


async def test_a_parked_run_in_a_workers_hands_is_left_alone(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=Suspend(0, 0, RunStatus.PARKED, "the code changed")))
    await worker.claim()
    assert await storage.wake_parked([WORKFLOW]) == 0
    assert await storage.owned_runs(worker.id) == {R1: 2}


async def test_inbox_comes_for_owned_runs_in_order(storage: Storage, make_worker: MakeWorker) -> None:
    owner, other = await make_worker("owner"), await make_worker("other")
    await owner.write(*(new_run(f"run-{number}") for number in (3, 1, 2)))
    await other.write(new_run("foreign"))
    for run in ("run-2", "run-3", "foreign"):
        await storage.cancel(RunId(run), run.encode())
    assert [(item.run_id, item.value) for item in await storage.read_inboxes(owner.id)] == [
        ("run-2", b"run-2"),
        ("run-3", b"run-3"),
    ]
