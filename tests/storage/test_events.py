"""`accept`: an event is stored once, delivered to the runs that wait for it, and kept for later waits."""

from __future__ import annotations

import asyncio

import pytest

from edda.core.model import AcceptResult, EntryKind, Event, RunId, StoredEvent
from edda.core.states import RunStatus
from edda.errors import StorageRejectedError
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .records import LATER, SOURCE, SUSPENDED, TYPE, incoming, key, new_run, run_write, start, wait
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")


async def number(storage: Storage, id: str, source: str = SOURCE) -> int:
    stored = await storage.find_event(source, id)
    assert stored is not None
    return stored.seq


# Storing


async def test_an_event_comes_back_as_it_was_accepted(storage: Storage) -> None:
    before = await storage.now()
    event = incoming("e1", target="run-1")
    assert await storage.accept([event], {}) == AcceptResult(frozenset({0}), woke=False)
    stored = await storage.find_event(SOURCE, "e1")
    assert stored is not None
    assert stored.event == event.event
    assert before <= stored.received_at <= await storage.now()


async def test_an_event_that_never_came_is_not_found(storage: Storage) -> None:
    await storage.accept([incoming("e1")], {})
    assert await storage.find_event(SOURCE, "e2") is None
    assert await storage.find_event("/elsewhere", "e1") is None


async def test_events_are_numbered_in_the_order_of_the_post(storage: Storage) -> None:
    ids = ["m", "z", "a", "k", "b"]
    await storage.accept([incoming(id, source=f"/{id}") for id in ids], {})
    await storage.accept([incoming("after")], {})
    numbers = [await number(storage, id, f"/{id}") for id in ids]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(ids)
    assert await number(storage, "after") > numbers[-1]


async def test_events_were_received_in_the_order_of_their_numbers(storage: Storage) -> None:
    await storage.accept([incoming(f"e{n}") for n in reversed(range(50))], {})
    times = [stored.received_at for stored in await storage.events_of_type(TYPE, 0, 2**62, 50)]
    assert times == sorted(times)


async def test_an_empty_post_is_fine(storage: Storage) -> None:
    assert await storage.accept([], {}) == AcceptResult(frozenset(), woke=False)


async def test_an_event_is_stored_once(storage: Storage) -> None:
    await storage.accept([incoming("e1")], {})
    first = await storage.find_event(SOURCE, "e1")
    again = await storage.accept([incoming("e1", type="other"), incoming("e2")], {})
    assert again == AcceptResult(frozenset({1}), woke=False)
    assert await storage.find_event(SOURCE, "e1") == first


async def test_the_same_id_from_another_source_is_another_event(storage: Storage) -> None:
    post = [incoming("e1", source="/a"), incoming("e1", source="/b"), incoming("E1", source="/a")]
    assert await storage.accept(post, {}) == AcceptResult(frozenset({0, 1, 2}), woke=False)


async def test_of_two_equal_events_in_a_post_the_first_counts(storage: Storage) -> None:
    accepted = await storage.accept([incoming("e1", type="first"), incoming("e2"), incoming("e1", type="second")], {})
    assert accepted == AcceptResult(frozenset({0, 1}), woke=False)
    stored = await storage.find_event(SOURCE, "e1")
    assert stored is not None
    assert stored.event.type == "first"


async def test_of_acceptors_at_the_same_time_one_stores_an_event(storage: Storage, make_storage: MakeStorage) -> None:
    storages = [storage, await make_storage()]
    posts = [[incoming(f"{turn}-{id}") for id in range(5)] for turn in range(20)]
    accepted = await asyncio.gather(
        *(each.accept(post if each is storage else post[::-1], {}) for post in posts for each in storages)
    )
    assert sum(len(answer.new) for answer in accepted if answer) == 100
    assert len(await storage.events_of_type(TYPE, 0, 2**62, 200)) == 100


BAD_EVENTS = {
    "source": Event("/sh\0p", "e2", TYPE, None, b""),
    "id": Event(SOURCE, "e\0", TYPE, None, b""),
    "type": Event(SOURCE, "e2", "order\0paid", None, b""),
    "target": Event(SOURCE, "e2", TYPE, RunId("run\0"), b""),
    "half a character": Event(SOURCE, "\ud800", TYPE, None, b""),
}


