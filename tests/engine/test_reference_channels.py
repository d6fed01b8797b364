"""What goes wrong in the reference with channels, row by row, and holds here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edda import EddaApp, WorkflowContext, publish, receive, send_to, sleep, subscribe, wait_event, workflow

from .conditions import until_out_of_memory
from .conftest import MakeApp
from .events import registered, result_of, send, until_waiting_for
from .histories import generation_of
from .messages import Held, is_received, kill, publish_all, start_receiving, until_logged


async def test_a_message_published_in_workflow_code_goes_out_once_however_often_it_is_replayed(app: EddaApp) -> None:
    """W12: the run leaves memory and comes back five times behind its publish; there is one message."""
    begun = 0

    @workflow
    async def talk(ctx: WorkflowContext) -> str:
        nonlocal begun
        begun += 1
        message_id = await publish(ctx, "news", {"order": 1})
        for _ in range(5):
            await sleep(ctx, 0.01)
        return message_id

    run_id = await app.start(talk)
    message_id = await result_of(app, run_id)
    assert begun >= 5, "it was replayed"
    await until_logged(app, "news", 1)
    stored = await app.engine.storage.find_event("", message_id)
    assert stored is not None


async def test_a_crash_between_taking_a_message_and_recording_it_loses_nothing(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W29: ten messages, two who compete, and the process dies with one of them in its hand, twice."""

    @workflow
    async def work(ctx: WorkflowContext) -> list[int]:
        await subscribe(ctx, "jobs", "competing")
        return [(await receive(ctx, "jobs")).data for _ in range(5)]

    door = await make_app(worker=False)
    app = await make_app()
    run_ids = [await start_receiving(app, work) for _ in range(2)]
    for number in range(2):
        held = Held(app, monkeypatch, is_received)
        await publish_all(door, "jobs", *range(5 * number, 5 * number + 5))
        await held.reached()
        await kill(app, door)
        app = await make_app()
    taken = await asyncio.gather(*(result_of(app, run_id) for run_id in run_ids))
    assert sorted(number for some in taken for number in some) == list(range(10))


async def test_a_consumer_that_begins_anew_after_each_message_gets_all_of_ten(app: EddaApp) -> None:
    """W30: also those that were published before it came back, in their order."""

    @workflow
    async def consume(ctx: WorkflowContext, got: list[int]) -> list[int]:
        await subscribe(ctx, "news")
        got.append((await receive(ctx, "news")).data)
        if len(got) < 10:
            await ctx.recur(got)
        return got

    run_id = await start_receiving(app, consume, [])
    await publish_all(app, "news", *range(10))
    assert await result_of(app, run_id) == list(range(10))
    assert await generation_of(app, run_id) == 9


@pytest.mark.parametrize("mode", ["broadcast", "competing", "direct"])
async def test_bytes_and_lists_arrive_whether_they_waited_or_were_waited_for(app: EddaApp, mode: Any) -> None:
    """W31: the same data, queued before receive is called and while it waits."""
    data = [b"\xff\x00\x80", b"", [1, [2, b"\x01"], {"a": 3}], "text", {"list": [1, 2]}]

    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "any", mode)
        await wait_event(ctx, "go")
        return [(await receive(ctx, "any")).data for _ in range(2 * len(data))]

    run_id = await app.start(listen)
    await until_waiting_for(app, run_id, "go:1")

    async def tell() -> None:
        for one in data:
            await (send_to(app, run_id, one, "any") if mode == "direct" else publish(app, "any", one))

    await tell()
    await send(app, "go")
    await until_waiting_for(app, run_id, f"any:{len(data) + 1}")
    await until_out_of_memory(app)
    await tell()
    got = await result_of(app, run_id)
    assert got == data + data
    assert [type(one) for one in got] == [type(one) for one in data + data]


async def test_a_finished_subscriber_leaves_nothing_behind_and_locks_no_mode(app: EddaApp) -> None:
    """W33: no row says that it waits, and the next run uses the channel as it likes."""

    @workflow
    async def listen(ctx: WorkflowContext, mode: Any) -> Any:
        await subscribe(ctx, "news", mode)
        return (await receive(ctx, "news")).data

    for mode in ("competing", "direct", "competing", "broadcast", "direct", "broadcast"):
        run_id = await app.start(listen, mode)
        await until_waiting_for(app, run_id, "news:1")
        await publish(app, "news", mode, target_instance_id=run_id if mode == "direct" else None)
        assert await result_of(app, run_id) == mode
        assert await registered(app, run_id) == []


async def test_two_runs_use_one_channel_in_two_modes_at_the_same_time(app: EddaApp) -> None:
    """W33: a mode belongs to a subscription, not to the channel."""

    @workflow
    async def listen(ctx: WorkflowContext, mode: Any) -> Any:
        await subscribe(ctx, "news", mode)
        return (await receive(ctx, "news")).data

    run_ids = [await start_receiving(app, listen, mode) for mode in ("broadcast", "competing")]
    await publish(app, "news", 7)
    assert [await result_of(app, run_id) for run_id in run_ids] == [7, 7]
