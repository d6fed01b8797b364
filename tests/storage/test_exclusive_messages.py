"""Exclusive messages: a message goes to exactly one waiting run, or is stored until a wait takes it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

import pytest

from edda.core.model import AcceptResult, AckInbox, BatchResult, EntryKind, Fence, InboxItem, RunId, Suspend, Wait
from edda.core.states import RunStatus
from edda.errors import StorageRejectedError
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .conftest import MakeWorker
from .records import HOUR, SOURCE, SUSPENDED, TYPE, done, entry, incoming, new_run, run_write, wait
from .worker import Worker

R1, R2, R3 = RunId("run-1"), RunId("run-2"), RunId("run-3")


def job(run_id: str, step: str = "w", cursor: int | None = None) -> Wait:
    """A run waits for one of the jobs, which no other run receives then."""
    return wait(run_id, step, "jobs", cursor=cursor, exclusive=True)


def suspended(inbox_read: int) -> Suspend:
    return Suspend(inbox_read, None, RunStatus.WAITING_FOR_MESSAGE, TYPE)


async def publish(storage: Storage, *ids: str) -> AcceptResult | None:
    return await storage.accept([incoming(id, exclusive=["jobs"]) for id in ids], {})


async def registered(storage: Storage, *runs: str) -> dict[str, list[str]]:
    return {run: [each.step for each in await storage.waits(RunId(run))] for run in runs}


async def read_items(storage: Storage, worker: Worker) -> list[tuple[str, int, str, bytes]]:
    return [(x.run_id, x.inbox_no, x.step, x.value) for x in await storage.read_inboxes(worker.id)]


async def kept(storage: Storage, name: str = "drain") -> list[str]:
    """Take all that is left, with a new run."""
    drain = Worker(storage, f"worker that {name}s")
    await drain.register()
    await drain.write(new_run(name))
    taken: list[InboxItem] = []
    while True:
        await drain.send(run_write(name, transition=AckInbox(len(taken)), waits=[job(name, f"w{len(taken)}")]))
        item = await storage.read_inboxes(drain.id)
        if not item:
            await drain.write(run_write(name, transition=done()))
            return [item.value.decode() for item in taken]
        taken += item


# Taking stored messages


async def test_a_message_that_is_there_goes_to_the_first_who_asks(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    assert await publish(storage, "e1") == AcceptResult(frozenset({0}), woke=False)
    first = await worker.send(run_write("run-1", entry(1), transition=suspended(0), waits=[job("run-1")]))
    assert first == BatchResult(refused={R1: frozenset({"w"})})
    assert await worker.send(run_write("run-2", transition=suspended(0), waits=[job("run-2")])) == BatchResult()
    (item,) = await storage.read_inboxes(worker.id)
    assert (item.run_id, item.inbox_no, item.kind, item.step) == (R1, 1, EntryKind.MESSAGE, "w")
    stored = await storage.find_event(SOURCE, "e1")
    assert stored is not None
    assert (item.event, item.value) == (stored.seq, b"e1")
    assert await storage.owned_runs(worker.id) == {R1: 1}
    assert await registered(storage, "run-1", "run-2") == {"run-1": [], "run-2": ["w"]}


async def test_the_lowest_number_is_taken_first(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await publish(storage, "m", "z")
    await publish(storage, "a")
    for n, value in enumerate([b"m", b"z", b"a"]):
        await worker.send(run_write("run-1", transition=suspended(n), waits=[job("run-1", f"w{n}")]))
        assert await read_items(storage, worker) == [("run-1", n + 1, f"w{n}", value)]
    assert await worker.send(run_write("run-1", transition=suspended(3), waits=[job("run-1")])) == BatchResult()


async def test_neither_the_cursor_nor_the_start_of_the_run_matters(storage: Storage, worker: Worker) -> None:
    await publish(storage, "e1", "e2")
    last = await storage.last_event()
    await worker.write(new_run("run-1"))
    await worker.send(run_write("run-1", transition=AckInbox(0), waits=[job("run-1", cursor=last + 100)]))
    await worker.send(run_write("run-1", transition=AckInbox(1), waits=[job("run-1")]))
    assert await read_items(storage, worker) == [("run-1", 2, "w", b"e2")]


@pytest.mark.parametrize("transition", [None, AckInbox(0), SUSPENDED])
async def test_a_run_may_be_created_with_a_message_to_take(
    storage: Storage, worker: Worker, transition: AckInbox | Suspend | None
) -> None:
    await publish(storage, "e1")
    first = new_run("run-1", entry(1), transition=transition, waits=[job("run-1"), wait("run-1", "x", "order")])
    assert await worker.send(first) == BatchResult(refused={R1: frozenset({"w"})})
    assert await read_items(storage, worker) == [("run-1", 1, "w", b"e1")]
    assert await registered(storage, "run-1") == {"run-1": ["x"]}
    assert await storage.owned_runs(worker.id) == {R1: 1}
    assert await kept(storage) == []


async def test_two_who_ask_in_one_batch_take_different_messages(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(6)]
    await worker.write(*(new_run(run) for run in runs[:3]))
    await publish(storage, *(f"e{n}" for n in range(4)))
    written = await worker.send(
        *(run_write(run, transition=suspended(0), waits=[job(run)]) for run in runs[:3]),
        *(new_run(run, waits=[job(run)]) for run in runs[3:]),
    )
    assert written is not None
    found = {x.run_id: x.value for x in await storage.read_inboxes(worker.id)}
    assert sorted(found.values()) == [b"e0", b"e1", b"e2", b"e3"]
    assert written == BatchResult(refused={run: frozenset({"w"}) for run in found})
    left = sorted(set(runs) - set(found))
    assert await registered(storage, *left) == {run: ["w"] for run in left}


async def test_two_steps_of_a_run_take_different_messages(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await publish(storage, "e1", "e2")
    waits = [job("run-1", step) for step in ("c", "a", "b")]
    written = await worker.send(run_write("run-1", transition=suspended(0), waits=waits))
    item = await read_items(storage, worker)
    assert [(n, value) for _, n, _, value in item] == [(1, b"e1"), (2, b"e2")]
    served = {step for _, _, step, _ in item}
    assert len(served) == 2
    assert written == BatchResult(refused={R1: frozenset(served)})
    assert await registered(storage, "run-1") == {"run-1": sorted({"a", "b", "c"} - served)}


async def test_different_keys_are_independent(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("job", exclusive=["jobs"]), incoming("order", exclusive=["orders"])], {})
    waits = [
        job("run-1", "a"),
        wait("run-1", "b", "orders", exclusive=True),
        wait("run-1", "c", "others", exclusive=True),
    ]
    await worker.send(run_write("run-1", transition=suspended(0), waits=waits))
    assert await read_items(storage, worker) == [("run-1", 1, "a", b"job"), ("run-1", 2, "b", b"order")]
    assert await registered(storage, "run-1") == {"run-1": ["c"]}


async def test_many_runs_take_many_messages_in_one_batch(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n:02}" for n in range(50)]
    await worker.write(*(new_run(run) for run in runs))
    await publish(storage, *(f"e{n:02}" for n in range(30)))
    await storage.accept([incoming("order", "order")], {})
    await worker.send(
        *(run_write(run, entry(1), transition=suspended(0), waits=[job(run), wait(run, "x", "order")]) for run in runs)
    )
    item = await storage.read_inboxes(worker.id)
    taken = [x for x in item if x.kind is EntryKind.MESSAGE]
    assert sorted(x.value.decode() for x in taken) == [f"e{n:02}" for n in range(30)]
    assert len({x.run_id for x in taken}) == 30
    assert sorted(x.run_id for x in item if x.kind is EntryKind.EVENT) == runs
    assert await kept(storage) == []


# Taking nothing


async def test_no_message_is_taken_while_there_is_unread_inbox(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    await publish(storage, "e1")
    await storage.cancel(R1, b"stop")
    refused = await worker.send(run_write("run-1", transition=suspended(0), waits=[job("run-1")]))
    assert refused == BatchResult(refused={R1: frozenset({"w"})})
    assert await read_items(storage, worker) == [("run-1", 1, "", b"stop")]
    await worker.send(run_write("run-2", transition=suspended(0), waits=[job("run-2")]))
    assert ("run-2", 1, "w", b"e1") in await read_items(storage, worker)


async def test_in_one_batch_only_those_who_have_read_their_inbox_take_messages(
    storage: Storage, worker: Worker
) -> None:
    runs = [f"run-{n}" for n in range(6)]
    await worker.write(*(new_run(run) for run in runs))
    await publish(storage, "e0", "e1", "e2", "e3")
    for run in runs[::2]:
        await storage.cancel(RunId(run), b"stop")
    await worker.send(*(run_write(run, transition=suspended(0), waits=[job(run)]) for run in runs))
    taken = {x.run_id: x.value for x in await storage.read_inboxes(worker.id) if x.kind is EntryKind.MESSAGE}
    assert sorted(taken) == runs[1::2]
    assert sorted([*taken.values(), *(id.encode() for id in await kept(storage))]) == [b"e0", b"e1", b"e2", b"e3"]


async def test_a_batch_behind_its_fence_takes_no_message(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await publish(storage, "e1")
    behind = [run_write("run-1", transition=suspended(0), waits=[job("run-1")]), new_run("run-2", waits=[job("run-2")])]
    assert await storage.write(Fence(worker.id, 0, 0), behind) is None
    assert await storage.read_inboxes(worker.id) == ()
    assert await kept(storage) == ["e1"]


async def test_a_batch_that_is_refused_takes_no_message(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1)))
    await publish(storage, "e1")
    with pytest.raises(StorageRejectedError):
        await worker.send(run_write("run-1", entry(1), transition=suspended(0), waits=[job("run-1")]))
    assert await storage.read_inboxes(worker.id) == ()
    assert await kept(storage) == ["e1"]


async def test_registering_again_is_harmless(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[job("run-1")]))
    assert await worker.send(run_write("run-1", transition=AckInbox(0), waits=[job("run-1")])) == BatchResult()
    await publish(storage, "e1", "e2")
    assert await read_items(storage, worker) == [("run-1", 1, "w", b"e1")]
    assert await kept(storage) == ["e2"]


async def test_a_claim_brings_the_registered_steps(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", transition=Suspend(0, 0, RunStatus.WAITING_FOR_MESSAGE), waits=[job("run-1")]))
    assert [run.waits for run in (await worker.claim()).runs] == [(("w", job("run-1").key),)]


async def test_a_taken_message_is_found_by_no_wait_even_when_it_is_released(storage: Storage, worker: Worker) -> None:
    """A released message is published again, with a new number."""
    await worker.send(new_run("run-1", waits=[job("run-1", "a"), job("run-1", "b")]))
    await publish(storage, "e1")
    await worker.send(run_write("run-1", entry(1, n=1), transition=AckInbox(1), released_items=[1]))
    assert (
        await worker.send(run_write("run-1", transition=AckInbox(1), waits=[job("run-1", "c", cursor=0)]))
        == BatchResult()
    )
    assert await kept(storage) == []


async def test_a_message_given_back_unread_is_a_stray_item(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[job("run-1")]))
    await publish(storage, "e1")
    await worker.send(run_write("run-1", transition=AckInbox(0), released_items=[1]))
    (item,) = await storage.read_inboxes(worker.id)
    assert (item.inbox_no, item.kind, item.event, item.value) == (1, EntryKind.LATE_EVENT, None, b"")


# Accepting


async def test_a_message_goes_to_one_of_those_who_wait(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(5)]
    await worker.send(*(new_run(run, transition=SUSPENDED, waits=[job(run)]) for run in runs))
    assert await publish(storage, "e1") == AcceptResult(frozenset({0}), woke=True)
    (run,) = (await worker.claim()).runs
    (item,) = run.inbox
    assert (item.inbox_no, item.kind, item.step, item.value) == (1, EntryKind.MESSAGE, "w", b"e1")
    assert run.waits == ()
    left = {other: ["w"] for other in runs if other != run.run_id}
    assert await registered(storage, *runs) == {run.run_id: [], **left}
    assert await kept(storage) == []


async def test_each_message_goes_to_another_wait_in_order_and_the_rest_is_kept(
    storage: Storage, worker: Worker
) -> None:
    runs = [f"run-{n}" for n in range(3)]
    await worker.send(*(new_run(run, transition=SUSPENDED, waits=[job(run)]) for run in runs))
    ids = ["m", "z", "a", "k", "b"]
    assert await publish(storage, *ids) == AcceptResult(frozenset(range(5)), woke=True)
    claimed = (await worker.claim()).runs
    assert sorted(run.run_id for run in claimed) == runs
    assert [len(run.inbox) for run in claimed] == [1, 1, 1]
    assert {run.inbox[0].value for run in claimed} == {b"m", b"z", b"a"}
    assert await kept(storage) == ["k", "b"]


async def test_messages_one_after_the_other_go_to_different_runs(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(3)]
    await worker.send(*(new_run(run, waits=[job(run)]) for run in runs))
    for id in ("e1", "e2", "e3", "e4"):
        await publish(storage, id)
    item = await storage.read_inboxes(worker.id)
    assert sorted(x.run_id for x in item) == runs
    assert sorted(x.value for x in item) == [b"e1", b"e2", b"e3"]
    assert await kept(storage) == ["e4"]


async def test_a_run_that_waits_at_several_steps_gets_several_messages_in_order(
    storage: Storage, worker: Worker
) -> None:
    await worker.send(new_run("run-1", waits=[job("run-1", step) for step in ("c", "a", "b")]))
    await publish(storage, "e1", "e2", "e3", "e4")
    item = await read_items(storage, worker)
    assert [(n, value) for _, n, _, value in item] == [(1, b"e1"), (2, b"e2"), (3, b"e3")]
    assert sorted(step for _, _, step, _ in item) == ["a", "b", "c"]
    assert await kept(storage) == ["e4"]


async def test_messages_of_several_keys_in_one_post_find_their_waits(storage: Storage, worker: Worker) -> None:
    await worker.send(
        new_run("run-1", waits=[job("run-1", "a"), wait("run-1", "b", "orders", exclusive=True)]),
        new_run("run-2", waits=[wait("run-2", "a", "orders", exclusive=True)]),
    )
    post = [incoming(f"{name}-{n}", exclusive=[name]) for n in range(2) for name in ("orders", "jobs")]
    await storage.accept(post, {})
    item = await storage.read_inboxes(worker.id)
    assert sorted(x.value for x in item) == [b"jobs-0", b"orders-0", b"orders-1"]
    assert {x.run_id: x.step for x in item if x.value == b"jobs-0"} == {R1: "a"}
    assert len({x.run_id for x in item if x.value.startswith(b"orders")}) == 2
    assert await kept(storage) == ["jobs-1"]


async def test_a_dropped_wait_and_an_ended_run_get_no_message(storage: Storage, worker: Worker) -> None:
    await worker.send(*(new_run(run, waits=[job(run)]) for run in (R1, R2)))
    await worker.send(
        run_write("run-1", transition=AckInbox(0), cancelled_waits=["w"]), run_write("run-2", transition=done())
    )
    assert await publish(storage, "e1") == AcceptResult(frozenset({0}), woke=False)
    assert await storage.read_inboxes(worker.id) == ()
    assert await kept(storage) == ["e1"]


async def test_a_message_that_is_known_already_goes_to_no_run(storage: Storage, worker: Worker) -> None:
    await publish(storage, "e1")
    assert await kept(storage) == ["e1"]
    await worker.send(new_run("run-1", waits=[job("run-1")]))
    assert await publish(storage, "e1") == AcceptResult(frozenset(), woke=False)
    assert await storage.read_inboxes(worker.id) == ()
    assert await publish(storage, "e2", "e2") == AcceptResult(frozenset({0}), woke=True)
    assert await read_items(storage, worker) == [("run-1", 1, "w", b"e2")]
    assert await kept(storage, "drain again") == []


async def test_a_message_for_one_run_goes_to_no_other(storage: Storage, worker: Worker) -> None:
    await worker.send(*(new_run(run, waits=[job(run)]) for run in (R1, R2)))
    await storage.accept([incoming(f"e{n}", exclusive=["jobs"], target="run-2") for n in range(3)], {})
    assert await read_items(storage, worker) == [("run-2", 1, "w", b"e0")]
    assert await kept(storage) == []
    await worker.send(run_write("run-2", transition=AckInbox(1), waits=[job("run-2")]))
    await publish(storage, "for all")
    assert await read_items(storage, worker) == [("run-1", 1, "w", b"for all"), ("run-2", 2, "w", b"e1")]
    await worker.send(run_write("run-2", transition=AckInbox(2), waits=[job("run-2")]))
    assert ("run-2", 3, "w", b"e2") in await read_items(storage, worker)


# Shared and exclusive keys


async def test_a_message_may_go_to_all_under_one_key_and_to_one_under_another(storage: Storage, worker: Worker) -> None:
    await worker.send(
        *(new_run(f"all-{n}", waits=[wait(f"all-{n}", "w", "news")]) for n in range(3)),
        *(new_run(f"one-{n}", waits=[job(f"one-{n}")]) for n in range(3)),
    )
    await storage.accept([incoming("e1", "news", exclusive=["jobs"])], {})
    item = await storage.read_inboxes(worker.id)
    assert sorted(x.run_id for x in item if x.kind is EntryKind.EVENT) == ["all-0", "all-1", "all-2"]
    (one,) = [x for x in item if x.kind is EntryKind.MESSAGE]
    assert one.run_id.startswith("one-")
    assert await kept(storage) == []


async def test_a_message_that_went_to_all_is_still_kept_for_one(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w", "news")]))
    await storage.accept([incoming("e1", "news", exclusive=["jobs"])], {})
    await worker.write(new_run("run-2"))
    await worker.send(run_write("run-2", transition=AckInbox(0), waits=[job("run-2")]))
    assert await read_items(storage, worker) == [("run-1", 1, "w", b"e1"), ("run-2", 1, "w", b"e1")]
    assert await kept(storage) == []


async def test_a_message_that_one_took_is_still_there_for_all(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await worker.send(new_run("run-2", waits=[job("run-2")]))
    await storage.accept([incoming("e1", "news", exclusive=["jobs"])], {})
    await worker.send(run_write("run-1", transition=AckInbox(0), waits=[wait("run-1", "w", "news")]))
    assert await read_items(storage, worker) == [("run-1", 1, "w", b"e1"), ("run-2", 1, "w", b"e1")]


async def test_a_run_that_waits_both_ways_gets_a_message_once(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "a", "news"), job("run-1", "b")]))
    await storage.accept([incoming("e1", "news", exclusive=["jobs"]), incoming("e2")], {})
    assert [x.value for x in await storage.read_inboxes(worker.id)] == [b"e1"]


async def test_a_run_that_had_a_message_with_all_others_does_not_take_it_as_its_own(
    storage: Storage, worker: Worker
) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "a", "news")]))
    await storage.accept([incoming("e1", "news", exclusive=["jobs"])], {})
    assert (
        await worker.send(run_write("run-1", entry(1, n=1), transition=AckInbox(1), waits=[job("run-1", "b")]))
        == BatchResult()
    )
    assert await registered(storage, "run-1") == {"run-1": ["b"]}
    assert await kept(storage) == ["e1"]


async def test_a_run_that_had_a_message_with_all_others_takes_the_next(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "a", "news")]))
    await storage.accept([incoming("e1", "news", exclusive=["jobs"]), incoming("e2", exclusive=["jobs"])], {})
    await worker.send(run_write("run-1", entry(1, n=1), transition=AckInbox(1), waits=[job("run-1", "b")]))
    assert await read_items(storage, worker) == [("run-1", 2, "b", b"e2")]
    assert await kept(storage) == ["e1"]


async def test_a_run_that_asks_both_ways_gets_a_message_that_is_there_once(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1", "news", exclusive=["jobs"])], {})
    await worker.send(run_write("run-1", transition=AckInbox(0), waits=[wait("run-1", "a", "news"), job("run-1", "b")]))
    assert [x.value for x in await storage.read_inboxes(worker.id)] == [b"e1"]


# Pruning


async def test_an_old_message_is_no_longer_taken(storage: Storage, worker: Worker) -> None:
    await publish(storage, "old")
    assert await storage.prune_events(await storage.now() + HOUR // 2, 100) == 1
    await publish(storage, "new")
    assert await kept(storage) == ["new"]


async def test_a_message_in_an_unread_item_stays(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[job("run-1")]))
    await publish(storage, "e1", "newest")
    assert await kept(storage) == ["newest"]
    tomorrow = await storage.now() + 24 * HOUR
    await storage.prune_events(tomorrow, 100)
    assert await read_items(storage, worker) == [("run-1", 1, "w", b"e1")]
    await worker.write(run_write("run-1", entry(1, n=1), transition=AckInbox(1)))
    assert await storage.prune_events(tomorrow, 100) == 1
    assert await storage.find_event(SOURCE, "e1") is None


# At the same time


def counted(item: Iterable[InboxItem]) -> Counter[str]:
    return Counter(item.value.decode() for item in item)


async def test_each_message_goes_to_one_run_while_others_ask_for_them(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    crews = [await make_worker(f"worker-{n}", on=(storage, other)[n % 2]) for n in range(4)]

    async def ask(worker: Worker) -> None:
        for turn in range(15):
            runs = [f"{worker.id}-{turn}-{n}" for n in range(3)]
            await worker.write(*(new_run(run) for run in runs))
            await worker.send(*(run_write(run, transition=suspended(0), waits=[job(run)]) for run in runs))

    async def bring(storage: Storage, part: int) -> None:
        for turn in range(30):
            await publish(storage, *(f"e-{part}-{turn}-{n}" for n in range(2)))

    async with asyncio.timeout(100):
        await asyncio.gather(*(ask(worker) for worker in crews), bring(storage, 0), bring(other, 1), bring(other, 2))
    told = [item for worker in crews for item in await storage.read_inboxes(worker.id)]
    woken = [item for run in (await crews[0].claim(limit=1_000)).runs for item in run.inbox]
    assert max(Counter(item.run_id for item in (*told, *woken)).values()) == 1
    everything = Counter(f"e-{part}-{turn}-{n}" for part in range(3) for turn in range(30) for n in range(2))
    assert counted(told) + counted(woken) + Counter(await kept(storage)) == everything
    assert len(told) + len(woken) == 180, "with 180 messages and 180 runs nobody is left"


async def test_of_many_who_ask_at_the_same_time_each_takes_another_message(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    crews = [await make_worker(f"worker-{n}", on=(storage, other)[n % 2]) for n in range(6)]
    await publish(storage, *(f"e{n:03}" for n in range(100)))
    for worker in crews:
        await worker.write(*(new_run(f"{worker.id}-{n}") for n in range(20)))

    async def take(worker: Worker) -> None:
        for n in range(20):
            run = f"{worker.id}-{n}"
            await worker.send(run_write(run, transition=suspended(0), waits=[job(run)]))

    async with asyncio.timeout(100):
        await asyncio.gather(*(take(worker) for worker in crews))
    taken = counted([item for worker in crews for item in await storage.read_inboxes(worker.id)])
    assert taken == Counter(f"e{n:03}" for n in range(100))
    waiting = [run for worker in crews for n in range(20) if await storage.waits(run := RunId(f"{worker.id}-{n}"))]
    assert len(waiting) == 20


async def test_a_run_that_takes_one_message_after_the_other_gets_them_in_order_while_they_come(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    senders = [await make_storage(), await make_storage()]
    await worker.write(new_run("run-1"))
    total = 60

    async def send(sender: Storage, part: int) -> None:
        for n in range(part, total, 2):
            await publish(sender, f"e{n:02}")

    async def read() -> list[int]:
        read: list[int] = []
        while len(read) < total:
            await worker.send(run_write("run-1", transition=AckInbox(len(read)), waits=[job("run-1", f"w{len(read)}")]))
            item: tuple[InboxItem, ...] = ()
            while not item:
                item = await storage.read_inboxes(worker.id)
            read += [item.event for item in item if item.event is not None]
        return read

    async with asyncio.timeout(60):
        seen, *_ = await asyncio.gather(read(), *(send(sender, part) for part, sender in enumerate(senders)))
    assert seen == [stored.seq for stored in await storage.events_of_type(TYPE, 0, 2**62, total)]
