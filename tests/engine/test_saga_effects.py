"""Sagas whose effects are still on their way, came late, or were hidden by a crash."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edda import (
    ActivityTimeoutError,
    EddaApp,
    RetryPolicy,
    RunStatus,
    WorkflowCancelledError,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    sleep,
    wait_any,
    workflow,
)
from edda.core.model import EntryKind

from .compensated_activity import ONCE, bookings, failure_of
from .conditions import until_out_of_memory, until_status
from .conftest import MakeApp
from .events import result_of
from .histories import entries_of, until_recorded


async def test_branches_that_are_under_way_end_before_anything_is_undone(app: EddaApp) -> None:
    """One branch fails while another one's effect is on its way: it happens, is known, and is undone first."""
    log: list[str] = []
    begun, go = asyncio.Event(), asyncio.Event()
    book = bookings(log)

    @compensation
    async def check_out(ctx: WorkflowContext, result: str) -> None:
        log.append(f"check out of {result}")

    @activity
    @on_failure(check_out)
    async def check_in(ctx: WorkflowContext) -> str:
        begun.set()
        await go.wait()
        log.append("checked in")
        return "room 7"

    @activity(retry_policy=ONCE)
    async def fail(ctx: WorkflowContext) -> None:
        await begun.wait()
        raise ValueError("no car")

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        try:
            await asyncio.gather(check_in(ctx), fail(ctx))
        finally:
            go.set()

    run_id = await app.start(trip)
    assert "no car" in str(await failure_of(app, run_id))
    assert log == ["book flight", "checked in", "check out of room 7", "unbook flight"]
    (late,) = await entries_of(app, run_id, EntryKind.LATE)
    assert (late.name, late.ok) == ("check_in", True)


async def test_a_cancel_during_an_activity_waits_for_its_effect_and_undoes_it(app: EddaApp) -> None:
    log: list[str] = []
    begun, go = asyncio.Event(), asyncio.Event()

    @compensation
    async def refund(ctx: WorkflowContext, receipt: str) -> None:
        log.append(f"refund {receipt}")

    @activity
    @on_failure(refund)
    async def charge(ctx: WorkflowContext) -> dict[str, str]:
        begun.set()
        await go.wait()
        log.append("charged")
        return {"receipt": "no. 7"}

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx)

    run_id = await app.start(order)
    await begun.wait()
    await app.cancel(run_id)
    await until_recorded(app, run_id, EntryKind.CANCEL)
    assert await app.handle(run_id).status() in (RunStatus.RUNNING, RunStatus.COMPENSATING)
    go.set()
    with pytest.raises(WorkflowCancelledError):
        await result_of(app, run_id)
    assert log == ["charged", "refund no. 7"]


async def test_an_effect_that_came_after_its_attempt_was_given_up_is_undone(app: EddaApp) -> None:
    """Nobody can stop a thread: the step has failed by then, but what it did must not stand."""
    go = threading.Event()
    undone: list[str] = []

    @compensation
    async def refund(ctx: WorkflowContext, result: str) -> None:
        undone.append(result)

    @activity(timeout=0.05, retry_policy=ONCE)
    @on_failure(refund)
    def charge(ctx: WorkflowContext) -> str:
        go.wait(20)
        return "receipt no. 7"

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        try:
            await charge(ctx)
        finally:
            go.set()

    run_id = await app.start(order)
    error = await failure_of(app, run_id)
    assert isinstance(error, ActivityTimeoutError) or isinstance(error.__cause__, ActivityTimeoutError)
    assert undone == ["receipt no. 7"]


async def test_a_step_whose_next_attempt_is_not_due_is_not_tried_again_to_be_undone(app: EddaApp) -> None:
    attempts: list[int] = []
    undone: list[int] = []

    @compensation
    async def refund(ctx: WorkflowContext) -> None:
        undone.append(1)

    @activity(retry_policy=RetryPolicy(initial_interval=3600, max_interval=3600, max_duration=None))
    @on_failure(refund)
    async def charge(ctx: WorkflowContext) -> None:
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            raise ConnectionError("later")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx)

    run_id = await app.start(order)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    await until_out_of_memory(app)
    await app.cancel(run_id)
    with pytest.raises(WorkflowCancelledError):
        await result_of(app, run_id)
    assert (attempts, undone) == ([1], [])


async def test_an_effect_that_lost_a_race_is_undone(app: EddaApp) -> None:
    undone: list[str] = []
    begun, go = asyncio.Event(), asyncio.Event()

    @compensation
    async def unbook(ctx: WorkflowContext, result: str) -> None:
        undone.append(result)

    @activity
    @on_failure(unbook)
    async def slow(ctx: WorkflowContext) -> str:
        begun.set()
        await go.wait()
        return "slow"

    @activity
    async def fast(ctx: WorkflowContext) -> str:
        await begun.wait()
        return "fast"

    @workflow
    async def race(ctx: WorkflowContext) -> None:
        first = await wait_any(ctx, slow(ctx), fast(ctx))
        go.set()
        await sleep(ctx, 0.01)
        raise ValueError(f"{first.value} was no good either")

    with pytest.raises(ValueError, match="fast was no good"):
        await app.run(race)
    assert undone == ["slow"]


async def test_an_effect_that_was_given_up_stands_if_the_run_succeeds(app: EddaApp) -> None:
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
    async def trip(ctx: WorkflowContext) -> str:
        booking = asyncio.create_task(book(ctx))
        await ctx.step("until begun", begun.wait)
        booking.cancel()
        go.set()
        return "on foot"

    run_id = await app.start(trip)
    assert await result_of(app, run_id) == "on foot"
    assert undone == []
    (late,) = await entries_of(app, run_id, EntryKind.LATE)
    assert (late.name, late.ok) == ("book", True), "but it is known"


async def test_an_effect_that_a_crash_hid_is_learnt_before_it_is_undone(make_app: MakeApp) -> None:
    """The body was lost with its process and the run is cancelled: only another try can tell what to undo."""
    begun, attempts = asyncio.Event(), 0
    undone: list[str] = []

    @compensation
    async def refund(ctx: WorkflowContext, result: str) -> None:
        undone.append(result)

    @activity
    @on_failure(refund)
    async def charge(ctx: WorkflowContext) -> str:
        nonlocal attempts
        attempts += 1
        begun.set()
        if attempts == 1:
            await asyncio.Event().wait()
        return ctx.idempotency_key

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx)

    first = await make_app()
    run_id = await first.start(order)
    await begun.wait()
    await first.shutdown(grace=0)
    client = await make_app(worker=False)
    assert await client.cancel(run_id)
    await make_app()
    with pytest.raises(WorkflowCancelledError):
        await result_of(client, run_id)
    assert attempts == 2
    assert undone == [f"{run_id}/0/charge:1"]
