"""Sagas, children, time-outs and new generations, crashed at every statement that is not the same for all of them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from edda import EddaApp, RunStatus
from edda.core.model import Entry, EntryKind, RunId
from edda.core.states import ENDED
from edda.testing import CrashMode, CrashPoint, CrashPoints
from edda.workflow.workflow import Workflow
from tests.conftest import MakeDatabase

from .harness import CALM, Player, Witness, check_history, crash_side_by_side, witness_of
from .points import CHANGES, telling
from .saga_scenarios import PLAIN, WHOLE_SCENARIOS, Whole, ledger
from .test_crash_points import DURABLE, LANES

PERIODIC = re.compile(r"edda_worker|SKIP LOCKED|COMMIT; SELECT")
MOST_PERIODS = 4
"""How often heartbeats are sent and work is looked for depends on the clock: only the first few can be met again."""


class Keeper(Player):
    """Plays a family of runs, and compares what they say with the world's ledger."""

    calm = replace(CALM, poll=1)

    def __init__(self, witness: Witness, scenario: Whole) -> None:
        super().__init__(witness, scenario)
        self.whole = scenario
        self.recorded: dict[str, int] = {}
        """Steps that had succeeded at the crash, by key, and how often they had been called."""

    @property
    def workflows(self) -> Sequence[Workflow[Any, Any]]:
        return [self.whole.workflow, *self.whole.children]

    def app(self, probe: CrashPoints | None = None) -> EddaApp:
        ledger.probes[self.run_id] = probe
        return super().app(probe)

    async def launch(self, app: EddaApp) -> None:
        starter = self.whole.workflow.options(id=self.run_id, timeout=self.whole.timeout)
        await app.start(starter, self.run_id, *self.whole.arguments)

    async def _look_after(self) -> frozenset[str]:
        steps = await super()._look_after()
        for run_id in ledger.runs(self.run_id):
            for generation, history in enumerate(await self._generations(run_id)):
                keys = [f"{run_id}/{generation}/{entry.step}" for entry in history if _is_success(entry)]
                self.recorded |= {key: ledger.calls[key] for key in keys}
        return steps

    async def _generations(self, run_id: str) -> list[Sequence[Entry]]:
        """The histories, of which there is none behind the last: a generation is there as a whole or not at all."""
        storage, id = self.witness.storage, RunId(run_id)
        record = await storage.get(id)
        last = -1 if record is None else record.generation
        histories = [await storage.history(id, generation) for generation in range(last + 1)]
        assert not await storage.history(id, last + 1)
        assert all(history[0].kind is EntryKind.RECUR for history in histories[1:])
        return [*histories]

    async def check_remains(self) -> None:
        assert ledger.of(self.run_id) in self.whole.ledger
        assert all(ledger.calls[key] == times for key, times in self.recorded.items()), "what was recorded ran again"
        if self.whole.once is not None:
            assert ledger.calls[f"{self.run_id}/0/{self.whole.once}"] == 1, "what had happened was done again"
        for run_id in ledger.runs(self.run_id):
            await self._check_run(RunId(run_id), ENDED if run_id == self.run_id else {self.whole.child_end})

    async def _check_run(self, run_id: RunId, ends: Set[RunStatus]) -> None:
        storage = self.witness.storage
        record = await storage.get(run_id)
        assert record is not None
        assert record.status in ends
        histories = await self._generations(run_id)
        for history in histories:
            check_history(history)
        entries = [entry for history in histories for entry in history]
        letters = [entry.inbox_no for entry in entries if entry.inbox_no is not None]
        assert letters == list(range(1, len(letters) + 1)), "the inbox was not read in order"
        events = Counter(entry.event for entry in entries if entry.kind is EntryKind.EVENT and entry.ok)
        assert set(events.values()) <= {1}, "an event was received twice"
        assert await storage.waits(run_id) == ()
        assert await storage.watchers(run_id) == ()


def _is_success(entry: Entry) -> bool:
    return entry.ok and entry.kind in {EntryKind.STEP, EntryKind.LATE}


@pytest.mark.parametrize("how", CrashMode)
@pytest.mark.parametrize("scenario", WHOLE_SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("kind", DURABLE)
@pytest.mark.timeout(300)
async def test_a_crash_at_any_statement_leaves_nothing_half_done(
    kind: str, scenario: Whole, how: CrashMode, make_database: MakeDatabase
) -> None:
    async with AsyncExitStack() as stack:
        lanes = [await stack.enter_async_context(witness_of(make_database(kind))) for _ in range(LANES)]
        points = telling(kind, how, await points_of(lanes[0], scenario))
        await crash_side_by_side(lanes, lambda lane: Keeper(lane, scenario), points, how)


async def points_of(witness: Witness, scenario: Whole) -> list[CrashPoint]:
    """What every app sends at its start, and what every run is read with, is tested with the other scenarios."""
    start, plain = CrashPoints(), CrashPoints()
    app = Keeper(witness, PLAIN).app(start)
    await app.initialize()
    common = set(start.seen())
    await app.shutdown(1)
    await Keeper(witness, PLAIN).undisturbed(plain)
    looks = {point.statement for point in plain.seen() if not CHANGES.search(point.statement)}
    points = await _play_calmly(witness, scenario)
    return [point for point in points if point not in common and point.statement not in looks and not _is_chance(point)]


def _is_chance(point: CrashPoint) -> bool:
    return point.nth > MOST_PERIODS and PERIODIC.search(point.statement) is not None


async def _play_calmly(witness: Witness, scenario: Whole) -> list[CrashPoint]:
    """The points from the moment on that the scenario is about, up to its end."""
    probe, player = CrashPoints(), Keeper(witness, scenario)
    app = player.app(probe)
    looking = asyncio.create_task(_look_when_reached(player.run_id, probe))
    result = await player.use(app)
    before = looking.result() if looking.done() else set()
    points = [point for point in probe.seen() if point not in before]
    looking.cancel()
    await app.shutdown(1)
    assert result == scenario.expected
    await player.check_remains()
    return points


async def _look_when_reached(run_id: str, probe: CrashPoints) -> set[CrashPoint]:
    await ledger.reached[run_id].wait()
    return set(probe.seen())