@pytest.mark.parametrize("event", BAD_EVENTS.values(), ids=list(BAD_EVENTS))
async def test_a_post_with_an_event_that_cannot_be_stored_is_refused_whole(
    storage: Storage, worker: Worker, event: Event
) -> None:
    await worker.send(new_run("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order")]))
    good = incoming("e1", "order", starts=[start("run-2")])
    with pytest.raises(StorageRejectedError):
        await storage.accept([good, type(good)(event)], {})
    assert await storage.find_event(SOURCE, "e1") is None
    assert await storage.get(R2) is None
    assert len(await storage.waits(R1)) == 1
    assert await storage.accept([good], {}) == AcceptResult(frozenset({0}), woke=True)


@pytest.mark.parametrize("text", ["größer-🧾", "'; DROP TABLE edda_event; --", "a\\b%s%%_", " a\tb "])
async def test_any_text_comes_back(storage: Storage, text: str) -> None:
    event = Event(text, text, text, RunId(text), text.encode() + bytes(range(256)))
    await storage.accept([type(incoming("e1"))(event)], {text: 0})
    stored = await storage.find_event(text, text)
    assert stored is not None
    assert stored.event == event
    assert await storage.events_of_type(text, 0, stored.seq, 10) == (stored,)


# Waking


async def test_a_sleeping_run_is_woken_by_its_event(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order-1")]))
    assert (await worker.claim()).runs == ()
    accepted = await storage.accept([incoming("e0", "order-2"), incoming("e1", "order-1")], {})
    assert accepted == AcceptResult(frozenset({0, 1}), woke=True)
    record = await storage.get(R1)
    assert record is not None
    assert (record.status, record.ready_at, record.reason) == (RunStatus.RUNNING, 0, None)
    (run,) = (await worker.claim()).runs
    (item,) = run.inbox
    assert (item.inbox_no, item.kind, item.step, item.value) == (1, EntryKind.EVENT, "w", b"e1")
    assert item.event == await number(storage, "e1")
    assert run.waits == ()
    assert await storage.waits(R1) == ()


async def test_an_event_without_a_wait_wakes_no_run(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order-1")]))
    assert await storage.accept([incoming("e1", "order-2"), incoming("e2")], {}) == AcceptResult(
        frozenset({0, 1}), woke=False
    )
    assert (await worker.claim()).runs == ()


async def test_a_run_in_a_workers_hands_stays_there_and_has_inbox(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w", "order")]))
    assert await storage.accept([incoming("e1", "order")], {}) == AcceptResult(frozenset({0}), woke=True)
    assert await storage.owned_runs(worker.id) == {R1: 1}
    (item,) = await storage.read_inboxes(worker.id)
    assert (item.run_id, item.inbox_no, item.step, item.value) == (R1, 1, "w", b"e1")


async def test_an_event_goes_to_every_run_that_waits_for_it(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(20)]
    await worker.send(*(new_run(run, transition=SUSPENDED, waits=[wait(run, "w", "order")]) for run in runs))
    await storage.accept([incoming("e1", "order")], {})
    assert sorted(run.run_id for run in (await worker.claim()).runs) == sorted(runs)


async def test_an_event_with_a_target_goes_to_this_run_alone(storage: Storage, worker: Worker) -> None:
    await worker.send(*(new_run(run, transition=SUSPENDED, waits=[wait(run, "w", "order")]) for run in (R1, R2)))
    await storage.accept([incoming("e1", "order", target="run-2")], {})
    assert [run.run_id for run in (await worker.claim()).runs] == [R2]
    assert len(await storage.waits(R1)) == 1


async def test_an_event_known_already_wakes_no_run_again(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("e1")], {})
    await worker.send(new_run("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order")]))
    again = incoming("e1", "order", starts=[start("run-2")])
    assert await storage.accept([again], {}) == AcceptResult(frozenset(), woke=False)
    assert await storage.get(R2) is None
    assert (await worker.claim()).runs == ()


async def test_an_event_goes_to_the_first_of_a_runs_waits(storage: Storage, worker: Worker) -> None:
    waits = [wait("run-1", step, "order") for step in ("b", "Z", "a")]
    await worker.send(new_run("run-1", waits=waits))
    await storage.accept([incoming("e1", "order")], {})
    assert [item.step for item in await storage.read_inboxes(worker.id)] == ["Z"]
    assert [each.step for each in await storage.waits(R1)] == ["a", "b"]


@pytest.mark.parametrize("names", [("order", "customer"), ("customer", "order")])
async def test_an_event_found_under_two_keys_goes_to_one_wait_of_a_run(
    storage: Storage, worker: Worker, names: tuple[str, str]
) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "b", "order"), wait("run-1", "a", "customer")]))
    await storage.accept([incoming("e1", *names)], {})
    assert [item.step for item in await storage.read_inboxes(worker.id)] == ["a"]
    assert [each.step for each in await storage.waits(R1)] == ["b"]


