"""Every scenario, crashed at every statement, before it, after it, and with its answer lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from edda.testing import CrashPoints, How, Point
from tests.conftest import MakeDatabase

from .harness import Founder, Player, Taker, Witness, count_open_at_last, witness_of
from .scenarios import HOLDING, SCENARIOS, Scenario

DURABLE = ("sqlite", "postgres", "mysql")
LANES = 3
"""Databases side by side: a crash is mostly waiting."""


@pytest.mark.parametrize("how", How)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("kind", DURABLE)
@pytest.mark.timeout(300)
async def test_a_crash_at_any_statement_changes_nothing(
    kind: str, scenario: Scenario, how: How, make_database: MakeDatabase
) -> None:
    async with AsyncExitStack() as stack:
        lanes = [await stack.enter_async_context(witness_of(make_database(kind))) for _ in range(LANES)]
        probe = CrashPoints()
        calm = await Player(lanes[0], scenario).undisturbed(probe)
        assert calm.result == scenario.expected
        assert set(calm.effects) == scenario.steps
        points = list(probe.seen())
        crashes = [crash_at_each(lane, scenario, points[number::LANES], how) for number, lane in enumerate(lanes)]
        missed = sum(await asyncio.gather(*crashes))
    # A poll more or less is a matter of timing; most points are hit every time.
    assert missed <= len(points) // 4, f"{missed} of {len(points)} points were not reached"


async def crash_at_each(witness: Witness, scenario: Scenario, points: list[Point], how: How) -> int:
    """How many points were not reached."""
    missed = 0
    for point in points:
        player = Player(witness, scenario)
        disturbed = await player.disturbed(point, how)
        place = f"{how} {point.nth} x {point.statement}"
        assert disturbed.outcome.result == scenario.expected, place
        assert set(disturbed.outcome.effects) == scenario.steps, place
        assert not disturbed.repeated - scenario.repeatable, place
        await player.check_remains()
        missed += not disturbed.struck
    return missed


@pytest.mark.parametrize("how", How)
@pytest.mark.parametrize("kind", DURABLE)
@pytest.mark.timeout(300)
async def test_a_crash_while_taking_over_leaves_the_run_to_the_next(
    kind: str, how: How, make_database: MakeDatabase
) -> None:
    async with witness_of(make_database(kind)) as witness:
        probe = CrashPoints()
        player = Taker(witness, HOLDING)
        await player.leave_behind()
        calm = await player.undisturbed(probe)
        assert calm.result == HOLDING.expected
        missed, points = 0, list(probe.seen())
        for point in points:
            player = Taker(witness, HOLDING)
            await player.leave_behind()
            disturbed = await player.disturbed(point, how)
            place = f"{how} {point.nth} x {point.statement}"
            assert disturbed.outcome.result == HOLDING.expected, place
            assert disturbed.outcome.effects["act:1"] == 1, place
            assert not disturbed.repeated - HOLDING.repeatable, place
            await player.check_remains()
            missed += not disturbed.struck
    assert missed <= len(points) // 2, f"{missed} of {len(points)} points were not reached"


@pytest.mark.parametrize("how", How)
@pytest.mark.parametrize("kind", DURABLE)
@pytest.mark.timeout(300)
async def test_a_run_born_in_a_batch_is_there_if_its_start_returned(
    kind: str, how: How, make_database: MakeDatabase
) -> None:
    straight = SCENARIOS[0]
    async with witness_of(make_database(kind)) as witness:
        probe = CrashPoints()
        await Founder(witness, straight).undisturbed(probe)
        for point in probe.seen():
            player = Founder(witness, straight)
            disturbed = await player.disturbed(point, how)
            assert disturbed.outcome.result == straight.expected, point
            assert not disturbed.repeated, point
            await player.check_remains()
        # A run whose start had no answer may be there or not; if it is, it must end though nobody asks any more.
        assert await count_open_at_last(player) == 0
