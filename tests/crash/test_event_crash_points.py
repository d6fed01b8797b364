"""Every scenario with events, crashed at every statement that is not the same for all of them."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

import pytest

from edda import EddaApp
from edda.core.model import EntryKind
from edda.engine.events import run_id_for_event
from edda.testing import CrashMode, CrashPoint, CrashPoints
from tests.conftest import MakeDatabase

from .event_scenarios import EVENT_SCENARIOS, SUMMONED, event_for
from .harness import Player, Witness, crash_side_by_side, witness_of
from .points import telling
from .scenarios import Scenario
from .test_crash_points import DURABLE, LANES, common_points


class Reader(Player):
    """Plays a run that waits for events."""

    async def check_remains(self) -> None:
        await super().check_remains()
        history = await self.witness.storage.history(self.run_id)
        given_back = [entry.event for entry in history if entry.kind is EntryKind.LATE_EVENT]
        received = Counter(entry.event for entry in history if entry.kind is EntryKind.EVENT and entry.ok)
        assert set(received.values()) <= {1}, "an event was received twice"
        assert set(given_back) <= set(received), "an event was given back and never found again"
        assert await self.witness.storage.waits(self.run_id) == ()


class Summoner(Reader):
    """Starts its run by an event: the same event, the same run."""

    def __init__(self, witness: Witness, scenario: Scenario) -> None:
        super().__init__(witness, scenario)
        self.event = event_for(self.run_id, scenario.name, 1)
        self.run_id = run_id_for_event(scenario.name, self.event)

    async def launch(self, app: EddaApp) -> None:
        await app.receive([self.event])


@pytest.mark.parametrize("how", CrashMode)
@pytest.mark.parametrize("scenario", [*EVENT_SCENARIOS, SUMMONED], ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("kind", DURABLE)
@pytest.mark.timeout(300)
async def test_a_crash_at_any_statement_loses_no_event_and_repeats_none(
    kind: str, scenario: Scenario, how: CrashMode, make_database: MakeDatabase
) -> None:
    async with AsyncExitStack() as stack:
        lanes = [await stack.enter_async_context(witness_of(make_database(kind))) for _ in range(LANES)]
        points = telling(kind, how, await points_of(lanes[0], scenario))
        await crash_side_by_side(lanes, lambda lane: player_of(lane, scenario), points, how)


def player_of(witness: Witness, scenario: Scenario) -> Player:
    return (Summoner if scenario is SUMMONED else Reader)(witness, scenario)


async def points_of(witness: Witness, scenario: Scenario) -> list[CrashPoint]:
    """Crashes at what is the same for every scenario are tested with the others."""
    probe = CrashPoints()
    calm = await player_of(witness, scenario).undisturbed(probe)
    assert calm.result == scenario.expected
    assert set(calm.effects) == scenario.steps
    common = await common_points(witness)
    return [point for point in probe.seen() if point not in common]
