"""Steps that nobody awaits any more: what may be interrupted is, what has to be undone is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from edda import EddaApp, RetryPolicy, WorkflowContext, activity, compensation, on_failure, sleep, workflow
from edda.core.model import EntryKind
from edda.engine.settings import Settings
from edda.errors import ArgumentError, RetryExhaustedError

from .conftest import MakeApp

pytestmark = pytest.mark.parametrize("database", ["memory", "sqlite"], indirect=True)

ONCE = RetryPolicy(max_attempts=1)


async def given_up_when(ctx: WorkflowContext, step: Coroutine[Any, Any, Any], happened: threading.Event) -> None:
    """Begin the step, and abandon it when that has happened."""

    @activity
    def watch(ctx: WorkflowContext) -> bool:
        return happened.wait(20)

    task = asyncio.create_task(step)
    await watch(ctx)
    task.cancel()
    await asyncio.wait([task])


async def late_entries(app: EddaApp, run_id: str) -> list[tuple[str, bool]]:
    entries = await app.handle(run_id).history()
    return [(entry.name, entry.ok) for entry in entries if entry.kind is EntryKind.LATE]


async def test_a_body_that_has_to_be_undone_is_not_interrupted(app: EddaApp) -> None:
    undone: list[str] = []
    begun, go = threading.Event(), asyncio.Event()

    @compensation
    async def unbook(ctx: WorkflowContext, result: str) -> None:
        undone.append(result)

    @activity
    @on_failure(unbook)
    async def book(ctx: WorkflowContext) -> str:
        begun.set()
        await go.wait()
        assert not ctx.is_cancelled
        ctx.heartbeat()
        return "seat 7"

    @workflow
    async def trip(ctx: WorkflowContext) -> str:
        await given_up_when(ctx, book(ctx), begun)
        go.set()
        raise ValueError("no trip")

    run_id = await app.start(trip)
    with pytest.raises(ValueError, match="no trip"):
        await app.handle(run_id).result(timeout=20)
    assert undone == ["seat 7"]
    assert await late_entries(app, run_id) == [("book", True)]


async def test_a_body_that_waits_in_line_and_would_have_to_be_undone_never_begins(app: EddaApp) -> None:
    began: list[str] = []
    undone: list[str] = []
    first_began, go = threading.Event(), asyncio.Event()

    @compensation
    async def unbook(ctx: WorkflowContext, seat: str) -> None:
        undone.append(seat)

    @activity(max_concurrent=1)
    @on_failure(unbook)
    async def book(ctx: WorkflowContext, seat: str) -> None:
        began.append(seat)
        first_began.set()
        await go.wait()

    @workflow
    async def trip(ctx: WorkflowContext) -> str:
        first = asyncio.create_task(book(ctx, "1A"))
        await asyncio.sleep(0)
        await given_up_when(ctx, book(ctx, "2B"), first_began)
        go.set()
        await first
        raise ValueError("no trip")

    run_id = await app.start(trip)
    with pytest.raises(ValueError, match="no trip"):
        await app.handle(run_id).result(timeout=20)
    assert (began, undone) == (["1A"], ["1A"])
    assert await late_entries(app, run_id) == [("book", False)]


async def test_a_step_between_two_attempts_that_would_have_to_be_undone_is_over(make_app: MakeApp) -> None:
    app = await make_app(settings=Settings(linger=60))
    attempts: list[int] = []
    undone: list[str] = []
    failed = threading.Event()

    @compensation
    async def unbook(ctx: WorkflowContext, seat: str) -> None:
        undone.append(seat)

    @activity(retry_policy=RetryPolicy(initial_interval=30))
    @on_failure(unbook)
    async def book(ctx: WorkflowContext, seat: str) -> None:
        attempts.append(ctx.attempt)
        failed.set()
        raise ConnectionError("later")

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await given_up_when(ctx, book(ctx, "1A"), failed)
        raise ValueError("no trip")

    run_id = await app.start(trip)
    with pytest.raises(ValueError, match="no trip"):
        await app.handle(run_id).result(timeout=20)
    assert (attempts, undone) == ([1], [])
    assert await late_entries(app, run_id) == [("book", False)]


async def test_times_hold_for_abandoned_bodies_too(app: EddaApp) -> None:
    undone: list[str] = []
    begun, stopped = threading.Event(), asyncio.Event()

    @compensation
    async def unbook(ctx: WorkflowContext) -> None:
        undone.append("?")

    @activity(timeout=0.5)
    @on_failure(unbook)
    async def book(ctx: WorkflowContext) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await given_up_when(ctx, book(ctx), begun)
        raise ValueError("no trip")

    run_id = await app.start(trip)
    with pytest.raises(ValueError, match="no trip"):
        await app.handle(run_id).result(timeout=20)
    assert stopped.is_set()
    assert undone == []
    assert await late_entries(app, run_id) == [("book", False)]


async def test_an_abandoned_thread_that_ends_well_after_its_time_is_undone(app: EddaApp) -> None:
    undone: list[str] = []
    begun, tick = threading.Event(), threading.Event()

    @compensation
    async def unbook(ctx: WorkflowContext, result: str) -> None:
        undone.append(result)

    @activity(timeout=0.5)
    @on_failure(unbook)
    def book(ctx: WorkflowContext) -> str:
        begun.set()
        while not ctx.is_cancelled:
            tick.wait(0.01)
        return "seat 7"

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await given_up_when(ctx, book(ctx), begun)
        raise ValueError("no trip")

    run_id = await app.start(trip)
    with pytest.raises(ValueError, match="no trip"):
        await app.handle(run_id).result(timeout=20)
    assert undone == ["seat 7"]
    assert await late_entries(app, run_id) == [("book", True)]


async def test_a_thread_that_ends_well_after_its_time_and_after_its_step_was_abandoned_is_undone(
    make_app: MakeApp,
) -> None:
    app = await make_app(settings=Settings(linger=60))
    undone: list[str] = []
    overdue, go, tick = threading.Event(), threading.Event(), threading.Event()

    @compensation
    async def unbook(ctx: WorkflowContext, result: str) -> None:
        undone.append(result)

    @activity(timeout=0.1, retry_policy=RetryPolicy(initial_interval=30))
    @on_failure(unbook)
    def book(ctx: WorkflowContext) -> str:
        while not ctx.is_cancelled:
            tick.wait(0.01)
        overdue.set()
        go.wait(20)
        return "seat 7"

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await given_up_when(ctx, book(ctx), overdue)
        go.set()
        raise ValueError("no trip")

    run_id = await app.start(trip)
    with pytest.raises(ValueError, match="no trip"):
        await app.handle(run_id).result(timeout=20)
    assert undone == ["seat 7"]
    assert await late_entries(app, run_id) == [("book", True)]


async def test_a_result_that_undoing_could_not_use_fails_the_step_at_once(app: EddaApp) -> None:
    begun: list[int] = []

    @compensation
    async def unbook(ctx: WorkflowContext, seat: str) -> None: ...

    @activity
    @on_failure(unbook)
    async def book(ctx: WorkflowContext) -> dict[str, Any]:
        begun.append(ctx.attempt)
        return {"place": "7"}

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await book(ctx)

    with pytest.raises(ArgumentError, match="needs 'seat'"):
        await app.run(trip)
    assert begun == [1]


async def test_who_asks_for_the_same_again_gets_what_the_running_body_does(app: EddaApp) -> None:
    begun, go = threading.Event(), threading.Event()
    attempts: list[int] = []

    @activity
    def book(ctx: WorkflowContext, seat: str) -> str:
        attempts.append(ctx.attempt)
        begun.set()
        go.wait(20)
        return f"{seat} is booked"

    @workflow
    async def trip(ctx: WorkflowContext) -> str:
        await given_up_when(ctx, book.with_id("booking")(ctx, "1A"), begun)
        again = asyncio.create_task(book.with_id("booking")(ctx, "1A"))
        await sleep(ctx, 0.05)
        go.set()
        return await again

    assert await app.run(trip) == "1A is booked"
    assert attempts == [1]


async def test_who_asks_for_something_else_under_the_same_id_waits_for_the_running_body(app: EddaApp) -> None:
    begun = threading.Event()
    log: list[str] = []

    @activity
    async def book(ctx: WorkflowContext, seat: str) -> str:
        log.append(f"begin {seat}")
        begun.set()
        try:
            await asyncio.sleep(3600 if seat == "1A" else 0)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            log.append(f"leave {seat}")
            raise
        return f"{seat} is booked"

    @workflow
    async def trip(ctx: WorkflowContext) -> str:
        await given_up_when(ctx, book.with_id("booking")(ctx, "1A"), begun)
        return await book.with_id("booking")(ctx, "2B")

    assert await app.run(trip) == "2B is booked"
    assert log == ["begin 1A", "leave 1A", "begin 2B"]


async def test_a_body_that_is_overdue_does_not_keep_the_same_from_being_tried_again(app: EddaApp) -> None:
    go = threading.Event()
    begun: list[int] = []

    @activity(timeout=0.1, retry_policy=ONCE)
    def book(ctx: WorkflowContext) -> int:
        begun.append(1)
        if len(begun) == 1:
            go.wait(20)
        return len(begun)

    @workflow
    async def trip(ctx: WorkflowContext) -> int:
        try:
            return await book.with_id("booking")(ctx)
        except RetryExhaustedError:
            found = await book.with_id("booking")(ctx)
            go.set()
            return found

    assert await app.run(trip) == 2
