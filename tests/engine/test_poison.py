"""A bad run hurts only itself: whatever it raises or returns, the others go on in the same worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from edda import EddaApp, RetryPolicy, RunStatus, WorkflowContext, activity, sleep, workflow
from edda.errors import PayloadTooLargeError
from edda.workflow.workflow import Workflow

from .conditions import until_status
from .conftest import MakeApp

ONCE = RetryPolicy(max_attempts=1)


class Poison(BaseException):
    """Not an Exception: `except Exception` does not catch it."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


POISONS: dict[str, Callable[[], BaseException]] = {
    "base exception": lambda: Poison("drink me"),
    "system exit": lambda: SystemExit(3),
    "generator exit": GeneratorExit,
    "cancelled": lambda: asyncio.CancelledError("by itself"),
    "stop iteration": StopIteration,
    "stop async iteration": StopAsyncIteration,
    "memory error": MemoryError,
    "unprintable": Unprintable,
    "huge": lambda: ValueError("x" * 3_000_000),
    "group of base exceptions": lambda: BaseExceptionGroup("bad", [Poison("one"), SystemExit(1)]),
    "lone surrogate": lambda: ValueError("\ud800"),
}


@activity
async def work(ctx: WorkflowContext) -> str:
    return "well"


@pytest.fixture
def healthy() -> Workflow[[], str]:
    @workflow
    async def healthy(ctx: WorkflowContext) -> str:
        await sleep(ctx, 0.01)
        return await work(ctx)

    return healthy


async def until_failed(app: EddaApp, run_id: str) -> None:
    """Whatever it failed with, who waits for it gets an Exception and can handle it."""
    outcomes = await asyncio.gather(app.handle(run_id).result(timeout=20), return_exceptions=True)
    assert isinstance(outcomes[0], Exception)
    assert not isinstance(outcomes[0], TimeoutError), f"run {run_id} did not end"


async def test_an_activity_that_raises_poison_ends_only_its_own_run(app: EddaApp, healthy: Workflow[[], str]) -> None:
    worker = app.engine.worker

    @activity(retry_policy=ONCE)
    async def drink(ctx: WorkflowContext, name: str) -> None:
        raise POISONS[name]()

    @workflow
    async def sick(ctx: WorkflowContext, name: str) -> None:
        await drink(ctx, name)

    run_ids = {name: await app.start(sick, name) for name in POISONS}
    for name, run_id in run_ids.items():
        await until_failed(app, run_id)
        assert await app.handle(run_id).status() is RunStatus.FAILED, name
    assert await app.run(healthy) == "well"
    assert app.engine.worker is worker, "the worker lives on"


async def test_a_workflow_that_raises_poison_ends_only_itself(app: EddaApp, healthy: Workflow[[], str]) -> None:
    worker = app.engine.worker

    @workflow
    async def sick(ctx: WorkflowContext, name: str) -> None:
        await sleep(ctx, 0.01)
        raise POISONS[name]()

    run_ids = {name: await app.start(sick, name) for name in POISONS}
    for name, run_id in run_ids.items():
        await until_failed(app, run_id)
        ended = await app.handle(run_id).status()
        assert ended is (RunStatus.CANCELLED if name == "cancelled" else RunStatus.FAILED), name
    assert await app.run(healthy) == "well"
    assert app.engine.worker is worker, "the worker lives on"


async def test_a_sync_activity_that_exits_ends_only_its_own_run(app: EddaApp, healthy: Workflow[[], str]) -> None:
    @activity(retry_policy=ONCE)
    def leave(ctx: WorkflowContext) -> None:
        raise SystemExit(1)

    @workflow
    async def sick(ctx: WorkflowContext) -> None:
        await leave(ctx)

    with pytest.raises(Exception, match="SystemExit"):
        await app.run(sick)
    assert await app.run(healthy) == "well"


async def test_a_huge_result_fails_its_step_and_says_what_is_too_large(
    app: EddaApp, healthy: Workflow[[], str]
) -> None:
    effects: list[int] = []

    @activity
    async def load(ctx: WorkflowContext) -> dict[str, Any]:
        effects.append(1)
        return {"small": 1, "blob": "x" * 5_000_000}

    @workflow
    async def sick(ctx: WorkflowContext) -> None:
        await load(ctx)

    with pytest.raises((PayloadTooLargeError, ValueError), match=r"load:1.*blob"):
        await app.run(sick)
    assert effects == [1]
    assert await app.run(healthy) == "well"


async def test_a_huge_argument_is_refused_at_the_call(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext, blob: str) -> None: ...

    with pytest.raises(PayloadTooLargeError, match="blob"):
        await app.start(order, "x" * 5_000_000)


async def test_large_values_that_are_allowed_come_back_whole(app: EddaApp) -> None:
    @activity
    async def load(ctx: WorkflowContext) -> str:
        return "é" * 400_000

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        blob = await load(ctx)
        await sleep(ctx, 0.01)
        return len(blob)

    assert await app.run(order) == 400_000


async def test_a_body_that_hogs_the_processor_stops_nobody_for_good(app: EddaApp, healthy: Workflow[[], str]) -> None:
    @activity
    async def hog(ctx: WorkflowContext) -> str:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass
        return "hogged"

    @workflow
    async def busy(ctx: WorkflowContext) -> str:
        return await hog(ctx)

    found = await asyncio.gather(app.run(busy), app.run(healthy), app.run(busy), app.run(healthy))
    assert [*found] == ["hogged", "well", "hogged", "well"]


async def test_endless_recursion_fails_the_run(app: EddaApp, healthy: Workflow[[], str]) -> None:
    @workflow
    async def sick(ctx: WorkflowContext) -> None:
        async def deeper() -> None:
            await deeper()

        await deeper()

    with pytest.raises(RecursionError):
        await app.run(sick)
    assert await app.run(healthy) == "well"


async def test_a_run_whose_workflow_is_unknown_stays_until_its_code_comes(
    make_app: MakeApp, healthy: Workflow[[], str]
) -> None:
    @workflow
    async def unknown(ctx: WorkflowContext) -> str:
        return "found"

    client = await make_app(worker=False)
    run_id = await client.start(unknown)
    app = await make_app(workflows=[healthy])
    assert await app.run(healthy) == "well"
    assert await app.handle(run_id).status() is RunStatus.RUNNING
    await make_app(workflows=[unknown])
    await until_status(app, run_id, RunStatus.COMPLETED)
