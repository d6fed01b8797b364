"""Replay: the same answers as the first time, and nothing said or done twice."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from typing import Any

import pytest

from edda import EddaApp, RetryPolicy, RunStatus, WorkflowContext, activity, sleep, workflow
from edda.errors import NotInWorkflowError

from .conditions import reason_of, until_status
from .conftest import MakeApp


async def test_clock_ids_and_chance_are_the_same_on_replay(app: EddaApp) -> None:
    seen: list[str] = []

    @workflow
    async def draw(ctx: WorkflowContext) -> None:
        drawn: list[Any] = []
        for _ in range(3):
            drawn += [ctx.now(), ctx.uuid4(), ctx.random(), ctx.rng.randint(1, 1000)]
            seen.append(repr(drawn))
            await sleep(ctx, 0.3)

    await app.run(draw)
    assert len(seen) >= 6, "it was replayed"
    assert len(set(seen)) == 3


async def test_two_runs_draw_different_ids(app: EddaApp) -> None:
    @workflow
    async def draw(ctx: WorkflowContext) -> str:
        return str(ctx.uuid4())

    assert await app.run(draw) != await app.run(draw)


async def test_an_inline_step_is_recorded_like_an_activity(app: EddaApp) -> None:
    effects: list[str] = []

    def fetch(url: str) -> dict[int, str]:
        effects.append(url)
        return {1: url}

    async def fetch_later(url: str) -> str:
        effects.append(url)
        return url.upper()

    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        found = [await ctx.step("fetch", fetch, "a"), await ctx.step("fetch", fetch_later, "b")]
        await sleep(ctx, 0.01)
        return found

    run_id = await app.start(order)
    assert await app.handle(run_id).result(timeout=20) == [{1: "a"}, "B"]
    assert effects == ["a", "b"]
    assert [e.step for e in await app.handle(run_id).history()] == ["fetch:1", "fetch:2", "sleep:1"]


async def test_an_inline_step_follows_its_retry_policy(app: EddaApp) -> None:
    attempts: list[int] = []

    async def flaky() -> str:
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError("again")
        return "there"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await ctx.step("flaky", flaky, retry_policy=RetryPolicy(initial_interval=0.0))

    assert await app.run(order) == "there"
    assert len(attempts) == 3


async def test_is_replaying_is_true_only_while_recorded_steps_are_gone_through(app: EddaApp) -> None:
    seen: list[tuple[str, bool]] = []

    @activity
    async def work(ctx: WorkflowContext) -> bool:
        return ctx.is_replaying

    @workflow
    async def order(ctx: WorkflowContext) -> bool:
        seen.append(("start", ctx.is_replaying))
        in_activity = await work(ctx)
        await sleep(ctx, 0.3)
        seen.append(("end", ctx.is_replaying))
        return in_activity

    assert await app.run(order) is False
    assert seen == [("start", False), ("start", True), ("end", False)]


async def test_the_logger_says_each_line_once(app: EddaApp, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "edda.workflow")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        try:
            ctx.logger.info("first")
            await sleep(ctx, 0.01)
            ctx.logger.info("second")
            await sleep(ctx, 0.01)
        finally:
            ctx.logger.info("last")

    run_id = await app.start(order)
    await app.handle(run_id).result(timeout=20)
    records = [r for r in caplog.records if r.name == "edda.workflow.order"]
    assert [r.getMessage() for r in records] == ["first", "second", "last"]
    assert {getattr(r, "instance_id", None) for r in records} == {run_id}


async def test_finally_blocks_can_tell_a_suspension_from_the_end(app: EddaApp) -> None:
    cleaned: list[str] = []
    unwinding: list[bool] = []

    @activity
    async def clean(ctx: WorkflowContext) -> None:
        cleaned.append(ctx.activity_id)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        try:
            await sleep(ctx, 0.02)
        finally:
            unwinding.append(ctx.is_unwinding)
            await clean(ctx)

    await app.run(order)
    assert unwinding == [True, False]
    assert cleaned == ["clean:1"]


async def test_verbs_of_an_activity_are_refused_in_a_workflow_and_the_other_way_round(app: EddaApp) -> None:
    @activity(retry_policy=RetryPolicy(max_attempts=1, non_retryable_error_types=(NotInWorkflowError,)))
    async def nested(ctx: WorkflowContext) -> None:
        await sleep(ctx, 1)

    @workflow
    async def inside(ctx: WorkflowContext) -> None:
        await nested(ctx)

    @workflow
    async def asks_for_a_key(ctx: WorkflowContext) -> str:
        return ctx.idempotency_key

    with pytest.raises(NotInWorkflowError):
        await app.run(inside)
    with pytest.raises(NotInWorkflowError, match="idempotency_key"):
        await app.run(asks_for_a_key)


class Gate:
    """Holds a run in the middle of its code until the app that runs it is stopped."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = False
        self.hold = activity(name="hold")(self._hold)

    async def _hold(self, ctx: WorkflowContext) -> None:
        self.reached.set()
        if not self.opened:
            await asyncio.Event().wait()


@pytest.fixture
def gate() -> Gate:
    return Gate()


