"""Lost connections and dying processes while side effects are written: whole or not at all, and others continue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from uuid import uuid4

import pytest
from msgspec.structs import replace

from edda.core.model import (
    AckInbox,
    BatchResult,
    OutboxState,
    RunId,
    RunValue,
    SendLater,
    Sent,
    StagedEvent,
    StagedKind,
)
from edda.errors import StorageConflictError
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .probes import Listener, SimulatedDeath, Trap
from .records import HOUR, LAPSED, LATER, entry, incoming, key, new_run, outbox_event, run_write, staged_event, wait
from .test_faults import meets
from .worker import Worker

R1 = RunId("run-1")
Call = Callable[[Storage, Worker], Awaitable[object]]


async def write_on(storage: Storage, worker: Worker) -> None:
    """All side effects that a run can write in one batch, with a message to take."""
    fence = await worker.storage.read_fence(worker.id)
    assert fence is not None
    new = f"run-{uuid4()}"
    values = (RunValue("id", new.encode()),)
    effects = {"staged_events": (staged_event(new),), "outbox_events": (outbox_event(new),), "values": values}
    jobs = [wait(new, "w", "jobs", exclusive=True)]
    await storage.write(
        fence,
        [
            replace(new_run(new, waits=jobs), **effects),
            replace(run_write("run-1", recorded_steps=["pay:1"]), **effects),
        ],
    )


async def move_all_staged(storage: Storage, worker: Worker) -> None:
    (first, *_) = await worker.storage.staged_events(1)
    with suppress(StorageConflictError):  # moved before the connection was lost
        await storage.accept([incoming(f"e-{uuid4()}", "order", exclusive=["jobs"])], {}, [first.seq])


async def settle_on(storage: Storage, worker: Worker) -> None:
    first, second, *_ = await worker.storage.find_outbox(OutboxState.PENDING)
    await storage.record_send_results([Sent(first.seq), SendLater(second.seq, second.attempts, LATER, "busy")])


CALLS: dict[str, Call] = {
    "write": write_on,
    "move_staged": move_all_staged,
    "dispatches": lambda storage, worker: storage.staged_events(10),
    "take": lambda storage, worker: storage.take_message(key("jobs"), HOUR),
    "enqueue": lambda storage, worker: storage.enqueue([outbox_event("new")]),
    "claim_outgoing": lambda storage, worker: storage.claim_outbox(1, LAPSED),
    "settle_outgoing": settle_on,
    "next_outgoing": lambda storage, worker: storage.next_outbox_due(),
    "find_outgoing": lambda storage, worker: storage.find_outbox(),
    "retry_outgoing": lambda storage, worker: storage.retry_outbox(None),
    "facts": lambda storage, worker: storage.run_values(R1),
    "prune_outgoing": lambda storage, worker: storage.prune_outbox(LATER, 10),
}
TRANSACTIONS = ("write", "move_staged", "take", "enqueue", "claim_outgoing", "settle_outgoing", "prune_outgoing")


@pytest.fixture
async def trap() -> Trap:
    return Trap()


@pytest.fixture
async def trapped(storage: Storage, make_storage: MakeStorage, trap: Trap) -> Storage:
    """A second storage whose statements all pass the probe."""
    return await make_storage(trap)


@pytest.fixture
async def busy(worker: Worker) -> Worker:
    """One row of each kind."""
    effects = tuple(StagedEvent(StagedKind.EVENT, f"{n}".encode()) for n in range(100))
    await worker.write(replace(new_run("run-1", entry(1)), staged_events=effects, values=(RunValue("a", b""),)))
    await worker.storage.accept([incoming(f"m-{n}", exclusive=["jobs"]) for n in range(100)], {})
    await worker.storage.enqueue([outbox_event(f"e-{n}", f"k-{n}") for n in range(49)])
    (sent,) = await worker.storage.claim_outbox(1, LAPSED)
    await worker.storage.record_send_results([Sent(sent.seq)])
    return worker


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
async def test_the_probe_stands_before_and_after_every_statement(
    make_storage: MakeStorage, busy: Worker, call: Call
) -> None:
    probe = Listener()
    storage = await make_storage(probe)
    probe.heard.clear()
    await call(storage, busy)
    assert probe.heard
    assert [when for when, _ in probe.heard] == ["before", "after"] * (len(probe.heard) // 2)
    assert [sql for _, sql in probe.heard[::2]] == [sql for _, sql in probe.heard[1::2]]


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
async def test_after_a_connection_lost_at_any_statement_the_next_call_works(
    trapped: Storage, busy: Worker, trap: Trap, call: Call
) -> None:
    point = 0
    while await meets(trap, point, call(trapped, busy)):
        assert await trapped.now() > 0
        assert await trapped.get(R1) is not None
        assert await trapped.read_fence(busy.id) is not None
        point += 1
    assert point >= 1, "at one statement at least"


@pytest.mark.parametrize("name", TRANSACTIONS)
async def test_a_process_that_dies_in_any_transaction_leaves_a_database_others_can_use(
    storage: Storage, make_storage: MakeStorage, busy: Worker, name: str
) -> None:
    for point in range(40):
        trap = Trap()
        dying = await make_storage(trap)
        await dying.now()
        trap.arm(point, SimulatedDeath())
        try:
            await CALLS[name](dying, busy)
        except SimulatedDeath:
            dying.kill()
        else:
            break
        fence = await storage.read_fence(busy.id)
        assert fence is not None
        async with asyncio.timeout(30):
            assert await storage.write(fence, []) == BatchResult()
            assert await storage.take_message(key("jobs"), HOUR) is not None
            await storage.claim_outbox(1, LAPSED)
    else:
        raise AssertionError("it never came to its end")


async def test_a_process_that_dies_in_a_write_has_written_all_side_effects_or_none(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    outcomes: list[bool] = []
    while not outcomes or not outcomes[-1]:
        turn = len(outcomes)
        run, job = RunId(f"run-{turn}"), f"job-{turn}"
        await worker.write(new_run(run))
        await storage.accept([incoming(job, exclusive=[job])], {})
        effects = run_write(
            run,
            entry(1),
            transition=AckInbox(0),
            waits=[wait(run, "w", job, exclusive=True)],
            staged_events=[staged_event(job)],
            outbox_events=[outbox_event(job)],
            values=[RunValue("job", job.encode())],
        )
        trap = Trap()
        dying = await make_storage(trap)
        await dying.now()
        trap.arm(turn, SimulatedDeath())
        with pytest.raises(SimulatedDeath):
            await dying.write(worker.fence, [effects])
        dying.kill()
        parts = (
            job.encode() in [item.value for item in await storage.read_inboxes(worker.id)],
            staged_event(job).body in [one.body for one in await storage.staged_events(100)],
            outbox_event(job) in [one.event for one in await storage.find_outbox()],
            await storage.run_values(run) == effects.values,
            await storage.history(run) == effects.entries,
            await storage.take_message(key(job), HOUR) is None,
        )
        assert len(set(parts)) == 1, "a part of the batch is in"
        outcomes.append(parts[0])
    assert outcomes == [False] * (len(outcomes) - 1) + [True]


async def test_a_process_that_dies_while_it_forwards_leaves_the_staged_event_or_its_message(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    outcomes: list[bool] = []
    while not outcomes or not outcomes[-1]:
        turn = len(outcomes)
        run, job = f"run-{turn}", f"job-{turn}"
        effects = replace(new_run(run, waits=[wait(run, "w", job, exclusive=True)]), staged_events=(staged_event(job),))
        await worker.send(effects)
        (waiting,) = [one for one in await storage.staged_events(100) if one.body == staged_event(job).body]
        trap = Trap()
        dying = await make_storage(trap)
        await dying.now()
        trap.arm(turn, SimulatedDeath())
        with pytest.raises(SimulatedDeath):
            await dying.accept([incoming(f"{job}-{n}", exclusive=[job]) for n in range(2)], {}, [waiting.seq])
        dying.kill()
        kept = await storage.take_message(key(job), HOUR)
        parts = (
            f"{job}-0".encode() in [item.value for item in await storage.read_inboxes(worker.id)],
            kept is not None and kept.body == f"{job}-1".encode(),
            waiting not in await storage.staged_events(100),
            await storage.waits(RunId(run)) == (),
        )
        assert len(set(parts)) == 1, "a part of the post is in"
        outcomes.append(parts[0])
    assert outcomes == [False] * (len(outcomes) - 1) + [True]
