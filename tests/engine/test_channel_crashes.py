"""Processes that die while messages are under way: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from edda import (
    EddaApp,
    First,
    MessageTimeoutError,
    WorkflowContext,
    activity,
    publish,
    receive,
    send_to,
    sleep,
    subscribe,
    wait_any,
    wait_event,
    workflow,
)
from edda.core.model import AcceptResult, EntryKind, NewEvent
from edda.workflow.workflow import registry

from .conditions import PATIENCE
from .conftest import MakeApp
from .events import result_of, send, until_waiting_for
from .histories import generation_of, until_recorded
from .messages import (
    LISTENERS,
    Held,
    hear,
    is_end,
    is_received,
    is_recur,
    is_timeout,
    kill,
    logged,
    publish_all,
    run,
    start_receiving,
    until_logged,
)

SHORT = 0.05


@workflow(name="take_and_crash")
async def take(ctx: WorkflowContext, count: int) -> list[Any]:
    await subscribe(ctx, "jobs", "competing")
    return [(await receive(ctx, "jobs")).data for _ in range(count)]


@workflow
async def read_mail(ctx: WorkflowContext, count: int) -> list[Any]:
    return [(await receive(ctx, "__direct__")).data for _ in range(count)]


@pytest.fixture(autouse=True)
def listeners(empty_registry: None) -> None:
    for one in (*LISTENERS, take, read_mail):
        registry.add(one)


async def forward_nothing() -> bool:
    await asyncio.Event().wait()
    return False


def stop_forwarding(app: EddaApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.engine.staging, "move_batch", forward_nothing)


# Whoever receives dies


async def test_messages_for_a_subscriber_whose_process_is_gone_wait_for_the_next(make_app: MakeApp) -> None:
    door = await make_app(worker=False)
    first = await make_app()
    run_id = await start_receiving(first, hear, "news", 6)
    for number in range(3):
        await publish(door, "news", number)
    await until_waiting_for(door, run_id, "news:4")
    await kill(first, door)
    await publish_all(door, "news", 3, 4, 5)
    second = await make_app()
    assert await result_of(second, run_id) == list(range(6))


async def test_a_subscription_survives_a_crash_before_the_first_receive(make_app: MakeApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "news")
        await wait_event(ctx, "go")
        return [(await receive(ctx, "news")).data for _ in range(2)]

    door = await make_app(worker=False)
    await publish(door, "news", "before")
    first = await make_app()
    run_id = await first.start(listen)
    await until_waiting_for(door, run_id, "go:1")
    await kill(first, door)
    await publish_all(door, "news", 1, 2)
    await send(door, "go")
    second = await make_app()
    assert await result_of(second, run_id) == [1, 2]


@pytest.mark.parametrize("consumer", ["broadcast", "competing", "direct"])
async def test_a_message_that_was_taken_but_not_recorded_is_received_after_the_crash(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, consumer: str
) -> None:
    door = await make_app(worker=False)
    first = await make_app()
    match consumer:
        case "broadcast":
            run_id = await start_receiving(first, hear, "jobs", 2)
        case "competing":
            run_id = await start_receiving(first, take, 2)
        case _:
            run_id = await start_receiving(first, read_mail, 2)

    async def write(data: Any) -> None:
        await (send_to(door, run_id, data) if consumer == "direct" else publish(door, "jobs", data))

    held = Held(first, monkeypatch, is_received)
    await write(1)
    await held.reached()
    await kill(first, door)
    await write(2)
    second = await make_app()
    assert await result_of(second, run_id) == [1, 2]


async def test_a_message_that_went_back_survives_the_crash_of_who_gave_it_back(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def impatient(ctx: WorkflowContext) -> None:
        await subscribe(ctx, "jobs", "competing")
        with pytest.raises(MessageTimeoutError):
            await receive(ctx, "jobs", SHORT)
        await wait_event(ctx, "never")

    door = await make_app(worker=False)
    first = await make_app()
    stop_forwarding(first, monkeypatch)
    held = Held(first, monkeypatch, is_timeout)
    loser = await first.start(impatient)
    await held.reached()
    await publish(door, "jobs", "work")
    held.let_go()
    await until_recorded(door, loser, EntryKind.LATE_EVENT)
    await kill(first, door)
    second = await make_app()
    assert await run(second, take, 1) == ["work"]


async def test_a_run_that_dies_while_it_ends_gives_its_message_back_all_the_same(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def hasty(ctx: WorkflowContext) -> Any:
        await subscribe(ctx, "jobs", "competing")
        first: First[Any] = await wait_any(ctx, job=receive(ctx, "jobs"), go=wait_event(ctx, "go"))
        return first.name

    door = await make_app(worker=False)
    first = await make_app()
    held = Held(first, monkeypatch, is_end)
    run_id = await start_receiving(first, hasty)
    await until_waiting_for(door, run_id, "go:1", "jobs:1")
    await send(door, "go")
    await held.reached()
    await publish(door, "jobs", "work")
    await kill(first, door)
    second = await make_app()
    name = await result_of(second, run_id)
    left = [] if name == "job" else await run(second, take, 1)
    assert (name, left) in [("job", []), ("go", ["work"])]


@pytest.mark.parametrize("mode", ["broadcast", "competing", "direct"])
async def test_a_consumer_that_begins_anew_after_every_message_gets_all_of_them_through_every_crash(
    make_app: MakeApp, mode: Any
) -> None:
    @workflow
    async def listen(ctx: WorkflowContext, got: list[int]) -> list[int]:
        await subscribe(ctx, "news", mode)
        got.append((await receive(ctx, "news")).data)
        if len(got) < 9:
            await ctx.recur(got)
        return got

    door = await make_app(worker=False)
    app = await make_app()
    run_id = await start_receiving(app, listen, [])
    for number in range(9):
        await publish(door, "news", number, target_instance_id=run_id if mode == "direct" else None)
        if number % 3 == 2:
            await kill(app, door)
            app = await make_app()
    assert await result_of(app, run_id) == list(range(9))
    assert await generation_of(app, run_id) == 8


async def test_a_message_that_came_while_a_generation_was_written_survives_the_crash(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def listen(ctx: WorkflowContext, got: list[Any] | None = None) -> list[Any]:
        await subscribe(ctx, "jobs", "competing")
        if got is None:
            first: First[Any] = await wait_any(ctx, job=receive(ctx, "jobs"), late=sleep(ctx, SHORT))
            await ctx.recur([first.value.data] if first.name == "job" else [])
        while len(got) < 2:
            got.append((await receive(ctx, "jobs")).data)
        return got

    door = await make_app(worker=False)
    first = await make_app()
    held = Held(first, monkeypatch, is_recur)
    run_id = await first.start(listen)
    await held.reached()
    await publish_all(door, "jobs", 1, 2)
    await kill(first, door)
    second = await make_app()
    assert sorted(await result_of(second, run_id)) == [1, 2]


@pytest.mark.parametrize("mode", ["broadcast", "competing"])
async def test_a_deploy_in_the_middle_of_a_stream_loses_nothing(make_app: MakeApp, mode: Any) -> None:
    """An orderly shutdown, with runs in memory that are just receiving."""

    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "jobs", mode)
        return [(await receive(ctx, "jobs")).data for _ in range(40)]

    door = await make_app(worker=False)
    app = await make_app()
    run_id = await start_receiving(app, listen)
    for number in range(40):
        await publish(door, "jobs", number)
        if number % 10 == 5:
            await app.shutdown()
            app = await make_app()
    assert await result_of(app, run_id) == list(range(40))


# Whoever publishes dies


async def test_what_an_activity_published_before_its_process_died_goes_out_once(make_app: MakeApp) -> None:
    """Its outcome was not recorded, so it runs again."""
    begun = asyncio.Event()
    is_stuck = True

    @activity
    async def tell(ctx: WorkflowContext) -> None:
        await publish(ctx, "news", "hello")
        begun.set()
        if is_stuck:
            await asyncio.Event().wait()

    @workflow
    async def talk(ctx: WorkflowContext) -> None:
        await tell(ctx)

    door = await make_app(worker=False)
    first = await make_app()
    run_id = await first.start(talk)
    await asyncio.wait_for(begun.wait(), PATIENCE)
    assert await logged(door, "news") == []
    is_stuck = False
    await kill(first, door)
    second = await make_app()
    await result_of(second, run_id)
    await until_logged(second, "news", 1)


async def test_what_was_recorded_goes_out_though_the_process_died_before_it_could_forward_it(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    @activity
    async def tell(ctx: WorkflowContext) -> None:
        await publish(ctx, "news", "from an activity")

    @workflow
    async def talk(ctx: WorkflowContext) -> None:
        await publish(ctx, "news", "from a workflow")
        await tell(ctx)

    door = await make_app(worker=False)
    first = await make_app()
    stop_forwarding(first, monkeypatch)
    await run(first, talk)
    assert await logged(door, "news") == []
    await kill(first, door)
    second = await make_app()
    await until_logged(second, "news", 2)
    assert await logged(second, "news") == ["from a workflow", "from an activity"]


async def test_what_was_forwarded_is_not_forwarded_again_though_the_process_died_behind_it(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own answer to itself is lost: the messages are in the log, and out of the table."""
    forwarded = asyncio.Event()

    @workflow
    async def talk(ctx: WorkflowContext) -> None:
        for number in range(3):
            await publish(ctx, "news", number)

    door = await make_app(worker=False)
    first = await make_app()
    accept = first.engine.storage.accept

    async def accept_and_stop(
        post: Sequence[NewEvent], versions: Mapping[str, int], numbers: Sequence[int] = ()
    ) -> AcceptResult | None:
        await accept(post, versions, numbers)
        forwarded.set()
        await asyncio.Event().wait()
        return None

    monkeypatch.setattr(first.engine.storage, "accept", accept_and_stop)
    run_id = await first.start(talk)
    await asyncio.wait_for(forwarded.wait(), PATIENCE)
    await kill(first, door)
    second = await make_app()
    await result_of(second, run_id)
    await until_logged(second, "news", 3)
    await publish(door, "news", 3)
    assert await logged(second, "news") == [0, 1, 2, 3]


