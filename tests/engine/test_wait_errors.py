"""Waits that cannot be: refused where they are written, with what to do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edda import EddaApp, RunStatus, WorkflowContext, activity, sleep, wait_event, workflow
from edda.engine.events import MAX_MATCH_PATHS
from edda.errors import ArgumentError, NonDeterminismError, NotInWorkflowError
from edda.testing import VirtualApp

from .conditions import reason_of, until_status
from .events import result_of, send, start_waiting


async def test_two_waits_of_one_name_at_once_are_refused(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await asyncio.gather(wait_event(ctx, "a", event_id="same"), wait_event(ctx, "b", event_id="same"))

    run_id = await app.start(order)
    await until_status(app, run_id, RunStatus.PARKED)
    reason = await reason_of(app, run_id)
    assert NonDeterminismError.__name__ in reason
    assert "'same'" in reason


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"event_type": ""}, "event_type=''"),
        ({"event_type": "x" * 256}, "1 to 255"),
        ({"event_type": "a", "on_invalid": "ignore"}, '"skip" or "raise"'),
        ({"event_type": "a", "since": "yesterday"}, '"now" or an aware datetime'),
        ({"event_type": "a", "timeout_seconds": -1}, "not negative"),
        ({"event_type": "a", "match": {"": 1}}, "a path is empty"),
        ({"event_type": "a", "match": ["order_id"]}, "expected a dict"),
    ],
)
async def test_a_wait_that_makes_no_sense_is_refused_at_the_call(
    edda_app: VirtualApp, arguments: dict[str, Any], said: str
) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> str:
        try:
            await wait_event(ctx, **arguments)
        except (TypeError, ValueError) as error:
            return str(error)
        return "no error"

    assert said in await edda_app.run(order)


async def test_a_wait_in_an_activity_is_refused(app: EddaApp) -> None:
    @activity
    async def ask(ctx: WorkflowContext) -> str:
        with pytest.raises(NotInWorkflowError) as caught:
            await wait_event(ctx, "paid")
        return str(caught.value)

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await ask(ctx)

    assert "was called in the activity ask:1" in await app.run(order)


async def test_more_kinds_of_matches_than_an_event_can_bear_are_refused(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext, path: str) -> str:
        try:
            await wait_event(ctx, "paid", match={path: 1})
        except ArgumentError as error:
            await sleep(ctx, 0.001)
            return str(error)
        return "received"

    await asyncio.gather(*(start_waiting(app, order, f"field{number}") for number in range(MAX_MATCH_PATHS)))
    assert f"{MAX_MATCH_PATHS} different sets of match paths" in await app.run(order, "one more")
    known = await start_waiting(app, order, "field7")
    await send(app, "paid", {"field7": 1})
    assert await result_of(app, known) == "received"
