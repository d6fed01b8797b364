"""The user's loop may start tasks eagerly (`asyncio.eager_task_factory`, Python 3.12): the engine's own begin later."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from edda import EddaApp, WorkflowContext, activity, wait_event, workflow
from edda.engine.tasks import start_task

from .conftest import MakeApp

MANY = 300
ENGINE = os.sep + os.path.join("edda", "engine") + os.sep


@pytest.fixture
async def eager_loop() -> AsyncIterator[None]:
    factory = getattr(asyncio, "eager_task_factory", None)
    if factory is None:
        pytest.skip("needs Python 3.12")
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    loop.set_task_factory(factory)
    yield
    loop.set_task_factory(before)


@pytest.fixture
async def made_by_factory() -> AsyncIterator[list[str]]:
    """The coroutines of the engine that a factory of the loop's made tasks of: it could have begun them at once."""
    found: list[str] = []
    loop = asyncio.get_running_loop()

    def make(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        code = getattr(coro, "cr_code", None)
        if code is not None and ENGINE in code.co_filename:
            found.append(code.co_qualname)
        return asyncio.Task(coro, loop=loop, **options)

    loop.set_task_factory(make)
    yield found
    loop.set_task_factory(None)


async def test_no_task_of_the_engine_is_made_by_a_factory(make_app: MakeApp, made_by_factory: list[str]) -> None:
    """Stands in for a loop that starts tasks eagerly, on Pythons that have none."""
    app = await make_app()

    @activity
    async def greet(ctx: WorkflowContext, number: int) -> int:
        return number

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        await asyncio.gather(*(greet(ctx, number) for number in range(5)))
        return (await wait_event(ctx, "paid")).id

    run_id = await app.start(order)
    await app.send_event("paid", "/shop", {}, id="paid")
    assert await app.handle(run_id).result(timeout=60) == "paid"
    assert not made_by_factory


@pytest.mark.usefixtures("eager_loop")
async def test_a_task_of_the_engine_begins_later() -> None:
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    task = start_task(work())
    assert not begun
    await task
    assert begun


@pytest.mark.usefixtures("eager_loop")
async def test_many_parallel_steps_on_a_loop_that_starts_tasks_eagerly(make_app: MakeApp) -> None:
    app: EddaApp = await make_app()

    @activity
    async def square(ctx: WorkflowContext, number: int) -> int:
        return number * number

    @workflow
    async def squares(ctx: WorkflowContext) -> int:
        return sum(await asyncio.gather(*(square(ctx, number) for number in range(MANY))))

    assert await asyncio.wait_for(app.run(squares), 60) == sum(number * number for number in range(MANY))


@pytest.mark.usefixtures("eager_loop")
async def test_events_and_children_on_a_loop_that_starts_tasks_eagerly(make_app: MakeApp) -> None:
    app: EddaApp = await make_app()

    @workflow
    async def child(ctx: WorkflowContext, number: int) -> str:
        return (await wait_event(ctx, "paid", match={"number": number})).id

    @workflow
    async def parent(ctx: WorkflowContext) -> list[str]:
        return list(await asyncio.gather(*(child.run(number) for number in range(5))))

    run_id = await app.start(parent)
    for number in range(5):
        await app.send_event("paid", "/shop", {"number": number}, id=f"paid-{number}")
    assert await app.handle(run_id).result(timeout=60) == [f"paid-{number}" for number in range(5)]