async def test_events_of_one_post_go_to_different_waits_of_a_run_in_order(storage: Storage, worker: Worker) -> None:
    waits = [wait("run-1", step, "order") for step in ("a", "b", "c")]
    await worker.send(new_run("run-1", transition=SUSPENDED, waits=waits))
    await storage.accept([incoming(id, "order") for id in ("e1", "e2")], {})
    (run,) = (await worker.claim()).runs
    assert [(item.inbox_no, item.step, item.value) for item in run.inbox] == [(1, "a", b"e1"), (2, "b", b"e2")]
    assert [step for step, _ in run.waits] == ["c"]


async def test_a_wait_taken_by_one_event_of_a_post_is_gone_for_the_next(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "a", "order"), wait("run-1", "b", "refund")]))
    await storage.accept([incoming("e1", "order"), incoming("e2", "order"), incoming("e3", "refund")], {})
    items = await storage.read_inboxes(worker.id)
    assert [(item.inbox_no, item.step, item.value) for item in items] == [(1, "a", b"e1"), (2, "b", b"e3")]


async def test_events_of_one_post_for_many_runs_with_many_waits_all_arrive(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(6)]
    await worker.send(
        *(
            new_run(run, transition=SUSPENDED, waits=[wait(run, f"s{n}", f"key-{n % 2}") for n in range(6)])
            for run in runs
        )
    )
    await storage.accept([incoming(f"e{n}", f"key-{n % 2}") for n in range(5)], {})
    claimed = (await worker.claim()).runs
    expected = [(1, "s0", b"e0"), (2, "s1", b"e1"), (3, "s2", b"e2"), (4, "s3", b"e3"), (5, "s4", b"e4")]
    assert {run.run_id: [(x.inbox_no, x.step, x.value) for x in run.inbox] for run in claimed} == dict.fromkeys(
        runs, expected
    )
    assert [[step for step, _ in run.waits] for run in claimed] == [["s5"]] * len(runs)


async def test_events_and_other_inbox_are_numbered_together(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "a", "order"), wait("run-1", "b", "order")]))
    await storage.accept([incoming("e1", "order")], {})
    await storage.cancel(R1, b"stop")
    await storage.accept([incoming("e2", "order")], {})
    items = await storage.read_inboxes(worker.id)
    assert [(item.inbox_no, item.value) for item in items] == [(1, b"e1"), (2, b"stop"), (3, b"e2")]
    assert [item.event is None for item in items] == [False, True, False]


async def test_acceptors_at_the_same_time_wake_a_run_for_each_event(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    storages = [storage, await make_storage()]
    waits = [wait("run-1", f"s{n:02}", f"key-{n % 4}") for n in range(40)]
    await worker.send(new_run("run-1", waits=waits))
    await asyncio.gather(*(storages[n % 2].accept([incoming(f"e{n}", f"key-{n % 4}")], {}) for n in range(40)))
    items = await storage.read_inboxes(worker.id)
    assert [item.inbox_no for item in items] == list(range(1, 41))
    assert {item.value for item in items} == {f"e{n}".encode() for n in range(40)}
    assert await storage.waits(R1) == ()


# Starting


async def test_a_new_event_starts_its_runs(storage: Storage, worker: Worker) -> None:
    starts = [start("run-1"), start("run-2", ready_at=LATER)]
    assert await storage.accept([incoming("e1", starts=starts)], {}) == AcceptResult(frozenset({0}), woke=True)
    (run,) = (await worker.claim()).runs
    assert (run.run_id, run.epoch, run.input, run.event_cursor) == (R1, 1, starts[0].input, await number(storage, "e1"))
    record = await storage.get(R2)
    assert record is not None
    assert (record.status, record.owner, record.ready_at) == (RunStatus.RUNNING, None, LATER)


async def test_a_run_that_exists_is_not_started_again(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    assert await storage.accept([incoming("e1", starts=[start("run-1")])], {}) == AcceptResult(
        frozenset({0}), woke=False
    )
    assert await storage.owned_runs(worker.id) == {R1: 1}


async def test_two_events_of_a_post_start_a_run_once(storage: Storage, worker: Worker) -> None:
    post = [incoming("e1"), incoming("e2", starts=[start("run-1")]), incoming("e3", starts=[start("run-1")])]
    await storage.accept(post, {})
    (run,) = (await worker.claim()).runs
    assert run.event_cursor == await number(storage, "e2")


async def test_a_run_does_not_get_the_event_that_started_it(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("e0", "order"), incoming("e1", "order", starts=[start("run-1")])], {})
    await storage.accept([incoming("e2", "order")], {})
    await worker.claim()
    written = await worker.send(run_write("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order")]))
    assert written is not None
    assert written.refused == {R1: frozenset({"w"})}
    assert [item.value for item in await storage.read_inboxes(worker.id)] == [b"e2"]


