"""Sagas over several runs: a child is undone before its parent."""

from __future__ import annotations

import asyncio

import pytest

from edda import (
    EddaApp,
    RunStatus,
    WorkflowCancelledError,
    WorkflowContext,
    register_compensation,
    wait_event,
    workflow,
)

from .compensated_activity import bookings
from .conditions import until_status
from .conftest import MakeApp
from .events import result_of, send
from .histories import until_born


async def test_a_child_that_fails_is_undone_before_its_parent(app: EddaApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @workflow
    async def stay(ctx: WorkflowContext) -> None:
        await book(ctx, "hotel")
        raise ValueError("full")

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        await stay.run()

    with pytest.raises(ValueError, match="full"):
        await app.run(trip)
    assert log == ["book flight", "book hotel", "unbook hotel", "unbook flight"]


async def test_a_child_is_undone_before_the_parent_that_is_cancelled(app: EddaApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @workflow
    async def stay(ctx: WorkflowContext) -> None:
        await book(ctx, "hotel")
        await wait_event(ctx, "arrival")

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        await stay.options(id="stay").run()

    run_id = await app.start(trip)
    await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    await until_born(app, "stay", RunStatus.WAITING_FOR_EVENT)
    await app.cancel(run_id)
    with pytest.raises(WorkflowCancelledError):
        await result_of(app, run_id)
    assert log == ["book flight", "book hotel", "unbook hotel", "unbook flight"]
    assert await app.handle("stay").status() is RunStatus.CANCELLED


async def test_a_child_that_a_failing_branch_takes_along_is_undone_before_the_parent(app: EddaApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @workflow
    async def stay(ctx: WorkflowContext) -> None:
        await book(ctx, "hotel")
        await wait_event(ctx, "arrival")

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        async def look_for_a_car() -> None:
            await wait_event(ctx, "sold out")
            raise ValueError("no car")

        await book(ctx, "flight")
        await asyncio.gather(stay.options(id="stay").run(), look_for_a_car())

    run_id = await app.start(trip)
    await until_born(app, "stay", RunStatus.WAITING_FOR_EVENT)
    await send(app, "sold out")
    with pytest.raises(ValueError, match="no car"):
        await result_of(app, run_id)
    assert log == ["book flight", "book hotel", "unbook hotel", "unbook flight"]


async def test_a_parent_waits_over_a_restart_until_its_child_is_undone(make_app: MakeApp) -> None:
    log: list[str] = []
    begun, go = asyncio.Event(), asyncio.Event()
    book = bookings(log)

    async def check_out(ctx: WorkflowContext) -> None:
        begun.set()
        await go.wait()
        log.append("check out")

    @workflow
    async def stay(ctx: WorkflowContext) -> None:
        register_compensation(ctx, check_out)
        await wait_event(ctx, "arrival")

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        await stay.options(id="stay").run()

    first = await make_app()
    run_id = await first.start(trip)
    await until_born(first, "stay", RunStatus.WAITING_FOR_EVENT)
    await until_status(first, run_id, RunStatus.WAITING_FOR_CHILD)
    await first.cancel(run_id)
    await begun.wait()
    await until_status(first, run_id, RunStatus.COMPENSATING)
    assert log == ["book flight"]
    await first.shutdown(grace=0)
    go.set()
    second = await make_app()
    with pytest.raises(WorkflowCancelledError):
        await result_of(second, run_id)
    assert log == ["book flight", "check out", "unbook flight"]
