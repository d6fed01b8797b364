"""Competing consumers: a message goes to exactly one of those who wait, or is kept until somebody takes it away."""

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
from .records import ASLEEP, HOUR, SOURCE, TYPE, born, bundle, done, entry, incoming, wait
from .worker import Worker

R1, R2, R3 = RunId("run-1"), RunId("run-2"), RunId("run-3")


def job(run_id: str, step: str = "w", floor: int | None = None) -> Wait:
    """A run asks for one of the jobs, which nobody else then gets."""
    return wait(run_id, step, "jobs", floor=floor, once=True)


def asleep(absorbed: int) -> Suspend:
    return Suspend(absorbed, None, RunStatus.WAITING_FOR_MESSAGE, TYPE)


async def offer(storage: Storage, *ids: str) -> AcceptResult | None:
    return await storage.accept([incoming(id, once=["jobs"]) for id in ids], {})


async def registered(storage: Storage, *runs: str) -> dict[str, list[str]]:
    return {run: [each.step for each in await storage.waits(RunId(run))] for run in runs}


async def letters(storage: Storage, worker: Worker) -> list[tuple[str, int, str, bytes]]:
    return [(x.run_id, x.n, x.step, x.value) for x in await storage.read_inboxes(worker.id)]


async def kept(storage: Storage, name: str = "drain") -> list[str]:
    """Take away all that is left, by a run of its own."""
    drain = Worker(storage, f"worker that {name}s")
    await drain.register()
    await drain.write(born(name))
    taken: list[InboxItem] = []
    while True:
        await drain.send(bundle(name, move=AckInbox(len(taken)), waits=[job(name, f"w{len(taken)}")]))
        mail = await storage.read_inboxes(drain.id)
        if not mail:
            await drain.write(bundle(name, move=done()))
            return [letter.value.decode() for letter in taken]
        taken += mail


# Taking what is there


