"""What goes wrong in the reference with code, values and arguments, row by row, and holds here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel

from edda import (
    EddaApp,
    HooksBase,
    RetryExhaustedError,
    RetryPolicy,
    RunStatus,
    TerminalError,
    WorkflowContext,
    activity,
    sleep,
    wait_event,
    wait_timer,
    workflow,
)
from edda.errors import ArgumentError, PayloadError

from .conditions import reason_of, until_status
from .conftest import MakeApp
from .events import REPLAY, run_with_replay


class Item(BaseModel):
    name: str
    price: int


@dataclass(frozen=True)
class Spot:
    x: int
    y: int


async def test_exceptions_are_caught_by_the_same_clause_live_and_on_replay(app: EddaApp) -> None:
    """W4: `except RetryExhaustedError` and `except TerminalError` hold on replay too."""
    live: list[str] = []

    @activity(retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=2))
    async def flaky(ctx: WorkflowContext) -> None:
        raise ConnectionError("no line")

    @activity
    async def refused(ctx: WorkflowContext) -> None:
        raise TerminalError("no such card")

    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        caught = []
        try:
            await flaky(ctx)
        except RetryExhaustedError as error:
            caught.append(f"exhausted by {type(error.__cause__).__name__}")
        try:
            await refused(ctx)
        except TerminalError as error:
            caught.append(f"terminal: {error}")
        live.append(",".join(caught))
        await wait_timer(ctx, 0.3)
        return caught

    assert await app.run(order) == ["exhausted by ConnectionError", "terminal: no such card"]
    assert len(live) >= 2, "it was replayed"
    assert len(set(live)) == 1


@pytest.mark.parametrize("caught", [Exception, BaseException])
async def test_catching_everything_around_a_wait_does_not_end_the_wait(
    app: EddaApp, caught: type[BaseException]
) -> None:
    """W11: a suspension is no error, so a fallback must not run."""

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        before = ctx.now()
        try:
            await wait_timer(ctx, 0.1)
        except caught:
            return "fallback"
        return "waited" if (ctx.now() - before).total_seconds() >= 0.1 else "too early"

    assert await app.run(order) == "waited"


async def test_a_result_that_cannot_be_stored_does_not_repeat_the_effect(app: EddaApp) -> None:
    """W15: the card is charged once, and the step fails at once with the reason."""
    charged: list[str] = []

    @activity
    async def charge(ctx: WorkflowContext) -> object:
        charged.append(ctx.idempotency_key)
        return {"receipt": object()}

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx)

    with pytest.raises(PayloadError, match=r"charge:1.*receipt"):
        await app.run(order)
    assert len(charged) == 1


async def test_a_datetime_in_a_result_is_stored_and_comes_back_as_one(app: EddaApp) -> None:
    """W15: what JSON has no word for is no reason to run the activity again."""
    moment = datetime(2030, 2, 3, 4, 5, 6, 789, tzinfo=UTC)
    charged: list[int] = []

    @activity
    async def charge(ctx: WorkflowContext) -> dict[str, Any]:
        charged.append(1)
        return {"at": moment}

    @workflow
    async def order(ctx: WorkflowContext) -> dict[str, Any]:
        paid = await charge(ctx)
        await sleep(ctx, 0.02)
        return paid

    assert await app.run(order) == {"at": moment}
    assert len(charged) == 1


async def test_an_activity_id_used_twice_repeats_nothing(app: EddaApp) -> None:
    """W15: two calls under one id are two steps, each run once, and the run is not retried as a whole."""
    charged: list[int] = []

    @activity
    async def charge(ctx: WorkflowContext, amount: int) -> int:
        charged.append(amount)
        return amount

    @workflow
    async def order(ctx: WorkflowContext) -> list[int]:
        first = await charge.with_id("pay")(ctx, 1)
        await sleep(ctx, 0.02)
        return [first, await charge.with_id("pay")(ctx, 2)]

    assert await app.run(order) == [1, 2]
    assert charged == [1, 2]


async def test_a_raising_hook_repeats_nothing(make_app: MakeApp) -> None:
    """W15: a hook that raises harms neither the step nor the run."""
    charged: list[int] = []

    class Broken(HooksBase):
        async def on_activity_complete(
            self, instance_id: str, activity_id: str, activity_name: str, result: Any, cache_hit: bool
        ) -> None:
            raise RuntimeError("the hook is broken")

    @activity
    async def charge(ctx: WorkflowContext) -> int:
        charged.append(1)
        return 1

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await charge(ctx)

    app = await make_app(hooks=Broken())
    assert await app.run(order) == 1
    assert len(charged) == 1


async def test_values_have_the_same_types_live_and_on_replay(app: EddaApp) -> None:
    """W16: a list of models stays one; {1: ...} keeps its integer key; a tuple stays a tuple."""
    seen: list[str] = []

    @activity
    async def items(ctx: WorkflowContext) -> list[Item]:
        return [Item(name="pen", price=2)]

    @activity
    async def counts(ctx: WorkflowContext) -> dict[int, str]:
        return {1: "one"}

    @activity
    async def spot(ctx: WorkflowContext) -> tuple[Spot, int]:
        return Spot(1, 2), 3

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        values = await items(ctx), await counts(ctx), await spot(ctx)
        seen.append(repr(values))
        await wait_event(ctx, REPLAY)
        return values[0][0].price + values[2][0].x

    assert await run_with_replay(app, order) == 3
    assert len(seen) >= 2, "it was replayed"
    assert set(seen) == {repr(([Item(name="pen", price=2)], {1: "one"}, (Spot(1, 2), 3)))}


async def test_an_inserted_step_parks_the_run_instead_of_shifting_its_results(make_app: MakeApp) -> None:
    """W17: code that no longer fits the history is refused, and says where."""
    shipped: list[list[str]] = []
    held = asyncio.Event()

    @activity
    async def hold(ctx: WorkflowContext) -> None:
        held.set()
        await asyncio.Event().wait()

    @activity
    async def prepare(ctx: WorkflowContext, what: str) -> str:
        return what

    @activity
    async def ship(ctx: WorkflowContext, what: list[str]) -> None:
        shipped.append(what)

    @workflow(name="order")
    async def before(ctx: WorkflowContext) -> None:
        first = await prepare(ctx, "first")
        await hold(ctx)
        await ship(ctx, [first, await prepare(ctx, "second")])

    @workflow(name="order")
    async def after(ctx: WorkflowContext) -> None:
        extra = await prepare(ctx, "inserted")
        first = await prepare(ctx, "first")
        await hold(ctx)
        await ship(ctx, [extra, first, await prepare(ctx, "second")])

    old = await make_app(workflows=[before])
    run_id = await old.start(before)
    await held.wait()
    await old.shutdown(grace=0.0)
    new = await make_app(workflows=[after])
    await until_status(new, run_id, RunStatus.PARKED)
    reason = await reason_of(new, run_id)
    assert "NonDeterminismError" in reason
    assert "first" in reason
    assert "inserted" in reason
    assert shipped == []


async def test_gathered_branches_keep_their_own_results_over_many_replays(app: EddaApp) -> None:
    """W18: two branches of two steps each, replayed again and again, never swap results."""

    @activity
    async def echo(ctx: WorkflowContext, who: str, turn: int) -> str:
        await asyncio.sleep(0.001 if who == "left" else 0)
        return f"{who}{turn}"

    async def branch(ctx: WorkflowContext, who: str) -> list[str]:
        first = await echo(ctx, who, 1)
        await sleep(ctx, 0.005)
        return [first, await echo(ctx, who, 2)]

    @workflow
    async def both(ctx: WorkflowContext) -> list[list[list[str]]]:
        found = []
        for _ in range(3):
            found.append([*await asyncio.gather(branch(ctx, "left"), branch(ctx, "right"))])
            await sleep(ctx, 0.005)
        return found

    expected = [[["left1", "left2"], ["right1", "right2"]]] * 3
    assert await asyncio.gather(*(app.run(both) for _ in range(12))) == [expected] * 12


async def test_an_activity_beside_a_wait_runs_once_and_the_run_completes(app: EddaApp) -> None:
    """W18: gather(activity, wait) neither repeats the activity nor fails."""
    effects: list[int] = []

    @activity
    async def slow(ctx: WorkflowContext) -> str:
        effects.append(1)
        await asyncio.sleep(0.05)
        return "done"

    async def wait(ctx: WorkflowContext, seconds: float) -> str:
        await wait_timer(ctx, seconds)
        return f"waited {seconds}"

    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        return [*await asyncio.gather(slow(ctx), wait(ctx, 0.01), wait(ctx, 0.15))]

    assert await app.run(order) == ["done", "waited 0.01", "waited 0.15"]
    assert len(effects) == 1


async def test_keyword_arguments_without_a_name_of_their_own_arrive(app: EddaApp) -> None:
    """W35: a workflow with **kwargs gets them, live and on replay."""

    @workflow
    async def order(ctx: WorkflowContext, /, id: str, **more: int) -> dict[str, int]:
        await sleep(ctx, 0.01)
        return more

    assert await app.run(order, "A", pens=3, books=1) == {"pens": 3, "books": 1}


async def test_wrong_arguments_are_refused_before_anything_is_stored(app: EddaApp) -> None:
    """W35: a typo and a wrong type are errors at the call."""

    @workflow
    async def order(ctx: WorkflowContext, amount: int) -> int:
        return amount

    untyped: Any = order
    with pytest.raises(ArgumentError, match="amuont"):
        await app.start(untyped, amuont=3)
    with pytest.raises(ArgumentError, match="amount"):
        await app.start(untyped, amount="abc")
    assert (await app.find_instances())["instances"] == []


async def test_runs_are_found_by_a_boolean_argument(app: EddaApp) -> None:
    """W35: find_instances(flag=True) finds the run on every database."""

    @workflow
    async def order(ctx: WorkflowContext, flag: bool) -> None: ...

    wanted = await app.start(order, flag=True)
    await app.start(order, flag=False)
    found = await app.find_instances(input_filters={"flag": True})
    assert [instance["instance_id"] for instance in found["instances"]] == [wanted]
