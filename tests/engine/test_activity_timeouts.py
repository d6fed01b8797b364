"""An attempt that takes too long is given up; what its body does all the same is not forgotten."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import pytest

from edda import EddaApp, HooksBase, RetryExhaustedError, RetryPolicy, WorkflowContext, activity, sleep, workflow
from edda.core.model import Entry, EntryKind
from edda.engine.settings import Settings
from edda.errors import ActivityTimeoutError, HeartbeatTimeoutError

from .conditions import until
from .conftest import MakeApp

pytestmark = pytest.mark.parametrize("database", ["memory", "sqlite"], indirect=True)

AT_ONCE = RetryPolicy(initial_interval=0.0, max_attempts=3)
ONCE = RetryPolicy(max_attempts=1)
SOON = 0.05
"""Seconds that are over soon."""

number: ContextVar[int] = ContextVar("number", default=0)


async def outcomes(app: EddaApp, run_id: str) -> list[tuple[EntryKind, bool, Any]]:
    def value(entry: Entry) -> Any:
        return app.engine.codec.decode(entry.value) if entry.ok and entry.value else None

    return [(entry.kind, entry.ok, value(entry)) for entry in await app.handle(run_id).history()]


@pytest.mark.parametrize("timeout", [0, -1, True, "5", float("nan"), float("inf"), timedelta(0)])
@pytest.mark.parametrize("option", ["timeout", "heartbeat_timeout"])
def test_a_time_that_is_no_time_is_refused_with_the_activity_named(database: object, option: str, timeout: Any) -> None:
    def charge(ctx: WorkflowContext) -> None: ...

    options: dict[str, Any] = {option: timeout}
    with pytest.raises(ValueError, match=f"activity charge: {option} must be"):
        activity(**options)(charge)


async def test_an_attempt_that_takes_too_long_is_cancelled_and_tried_again(app: EddaApp) -> None:
    cancelled: list[int] = []

    @activity(timeout=SOON, retry_policy=AT_ONCE)
    async def slow(ctx: WorkflowContext) -> int:
        if ctx.attempt < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(ctx.attempt)
                assert ctx.is_cancelled
                raise
        return ctx.attempt

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await slow(ctx)

    run_id = await app.start(order)
    assert await app.handle(run_id).result(timeout=20) == 3
    assert cancelled == [1, 2]
    assert [kind for kind, *_ in await outcomes(app, run_id)] == [EntryKind.RETRY, EntryKind.RETRY, EntryKind.STEP]


async def test_the_error_names_step_attempt_and_time(app: EddaApp) -> None:
    @activity(timeout=timedelta(seconds=SOON), retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=2))
    async def slow(ctx: WorkflowContext) -> None:
        await asyncio.Event().wait()

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await slow(ctx)

    with pytest.raises(RetryExhaustedError) as caught:
        await app.run(order)
    cause = caught.value.__cause__
    assert isinstance(cause, ActivityTimeoutError)
    assert isinstance(cause, TimeoutError)
    assert str(cause) == "slow:1, attempt 2, took more than 0.05 seconds"


async def test_a_policy_may_say_that_a_time_out_is_final(app: EddaApp) -> None:
    begun: list[int] = []

    @activity(timeout=SOON, retry_policy=RetryPolicy(non_retryable_error_types=(ActivityTimeoutError,)))
    async def slow(ctx: WorkflowContext) -> None:
        begun.append(ctx.attempt)
        await asyncio.Event().wait()

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await slow(ctx)

    with pytest.raises(ActivityTimeoutError):
        await app.run(order)
    assert begun == [1]


async def test_an_attempt_within_its_time_is_not_disturbed(app: EddaApp) -> None:
    @activity(timeout=30, heartbeat_timeout=30)
    async def quick(ctx: WorkflowContext) -> str:
        await asyncio.sleep(0.01)
        return "done"

    @activity(timeout=30, heartbeat_timeout=30)
    def quick_in_a_thread(ctx: WorkflowContext) -> bool:
        return ctx.is_cancelled

    @workflow
    async def order(ctx: WorkflowContext) -> tuple[str, bool]:
        return await quick(ctx), await quick_in_a_thread(ctx)

    assert await app.run(order) == ("done", False)


async def test_a_thread_that_ends_well_between_two_attempts_decides_the_step(app: EddaApp) -> None:
    begun, go = threading.Event(), threading.Event()

    @activity(timeout=SOON, retry_policy=RetryPolicy(initial_interval=3600, max_interval=3600, max_duration=None))
    def slow(ctx: WorkflowContext) -> str:
        begun.set()
        go.wait(20)
        return f"attempt {ctx.attempt}, cancelled: {ctx.is_cancelled}"

    cancels: list[int] = []

    @activity
    async def cancel_itself_once(ctx: WorkflowContext) -> None:
        task = asyncio.current_task()
        assert task is not None
        cancels.append(1)
        if len(cancels) == 1:
            task.cancel()
            await asyncio.sleep(0)

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        found = await slow(ctx)
        await cancel_itself_once(ctx)  # its run is handed back, unless somebody thinks that the other one still rests
        return found

    run_id = await app.start(order)
    handle = app.handle(run_id)
    await until(begun.is_set, "the body has begun")
    await until(lambda: has_entry(app, run_id, EntryKind.RETRY), "its time is over")
    go.set()
    assert await handle.result(timeout=20) == "attempt 1, cancelled: True"


async def has_entry(app: EddaApp, run_id: str, kind: EntryKind) -> bool:
    return any(entry.kind is kind for entry in await app.handle(run_id).history())


async def test_the_first_success_wins_and_the_other_attempt_is_cancelled(app: EddaApp) -> None:
    second_began, first_may_end, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @activity(timeout=0.3, retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=2))
    async def stubborn(ctx: WorkflowContext) -> int:
        number.set(ctx.attempt)
        if ctx.attempt == 1:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await first_may_end.wait()
            return number.get()
        second_began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 2

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await stubborn(ctx)

    run_id = await app.start(order)
    await second_began.wait()
    first_may_end.set()
    assert await app.handle(run_id).result(timeout=20) == 1, "and each attempt has context variables of its own"
    assert cancelled.is_set()
    found = [kind for kind, *_ in await outcomes(app, run_id)]
    assert found == [EntryKind.RETRY, EntryKind.STEP], "the other one did not run until its time was over"


async def test_a_second_success_is_none(app: EddaApp) -> None:
    second_began, first_ended = threading.Event(), threading.Event()

    @activity(timeout=0.1, retry_policy=AT_ONCE)
    def stubborn(ctx: WorkflowContext) -> int:
        if ctx.attempt == 1:
            second_began.wait(20)
            return 1
        second_began.set()
        first_ended.wait(20)
        return ctx.attempt

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        found = await stubborn(ctx)
        first_ended.set()
        return found

    run_id = await app.start(order)
    assert await app.handle(run_id).result(timeout=20) == 1
    assert [kind for kind, *_ in await outcomes(app, run_id)] == [EntryKind.RETRY, EntryKind.STEP]


async def test_what_ends_well_after_its_step_failed_is_recorded_as_late(app: EddaApp) -> None:
    go = threading.Event()

    @activity(timeout=SOON, retry_policy=ONCE)
    def slow(ctx: WorkflowContext) -> str:
        go.wait(20)
        return "booked"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        try:
            return await slow(ctx)
        except RetryExhaustedError:
            await sleep(ctx, 0.01)
            go.set()
            return "failed"

    run_id = await app.start(order)
    assert await app.handle(run_id).result(timeout=20) == "failed"
    found = [one for one in await outcomes(app, run_id) if one[0] is not EntryKind.TIMER]
    assert found == [(EntryKind.STEP, False, None), (EntryKind.LATE, True, "booked")]


async def test_what_ends_badly_after_it_was_given_up_is_ignored(app: EddaApp) -> None:
    go, first_ended = threading.Event(), threading.Event()

    @activity(timeout=2, retry_policy=AT_ONCE)
    def slow(ctx: WorkflowContext) -> str:
        if ctx.attempt == 1:
            go.wait(20)
            first_ended.set()
            raise ConnectionError("too late")
        go.set()
        first_ended.wait(20)
        return "the second"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await slow(ctx)

    run_id = await app.start(order)
    assert await app.handle(run_id).result(timeout=20) == "the second"
    assert [kind for kind, *_ in await outcomes(app, run_id)] == [EntryKind.RETRY, EntryKind.STEP]


async def test_a_thread_hears_that_it_was_given_up_when_it_beats(app: EddaApp) -> None:
    stopped = threading.Event()

    @activity(timeout=SOON, retry_policy=ONCE)
    def loop(ctx: WorkflowContext) -> None:
        tick = threading.Event()
        try:
            while not tick.wait(0.005):
                ctx.heartbeat()
        finally:
            stopped.set()

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await loop(ctx)

    with pytest.raises(RetryExhaustedError, match="loop:1, attempt 1, took more than"):
        await app.run(order)
    assert stopped.wait(20)


async def test_an_abandoned_thread_can_see_it(app: EddaApp) -> None:
    begun, seen = threading.Event(), threading.Event()

    @activity
    def loop(ctx: WorkflowContext) -> None:
        begun.set()
        tick = threading.Event()
        while not ctx.is_cancelled:
            tick.wait(0.005)
        seen.set()

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await loop(ctx)

    run_id = await app.start(order)
    await until(begun.is_set, "the body has begun")
    await app.cancel(run_id)
    await until(seen.is_set, "the thread has seen that it was abandoned")


async def test_a_thread_that_was_given_up_before_it_began_never_does(make_app: MakeApp) -> None:
    app = await make_app(settings=Settings(threads=1))
    busy, go, effects = threading.Event(), threading.Event(), []

    @activity
    def occupy(ctx: WorkflowContext) -> None:
        busy.set()
        go.wait(20)

    @activity
    def effect(ctx: WorkflowContext) -> None:
        effects.append(ctx.activity_id)

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        first = asyncio.create_task(occupy(ctx))
        second = asyncio.create_task(effect(ctx))
        await sleep(ctx, 0.05)
        second.cancel()
        go.set()
        await first
        return "done"

    assert await app.run(order) == "done"
    assert effects == []


async def test_the_time_of_a_thread_begins_when_it_does(make_app: MakeApp) -> None:
    app = await make_app(settings=Settings(threads=1))
    second_waits = threading.Event()

    @activity
    def occupy(ctx: WorkflowContext) -> None:
        second_waits.wait(0.5)  # longer than the other one has

    @activity(timeout=0.2, retry_policy=ONCE)
    def quick(ctx: WorkflowContext) -> str:
        return "in time"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        found: list[str | None] = [*await asyncio.gather(occupy(ctx), quick(ctx))]
        return found[1] or ""

    assert await app.run(order) == "in time"


async def test_hooks_hear_of_a_time_out_as_of_any_failure(make_app: MakeApp) -> None:
    heard: list[str] = []

    class Ear(HooksBase):
        async def on_activity_retry(
            self, instance_id: str, activity_id: str, activity_name: str, error: BaseException, *rest: Any
        ) -> None:
            heard.append(type(error).__name__)

    app = await make_app(hooks=Ear())

    @activity(heartbeat_timeout=SOON, retry_policy=AT_ONCE)
    async def slow(ctx: WorkflowContext) -> int:
        if ctx.attempt == 1:
            await asyncio.Event().wait()
        return ctx.attempt

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await slow(ctx)

    assert await app.run(order) == 2
    await until(lambda: heard == [HeartbeatTimeoutError.__name__], "the hook was called")
