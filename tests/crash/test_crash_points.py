"""Every scenario, crashed at every statement, before it, after it, and with its answer lost."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

import pytest

from edda.testing import CrashPoints, How
from tests.conftest import MakeDatabase

from .harness import Founder, Player, Taker, count_open_at_last, crash_at_each, crash_side_by_side, witness_of
from .scenarios import HOLDING, SCENARIOS, Scenario

DURABLE = ("sqlite", "postgres", "mysql")
LANES = 2
"""Databases side by side: a crash is mostly waiting. But each has up to a dozen connections, and a server may allow a
hundred in all."""
UNREACHED = 0.25
"""The part of the points that may go unreached: one look more or less is a matter of timing."""


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
        missed = await crash_side_by_side(lanes, lambda lane: Player(lane, scenario), points, how)
    assert missed <= len(points) * UNREACHED, f"{missed} of {len(points)} points were not reached"


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
        points = list(probe.seen())
        missed = await crash_at_each(partial(Taker, witness, HOLDING), points, how)
    assert missed <= len(points) * UNREACHED, f"{missed} of {len(points)} points were not reached"


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
