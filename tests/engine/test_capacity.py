"""Runs in memory are limited, but an activity that waits for another run must not keep that run out."""

from __future__ import annotations

import asyncio
import logging

import pytest

from edda import EddaApp, WorkflowContext, activity, workflow
from edda.engine.settings import Settings

from .conditions import until
from .conftest import MakeApp

TWO = Settings(capacity=2, linger=0.0, sweep=0.1, takeover_grace=0.0, call_timeout=30.0)


async def test_activities_that_wait_for_other_runs_do_not_fill_the_worker(make_app: MakeApp) -> None:
    app: EddaApp = await make_app(settings=TWO)

    @activity
    async def shout(ctx: WorkflowContext, word: str) -> str:
        return word.upper()

    @workflow
    async def child(ctx: WorkflowContext, word: str) -> str:
        return await shout(ctx, word)

    @activity
    async def ask_child(ctx: WorkflowContext, word: str) -> str:
        run_id = await child.start(word)
        answer: str = await child.handle(run_id).result()
        return answer

    @workflow
    async def parent(ctx: WorkflowContext, word: str) -> str:
        return await ask_child(ctx, word)

    runs = [await app.start(parent, word) for word in ("a", "b", "c", "d")]
    assert [await app.handle(run_id).result(timeout=60) for run_id in runs] == ["A", "B", "C", "D"]


async def test_they_may_wait_for_runs_that_wait_themselves(make_app: MakeApp) -> None:
    app: EddaApp = await make_app(settings=Settings(capacity=1, linger=0.0, takeover_grace=0.0, call_timeout=30.0))

    @activity
    async def below(ctx: WorkflowContext, depth: int) -> int:
        return 1 + await down.run(depth - 1)

    @workflow
    async def down(ctx: WorkflowContext, depth: int) -> int:
        return 0 if depth == 0 else await below(ctx, depth)

    run_id = await app.start(down, 5)
    assert await app.handle(run_id).result(timeout=60) == 5


async def test_they_may_wait_for_what_another_run_sets(make_app: MakeApp) -> None:
    app: EddaApp = await make_app(settings=Settings(capacity=1, linger=0.0, takeover_grace=0.0, call_timeout=30.0))

    @workflow
    async def speaker(ctx: WorkflowContext) -> None:
        ctx.set("word", "hello")

    @activity
    async def listen(ctx: WorkflowContext) -> str:
        word: str = await speaker.handle(await speaker.start()).wait("word")
        return word

    @workflow
    async def listener(ctx: WorkflowContext) -> str:
        return await listen(ctx)

    run_id = await app.start(listener)
    assert await app.handle(run_id).result(timeout=60) == "hello"


async def test_other_activities_keep_their_places(make_app: MakeApp) -> None:
    app: EddaApp = await make_app(settings=TWO)
    gate, begun = asyncio.Event(), list[int]()

    @activity
    async def stay(ctx: WorkflowContext, number: int) -> None:
        begun.append(number)
        await gate.wait()

    @workflow
    async def long(ctx: WorkflowContext, number: int) -> None:
        await stay(ctx, number)

    runs = [await app.start(long, number) for number in range(5)]
    await until(lambda: len(begun) == 2, "two have begun")
    worker = app.engine.worker
    assert worker is not None
    assert len(worker.live) == 2
    assert not worker.has_capacity
    gate.set()
    for run_id in runs:
        await app.handle(run_id).result(timeout=60)


async def test_a_worker_without_workflows_says_so(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="edda"):
        await make_app(service_name="shop")
        await make_app(service_name="looker", worker=False)
    (record,) = [record for record in caplog.records if "no workflow is registered" in record.getMessage()]
    assert "shop" in record.getMessage()


async def test_starting_what_this_app_does_not_run_is_warned_of_once(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    @workflow
    async def elsewhere(ctx: WorkflowContext) -> None: ...

    @workflow
    async def here(ctx: WorkflowContext) -> None: ...

    app: EddaApp = await make_app(workflows=[here])
    with caplog.at_level(logging.WARNING, logger="edda"):
        for _ in range(20):
            await app.start(elsewhere)
    assert len([record for record in caplog.records if "does not run elsewhere" in record.getMessage()]) == 1
