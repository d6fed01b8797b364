"""Queries of the event log: events, their receivers, and registered waits."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from edda.core.model import AckInbox, RunId, StoredEvent
from edda.core.queries import EventQuery, EventReceiver, WaitRow
from edda.storage.ports import Storage
from edda.storage.sqlite import queries
from tests.conftest import MakeDatabase

from .records import SUSPENDED, TYPE, WORKFLOW, incoming, new_run, run_write, wait
from .test_queries_runs import HOSTILE
from .worker import Worker


async def found(storage: Storage, query: EventQuery) -> list[str]:
    return [stored.event.id for stored in await storage.find_events(query)]


# The log


async def test_an_empty_log_has_no_events(storage: Storage) -> None:
    assert await storage.find_events(EventQuery()) == ()
    assert await storage.find_events(EventQuery(messages=True)) == ()
    assert await storage.event(1) is None
    assert await storage.consumers(1, 10) == ()
    assert await storage.list_waits(None, None, 10) == ()


async def test_events_come_newest_first_and_whole(storage: Storage) -> None:
    await storage.accept([incoming("e1"), incoming("e2", target="run-1"), incoming("e3")], {})
    assert await found(storage, EventQuery()) == ["e3", "e2", "e1"]
    assert await found(storage, EventQuery(limit=2)) == ["e3", "e2"]
    (stored,) = await storage.find_events(EventQuery(id="e2"))
    assert stored == await storage.find_event("/shop", "e2")
    assert stored == await storage.event(stored.seq)


async def test_events_are_searched_by_type_source_and_id(storage: Storage) -> None:
    await storage.accept(
        [
            incoming("a", type="paid", source="/one"),
            incoming("a", type="sent", source="/two"),
            incoming("b", type="paid", source="/two"),
        ],
        {},
    )
    assert await found(storage, EventQuery(type="paid")) == ["b", "a"]
    assert await found(storage, EventQuery(source="/two")) == ["b", "a"]
    assert await found(storage, EventQuery(source="/two", type="paid")) == ["b"]
    assert len(await storage.find_events(EventQuery(id="a"))) == 2
    assert [stored.event.type for stored in await storage.find_events(EventQuery(id="a", source="/two"))] == ["sent"]
    assert await found(storage, EventQuery(id="a", type="other")) == []


async def test_events_are_searched_by_text_without_regard_to_case(storage: Storage) -> None:
    await storage.accept(
        [
            incoming("e1", type="Order.Paid"),
            incoming("e2", source="/ORDERS", type="x"),
            incoming("order-3", type="y"),
            incoming("e4", type="z"),
        ],
        {},
    )
    assert await found(storage, EventQuery(text="oRDER")) == ["order-3", "e2", "e1"]
    assert await found(storage, EventQuery(text="order", type="y")) == ["order-3"]


async def test_events_are_searched_by_the_time_of_their_arrival(storage: Storage) -> None:
    await storage.accept([incoming("e1"), incoming("e2")], {})
    (last, first) = await storage.find_events(EventQuery())
    assert await found(storage, EventQuery(received_from=first.received_at)) == ["e2", "e1"]
    assert await found(storage, EventQuery(received_from=last.received_at + 1)) == []
    assert await found(storage, EventQuery(received_to=first.received_at)) == []
    assert await found(storage, EventQuery(received_to=last.received_at + 1, type=TYPE)) == ["e2", "e1"]


async def test_messages_of_channels_are_a_list_of_their_own(storage: Storage) -> None:
    await storage.accept([incoming("e1"), incoming("m1", type="channel/news"), incoming("m2", type="channel/x")], {})
    assert await found(storage, EventQuery()) == ["e1"]
    assert await found(storage, EventQuery(messages=True)) == ["m2", "m1"]
    assert await found(storage, EventQuery(messages=True, type="channel/news")) == ["m1"]
    assert await found(storage, EventQuery(type="channel/news")) == []


async def test_pages_of_events_leave_nothing_out_while_events_come(storage: Storage) -> None:
    await storage.accept([incoming(f"e{n:02}") for n in range(11)], {})
    seen: list[str] = []
    query = EventQuery(limit=3)
    while page := await storage.find_events(query):
        seen += [stored.event.id for stored in page]
        await storage.accept([incoming(f"later-{len(seen)}")], {})
        query = replace(query, before=page[-1].seq)
    assert seen == [f"e{n:02}" for n in reversed(range(11))]


@pytest.mark.parametrize("text", HOSTILE)
async def test_signs_that_mean_something_to_a_database_mean_themselves(storage: Storage, text: str) -> None:
    post = [incoming(f"{text} id"), incoming("e2", type=f"t {text}"), incoming("e3", source=f"/{text}")]
    await storage.accept([*post, incoming("axb 100 back slash")], {})
    assert await found(storage, EventQuery(text=text)) == ["e3", "e2", f"{text} id"]
    assert await found(storage, EventQuery(type=f"t {text}")) == ["e2"]
    assert await found(storage, EventQuery(source=f"/{text}")) == ["e3"]
    assert await found(storage, EventQuery(id=f"{text} id")) == [f"{text} id"]


async def test_a_search_text_may_be_very_long(storage: Storage) -> None:
    await storage.accept([incoming("e1")], {})
    long = "x%_" * 30_000
    for query in (EventQuery(text=long), EventQuery(type=long), EventQuery(source=long), EventQuery(id=long)):
        assert await storage.find_events(query) == ()


@pytest.mark.databases("sqlite")
async def test_with_many_events_in_a_stretch_of_time_the_same_are_found(
    make_database: MakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite then reads the log by number."""
    monkeypatch.setattr(queries, "SCAN_LIMIT", 1)
    storage = make_database("sqlite").storage()
    await storage.open()
    await storage.migrate()
    await storage.accept([incoming(f"e{n}") for n in range(4)], {})
    newest: StoredEvent = (await storage.find_events(EventQuery()))[0]
    assert await found(storage, EventQuery(received_to=newest.received_at + 1)) == ["e3", "e2", "e1", "e0"]
    assert await found(storage, EventQuery(received_from=newest.received_at + 1)) == []
    await storage.close()


