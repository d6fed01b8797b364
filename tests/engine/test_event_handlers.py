"""Starting by event: one run for each event, however often and by whomever it is taken in."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from edda import (
    EddaApp,
    ReceivedEvent,
    RetryPolicy,
    RunStatus,
    WorkflowContext,
    activity,
    wait_event,
    workflow,
)
from edda.cloudevents.event import make
from edda.core.model import EntryKind
from edda.errors import EventError

from .conditions import until
from .conftest import MakeApp
from .events import result_of, send, start_waiting, stored


async def runs_of(app: EddaApp, workflow_name: str) -> list[str]:
    page = await app.find_instances(workflow_name=workflow_name, limit=1000)
    return [found["instance_id"] for found in page["instances"]]


async def until_started(app: EddaApp, workflow_name: str) -> str:
    async def is_there() -> bool:
        return bool(await runs_of(app, workflow_name))

    await until(is_there, f"a run of {workflow_name} is there")
    (run_id,) = await runs_of(app, workflow_name)
    return run_id


async def test_an_event_starts_the_workflow_of_its_type_with_its_data(app: EddaApp) -> None:
    @workflow(event_handler=True, name="order.created")
    async def order(ctx: WorkflowContext, order_id: str, amount: int = 1) -> str:
        return f"{order_id} {amount}"

    await send(app, "order.created", {"order_id": "A", "sender_knows_more": True})
    run_id = await until_started(app, "order.created")
    assert await result_of(app, run_id) == "A 1"


async def test_an_event_starts_one_run_however_often_it_is_sent(make_app: MakeApp) -> None:
    @workflow(event_handler=True)
    async def created(ctx: WorkflowContext, n: int) -> int:
        return n

    apps = [await make_app() for _ in range(2)]
    await asyncio.gather(*(app.send_event("created", "/shop", {"n": n}, id=str(n)) for n in range(5) for app in apps))
    await asyncio.gather(*(app.send_event("created", "/shop", {"n": 9}, id=str(n)) for n in range(5) for app in apps))
    run_ids = await runs_of(apps[0], "created")
    assert len(run_ids) == 5
    assert sorted([await result_of(apps[1], run_id) for run_id in run_ids]) == [0, 1, 2, 3, 4]


async def test_events_of_two_sources_with_one_id_are_two_events(app: EddaApp) -> None:
    @workflow(event_handler=True)
    async def created(ctx: WorkflowContext, n: int) -> int:
        return n

    await app.send_event("created", "/one", {"n": 1}, id="1")
    await app.send_event("created", "/two", {"n": 2}, id="1")
    assert sorted([await result_of(app, run_id) for run_id in await runs_of(app, "created")]) == [1, 2]


class Order(BaseModel):
    order_id: str
    amount: int


@dataclass(frozen=True)
class Line:
    sku: str


async def test_a_handler_takes_the_data_as_a_model_or_the_whole_event(app: EddaApp) -> None:
    @app.on_event("order")
    @workflow
    async def by_model(ctx: WorkflowContext, order: Order) -> str:
        return repr(order)

    @app.on_event("order")
    @workflow
    async def by_event(ctx: WorkflowContext, event: ReceivedEvent[Order]) -> str:
        return f"{event.id} {event.data!r}"

    @app.on_event("lines")
    @workflow
    async def by_list(ctx: WorkflowContext, lines: list[Line]) -> str:
        return repr(lines)

    await send(app, "order", {"order_id": "A", "amount": 1}, id="7")
    await send(app, "lines", [{"sku": "x"}])
    results = {
        name: await result_of(app, await until_started(app, name)) for name in ("by_model", "by_event", "by_list")
    }
    assert results == {
        "by_model": "Order(order_id='A', amount=1)",
        "by_event": "7 Order(order_id='A', amount=1)",
        "by_list": "[Line(sku='x')]",
    }


async def test_functions_are_called_once_for_each_event(app: EddaApp) -> None:
    called: Counter[str] = Counter()

    @app.on_event("paid")
    async def note(event: ReceivedEvent[Any]) -> None:
        called[f"note {event.id} {event.data}"] += 1

    @app.on_event("paid")
    def note_in_a_thread(event: ReceivedEvent[Any]) -> None:
        called[f"thread {event.id} {event.data}"] += 1

    for _ in range(2):
        await send(app, "paid", 5, id="1")
    await until(lambda: called.total() >= 2, "both functions were called")
    await app.handle_cloudevent({"specversion": "1.0", "type": "paid", "source": "/tests", "id": "1"}, wait=True)
    assert called == {"note 1 5": 1, "thread 1 5": 1}


async def test_a_function_that_fails_is_tried_again(make_app: MakeApp) -> None:
    app = await make_app(default_retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=3))
    attempts: list[str] = []

    @app.on_event("paid")
    async def note(event: ReceivedEvent[Any]) -> None:
        attempts.append(event.id)
        if len(attempts) < 3:
            raise ConnectionError("lost")

    event = {"specversion": "1.0", "type": "paid", "source": "/tests", "id": "1"}
    await app.handle_cloudevent(event, wait=True)
    assert attempts == ["1", "1", "1"]


async def test_an_event_from_elsewhere_can_be_waited_for_until_its_runs_end(app: EddaApp) -> None:
    ended: list[Any] = []

    @activity
    async def note(ctx: WorkflowContext, n: int) -> None:
        ended.append(n)

    @workflow(event_handler=True)
    async def created(ctx: WorkflowContext, n: int) -> None:
        await note(ctx, n)

    event = {"specversion": "1.0", "type": "created", "source": "/tests", "id": "1", "data": {"n": 3}}
    await app.handle_cloudevent(event, wait=True)
    assert ended == [3]
    with pytest.raises(TypeError, match="expected a CloudEvent, or its JSON object as a dict, got str"):
        await app.handle_cloudevent("created")


@pytest.mark.parametrize("data", [{"order_id": "A"}, {"order_id": "A", "amount": "much"}, [1], None], ids=str)
async def test_data_that_does_not_fit_is_refused_and_nothing_is_stored(app: EddaApp, data: Any) -> None:
    @workflow(event_handler=True)
    async def created(ctx: WorkflowContext, order_id: str, amount: int) -> None:
        return None

    with pytest.raises(EventError, match="does not fit the workflow") as caught:
        await send(app, "created", data)
    assert (caught.value.status, caught.value.attribute) == (400, "data")
    assert await stored(app, "created") == []
    assert await runs_of(app, "created") == []


async def test_a_post_with_one_bad_event_is_refused_as_a_whole(app: EddaApp) -> None:
    @workflow(event_handler=True)
    async def created(ctx: WorkflowContext, n: int) -> None:
        return None

    events = [make(type="created", source="/tests", id=str(n), data=data) for n, data in enumerate([{"n": 1}, {}])]
    with pytest.raises(EventError):
        await app.receive(events)
    assert await stored(app, "created") == []
    await app.receive(events[:1])
    assert len(await runs_of(app, "created")) == 1


async def test_a_run_does_not_see_the_event_that_started_it_again(app: EddaApp) -> None:
    @workflow(event_handler=True)
    async def part(ctx: WorkflowContext, n: int) -> list[int]:
        return [n, (await wait_event(ctx, "part")).data["n"]]

    await send(app, "part", {"n": 1})
    (first,) = await runs_of(app, "part")
    await send(app, "part", {"n": 2})
    assert await result_of(app, first) == [1, 2]
    second = next(run_id for run_id in await runs_of(app, "part") if run_id != first)
    assert await app.handle(second).status() in {RunStatus.RUNNING, RunStatus.WAITING_FOR_EVENT}


async def test_an_event_wakes_who_waits_and_starts_its_run_at_once(app: EddaApp) -> None:
    @workflow(event_handler=True)
    async def part(ctx: WorkflowContext, n: int) -> str:
        return f"started {n}"

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "part")).data["n"]

    waiting = await start_waiting(app, order)
    await send(app, "part", {"n": 1})
    assert await result_of(app, waiting) == 1
    assert await result_of(app, await until_started(app, "part")) == "started 1"


async def test_a_run_started_in_an_activity_is_started_once_however_often_the_activity_is_tried(app: EddaApp) -> None:
    ids: list[list[str]] = []

    @workflow
    async def child(ctx: WorkflowContext, n: int) -> int:
        return n

    @activity(retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=3))
    async def spread(ctx: WorkflowContext) -> list[str]:
        ids.append([await child.start(n) for n in range(2)])
        if ctx.attempt < 3:
            raise ConnectionError("lost")
        return ids[-1]

    @workflow
    async def parent(ctx: WorkflowContext) -> list[str]:
        return await spread(ctx)

    started = await app.run(parent)
    assert ids == [started] * 3
    assert [await result_of(app, run_id) for run_id in started] == [0, 1]
    assert sorted(await runs_of(app, "child")) == sorted(started)
    kinds = [entry.kind for run_id in await runs_of(app, "parent") for entry in await app.handle(run_id).history()]
    assert kinds == [EntryKind.RETRY, EntryKind.RETRY, EntryKind.STEP]
