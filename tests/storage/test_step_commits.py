"""Step commits: written only for the owner of the run, and read by the worker that claims the run next."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from edda.core.model import BatchResult, End, EndWatcher, Fence, RunId, StepCommit, Suspend
from edda.core.states import RunStatus
from edda.errors import EddaError, LeaseLostError
from edda.storage.ports import SharedTransaction, Storage
from edda.storage.shared import step_commit
from edda.storage.shared.step_commit import StepCommitWrite
from tests.conftest import Database, MakeDatabase, MakeStorage

from .conftest import MakeWorker
from .records import HOUR, LAPSED, done, entry, new_run, next_generation, outbox_event, run_write, staged_event, start
from .shared_transactions import SQL_KINDS, record, step_record, transaction
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")
PAID = StepCommit("pay:1", 2, b"paid", 4_000)


@pytest.fixture(params=SQL_KINDS)
def database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    """The memory storage has no transactions of users."""
    return make_database(request.param)


# Writing


async def test_a_step_that_is_done_is_found(storage: Storage, make_storage: MakeStorage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await record(storage, step_record("run-1"))
    for witness in (storage, await make_storage()):
        assert await witness.find_step_commit(R1, 0, "pay:1") == PAID
        assert await witness.find_step_commit(R1, 0, "PAY:1") is None
        assert await witness.find_step_commit(R1, 1, "pay:1") is None
        assert await witness.find_step_commit(R2, 0, "pay:1") is None


async def test_any_step_and_value_come_back(storage: Storage, worker: Worker) -> None:
    run, step, value = "größer-🧾 :x", "a:1/'b\\' %s :step ?:2", bytes(range(256)) * 400
    await worker.write(new_run(run))
    await record(storage, step_record(run, step, value=value), step_record(run, "empty", value=b""))
    assert await storage.find_step_commit(RunId(run), 0, step) == StepCommit(step, 2, value, 4_000)
    assert await storage.find_step_commit(RunId(run), 0, "empty") == StepCommit("empty", 2, b"", 4_000)


@pytest.mark.parametrize(
    "theirs",
    [
        step_record("run-1", worker="worker-2"),
        step_record("run-1", epoch=2),
        step_record("run-1", epoch=0),
        step_record("run-1", generation=1),
        step_record("unowned"),
        step_record("ended"),
        step_record("missing"),
    ],
    ids=["worker", "later epoch", "earlier epoch", "generation", "unowned", "ended", "missing"],
)
async def test_only_the_owner_of_a_run_writes_its_step_commits(
    storage: Storage, worker: Worker, make_worker: MakeWorker, theirs: StepCommitWrite
) -> None:
    await make_worker("worker-2")
    rest = Suspend(0, None, RunStatus.WAITING_FOR_TIMER)
    await worker.write(new_run("run-1"), new_run("unowned", transition=rest), new_run("ended", transition=done()))
    with pytest.raises(LeaseLostError):
        await record(storage, step_record("run-1", "before"), theirs)
    assert await storage.find_step_commit(theirs.run_id, theirs.generation, "pay:1") is None
    assert await storage.find_step_commit(R1, 0, "before") is None
    await record(storage, step_record("run-1"))
    assert await storage.find_step_commit(R1, 0, "pay:1") == PAID


async def test_what_goes_with_a_step_goes_in_with_it(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    effects, sent = [staged_event("b"), staged_event("a")], [outbox_event("y", run_id="run-1"), outbox_event("x")]
    await record(storage, step_record("run-1", staged_events=effects, outbox_events=sent))
    assert [one.body for one in await storage.staged_events(10)] == [one.body for one in effects]
    assert [one.event for one in await storage.claim_outbox(10, HOUR)] == sent
    assert await storage.find_step_commit(R1, 0, "pay:1") == PAID


async def test_a_step_that_is_not_committed_has_no_side_effects(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    with pytest.raises(LeaseLostError):
        await record(
            storage, step_record("run-1", epoch=7, staged_events=[staged_event("a")], outbox_events=[outbox_event("b")])
        )
    assert await storage.staged_events(10) == ()
    assert await storage.find_outbox() == ()


async def test_a_step_is_recorded_once(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await record(storage, step_record("run-1"))
    with pytest.raises(Exception, match=r"(?i)unique|duplicate") as caught:
        await record(storage, step_record("run-1", value=b"twice", staged_events=[staged_event("a")]))
    assert not isinstance(caught.value, EddaError), "the driver's own error"
    assert await storage.find_step_commit(R1, 0, "pay:1") == PAID
    assert await storage.staged_events(10) == ()


# Moving into the history


async def test_a_row_goes_with_the_batch_that_brings_its_entry(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    await record(storage, *(step_record(run, step) for run in (R1, R2) for step in ("a", "b", "c")))
    assert await worker.send(run_write("run-1", entry(1), recorded_steps=["a", "c", "never there"])) == BatchResult()
    assert [await storage.find_step_commit(R1, 0, step) is None for step in ("a", "b", "c")] == [True, False, True]
    assert [await storage.find_step_commit(R2, 0, step) is None for step in ("a", "b", "c")] == [False] * 3


async def test_many_runs_record_their_steps_in_one_batch(storage: Storage, worker: Worker) -> None:
    runs = [RunId(f"run-{n}") for n in range(20)]
    await worker.write(*(new_run(run) for run in runs))
    await record(storage, *(step_record(run, step) for run in runs for step in ("a", "b")))
    await worker.write(
        *(run_write(run, entry(1), recorded_steps=["a" if n % 2 else "b"]) for n, run in enumerate(runs))
    )
    left = [[step for step in ("a", "b") if await storage.find_step_commit(run, 0, step)] for run in runs]
    assert left == [["a"], ["b"]] * 10


async def test_only_rows_of_the_writes_generation_go(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await record(storage, step_record("run-1"))
    await worker.write(run_write("run-1", transition=next_generation()))
    await record(storage, step_record("run-1", generation=1))
    await worker.write(run_write("run-1", entry(2), generation=1, recorded_steps=["pay:1"]))
    assert await storage.find_step_commit(R1, 1, "pay:1") is None
    assert await storage.find_step_commit(R1, 0, "pay:1") == PAID


async def test_a_batch_behind_its_fence_leaves_the_rows(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await record(storage, step_record("run-1"))
    assert await storage.write(Fence(worker.id, 0, 0), [run_write("run-1", entry(1), recorded_steps=["pay:1"])]) is None
    assert await storage.find_step_commit(R1, 0, "pay:1") == PAID


async def test_a_row_goes_though_the_end_is_refused(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await record(storage, step_record("run-1"))
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    refused = run_write("run-1", entry(1), transition=done(), recorded_steps=["pay:1"])
    assert await worker.send(refused) == BatchResult(refused={R1: frozenset()})
    assert await storage.find_step_commit(R1, 0, "pay:1") is None


async def test_what_is_left_goes_with_the_run(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    await record(storage, step_record("run-1"), step_record("run-2"))
    await worker.write(run_write("run-1", transition=End(RunStatus.COMPLETED, b"", 50)))
    assert await storage.prune_runs(100, 10) == 1
    assert await storage.find_step_commit(R1, 0, "pay:1") is None
    assert await storage.find_step_commit(R2, 0, "pay:1") == PAID


# The next owner


async def test_a_claim_brings_what_is_done_and_not_in_the_history(
    storage: Storage, worker: Worker, make_worker: MakeWorker
) -> None:
    heir = await make_worker("heir")
    await worker.write(new_run("run-1", entry(1)), new_run("run-2"))
    await record(storage, step_record("run-1", "b"), step_record("run-1", "a"), step_record("run-1", "c"))
    await worker.write(run_write("run-1", entry(2), recorded_steps=["c"]))
    for run in (R1, R2):
        await storage.release_run(run)
    claimed = {run.run_id: sorted(run.step_commits, key=lambda x: x.step) for run in (await heir.claim()).runs}
    assert claimed == {R1: [StepCommit("a", 2, b"paid", 4_000), StepCommit("b", 2, b"paid", 4_000)], R2: []}


async def test_a_claim_brings_only_what_its_generation_did(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await record(storage, step_record("run-1", "old"))
    await worker.write(run_write("run-1", transition=next_generation()))
    await record(storage, step_record("run-1", "new", generation=1))
    await storage.release_run(R1)
    (run,) = (await worker.claim()).runs
    assert (run.generation, [x.step for x in run.step_commits]) == (1, ["new"])


async def test_many_runs_are_claimed_with_what_they_did(storage: Storage, worker: Worker) -> None:
    runs = [RunId(f"run-{n}") for n in range(20)]
    await worker.write(*(new_run(run, entry(1), entry(2)) for run in runs))
    await record(storage, *(step_record(run, f"{run}/{n}") for run in runs[::2] for n in range(3)))
    for run in runs:
        await storage.release_run(run)
    claimed = {run.run_id: sorted(x.step for x in run.step_commits) for run in (await worker.claim()).runs}
    assert claimed == {run: [f"{run}/{n}" for n in range(3)] if run in runs[::2] else [] for run in runs}


async def test_who_takes_a_run_away_waits_for_a_step_that_is_being_recorded(
    storage: Storage, make_storage: MakeStorage, worker: Worker, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    heir = await make_worker("heir", on=other)
    await worker.write(new_run("run-1"))
    async with transaction(storage) as shared:
        await step_commit.write_step_commit(shared, step_record("run-1"))
        disowning = asyncio.create_task(other.release_run(R1))
        await asyncio.sleep(0.3)
        assert not disowning.done()
    async with asyncio.timeout(30):
        assert await disowning
    (run,) = (await heir.claim()).runs
    assert run.step_commits == (PAID,)


async def test_a_lock_on_the_run_waits_for_a_step_that_is_being_recorded(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    """A worker whose COMMIT had no answer learns by it whether the step is recorded: the COMMIT may be under way."""
    other = await make_storage()
    await worker.write(new_run("run-1"))

    async def lock_and_find() -> StepCommit | None:
        async with transaction(other) as locking:
            await step_commit.lock_run(locking, R1)
        return await other.find_step_commit(R1, 0, "pay:1")

    async with transaction(storage) as shared:
        await step_commit.write_step_commit(shared, step_record("run-1"))
        finding = asyncio.create_task(lock_and_find())
        await asyncio.sleep(0.3)
        assert not finding.done()
    async with asyncio.timeout(30):
        assert await finding == PAID


async def test_who_takes_a_run_away_need_not_wait_for_a_step_that_is_rolled_back(
    storage: Storage, make_storage: MakeStorage, worker: Worker, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    heir = await make_worker("heir", on=other)
    await worker.write(new_run("run-1"))
    shared = await storage.begin()
    await step_commit.write_step_commit(shared, step_record("run-1"))
    disowning = asyncio.create_task(other.release_run(R1))
    await asyncio.sleep(0.1)
    await shared.rollback()
    async with asyncio.timeout(30):
        assert await disowning
    (run,) = (await heir.claim()).runs
    assert run.step_commits == ()


async def test_a_step_is_not_recorded_once_its_run_was_taken_away(
    storage: Storage, make_storage: MakeStorage, worker: Worker, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    heir = await make_worker("heir", on=other)
    await worker.write(new_run("run-1"))
    await other.release_run(R1)
    with pytest.raises(LeaseLostError):
        await record(storage, step_record("run-1"))
    (run,) = (await heir.claim()).runs
    with pytest.raises(LeaseLostError):
        await record(storage, step_record("run-1"))
    assert run.step_commits == ()
    assert await storage.find_step_commit(R1, 0, "pay:1") is None


async def inherit(storage: Storage, heir: Worker, run_id: RunId) -> tuple[StepCommit, ...]:
    """The step commits that the next owner finds, by each way in which the run is freed."""
    while True:
        await storage.take_over(heir.id)
        await storage.free_orphans()
        for run in (await heir.claim()).runs:
            if run.run_id == run_id:
                return run.step_commits


async def recorded(storage: Storage, step: StepCommitWrite) -> bool:
    try:
        await record(storage, step)
    except LeaseLostError:
        return False
    return True


async def test_a_step_is_recorded_before_a_take_over_or_not_at_all(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    heir = await make_worker("heir", on=other)
    for turn in range(25):
        owner, run = await make_worker(f"owner-{turn}", lease=LAPSED), RunId(f"run-{turn}")
        await owner.write(new_run(run))
        step = step_record(run, worker=owner.id)

        async def late(turn: int = turn, run: RunId = run) -> tuple[StepCommit, ...]:
            for _ in range(turn % 5):
                await other.now()
            return await inherit(other, heir, run)

        async with asyncio.timeout(60):
            was_recorded, inherited = await asyncio.gather(recorded(storage, step), late())
        assert inherited == ((PAID,) if was_recorded else ())
        assert (await storage.find_step_commit(run, 0, "pay:1") is not None) is was_recorded


async def test_a_step_is_recorded_before_its_run_is_disowned_or_not_at_all(
    storage: Storage, make_storage: MakeStorage, worker: Worker, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    heir = await make_worker("heir", on=other)

    async def steal(run: RunId, delay: int) -> tuple[StepCommit, ...]:
        for _ in range(delay):
            await other.now()
        assert await other.release_run(run)
        while True:  # a run that is locked now is claimed the next time
            for claimed in (await heir.claim()).runs:
                return claimed.step_commits

    for turn in range(25):
        run = RunId(f"run-{turn}")
        await storage.start([start(run)])
        (ours,) = (await worker.claim()).runs
        async with asyncio.timeout(60):
            was_recorded, found = await asyncio.gather(
                recorded(storage, step_record(run, epoch=ours.epoch)), steal(run, turn % 5)
            )
        assert found == ((PAID,) if was_recorded else ())


async def test_a_run_writes_its_history_while_a_step_of_it_is_recorded(storage: Storage, worker: Worker) -> None:
    """The owner's batches change the row that the step commit shares: neither may fail because of the other."""
    await worker.write(new_run("run-1"))
    for turn in range(20):
        written, was_recorded = await asyncio.gather(
            worker.send(run_write("run-1", entry(turn + 1))), recorded(storage, step_record("run-1", f"s{turn}"))
        )
        assert (written, was_recorded) == (BatchResult(), True)


