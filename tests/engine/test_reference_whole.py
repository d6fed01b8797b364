"""What goes wrong in the reference with sagas, cancels and runs that begin anew, row by row, and holds here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edda import (
    EddaApp,
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

from .conditions import until
from .conftest import MORTAL, MakeApp
from .events import result_of, send, start_waiting
from .histories import generation_of, undos_of, until_recorded


async def test_what_was_registered_once_is_undone_once_however_often_the_run_is_replayed(app: EddaApp) -> None:
    """W12: three waits are three replays, and one registration is one undo."""
    undone: list[str] = []

    @compensation
    async def unbook(ctx: WorkflowContext, what: str) -> None:
        undone.append(what)

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await register_compensation(ctx, unbook, "flight")
        for _ in range(3):
            await sleep(ctx, 0.01)
        raise ValueError("no car")

    run_id = await app.start(trip)
    with pytest.raises(ValueError, match="no car"):
        await result_of(app, run_id)
    assert undone == ["flight"]
    assert await undos_of(app, run_id) == ["undo:1/unbook"]


async def test_an_undo_gets_what_it_asks_for_and_nothing_else(app: EddaApp) -> None:
    """W13: the call has more arguments, and the result more fields, than the undo has parameters."""
    undone: list[Any] = []

    @compensation
    async def refund(ctx: WorkflowContext, order_id: str, receipt: str) -> None:
        undone.append((order_id, receipt))

    @activity
    @on_failure(refund)
    async def charge(ctx: WorkflowContext, order_id: str, amount: float, card: str) -> dict[str, Any]:
        return {"receipt": "no. 7", "amount": amount, "fee": 0.3}

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx, "A", 9.5, card="visa")
        raise ValueError("sold out")

    with pytest.raises(ValueError, match="sold out"):
        await app.run(order)
    assert undone == [("A", "no. 7")]


async def test_a_plain_function_undoes_after_a_restart_too(make_app: MakeApp) -> None:
    """W14: nothing has to be registered under a name for the process that goes on to find it."""
    undone: list[str] = []

    async def refund(ctx: WorkflowContext, order_id: str) -> None:
        undone.append(order_id)

    @activity
    @on_failure(refund)
    async def charge(ctx: WorkflowContext, order_id: str) -> str:
        return "receipt"

    @workflow
    async def order(ctx: WorkflowContext, order_id: str) -> None:
        await charge(ctx, order_id)
        await wait_event(ctx, "packed")
        raise ValueError("broken")

    first = await make_app()
    run_id = await start_waiting(first, order, "A")
    await first.shutdown()
    second = await make_app()
    await send(second, "packed")
    with pytest.raises(ValueError, match="broken"):
        await result_of(second, run_id)
    assert undone == ["A"]


async def test_a_consumer_that_begins_anew_for_each_event_gets_all_of_them(app: EddaApp) -> None:
    """W30: ten are sent one after the other, and ten are received, in their order."""

    @workflow
    async def consume(ctx: WorkflowContext, got: list[int]) -> list[int]:
        got.append((await wait_event(ctx, "number")).data)
        if len(got) < 10:
            await ctx.recur(got)
        return got

    run_id = await start_waiting(app, consume, [])
    for number in range(10):
        await send(app, "number", number)
    assert await result_of(app, run_id) == list(range(10))
    assert await generation_of(app, run_id) == 9


async def test_a_crash_while_a_run_begins_anew_leaves_no_run_without_an_end(make_app: MakeApp) -> None:
    """W30: twenty runs that do nothing else are in one generation or the next when the process dies, and all go on."""

    @workflow
    async def count(ctx: WorkflowContext, number: int = 0) -> int:
        if number < 100:
            await ctx.recur(number + 1)
        return number

    doomed = await make_app(settings=MORTAL)
    run_ids = [await doomed.start(count.options(delay=0.05)) for _ in range(20)]

    async def are_under_way() -> bool:
        return sum([await generation_of(doomed, run_id) for run_id in run_ids]) >= 20

    await until(are_under_way, "they begin anew")
    doomed.kill()
    survivor = await make_app(settings=MORTAL)
    for run_id in run_ids:
        assert await result_of(survivor, run_id) == 100
        assert await generation_of(survivor, run_id) == 100


async def test_a_cancel_during_an_activity_does_not_lose_its_undo(app: EddaApp) -> None:
    """W32: the effect is on its way when the cancel comes, so it is waited for, and then undone."""
    effects: list[str] = []
    begun, go = asyncio.Event(), asyncio.Event()

    @compensation
    async def refund(ctx: WorkflowContext, receipt: str) -> None:
        effects.append(f"refunded {receipt}")

    @activity
    @on_failure(refund)
    async def charge(ctx: WorkflowContext) -> dict[str, str]:
        effects.append("charged")
        begun.set()
        await go.wait()
        return {"receipt": "no. 7"}

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx)

    run_id = await app.start(order)
    await begun.wait()
    await app.cancel(run_id)
    await until_recorded(app, run_id, EntryKind.CANCEL)
    go.set()
    with pytest.raises(WorkflowCancelledError):
        await result_of(app, run_id)
    assert effects == ["charged", "refunded no. 7"]
    assert await app.handle(run_id).status() is RunStatus.CANCELLED