async def test_a_message_that_is_there_goes_to_the_first_who_asks(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2"))
    assert await offer(storage, "e1") == AcceptResult(frozenset({0}), woke=False)
    first = await worker.send(bundle("run-1", entry(1), move=asleep(0), waits=[job("run-1")]))
    assert first == BatchResult(unmet={R1: frozenset({"w"})})
    assert await worker.send(bundle("run-2", move=asleep(0), waits=[job("run-2")])) == BatchResult()
    (letter,) = await storage.read_inboxes(worker.id)
    assert (letter.run_id, letter.n, letter.kind, letter.step) == (R1, 1, EntryKind.MESSAGE, "w")
    stored = await storage.find_event(SOURCE, "e1")
    assert stored is not None
    assert (letter.event, letter.value) == (stored.seq, b"e1")
    assert await storage.owned_runs(worker.id) == {R1: 1}
    assert await registered(storage, "run-1", "run-2") == {"run-1": [], "run-2": ["w"]}


async def test_the_lowest_number_is_taken_first(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await offer(storage, "m", "z")
    await offer(storage, "a")
    for n, value in enumerate([b"m", b"z", b"a"]):
        await worker.send(bundle("run-1", move=asleep(n), waits=[job("run-1", f"w{n}")]))
        assert await letters(storage, worker) == [("run-1", n + 1, f"w{n}", value)]
    assert await worker.send(bundle("run-1", move=asleep(3), waits=[job("run-1")])) == BatchResult()


async def test_neither_the_floor_nor_the_start_of_the_run_matters(storage: Storage, worker: Worker) -> None:
    await offer(storage, "e1", "e2")
    last = await storage.last_event()
    await worker.write(born("run-1"))
    await worker.send(bundle("run-1", move=AckInbox(0), waits=[job("run-1", floor=last + 100)]))
    await worker.send(bundle("run-1", move=AckInbox(1), waits=[job("run-1")]))
    assert await letters(storage, worker) == [("run-1", 2, "w", b"e2")]


@pytest.mark.parametrize("move", [None, AckInbox(0), ASLEEP])
async def test_a_run_may_be_born_with_a_message_to_take(
    storage: Storage, worker: Worker, move: AckInbox | Suspend | None
) -> None:
    await offer(storage, "e1")
    first = born("run-1", entry(1), move=move, waits=[job("run-1"), wait("run-1", "x", "order")])
    assert await worker.send(first) == BatchResult(unmet={R1: frozenset({"w"})})
    assert await letters(storage, worker) == [("run-1", 1, "w", b"e1")]
    assert await registered(storage, "run-1") == {"run-1": ["x"]}
    assert await storage.owned_runs(worker.id) == {R1: 1}
    assert await kept(storage) == []


async def test_two_who_ask_in_one_batch_take_different_messages(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(6)]
    await worker.write(*(born(run) for run in runs[:3]))
    await offer(storage, *(f"e{n}" for n in range(4)))
    written = await worker.send(
        *(bundle(run, move=asleep(0), waits=[job(run)]) for run in runs[:3]),
        *(born(run, waits=[job(run)]) for run in runs[3:]),
    )
    assert written is not None
    found = {x.run_id: x.value for x in await storage.read_inboxes(worker.id)}
    assert sorted(found.values()) == [b"e0", b"e1", b"e2", b"e3"]
    assert written == BatchResult(unmet={run: frozenset({"w"}) for run in found})
    left = sorted(set(runs) - set(found))
    assert await registered(storage, *left) == {run: ["w"] for run in left}


async def test_two_steps_of_a_run_take_different_messages(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await offer(storage, "e1", "e2")
    waits = [job("run-1", step) for step in ("c", "a", "b")]
    written = await worker.send(bundle("run-1", move=asleep(0), waits=waits))
    mail = await letters(storage, worker)
    assert [(n, value) for _, n, _, value in mail] == [(1, b"e1"), (2, b"e2")]
    served = {step for _, _, step, _ in mail}
    assert len(served) == 2
    assert written == BatchResult(unmet={R1: frozenset(served)})
    assert await registered(storage, "run-1") == {"run-1": sorted({"a", "b", "c"} - served)}


async def test_keys_are_told_apart(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.accept([incoming("job", once=["jobs"]), incoming("order", once=["orders"])], {})
    waits = [job("run-1", "a"), wait("run-1", "b", "orders", once=True), wait("run-1", "c", "others", once=True)]
    await worker.send(bundle("run-1", move=asleep(0), waits=waits))
    assert await letters(storage, worker) == [("run-1", 1, "a", b"job"), ("run-1", 2, "b", b"order")]
    assert await registered(storage, "run-1") == {"run-1": ["c"]}


async def test_many_runs_take_many_messages_in_one_batch(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n:02}" for n in range(50)]
    await worker.write(*(born(run) for run in runs))
    await offer(storage, *(f"e{n:02}" for n in range(30)))
    await storage.accept([incoming("order", "order")], {})
    await worker.send(
        *(bundle(run, entry(1), move=asleep(0), waits=[job(run), wait(run, "x", "order")]) for run in runs)
    )
    mail = await storage.read_inboxes(worker.id)
    taken = [x for x in mail if x.kind is EntryKind.MESSAGE]
    assert sorted(x.value.decode() for x in taken) == [f"e{n:02}" for n in range(30)]
    assert len({x.run_id for x in taken}) == 30
    assert sorted(x.run_id for x in mail if x.kind is EntryKind.EVENT) == runs
    assert await kept(storage) == []


# Taking nothing


async def test_no_message_is_taken_while_there_is_unread_mail(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"), born("run-2"))
    await offer(storage, "e1")
    await storage.cancel(R1, b"stop")
    refused = await worker.send(bundle("run-1", move=asleep(0), waits=[job("run-1")]))
    assert refused == BatchResult(unmet={R1: frozenset({"w"})})
    assert await letters(storage, worker) == [("run-1", 1, "", b"stop")]
    await worker.send(bundle("run-2", move=asleep(0), waits=[job("run-2")]))
    assert ("run-2", 1, "w", b"e1") in await letters(storage, worker)


async def test_in_one_batch_only_those_who_have_read_their_mail_take_messages(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(6)]
    await worker.write(*(born(run) for run in runs))
    await offer(storage, "e0", "e1", "e2", "e3")
    for run in runs[::2]:
        await storage.cancel(RunId(run), b"stop")
    await worker.send(*(bundle(run, move=asleep(0), waits=[job(run)]) for run in runs))
    taken = {x.run_id: x.value for x in await storage.read_inboxes(worker.id) if x.kind is EntryKind.MESSAGE}
    assert sorted(taken) == runs[1::2]
    assert sorted([*taken.values(), *(id.encode() for id in await kept(storage))]) == [b"e0", b"e1", b"e2", b"e3"]


async def test_a_batch_behind_its_fence_takes_no_message(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await offer(storage, "e1")
    behind = [bundle("run-1", move=asleep(0), waits=[job("run-1")]), born("run-2", waits=[job("run-2")])]
    assert await storage.write(Fence(worker.id, 0, 0), behind) is None
    assert await storage.read_inboxes(worker.id) == ()
    assert await kept(storage) == ["e1"]


async def test_a_batch_that_is_refused_takes_no_message(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1", entry(1)))
    await offer(storage, "e1")
    with pytest.raises(StorageRejectedError):
        await worker.send(bundle("run-1", entry(1), move=asleep(0), waits=[job("run-1")]))
    assert await storage.read_inboxes(worker.id) == ()
    assert await kept(storage) == ["e1"]


async def test_registering_again_is_harmless(storage: Storage, worker: Worker) -> None:
    await worker.send(born("run-1", waits=[job("run-1")]))
    assert await worker.send(bundle("run-1", move=AckInbox(0), waits=[job("run-1")])) == BatchResult()
    await offer(storage, "e1", "e2")
    assert await letters(storage, worker) == [("run-1", 1, "w", b"e1")]
    assert await kept(storage) == ["e2"]


async def test_a_claim_tells_which_steps_are_registered(storage: Storage, worker: Worker) -> None:
    await worker.send(born("run-1", move=Suspend(0, 0, RunStatus.WAITING_FOR_MESSAGE), waits=[job("run-1")]))
    assert [run.waits for run in (await worker.claim()).runs] == [(("w", job("run-1").key),)]


async def test_a_message_that_was_taken_is_found_by_nobody_even_when_it_is_given_back(
    storage: Storage, worker: Worker
) -> None:
    """Who gives it back offers it anew, under a number of its own."""
    await worker.send(born("run-1", waits=[job("run-1", "a"), job("run-1", "b")]))
    await offer(storage, "e1")
    await worker.send(bundle("run-1", entry(1, n=1), move=AckInbox(1), frees=[1]))
    assert await worker.send(bundle("run-1", move=AckInbox(1), waits=[job("run-1", "c", floor=0)])) == BatchResult()
    assert await kept(storage) == []


async def test_a_message_given_back_unread_is_a_stray_letter(storage: Storage, worker: Worker) -> None:
    await worker.send(born("run-1", waits=[job("run-1")]))
    await offer(storage, "e1")
    await worker.send(bundle("run-1", move=AckInbox(0), frees=[1]))
    (letter,) = await storage.read_inboxes(worker.id)
    assert (letter.n, letter.kind, letter.event, letter.value) == (1, EntryKind.STRAY, None, b"")


# Accepting


async def test_a_message_goes_to_one_of_those_who_wait(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(5)]
    await worker.send(*(born(run, move=ASLEEP, waits=[job(run)]) for run in runs))
    assert await offer(storage, "e1") == AcceptResult(frozenset({0}), woke=True)
    (run,) = (await worker.claim()).runs
    (letter,) = run.mail
    assert (letter.n, letter.kind, letter.step, letter.value) == (1, EntryKind.MESSAGE, "w", b"e1")
    assert run.waits == ()
    left = {other: ["w"] for other in runs if other != run.run_id}
    assert await registered(storage, *runs) == {run.run_id: [], **left}
    assert await kept(storage) == []


async def test_each_message_goes_to_another_wait_in_order_and_the_rest_is_kept(
    storage: Storage, worker: Worker
) -> None:
    runs = [f"run-{n}" for n in range(3)]
    await worker.send(*(born(run, move=ASLEEP, waits=[job(run)]) for run in runs))
    ids = ["m", "z", "a", "k", "b"]
    assert await offer(storage, *ids) == AcceptResult(frozenset(range(5)), woke=True)
    claimed = (await worker.claim()).runs
    assert sorted(run.run_id for run in claimed) == runs
    assert [len(run.mail) for run in claimed] == [1, 1, 1]
    assert {run.mail[0].value for run in claimed} == {b"m", b"z", b"a"}
    assert await kept(storage) == ["k", "b"]


async def test_messages_one_after_the_other_go_to_different_runs(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(3)]
    await worker.send(*(born(run, waits=[job(run)]) for run in runs))
    for id in ("e1", "e2", "e3", "e4"):
        await offer(storage, id)
    mail = await storage.read_inboxes(worker.id)
    assert sorted(x.run_id for x in mail) == runs
    assert sorted(x.value for x in mail) == [b"e1", b"e2", b"e3"]
    assert await kept(storage) == ["e4"]


async def test_a_run_that_waits_at_several_steps_gets_several_messages_in_order(
    storage: Storage, worker: Worker
) -> None:
    await worker.send(born("run-1", waits=[job("run-1", step) for step in ("c", "a", "b")]))
    await offer(storage, "e1", "e2", "e3", "e4")
    mail = await letters(storage, worker)
    assert [(n, value) for _, n, _, value in mail] == [(1, b"e1"), (2, b"e2"), (3, b"e3")]
    assert sorted(step for _, _, step, _ in mail) == ["a", "b", "c"]
    assert await kept(storage) == ["e4"]


async def test_messages_of_several_keys_in_one_post_find_their_waits(storage: Storage, worker: Worker) -> None:
    await worker.send(
        born("run-1", waits=[job("run-1", "a"), wait("run-1", "b", "orders", once=True)]),
        born("run-2", waits=[wait("run-2", "a", "orders", once=True)]),
    )
    post = [incoming(f"{name}-{n}", once=[name]) for n in range(2) for name in ("orders", "jobs")]
    await storage.accept(post, {})
    mail = await storage.read_inboxes(worker.id)
    assert sorted(x.value for x in mail) == [b"jobs-0", b"orders-0", b"orders-1"]
    assert {x.run_id: x.step for x in mail if x.value == b"jobs-0"} == {R1: "a"}
    assert len({x.run_id for x in mail if x.value.startswith(b"orders")}) == 2
    assert await kept(storage) == ["jobs-1"]


async def test_a_dropped_wait_and_an_ended_run_get_no_message(storage: Storage, worker: Worker) -> None:
    await worker.send(*(born(run, waits=[job(run)]) for run in (R1, R2)))
    await worker.send(bundle("run-1", move=AckInbox(0), drops=["w"]), bundle("run-2", move=done()))
    assert await offer(storage, "e1") == AcceptResult(frozenset({0}), woke=False)
    assert await storage.read_inboxes(worker.id) == ()
    assert await kept(storage) == ["e1"]


async def test_a_message_that_is_known_already_goes_to_nobody(storage: Storage, worker: Worker) -> None:
    await offer(storage, "e1")
    assert await kept(storage) == ["e1"]
    await worker.send(born("run-1", waits=[job("run-1")]))
    assert await offer(storage, "e1") == AcceptResult(frozenset(), woke=False)
    assert await storage.read_inboxes(worker.id) == ()
    assert await offer(storage, "e2", "e2") == AcceptResult(frozenset({0}), woke=True)
    assert await letters(storage, worker) == [("run-1", 1, "w", b"e2")]
    assert await kept(storage, "drain again") == []


async def test_a_message_for_one_run_goes_to_no_other(storage: Storage, worker: Worker) -> None:
    await worker.send(*(born(run, waits=[job(run)]) for run in (R1, R2)))
    await storage.accept([incoming(f"e{n}", once=["jobs"], target="run-2") for n in range(3)], {})
    assert await letters(storage, worker) == [("run-2", 1, "w", b"e0")]
    assert await kept(storage) == []
    await worker.send(bundle("run-2", move=AckInbox(1), waits=[job("run-2")]))
    await offer(storage, "for all")
    assert await letters(storage, worker) == [("run-1", 1, "w", b"for all"), ("run-2", 2, "w", b"e1")]
    await worker.send(bundle("run-2", move=AckInbox(2), waits=[job("run-2")]))
    assert ("run-2", 3, "w", b"e2") in await letters(storage, worker)


# Messages for all and for one


async def test_a_message_may_go_to_all_under_one_key_and_to_one_under_another(storage: Storage, worker: Worker) -> None:
    await worker.send(
        *(born(f"all-{n}", waits=[wait(f"all-{n}", "w", "news")]) for n in range(3)),
        *(born(f"one-{n}", waits=[job(f"one-{n}")]) for n in range(3)),
    )
    await storage.accept([incoming("e1", "news", once=["jobs"])], {})
    mail = await storage.read_inboxes(worker.id)
    assert sorted(x.run_id for x in mail if x.kind is EntryKind.EVENT) == ["all-0", "all-1", "all-2"]
    (one,) = [x for x in mail if x.kind is EntryKind.MESSAGE]
    assert one.run_id.startswith("one-")
    assert await kept(storage) == []


async def test_a_message_that_went_to_all_is_still_kept_for_one(storage: Storage, worker: Worker) -> None:
    await worker.send(born("run-1", waits=[wait("run-1", "w", "news")]))
    await storage.accept([incoming("e1", "news", once=["jobs"])], {})
    await worker.write(born("run-2"))
    await worker.send(bundle("run-2", move=AckInbox(0), waits=[job("run-2")]))
    assert await letters(storage, worker) == [("run-1", 1, "w", b"e1"), ("run-2", 1, "w", b"e1")]
    assert await kept(storage) == []


async def test_a_message_that_one_took_is_still_there_for_all(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await worker.send(born("run-2", waits=[job("run-2")]))
    await storage.accept([incoming("e1", "news", once=["jobs"])], {})
    await worker.send(bundle("run-1", move=AckInbox(0), waits=[wait("run-1", "w", "news")]))
    assert await letters(storage, worker) == [("run-1", 1, "w", b"e1"), ("run-2", 1, "w", b"e1")]


async def test_a_run_that_waits_both_ways_gets_a_message_once(storage: Storage, worker: Worker) -> None:
    await worker.send(born("run-1", waits=[wait("run-1", "a", "news"), job("run-1", "b")]))
    await storage.accept([incoming("e1", "news", once=["jobs"]), incoming("e2")], {})
    assert [x.value for x in await storage.read_inboxes(worker.id)] == [b"e1"]


async def test_a_run_that_had_a_message_with_all_others_does_not_take_it_as_its_own(
    storage: Storage, worker: Worker
) -> None:
    await worker.send(born("run-1", waits=[wait("run-1", "a", "news")]))
    await storage.accept([incoming("e1", "news", once=["jobs"])], {})
    assert (
        await worker.send(bundle("run-1", entry(1, n=1), move=AckInbox(1), waits=[job("run-1", "b")])) == BatchResult()
    )
    assert await registered(storage, "run-1") == {"run-1": ["b"]}
    assert await kept(storage) == ["e1"]


async def test_a_run_that_had_a_message_with_all_others_takes_the_next(storage: Storage, worker: Worker) -> None:
    await worker.send(born("run-1", waits=[wait("run-1", "a", "news")]))
    await storage.accept([incoming("e1", "news", once=["jobs"]), incoming("e2", once=["jobs"])], {})
    await worker.send(bundle("run-1", entry(1, n=1), move=AckInbox(1), waits=[job("run-1", "b")]))
    assert await letters(storage, worker) == [("run-1", 2, "b", b"e2")]
    assert await kept(storage) == ["e1"]


async def test_a_run_that_asks_both_ways_gets_a_message_that_is_there_once(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.accept([incoming("e1", "news", once=["jobs"])], {})
    await worker.send(bundle("run-1", move=AckInbox(0), waits=[wait("run-1", "a", "news"), job("run-1", "b")]))
    assert [x.value for x in await storage.read_inboxes(worker.id)] == [b"e1"]


# Pruning


async def test_an_old_message_is_no_longer_taken(storage: Storage, worker: Worker) -> None:
    await offer(storage, "old")
    assert await storage.prune_events(await storage.now() + HOUR // 2, 100) == 1
    await offer(storage, "new")
    assert await kept(storage) == ["new"]


async def test_a_message_in_an_unread_letter_stays(storage: Storage, worker: Worker) -> None:
    await worker.send(born("run-1", waits=[job("run-1")]))
    await offer(storage, "e1", "newest")
    assert await kept(storage) == ["newest"]
    tomorrow = await storage.now() + 24 * HOUR
    await storage.prune_events(tomorrow, 100)
    assert await letters(storage, worker) == [("run-1", 1, "w", b"e1")]
    await worker.write(bundle("run-1", entry(1, n=1), move=AckInbox(1)))
    assert await storage.prune_events(tomorrow, 100) == 1
    assert await storage.find_event(SOURCE, "e1") is None


# At the same time


def counted(mail: Iterable[InboxItem]) -> Counter[str]:
    return Counter(letter.value.decode() for letter in mail)


async def test_each_message_goes_to_one_run_while_others_ask_for_them(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    crews = [await make_worker(f"worker-{n}", on=(storage, other)[n % 2]) for n in range(4)]

    async def ask(worker: Worker) -> None:
        for turn in range(15):
            runs = [f"{worker.id}-{turn}-{n}" for n in range(3)]
            await worker.write(*(born(run) for run in runs))
            await worker.send(*(bundle(run, move=asleep(0), waits=[job(run)]) for run in runs))

    async def bring(storage: Storage, part: int) -> None:
        for turn in range(30):
            await offer(storage, *(f"e-{part}-{turn}-{n}" for n in range(2)))

    async with asyncio.timeout(100):
        await asyncio.gather(*(ask(worker) for worker in crews), bring(storage, 0), bring(other, 1), bring(other, 2))
    told = [letter for worker in crews for letter in await storage.read_inboxes(worker.id)]
    woken = [letter for run in (await crews[0].claim(limit=1_000)).runs for letter in run.mail]
    assert max(Counter(letter.run_id for letter in (*told, *woken)).values()) == 1
    everything = Counter(f"e-{part}-{turn}-{n}" for part in range(3) for turn in range(30) for n in range(2))
    assert counted(told) + counted(woken) + Counter(await kept(storage)) == everything
    assert len(told) + len(woken) == 180, "with 180 messages and 180 runs nobody is left"


async def test_of_many_who_ask_at_the_same_time_each_takes_another_message(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    crews = [await make_worker(f"worker-{n}", on=(storage, other)[n % 2]) for n in range(6)]
    await offer(storage, *(f"e{n:03}" for n in range(100)))
    for worker in crews:
        await worker.write(*(born(f"{worker.id}-{n}") for n in range(20)))

    async def take(worker: Worker) -> None:
        for n in range(20):
            run = f"{worker.id}-{n}"
            await worker.send(bundle(run, move=asleep(0), waits=[job(run)]))

    async with asyncio.timeout(100):
        await asyncio.gather(*(take(worker) for worker in crews))
    taken = counted([letter for worker in crews for letter in await storage.read_inboxes(worker.id)])
    assert taken == Counter(f"e{n:03}" for n in range(100))
    waiting = [run for worker in crews for n in range(20) if await storage.waits(run := RunId(f"{worker.id}-{n}"))]
    assert len(waiting) == 20


async def test_a_run_that_takes_one_message_after_the_other_gets_them_in_order_while_they_come(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    senders = [await make_storage(), await make_storage()]
    await worker.write(born("run-1"))
    total = 60

    async def send(sender: Storage, part: int) -> None:
        for n in range(part, total, 2):
            await offer(sender, f"e{n:02}")

    async def read() -> list[int]:
        read: list[int] = []
        while len(read) < total:
            await worker.send(bundle("run-1", move=AckInbox(len(read)), waits=[job("run-1", f"w{len(read)}")]))
            mail: tuple[InboxItem, ...] = ()
            while not mail:
                mail = await storage.read_inboxes(worker.id)
            read += [letter.event for letter in mail if letter.event is not None]
        return read

    async with asyncio.timeout(60):
        seen, *_ = await asyncio.gather(read(), *(send(sender, part) for part, sender in enumerate(senders)))
    assert seen == [stored.seq for stored in await storage.events_of_type(TYPE, 0, 2**62, total)]
