"""Every scenario, crashed at every statement, before it, after it, and with its answer lost."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from edda.testing import CrashMode, CrashPoint, CrashPoints
from tests import tiers
from tests.conftest import MakeDatabase

from .harness import Founder, Player, Taker, Witness, count_open_at_last, crash_side_by_side, witness_of
from .points import CHANGES, telling
from .scenarios import HOLDING, SCENARIOS, Scenario

DURABLE = ("sqlite", "postgres", "mysql")
LANES = 1
"""Databases side by side. More would wait less, but each has up to a dozen connections, a server may allow a hundred in
all, and the suite has six workers."""
STRAIGHT = SCENARIOS[0]


@pytest.mark.parametrize("how", CrashMode)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("kind", DURABLE)
@pytest.mark.timeout(300)
async def test_a_crash_at_any_statement_changes_nothing(
    kind: str, scenario: Scenario, how: CrashMode, make_database: MakeDatabase
) -> None:
    async with AsyncExitStack() as stack:
        lanes = [await stack.enter_async_context(witness_of(make_database(kind))) for _ in range(LANES)]
        probe = CrashPoints()
        calm = await Player(lanes[0], scenario).undisturbed(probe)
        assert calm.result == scenario.expected
        assert set(calm.effects) == scenario.steps
        points = await points_of(lanes[0], scenario, how, probe)
        await crash_side_by_side(lanes, lambda lane: Player(lane, scenario), points, how)


async def points_of(witness: Witness, scenario: Scenario, how: CrashMode, probe: CrashPoints) -> list[CrashPoint]:
    """All of them, or those that no other scenario has, except for one scenario."""
    if tiers.current().all_crash_points or scenario is STRAIGHT:
        return list(probe.seen())
    return telling(witness.database.kind, how, probe.seen(), await common_points(witness))


async def common_points(witness: Witness) -> set[CrashPoint]:
    """What every app sends at its start, and what every run is read with."""
    start, plain = CrashPoints(), CrashPoints()
    app = Player(witness, STRAIGHT).app(start)
    await app.initialize()
    at_start = set(start.seen())
    await app.shutdown(1)
    await Player(witness, STRAIGHT).undisturbed(plain)
    return at_start | {point for point in plain.seen() if not CHANGES.search(point.statement)}


@pytest.mark.parametrize("how", CrashMode)
@pytest.mark.parametrize("kind", DURABLE)
@pytest.mark.timeout(300)
async def test_a_crash_while_taking_over_leaves_the_run_to_the_next(
    kind: str, how: CrashMode, make_database: MakeDatabase
) -> None:
    async with witness_of(make_database(kind)) as witness:
        probe = CrashPoints()
        player = Taker(witness, HOLDING)
        await player.leave_behind()
        calm = await player.undisturbed(probe)
        assert calm.result == HOLDING.expected
        points = await points_of(witness, HOLDING, how, probe)
        await crash_side_by_side([witness], lambda lane: Taker(lane, HOLDING), points, how)


@pytest.mark.parametrize("how", CrashMode)
@pytest.mark.parametrize("kind", DURABLE)
@pytest.mark.timeout(300)
async def test_a_run_born_in_a_batch_is_there_if_its_start_returned(
    kind: str, how: CrashMode, make_database: MakeDatabase
) -> None:
    async with witness_of(make_database(kind)) as witness:
        probe = CrashPoints()
        await Founder(witness, STRAIGHT).undisturbed(probe)
        for point in probe.seen() if tiers.current().all_crash_points else telling(kind, how, probe.seen()):
            player = Founder(witness, STRAIGHT)
            disturbed = await player.disturbed(point, how)
            assert disturbed.outcome.result == STRAIGHT.expected, point
            assert not disturbed.repeated, point
            await player.check_remains()
        # A run whose start had no answer may be there or not; if it is, it must end though nobody asks any more.
        assert await count_open_at_last(player) == 0