# Versions


async def test_a_post_made_with_other_path_sets_than_the_known_ones_is_not_stored(
    storage: Storage, worker: Worker
) -> None:
    await storage.register_match_paths(TYPE, "order")
    await worker.send(new_run("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order")]))
    post = [incoming("e0", type="other"), incoming("e1", "order", starts=[start("run-2")])]
    for versions in ({}, {TYPE: 0}, {TYPE: 2}, {TYPE: 1, "other": 1}):
        assert await storage.accept(post, versions) is None
    assert await storage.find_event(SOURCE, "e0") is None
    assert await storage.get(R2) is None
    assert await storage.accept(post, {TYPE: 1, "other": 0}) == AcceptResult(frozenset({0, 1}), woke=True)


async def test_versions_of_types_that_are_not_in_the_post_do_not_matter(storage: Storage) -> None:
    assert await storage.accept([incoming("e1")], {TYPE: 0, "other": 7}) == AcceptResult(frozenset({0}), woke=False)


# Reading the log


async def test_the_log_of_a_type_comes_by_number(storage: Storage) -> None:
    await storage.accept([incoming(f"e{n}", type=TYPE if n % 2 else "other") for n in range(10)], {})
    numbers = [await number(storage, f"e{n}") for n in range(10)]

    def ids(events: tuple[StoredEvent, ...]) -> list[str]:
        return [stored.event.id for stored in events]

    assert ids(await storage.events_of_type(TYPE, 0, numbers[9], 100)) == ["e1", "e3", "e5", "e7", "e9"]
    assert ids(await storage.events_of_type(TYPE, numbers[3], numbers[7], 100)) == ["e5", "e7"]
    assert ids(await storage.events_of_type(TYPE, numbers[1], numbers[9], 2)) == ["e3", "e5"]
    assert ids(await storage.events_of_type("unknown", 0, numbers[9], 100)) == []


async def test_the_events_of_a_key_come_in_pages_by_number(storage: Storage) -> None:
    await storage.accept([incoming(f"e{n}", "odd" if n % 2 else "even", "all") for n in range(10)], {})
    numbers = [await number(storage, f"e{n}") for n in range(10)]

    async def ids(name: str, after: int, limit: int = 100) -> list[bytes]:
        return [stored.event.body for stored in await storage.events_under_key(key(name), after, limit)]

    assert await ids("odd", 0) == [b"e1", b"e3", b"e5", b"e7", b"e9"]
    assert await ids("odd", numbers[3], 2) == [b"e5", b"e7"]
    assert await ids("all", numbers[7]) == [b"e8", b"e9"]
    assert await ids("odd", numbers[9]) == await ids("none", 0) == []


async def test_the_last_event_is_the_newest(storage: Storage) -> None:
    assert await storage.last_event() == 0
    await storage.accept([incoming("e1"), incoming("e2")], {})
    assert await storage.last_event() == await number(storage, "e2")


async def test_the_last_event_before_a_time_is_found(storage: Storage) -> None:
    await storage.accept([incoming("e1"), incoming("e2")], {})
    second = await storage.find_event(SOURCE, "e2")
    assert second is not None
    while (between := await storage.now()) <= second.received_at:
        pass
    await storage.accept([incoming("e3")], {})
    assert await storage.last_event(between) == second.seq
    assert await storage.last_event(LATER) == await number(storage, "e3")
    assert await storage.last_event(1) == 0


async def test_a_run_sees_events_since_it_was_started(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("old", "order")], {})
    await worker.write(new_run("run-1"), new_run("run-3"))
    await storage.start([start("run-2")])
    await storage.accept([incoming("new", "order")], {})
    (claimed,) = (await worker.claim()).runs
    assert await number(storage, "old") <= claimed.event_cursor < await number(storage, "new")
    written = await worker.send(
        *(run_write(run, transition=SUSPENDED, waits=[wait(run, "w", "order")]) for run in ("run-1", "run-2", "run-3"))
    )
    assert written is not None
    assert set(written.refused) == {"run-1", "run-2", "run-3"}
    assert {item.value for item in await storage.read_inboxes(worker.id)} == {b"new"}
