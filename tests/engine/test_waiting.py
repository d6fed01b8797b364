"""Waiting for events: found early or late, in order, each once; and what a wait is beside everything else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from edda import (
    EddaApp,
    ReceivedEvent,
    RunStatus,
    WorkflowContext,
    activity,
    sleep,
    wait_event,
    workflow,
)
from edda.core.model import EntryKind
from edda.errors import WorkflowCancelledError
from edda.workflow.context import as_datetime

from .conditions import until_out_of_memory
from .conftest import RESTLESS, MakeApp
from .events import registered, result_of, send, start_waiting, until_waiting_for

OWN_POLL = replace(RESTLESS, poll=60.0)
"""What wakes a run within a minute is news, not a look by the clock."""


async def test_an_event_wakes_the_run_that_waits_for_it(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "paid")).data

    run_id = await start_waiting(app, order)
    await send(app, "paid", {"amount": 7})
    assert await result_of(app, run_id) == {"amount": 7}


async def test_an_event_that_came_before_the_wait_is_found(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        await wait_event(ctx, "go")
        return (await wait_event(ctx, "paid")).data

    run_id = await start_waiting(app, order)
    await send(app, "paid", 7)
    await send(app, "go")
    assert await result_of(app, run_id) == 7


async def test_an_event_from_before_the_run_was_started_is_not_its_own(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "paid")).data

    await send(app, "paid", "before")
    run_id = await start_waiting(app, order)
    await send(app, "paid", "after")
    assert await result_of(app, run_id) == "after"


async def test_events_come_in_their_order_each_once_early_or_late(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        await wait_event(ctx, "go")
        return [(await wait_event(ctx, "part")).data for _ in range(6)]

    run_id = await start_waiting(app, order)
    for number in range(3):
        await send(app, "part", number)
    await send(app, "go")
    await until_waiting_for(app, run_id, "part:4")
    for number in range(3, 6):
        await send(app, "part", number)
    assert await result_of(app, run_id) == [0, 1, 2, 3, 4, 5]


async def test_every_run_that_waits_gets_the_event(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "price")).data

    run_ids = [await start_waiting(app, order) for _ in range(3)]
    await send(app, "price", 9)
    assert [await result_of(app, run_id) for run_id in run_ids] == [9, 9, 9]


async def test_an_event_that_is_sent_again_is_the_same_event(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        return [(await wait_event(ctx, "part")).data for _ in range(2)]

    run_id = await start_waiting(app, order)
    for _ in range(3):
        await send(app, "part", "first", id="1")
    await send(app, "part", "second", id="2")
    assert await result_of(app, run_id) == ["first", "second"]


async def test_branches_that_wait_for_one_type_get_one_event_each(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        events = await asyncio.gather(*(wait_event(ctx, "part") for _ in range(3)))
        return [event.data for event in events]

    run_id = await start_waiting(app, order)
    for number in range(3):
        await send(app, "part", number)
    assert sorted(await result_of(app, run_id)) == [0, 1, 2]


async def test_branches_that_wait_for_one_type_share_out_what_came_before(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        await wait_event(ctx, "go")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(wait_event(ctx, "part")) for _ in range(3)]
        return [task.result().data for task in tasks]

    run_id = await start_waiting(app, order)
    for number in range(3):
        await send(app, "part", number)
    await send(app, "go")
    assert sorted(await result_of(app, run_id)) == [0, 1, 2]


async def test_a_wait_under_asyncio_timeout_leaves_its_event_to_the_next(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        try:
            async with asyncio.timeout(0.05):
                await wait_event(ctx, "paid")
        except TimeoutError:
            await wait_event(ctx, "go")
        return [(await wait_event(ctx, "paid")).data]

    run_id = await app.start(order)
    await until_waiting_for(app, run_id, "go:1")
    await send(app, "paid", 7)
    await send(app, "go")
    assert await result_of(app, run_id) == [7]


async def test_since_now_passes_over_what_came_before_the_wait(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        await wait_event(ctx, "go")
        return (await wait_event(ctx, "price", since="now")).data

    run_id = await start_waiting(app, order)
    await send(app, "price", "old")
    await send(app, "go")
    await until_waiting_for(app, run_id, "price:1")
    await send(app, "price", "new")
    assert await result_of(app, run_id) == "new"


async def test_since_a_moment_finds_events_from_before_the_run(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext, since: Any) -> Any:
        return (await wait_event(ctx, "price", since=since)).data

    await send(app, "price", "too old")
    since = as_datetime(await app.engine.storage.now())
    await send(app, "price", "found")
    await send(app, "price", "later")
    assert await app.run(order, since) == "found"


async def test_the_step_of_a_wait_can_be_named(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid", event_id="payment")
        await wait_event(ctx, "org/paid")

    run_id = await start_waiting(app, order)
    assert await registered(app, run_id) == ["payment"]
    await send(app, "paid")
    await until_waiting_for(app, run_id, "org.paid:1")
    await send(app, "org/paid")
    await result_of(app, run_id)
    history = await app.handle(run_id).history()
    assert [(entry.kind, entry.step, entry.name) for entry in history] == [
        (EntryKind.EVENT, "payment", "paid"),
        (EntryKind.EVENT, "org.paid:1", "org/paid"),
    ]


async def test_a_received_event_is_an_argument_like_any_other(app: EddaApp) -> None:
    @activity
    async def describe(ctx: WorkflowContext, event: ReceivedEvent[Any]) -> str:
        return f"{type(event).__name__} {event.id} {event.subject} {event.data} {event.extensions}"

    @workflow
    async def order(ctx: WorkflowContext) -> tuple[str, ReceivedEvent[Any]]:
        event = await wait_event(ctx, "paid")
        return await describe(ctx, event), event

    run_id = await start_waiting(app, order)
    moment = "2030-01-01T00:00:00Z"
    await send(app, "paid", {"amount": 1}, id="7", subject="A", time=moment, extensions={"priority": 3})
    event = ReceivedEvent({"amount": 1}, "paid", "/tests", "7", moment, "application/json", "A", {"priority": 3})
    said, returned = await app.client.await_result(run_id, tuple[str, ReceivedEvent[Any]], 30)
    assert said == "ReceivedEvent 7 A {'amount': 1} {'priority': 3}"
    assert returned == event


async def test_a_waiting_run_says_what_it_waits_for(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext, order_id: str) -> None:
        await wait_event(ctx, "payment.completed", match={"order_id": order_id})

    run_id = await start_waiting(app, order, "A-17")
    page = await app.find_instances(status="waiting_for_event")
    assert [(found["instance_id"], found["waiting_for"]) for found in page["instances"]] == [
        (run_id, 'payment.completed where order_id = "A-17"')
    ]


async def test_a_run_that_waits_is_not_in_memory(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid")

    await start_waiting(app, order)
    await until_out_of_memory(app)


async def test_a_long_wait_leaves_memory_even_where_short_ones_stay(make_app: MakeApp) -> None:
    app = await make_app(settings=replace(RESTLESS, linger=5.0))

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "paid", timeout_seconds=3600)).data

    run_id = await start_waiting(app, order)
    await until_out_of_memory(app)
    await send(app, "paid", 1)
    assert await result_of(app, run_id) == 1


async def test_hundreds_of_early_events_are_read_without_a_replay_for_each(app: EddaApp) -> None:
    begun: list[int] = []
    amount = 300

    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        begun.append(1)
        await wait_event(ctx, "go")
        return [(await wait_event(ctx, "part")).data for _ in range(amount)]

    run_id = await start_waiting(app, order)
    await asyncio.gather(*(send(app, "part", number) for number in range(amount)))
    await send(app, "go")
    assert await result_of(app, run_id) == list(range(amount))
    assert len(begun) <= 3


async def test_an_event_is_received_while_an_activity_runs_beside_the_wait(app: EddaApp) -> None:
    noted, released = asyncio.Event(), asyncio.Event()

    @activity
    async def pack(ctx: WorkflowContext) -> str:
        await released.wait()
        return "packed"

    @activity
    async def note(ctx: WorkflowContext, data: Any) -> Any:
        noted.set()
        return data

    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        async def paid() -> Any:
            return await note(ctx, (await wait_event(ctx, "paid")).data)

        return list(await asyncio.gather(pack(ctx), paid()))

    run_id = await app.start(order)
    await until_waiting_for(app, run_id, "paid:1/paid:1")
    await send(app, "paid", 7)
    await asyncio.wait_for(noted.wait(), 30)
    released.set()
    assert await result_of(app, run_id) == ["packed", 7]


async def test_a_waiting_run_can_be_cancelled_and_waits_no_more(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid")

    run_id = await start_waiting(app, order)
    assert await app.cancel(run_id, "enough")
    with pytest.raises(WorkflowCancelledError, match="enough"):
        await result_of(app, run_id)
    assert await registered(app, run_id) == []
    await send(app, "paid")
    assert await app.handle(run_id).status() is RunStatus.CANCELLED


async def test_an_event_for_a_run_that_is_over_is_kept_and_harms_nothing(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return "done"

    run_id = await app.start(order)
    await result_of(app, run_id)
    event_id = await send(app, "paid", 1, target_instance_id=run_id)
    assert await app.engine.storage.find_event("/tests", event_id) is not None
    assert await app.handle(run_id).result() == "done"
    assert await app.handle(run_id).history() == ()


async def test_an_event_taken_in_by_one_process_wakes_the_run_of_another_at_once(make_app: MakeApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "paid")).data

    worker = await make_app(settings=OWN_POLL)
    door = await make_app(worker=False)
    run_id = await start_waiting(worker, order)
    await until_out_of_memory(worker)
    await send(door, "paid", 7)
    assert await result_of(door, run_id) == 7


async def test_an_event_taken_in_by_another_process_reaches_a_run_in_memory(make_app: MakeApp) -> None:
    released = asyncio.Event()

    @activity
    async def pack(ctx: WorkflowContext) -> None:
        await released.wait()

    @activity
    async def let_go(ctx: WorkflowContext) -> None:
        released.set()

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        packing = asyncio.create_task(pack(ctx))
        event = await wait_event(ctx, "paid")
        await let_go(ctx)
        await packing
        return event.data

    worker = await make_app(settings=OWN_POLL)
    door = await make_app(worker=False)
    run_id = await worker.start(order)
    await until_waiting_for(worker, run_id, "paid:1")
    await send(door, "paid", 7)
    assert await result_of(worker, run_id) == 7


async def test_a_run_goes_on_waiting_when_its_process_is_gone(make_app: MakeApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        first = await wait_event(ctx, "part")
        await sleep(ctx, 0.01)
        return [first.data, (await wait_event(ctx, "part")).data]

    first = await make_app()
    run_id = await start_waiting(first, order)
    first.kill()
    door = await make_app(worker=False)
    await send(door, "part", 1)
    second = await make_app()
    await until_waiting_for(second, run_id, "part:2")
    await second.shutdown()
    await send(door, "part", 2)
    third = await make_app()
    assert await result_of(third, run_id) == [1, 2]
