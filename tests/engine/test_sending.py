"""Sending events: from anywhere, counted once, into our own database or over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from edda import (
    EddaApp,
    RetryPolicy,
    WorkflowContext,
    activity,
    send_event,
    sleep,
    wait_event,
    workflow,
)
from edda.cloudevents import json_format
from edda.core.codec import Codec
from edda.errors import AppError, EventDeliveryError, EventError, NotInWorkflowError
from tests.conftest import Database

from .conftest import MakeApp, url_of
from .events import result_of, send, start_waiting, stored

AT_ONCE = RetryPolicy(initial_interval=0.0, max_attempts=3)


async def test_an_event_sent_by_a_workflow_is_sent_once_however_often_it_is_replayed(app: EddaApp) -> None:
    begun: list[int] = []

    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        begun.append(1)
        first = await send_event("shipped", "/shop", {"n": 1})
        await sleep(ctx, 0.01)
        second = await send_event("shipped", "/shop", {"n": 2}, subject="A", target_instance_id="nobody")
        await sleep(ctx, 0.01)
        return [first, second]

    ids = await app.run(order)
    assert len(begun) >= 3
    events = await stored(app, "shipped")
    assert [event.id for event in events] == ids
    assert [json_format.value_of(event) for event in events] == [{"n": 1}, {"n": 2}]
    assert (events[1].subject, events[1].target) == ("A", "nobody")


async def test_an_event_sent_by_an_activity_that_fails_afterwards_is_sent_once(app: EddaApp) -> None:
    ids: list[list[str]] = []

    @activity(retry_policy=AT_ONCE)
    async def ship(ctx: WorkflowContext) -> None:
        ids.append([await send_event("shipped", "/shop", n) for n in range(2)])
        if ctx.attempt < 3:
            raise ConnectionError("lost")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await ship(ctx)

    await app.run(order)
    events = await stored(app, "shipped")
    assert ids == [[event.id for event in events]] * 3
    assert [json_format.value_of(event) for event in events] == [0, 1]


async def test_each_run_of_an_activity_sends_events_of_its_own(app: EddaApp) -> None:
    @activity
    async def ship(ctx: WorkflowContext) -> str:
        return await send_event("shipped", "/shop")

    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        return [await ship(ctx), await ship(ctx)]

    ids = [*await app.run(order), *await app.run(order)]
    assert [event.id for event in await stored(app, "shipped")] == ids
    assert len(set(ids)) == 4


async def test_one_workflow_wakes_another_and_gets_its_answer(app: EddaApp) -> None:
    @workflow
    async def warehouse(ctx: WorkflowContext) -> None:
        asked = await wait_event(ctx, "asked")
        await send_event("answered", "/warehouse", asked.data + 1, target_instance_id=asked.subject)

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        await send_event("asked", "/shop", 6, subject=ctx.instance_id)
        return (await wait_event(ctx, "answered")).data

    await start_waiting(app, warehouse)
    assert await app.run(order) == 7


async def test_what_is_sent_has_an_id_and_a_time_and_keeps_its_own(app: EddaApp) -> None:
    own = datetime(2030, 1, 1, tzinfo=UTC)
    event_id = await send_event("a", "/shop")
    await app.send_event("a", "/shop", id="own", time=own, dataschema="https://x/y", extensions={"tenant": "t"})
    first, second = await stored(app, "a")
    assert first.id == event_id
    assert first.time is not None
    assert abs(datetime.fromisoformat(first.time) - datetime.now(UTC)).total_seconds() < 60
    assert (second.id, second.time, second.dataschema) == ("own", "2030-01-01T00:00:00+00:00", "https://x/y")
    assert second.extensions == {"tenant": "t"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"event_type": "", "source": "/shop"}, "type"),
        ({"event_type": "a", "source": ""}, "source"),
        ({"event_type": "a", "source": "/shop", "extensions": {"Not-Valid": 1}}, "lower-case letters a-z and digits"),
        ({"event_type": "a", "source": "/shop", "time": "yesterday"}, "time"),
    ],
    ids=["type", "source", "extension", "time"],
)
async def test_what_is_no_event_is_refused_before_anything_is_recorded(
    app: EddaApp, arguments: dict[str, Any], said: str
) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> str:
        try:
            await send_event(**arguments)
        except EventError as error:
            return str(error)
        return "sent"

    with pytest.raises(EventError, match=said):
        await app.send_event(**arguments)
    run_id = await app.start(order)
    assert said in await result_of(app, run_id)
    assert await app.handle(run_id).history() == ()


async def test_an_event_over_the_size_limit_is_refused(make_app: MakeApp) -> None:
    app = await make_app(codec=Codec(max_bytes=1000))
    with pytest.raises(EventError, match="too large") as caught:
        await send(app, "big", "x" * 1000)
    assert caught.value.status == 413
    assert await stored(app, "big") == []


async def test_the_apps_own_way_of_sending_is_refused_in_a_workflow(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await app.send_event("a", "/shop")

    with pytest.raises(NotInWorkflowError, match=r"use send_event\(\)"):
        await app.run(order)
    assert await stored(app, "a") == []


# Without an app


async def test_without_an_app_events_go_to_the_database_that_the_environment_names(
    shared_database: Database, make_app_on: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDDA_DB_URL", url_of(shared_database))
    event_id = await send_event("paid", "/shop", {"n": 1})
    app = await make_app_on(on=shared_database)
    assert [event.id for event in await stored(app, "paid")] == [event_id]


async def test_without_an_app_and_a_database_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDDA_DB_URL", raising=False)
    with pytest.raises(AppError, match="EDDA_DB_URL"):
        await send_event("paid", "/shop")


async def test_with_two_apps_the_error_says_to_name_one(make_app: MakeApp) -> None:
    await make_app(worker=False)
    await make_app(worker=False)
    with pytest.raises(AppError, match="2 EddaApps"):
        await send_event("paid", "/shop")


# Over HTTP


@dataclass
class Receiver:
    """An HTTP server that keeps what it gets and answers as it is told."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    """Of the next answers; then 202."""
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.requests]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head)}
        self.requests.append((headers, await reader.readexactly(int(headers["content-length"]))))
        status = self.statuses.pop(0) if self.statuses else 202
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()


@asynccontextmanager
async def listening() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    async with server:
        receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/events"
        yield receiver


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with listening() as receiver:
        yield receiver


async def test_with_an_address_the_event_is_posted_there(receiver: Receiver) -> None:
    event_id = await send_event("paid", "/shop", {"n": 1}, receiver.url, subject="A")
    ((headers, _),) = receiver.requests
    assert headers["content-type"].startswith("application/cloudevents+json")
    (event,) = receiver.events
    assert (event["id"], event["type"], event["source"], event["subject"]) == (event_id, "paid", "/shop", "A")
    assert (event["specversion"], event["data"]) == ("1.0", {"n": 1})


@pytest.mark.parametrize(("status", "retryable"), [(400, False), (401, False), (429, True), (500, True), (503, True)])
async def test_a_receiver_that_refuses_is_an_error_that_says_whether_to_try_again(
    receiver: Receiver, status: int, retryable: bool
) -> None:
    receiver.statuses = [status]
    with pytest.raises(EventDeliveryError, match=str(status)) as caught:
        await send_event("paid", "/shop", broker_url=receiver.url)
    assert caught.value.retryable is retryable


async def test_a_receiver_that_is_not_there_is_an_error_that_names_it() -> None:
    async with listening() as gone:
        url = gone.url
    with pytest.raises(EventDeliveryError, match=url) as caught:
        await send_event("paid", "/shop", broker_url=url)
    assert caught.value.retryable


async def test_a_workflow_posts_again_under_the_same_id_until_it_is_taken(
    make_app: MakeApp, receiver: Receiver
) -> None:
    app = await make_app(default_retry_policy=AT_ONCE)
    receiver.statuses = [503, 503]

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        event_id = await send_event("paid", "/shop", 1, receiver.url)
        await sleep(ctx, 0.01)
        return event_id

    event_id = await app.run(order)
    assert [event["id"] for event in receiver.events] == [event_id] * 3
    assert await stored(app, "paid") == []


async def test_a_workflow_does_not_post_again_what_was_refused_for_good(make_app: MakeApp, receiver: Receiver) -> None:
    app = await make_app(default_retry_policy=AT_ONCE)
    receiver.statuses = [400] * 5

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await send_event("paid", "/shop", 1, receiver.url)

    with pytest.raises(EventDeliveryError, match="400"):
        await app.run(order)
    assert len(receiver.requests) == 1


# Hooks


class Diary:
    """Writes down what it is told of events, and how much of it another client could see at that moment."""

    def __init__(self, observer: EddaApp) -> None:
        self.sent: list[tuple[str, str, Any]] = []
        self.received: list[tuple[str, str, Any]] = []
        self.early: list[str] = []
        self._observer = observer

    async def on_event_sent(self, event_type: str, event_source: str, event_data: Any) -> None:
        if not await stored(self._observer, event_type):
            self.early.append("sent")
        self.sent.append((event_type, event_source, event_data))

    async def on_event_received(self, instance_id: str, event_type: str, event_data: Any) -> None:
        if not await self._observer.handle(instance_id).history():
            self.early.append("received")
        self.received.append((instance_id, event_type, event_data))

    def __getattr__(self, hook: str) -> Callable[..., Any]:
        if not hook.startswith("on_"):
            raise AttributeError(hook)

        async def ignore(*_: Any) -> None:
            return None

        return ignore


async def test_hooks_are_told_once_of_what_was_sent_and_received(make_app: MakeApp) -> None:
    diary: Any = Diary(await make_app(worker=False))
    app = await make_app(hooks=diary)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid")
        await send_event("shipped", "/shop", [1])
        await sleep(ctx, 0.01)

    run_id = await start_waiting(app, order)
    await send(app, "paid", {"n": 1})
    await result_of(app, run_id)
    await app.shutdown()
    assert diary.sent == [("paid", "/tests", {"n": 1}), ("shipped", "/shop", [1])]
    assert diary.received == [(run_id, "paid", {"n": 1})]
    assert diary.early == []
