"""Children: a workflow starts others, and waits for them without staying in memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from edda import (
    EddaApp,
    RunStatus,
    WorkflowCancelledError,
    WorkflowContext,
    sleep,
    wait_any,
    wait_event,
    workflow,
)
from edda.core.model import EntryKind
from edda.core.states import ENDED
from edda.engine.settings import Settings
from edda.errors import ArgumentError, ChildDepthError, NotInWorkflowError, PayloadError, WorkflowTimeoutError

from .child_workflows import ShopClosedError, doubling, endless, runs_of
from .conditions import until_out_of_memory, until_status
from .conftest import RESTLESS, MakeApp
from .events import result_of, send
from .histories import entries_of, kinds_in, until_born


@dataclass(frozen=True)
class Parcel:
    number: str
    weight: float


async def test_a_child_gives_its_result_in_its_own_type(app: EddaApp) -> None:
    @workflow
    async def pack(ctx: WorkflowContext, weight: float) -> Parcel:
        await sleep(ctx, 0.01)
        return Parcel("no. 7", weight)

    @workflow
    async def ship(ctx: WorkflowContext) -> bool:
        parcel = await pack.run(2.5)
        await sleep(ctx, 0.01)
        return parcel == Parcel("no. 7", 2.5)

    run_id = await app.start(ship)
    assert await result_of(app, run_id) is True
    assert await kinds_in(app, run_id) == [EntryKind.START, EntryKind.CHILD, EntryKind.TIMER]
    (child,) = await runs_of(app, "pack")
    assert child.startswith("child-")
    assert (await app.client.read_run(child)).parent == run_id


async def test_a_parent_leaves_memory_while_it_waits_for_its_child(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> str:
        return await wait.run()

    run_id = await app.start(parent)
    await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    await until_out_of_memory(app)
    await send(app, "go", "on")
    assert await result_of(app, run_id) == "on"


async def test_a_child_that_fails_raises_its_own_error_in_its_parent(app: EddaApp) -> None:
    @workflow
    async def buy(ctx: WorkflowContext) -> None:
        await sleep(ctx, 0.01)
        raise ShopClosedError("come back", until=9)

    @workflow
    async def errand(ctx: WorkflowContext) -> int:
        try:
            await buy.run()
        except ShopClosedError as error:
            return error.until
        return 0

    assert await app.run(errand) == 9


async def test_a_child_whose_error_nobody_handles_fails_its_parent(app: EddaApp) -> None:
    @workflow
    async def buy(ctx: WorkflowContext) -> None:
        raise ShopClosedError("come back", until=9)

    @workflow
    async def errand(ctx: WorkflowContext) -> None:
        await buy.run()

    with pytest.raises(ShopClosedError, match="come back"):
        await app.run(errand)


async def test_a_child_whose_result_cannot_be_stored_fails_in_its_parent(app: EddaApp) -> None:
    @workflow
    async def child(ctx: WorkflowContext) -> Any:
        return object()

    @workflow
    async def parent(ctx: WorkflowContext) -> str:
        try:
            await child.run()
        except PayloadError as error:
            return str(error)
        return ""

    assert "the result of child" in await app.run(parent)


async def test_a_child_that_somebody_cancels_raises_in_its_parent(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> str:
        try:
            return await wait.options(id="child").run()
        except WorkflowCancelledError as error:
            return str(error)

    run_id = await app.start(parent)
    await until_born(app, "child", RunStatus.WAITING_FOR_EVENT)
    await app.cancel("child", "not today")
    assert await result_of(app, run_id) == "run child was cancelled: not today"


async def test_children_in_a_gather_come_back_in_their_places(app: EddaApp) -> None:
    @workflow
    async def double(ctx: WorkflowContext, number: int) -> int:
        await sleep(ctx, 0.01 * (5 - number))
        return 2 * number

    @workflow
    async def total(ctx: WorkflowContext) -> list[int]:
        return await asyncio.gather(*(double.run(number) for number in range(5)))

    assert await app.run(total) == [0, 2, 4, 6, 8]


async def test_three_hundred_children_at_once(app: EddaApp) -> None:
    double = doubling()

    @workflow
    async def total(ctx: WorkflowContext) -> int:
        return sum(await asyncio.gather(*(double.run(number) for number in range(300))))

    run_id = await app.start(total)
    assert await result_of(app, run_id) == sum(range(0, 600, 2))
    kinds = await kinds_in(app, run_id)
    assert (kinds.count(EntryKind.START), kinds.count(EntryKind.CHILD)) == (300, 300)
    assert len(set(await runs_of(app, "double"))) == 300


async def test_a_failing_child_takes_its_task_group_along(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def fail(ctx: WorkflowContext) -> None:
        raise ValueError("no")

    @workflow
    async def parent(ctx: WorkflowContext) -> list[str]:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(wait.options(id="sibling").run())
                group.create_task(fail.run())
        except ExceptionGroup as errors:
            return [repr(error) for error in errors.exceptions]
        return []

    assert await app.run(parent) == ["ValueError('no')"]
    await until_status(app, "sibling", RunStatus.CANCELLED)


async def test_the_slower_child_of_a_race_is_cancelled(app: EddaApp) -> None:
    wait, double = endless(), doubling()

    @workflow
    async def race(ctx: WorkflowContext) -> Any:
        first: Any = await wait_any(ctx, slow=wait.run(), fast=double.run(21))
        return [first.name, first.value]

    assert await app.run(race) == ["fast", 42]
    (slow,) = await runs_of(app, "endless")
    await until_status(app, slow, RunStatus.CANCELLED)


async def test_a_child_over_its_parents_patience_is_cancelled(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def impatient(ctx: WorkflowContext) -> str:
        try:
            async with asyncio.timeout(0.05):
                return await wait.run()
        except TimeoutError:
            await sleep(ctx, 0.01)
            return "gave up"

    assert await app.run(impatient) == "gave up"
    (child,) = await runs_of(app, "endless")
    await until_status(app, child, RunStatus.CANCELLED)
    with pytest.raises(WorkflowCancelledError, match="the run that started it was cancelled"):
        await result_of(app, child)


async def test_a_child_that_was_started_goes_on_beside_its_parent(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> str:
        child = await wait.start()
        await sleep(ctx, 0.01)
        return child

    run_id = await app.start(parent)
    child = await result_of(app, run_id)
    assert await runs_of(app, "endless") == [child]
    await until_status(app, child, RunStatus.WAITING_FOR_EVENT)
    await send(app, "go", "on")
    assert await result_of(app, child) == "on"


async def test_a_child_is_started_first_and_waited_for_later(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> list[str]:
        child = await wait.start()
        before = await wait.handle(child).status()
        await wait_event(ctx, "now")
        result = await wait.handle(child).result()
        await sleep(ctx, 0.01)
        return ["ended" if before in ENDED else "open", result]

    run_id = await app.start(parent)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await send(app, "now")
    await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    await send(app, "go", "on")
    assert await result_of(app, run_id) == ["open", "on"]


async def test_a_child_that_recurs_gives_the_result_of_its_last_generation(app: EddaApp) -> None:
    @workflow
    async def count(ctx: WorkflowContext, number: int = 0) -> int:
        await sleep(ctx, 0.01)
        if number < 3:
            await ctx.recur(number + 1)
        return number

    @workflow
    async def parent(ctx: WorkflowContext) -> list[int]:
        started = await count.options(id="count").start()
        return [await count.run(), await count.handle(started).result()]

    assert await app.run(parent) == [3, 3]


async def test_the_late_end_of_an_earlier_generations_child_moves_nothing(app: EddaApp) -> None:
    """Both generations wait for a child under the same step, and the first one's end comes in the second."""

    @workflow
    async def stubborn(ctx: WorkflowContext, generation: int) -> str:
        try:
            await wait_event(ctx, "never")
        except asyncio.CancelledError:
            if ctx.is_unwinding:
                raise
        return f"child of generation {generation}: {(await wait_event(ctx, f'go{generation}')).data}"

    @workflow
    async def parent(ctx: WorkflowContext, generation: int = 0) -> str:
        child = asyncio.create_task(stubborn.options(id=f"child{generation}").run(generation))
        if generation == 0:
            await wait_event(ctx, "recur")
            await ctx.recur(1)
        return await child

    run_id = await app.start(parent)
    await until_born(app, "child0", RunStatus.WAITING_FOR_EVENT)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await send(app, "recur")
    await until_born(app, "child1", RunStatus.WAITING_FOR_EVENT)
    await send(app, "go0", "late")
    assert await result_of(app, "child0") == "child of generation 0: late"
    await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    await app.cancel("child1")
    await send(app, "go1", "in time")
    assert await result_of(app, run_id) == "child of generation 1: in time"
    (late,) = await entries_of(app, run_id, EntryKind.LATE)
    assert late.name == "child0"


