"""Runs that start, watch, tell and follow each other: what a batch does to runs other than those that write it."""

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
    ASLEEP,
    LATER,
    WORKFLOW,
    again,
    born,
    bundle,
    child,
    done,
    entry,
    incoming,
    letter,
    start,
    stop,
    wait,
)
from .worker import Worker

R1, R2, R3 = RunId("run-1"), RunId("run-2"), RunId("run-3")
RESTING = Suspend(0, LATER, RunStatus.WAITING_FOR_CHILD, "child:1")
PARKED = Suspend(0, LATER, RunStatus.PARKED, "the code changed")
REFUSED = BatchResult(unmet={R1: frozenset()})


async def known(storage: Storage, run_id: str = "run-1") -> RunRecord:
    record = await storage.get(RunId(run_id))
    assert record is not None
    return record


async def letters(storage: Storage, worker: Worker) -> list[tuple[str, int, EntryKind, str, bytes]]:
    return [(x.run_id, x.n, x.kind, x.step, x.value) for x in await storage.read_inboxes(worker.id)]


# Children


async def test_a_child_is_ready_for_anybody_and_knows_its_parent(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("e1"), incoming("e2")], {})
    await worker.write(born("run-1"))
    children = [Start(R2, WORKFLOW, b"input", 17, None, 99, R1, "child:1", 3)]
    assert await worker.send(bundle("run-1", entry(1), children=children)) == BatchResult()
    assert await storage.owned_runs(worker.id) == {R1: 1}
    record = await known(storage, "run-2")
    assert (record.status, record.owner, record.parent, record.gen) == (RunStatus.RUNNING, None, R1, 0)
    assert record.ready_at is not None
    assert 0 < record.ready_at <= await storage.now()
    (run,) = (await worker.claim()).runs
    assert (run.run_id, run.workflow, run.input, run.created_at, run.deadline) == (R2, WORKFLOW, b"input", 17, 99)
    assert (run.parent, run.parent_step, run.depth) == (R1, "child:1", 3)
    assert (run.gen, run.epoch, run.entries, run.mail, run.watchers) == (0, 1, (), (), ())
    assert run.start_seq == await storage.last_event() > 0