async def test_several_processes_forward_what_one_of_them_said_once_and_in_order(make_app: MakeApp) -> None:
    @workflow
    async def talk(ctx: WorkflowContext, name: str) -> None:
        for number in range(20):
            await publish(ctx, "news", [name, number])

    apps = [await make_app() for _ in range(3)]
    run_id = await start_receiving(apps[0], hear, "news", 60)
    for name, app in zip("abc", apps, strict=True):
        await app.start(talk, name)
    got = await result_of(apps[1], run_id)
    for name in "abc":
        assert [number for whose, number in got if whose == name] == list(range(20))


async def test_a_stream_goes_on_through_many_crashes(make_app: MakeApp) -> None:
    """One who talks, one who listens, two who share the work; both their processes die again and again."""

    @workflow
    async def talk(ctx: WorkflowContext, number: int = 0) -> None:
        for _ in range(10):
            await publish(ctx, "jobs", number)
            number += 1
        if number < 30:
            await ctx.recur(number)

    @workflow
    async def listen(ctx: WorkflowContext, got: list[int]) -> list[int]:
        await subscribe(ctx, "jobs")
        got.append((await receive(ctx, "jobs")).data)
        if len(got) < 30:
            await ctx.recur(got)
        return got

    @workflow
    async def work(ctx: WorkflowContext) -> list[int]:
        await subscribe(ctx, "jobs", "competing")
        taken: list[int] = []
        while True:
            try:
                taken.append((await receive(ctx, "jobs", 3)).data)
            except MessageTimeoutError:
                return taken

    door = await make_app(worker=False)
    app = await make_app()
    listener = await start_receiving(app, listen, [])
    workers = [await start_receiving(app, work) for _ in range(2)]
    talker = await app.start(talk)
    for _ in range(4):
        await asyncio.sleep(0.15)
        await kill(app, door)
        app = await make_app()
    await result_of(app, talker)
    assert await result_of(app, listener) == list(range(30))
    taken = [number for run_id in workers for number in await result_of(app, run_id)]
    left = await run(app, take, 30 - len(taken)) if len(taken) < 30 else []
    assert sorted([*taken, *left]) == list(range(30))