async def test_children_of_children_end_somewhere(make_app: MakeApp) -> None:
    app = await make_app(settings=Settings(child_depth=3))

    @workflow
    async def deeper(ctx: WorkflowContext) -> str:
        return await deeper.run()

    with pytest.raises(ChildDepthError, match="3 times over"):
        await app.run(deeper)
    assert len(await runs_of(app, "deeper")) == 4


async def test_a_child_with_a_chosen_id_has_its_depth_too(make_app: MakeApp) -> None:
    app = await make_app(settings=Settings(child_depth=3))

    @workflow
    async def deeper(ctx: WorkflowContext, level: int = 0) -> str:
        return await deeper.options(id=f"level {level + 1}").run(level + 1)

    with pytest.raises(ChildDepthError, match="3 times over"):
        await app.run(deeper)
    assert len(await runs_of(app, "deeper")) == 4


async def test_a_child_begins_after_its_delay(app: EddaApp) -> None:
    @workflow
    async def child(ctx: WorkflowContext) -> None:
        await sleep(ctx, 0.001)

    @workflow
    async def parent(ctx: WorkflowContext) -> float:
        begun = ctx.now()
        await child.options(delay=0.2).run()
        return (ctx.now() - begun).total_seconds()

    assert await app.run(parent) >= 0.2


