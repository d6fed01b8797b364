"""Children go with the workflow that started them, unless they are detached."""

from __future__ import annotations

import asyncio

import pytest

from edda import EddaApp, RunStatus, WorkflowCancelledError, WorkflowContext, activity, sleep, wait_event, workflow
from edda.core.states import ENDED
from edda.errors import WorkflowTimeoutError

from .child_workflows import endless, runs_of
from .conditions import until, until_out_of_memory, until_status
from .events import result_of, send
from .histories import until_born


async def test_a_cancel_goes_down_three_levels(app: EddaApp) -> None:
    cleaned: list[int] = []

    @activity
    async def clean(ctx: WorkflowContext, level: int) -> None:
        cleaned.append(level)

    @workflow
    async def level(ctx: WorkflowContext, number: int) -> None:
        try:
            if number == 3:
                await wait_event(ctx, "never")
            else:
                await level.options(id=f"level {number + 1}").run(number + 1)
        finally:
            if not ctx.is_unwinding:
                await clean(ctx, number)

    await app.start(level.options(id="level 0"), 0)
    await until_born(app, "level 3", RunStatus.WAITING_FOR_EVENT)
    for number in range(3):
        await until_born(app, f"level {number}", RunStatus.WAITING_FOR_CHILD)
    await app.cancel("level 0")
    for number in range(4):
        await until_status(app, f"level {number}", RunStatus.CANCELLED)
    assert sorted(cleaned) == [0, 1, 2, 3]


async def test_children_that_were_only_started_are_cancelled_too(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> None:
        await wait.start()
        await wait.options(id="chosen").start()
        await sleep(ctx, 3600)

    run_id = await app.start(parent)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    await app.cancel(run_id)
    for child in await runs_of(app, "endless"):
        await until_status(app, child, RunStatus.CANCELLED)
    assert len(await runs_of(app, "endless")) == 2


async def test_a_parent_over_its_time_takes_its_children_along(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> None:
        await wait.start()
        await wait.run()

    with pytest.raises(WorkflowTimeoutError):
        await app.run(parent.options(timeout=1.0))
    children = await runs_of(app, "endless")
    assert len(children) == 2
    for child in children:
        await until_status(app, child, RunStatus.CANCELLED)


async def test_a_child_that_has_not_begun_is_cancelled_without_any_effect(app: EddaApp) -> None:
    effects: list[int] = []

    @workflow
    async def child(ctx: WorkflowContext) -> None:
        await ctx.step("effect", effects.append, 1)

    @workflow
    async def parent(ctx: WorkflowContext) -> None:
        await child.options(delay=3600).run()

    run_id = await app.start(parent)
    await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    await app.cancel(run_id)
    with pytest.raises(WorkflowCancelledError):
        await result_of(app, run_id)
    (delayed,) = await runs_of(app, "child")
    await until_status(app, delayed, RunStatus.CANCELLED)
    assert effects == []


async def test_no_child_outlives_its_cancelled_parent(app: EddaApp) -> None:
    """The cancel comes at any moment of four ways to start a child."""
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext, number: int) -> None:
        await (wait if number % 2 else wait.options(id=f"started {number}")).start()
        await ctx.step("note", int)
        await asyncio.gather(wait.run(), wait.options(id=f"awaited {number}").run(), ctx.step("note", int))

    async def cancel_in_the_middle(number: int) -> None:
        run_id = await app.start(parent, number)
        await asyncio.sleep(0.0005 * number)  # the point of the race: any moment of its life
        await app.cancel(run_id)
        with pytest.raises(WorkflowCancelledError):
            await result_of(app, run_id)

    async def all_have_ended() -> bool:
        found = (await app.find_instances(workflow_name="endless", limit=1000))["instances"]
        return all(one["status"] in ENDED for one in found)

    await asyncio.gather(*(cancel_in_the_middle(number) for number in range(30)))
    await until(all_have_ended, "no child is open", within=5)


async def test_a_parent_that_fails_leaves_alone_what_it_only_started(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> None:
        await wait.options(id="child").start()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await app.run(parent)
    await until_born(app, "child", RunStatus.WAITING_FOR_EVENT)
    await send(app, "go", "on")
    assert await result_of(app, "child") == "on"


async def test_a_parent_that_was_cancelled_may_use_children_to_clean_up(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> None:
        try:
            await wait_event(ctx, "never")
        finally:
            if not ctx.is_unwinding:
                await wait.options(id="started").start()
                await wait.options(id="awaited").run()

    run_id = await app.start(parent)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await app.cancel(run_id)
    await until_born(app, "awaited", RunStatus.WAITING_FOR_EVENT)
    await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    await until_out_of_memory(app)
    await send(app, "go", "on")
    with pytest.raises(WorkflowCancelledError):
        await result_of(app, run_id)
    assert [await result_of(app, child) for child in ("started", "awaited")] == ["on", "on"]


async def test_detached_children_go_on_without_their_parent(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> None:
        await wait.options(id="started", detached=True).start()
        await wait.options(id="awaited", detached=True).run()

    run_id = await app.start(parent)
    await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    await until_born(app, "awaited", RunStatus.WAITING_FOR_EVENT)
    await app.cancel(run_id)
    with pytest.raises(WorkflowCancelledError):
        await result_of(app, run_id)
    await until_out_of_memory(app)
    await send(app, "go", "on")
    assert [await result_of(app, child) for child in ("started", "awaited")] == ["on", "on"]
