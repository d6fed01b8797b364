"""The first of several waits wins, and the others take nothing with them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edda import EddaApp, EventTimeoutError, First, WorkflowContext, activity, sleep, wait_any, wait_event, workflow
from edda.testing import VirtualApp

from .events import registered, result_of, send, start_waiting, until_waiting_for


async def test_the_first_event_wins_and_is_named(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> tuple[Any, Any]:
        first = await wait_any(ctx, wait_event(ctx, "paid"), cancelled=wait_event(ctx, "cancelled"))
        await sleep(ctx, 0.01)
        assert isinstance(first, First)
        return first.name, first.value.data

    named = await start_waiting(app, order)
    await send(app, "cancelled", 1)
    assert await result_of(app, named) == ("cancelled", 1)
    placed = await start_waiting(app, order)
    await send(app, "paid", 2)
    assert await result_of(app, placed) == (0, 2)


async def test_a_timer_wins_when_no_event_comes(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        first: First[Any] = await wait_any(ctx, paid=wait_event(ctx, "paid"), late=sleep(ctx, 0.05))
        return first.name

    run_id = await app.start(order)
    assert await result_of(app, run_id) == "late"
    assert await registered(app, run_id) == []


async def test_an_event_wins_against_a_timer_which_is_then_no_more(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        first: First[Any] = await wait_any(ctx, paid=wait_event(ctx, "paid"), late=sleep(ctx, 3600))
        return [first.name, first.value.data]

    run_id = await start_waiting(app, order)
    await send(app, "paid", 7)
    assert await result_of(app, run_id) == ["paid", 7]


async def test_the_event_of_a_loser_is_found_by_the_next_wait(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        first = await wait_any(ctx, a=wait_event(ctx, "a"), b=wait_event(ctx, "b"))
        other = "b" if first.name == "a" else "a"
        await wait_event(ctx, "go")
        return [first.name, (await wait_event(ctx, other)).data]

    run_id = await start_waiting(app, order)
    await send(app, "a", 1)
    await until_waiting_for(app, run_id, "go:1")
    await send(app, "b", 2)
    await send(app, "go")
    assert await result_of(app, run_id) == ["a", 2]


async def test_of_events_that_came_before_the_losers_are_left_for_later(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        await wait_event(ctx, "go")
        first = await wait_any(ctx, *(wait_event(ctx, name) for name in "abc"))
        rest = [(await wait_event(ctx, name)).data for place, name in enumerate("abc") if place != first.name]
        return [first.value.data, *rest]

    run_id = await start_waiting(app, order)
    for name in "cba":
        await send(app, name, name)
    await send(app, "go")
    assert sorted(await result_of(app, run_id)) == ["a", "b", "c"]


async def test_two_waits_for_one_type_race_and_one_event_is_taken_once(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        first = await wait_any(ctx, wait_event(ctx, "part"), wait_event(ctx, "part"))
        return [first.value.data, (await wait_event(ctx, "part")).data]

    run_id = await start_waiting(app, order)
    await send(app, "part", 1)
    await send(app, "part", 2)
    assert await result_of(app, run_id) == [1, 2]


async def test_a_loop_over_a_race_misses_nothing(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> dict[str, list[int]]:
        got: dict[str, list[int]] = {"a": [], "b": []}
        for _ in range(20):
            first: First[Any] = await wait_any(ctx, a=wait_event(ctx, "a"), b=wait_event(ctx, "b"))
            got[str(first.name)].append(first.value.data)
        return got

    run_id = await start_waiting(app, order)
    await asyncio.gather(*(send(app, name, number) for number in range(10) for name in "ab"))
    assert await result_of(app, run_id) == {"a": list(range(10)), "b": list(range(10))}


async def test_an_activity_can_win_and_the_wait_is_released(app: EddaApp) -> None:
    @activity
    async def ask(ctx: WorkflowContext) -> str:
        return "answer"

    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        first: First[Any] = await wait_any(ctx, event=wait_event(ctx, "paid"), call=ask(ctx))
        await wait_event(ctx, "go")
        return [first.name, first.value, (await wait_event(ctx, "paid")).data]

    run_id = await start_waiting(app, order)
    await until_waiting_for(app, run_id, "go:1")
    await send(app, "paid", 7)
    await send(app, "go")
    assert await result_of(app, run_id) == ["call", "answer", 7]


async def test_the_error_of_the_first_is_raised(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> str:
        try:
            await wait_any(ctx, wait_event(ctx, "paid", 0.05), wait_event(ctx, "cancelled"))
        except EventTimeoutError as error:
            return str(error)
        return "no error"

    assert "paid" in await app.run(order)


async def test_a_cancelled_race_releases_all_its_waits(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        try:
            async with asyncio.timeout(0.05):
                await wait_any(ctx, wait_event(ctx, "a"), wait_event(ctx, "b"))
        except TimeoutError:
            await wait_event(ctx, "go")
        return [(await wait_event(ctx, name)).data for name in "ab"]

    run_id = await app.start(order)
    await until_waiting_for(app, run_id, "go:1")
    await send(app, "a", 1)
    await send(app, "b", 2)
    await send(app, "go")
    assert await result_of(app, run_id) == [1, 2]


async def test_races_can_be_nested(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        inner = wait_any(ctx, a=wait_event(ctx, "a"), b=wait_event(ctx, "b"))
        first: First[Any] = await wait_any(ctx, inner=inner, c=wait_event(ctx, "c"))
        return [first.name, first.value.name, first.value.value.data]

    run_id = await start_waiting(app, order)
    await send(app, "b", 7)
    assert await result_of(app, run_id) == ["inner", "b", 7]


async def test_a_race_of_nothing_is_refused(edda_app: VirtualApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> str:
        with pytest.raises(TypeError, match="at least one wait") as caught:
            await wait_any(ctx)
        return type(caught.value).__name__

    assert await edda_app.run(order) == "TypeError"
