"""Messages that a step takes: no other run receives them, and they are delivered again unless the step commits."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from edda.core.model import AcceptResult, AckInbox, BatchResult, RunId, StagedKind
from edda.errors import LeaseLostError, StorageConflictError
from edda.storage.ports import Storage
from edda.storage.shared import step_commit
from tests.conftest import MakeStorage

from .conftest import MakeWorker
from .probes import SimulatedDeath, Trap
from .records import HOUR, LAPSED, incoming, key, new_run, run_write, staged_event, wait
from .shared_transactions import SQL_KINDS, record, step_record, transaction
from .worker import Worker

R1 = RunId("run-1")
JOBS = key("jobs")

without_memory = pytest.mark.parametrize("database", SQL_KINDS, indirect=True)
only_on_files = pytest.mark.parametrize("database", SQL_KINDS[:1], indirect=True)


async def publish(storage: Storage, *ids: str) -> None:
    await storage.accept([incoming(id, exclusive=["jobs"]) for id in ids], {})


async def waiting(storage: Storage) -> list[bytes]:
    return [one.body for one in await storage.staged_events(1_000)]


# Taking


async def test_the_first_message_is_taken_away_from_all_others(storage: Storage, worker: Worker) -> None:
    await publish(storage, "m", "z", "a")
    assert await storage.take_message(key("other"), HOUR) is None
    for id in ("m", "z"):
        taken = await storage.take_message(JOBS, HOUR)
        assert taken is not None
        assert (taken.kind, taken.body) == (StagedKind.REDELIVERY, id.encode())
    await worker.write(new_run("run-1"))
    await worker.send(run_write("run-1", transition=AckInbox(0), waits=[wait("run-1", "w", "jobs", exclusive=True)]))
    assert [item.value for item in await storage.read_inboxes(worker.id)] == [b"a"]
    assert await storage.take_message(JOBS, HOUR) is None


async def test_a_message_that_a_run_received_is_not_taken(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w", "jobs", exclusive=True)]))
    await publish(storage, "e1")
    assert await storage.take_message(JOBS, HOUR) is None


async def test_a_message_for_all_is_still_there_for_all(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1", "news", exclusive=["jobs"])], {})
    assert await storage.take_message(JOBS, HOUR) is not None
    await worker.send(run_write("run-1", transition=AckInbox(0), waits=[wait("run-1", "w", "news")]))
    assert [item.value for item in await storage.read_inboxes(worker.id)] == [b"e1"]


async def test_a_taken_message_is_delivered_again_when_the_lease_is_over(storage: Storage) -> None:
    await publish(storage, "held", "lapsed")
    assert await storage.take_message(JOBS, HOUR) is not None
    assert await storage.staged_events(10) == ()
    taken = await storage.take_message(JOBS, LAPSED)
    assert taken is not None
    assert await storage.staged_events(10) == (taken,)
    assert taken.body == b"lapsed"


async def test_what_is_not_due_holds_up_no_other_staged_event(storage: Storage, worker: Worker) -> None:
    await publish(storage, *(f"e{n}" for n in range(20)))
    for _ in range(20):
        await storage.take_message(JOBS, HOUR)
    await worker.write(run_write("run-1", start=new_run("run-1").start, staged_events=[staged_event("a")]))
    assert await waiting(storage) == [staged_event("a").body]
    assert len(await storage.staged_events(1)) == 1


async def test_a_redelivery_is_deleted_in_the_commit_that_stores_the_message_again(storage: Storage) -> None:
    await publish(storage, "e1")
    taken = await storage.take_message(JOBS, LAPSED)
    assert taken is not None
    assert await storage.accept([incoming("again", exclusive=["jobs"])], {}, [taken.seq]) == AcceptResult(
        frozenset({0}), woke=False
    )
    assert await storage.staged_events(10) == ()
    again = await storage.take_message(JOBS, HOUR)
    assert again is not None
    assert again.body == b"again"
    assert again.seq > taken.seq


# Committing


@without_memory
async def test_a_message_that_a_step_used_is_not_delivered_again(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await publish(storage, "e1", "e2")
    used, unused = await storage.take_message(JOBS, LAPSED), await storage.take_message(JOBS, LAPSED)
    assert used is not None
    await record(storage, step_record("run-1", taken=[used.seq]))
    assert await storage.staged_events(10) == (unused,)


@without_memory
async def test_a_step_that_is_not_recorded_has_used_nothing(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await publish(storage, "e1")
    taken = await storage.take_message(JOBS, LAPSED)
    assert taken is not None
    with pytest.raises(LeaseLostError):
        await record(storage, step_record("run-1", epoch=7, taken=[taken.seq]))
    shared = await storage.begin()
    await step_commit.write_step_commit(shared, step_record("run-1", taken=[taken.seq]))
    await shared.rollback()
    assert await storage.staged_events(10) == (taken,)


@without_memory
async def test_a_step_cannot_use_a_message_that_was_delivered_again(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await publish(storage, "e1")
    taken = await storage.take_message(JOBS, LAPSED)
    assert taken is not None
    await storage.accept([incoming("again", exclusive=["jobs"])], {}, [taken.seq])
    with pytest.raises(StorageConflictError):
        await record(storage, step_record("run-1", taken=[taken.seq], staged_events=[staged_event("a")]))
    assert await storage.find_step_commit(R1, 0, "pay:1") is None
    assert await storage.staged_events(10) == ()


@without_memory
async def test_a_message_is_used_or_delivered_again_and_never_both(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    await worker.write(new_run("run-1"))

    async def use(seq: int, step: str) -> bool:
        try:
            await record(storage, step_record("run-1", step, taken=[seq]))
        except StorageConflictError:
            return False
        return True

    async def move_staged(seq: int, id: str) -> bool:
        try:
            return await other.accept([incoming(id, exclusive=["again"])], {}, [seq]) is not None
        except StorageConflictError:
            return False

    for turn in range(20):
        await publish(storage, f"e{turn}")
        taken = await storage.take_message(JOBS, LAPSED)
        assert taken is not None
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(use(taken.seq, f"s{turn}"), move_staged(taken.seq, f"again{turn}"))
        assert sorted(outcomes) == [False, True]
        assert (await storage.find_step_commit(R1, 0, f"s{turn}") is not None) is outcomes[0]
        assert (await storage.take_message(key("again"), HOUR) is not None) is outcomes[1]


@only_on_files
async def test_who_alone_may_write_takes_a_message_in_his_own_transaction(storage: Storage, worker: Worker) -> None:
    await publish(storage, "e1", "e2")
    shared = await storage.begin()
    assert await step_commit.take_message(shared, JOBS) == b"e1"
    assert await step_commit.take_message(shared, JOBS) == b"e2"
    assert await step_commit.take_message(shared, JOBS) is None
    await shared.rollback()
    async with transaction(storage) as shared:
        assert await step_commit.take_message(shared, JOBS) == b"e1"
    left = await storage.take_message(JOBS, HOUR)
    assert left is not None
    assert left.body == b"e2"


# At the same time


async def test_each_message_is_taken_once_by_steps_and_runs_at_the_same_time(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    worker = await make_worker("worker", on=other)
    runs = [f"run-{n}" for n in range(30)]
    await worker.write(*(new_run(run) for run in runs))
    taken: list[bytes] = []

    async def bring(storage: Storage, part: int) -> None:
        for turn in range(30):
            await publish(storage, f"e-{part}-{turn}")

    async def take(storage: Storage) -> None:
        for _ in range(30):
            one = await storage.take_message(JOBS, HOUR)
            taken.extend([one.body] if one else [])

    async def ask() -> None:
        for run in runs:
            await worker.send(run_write(run, transition=AckInbox(0), waits=[wait(run, "w", "jobs", exclusive=True)]))

    async with asyncio.timeout(100):
        await asyncio.gather(bring(storage, 0), bring(other, 1), take(storage), take(other), take(other), ask())
    while one := await storage.take_message(JOBS, HOUR):
        taken.append(one.body)
    given = [item.value for item in await storage.read_inboxes(worker.id)]
    asking = [run for run in runs if await storage.waits(RunId(run))]
    assert len(given) + len(asking) == 30
    assert Counter(taken) + Counter(given) == Counter(
        f"e-{part}-{turn}".encode() for part in (0, 1) for turn in range(30)
    )


async def test_a_process_that_dies_while_it_takes_loses_no_message(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    await worker.write(new_run("run-1"))
    is_taken = False
    for turn in range(40):
        await publish(storage, f"e{turn}")
        trap = Trap()
        dying = await make_storage(trap)
        await dying.now()
        trap.arm(turn, SimulatedDeath())
        with pytest.raises(SimulatedDeath):
            await dying.take_message(JOBS, LAPSED)
        dying.kill()
        async with asyncio.timeout(30):
            redelivered = await waiting(storage)
            is_taken = redelivered == [f"e{turn}".encode()]
            left = await storage.take_message(JOBS, HOUR)
            assert (left is None) is is_taken
            assert is_taken or redelivered == []
        if is_taken:
            break
    assert is_taken, "it never came to its end"
    assert (
        await worker.send(
            run_write("run-1", transition=AckInbox(0), waits=[wait("run-1", "w", "jobs", exclusive=True)])
        )
        == BatchResult()
    )