async def test_a_child_that_nobody_waits_for_has_no_step_to_tell(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1", children=[child("run-2", "run-1", step=None)]))
    (run,) = (await worker.claim()).runs
    assert (run.parent, run.parent_step, run.depth) == (R1, None, 1)


async def test_a_child_may_be_started_for_later(storage: Storage, worker: Worker) -> None:
    later = Start(R2, WORKFLOW, b"", 17, LATER, parent=R1)
    await worker.write(born("run-1", children=[later]))
    assert (await known(storage, "run-2")).ready_at == LATER
    assert (await worker.claim()).runs == ()


async def test_a_child_whose_id_exists_is_left_alone(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2"), born("run-3", move=done()))
    before = await known(storage, "run-2"), await known(storage, "run-3")
    children = [child(run, "run-1") for run in ("run-2", "run-3", "run-4")]
    assert await worker.send(bundle("run-1", entry(1), children=children)) == BatchResult()
    assert (await known(storage, "run-2"), await known(storage, "run-3")) == before
    assert [run.run_id for run in (await worker.claim()).runs] == ["run-4"]
    assert await storage.history(R1) == (entry(1),)


async def test_of_two_children_with_one_id_the_first_is_started(storage: Storage, worker: Worker) -> None:
    await worker.write(
        born("run-2", children=[child("x", "run-2")]),
        born("run-1", children=[child("x", "run-1"), child("x", "run-1", step="child:2")]),
    )
    (run,) = (await worker.claim()).runs
    assert (run.run_id, run.parent, run.parent_step) == ("x", R2, "child:1")


async def test_a_run_may_be_born_with_children_and_letters(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-3"))
    first = born("run-1", entry(1), move=RESTING, children=[child("run-2", "run-1")], letters=[letter("run-3")])
    assert await worker.send(first) == BatchResult()
    assert await letters(storage, worker) == [("run-3", 1, EntryKind.CHILD, "child:1", b"its end")]
    assert [run.run_id for run in (await worker.claim()).runs] == [R2]
    assert (await known(storage)).status is RunStatus.WAITING_FOR_CHILD


async def test_a_run_may_be_born_with_children_and_end_at_once(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-3"))
    first = born("run-1", move=done(), children=[child("run-2", "run-1")], letters=[letter("run-3")])
    assert await worker.send(first) == BatchResult()
    assert (await known(storage)).status is RunStatus.COMPLETED
    assert [run.run_id for run in (await worker.claim()).runs] == [R2]
    assert len(await storage.read_inboxes(worker.id)) == 1


async def test_children_of_an_end_that_is_refused_are_started(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.add_watcher(R1, EndWatcher(R3, "w"))
    assert await worker.send(bundle("run-1", move=done(), children=[child("run-2", "run-1")])) == REFUSED
    assert [run.run_id for run in (await worker.claim()).runs] == [R2]


async def test_a_batch_behind_its_fence_starts_and_tells_nobody(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-3"))
    stale = Fence(worker.id, 0, 0)
    lost = bundle("run-1", move=again(), children=[child("run-2", "run-1")], letters=[letter("run-3")], undoing=True)
    assert await storage.write(stale, [lost]) is None
    assert await storage.get(R2) is None
    assert await storage.read_inboxes(worker.id) == ()
    record = await known(storage)
    assert (record.gen, record.status) == (0, RunStatus.RUNNING)


async def test_a_child_that_cannot_be_stored_refuses_the_batch(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    for bad in (child("run-2", "run-1", step="child\0"), child("run-2\0", "run-1"), child("run-2", "run\0")):
        with pytest.raises(StorageRejectedError):
            await worker.send(bundle("run-1", entry(1), children=[bad]))
    assert await storage.history(R1) == ()
    assert await storage.get(R2) is None
    assert await worker.send(bundle("run-1", entry(1), children=[child("run-2", "run-1")])) == BatchResult()


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
    await one.write(born("run-1"))
    await two.write(born("run-2"))
    for turn in range(5):
        ids = [f"child-{turn}-{n}" for n in range(10)]
        await asyncio.gather(
            one.write(bundle("run-1", children=[child(run, "run-1") for run in ids])),
            two.write(bundle("run-2", children=[child(run, "run-2") for run in reversed(ids)])),
        )
    claimed = (await one.claim(limit=100)).runs
    assert len(claimed) == len({run.run_id for run in claimed}) == 50


# Letters


async def test_a_letter_to_an_owned_run_is_mail_for_its_owner(
    storage: Storage, worker: Worker, make_worker: MakeWorker
) -> None:
    other = await make_worker("other")
    await worker.write(born("run-1"))
    await other.write(born("run-2"))
    before = await storage.now()
    sent = bundle("run-1", move=done(), letters=[letter("run-2", b"42", "pay:1")])
    assert await worker.send(sent) == BatchResult()
    (mail,) = await storage.read_inboxes(other.id)
    assert (mail.run_id, mail.n, mail.kind, mail.step, mail.value) == (R2, 1, EntryKind.CHILD, "pay:1", b"42")
    assert mail.event is None
    assert before <= mail.at <= await storage.now()
    assert await storage.owned_runs(other.id) == {R2: 1}
    assert await other.write(bundle("run-2", move=RESTING)) == frozenset({R2})


async def test_a_letter_wakes_a_resting_run(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2", move=RESTING))
    await worker.send(bundle("run-1", move=AckInbox(0), letters=[letter("run-2")]))
    record = await known(storage, R2)
    assert (record.status, record.ready_at, record.reason) == (RunStatus.RUNNING, 0, None)
    claimed = (await worker.claim()).runs
    assert {run.run_id: [(x.n, x.value) for x in run.mail] for run in claimed} == {R2: [(1, b"its end")]}


async def test_a_letter_leaves_a_parked_run_parked(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-3", move=PARKED))
    before = await known(storage, R3)
    await worker.send(bundle("run-1", move=AckInbox(0), letters=[letter("run-3")]))
    record = await known(storage, R3)
    assert (record.status, record.ready_at, record.reason) == (RunStatus.PARKED, before.ready_at, before.reason)
    assert (await worker.claim()).runs == ()
    assert await storage.resume(R3)
    (claimed,) = (await worker.claim()).runs
    assert [(x.n, x.value) for x in claimed.mail] == [(1, b"its end")]


async def test_a_cancel_from_another_run_has_a_parked_run_tried(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-3", move=PARKED))
    await worker.send(bundle("run-1", move=AckInbox(0), letters=[stop("run-3")]))
    (claimed,) = (await worker.claim()).runs
    assert (claimed.run_id, claimed.end_if_parked, len(claimed.mail)) == (R3, True, 1)


async def test_a_letter_to_a_run_that_ended_or_never_was_is_dropped(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2", move=done()))
    sent = [letter("run-2"), stop("run-2"), letter("unknown"), stop("unknown")]
    assert await worker.send(bundle("run-1", move=done(), letters=sent)) == BatchResult()
    assert await storage.read_inboxes(worker.id) == ()
    assert await storage.prune_inbox(LATER, 100) == 0
    assert await storage.get(RunId("unknown")) is None


async def test_letters_to_one_run_are_numbered_in_the_order_of_the_batch(storage: Storage, worker: Worker) -> None:
    await worker.write(*(born(run) for run in ("a", "b", "c", "target")))
    await storage.cancel(RunId("target"), b"stop")
    await worker.send(
        bundle("c", move=AckInbox(0), letters=[letter("target", b"c1"), letter("target", b"c2")]),
        bundle("a", move=done(), letters=[letter("target", b"a1")]),
        bundle("b", move=again(), letters=[letter("target", b"b1", step="other")]),
    )
    await worker.send(born("d", letters=[letter("target", b"d1")]))
    assert [(n, value) for _, n, _, _, value in await letters(storage, worker)] == [
        (1, b"stop"),
        (2, b"c1"),
        (3, b"c2"),
        (4, b"a1"),
        (5, b"b1"),
        (6, b"d1"),
    ]


async def test_a_letter_with_a_cancel_goes_in_once(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2"), born("run-3"))
    await worker.send(
        bundle("run-1", move=AckInbox(0), letters=[stop("run-3", b"first"), letter("run-3"), stop("run-3", b"second")]),
        bundle("run-2", move=AckInbox(0), letters=[stop("run-3", b"third")]),
    )
    await worker.send(bundle("run-1", move=AckInbox(0), letters=[stop("run-3", b"fourth")]))
    assert await letters(storage, worker) == [
        ("run-3", 1, EntryKind.CANCEL, "", b"first"),
        ("run-3", 2, EntryKind.CHILD, "child:1", b"its end"),
    ]
    assert await storage.cancel(R3, b"fifth") is CancelOutcome.ALREADY


async def test_a_letter_cancels_no_run_that_was_cancelled_before(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2", move=RESTING))
    await storage.cancel(R2, b"first")
    await worker.send(bundle("run-1", move=AckInbox(0), letters=[stop("run-2", b"second")]))
    (run,) = (await worker.claim()).runs
    assert [mail.value for mail in run.mail] == [b"first"]


async def test_a_letter_with_a_cancel_wakes_a_resting_run(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2", move=ASLEEP))
    await worker.send(bundle("run-1", move=AckInbox(0), letters=[stop("run-2")]))
    (run,) = (await worker.claim()).runs
    assert [(mail.kind, mail.value) for mail in run.mail] == [(EntryKind.CANCEL, b"stop")]


async def test_letters_of_a_run_that_stays_because_of_its_waits_are_sent(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2"))
    await storage.accept([incoming("e1", "order")], {})
    sent = bundle("run-1", move=ASLEEP, waits=[wait("run-1", "w", "order")], letters=[letter("run-2")])
    assert await worker.send(sent) == BatchResult(unmet={R1: frozenset({"w"})})
    assert [run for run, *_ in await letters(storage, worker)] == [R1, R2]


async def test_a_letter_that_cannot_be_stored_refuses_the_batch(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2"))
    with pytest.raises(StorageRejectedError):
        await worker.send(bundle("run-1", entry(1), move=done(), letters=[letter("run-2", step="w\0")]))
    assert await storage.read_inboxes(worker.id) == ()
    assert await storage.history(R1) == ()
    assert await worker.send(bundle("run-1", entry(1), move=done(), letters=[letter("run-2")])) == BatchResult()


async def test_workers_that_write_to_each_other_do_not_stop_each_other(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    crew = [await make_worker("one"), await make_worker("two", on=await make_storage())]
    ours = [[f"run-{n:02}-{part}" for n in range(20)] for part in range(2)]
    for worker, runs in zip(crew, ours, strict=True):
        await worker.write(*(born(run) for run in runs))

    async def talk(worker: Worker, mine: list[str], theirs: list[str]) -> None:
        for _ in range(10):
            sent = zip(mine, reversed(theirs), strict=True)
            batch = [bundle(run, move=AckInbox(0), letters=[letter(other)]) for run, other in sent]
            assert await worker.send(*batch) == BatchResult()

    async with asyncio.timeout(60):
        await asyncio.gather(talk(crew[0], *ours), talk(crew[1], *reversed(ours)))
    for worker, runs in zip(crew, ours, strict=True):
        assert [(run, n) for run, n, *_ in await letters(storage, worker)] == [
            (run, n) for run in runs for n in range(1, 11)
        ]


# Watching


async def test_a_watcher_is_told_to_whoever_claims_the_run(storage: Storage, worker: Worker) -> None:
    await storage.start([start("run-1"), start("run-2")])
    watchers = [EndWatcher(R3, "b"), EndWatcher(R3, "a"), EndWatcher(R2, "z")]
    for watcher in watchers:
        assert await storage.add_watcher(R1, watcher) == await known(storage)
    assert await storage.watchers(R1) == (watchers[2], watchers[1], watchers[0])
    runs = {run.run_id: run.watchers for run in (await worker.claim()).runs}
    assert runs == {R1: (watchers[2], watchers[1], watchers[0]), R2: ()}


async def test_watching_twice_counts_once(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    for _ in range(2):
        assert await storage.add_watcher(R1, EndWatcher(R2, "w")) == await known(storage)
    assert await storage.watchers(R1) == (EndWatcher(R2, "w"),)
    assert await worker.send(bundle("run-1", move=done(watchers=1))) == BatchResult()


async def test_an_ended_run_is_not_watched_but_known(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1", move=done(b"42")))
    record = await storage.add_watcher(R1, EndWatcher(R2, "w"))
    assert record is not None
    assert (record.status, record.value) == (RunStatus.COMPLETED, b"42")
    assert record == await known(storage)
    assert await storage.watchers(R1) == ()


async def test_a_run_that_never_was_cannot_be_watched(storage: Storage) -> None:
    assert await storage.add_watcher(R1, EndWatcher(R2, "w")) is None
    assert await storage.watchers(R1) == ()
    assert await storage.get(R1) is None


async def test_watching_wakes_nobody(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1", move=RESTING))
    before = await known(storage)
    assert await storage.add_watcher(R1, EndWatcher(R2, "w")) == before
    assert await known(storage) == before
    assert (await worker.claim()).runs == ()


async def test_two_who_watch_at_once_are_both_counted(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    await worker.write(born("run-1"))
    for n in range(5):
        await asyncio.gather(
            storage.add_watcher(R1, EndWatcher(R2, f"w{n}")),
            other.add_watcher(R1, EndWatcher(R3, f"w{n}")),
            other.add_watcher(R1, EndWatcher(R2, f"w{n}")),
        )
    assert len(await storage.watchers(R1)) == 10
    assert await worker.send(bundle("run-1", move=done(watchers=10))) == BatchResult()


async def test_a_watcher_that_cannot_be_stored_is_refused(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    with pytest.raises(StorageRejectedError):
        await storage.add_watcher(R1, EndWatcher(R2, "w\0"))
    assert await storage.watchers(R1) == ()
    assert await worker.send(bundle("run-1", move=done())) == BatchResult()


# Ends


async def test_an_end_that_knows_all_who_watch_happens(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2"))
    for step in ("a", "b"):
        await storage.add_watcher(R1, EndWatcher(R2, step))
    told = [letter("run-2", step="a"), letter("run-2", step="b")]
    assert await worker.send(bundle("run-1", entry(1), move=done(watchers=2), letters=told)) == BatchResult()
    assert (await known(storage)).status is RunStatus.COMPLETED
    assert [step for _, _, _, step, _ in await letters(storage, worker)] == ["a", "b"]
    assert await storage.watchers(R1) == ()


@pytest.mark.parametrize("known_watchers", [0, 1, 3])
async def test_an_end_that_does_not_know_all_who_watch_keeps_result_and_letters_back(
    storage: Storage, worker: Worker, known_watchers: int
) -> None:
    await worker.write(born("run-1"), born("run-2"))
    await worker.send(bundle("run-1", move=AckInbox(0), waits=[wait("run-1", "w", "order")]))
    for step in ("a", "b"):
        await storage.add_watcher(R1, EndWatcher(R2, step))
    ended = bundle("run-1", entry(1), move=done(watchers=known_watchers), letters=[letter("run-2"), stop("run-2")])
    assert await worker.send(ended, born("run-3", entry(1), move=done())) == REFUSED
    record = await known(storage)
    assert (record.status, record.value, record.ended_at, record.owner) == (RunStatus.RUNNING, None, None, worker.id)
    assert await storage.history(R1) == (entry(1),)
    assert await storage.read_inboxes(worker.id) == ()
    assert [each.step for each in await storage.waits(R1)] == ["w"]
    assert len(await storage.watchers(R1)) == 2
    assert (await known(storage, "run-3")).status is RunStatus.COMPLETED
    told = [letter("run-2", step=step) for step in ("a", "b")]
    assert await worker.send(bundle("run-1", entry(2), move=done(watchers=2), letters=told)) == BatchResult()
    assert len(await storage.read_inboxes(worker.id)) == 2
    assert await storage.waits(R1) == ()


async def test_an_end_is_refused_whatever_the_name_of_its_run(storage: Storage, worker: Worker) -> None:
    run = RunId('run "ü\\ 🎉 $')
    await worker.write(born(run))
    await storage.add_watcher(run, EndWatcher(run, run))
    assert await worker.send(bundle(run, move=done())) == BatchResult(unmet={run: frozenset()})
    assert await worker.send(bundle(run, move=done(watchers=1))) == BatchResult()


async def test_an_end_that_is_refused_leaves_mail_unread(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.cancel(R1, b"stop")
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    assert await worker.send(bundle("run-1", move=done())) == REFUSED
    assert len(await storage.read_inboxes(worker.id)) == 1


async def test_of_an_end_and_a_watcher_at_once_one_sees_the_other(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    await worker.write(born("watcher"))
    for n in range(20):
        run = RunId(f"run-{n:02}")
        await worker.write(born(run))
        written, record = await asyncio.gather(
            worker.send(bundle(run, move=done(), letters=[letter("watcher", run.encode())])),
            other.add_watcher(run, EndWatcher(RunId("watcher"), run)),
        )
        assert written is not None
        assert record is not None
        refused = run in written.unmet
        assert refused is (record.ended_at is None) is bool(await storage.watchers(run))
        sent = [value for _, _, _, _, value in await letters(storage, worker) if value == run.encode()]
        assert bool(sent) is not refused


# Generations


async def test_a_generation_follows_another_with_a_history_of_its_own(storage: Storage, worker: Worker) -> None:
    origin = Start(R1, WORKFLOW, b"input", 17, None, 99, R2, "child:1", 3)
    await worker.write(bundle("run-1", entry(1), start=origin))
    assert await worker.send(bundle("run-1", entry(2), move=again(at=5_000))) == BatchResult()
    record = await known(storage)
    assert (record.gen, record.status, record.owner) == (1, RunStatus.RUNNING, worker.id)
    assert (record.workflow, record.input, record.created_at, record.deadline, record.parent) == (
        WORKFLOW,
        b"input again",
        5_000,
        99,
        R2,
    )
    assert await storage.history(R1) == await storage.history(R1, 1) == (again(at=5_000).entry,)
    assert await storage.history(R1, 0) == (entry(1), entry(2))
    assert [run.gen for run in await storage.find(RunFilter())] == [1]


async def test_a_new_generation_keeps_owner_epoch_inbox_watchers_and_start(
    storage: Storage, worker: Worker, make_worker: MakeWorker
) -> None:
    await storage.accept([incoming("e1")], {})
    await worker.write(born("run-1", move=Suspend(0, 0, RunStatus.WAITING_FOR_TIMER)))
    (before,) = (await worker.claim()).runs
    await storage.accept([incoming("e2")], {})
    await storage.cancel(R1, b"stop")
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    assert await worker.send(bundle("run-1", entry(1, n=1), move=again(absorbed=1), epoch=2)) == BatchResult()
    assert await storage.owned_runs(worker.id) == {R1: before.epoch}
    assert await storage.read_inboxes(worker.id) == ()
    await storage.release_run(R1)
    (run,) = (await (await make_worker("other")).claim()).runs
    assert (run.gen, run.epoch, run.absorbed, run.start_seq) == (1, before.epoch + 1, 1, before.start_seq)
    assert (run.watchers, run.mail, run.input) == ((EndWatcher(R2, "w"),), (), b"input again")
    assert run.entries == (again().entry,)
    await storage.cancel(R1, b"once more")
    (mail,) = await storage.read_inboxes(WorkerId("other"))
    assert mail.n == 2


async def test_a_new_generation_can_be_cancelled_anew(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.cancel(R1, b"first")
    await worker.send(bundle("run-1", move=again(absorbed=1)))
    assert await storage.cancel(R1, b"second") is CancelOutcome.REQUESTED
    assert [mail.value for mail in await storage.read_inboxes(worker.id)] == [b"second"]


async def test_a_new_generation_undoes_nothing_and_was_never_parked(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1", move=Suspend(0, 1, RunStatus.PARKED)))
    (run,) = (await worker.claim()).runs
    assert run.attempts == 1
    await worker.send(bundle("run-1", move=AckInbox(0), undoing=True, epoch=2))
    assert (await known(storage)).status is RunStatus.COMPENSATING
    await worker.send(bundle("run-1", move=again(), epoch=2))
    assert (await known(storage)).status is RunStatus.RUNNING
    await storage.release_run(R1)
    (run,) = (await worker.claim()).runs
    assert run.attempts == 0


async def test_a_new_generation_has_no_waits(storage: Storage, worker: Worker) -> None:
    await worker.send(born("run-1", waits=[wait("run-1", "w", "order")]))
    await worker.send(bundle("run-1", move=again()))
    assert await storage.waits(R1) == ()
    await storage.accept([incoming("e1", "order")], {})
    assert await storage.read_inboxes(worker.id) == ()


async def test_a_new_generation_is_refused_while_there_is_mail(storage: Storage, worker: Worker) -> None:
    await worker.send(born("run-1", waits=[wait("run-1", "w", "order")]), born("run-2"))
    await storage.cancel(R1, b"first")
    await worker.write(bundle("run-2", move=AckInbox(0), letters=[letter("run-1", b"second")]))
    refused = bundle("run-1", entry(1, n=1), move=again(absorbed=1), letters=[letter("run-2")])
    assert await worker.send(refused) == REFUSED
    record = await known(storage)
    assert (record.gen, record.owner, record.input) == (0, worker.id, b"input of run-1")
    assert await storage.history(R1) == (entry(1, n=1),)
    assert await storage.history(R1, 1) == ()
    assert [(run, n, value) for run, n, _, _, value in await letters(storage, worker)] == [("run-1", 2, b"second")]
    assert [each.step for each in await storage.waits(R1)] == ["w"]
    assert await storage.cancel(R1, b"third") is CancelOutcome.ALREADY
    read = bundle("run-1", entry(2, n=2), move=again(absorbed=2), letters=[letter("run-2")])
    assert await worker.send(read) == BatchResult()
    assert [run for run, *_ in await letters(storage, worker)] == [R2]


async def test_of_a_new_generation_and_a_cancel_at_once_one_sees_the_other(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    for n in range(20):
        run = RunId(f"run-{n:02}")
        await worker.write(born(run))
        written, _ = await asyncio.gather(worker.send(bundle(run, move=again())), other.cancel(run, b"stop"))
        assert written is not None
        assert (await known(storage, run)).gen == (0 if run in written.unmet else 1)
    assert len(await storage.read_inboxes(worker.id)) == 20


async def test_a_run_may_be_born_and_go_on_as_the_next_generation(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("e1")], {})
    origin = Start(R1, WORKFLOW, b"input", 17, None, 99, R2, "child:1", 3)
    first = bundle("run-1", entry(1), start=origin, move=again(at=20), children=[child("run-3", "run-1")])
    assert await worker.send(first) == BatchResult()
    assert await storage.owned_runs(worker.id) == {R1: 1}
    assert await storage.history(R1, 0) == (entry(1),)
    assert await storage.history(R1) == (again(at=20).entry,)
    record = await known(storage)
    assert (record.gen, record.status, record.owner, record.created_at) == (1, RunStatus.RUNNING, worker.id, 20)
    await storage.release_run(R1)
    run = next(run for run in (await worker.claim()).runs if run.run_id == R1)
    assert (run.gen, run.input, run.parent, run.parent_step, run.depth) == (1, b"input again", R2, "child:1", 3)
    assert (run.deadline, run.start_seq) == (99, await storage.last_event())


async def test_generations_follow_one_another(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1", entry(1)))
    for gen in range(3):
        await worker.send(bundle("run-1", entry(2), move=again(at=5_000 + gen), gen=gen))
    assert (await known(storage)).gen == 3
    assert [len(await storage.history(R1, gen)) for gen in range(5)] == [2, 2, 2, 1, 0]
    assert await worker.send(bundle("run-1", move=done(b"42"), gen=3)) == BatchResult()
    record = await known(storage)
    assert (record.gen, record.status, record.value, record.input) == (3, RunStatus.COMPLETED, b"42", b"input again")


async def test_the_id_of_a_run_is_taken_in_whatever_generation(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2"))
    await worker.send(bundle("run-1", move=again(at=50)))
    assert await storage.prune_runs(100, 100) == 1
    assert await storage.start([start("run-1")]) == frozenset()
    assert await worker.send(bundle("run-2", children=[child("run-1", "run-2")])) == BatchResult()
    await storage.accept([incoming("e1", starts=[start("run-1")])], {})
    assert (await known(storage)).gen == 1
    assert (await worker.claim()).runs == ()
    with pytest.raises(StorageRejectedError):
        await worker.send(born("run-1"))


# Undoing


async def test_a_run_that_undoes_is_compensating(storage: Storage, worker: Worker) -> None:
    waiting = RunStatus.WAITING_FOR_TIMER
    await worker.write(
        born("owned", undoing=True),
        born("resting", move=Suspend(0, LATER, waiting), undoing=True),
        born("due", move=Suspend(0, 1, waiting), undoing=True),
        born("parked", move=PARKED, undoing=True),
        born("parked and due", move=Suspend(0, 1, RunStatus.PARKED), undoing=True),
        born("parked for good", move=Suspend(0, None, RunStatus.PARKED), undoing=True),
        born("ended", move=done(), undoing=True),
        born("other"),
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


async def test_a_run_goes_on_undoing_wherever_it_goes(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2"))
    await worker.send(bundle("run-1", entry(1), move=RESTING, undoing=True))
    resting = await known(storage)
    assert (resting.status, resting.ready_at, resting.reason) == (RunStatus.COMPENSATING, LATER, "child:1")
    await worker.send(bundle("run-2", move=AckInbox(0), letters=[letter("run-1")]))
    assert (await known(storage)).status is RunStatus.COMPENSATING
    await worker.claim()
    assert (await known(storage)).status is RunStatus.COMPENSATING
    await worker.send(bundle("run-1", move=AckInbox(1), epoch=2))
    assert (await known(storage)).status is RunStatus.COMPENSATING
    await worker.send(bundle("run-1", move=Suspend(1, LATER, RunStatus.PARKED), epoch=2))
    assert (await known(storage)).status is RunStatus.PARKED
    await storage.wake_parked([WORKFLOW])
    assert (await known(storage)).status is RunStatus.COMPENSATING


async def test_a_run_may_be_cancelled_while_it_undoes(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1", undoing=True))
    assert await storage.cancel(R1, b"stop") is CancelOutcome.REQUESTED
    assert (await known(storage)).status is RunStatus.COMPENSATING


async def test_a_run_whose_end_is_refused_undoes_all_the_same(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    assert await worker.send(bundle("run-1", move=done(), undoing=True)) == REFUSED
    assert (await known(storage)).status is RunStatus.COMPENSATING


# Pruning


async def recur(worker: Worker, run: str, *moments: int) -> None:
    """A run with one more generation for each moment."""
    await worker.write(born(run, entry(1)))
    for gen, at in enumerate(moments):
        await worker.send(bundle(run, entry(2), move=again(at=at), gen=gen))


async def generations(storage: Storage, run: str = "run-1") -> list[int]:
    return [gen for gen in range(5) if await storage.history(RunId(run), gen)]


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
    assert await worker.send(bundle("run-1", entry(2), move=again(at=200), gen=3)) == BatchResult()
    assert (await known(storage)).gen == 4


async def test_generations_of_an_ended_run_go_with_it(storage: Storage, worker: Worker) -> None:
    await recur(worker, "run-1", 50, 60)
    await worker.write(bundle("run-1", move=done(), gen=2))
    assert await storage.prune_runs(9_000, 100) == 0
    assert await generations(storage) == [0, 1, 2]
    assert await storage.prune_runs(9_001, 100) == 1
    assert await generations(storage) == []
    assert await storage.get(R1) is None


async def test_generations_go_no_more_than_asked_for(storage: Storage, worker: Worker) -> None:
    await recur(worker, "run-1", 30, 50)
    await recur(worker, "run-2", 20, 40)
    await worker.write(born("run-3", move=End(RunStatus.COMPLETED, b"", 10)))
    assert [await storage.prune_runs(100, 2) for _ in range(4)] == [2, 2, 1, 0]
    assert (await generations(storage), await generations(storage, "run-2")) == ([2], [2])
    assert await storage.get(R3) is None


async def test_an_id_that_is_free_again_has_no_watchers(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    await worker.write(bundle("run-1", move=done(watchers=1)))
    await storage.prune_runs(LATER, 100)
    await storage.start([start("run-1")])
    assert await storage.watchers(R1) == ()
    (run,) = (await worker.claim()).runs
    assert run.watchers == ()


async def test_what_a_refused_end_has_read_is_read(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.cancel(R1, b"stop")
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    assert await worker.send(bundle("run-1", entry(1, n=1), move=replace(done(), absorbed=1))) == REFUSED
    assert await storage.read_inboxes(worker.id) == ()
    assert await storage.history(R1) == (entry(1, n=1),)
