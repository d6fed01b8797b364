"""Sagas that are cancelled or time out, before undoing and while it goes on."""

from __future__ import annotations

import asyncio

import pytest

from edda import (
    EddaApp,
    RetryPolicy,
    RunStatus,
    WorkflowCancelledError,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    register_compensation,
    sleep,
    wait_event,
    workflow,
)
from edda.core.model import EntryKind
from edda.errors import WorkflowTimeoutError

from .compensated_activity import SOON, bookings, order_with_slow_refund
from .conditions import until_status
from .events import result_of, start_waiting
from .histories import kinds_in, until_recorded


async def test_a_cancel_while_undoing_is_recorded_and_moves_nothing(app: EddaApp) -> None:
    log: list[str] = []
    begun, go = asyncio.Event(), asyncio.Event()
    order = order_with_slow_refund(log, begun, go)

    run_id = await app.start(order)
    await begun.wait()
    assert await app.cancel(run_id)
    await until_recorded(app, run_id, EntryKind.CANCEL)
    go.set()
    with pytest.raises(ValueError, match="sold out"):
        await result_of(app, run_id)
    assert log == ["book flight", "refund", "unbook flight"]
    assert await app.handle(run_id).status() is RunStatus.FAILED


async def test_a_cancel_while_undoing_waits_for_a_branch_changes_nothing(app: EddaApp) -> None:
    """The run has failed already, and an effect that is under way is waited for."""
    undone: list[str] = []
    begun, go = asyncio.Event(), asyncio.Event()

    @compensation
    async def unbook(ctx: WorkflowContext, result: str) -> None:
        undone.append(result)

    @activity
    @on_failure(unbook)
    async def book(ctx: WorkflowContext) -> str:
        begun.set()
        await go.wait()
        return "seat 7"

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        async def fail() -> None:
            await ctx.step("until begun", begun.wait)
            raise ValueError("no car")

        await asyncio.gather(book(ctx), fail())

    run_id = await app.start(trip)
    await until_status(app, run_id, RunStatus.COMPENSATING)
    await app.cancel(run_id)
    await until_recorded(app, run_id, EntryKind.CANCEL)
    go.set()
    with pytest.raises(ValueError, match="no car"):
        await result_of(app, run_id)
    assert undone == ["seat 7"]
    assert await app.handle(run_id).status() is RunStatus.FAILED


async def test_a_deadline_that_passes_while_undoing_changes_nothing(app: EddaApp) -> None:
    @compensation(retry_policy=RetryPolicy(initial_interval=0.2))
    async def refund(ctx: WorkflowContext) -> None:
        if ctx.attempt < 2:
            raise ConnectionError("later")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        register_compensation(ctx, refund)
        raise ValueError("sold out")

    run_id = await app.start(order.options(timeout=0.1))
    with pytest.raises(ValueError, match="sold out"):
        await result_of(app, run_id)
    assert EntryKind.TIMEOUT not in await kinds_in(app, run_id)


async def test_a_cancel_that_the_workflow_turns_into_a_failure_is_undone(app: EddaApp) -> None:
    undone: list[str] = []

    async def undo(ctx: WorkflowContext, what: str) -> None:
        undone.append(what)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        register_compensation(ctx, undo, "order")
        try:
            await wait_event(ctx, "paid")
        except asyncio.CancelledError:
            register_compensation(ctx, undo, "cleanup")
            if not ctx.is_unwinding:
                await sleep(ctx, 0.01)
            raise ValueError("half packed") from None

    run_id = await start_waiting(app, order)
    await app.cancel(run_id)
    with pytest.raises(ValueError, match="half packed"):
        await result_of(app, run_id)
    assert undone == ["cleanup", "order"]


async def test_a_cancel_that_the_workflow_handles_undoes_nothing(app: EddaApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @workflow
    async def trip(ctx: WorkflowContext) -> str:
        await book(ctx, "flight")
        try:
            await wait_event(ctx, "paid")
        except asyncio.CancelledError:
            if ctx.is_unwinding:
                raise
            await sleep(ctx, 0.01)
        return "went all the same"

    run_id = await start_waiting(app, trip)
    await app.cancel(run_id)
    assert await result_of(app, run_id) == "went all the same"
    assert log == ["book flight"]


async def test_a_cancelled_run_is_undone_and_has_been_cancelled(app: EddaApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        await wait_event(ctx, "paid")

    run_id = await start_waiting(app, trip)
    await app.cancel(run_id, "changed my mind")
    with pytest.raises(WorkflowCancelledError, match="changed my mind"):
        await result_of(app, run_id)
    assert log == ["book flight", "unbook flight"]
    assert await app.handle(run_id).status() is RunStatus.CANCELLED


async def test_a_run_over_its_time_is_undone_without_a_limit_of_time(app: EddaApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @compensation(retry_policy=SOON)
    async def refund(ctx: WorkflowContext) -> None:
        if ctx.attempt < 2:
            raise ConnectionError("later")
        log.append("refund")

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        register_compensation(ctx, refund)
        await sleep(ctx, 3600)

    with pytest.raises(WorkflowTimeoutError):
        await app.run(trip.options(timeout=1.0))
    assert log == ["book flight", "refund", "unbook flight"]