async def exchange_code(make_app: MakeApp, gate: Gate, before: Any, after: Any) -> tuple[EddaApp, str]:
    """Run the old code up to the gate; then let the new code meet its history."""
    old = await make_app(workflows=[before])
    run_id = await old.start(before)
    await gate.reached.wait()
    await old.shutdown(grace=0.0)
    gate.opened = True
    return await make_app(workflows=[after]), run_id


async def break_code(make_app: MakeApp, gate: Gate, before: Any, after: Any) -> tuple[EddaApp, str]:
    app, run_id = await exchange_code(make_app, gate, before, after)
    await until_status(app, run_id, RunStatus.PARKED)
    return app, run_id


@activity
async def charge(ctx: WorkflowContext, amount: int) -> int:
    return amount


@activity
async def reserve(ctx: WorkflowContext) -> str:
    return "seat"


async def test_a_parked_run_goes_on_when_its_code_is_right_again(make_app: MakeApp, gate: Gate) -> None:
    @workflow(name="order")
    async def right(ctx: WorkflowContext) -> int:
        paid = await charge(ctx, 5)
        await gate.hold(ctx)
        return paid

    @workflow(name="order")
    async def wrong(ctx: WorkflowContext) -> int:
        await reserve(ctx)
        return await charge(ctx, 5)

    broken, run_id = await break_code(make_app, gate, right, wrong)
    reason = await reason_of(broken, run_id)
    assert "charge:1" in reason
    assert "reserve:1" in reason
    await broken.shutdown()
    fixed = await make_app(workflows=[right])
    assert await fixed.handle(run_id).result(timeout=20) == 5


async def test_a_changed_argument_is_named_with_both_values(make_app: MakeApp, gate: Gate) -> None:
    @workflow(name="order")
    async def before(ctx: WorkflowContext) -> None:
        await charge(ctx, 5)
        await gate.hold(ctx)

    @workflow(name="order")
    async def after(ctx: WorkflowContext) -> None:
        await charge(ctx, 7)
        await gate.hold(ctx)

    app, run_id = await break_code(make_app, gate, before, after)
    reason = await reason_of(app, run_id)
    assert '"amount":5' in reason
    assert '"amount":7' in reason


async def test_code_that_swallows_every_error_cannot_hide_the_difference(make_app: MakeApp, gate: Gate) -> None:
    @workflow(name="order")
    async def before(ctx: WorkflowContext) -> str:
        await charge(ctx, 5)
        await gate.hold(ctx)
        return "before"

    @workflow(name="order")
    async def after(ctx: WorkflowContext) -> str:
        try:
            await charge(ctx, 7)
        except Exception:
            return "swallowed"
        return "after"

    app, run_id = await break_code(make_app, gate, before, after)
    assert '"amount":7' in await reason_of(app, run_id)


async def test_a_removed_step_parks_the_run(make_app: MakeApp, gate: Gate) -> None:
    @workflow(name="order")
    async def before(ctx: WorkflowContext) -> None:
        await charge(ctx, 5)
        await gate.hold(ctx)

    @workflow(name="order")
    async def after(ctx: WorkflowContext) -> None:
        await gate.hold(ctx)

    app, run_id = await break_code(make_app, gate, before, after)
    assert "charge:1" in await reason_of(app, run_id)


async def test_chance_and_time_of_the_process_are_found_out(app: EddaApp) -> None:
    draws = (random.random, time.time, lambda: str(uuid.uuid4()))

    @activity
    async def note(ctx: WorkflowContext, value: Any) -> None: ...

    @workflow
    async def order(ctx: WorkflowContext, which: int) -> None:
        await note(ctx, draws[which]())
        await sleep(ctx, 0.02)

    for run_id in [await app.start(order, which) for which in range(3)]:
        await until_status(app, run_id, RunStatus.PARKED)
        assert "ctx.random()" in await reason_of(app, run_id)


async def test_a_changed_signature_parks_the_run_until_it_fits_again(make_app: MakeApp, gate: Gate) -> None:
    @workflow(name="order")
    async def before(ctx: WorkflowContext) -> str:
        await gate.hold(ctx)
        return "done"

    @workflow(name="order")
    async def after(ctx: WorkflowContext, needed: int) -> str:
        return "other"

    app, run_id = await break_code(make_app, gate, before, after)
    assert "needed" in await reason_of(app, run_id)
    await app.shutdown()
    again = await make_app(workflows=[before])
    assert await again.handle(run_id).result(timeout=20) == "done"


async def test_steps_added_after_the_point_reached_are_no_difference(make_app: MakeApp, gate: Gate) -> None:
    @workflow(name="order")
    async def before(ctx: WorkflowContext) -> list[int]:
        first = await charge(ctx, 1)
        await gate.hold(ctx)
        return [first]

    @workflow(name="order")
    async def after(ctx: WorkflowContext) -> list[int]:
        first = await charge(ctx, 1)
        await gate.hold(ctx)
        return [first, await charge(ctx, 2)]

    new, run_id = await exchange_code(make_app, gate, before, after)
    assert await new.handle(run_id).result(timeout=20) == [1, 2]
