"""Steps whose transaction the database rolls back for another's sake: no fault of theirs, so no attempt of theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from sqlalchemy import select

from edda import EddaApp, RetryPolicy, WorkflowContext, activity, workflow
from tests.conftest import Database

from .orders import Order, open_orders

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture(params=("postgres", "mysql"))
def database(request: pytest.FixtureRequest, make_database: Callable[[str], Database]) -> Database:
    return make_database(request.param)


async def test_steps_that_deadlock_both_succeed_at_their_first_attempt(
    app: EddaApp, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    began = holding = 0
    both = asyncio.Event()

    @activity(retry_policy=ONCE)
    async def swap(ctx: WorkflowContext, first: str, second: str) -> int:
        nonlocal began, holding
        began += 1
        await ctx.session.execute(select(Order).where(Order.item == first).with_for_update())
        holding += 1
        if holding == 2:  # each holds one row before it asks for the other's
            both.set()
        await both.wait()
        await ctx.session.execute(select(Order).where(Order.item == second).with_for_update())
        ctx.session.add(Order(item=f"{first} before {second}"))
        return ctx.attempt

    @workflow
    async def swapping(ctx: WorkflowContext, first: str, second: str) -> int:
        return await swap(ctx, first, second)

    async with open_orders(database) as orders:
        async with orders.session as session:
            session.add_all([Order(item="lute"), Order(item="harp")])
            await session.commit()
        with caplog.at_level(logging.INFO, "edda.run"):
            runs = (app.run(swapping, "lute", "harp"), app.run(swapping, "harp", "lute"))
            assert list(await asyncio.gather(*runs)) == [1, 1]
        assert await orders.items() == ["harp", "harp before lute", "lute", "lute before harp"]
    assert began == 3
    lines = [vars(record) for record in caplog.records if "edda_line" in vars(record)]
    repeated = [line for line in lines if line["edda_line"] == "step_repeated"]
    found = [(line["levelname"], line["edda_step"], line["edda_attempt"]) for line in repeated]
    assert found == [("INFO", "swap:1", 1)]
