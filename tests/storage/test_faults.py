"""Lost connections, dying processes and cancelled calls at every statement: a batch is written whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from uuid import uuid4

import pytest

from edda.core.model import (
    AckInbox,
    BatchResult,
    End,
    Fence,
    NewEvent,
    RunFilter,
    RunId,
    RunRecord,
    RunWrite,
    Suspend,
    WorkerId,
)
from edda.core.states import RunStatus
from edda.errors import StorageUnavailableError
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .conftest import MakeWorker
from .probes import Listener, SimulatedDeath, Trap
from .records import (
    HOUR,
    LATER,
    SOURCE,
    SUSPENDED,
    TYPE,
    WORKFLOW,
    done,
    entry,
    incoming,
    key,
    new_run,
    run_write,
    start,
    wait,
)
from .worker import Worker

Call = Callable[[Storage, Worker], Awaitable[object]]


async def write_on(storage: Storage, worker: Worker) -> None:
    fence = await worker.storage.read_fence(worker.id)
    assert fence is not None
    await storage.write(fence, [new_run(f"run-{uuid4()}", entry(1), entry(2))])


async def wait_on(storage: Storage, worker: Worker) -> None:
    fence = await worker.storage.read_fence(worker.id)
    assert fence is not None
    run = f"run-{uuid4()}"
    again = run_write("run-1", transition=AckInbox(0), waits=[wait("run-1", "w", "order")])
    await storage.write(fence, [again, new_run(run, transition=SUSPENDED, waits=[wait(run, "w", "order")])])


async def accept_on(storage: Storage, worker: Worker) -> None:
    post = [incoming(f"e-{uuid4()}", "order", starts=[start(f"run-{uuid4()}")]) for _ in range(2)]
    await storage.accept(post, {})


CALLS: dict[str, Call] = {
    "write": write_on,
    "write with waits": wait_on,
    "read_fence": lambda storage, worker: storage.read_fence(worker.id),
    "owned": lambda storage, worker: storage.owned_runs(worker.id),
    "register": lambda storage, worker: Worker(storage, f"new-{uuid4()}").register(),
    "retire": lambda storage, worker: storage.remove_worker(WorkerId("new")),
    "take_over": lambda storage, worker: storage.take_over(worker.id),
    "free_orphans": lambda storage, worker: storage.free_orphans(),
    "disown": lambda storage, worker: storage.release_run(RunId("run-1")),
    "claim": lambda storage, worker: storage.claim(worker.id, [WORKFLOW], 10),
    "next_due": lambda storage, worker: storage.next_due([WORKFLOW]),
    "unpark": lambda storage, worker: storage.wake_parked([WORKFLOW]),
    "mail": lambda storage, worker: storage.read_inboxes(worker.id),
    "start": lambda storage, worker: storage.start([start("run-8")]),
    "cancel": lambda storage, worker: storage.cancel(RunId("run-2"), b"stop"),
    "get": lambda storage, worker: storage.get(RunId("run-1")),
    "history": lambda storage, worker: storage.history(RunId("run-1")),
    "find": lambda storage, worker: storage.find(RunFilter()),
    "accept": accept_on,
    "accept with other shapes": lambda storage, worker: storage.accept([incoming("e1", "order")], {TYPE: 9}),
    "shapes": lambda storage, worker: storage.match_paths([TYPE]),
    "learn": lambda storage, worker: storage.register_match_paths("other", f"shape-{uuid4()}"),
    "fill": lambda storage, worker: storage.backfill_keys("other", "order", [(key("order"), 1)], 0),
    "log": lambda storage, worker: storage.events_of_type(TYPE, 0, 100, 10),
    "last_event": lambda storage, worker: storage.last_event(),
    "find_event": lambda storage, worker: storage.find_event(SOURCE, "e1"),
    "waits": lambda storage, worker: storage.waits(RunId("run-1")),
    "prune_events": lambda storage, worker: storage.prune_events(LATER, 10),
    "prune_letters": lambda storage, worker: storage.prune_inbox(LATER, 10),
    "prune_runs": lambda storage, worker: storage.prune_runs(LATER, 10),
}
RUN_TRANSACTIONS = ("start", "claim", "register", "cancel", "take_over", "retire", "disown")
EVENT_TRANSACTIONS = ("accept", "learn", "fill", "prune_events", "prune_letters", "prune_runs")


@pytest.fixture
async def trap() -> Trap:
    return Trap()


@pytest.fixture
async def trapped(storage: Storage, make_storage: MakeStorage, trap: Trap) -> Storage:
    """A second storage whose statements all pass the probe."""
    return await make_storage(trap)


@pytest.fixture
async def busy(worker: Worker) -> Worker:
    """One owned run, one without an owner, one that has ended with inbox items, and a few events."""
    await worker.write(new_run("run-1", entry(1)), new_run("ended"))
    await worker.storage.start([start("run-2")])
    await worker.storage.cancel(RunId("ended"), b"stop")
    await worker.write(run_write("ended", transition=done()))
    await worker.storage.accept([incoming(f"old-{n}", "other") for n in range(3)], {})
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


async def test_the_probe_stands_beside_heartbeats(make_storage: MakeStorage, busy: Worker) -> None:
    probe = Listener()
    storage = await make_storage(probe)
    heartbeat = await storage.open_heartbeat()
    probe.heard.clear()
    await heartbeat.beat(busy.id, HOUR)
    await heartbeat.close()
    assert [when for when, _ in probe.heard[:2]] == ["before", "after"]


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
async def test_after_a_connection_lost_at_any_statement_the_next_call_works(
    trapped: Storage, busy: Worker, trap: Trap, call: Call
) -> None:
    point = 0
    while await meets(trap, point, call(trapped, busy)):
        assert await trapped.now() > 0
        assert await trapped.get(RunId("run-1")) is not None
        assert await trapped.read_fence(busy.id) is not None
        point += 1
    assert point >= 2, "before and after one statement at least"


async def meets(trap: Trap, point: int, call: Awaitable[object]) -> bool:
    """Whether the call reached this point, where its connection is lost."""
    trap.arm(point, StorageUnavailableError("cut"))
    try:
        await call
    except StorageUnavailableError:
        return True
    assert trap.armed, "the loss of the connection was swallowed"
    trap.disarm()
    return False


async def test_a_heartbeat_on_a_lost_connection_fails_and_the_next_one_works(
    trapped: Storage, busy: Worker, trap: Trap
) -> None:
    heartbeat = await trapped.open_heartbeat()
    assert await heartbeat.beat(busy.id, HOUR) is not None
    for point in (0, 1):
        await busy.write()  # the read cache of an idle file would answer
        trap.arm(point, StorageUnavailableError("cut"))
        with pytest.raises(StorageUnavailableError):
            await heartbeat.beat(busy.id, HOUR)
        assert await heartbeat.beat(busy.id, HOUR) is not None
    await heartbeat.close()


def every_form(turn: int) -> list[RunWrite]:
    rest = Suspend(0, LATER, RunStatus.WAITING_FOR_TIMER)
    return [
        run_write(f"{turn}-keep", entry(1), entry(2)),
        run_write(f"{turn}-absorb", entry(1), transition=AckInbox(0)),
        run_write(f"{turn}-rest", entry(1), transition=rest),
        run_write(f"{turn}-end", entry(1), transition=done()),
        new_run(f"{turn}-new", entry(1)),
        new_run(f"{turn}-new-rest", entry(1), transition=rest),
        new_run(f"{turn}-new-end", entry(1), transition=done()),
        run_write(f"{turn}-wait", entry(1), transition=SUSPENDED, waits=[wait(f"{turn}-wait", "w", "order")]),
        new_run(f"{turn}-new-wait", entry(1), transition=SUSPENDED, waits=[wait(f"{turn}-new-wait", "w", "order")]),
    ]


def before_every_form(turn: int) -> list[RunWrite]:
    return [new_run(f"{turn}-{name}") for name in ("keep", "absorb", "rest", "end", "wait")]


async def is_in(storage: Storage, turn: int) -> bool:
    """Whether the batch is written; fails if only a part of it is."""
    values = []
    for each in every_form(turn):
        values.append(await storage.history(each.run_id) == each.entries)
        if each.start or isinstance(each.transition, Suspend | End):  # the other forms show in the history alone
            run = await storage.get(each.run_id)
            values.append(run is not None and _as_written(run, each))
        if each.waits:
            values.append(await storage.waits(each.run_id) == each.waits)
    assert all(values) or not any(values), "a part of the batch is in"
    return all(values)


def _as_written(run: RunRecord, written: RunWrite) -> bool:
    match written.transition:
        case Suspend(ready_at=ready_at):
            return run.owner is None and run.ready_at == ready_at
        case End(value=value):
            return run.value == value
        case _:
            return run.owner is not None


async def count_points(make_storage: MakeStorage, make_worker: MakeWorker) -> int:
    """The number of points before and after the statements of one such batch."""
    probe = Listener()
    worker = await make_worker("counter", on=await make_storage(probe))
    await worker.write(*before_every_form(-1))
    probe.heard.clear()
    await worker.write(*every_form(-1))
    return len(probe.heard)


async def test_a_process_that_dies_in_a_write_leaves_all_of_the_batch_or_nothing(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    points = await count_points(make_storage, make_worker)
    outcomes = []
    for point in range(points):
        trap = Trap()
        dying = await make_storage(trap)
        worker = await make_worker(f"worker-{point}", on=dying)
        await worker.write(*before_every_form(point))
        trap.arm(point, SimulatedDeath())
        with pytest.raises(SimulatedDeath):
            await worker.write(*every_form(point))
        dying.kill()
        outcomes.append(await is_in(storage, point))
        fence = await storage.read_fence(worker.id)
        assert fence is not None
        assert fence.batch_no == (2 if outcomes[-1] else 1)
    assert (outcomes[0], outcomes[-1]) == (False, True)
    assert outcomes == sorted(outcomes), "once committed, it stays committed"


async def test_a_batch_of_unknown_outcome_is_in_once_after_it_is_sent_again(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    points = await count_points(make_storage, make_worker)
    trap = Trap()
    worker = await make_worker("cut-off", on=await make_storage(trap))
    for point in range(points):
        await worker.write(*before_every_form(point))
        trap.arm(point, StorageUnavailableError("cut"))
        with pytest.raises(StorageUnavailableError):
            await worker.write(*every_form(point))
        if await worker.write(*every_form(point)) is None:
            worker.fence = Fence(worker.id, worker.fence.batch_no + 1, worker.fence.ownership_version)
        assert await storage.read_fence(worker.id) == worker.fence
        assert await is_in(storage, point)


async def test_a_cancelled_write_is_in_once_after_it_is_sent_again(storage: Storage, make_worker: MakeWorker) -> None:
    worker = await make_worker("cancelled")
    for turn in range(25):
        await worker.write(*before_every_form(turn))
        task = asyncio.create_task(storage.write(worker.fence, every_form(turn)))
        for _ in range(turn):  # cancelled at another point each time
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await worker.write(*every_form(turn))
        worker.fence = Fence(worker.id, 2 * turn + 2, 0)
        assert await storage.read_fence(worker.id) == worker.fence
        assert await is_in(storage, turn)


async def test_a_process_that_dies_in_an_accept_leaves_all_of_the_post_or_nothing(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    outcomes: list[bool] = []
    while not outcomes or not outcomes[-1]:
        turn = len(outcomes)
        sleeper, started = f"{turn}-sleeper", f"{turn}-started"
        await worker.send(new_run(sleeper, waits=[wait(sleeper, step, sleeper) for step in ("a", "b")]))
        post = [incoming(f"{turn}-{n}", sleeper, starts=[start(started)]) for n in range(2)]
        trap = Trap()
        dying = await make_storage(trap)
        await dying.now()
        trap.arm(turn, SimulatedDeath())
        with pytest.raises(SimulatedDeath):
            await dying.accept(post, {})
        dying.kill()
        outcomes.append(await is_accepted(storage, worker, post))
        await storage.accept(post, {})
        assert await is_accepted(storage, worker, post)
    assert outcomes == [False] * (len(outcomes) - 1) + [True]


async def is_accepted(storage: Storage, worker: Worker, post: Sequence[NewEvent]) -> bool:
    """Whether the events are stored; fails if only a part of them is."""
    bodies = [item.value for item in await storage.read_inboxes(worker.id)]
    values = [await storage.get(post[0].starts[0].run_id) is not None]
    for each in post:
        values.append(await storage.find_event(SOURCE, each.event.id) is not None)
        values.append(bodies.count(each.event.body) == 1)
    assert all(values) or not any(values), "a part of the post is in"
    return all(values)


@pytest.mark.parametrize("name", [*RUN_TRANSACTIONS, *EVENT_TRANSACTIONS])
async def test_a_process_that_dies_in_any_other_transaction_leaves_a_database_others_can_use(
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
        assert await storage.get(RunId("run-1")) is not None
        fence = await storage.read_fence(busy.id)
        assert fence is not None
        assert await storage.write(fence, []) == BatchResult()
    else:
        raise AssertionError("it never came to its end")
    assert await storage.cancel(RunId("run-2"), b"stop") in ("requested", "already")


async def test_after_a_kill_others_see_what_was_committed(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    killed = await make_storage()
    worker = await make_worker("killed", on=killed)
    await worker.write(new_run("run-1", entry(1)), new_run("run-2", entry(1), transition=done()))
    killed.kill()
    fresh = await make_storage()
    for witness in (storage, fresh):
        assert await witness.owned_runs(worker.id) == {RunId("run-1"): 1}
        assert await witness.history(RunId("run-1")) == (entry(1),)
        assert await witness.read_fence(worker.id) == Fence(worker.id, 1, 0)


async def test_killing_twice_and_closing_after_a_kill_are_harmless(make_storage: MakeStorage) -> None:
    storage = await make_storage()
    storage.kill()
    storage.kill()
    await storage.close()
    await storage.close()
