"""A workflow waits for runs that may be there already: by a chosen id, or by a handle."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from edda import EddaApp, RunStatus, WorkflowCancelledError, WorkflowContext, sleep, wait_event, workflow
from edda.core.model import EntryKind
from edda.errors import ArgumentError

from .child_workflows import ShopClosedError, doubling, endless, runs_of
from .conditions import until_status
from .events import result_of, send
from .histories import entries_of, until_born


async def test_what_a_handle_says_in_a_workflow_is_recorded(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> list[Any]:
        handle = wait.handle(await wait.options(id="child").start())
        cancelled = await handle.cancel("enough")
        with suppress(WorkflowCancelledError):
            await handle.result()
        after, again = await handle.status(), await handle.cancel()
        await sleep(ctx, 0.01)
        return [cancelled, after, again]

    run_id = await app.start(parent)
    assert await result_of(app, run_id) == [True, "cancelled", False]
    names = [entry.name for entry in await entries_of(app, run_id, EntryKind.STEP)]
    assert names == ["cancel", "status", "cancel"]


async def test_a_chosen_id_means_the_same_run_for_two_parents(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext, number: int) -> str:
        return f"{number} {await wait.options(id='shared').run()}"

    parents = [await app.start(parent, number) for number in range(3)]
    for run_id in parents:
        await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    await until_born(app, "shared", RunStatus.WAITING_FOR_EVENT)
    await send(app, "go", "on")
    assert [await result_of(app, run_id) for run_id in parents] == ["0 on", "1 on", "2 on"]
    assert await runs_of(app, "endless") == ["shared"]


async def test_a_run_that_somebody_else_started_is_not_cancelled_with_who_waits_for_it(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> str:
        return await wait.options(id="shared").run()

    await app.start(wait.options(id="shared"))
    run_id = await app.start(parent)
    await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    await app.cancel(run_id)
    with pytest.raises(WorkflowCancelledError):
        await result_of(app, run_id)
    await until_born(app, "shared", RunStatus.WAITING_FOR_EVENT)
    await send(app, "go", "on")
    assert await result_of(app, "shared") == "on"


async def test_a_chosen_id_of_a_run_that_has_ended_gives_its_result(app: EddaApp) -> None:
    double = doubling()

    @workflow
    async def parent(ctx: WorkflowContext) -> int:
        return await double.options(id="sum").run(21) + await double.options(id="sum").run(21)

    assert await app.run(double.options(id="sum"), 21) == 42
    assert await app.run(parent) == 84


async def test_a_chosen_id_that_belongs_to_other_arguments_is_an_error(app: EddaApp) -> None:
    double = doubling()

    @workflow
    async def parent(ctx: WorkflowContext) -> list[str]:
        said = []
        for verb in (double.options(id="sum").run, double.options(id="sum").start):
            try:
                await verb(22)
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    await app.run(double.options(id="sum"), 21)
    for said in await app.run(parent):
        assert said.startswith("InstanceConflictError: the id 'sum' belongs to a run of other arguments")


async def test_a_run_cannot_wait_for_itself(app: EddaApp) -> None:
    @workflow
    async def narcissus(ctx: WorkflowContext) -> list[str]:
        said = []
        for wait in (narcissus.handle(ctx.instance_id).result, narcissus.options(id=ctx.instance_id).run):
            try:
                await wait()
            except ArgumentError as error:
                said.append(str(error))
        return said

    run_id = await app.start(narcissus)
    assert await result_of(app, run_id) == [f"run {run_id} waits for its own end: it would wait for ever"] * 2


async def test_a_run_that_does_not_exist_cannot_be_waited_for(app: EddaApp) -> None:
    double = doubling()

    @workflow
    async def parent(ctx: WorkflowContext) -> str:
        try:
            await double.handle("nobody").result()
        except LookupError as error:
            return str(error)
        return ""

    assert "'nobody'" in await app.run(parent)


async def test_a_workflow_waits_for_runs_however_they_end(app: EddaApp) -> None:
    @workflow
    async def ending(ctx: WorkflowContext, how: str) -> str:
        order = (await wait_event(ctx, "end", match={"how": how})).data
        if order["how"] == "fails":
            raise ShopClosedError("come back", until=9)
        return "completed"

    @workflow
    async def watch(ctx: WorkflowContext, run_id: str) -> str:
        try:
            return await ending.handle(run_id).result()
        except ShopClosedError as error:
            return f"failed, {error.until}"
        except WorkflowCancelledError:
            return "cancelled"

    open_runs = [await app.start(ending.options(id=how), how) for how in ("completes", "fails", "is cancelled")]
    watchers = [await app.start(watch, run_id) for run_id in open_runs]
    for run_id in (*open_runs, *watchers):
        status = RunStatus.WAITING_FOR_EVENT if run_id in open_runs else RunStatus.WAITING_FOR_CHILD
        await until_status(app, run_id, status)
    await send(app, "end", {"how": "completes"})
    await send(app, "end", {"how": "fails"})
    await app.cancel("is cancelled")
    told = [await result_of(app, run_id) for run_id in watchers]
    assert told == ["completed", "failed, 9", "cancelled"]
    assert [await app.run(watch, run_id) for run_id in open_runs] == told, "and the same once they have ended"


async def test_waiting_for_a_run_may_end_before_the_run_does(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def watch(ctx: WorkflowContext) -> str:
        try:
            return await wait.handle("other").result(timeout=0.05)
        except TimeoutError as error:
            await sleep(ctx, 0.01)
            return str(error)

    await app.start(wait.options(id="other"))
    assert await app.run(watch) == "run other did not end within 0.05 seconds; it continues"
    await until_status(app, "other", RunStatus.WAITING_FOR_EVENT)


async def test_many_wait_for_one_run(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def watch(ctx: WorkflowContext) -> list[str]:
        handle = wait.handle("other")
        return list(await asyncio.gather(handle.result(), handle.result()))

    await app.start(wait.options(id="other"))
    watchers = [await app.start(watch) for _ in range(5)]
    for run_id in watchers:
        await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    await send(app, "go", "on")
    assert [await result_of(app, run_id) for run_id in watchers] == [["on", "on"]] * 5


async def test_who_begins_to_wait_while_a_run_ends_is_told(app: EddaApp) -> None:
    """A hundred runs end at about the moment when two others ask for it."""

    @workflow
    async def quick(ctx: WorkflowContext, number: int) -> int:
        for _ in range(number % 3):
            await ctx.step("note", int)
        return number

    @workflow
    async def watch(ctx: WorkflowContext, run_id: str) -> int:
        return await quick.handle(run_id).result()

    async def race(number: int) -> None:
        run_id = await app.start(quick, number)
        watchers = [await app.start(watch, run_id) for _ in range(2)]
        assert [await result_of(app, watcher) for watcher in watchers] == [number, number]

    for first in range(0, 100, 25):
        await asyncio.gather(*(race(number) for number in range(first, first + 25)))


async def test_many_parents_start_the_same_children_at_once(app: EddaApp) -> None:
    double = doubling()

    @workflow
    async def parent(ctx: WorkflowContext) -> list[int]:
        return await asyncio.gather(*(double.options(id=f"double {n}").run(n) for n in range(20)))

    parents = await asyncio.gather(*(app.start(parent) for _ in range(10)))
    for run_id in parents:
        assert await result_of(app, run_id) == list(range(0, 40, 2))
    assert len(await runs_of(app, "double")) == 20
