"""Retries: durable, counted over crashes, and without a place in memory while they wait."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from edda import (
    EddaApp,
    RetryExhaustedError,
    RetryPolicy,
    RunStatus,
    TerminalError,
    WorkflowContext,
    activity,
    sleep,
    workflow,
)
from edda.core.model import EntryKind
from edda.testing import VirtualApp

from .conditions import until, until_out_of_memory
from .conftest import MORTAL, MakeApp

AT_ONCE = RetryPolicy(initial_interval=0.0, max_attempts=3)


async def test_an_activity_is_tried_again_until_it_succeeds(app: EddaApp) -> None:
    attempts: list[int] = []

    @activity(retry_policy=AT_ONCE)
    async def flaky(ctx: WorkflowContext) -> str:
        attempts.append(ctx.attempt)
        if ctx.attempt < 3:
            raise ConnectionError("not yet")
        return "at last"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await flaky(ctx)

    run_id = await app.start(order)
    assert await app.handle(run_id).result(timeout=20) == "at last"
    assert attempts == [1, 2, 3]
    kinds = [(entry.kind, entry.attempt) for entry in await app.handle(run_id).history()]
    assert kinds == [(EntryKind.RETRY, 1), (EntryKind.RETRY, 2), (EntryKind.STEP, 3)]


async def test_the_last_failure_is_the_cause_of_what_the_workflow_gets(app: EddaApp) -> None:
    @activity(retry_policy=AT_ONCE)
    async def hopeless(ctx: WorkflowContext) -> None:
        raise ConnectionError(f"attempt {ctx.attempt}")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await hopeless(ctx)

    with pytest.raises(RetryExhaustedError, match="failed 3 times") as caught:
        await app.run(order)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert str(caught.value.__cause__) == "attempt 3"


async def test_errors_that_are_not_worth_a_retry_arrive_as_they_are(app: EddaApp) -> None:
    cases: list[tuple[RetryPolicy, Exception]] = [
        (AT_ONCE, TerminalError("never")),
        (RetryPolicy(initial_interval=0.0, non_retryable_error_types=(LookupError,)), KeyError("missing")),
        (RetryPolicy(initial_interval=0.0, retryable_error_types=(OSError,)), ValueError("not an OSError")),
    ]
    attempts: list[int] = []

    @workflow
    async def order(ctx: WorkflowContext, case: int) -> None:
        policy, error = cases[case]

        async def refuse(ctx: WorkflowContext) -> None:
            attempts.append(ctx.attempt)
            raise error

        await activity(retry_policy=policy)(refuse)(ctx)

    for case, (_, error) in enumerate(cases):
        with pytest.raises(type(error), match=str(error).strip("'")):
            await app.run(order, case)
    assert attempts == [1, 1, 1]


async def test_the_policy_of_the_activity_comes_before_that_of_the_app(make_app: MakeApp) -> None:
    attempts: dict[str, int] = {}

    async def fail(ctx: WorkflowContext) -> None:
        attempts[ctx.activity_id] = ctx.attempt
        raise ValueError("no")

    by_app = activity(name="by_app")(fail)
    by_itself = activity(name="by_itself", retry_policy=AT_ONCE)(fail)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await asyncio.gather(by_app(ctx), by_itself(ctx), return_exceptions=True)

    app = await make_app(default_retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=2))
    await app.run(order)
    assert attempts == {"by_app:1": 2, "by_itself:1": 3}


async def test_a_long_backoff_leaves_memory(app: EddaApp) -> None:
    failed = asyncio.Event()

    @activity(retry_policy=RetryPolicy(initial_interval=3600, max_interval=3600, max_duration=None))
    async def fail(ctx: WorkflowContext) -> int:
        failed.set()
        raise ConnectionError("later")

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await fail(ctx)

    run_id = await app.start(order)
    await failed.wait()
    await until_out_of_memory(app)
    assert await app.handle(run_id).status() is RunStatus.WAITING_FOR_TIMER


async def test_a_retry_that_left_memory_comes_back_when_it_is_due(app: EddaApp) -> None:
    @activity(retry_policy=RetryPolicy(initial_interval=0.2, jitter=0.0))
    async def flaky(ctx: WorkflowContext) -> int:
        if ctx.attempt == 1:
            raise ConnectionError("later")
        return ctx.attempt

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await flaky(ctx)

    assert await app.run(order) == 2


async def test_the_count_of_attempts_survives_a_crash(make_app: MakeApp) -> None:
    attempts: list[tuple[int, str]] = []

    @activity(retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=4))
    async def fail(ctx: WorkflowContext) -> None:
        attempts.append((ctx.attempt, ctx.idempotency_key))
        if len(attempts) == 3:
            await asyncio.Event().wait()  # here the process dies
        raise ValueError(f"attempt {ctx.attempt}")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await fail(ctx)

    doomed = await make_app(settings=MORTAL)
    run_id = await doomed.start(order)
    await until(lambda: len(attempts) == 3, "the third attempt is under way")
    doomed.kill()
    app = await make_app(settings=MORTAL)
    with pytest.raises(RetryExhaustedError, match="failed 4 times"):
        await app.handle(run_id).result(timeout=30)
    assert [attempt for attempt, _ in attempts] == [1, 2, 3, 3, 4]
    assert len({key for _, key in attempts}) == 1, "the idempotency key is stable"


async def test_steps_and_runs_have_idempotency_keys_of_their_own(app: EddaApp) -> None:
    @activity
    async def key(ctx: WorkflowContext) -> str:
        return ctx.idempotency_key

    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        return [await key(ctx), await key(ctx)]

    first, second = await app.run(order), await app.run(order)
    assert len({*first, *second}) == 4


async def test_retries_end_when_their_duration_is_used_up(tmp_path: Path) -> None:
    moments: list[float] = []

    @activity(
        retry_policy=RetryPolicy(
            initial_interval=10, backoff_coefficient=1, max_attempts=None, max_duration=35, jitter=0
        )
    )
    async def fail(ctx: WorkflowContext) -> None:
        moments.append(ctx.now().timestamp())
        raise ValueError("again")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await fail(ctx)

    async with VirtualApp(db_url=f"sqlite:///{tmp_path}/x.db") as app:
        with pytest.raises(RetryExhaustedError, match="failed 4 times"):
            await app.run(order)
    assert [round(moment - moments[0]) for moment in moments] == [0, 10, 20, 30]


async def test_backoff_grows_and_is_the_same_after_a_replay() -> None:
    moments: list[float] = []

    @activity(retry_policy=RetryPolicy(initial_interval=60, max_interval=600, max_attempts=6, max_duration=None))
    async def fail(ctx: WorkflowContext) -> None:
        moments.append(ctx.now().timestamp())
        raise ValueError("again")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await fail(ctx)

    async with VirtualApp() as app:
        with pytest.raises(RetryExhaustedError):
            await app.run(order)
    pauses = [later - earlier for earlier, later in pairwise(moments)]
    assert len(pauses) == 5
    for pause, wanted in zip(pauses, (60, 120, 240, 480, 600), strict=True):
        assert 0.95 * wanted <= pause <= 1.05 * wanted + 1


async def test_other_branches_go_on_while_one_waits_for_its_retry(app: EddaApp) -> None:
    @activity(retry_policy=RetryPolicy(initial_interval=0.3, jitter=0.0))
    async def flaky(ctx: WorkflowContext) -> str:
        if ctx.attempt == 1:
            raise ConnectionError("later")
        return "flaky"

    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        ended: list[str] = []

        async def slow() -> None:
            ended.append(await flaky(ctx))

        async def quick() -> None:
            await sleep(ctx, 0.05)
            ended.append("quick")

        await asyncio.gather(slow(), quick())
        return ended

    assert await app.run(order) == ["quick", "flaky"]
