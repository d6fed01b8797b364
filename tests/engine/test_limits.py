"""Histories that grow too long, and values that cannot be stored: the run ends, and what it did is undone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from edda import (
    CompensationError,
    EddaApp,
    RetryPolicy,
    RunStatus,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    register_compensation,
    sleep,
    workflow,
)
from edda.core.model import EntryKind
from edda.errors import HistoryLimitError, PayloadError

from .conditions import until_status
from .conftest import RESTLESS, MakeApp
from .events import result_of
from .histories import entries_of, kinds_in, undos_of

NARROW = replace(RESTLESS, history_warning=5, history_limit=10)


@pytest.fixture
async def app(make_app: MakeApp) -> EddaApp:
    return await make_app(settings=NARROW)


def warned(caplog: pytest.LogCaptureFixture, run_id: str) -> list[str]:
    return [message for message in caplog.messages if run_id in message and "ctx.recur()" in message]


async def test_a_long_history_is_warned_of_once(app: EddaApp, caplog: pytest.LogCaptureFixture) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> str:
        for _ in range(8):
            await ctx.step("note", int)
        await sleep(ctx, 0.01)
        return "done"

    run_id = await app.start(work)
    assert await result_of(app, run_id) == "done"
    (said,) = warned(caplog, run_id)
    assert f"run {run_id} of work has a history of 5 entries" in said


async def test_a_short_history_is_not_warned_of(app: EddaApp, caplog: pytest.LogCaptureFixture) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> None:
        for _ in range(4):
            await ctx.step("note", int)

    run_id = await app.start(work)
    await result_of(app, run_id)
    assert warned(caplog, run_id) == []


async def test_a_run_over_the_limit_fails_and_says_what_to_do(app: EddaApp) -> None:
    begun: list[int] = []

    @activity
    async def note(ctx: WorkflowContext) -> None:
        begun.append(1)

    @workflow
    async def endless(ctx: WorkflowContext) -> None:
        while True:
            await note(ctx)

    run_id = await app.start(endless)
    with pytest.raises(HistoryLimitError, match=r"a history of 10 entries, which is the limit\. .*ctx\.recur\(\)"):
        await result_of(app, run_id)
    assert await app.handle(run_id).status() is RunStatus.FAILED
    assert await kinds_in(app, run_id) == [*[EntryKind.STEP] * 10, EntryKind.LIMIT]
    assert len(begun) <= 11


async def test_generations_keep_a_run_below_the_limit(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext, number: int = 0) -> int:
        for _ in range(6):
            await ctx.step("note", int)
        if number < 4:
            await ctx.recur(number + 1)
        return number

    assert await app.run(work) == 4


async def test_a_run_over_the_limit_is_undone_beyond_it(app: EddaApp) -> None:
    undone: list[int] = []

    @compensation(retry_policy=RetryPolicy(initial_interval=0.01))
    async def undo(ctx: WorkflowContext, number: int) -> None:
        if number == 0 and ctx.attempt == 1:
            raise ConnectionError("later")
        undone.append(number)

    @activity
    @on_failure(undo)
    async def do(ctx: WorkflowContext, number: int) -> None: ...

    @workflow
    async def endless(ctx: WorkflowContext) -> None:
        number = 0
        while True:
            await do(ctx, number)
            number += 1

    run_id = await app.start(endless)
    with pytest.raises(HistoryLimitError):
        await result_of(app, run_id)
    assert undone[-10:] == list(reversed(range(10)))
    assert len(await undos_of(app, run_id)) == len(undone)


async def test_a_run_may_clean_up_at_the_limit(app: EddaApp) -> None:
    cleaned: list[str] = []

    @activity
    async def clean(ctx: WorkflowContext) -> None:
        cleaned.append(ctx.activity_id)

    @workflow
    async def endless(ctx: WorkflowContext) -> None:
        try:
            while True:
                await ctx.step("note", int)
        finally:
            await clean(ctx)

    with pytest.raises(HistoryLimitError):
        await app.run(endless)
    assert cleaned == ["clean:1"]


async def test_a_run_that_does_not_heed_the_limit_is_ended_at_twice_of_it(app: EddaApp) -> None:
    @workflow
    async def deaf(ctx: WorkflowContext) -> None:
        while True:
            try:
                await ctx.step("note", int)
            except asyncio.CancelledError:
                if ctx.is_unwinding:
                    raise

    run_id = await app.start(deaf)
    with pytest.raises(HistoryLimitError):
        await result_of(app, run_id)
    assert len(await app.handle(run_id).history()) <= 21


async def test_a_run_that_ends_by_itself_at_the_limit_has_completed(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> str:
        try:
            while True:
                await ctx.step("note", int)
        except asyncio.CancelledError:
            return "came to an end"

    run_id = await app.start(work)
    assert await result_of(app, run_id) == "came to an end"
    assert len(await entries_of(app, run_id, EntryKind.LIMIT)) == 1


async def test_the_limit_holds_across_replays(app: EddaApp) -> None:
    @workflow
    async def patient(ctx: WorkflowContext) -> None:
        while True:
            await sleep(ctx, 0.01)

    run_id = await app.start(patient)
    with pytest.raises(HistoryLimitError):
        await result_of(app, run_id)
    assert await kinds_in(app, run_id) == [*[EntryKind.TIMER] * 10, EntryKind.LIMIT]


async def test_a_cancel_before_the_limit_is_what_ended_the_run(app: EddaApp) -> None:
    @workflow
    async def slow(ctx: WorkflowContext) -> None:
        try:
            await sleep(ctx, 3600)
        finally:
            if not ctx.is_unwinding:
                for _ in range(8):
                    await ctx.step("clean", int)

    run_id = await app.start(slow)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    await app.cancel(run_id)
    await until_status(app, run_id, RunStatus.CANCELLED)


async def test_a_result_that_cannot_be_stored_fails_the_run_and_is_undone(app: EddaApp) -> None:
    undone: list[int] = []

    async def undo(ctx: WorkflowContext) -> None:
        undone.append(1)

    @workflow
    async def work(ctx: WorkflowContext) -> Any:
        register_compensation(ctx, undo)
        await sleep(ctx, 0.01)
        return object()

    run_id = await app.start(work)
    with pytest.raises(PayloadError, match="the result of work"):
        await result_of(app, run_id)
    assert undone == [1]


async def test_an_undo_whose_result_cannot_be_stored_has_failed_once(app: EddaApp) -> None:
    calls: list[int] = []

    async def undo(ctx: WorkflowContext) -> Any:
        calls.append(1)
        return object()

    @workflow
    async def work(ctx: WorkflowContext) -> None:
        register_compensation(ctx, undo)
        raise ValueError("no")

    with pytest.raises(CompensationError, match="PayloadError"):
        await app.run(work)
    assert calls == [1]


async def test_arguments_of_an_undo_that_cannot_be_stored_are_an_error_where_it_is_registered(app: EddaApp) -> None:
    undone: list[int] = []

    async def undo(ctx: WorkflowContext, what: Any) -> Any:
        undone.append(what)

    @workflow
    async def work(ctx: WorkflowContext) -> None:
        register_compensation(ctx, undo, 1)
        register_compensation(ctx, undo, object())

    with pytest.raises(PayloadError, match=r"\$\.what: object cannot be stored"):
        await app.run(work)
    assert undone == [1]
