"""To and from a real nats-server, which dies in the middle."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from edda import EddaApp, WorkflowContext, wait_event, workflow
from edda.cloudevents import json_format
from edda.cloudevents.event import CloudEvent, make
from edda.engine.clock import DatabaseClock
from edda.engine.outbox.relayer import Relayer
from edda.engine.outbox.sinks import message_id
from edda.errors import EventError, EventPostponedError, EventRefusedError, StorageUnavailableError
from edda.integrations.nats import NatsSink, NatsSource
from edda.outbox import OutboxRelayer
from edda.storage.ports import Storage
from tests.conftest import MakeDatabase
from tests.engine.conditions import until
from tests.engine.conftest import url_of

from .conftest import QUICK
from .nats_server import NatsServer, nats_server
from .outbox_rows import are_over, in_order, put, records

pytestmark = pytest.mark.databases("sqlite")

STRUCTURED = {"content-type": "application/cloudevents+json"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    folder = tmp_path / "nats"
    folder.mkdir()
    async with nats_server(folder) as server:
        await server.add_stream("shop")
        yield server


@pytest.fixture
async def outbox(make_database: MakeDatabase) -> AsyncIterator[Storage]:
    storage = make_database("sqlite").storage()
    await storage.open()
    await storage.migrate()
    yield storage
    await storage.close()


def event(id: object = 1, data: Any = None) -> CloudEvent:
    return make("order shipped", "/shop", str(id), data, time="2026-01-31T18:30:00Z")


# To a stream


async def test_an_event_is_stored_in_the_stream_when_send_returns(server: NatsServer) -> None:
    sink = NatsSink(server.url, stream="shop")
    await sink.send(event())
    await sink.send(event())
    await sink.close()
    await sink.send(event(2))  # it can be used again
    await sink.close()
    first, second = await server.stored("shop")
    assert first.subject == "shop.order_shipped"
    assert first.data == json_format.emit_stored(event())
    assert first.headers == STRUCTURED | {"Nats-Msg-Id": message_id(event()), "Nats-Expected-Stream": "shop"}
    assert json.loads(second.data)["id"] == "2", "and the second try of the first was known to be one"


async def test_a_url_names_server_stream_and_subject(server: NatsServer, outbox: Storage) -> None:
    await put(outbox, ["1"])
    async with OutboxRelayer(None, f"{server.url}/shop?subject=shop.out.{{type}}", storage=outbox):
        await until(lambda: are_over(outbox), "it is sent")
    assert [message.subject for message in await server.stored("shop")] == ["shop.out.order.shipped"]


async def test_what_a_stream_does_not_take_now_is_tried_again(server: NatsServer) -> None:
    for sink, words in (
        (NatsSink(server.url, stream="nothere"), "no response"),
        (NatsSink(server.url, stream="other", subject="shop.x"), "expected stream"),
        (NatsSink("nats://127.0.0.1:1", stream="shop"), "no servers"),
    ):
        with pytest.raises(EventPostponedError, match=words):
            await sink.send(event())
        await sink.close()


async def test_what_is_too_large_for_a_stream_is_dead(server: NatsServer) -> None:
    await server.add_stream("small", max_msg_size=500)
    sink = NatsSink(server.url, stream="small")
    with pytest.raises(EventRefusedError, match="size"):
        await sink.send(event(data="x" * 1000))
    with pytest.raises(EventRefusedError, match="larger"):
        await sink.send(event(data="x" * 2_000_000))
    await sink.send(event())
    await sink.close()


async def test_a_server_that_is_killed_in_the_middle_gets_everything_in_order(
    server: NatsServer, outbox: Storage
) -> None:
    sink = NatsSink(server.url, stream="shop", timeout=5.0)
    relayer = Relayer(outbox, sink, clock=DatabaseClock(), settings=QUICK)
    relayer.start()
    for round in range(3):
        await put(outbox, range(round * 100, round * 100 + 50))
        for number in range(round * 100 + 50, round * 100 + 100):
            await put(outbox, [number], key=f"key-{number % 5}")
        await until(lambda: relayer.sent > round * 100, "some are sent")  # noqa: B023
        server.kill()
        await put(outbox, [f"down-{round}"])
        before = relayer.postponed
        await until(lambda: relayer.postponed > before, "it is noticed")  # noqa: B023
        await server.start()
    await until(lambda: are_over(outbox), "all are sent", within=60.0)
    await relayer.stop(5.0)
    await sink.close()
    messages = [json.loads(message.data) for message in await server.stored("shop")]
    assert {message["id"] for message in messages} == set(await records(outbox))
    for key in (f"key-{number}" for number in range(5)):
        ids = in_order(message["id"] for message in messages if message["subject"] == key)
        assert ids == sorted(ids, key=int)
        assert len(ids) == 30


# From a stream


class Inbox:
    """Stands for an app: stores what it is given, if the test lets it."""

    def __init__(self) -> None:
        self.stored: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        self.errors: list[Exception] = []

    async def receive(self, events: Sequence[CloudEvent]) -> None:
        await self.open.wait()
        if self.errors:
            raise self.errors.pop(0)
        for one in events:
            if one.type == "unwanted":
                raise EventError("nobody wants it")
        self.stored += [one.id for one in events]


async def publish(server: NatsServer, *messages: tuple[bytes, dict[str, str] | None]) -> None:
    async with server.client() as client:
        for body, headers in messages:
            await client.jetstream().publish("shop.in", body, headers=headers)


def structured(id: object) -> tuple[bytes, dict[str, str] | None]:
    return json_format.emit(event(id, {"n": id})), STRUCTURED


async def acknowledged(server: NatsServer, durable: str = "edda") -> int:
    """How many messages from the first on are done with."""
    async with server.client() as client:
        info = await client.jetstream().consumer_info("shop", durable)
        assert info.ack_floor is not None
        return int(info.ack_floor.stream_seq)


async def test_a_message_is_acknowledged_after_it_is_stored_and_not_before(server: NatsServer) -> None:
    inbox = Inbox()
    inbox.open.clear()
    await publish(server, *map(structured, range(5)))
    async with NatsSource(inbox, server.url, "shop", "edda"):

        async def is_delivered() -> bool:
            async with server.client() as client:
                names = [one.name for one in await client.jetstream().consumers_info("shop")]
                return "edda" in names and (await client.jetstream().consumer_info("shop", "edda")).num_ack_pending == 5

        await until(is_delivered, "all are under way")
        assert await acknowledged(server) == 0
        inbox.open.set()

        async def is_acknowledged() -> bool:
            return await acknowledged(server) == 5

        await until(is_acknowledged, "they are acknowledged")
        assert inbox.stored == ["0", "1", "2", "3", "4"]


async def test_events_come_structured_binary_or_bare(server: NatsServer) -> None:
    inbox = Inbox()
    binary = {"ce-specversion": "1.0", "ce-id": "b", "ce-source": "/s", "ce-type": "t", "Content-Type": "text/plain"}
    bare = json_format.emit(event("c"))
    await publish(server, structured("a"), (b"hello", binary), (bare, None), (bare, {"traceparent": "00-1-2-00"}))
    async with NatsSource(inbox, server.url, "shop", "edda", batch=1):
        await until(lambda: inbox.stored == ["a", "b", "c", "c"], "all are stored")


async def test_what_is_no_event_is_dropped_and_logged_and_holds_nobody_up(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    inbox = Inbox()
    unwanted = json_format.emit(make("unwanted", "/shop", "u"))
    await publish(server, structured(1), (b"not JSON", STRUCTURED), (b"", None), (unwanted, None), structured(2))
    terminated: list[int] = []

    async def note(advisory: Msg) -> None:
        terminated.append(json.loads(advisory.data)["stream_seq"])

    async with server.client() as client:
        await client.subscribe("$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.shop.edda", cb=note)
        await client.flush()
        async with NatsSource(inbox, server.url, "shop", "edda"):

            async def is_acknowledged() -> bool:
                return inbox.stored == ["1", "2"] and await acknowledged(server) == 5

            await until(is_acknowledged, "all are done with")
            await until(lambda: sorted(terminated) == [2, 3, 4], "the server was told why")
    for number in (2, 3, 4):
        assert f"message {number} of the stream shop is rejected for good" in caplog.text


async def test_a_database_that_is_away_gets_them_later_and_in_order(server: NatsServer) -> None:
    inbox = Inbox()
    inbox.errors = [StorageUnavailableError("away"), EventError("one of them"), StorageUnavailableError("away")]
    await publish(server, *map(structured, range(20)))
    async with NatsSource(inbox, server.url, "shop", "edda", batch=5):
        await until(lambda: len(inbox.stored) >= 20, "all are stored")
    assert inbox.stored == [str(number) for number in range(20)]


async def test_a_source_outlives_its_server_and_waits_for_its_stream(tmp_path: Path) -> None:
    (folder := tmp_path / "nats").mkdir()
    async with nats_server(folder) as server:
        inbox = Inbox()
        server.kill()
        async with NatsSource(inbox, server.url, "shop", "edda"):
            await asyncio.sleep(0.3)  # nobody is there
            await server.start()
            await asyncio.sleep(0.3)  # and now there is no stream
            await server.add_stream("shop")
            for round in range(3):
                await publish(server, *(structured(f"{round}-{number}") for number in range(50)))
                await until(lambda: len(set(inbox.stored)) > round * 50, "some are stored")  # noqa: B023
                server.kill()
                await server.start()
            await until(lambda: len(set(inbox.stored)) == 150, "all are stored", within=60.0)
    again = {id: count for id, count in Counter(inbox.stored).items() if count > 1}
    assert len(again) < 150, "what was acknowledged does not come again"


async def test_an_event_from_a_stream_wakes_a_run(server: NatsServer, make_database: MakeDatabase) -> None:
    @workflow
    async def nats_order(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "order shipped")).data

    async with (
        EddaApp("shop", url_of(make_database("sqlite")), workflows=[nats_order]) as app,
        NatsSource(app, server.url, "shop", "edda", subject="shop.in"),
    ):
        run = await app.start(nats_order)
        await publish(server, structured(7), structured(7))
        assert await app.handle(run).result(timeout=30) == {"n": 7}
