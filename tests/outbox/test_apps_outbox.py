"""An app that sends its own outbox."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from edda import EddaApp, WorkflowContext, activity, send_event_transactional, workflow
from edda.cloudevents.event import CloudEvent
from edda.core.codec import Codec
from edda.errors import EventPostponedError
from edda.testing import VirtualApp
from edda.workflow.workflow import registry
from tests.conftest import Database
from tests.engine.conditions import until
from tests.engine.conftest import url_of

from .fakes import ListSink, forever
from .outbox_rows import put, states
from .receiver import receiving


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_workflows", {})


def make_app(database: Database, **options: Any) -> EddaApp:
    return EddaApp("shop", url_of(database), storage=database.storage(), outbox_enabled=True, **options)


class Backwards:
    def seal(self, data: bytes) -> bytes:
        return data[::-1]

    def open(self, data: bytes) -> bytes:
        return data[::-1]


async def test_what_a_run_sends_is_delivered_in_its_order(database: Database) -> None:
    @activity
    async def pack(ctx: WorkflowContext, number: int) -> None:
        await send_event_transactional(ctx, "packed", "/shop", {"number": number}, subject=ctx.instance_id)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        for number in range(4):
            await pack(ctx, number)
        await send_event_transactional(ctx, "shipped", "/shop", {"number": 4}, subject=ctx.instance_id)

    async with receiving() as receiver:
        options: dict[str, Any] = {"broker_url": receiver.url, "codec": Codec(transform=Backwards())}
        async with make_app(database, **options) as app:
            runs = [await app.start(order) for _ in range(5)]
            for run in runs:
                await app.handle(run).result(timeout=30)
            await until(lambda: len(receiver.taken) == 25, "all are sent")
    for run in runs:
        events = [request.event for request in receiver.taken if request.event["subject"] == run]
        assert [event["data"]["number"] for event in events] == [0, 1, 2, 3, 4]
        assert len({event["id"] for event in events}) == 5


async def test_an_app_without_a_worker_sends_too_and_hears_of_others(database: Database) -> None:
    sink = ListSink()
    other = database.storage()
    async with make_app(database, sink=sink, worker=False):
        await other.open()
        await put(other, ["1"])
        await until(lambda: sink.taken == ["1"], "it is sent")
        await other.close()
    assert sink.closed == 1


async def test_an_app_that_stops_hands_back_what_it_could_not_send(database: Database) -> None:
    stuck = ListSink(forever)
    app = make_app(database, sink=stuck)
    await app.initialize()
    await put(app.engine.storage, range(3), key="A")
    await until(lambda: stuck.under_way == 1, "one is under way")
    await app.shutdown(grace=0.1)
    sink = ListSink()
    async with make_app(database, sink=sink):
        await until(lambda: sink.taken == ["0", "1", "2"], "the next sends them, long before the lease", within=10.0)


async def test_an_app_that_dies_leaves_them_to_another(database: Database) -> None:
    stuck = ListSink(forever)
    app = make_app(database, sink=stuck)
    await app.initialize()
    await put(app.engine.storage, ["1"])
    await until(lambda: stuck.under_way == 1, "it is under way")
    app.kill()
    await asyncio.sleep(0)
    storage = database.storage()
    await storage.open()
    assert await states(storage) == {"1": "pending"}
    await storage.close()


async def test_tries_that_fail_take_no_real_time_in_virtual_time() -> None:
    async def fail(event: CloudEvent, attempt: int) -> None:
        if attempt < 12:
            raise EventPostponedError("away")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await send_event_transactional(ctx, "shipped", "/shop")

    sink = ListSink(fail)
    async with VirtualApp(outbox_enabled=True, sink=sink) as app:
        started = app.now()
        await app.run(order)
        await until(lambda: len(sink.taken) == 1, "it is sent")
        assert len(sink.tried) == 12
        assert app.now() - started > timedelta(minutes=2)


def test_an_outbox_without_a_receiver_is_left_to_others_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    EddaApp("shop", "memory://", outbox_enabled=True)
    assert "stores outbox events but sends none" in caplog.text
