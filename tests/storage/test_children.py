"""What a batch does to other runs: children, signals, watchers; and generations of the same run."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from edda.core.model import (
    AckInbox,
    BatchResult,
    CancelOutcome,
    End,
    EndWatcher,
    EntryKind,
    Fence,
    RunFilter,
    RunId,
    RunRecord,
    Start,
    Suspend,
    WorkerId,
)
from edda.core.states import RunStatus
from edda.errors import StorageRejectedError
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .conftest import MakeWorker
from .records import (
    LATER,
    SUSPENDED,
    WORKFLOW,
    cancel_signal,
    child,
    done,
    end_signal,
    entry,
    incoming,
    new_run,
    next_generation,
    run_write,
    start,
    wait,
)
from .worker import Worker

R1, R2, R3 = RunId("run-1"), RunId("run-2"), RunId("run-3")
RESTING = Suspend(0, LATER, RunStatus.WAITING_FOR_CHILD, "child:1")
PARKED = Suspend(0, LATER, RunStatus.PARKED, "the code changed")
REFUSED = BatchResult(refused={R1: frozenset()})


async def known(storage: Storage, run_id: str = "run-1") -> RunRecord:
    record = await storage.get(RunId(run_id))
    assert record is not None
    return record


async def read_items(storage: Storage, worker: Worker) -> list[tuple[str, int, EntryKind, str, bytes]]:
    return [(x.run_id, x.inbox_no, x.kind, x.step, x.value) for x in await storage.read_inboxes(worker.id)]


# Children


async def test_a_child_has_no_owner_and_knows_its_parent(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("e1"), incoming("e2")], {})
    await worker.write(new_run("run-1"))
    children = [Start(R2, WORKFLOW, b"input", 17, None, 99, R1, "child:1", 3)]
    assert await worker.send(run_write("run-1", entry(1), children=children)) == BatchResult()
    assert await storage.owned_runs(worker.id) == {R1: 1}
    record = await known(storage, "run-2")
    assert (record.status, record.owner, record.parent, record.generation) == (RunStatus.RUNNING, None, R1, 0)
    assert record.ready_at is not None
    assert 0 < record.ready_at <= await storage.now()
    (run,) = (await worker.claim()).runs
    assert (run.run_id, run.workflow, run.input, run.created_at, run.deadline) == (R2, WORKFLOW, b"input", 17, 99)
    assert (run.parent, run.parent_step, run.depth) == (R1, "child:1", 3)
    assert (run.generation, run.epoch, run.entries, run.inbox, run.watchers) == (0, 1, (), (), ())
    assert run.event_cursor == await storage.last_event() > 0


async def test_a_child_that_no_step_waits_for_has_no_parent_step(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", children=[child("run-2", "run-1", step=None)]))
    (run,) = (await worker.claim()).runs
    assert (run.parent, run.parent_step, run.depth) == (R1, None, 1)


async def test_a_child_may_be_started_for_later(storage: Storage, worker: Worker) -> None:
    later = Start(R2, WORKFLOW, b"", 17, LATER, parent=R1)
    await worker.write(new_run("run-1", children=[later]))
    assert (await known(storage, "run-2")).ready_at == LATER
    assert (await worker.claim()).runs == ()


async def test_a_child_whose_id_exists_is_left_alone(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"), new_run("run-3", transition=done()))
    before = await known(storage, "run-2"), await known(storage, "run-3")
    children = [child(run, "run-1") for run in ("run-2", "run-3", "run-4")]
    assert await worker.send(run_write("run-1", entry(1), children=children)) == BatchResult()
    assert (await known(storage, "run-2"), await known(storage, "run-3")) == before
    assert [run.run_id for run in (await worker.claim()).runs] == ["run-4"]
    assert await storage.history(R1) == (entry(1),)


async def test_of_two_children_with_one_id_the_first_is_started(storage: Storage, worker: Worker) -> None:
    await worker.write(
        new_run("run-2", children=[child("x", "run-2")]),
        new_run("run-1", children=[child("x", "run-1"), child("x", "run-1", step="child:2")]),
    )
    (run,) = (await worker.claim()).runs
    assert (run.run_id, run.parent, run.parent_step) == ("x", R2, "child:1")


async def test_a_run_may_be_created_with_children_and_items(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-3"))
    first = new_run(
        "run-1", entry(1), transition=RESTING, children=[child("run-2", "run-1")], signals=[end_signal("run-3")]
    )
    assert await worker.send(first) == BatchResult()
    assert await read_items(storage, worker) == [("run-3", 1, EntryKind.CHILD, "child:1", b"its end")]
    assert [run.run_id for run in (await worker.claim()).runs] == [R2]
    assert (await known(storage)).status is RunStatus.WAITING_FOR_CHILD


async def test_a_run_may_be_created_with_children_and_end_at_once(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-3"))
    first = new_run("run-1", transition=done(), children=[child("run-2", "run-1")], signals=[end_signal("run-3")])
    assert await worker.send(first) == BatchResult()
    assert (await known(storage)).status is RunStatus.COMPLETED
    assert [run.run_id for run in (await worker.claim()).runs] == [R2]
    assert len(await storage.read_inboxes(worker.id)) == 1


async def test_children_of_an_end_that_is_refused_are_started(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.add_watcher(R1, EndWatcher(R3, "w"))
    assert await worker.send(run_write("run-1", transition=done(), children=[child("run-2", "run-1")])) == REFUSED
    assert [run.run_id for run in (await worker.claim()).runs] == [R2]


async def test_a_batch_behind_its_fence_starts_and_signals_no_run(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-3"))
    stale = Fence(worker.id, 0, 0)
    lost = run_write(
        "run-1",
        transition=next_generation(),
        children=[child("run-2", "run-1")],
        signals=[end_signal("run-3")],
        compensating=True,
    )
    assert await storage.write(stale, [lost]) is None
    assert await storage.get(R2) is None
    assert await storage.read_inboxes(worker.id) == ()
    record = await known(storage)
    assert (record.generation, record.status) == (0, RunStatus.RUNNING)


async def test_a_child_that_cannot_be_stored_refuses_the_batch(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    for bad in (child("run-2", "run-1", step="child\0"), child("run-2\0", "run-1"), child("run-2", "run\0")):
        with pytest.raises(StorageRejectedError):
            await worker.send(run_write("run-1", entry(1), children=[bad]))
    assert await storage.history(R1) == ()
    assert await storage.get(R2) is None
    assert await worker.send(run_write("run-1", entry(1), children=[child("run-2", "run-1")])) == BatchResult()


async def test_a_start_stores_the_parent(storage: Storage, worker: Worker) -> None:
    await storage.start([child("run-2", "run-1", "child:1", 2)])
    assert (await known(storage, "run-2")).parent == R1
    assert [run.parent for run in await storage.find(RunFilter())] == [R1]
    (run,) = (await worker.claim()).runs
    assert (run.parent, run.parent_step, run.depth) == (R1, "child:1", 2)


async def test_a_run_without_a_parent_has_none(storage: Storage, worker: Worker) -> None:
    await storage.start([start("run-1")])
    assert (await known(storage)).parent is None
    (run,) = (await worker.claim()).runs
    assert (run.parent, run.parent_step, run.depth, run.watchers) == (None, None, 0, ())


async def test_two_parents_that_start_the_same_children_start_each_once(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    one, two = await make_worker("one"), await make_worker("two", on=await make_storage())
    await one.write(new_run("run-1"))
    await two.write(new_run("run-2"))
    for turn in range(5):
        ids = [f"child-{turn}-{n}" for n in range(10)]
        await asyncio.gather(
            one.write(run_write("run-1", children=[child(run, "run-1") for run in ids])),
            two.write(run_write("run-2", children=[child(run, "run-2") for run in reversed(ids)])),
        )
    claimed = (await one.claim(limit=100)).runs
    assert len(claimed) == len({run.run_id for run in claimed}) == 50


# Signals


async def test_a_item_to_an_owned_run_is_inbox_for_its_owner(
    storage: Storage, worker: Worker, make_worker: MakeWorker
) -> None:
    other = await make_worker("other")
    await worker.write(new_run("run-1"))
    await other.write(new_run("run-2"))
    before = await storage.now()
    sent = run_write("run-1", transition=done(), signals=[end_signal("run-2", b"42", "pay:1")])
    assert await worker.send(sent) == BatchResult()
    (item,) = await storage.read_inboxes(other.id)
    assert (item.run_id, item.inbox_no, item.kind, item.step, item.value) == (R2, 1, EntryKind.CHILD, "pay:1", b"42")
    assert item.event is None
    assert before <= item.at <= await storage.now()
    assert await storage.owned_runs(other.id) == {R2: 1}
    assert await other.write(run_write("run-2", transition=RESTING)) == frozenset({R2})


async def test_a_item_wakes_a_resting_run(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2", transition=RESTING))
    await worker.send(run_write("run-1", transition=AckInbox(0), signals=[end_signal("run-2")]))
    record = await known(storage, R2)
    assert (record.status, record.ready_at, record.reason) == (RunStatus.RUNNING, 0, None)
    claimed = (await worker.claim()).runs
    assert {run.run_id: [(x.inbox_no, x.value) for x in run.inbox] for run in claimed} == {R2: [(1, b"its end")]}


async def test_a_item_leaves_a_parked_run_parked(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-3", transition=PARKED))
    before = await known(storage, R3)
    await worker.send(run_write("run-1", transition=AckInbox(0), signals=[end_signal("run-3")]))
    record = await known(storage, R3)
    assert (record.status, record.ready_at, record.reason) == (RunStatus.PARKED, before.ready_at, before.reason)
    assert (await worker.claim()).runs == ()
    assert await storage.resume(R3)
    (claimed,) = (await worker.claim()).runs
    assert [(x.inbox_no, x.value) for x in claimed.inbox] == [(1, b"its end")]


async def test_a_cancel_from_another_run_has_a_parked_run_tried(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-3", transition=PARKED))
    await worker.send(run_write("run-1", transition=AckInbox(0), signals=[cancel_signal("run-3")]))
    (claimed,) = (await worker.claim()).runs
    assert (claimed.run_id, claimed.end_if_parked, len(claimed.inbox)) == (R3, True, 1)


async def test_a_item_to_a_run_that_ended_or_never_was_is_dropped(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2", transition=done()))
    sent = [end_signal("run-2"), cancel_signal("run-2"), end_signal("unknown"), cancel_signal("unknown")]
    assert await worker.send(run_write("run-1", transition=done(), signals=sent)) == BatchResult()
    assert await storage.read_inboxes(worker.id) == ()
    assert await storage.prune_inbox(LATER, 100) == 0
    assert await storage.get(RunId("unknown")) is None


async def test_items_to_one_run_are_numbered_in_the_order_of_the_batch(storage: Storage, worker: Worker) -> None:
    await worker.write(*(new_run(run) for run in ("a", "b", "c", "target")))
    await storage.cancel(RunId("target"), b"stop")
    await worker.send(
        run_write("c", transition=AckInbox(0), signals=[end_signal("target", b"c1"), end_signal("target", b"c2")]),
        run_write("a", transition=done(), signals=[end_signal("target", b"a1")]),
        run_write("b", transition=next_generation(), signals=[end_signal("target", b"b1", step="other")]),
    )
    await worker.send(new_run("d", signals=[end_signal("target", b"d1")]))
    assert [(n, value) for _, n, _, _, value in await read_items(storage, worker)] == [
        (1, b"stop"),
        (2, b"c1"),
        (3, b"c2"),
        (4, b"a1"),
        (5, b"b1"),
        (6, b"d1"),
    ]


async def test_a_item_with_a_cancel_goes_in_once(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"), new_run("run-3"))
    await worker.send(
        run_write(
            "run-1",
            transition=AckInbox(0),
            signals=[cancel_signal("run-3", b"first"), end_signal("run-3"), cancel_signal("run-3", b"second")],
        ),
        run_write("run-2", transition=AckInbox(0), signals=[cancel_signal("run-3", b"third")]),
    )
    await worker.send(run_write("run-1", transition=AckInbox(0), signals=[cancel_signal("run-3", b"fourth")]))
    assert await read_items(storage, worker) == [
        ("run-3", 1, EntryKind.CANCEL, "", b"first"),
        ("run-3", 2, EntryKind.CHILD, "child:1", b"its end"),
    ]
    assert await storage.cancel(R3, b"fifth") is CancelOutcome.ALREADY


async def test_a_item_cancels_no_run_that_was_cancelled_before(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2", transition=RESTING))
    await storage.cancel(R2, b"first")
    await worker.send(run_write("run-1", transition=AckInbox(0), signals=[cancel_signal("run-2", b"second")]))
    (run,) = (await worker.claim()).runs
    assert [item.value for item in run.inbox] == [b"first"]


async def test_a_item_with_a_cancel_wakes_a_resting_run(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2", transition=SUSPENDED))
    await worker.send(run_write("run-1", transition=AckInbox(0), signals=[cancel_signal("run-2")]))
    (run,) = (await worker.claim()).runs
    assert [(item.kind, item.value) for item in run.inbox] == [(EntryKind.CANCEL, b"stop")]


async def test_items_of_a_run_that_stays_because_of_its_waits_are_sent(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    await storage.accept([incoming("e1", "order")], {})
    sent = run_write("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order")], signals=[end_signal("run-2")])
    assert await worker.send(sent) == BatchResult(refused={R1: frozenset({"w"})})
    assert [run for run, *_ in await read_items(storage, worker)] == [R1, R2]


async def test_a_item_that_cannot_be_stored_refuses_the_batch(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    with pytest.raises(StorageRejectedError):
        await worker.send(run_write("run-1", entry(1), transition=done(), signals=[end_signal("run-2", step="w\0")]))
    assert await storage.read_inboxes(worker.id) == ()
    assert await storage.history(R1) == ()
    assert (
        await worker.send(run_write("run-1", entry(1), transition=done(), signals=[end_signal("run-2")]))
        == BatchResult()
    )


async def test_workers_that_write_to_each_other_do_not_stop_each_other(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    crew = [await make_worker("one"), await make_worker("two", on=await make_storage())]
    ours = [[f"run-{n:02}-{part}" for n in range(20)] for part in range(2)]
    for worker, runs in zip(crew, ours, strict=True):
        await worker.write(*(new_run(run) for run in runs))

    async def talk(worker: Worker, mine: list[str], theirs: list[str]) -> None:
        for _ in range(10):
            sent = zip(mine, reversed(theirs), strict=True)
            batch = [run_write(run, transition=AckInbox(0), signals=[end_signal(other)]) for run, other in sent]
            assert await worker.send(*batch) == BatchResult()

    async with asyncio.timeout(60):
        await asyncio.gather(talk(crew[0], *ours), talk(crew[1], *reversed(ours)))
    for worker, runs in zip(crew, ours, strict=True):
        assert [(run, n) for run, n, *_ in await read_items(storage, worker)] == [
            (run, n) for run in runs for n in range(1, 11)
        ]


# Watchers


async def test_a_claim_brings_the_watchers_of_the_run(storage: Storage, worker: Worker) -> None:
    await storage.start([start("run-1"), start("run-2")])
    watchers = [EndWatcher(R3, "b"), EndWatcher(R3, "a"), EndWatcher(R2, "z")]
    for watcher in watchers:
        assert await storage.add_watcher(R1, watcher) == await known(storage)
    assert await storage.watchers(R1) == (watchers[2], watchers[1], watchers[0])
    runs = {run.run_id: run.watchers for run in (await worker.claim()).runs}
    assert runs == {R1: (watchers[2], watchers[1], watchers[0]), R2: ()}


async def test_watching_twice_counts_once(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    for _ in range(2):
        assert await storage.add_watcher(R1, EndWatcher(R2, "w")) == await known(storage)
    assert await storage.watchers(R1) == (EndWatcher(R2, "w"),)
    assert await worker.send(run_write("run-1", transition=done(watchers=1))) == BatchResult()


async def test_an_ended_run_is_not_watched_but_known(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=done(b"42")))
    record = await storage.add_watcher(R1, EndWatcher(R2, "w"))
    assert record is not None
    assert (record.status, record.value) == (RunStatus.COMPLETED, b"42")
    assert record == await known(storage)
    assert await storage.watchers(R1) == ()


async def test_a_run_that_never_was_cannot_be_watched(storage: Storage) -> None:
    assert await storage.add_watcher(R1, EndWatcher(R2, "w")) is None
    assert await storage.watchers(R1) == ()
    assert await storage.get(R1) is None


async def test_adding_a_watcher_wakes_no_run(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=RESTING))
    before = await known(storage)
    assert await storage.add_watcher(R1, EndWatcher(R2, "w")) == before
    assert await known(storage) == before
    assert (await worker.claim()).runs == ()


async def test_two_who_watch_at_once_are_both_counted(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    await worker.write(new_run("run-1"))
    for n in range(5):
        await asyncio.gather(
            storage.add_watcher(R1, EndWatcher(R2, f"w{n}")),
            other.add_watcher(R1, EndWatcher(R3, f"w{n}")),
            other.add_watcher(R1, EndWatcher(R2, f"w{n}")),
        )
    assert len(await storage.watchers(R1)) == 10
    assert await worker.send(run_write("run-1", transition=done(watchers=10))) == BatchResult()


async def test_a_watcher_that_cannot_be_stored_is_refused(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    with pytest.raises(StorageRejectedError):
        await storage.add_watcher(R1, EndWatcher(R2, "w\0"))
    assert await storage.watchers(R1) == ()
    assert await worker.send(run_write("run-1", transition=done())) == BatchResult()


# Ends


async def test_an_end_that_knows_all_who_watch_happens(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    for step in ("a", "b"):
        await storage.add_watcher(R1, EndWatcher(R2, step))
    told = [end_signal("run-2", step="a"), end_signal("run-2", step="b")]
    assert await worker.send(run_write("run-1", entry(1), transition=done(watchers=2), signals=told)) == BatchResult()
    assert (await known(storage)).status is RunStatus.COMPLETED
    assert [step for _, _, _, step, _ in await read_items(storage, worker)] == ["a", "b"]
    assert await storage.watchers(R1) == ()


@pytest.mark.parametrize("known_watchers", [0, 1, 3])
async def test_an_end_that_does_not_know_all_who_watch_keeps_result_and_items_back(
    storage: Storage, worker: Worker, known_watchers: int
) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    await worker.send(run_write("run-1", transition=AckInbox(0), waits=[wait("run-1", "w", "order")]))
    for step in ("a", "b"):
        await storage.add_watcher(R1, EndWatcher(R2, step))
    ended = run_write(
        "run-1",
        entry(1),
        transition=done(watchers=known_watchers),
        signals=[end_signal("run-2"), cancel_signal("run-2")],
    )
    assert await worker.send(ended, new_run("run-3", entry(1), transition=done())) == REFUSED
    record = await known(storage)
    assert (record.status, record.value, record.ended_at, record.owner) == (RunStatus.RUNNING, None, None, worker.id)
    assert await storage.history(R1) == (entry(1),)
    assert await storage.read_inboxes(worker.id) == ()
    assert [each.step for each in await storage.waits(R1)] == ["w"]
    assert len(await storage.watchers(R1)) == 2
    assert (await known(storage, "run-3")).status is RunStatus.COMPLETED
    told = [end_signal("run-2", step=step) for step in ("a", "b")]
    assert await worker.send(run_write("run-1", entry(2), transition=done(watchers=2), signals=told)) == BatchResult()
    assert len(await storage.read_inboxes(worker.id)) == 2
    assert await storage.waits(R1) == ()


async def test_an_end_is_refused_for_any_run_id(storage: Storage, worker: Worker) -> None:
    run = RunId('run "ü\\ 🎉 $')
    await worker.write(new_run(run))
    await storage.add_watcher(run, EndWatcher(run, run))
    assert await worker.send(run_write(run, transition=done())) == BatchResult(refused={run: frozenset()})
    assert await worker.send(run_write(run, transition=done(watchers=1))) == BatchResult()


async def test_an_end_that_is_refused_leaves_inbox_unread(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"stop")
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    assert await worker.send(run_write("run-1", transition=done())) == REFUSED
    assert len(await storage.read_inboxes(worker.id)) == 1


async def test_of_an_end_and_a_watcher_at_once_one_sees_the_other(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    await worker.write(new_run("watcher"))
    for n in range(20):
        run = RunId(f"run-{n:02}")
        await worker.write(new_run(run))
        written, record = await asyncio.gather(
            worker.send(run_write(run, transition=done(), signals=[end_signal("watcher", run.encode())])),
            other.add_watcher(run, EndWatcher(RunId("watcher"), run)),
        )
        assert written is not None
        assert record is not None
        refused = run in written.refused
        assert refused is (record.ended_at is None) is bool(await storage.watchers(run))
        sent = [value for _, _, _, _, value in await read_items(storage, worker) if value == run.encode()]
        assert bool(sent) is not refused


# Generations


async def test_a_generation_follows_another_with_a_history_of_its_own(storage: Storage, worker: Worker) -> None:
    origin = Start(R1, WORKFLOW, b"input", 17, None, 99, R2, "child:1", 3)
    await worker.write(run_write("run-1", entry(1), start=origin))
    assert await worker.send(run_write("run-1", entry(2), transition=next_generation(at=5_000))) == BatchResult()
    record = await known(storage)
    assert (record.generation, record.status, record.owner) == (1, RunStatus.RUNNING, worker.id)
    assert (record.workflow, record.input, record.created_at, record.deadline, record.parent) == (
        WORKFLOW,
        b"input again",
        5_000,
        99,
        R2,
    )
    assert await storage.history(R1) == await storage.history(R1, 1) == (next_generation(at=5_000).entry,)
    assert await storage.history(R1, 0) == (entry(1), entry(2))
    assert [run.generation for run in await storage.find(RunFilter())] == [1]


async def test_a_new_generation_keeps_owner_epoch_inbox_watchers_and_start(
    storage: Storage, worker: Worker, make_worker: MakeWorker
) -> None:
    await storage.accept([incoming("e1")], {})
    await worker.write(new_run("run-1", transition=Suspend(0, 0, RunStatus.WAITING_FOR_TIMER)))
    (before,) = (await worker.claim()).runs
    await storage.accept([incoming("e2")], {})
    await storage.cancel(R1, b"stop")
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    assert (
        await worker.send(run_write("run-1", entry(1, n=1), transition=next_generation(inbox_read=1), epoch=2))
        == BatchResult()
    )
    assert await storage.owned_runs(worker.id) == {R1: before.epoch}
    assert await storage.read_inboxes(worker.id) == ()
    await storage.release_run(R1)
    (run,) = (await (await make_worker("other")).claim()).runs
    assert (run.generation, run.epoch, run.inbox_read, run.event_cursor) == (
        1,
        before.epoch + 1,
        1,
        before.event_cursor,
    )
    assert (run.watchers, run.inbox, run.input) == ((EndWatcher(R2, "w"),), (), b"input again")
    assert run.entries == (next_generation().entry,)
    await storage.cancel(R1, b"once more")
    (item,) = await storage.read_inboxes(WorkerId("other"))
    assert item.inbox_no == 2


async def test_a_new_generation_can_be_cancelled_anew(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"first")
    await worker.send(run_write("run-1", transition=next_generation(inbox_read=1)))
    assert await storage.cancel(R1, b"second") is CancelOutcome.REQUESTED
    assert [item.value for item in await storage.read_inboxes(worker.id)] == [b"second"]


async def test_a_new_generation_compensates_nothing_and_was_never_parked(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=Suspend(0, 1, RunStatus.PARKED)))
    (run,) = (await worker.claim()).runs
    assert run.attempts == 1
    await worker.send(run_write("run-1", transition=AckInbox(0), compensating=True, epoch=2))
    assert (await known(storage)).status is RunStatus.COMPENSATING
    await worker.send(run_write("run-1", transition=next_generation(), epoch=2))
    assert (await known(storage)).status is RunStatus.RUNNING
    await storage.release_run(R1)
    (run,) = (await worker.claim()).runs
    assert run.attempts == 0


async def test_a_new_generation_has_no_waits(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w", "order")]))
    await worker.send(run_write("run-1", transition=next_generation()))
    assert await storage.waits(R1) == ()
    await storage.accept([incoming("e1", "order")], {})
    assert await storage.read_inboxes(worker.id) == ()


async def test_a_new_generation_is_refused_while_there_is_inbox(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w", "order")]), new_run("run-2"))
    await storage.cancel(R1, b"first")
    await worker.write(run_write("run-2", transition=AckInbox(0), signals=[end_signal("run-1", b"second")]))
    refused = run_write("run-1", entry(1, n=1), transition=next_generation(inbox_read=1), signals=[end_signal("run-2")])
    assert await worker.send(refused) == REFUSED
    record = await known(storage)
    assert (record.generation, record.owner, record.input) == (0, worker.id, b"input of run-1")
    assert await storage.history(R1) == (entry(1, n=1),)
    assert await storage.history(R1, 1) == ()
    assert [(run, n, value) for run, n, _, _, value in await read_items(storage, worker)] == [("run-1", 2, b"second")]
    assert [each.step for each in await storage.waits(R1)] == ["w"]
    assert await storage.cancel(R1, b"third") is CancelOutcome.ALREADY
    read = run_write("run-1", entry(2, n=2), transition=next_generation(inbox_read=2), signals=[end_signal("run-2")])
    assert await worker.send(read) == BatchResult()
    assert [run for run, *_ in await read_items(storage, worker)] == [R2]


async def test_of_a_new_generation_and_a_cancel_at_once_one_sees_the_other(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    for n in range(20):
        run = RunId(f"run-{n:02}")
        await worker.write(new_run(run))
        written, _ = await asyncio.gather(
            worker.send(run_write(run, transition=next_generation())), other.cancel(run, b"stop")
        )
        assert written is not None
        assert (await known(storage, run)).generation == (0 if run in written.refused else 1)
    assert len(await storage.read_inboxes(worker.id)) == 20


async def test_a_run_may_be_created_and_go_on_as_the_next_generation(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("e1")], {})
    origin = Start(R1, WORKFLOW, b"input", 17, None, 99, R2, "child:1", 3)
    first = run_write(
        "run-1", entry(1), start=origin, transition=next_generation(at=20), children=[child("run-3", "run-1")]
    )
    assert await worker.send(first) == BatchResult()
    assert await storage.owned_runs(worker.id) == {R1: 1}
    assert await storage.history(R1, 0) == (entry(1),)
    assert await storage.history(R1) == (next_generation(at=20).entry,)
    record = await known(storage)
    assert (record.generation, record.status, record.owner, record.created_at) == (1, RunStatus.RUNNING, worker.id, 20)
    await storage.release_run(R1)
    run = next(run for run in (await worker.claim()).runs if run.run_id == R1)
    assert (run.generation, run.input, run.parent, run.parent_step, run.depth) == (1, b"input again", R2, "child:1", 3)
    assert (run.deadline, run.event_cursor) == (99, await storage.last_event())


async def test_generations_follow_one_another(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1)))
    for generation in range(3):
        await worker.send(
            run_write("run-1", entry(2), transition=next_generation(at=5_000 + generation), generation=generation)
        )
    assert (await known(storage)).generation == 3
    assert [len(await storage.history(R1, generation)) for generation in range(5)] == [2, 2, 2, 1, 0]
    assert await worker.send(run_write("run-1", transition=done(b"42"), generation=3)) == BatchResult()
    record = await known(storage)
    assert (record.generation, record.status, record.value, record.input) == (
        3,
        RunStatus.COMPLETED,
        b"42",
        b"input again",
    )


async def test_the_id_of_a_run_is_taken_in_any_generation(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    await worker.send(run_write("run-1", transition=next_generation(at=50)))
    assert await storage.prune_runs(100, 100) == 1
    assert await storage.start([start("run-1")]) == frozenset()
    assert await worker.send(run_write("run-2", children=[child("run-1", "run-2")])) == BatchResult()
    await storage.accept([incoming("e1", starts=[start("run-1")])], {})
    assert (await known(storage)).generation == 1
    assert (await worker.claim()).runs == ()
    with pytest.raises(StorageRejectedError):
        await worker.send(new_run("run-1"))


# Compensation


async def test_a_run_that_compensates_is_compensating(storage: Storage, worker: Worker) -> None:
    waiting = RunStatus.WAITING_FOR_TIMER
    await worker.write(
        new_run("owned", compensating=True),
        new_run("resting", transition=Suspend(0, LATER, waiting), compensating=True),
        new_run("due", transition=Suspend(0, 1, waiting), compensating=True),
        new_run("parked", transition=PARKED, compensating=True),
        new_run("parked and due", transition=Suspend(0, 1, RunStatus.PARKED), compensating=True),
        new_run("parked for good", transition=Suspend(0, None, RunStatus.PARKED), compensating=True),
        new_run("ended", transition=done(), compensating=True),
        new_run("other"),
    )
    expected = {
        "owned": RunStatus.COMPENSATING,
        "resting": RunStatus.COMPENSATING,
        "due": RunStatus.COMPENSATING,
        "parked": RunStatus.PARKED,
        "parked and due": RunStatus.COMPENSATING,
        "parked for good": RunStatus.PARKED,
        "ended": RunStatus.COMPLETED,
        "other": RunStatus.RUNNING,
    }
    assert {run: (await known(storage, run)).status for run in expected} == expected
    assert {run.run_id: run.status for run in await storage.find(RunFilter())} == expected
    for status in (*set(expected.values()), waiting):
        found = {run.run_id for run in await storage.find(RunFilter(status=status))}
        assert found == {run for run in expected if expected[run] is status}


async def test_a_run_goes_on_compensating_wherever_it_goes(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    await worker.send(run_write("run-1", entry(1), transition=RESTING, compensating=True))
    resting = await known(storage)
    assert (resting.status, resting.ready_at, resting.reason) == (RunStatus.COMPENSATING, LATER, "child:1")
    await worker.send(run_write("run-2", transition=AckInbox(0), signals=[end_signal("run-1")]))
    assert (await known(storage)).status is RunStatus.COMPENSATING
    await worker.claim()
    assert (await known(storage)).status is RunStatus.COMPENSATING
    await worker.send(run_write("run-1", transition=AckInbox(1), epoch=2))
    assert (await known(storage)).status is RunStatus.COMPENSATING
    await worker.send(run_write("run-1", transition=Suspend(1, LATER, RunStatus.PARKED), epoch=2))
    assert (await known(storage)).status is RunStatus.PARKED
    await storage.wake_parked([WORKFLOW])
    assert (await known(storage)).status is RunStatus.COMPENSATING


async def test_a_run_may_be_cancelled_while_it_compensates(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", compensating=True))
    assert await storage.cancel(R1, b"stop") is CancelOutcome.REQUESTED
    assert (await known(storage)).status is RunStatus.COMPENSATING


async def test_a_run_whose_end_is_refused_compensates_all_the_same(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    assert await worker.send(run_write("run-1", transition=done(), compensating=True)) == REFUSED
    assert (await known(storage)).status is RunStatus.COMPENSATING


# Pruning


async def recur(worker: Worker, run: str, *moments: int) -> None:
    """A run with one more generation for each of the times."""
    await worker.write(new_run(run, entry(1)))
    for generation, at in enumerate(moments):
        await worker.send(run_write(run, entry(2), transition=next_generation(at=at), generation=generation))


async def generations(storage: Storage, run: str = "run-1") -> list[int]:
    return [generation for generation in range(5) if await storage.history(RunId(run), generation)]


async def test_a_generation_goes_when_the_next_is_old_enough(storage: Storage, worker: Worker) -> None:
    await recur(worker, "run-1", 50, 99, 100)
    before = await known(storage)
    assert await storage.prune_runs(50, 100) == 0
    assert await storage.prune_runs(100, 100) == 2
    assert await storage.prune_runs(100, 100) == 0
    assert await generations(storage) == [2, 3]
    assert await storage.prune_runs(101, 100) == 1
    assert await storage.prune_runs(LATER, 100) == 0
    assert await generations(storage) == [3]
    assert await known(storage) == before
    assert await storage.owned_runs(worker.id) == {R1: 1}
    assert (
        await worker.send(run_write("run-1", entry(2), transition=next_generation(at=200), generation=3))
        == BatchResult()
    )
    assert (await known(storage)).generation == 4


async def test_generations_of_an_ended_run_go_with_it(storage: Storage, worker: Worker) -> None:
    await recur(worker, "run-1", 50, 60)
    await worker.write(run_write("run-1", transition=done(), generation=2))
    assert await storage.prune_runs(9_000, 100) == 0
    assert await generations(storage) == [0, 1, 2]
    assert await storage.prune_runs(9_001, 100) == 1
    assert await generations(storage) == []
    assert await storage.get(R1) is None


async def test_generations_go_no_more_than_asked_for(storage: Storage, worker: Worker) -> None:
    await recur(worker, "run-1", 30, 50)
    await recur(worker, "run-2", 20, 40)
    await worker.write(new_run("run-3", transition=End(RunStatus.COMPLETED, b"", 10)))
    assert [await storage.prune_runs(100, 2) for _ in range(4)] == [2, 2, 1, 0]
    assert (await generations(storage), await generations(storage, "run-2")) == ([2], [2])
    assert await storage.get(R3) is None


async def test_an_id_that_is_free_again_has_no_watchers(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    await worker.write(run_write("run-1", transition=done(watchers=1)))
    await storage.prune_runs(LATER, 100)
    await storage.start([start("run-1")])
    assert await storage.watchers(R1) == ()
    (run,) = (await worker.claim()).runs
    assert run.watchers == ()


async def test_what_a_refused_end_has_read_is_read(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"stop")
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    assert await worker.send(run_write("run-1", entry(1, n=1), transition=replace(done(), inbox_read=1))) == REFUSED
    assert await storage.read_inboxes(worker.id) == ()
    assert await storage.history(R1) == (entry(1, n=1),)