async def test_a_child_over_its_own_time_raises_in_its_parent(app: EddaApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> str:
        try:
            return await wait.options(timeout=0.1).run()
        except WorkflowTimeoutError:
            return "the child took too long"

    assert await app.run(parent) == "the child took too long"


async def test_arguments_of_a_child_are_checked_where_it_is_called(app: EddaApp) -> None:
    double = doubling()

    @workflow
    async def parent(ctx: WorkflowContext) -> int:
        refused = 0
        for arguments in ((), ("many",), (1, 2)):
            for verb in (double.run, double.start):
                try:
                    verb(*arguments)
                except ArgumentError:
                    refused += 1
        return refused

    run_id = await app.start(parent)
    assert await result_of(app, run_id) == 6
    assert await runs_of(app, "double") == []
    assert await kinds_in(app, run_id) == []


async def test_starting_through_an_app_in_a_workflow_is_a_clear_error(app: EddaApp) -> None:
    double = doubling()

    @workflow
    async def parent(ctx: WorkflowContext) -> None:
        await app.start(double, 1)

    with pytest.raises(NotInWorkflowError, match=r"use double\.start\(\.\.\.\) or double\.run"):
        await app.run(parent)
    assert await runs_of(app, "double") == []


async def test_children_go_on_in_another_process_after_a_restart(make_app: MakeApp) -> None:
    wait = endless()

    @workflow
    async def parent(ctx: WorkflowContext) -> list[str]:
        return list(await asyncio.gather(wait.run(), wait.options(id="chosen").run()))

    first = await make_app()
    run_id = await first.start(parent)
    await until_status(first, run_id, RunStatus.WAITING_FOR_CHILD)
    await until_born(first, "chosen", RunStatus.WAITING_FOR_EVENT)
    await first.shutdown()
    second = await make_app()
    await send(second, "go", "on")
    assert await result_of(second, run_id) == ["on", "on"]
    assert len(await runs_of(second, "endless")) == 2


async def test_a_child_of_an_unknown_workflow_waits_for_a_process_that_knows_it(make_app: MakeApp) -> None:
    double = doubling()

    @workflow
    async def parent(ctx: WorkflowContext) -> int:
        return await double.run(21)

    first = await make_app(workflows=[parent])
    run_id = await first.start(parent)
    await until_status(first, run_id, RunStatus.WAITING_FOR_CHILD)
    await make_app(workflows=[double], settings=RESTLESS)
    assert await result_of(first, run_id) == 42