# On a cluster, where a lock does not reach the other nodes


class Certified:
    """A transaction on a cluster that answers each statement with a number of rows."""

    dialect, is_certified = "mysql", True

    def __init__(self, rows: int) -> None:
        self.sent: list[str] = []
        self._rows = rows

    async def execute(self, sql: str, values: Mapping[str, Any]) -> int:
        self.sent.append(" ".join(sql.split()[:2]))
        return self._rows


async def test_on_a_cluster_a_step_commit_writes_the_row_of_its_run() -> None:
    """Of two transactions that write one row at two nodes the cluster refuses one."""
    shared = Certified(1)
    await step_commit.write_step_commit(cast(SharedTransaction, shared), step_record("run-1"))
    assert shared.sent == ["UPDATE edda_open_run", "INSERT INTO"]


async def test_on_a_cluster_a_step_of_a_run_that_was_taken_is_not_recorded() -> None:
    shared = Certified(0)
    with pytest.raises(LeaseLostError):
        await step_commit.write_step_commit(cast(SharedTransaction, shared), step_record("run-1"))
    assert shared.sent == ["UPDATE edda_open_run"]


async def test_on_a_cluster_the_lock_on_a_run_is_a_write() -> None:
    shared = Certified(1)
    await step_commit.lock_run(cast(SharedTransaction, shared), R1)
    assert shared.sent == ["UPDATE edda_open_run"]