# Receivers


async def test_an_event_lists_its_receivers(storage: Storage, worker: Worker) -> None:
    await worker.write(
        new_run("run-2", transition=SUSPENDED, waits=[wait("run-2", "w:1", "order")]),
        new_run("run-1", transition=SUSPENDED, waits=[wait("run-1", "w:7", "order")], workflow="other"),
        new_run("run-3", transition=SUSPENDED, waits=[wait("run-3", "w:1", "customer")]),
    )
    before = await storage.now()
    await storage.accept([incoming("e1", "order"), incoming("e2")], {})
    (e2, e1) = await storage.find_events(EventQuery())
    consumers = await storage.consumers(e1.seq, 10)
    assert list(consumers) == sorted(consumers, key=lambda consumer: (consumer.at, consumer.run_id))
    first, second = sorted(consumers, key=lambda consumer: consumer.run_id)
    assert first == EventReceiver(RunId("run-1"), "other", "w:7", first.at)
    assert second == EventReceiver(RunId("run-2"), WORKFLOW, "w:1", second.at)
    assert before <= first.at <= await storage.now()
    assert await storage.consumers(e1.seq, 1) == consumers[:1]
    assert await storage.consumers(e2.seq, 10) == ()


async def test_who_gave_an_event_back_did_not_get_it(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", waits=[wait("run-1", "w:1", "order")]))
    await storage.accept([incoming("e1", "order")], {})
    seq = await storage.last_event()
    assert len(await storage.consumers(seq, 10)) == 1
    await worker.write(run_write("run-1", transition=AckInbox(1), released_items=[1]))
    assert await storage.consumers(seq, 10) == ()


# Registered waits


async def test_all_that_is_waited_for_is_seen_by_run_and_step(storage: Storage, worker: Worker) -> None:
    paid, later = wait("run-1", "w:1", "order", due=77), wait("run-1", "w:2", "customer", exclusive=True)
    sent = replace(wait("run-2", "w:1", "order"), type="order.sent")
    await worker.write(
        new_run("run-2", transition=SUSPENDED, waits=[sent], workflow="other"),
        new_run("run-1", transition=SUSPENDED, waits=[later, paid]),
    )
    one = WaitRow(RunId("run-1"), WORKFLOW, paid)
    two = WaitRow(RunId("run-1"), WORKFLOW, later)
    three = WaitRow(RunId("run-2"), "other", sent)
    assert await storage.list_waits(None, None, 10) == (one, two, three)
    assert await storage.list_waits(None, None, 2) == (one, two)
    assert await storage.list_waits(None, ("run-1", "w:1"), 10) == (two, three)
    assert await storage.list_waits(None, ("run-2", "w:1"), 10) == ()
    assert await storage.list_waits(TYPE, None, 10) == (one, two)
    assert await storage.list_waits("order.sent", ("run-1", "w:2"), 10) == (three,)
    assert await storage.list_waits("%", None, 10) == ()
