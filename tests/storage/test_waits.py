"""Waits: a wait is registered, or refused because there are inbox items to read; no event is lost in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from edda.core.model import AckInbox, BatchResult, EntryKind, Fence, InboxItem, RunId, Suspend, Wait
from edda.core.states import RunStatus
from edda.errors import StorageRejectedError
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .conftest import MakeWorker
from .records import LATER, SOURCE, SUSPENDED, TYPE, done, entry, incoming, key, new_run, run_write, start, wait
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")
ORDER = wait("run-1", "w", "order")


def suspended(inbox_read: int) -> Suspend:
    return Suspend(inbox_read, None, RunStatus.WAITING_FOR_EVENT, TYPE)


async def number(storage: Storage, id: str) -> int:
    stored = await storage.find_event(SOURCE, id)
    assert stored is not None
    return stored.seq


async def registered(storage: Storage, run_id: str = "run-1") -> list[str]:
    return [each.step for each in await storage.waits(RunId(run_id))]


async def read_items(storage: Storage, worker: Worker) -> list[tuple[int, str, bytes]]:
    return [(item.inbox_no, item.step, item.value) for item in await storage.read_inboxes(worker.id)]


# Registering


async def test_a_wait_is_registered_and_its_run_released(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    waits = [wait("run-1", "b", "refund"), wait("run-1", "a", "order", due=LATER)]
    assert await worker.send(run_write("run-1", entry(1), transition=SUSPENDED, waits=waits)) == BatchResult()
    assert await storage.waits(R1) == (waits[1], waits[0])
    assert await storage.owned_runs(worker.id) == {}
    record = await storage.get(R1)
    assert record is not None
    assert (record.status, record.reason, record.ready_at) == (RunStatus.WAITING_FOR_EVENT, TYPE, None)
    assert await storage.history(R1) == (entry(1),)


async def test_a_run_may_be_created_waiting_and_asleep(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("old", "order")], {})
    assert await worker.send(new_run("run-1", entry(1), transition=SUSPENDED, waits=[ORDER])) == BatchResult()
    assert await storage.waits(R1) == (ORDER,)
    assert await storage.owned_runs(worker.id) == {}
    await storage.accept([incoming("new", "order")], {})
    (run,) = (await worker.claim()).runs
    assert [item.value for item in run.inbox] == [b"new"]


async def test_a_run_may_be_created_waiting_and_awake(storage: Storage, worker: Worker) -> None:
    assert await worker.send(new_run("run-1", waits=[ORDER])) == BatchResult()
    assert (
        await worker.send(new_run("run-2", transition=AckInbox(0), waits=[wait("run-2", "w", "order")]))
        == BatchResult()
    )
    assert await storage.owned_runs(worker.id) == {R1: 1, R2: 1}
    assert (await registered(storage), await registered(storage, "run-2")) == (["w"], ["w"])


async def test_a_run_that_stays_may_register(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    assert await worker.send(run_write("run-1", transition=AckInbox(0), waits=[ORDER])) == BatchResult()
    assert await registered(storage) == ["w"]
    assert await storage.owned_runs(worker.id) == {R1: 1}


async def test_a_claim_brings_the_registered_steps_with_their_keys(storage: Storage, worker: Worker) -> None:
    waits = [wait("run-1", "b", "order"), wait("run-1", "a", "invoice")]
    rest = Suspend(0, 0, RunStatus.WAITING_FOR_EVENT)
    await worker.send(new_run("run-1", transition=rest, waits=waits), new_run("run-2", transition=rest))
    runs = {run.run_id: run.waits for run in (await worker.claim()).runs}
    assert runs == {R1: (("a", waits[1].key), ("b", waits[0].key)), R2: ()}


async def test_registering_again_is_harmless(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[ORDER]))
    waits = [wait("run-1", "w", "order", due=5), wait("run-1", "x", "order")]
    assert await worker.send(run_write("run-1", transition=SUSPENDED, waits=waits)) == BatchResult()
    assert await storage.waits(R1) == (ORDER, waits[1])
    assert await storage.owned_runs(worker.id) == {}


async def test_a_batch_behind_its_fence_registers_nothing(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1", "order")], {})
    stale = Fence(worker.id, 0, 0)
    assert (
        await storage.write(stale, [run_write("run-1", transition=SUSPENDED, waits=[ORDER]), new_run("run-2")]) is None
    )
    assert await registered(storage) == []
    assert await storage.read_inboxes(worker.id) == ()
    assert await storage.owned_runs(worker.id) == {R1: 1}


async def test_a_wait_that_cannot_be_stored_refuses_its_batch(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    bad = Wait("w\0", key("order"), key("order", "run-1"), TYPE, b"")
    with pytest.raises(StorageRejectedError):
        await worker.send(run_write("run-1", entry(1), transition=SUSPENDED, waits=[bad]), new_run("run-2"))
    assert await registered(storage) == []
    assert await storage.get(R2) is None
    assert await worker.send(run_write("run-1", entry(1), transition=SUSPENDED, waits=[ORDER])) == BatchResult()


async def test_many_runs_register_in_one_batch(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(50)]
    await worker.write(*(new_run(run) for run in runs))
    await storage.accept([incoming(f"e-{run}", run) for run in runs[::2]], {})
    written = await worker.send(
        *(run_write(run, entry(1), transition=SUSPENDED, waits=[wait(run, "w", run)]) for run in runs)
    )
    assert written == BatchResult(refused={RunId(run): frozenset({"w"}) for run in runs[::2]})
    assert set(await storage.owned_runs(worker.id)) == set(runs[::2])
    assert len(await storage.read_inboxes(worker.id)) == 25
    assert [len(await storage.history(RunId(run))) for run in runs] == [1] * 50


# Events before the wait


async def test_an_event_that_came_before_the_wait_is_found(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1", "order"), incoming("e2", "order")], {})
    assert await worker.send(run_write("run-1", entry(1), transition=SUSPENDED, waits=[ORDER])) == BatchResult(
        refused={R1: frozenset({"w"})}
    )
    assert await registered(storage) == []
    assert await storage.owned_runs(worker.id) == {R1: 1}
    assert await storage.history(R1) == (entry(1),)
    (item,) = await storage.read_inboxes(worker.id)
    assert (item.inbox_no, item.kind, item.step, item.value) == (1, EntryKind.EVENT, "w", b"e1")
    assert item.event == await number(storage, "e1")


async def test_a_run_gets_each_event_once_and_in_order(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming(f"e{n}", "order") for n in range(3)], {})
    for n in range(3):
        await worker.send(run_write("run-1", transition=suspended(n), waits=[wait("run-1", f"w{n}", "order")]))
        assert await read_items(storage, worker) == [(n + 1, f"w{n}", f"e{n}".encode())]
    assert (
        await worker.send(run_write("run-1", transition=suspended(3), waits=[wait("run-1", "w3", "order")]))
        == BatchResult()
    )
    assert await registered(storage) == ["w3"]


async def test_only_events_above_the_cursor_are_found(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming(f"e{n}", "order") for n in range(3)], {})
    cursor = await number(storage, "e0")
    await worker.send(run_write("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order", cursor=cursor)]))
    assert await read_items(storage, worker) == [(1, "w", b"e1")]


async def test_a_cursor_may_lie_before_the_start_of_the_run(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("e1", "order")], {})
    await worker.write(new_run("run-1"))
    await worker.send(run_write("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order", cursor=0)]))
    assert await read_items(storage, worker) == [(1, "w", b"e1")]


async def test_events_from_before_the_start_are_not_found(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("e1", "order")], {})
    await worker.write(new_run("run-1"))
    assert await worker.send(run_write("run-1", transition=SUSPENDED, waits=[ORDER])) == BatchResult()
    assert await registered(storage) == ["w"]


async def test_an_event_for_this_run_is_found_and_one_for_another_is_not(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    await storage.accept([incoming("e1", "order", target="run-2"), incoming("e2", "order")], {})
    await worker.send(
        *(run_write(run, transition=SUSPENDED, waits=[wait(run, "w", "order")]) for run in ("run-1", "run-2"))
    )
    found = {item.run_id: item.value for item in await storage.read_inboxes(worker.id)}
    assert found == {R1: b"e2", R2: b"e1"}


async def test_several_waits_of_a_run_find_their_events_in_order_of_the_log(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1", "refund"), incoming("e2", "order")], {})
    waits = [wait("run-1", "a", "order"), wait("run-1", "b", "refund"), wait("run-1", "c", "return")]
    written = await worker.send(run_write("run-1", transition=SUSPENDED, waits=waits))
    assert written == BatchResult(refused={R1: frozenset({"a", "b"})})
    assert await read_items(storage, worker) == [(1, "b", b"e1"), (2, "a", b"e2")]
    assert await registered(storage) == ["c"]


async def test_of_two_waits_that_find_the_same_event_the_first_gets_it_and_the_other_asks_again(
    storage: Storage, worker: Worker
) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1", "order", "customer"), incoming("e2", "customer")], {})
    waits = [wait("run-1", "b", "customer"), wait("run-1", "a", "order")]
    assert await worker.send(run_write("run-1", transition=SUSPENDED, waits=waits)) == BatchResult(
        refused={R1: frozenset({"a", "b"})}
    )
    assert await read_items(storage, worker) == [(1, "a", b"e1")]
    assert await registered(storage) == []
    assert await worker.send(run_write("run-1", transition=suspended(1), waits=waits[:1])) == BatchResult(
        refused={R1: frozenset({"b"})}
    )
    assert await read_items(storage, worker) == [(2, "b", b"e2")]


# Unread inbox items


async def test_nothing_is_registered_while_there_is_unread_inbox(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"stop")
    waits = [ORDER, wait("run-1", "x", "refund")]
    written = await worker.send(run_write("run-1", entry(1), transition=SUSPENDED, waits=waits))
    assert written == BatchResult(refused={R1: frozenset({"w", "x"})})
    assert await registered(storage) == []
    assert await storage.owned_runs(worker.id) == {R1: 1}
    assert await storage.history(R1) == (entry(1),)
    assert await worker.send(run_write("run-1", entry(2, n=1), transition=suspended(1), waits=waits)) == BatchResult()
    assert await registered(storage) == ["w", "x"]


async def test_unread_inbox_keeps_what_was_read_as_read(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", step, "order") for step in ("a", "b")]))
    await storage.accept([incoming("e1", "order"), incoming("e2", "order")], {})
    written = await worker.send(
        run_write("run-1", entry(1, n=1), transition=suspended(1), waits=[wait("run-1", "c", "order")])
    )
    assert written == BatchResult(refused={R1: frozenset({"c"})})
    assert await read_items(storage, worker) == [(2, "b", b"e2")]


async def test_an_event_that_is_there_is_not_given_out_while_there_is_unread_inbox(
    storage: Storage, worker: Worker
) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1", "order")], {})
    await storage.cancel(R1, b"stop")
    await worker.send(run_write("run-1", transition=AckInbox(0), waits=[ORDER]))
    assert await read_items(storage, worker) == [(1, "", b"stop")]


async def test_a_release_without_waits_is_ready_at_once_if_there_is_inbox(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[ORDER]))
    await storage.accept([incoming("e1", "order")], {})
    assert await worker.send(run_write("run-1", transition=SUSPENDED)) == BatchResult(ready=frozenset({R1}))
    (run,) = (await worker.claim()).runs
    assert [item.value for item in run.inbox] == [b"e1"]


async def test_one_batch_may_hold_every_outcome(storage: Storage, worker: Worker) -> None:
    await worker.write(*(new_run(run) for run in ("found", "refused", "ready", "plain", "waiting", "ended")))
    await storage.accept([incoming("e1", "order")], {})
    for run in ("refused", "ready"):
        await storage.cancel(RunId(run), b"stop")
    written = await worker.send(
        run_write("found", transition=SUSPENDED, waits=[wait("found", "w", "order")]),
        run_write("refused", transition=SUSPENDED, waits=[wait("refused", "w", "order")]),
        run_write("ready", transition=SUSPENDED),
        run_write("plain", transition=SUSPENDED),
        run_write("waiting", transition=SUSPENDED, waits=[wait("waiting", "w", "other")]),
        run_write("ended", entry(1), transition=done()),
        new_run("new", transition=SUSPENDED, waits=[wait("new", "w", "order")]),
        new_run("born and ended", entry(1), transition=done()),
    )
    unmet = {RunId("found"): frozenset({"w"}), RunId("refused"): frozenset({"w"})}
    assert written == BatchResult(frozenset({RunId("ready")}), unmet)
    assert set(await storage.owned_runs(worker.id)) == {"found", "refused"}
    assert [len(await storage.waits(RunId(run))) for run in ("waiting", "new", "found")] == [1, 1, 0]


# Cancelled waits


async def test_a_dropped_wait_gets_nothing_any_more(storage: Storage, worker: Worker) -> None:
    waits = [wait("run-1", step, "order") for step in ("a", "b", "c")]
    await worker.send(new_run("run-1", waits=waits), new_run("run-2", waits=[wait("run-2", "a", "order")]))
    assert (
        await worker.send(run_write("run-1", transition=SUSPENDED, cancelled_waits=["a", "c", "never there"]))
        == BatchResult()
    )
    assert (await registered(storage), await registered(storage, "run-2")) == (["b"], ["a"])
    await storage.accept([incoming("e1", "order")], {})
    (run,) = (await worker.claim()).runs
    assert [item.step for item in run.inbox] == ["b"]


async def test_waits_are_dropped_though_there_is_unread_inbox(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[ORDER]))
    await storage.cancel(R1, b"stop")
    waits = [wait("run-1", "x", "order")]
    written = await worker.send(run_write("run-1", transition=SUSPENDED, waits=waits, cancelled_waits=["w"]))
    assert written == BatchResult(refused={R1: frozenset({"x"})})
    assert await registered(storage) == []


async def test_a_run_may_drop_one_wait_and_register_another(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[ORDER]))
    waits = [wait("run-1", "x", "order")]
    assert (
        await worker.send(run_write("run-1", transition=SUSPENDED, waits=waits, cancelled_waits=["w"])) == BatchResult()
    )
    assert await registered(storage) == ["x"]


async def test_an_ended_run_waits_for_nothing(storage: Storage, worker: Worker) -> None:
    waits = [wait("run-1", step, "order") for step in ("a", "b")]
    await worker.send(new_run("run-1", waits=waits), new_run("run-2", waits=[wait("run-2", "a", "order")]))
    await worker.send(run_write("run-1", transition=done()))
    assert (await registered(storage), await registered(storage, "run-2")) == ([], ["a"])
    await storage.accept([incoming("e1", "order")], {})
    assert [item.run_id for item in await storage.read_inboxes(worker.id)] == [R2]


async def test_waits_outlive_the_worker(storage: Storage, make_worker: MakeWorker) -> None:
    one, two = await make_worker("one"), await make_worker("two")
    await one.send(new_run("run-1", waits=[ORDER]))
    await storage.remove_worker(one.id)
    await storage.accept([incoming("e1", "order")], {})
    (run,) = (await two.claim()).runs
    assert [item.value for item in run.inbox] == [b"e1"]


# Released items


async def release_first_item(storage: Storage, worker: Worker) -> None:
    """An event arrived for step `w` after its wait was over; the run has read the item and releases it."""
    await worker.send(new_run("run-1", waits=[ORDER]))
    await storage.accept([incoming("e1", "order")], {})
    await worker.send(run_write("run-1", entry(1, n=1), transition=AckInbox(1), released_items=[1]))


async def test_an_event_given_back_is_found_by_the_next_wait(storage: Storage, worker: Worker) -> None:
    await release_first_item(storage, worker)
    await storage.accept([incoming("e2", "order")], {})
    written = await worker.send(run_write("run-1", transition=suspended(1), waits=[wait("run-1", "x", "order")]))
    assert written == BatchResult(refused={R1: frozenset({"x"})})
    assert await read_items(storage, worker) == [(2, "x", b"e1")]
    await worker.send(run_write("run-1", transition=suspended(2), waits=[wait("run-1", "y", "order")]))
    assert await read_items(storage, worker) == [(3, "y", b"e2")]


async def test_an_event_given_back_below_the_cursor_is_not_found(storage: Storage, worker: Worker) -> None:
    await release_first_item(storage, worker)
    cursor = await number(storage, "e1")
    waits = [wait("run-1", "x", "order", cursor=cursor)]
    assert await worker.send(run_write("run-1", transition=suspended(1), waits=waits)) == BatchResult()
    assert await registered(storage) == ["x"]


async def test_a_item_given_back_unread_has_no_event(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[ORDER]))
    await storage.accept([incoming("e1", "order")], {})
    await worker.send(run_write("run-1", transition=AckInbox(0), released_items=[1]))
    (item,) = await storage.read_inboxes(worker.id)
    assert (item.inbox_no, item.kind, item.event, item.value) == (1, EntryKind.LATE_EVENT, None, b"")


async def test_a_wait_that_finds_an_event_given_back_is_over_though_it_was_registered(
    storage: Storage, worker: Worker
) -> None:
    await worker.send(new_run("run-1", waits=[ORDER, wait("run-1", "x", "order")]))
    await storage.accept([incoming("e1", "order")], {})
    await worker.send(run_write("run-1", entry(1, n=1), transition=AckInbox(1), released_items=[1]))
    await worker.send(run_write("run-1", transition=suspended(1), waits=[wait("run-1", "x", "order")]))
    assert await read_items(storage, worker) == [(2, "x", b"e1")]
    assert await registered(storage) == []


async def test_an_event_given_back_by_one_run_is_not_given_twice_to_another(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-2", waits=[wait("run-2", "w", "order")]))
    await release_first_item(storage, worker)
    await worker.send(run_write("run-2", transition=AckInbox(1)))
    assert (
        await worker.send(run_write("run-2", transition=suspended(1), waits=[wait("run-2", "x", "order", cursor=0)]))
        == BatchResult()
    )
    assert await registered(storage, "run-2") == ["x"]


# Claimed waits


async def test_history_keeps_the_number_of_an_event(storage: Storage, worker: Worker) -> None:
    entries = entry(1, event=2**53 + 1), entry(2)
    await worker.write(new_run("run-1", *entries, transition=Suspend(0, 0, RunStatus.WAITING_FOR_EVENT)))
    assert await storage.history(R1) == entries
    assert [run.entries for run in (await worker.claim()).runs] == [entries]


async def test_a_run_without_waits_has_none(storage: Storage) -> None:
    await storage.start([start("run-1")])
    assert await storage.waits(R1) == ()
    assert await storage.waits(RunId("missing")) == ()


# At the same time


async def test_no_wake_up_is_lost_between_an_acceptor_and_a_registrar(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    crews = [await make_worker(f"worker-{n}") for n in range(4)]

    async def race(worker: Worker, crew: int) -> set[RunId]:
        """Returns the runs whose waits were refused because of inbox items."""
        told: set[RunId] = set()
        for turn in range(25):
            runs = [f"run-{crew}-{turn}-{n}" for n in range(3)]
            await worker.write(*(new_run(run) for run in runs))
            sleeping = [run_write(run, transition=SUSPENDED, waits=[wait(run, "w", run)]) for run in runs]
            posts = asyncio.gather(*(other.accept([incoming(run, run)], {}) for run in runs))
            written, _ = await asyncio.gather(worker.send(*sleeping), posts)
            assert written is not None
            told |= set(written.refused)
        return told

    told = set[RunId]().union(*await asyncio.gather(*(race(worker, n) for n, worker in enumerate(crews))))
    item = {item.run_id: item.value for worker in crews for item in await storage.read_inboxes(worker.id)}
    woken = {run.run_id: run.inbox[0].value for run in (await crews[0].claim(limit=1000)).runs}
    assert set(item) == told
    assert item | woken == {run: run.encode() for run in all_runs(4, 25, 3)}


def all_runs(crews: int, turns: int, runs: int) -> Sequence[RunId]:
    return [RunId(f"run-{c}-{t}-{n}") for c in range(crews) for t in range(turns) for n in range(runs)]


async def test_a_run_that_reads_one_event_after_the_other_misses_none_while_they_come(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    senders = [await make_storage(), await make_storage()]
    await worker.write(new_run("run-1"))
    total = 60

    async def send(sender: Storage, part: int) -> None:
        for n in range(part, total, 2):
            await sender.accept([incoming(f"e{n:02}", "order")], {})

    async def read() -> list[int]:
        read: list[int] = []
        while len(read) < total:
            step = wait("run-1", f"w{len(read)}", "order", cursor=read[-1] if read else None)
            await worker.send(run_write("run-1", transition=AckInbox(len(read)), waits=[step]))
            item: tuple[InboxItem, ...] = ()
            while not item:
                item = await storage.read_inboxes(worker.id)
            read += [item.event for item in item if item.event is not None]
        return read

    async with asyncio.timeout(60):
        seen, *_ = await asyncio.gather(read(), *(send(sender, part) for part, sender in enumerate(senders)))
    assert seen == [stored.seq for stored in await storage.events_of_type(TYPE, 0, 2**62, total)]
