"""Transactions of the user's, messages and outgoing events, crashed at every statement that is not the same for all."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from edda import EddaApp
from edda.core.codec import Codec
from edda.core.model import Entry, EntryKind, RunId
from edda.core.states import ENDED
from edda.engine.outbox.relayer import Relayer, RelaySettings
from edda.testing import CrashMode, CrashPoint, CrashPoints
from edda.workflow.workflow import Workflow
from tests.conftest import Database, MakeDatabase
from tests.engine.conftest import url_of

from .harness import CALM, DEADLINE, HASTY, Player, Witness, check_history, crash_side_by_side, witness_of
from .points import CHANGES, is_first_or_all
from .test_crash_points import DURABLE, LANES
from .test_saga_crash_points import MOST_PERIODS
from .transaction_scenarios import PLAIN, TALK_SCENARIOS, Base, RecordingSink, Remains, Stage, Talk, memory

DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgres": "postgresql+asyncpg", "mysql": "mysql+asyncmy"}
LASTS = {
    "sqlite": re.compile("COMMIT"),
    "postgres": re.compile(r"COMMIT|^\s*(WITH|UPDATE)"),
    "mysql": re.compile("COMMIT"),
}
"""Dying at any other statement that changes something leaves what dying before the next of these leaves: on PostgreSQL
a single statement may be a transaction of its own."""
COMMITS = re.compile(r"COMMIT$|batch_no")
"""What runs of every kind commit with: the journal's batch, or a transaction that could be anybody's."""
PERIODIC = re.compile(r"(?i)\bdue\b.* FROM edda_outbox")
"""How often the outbox is looked into depends on the clock."""
QUICK_LEASE = 300_000
"""Microseconds, for a message that an activity took and did not use."""
RELAYING = RelaySettings(lease=0.5, timeout=0.4, poll=0.1, first_pause=0.05)
PATIENCE = 5.0
"""Seconds in which what was sent before a crash has its effect."""


@asynccontextmanager
async def engine_of(database: Database) -> AsyncIterator[AsyncEngine]:
    """The user's own, which all processes share: what a dead one has open is rolled back."""
    engine = create_async_engine(make_url(url_of(database)).set(drivername=DRIVERS[database.kind]))
    try:
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield engine
    finally:
        await engine.dispose()


class Talker(Player):
    calm = replace(CALM, poll=0.5)

    def __init__(self, witness: Witness, engine: AsyncEngine, scenario: Talk) -> None:
        super().__init__(witness, scenario)
        self.talk = scenario
        self.remains = Remains(self.run_id, witness.storage, engine)
        self._probe: CrashPoints | None = None
        self._recorded: dict[str, int] = {}
        """Steps that were done at the crash, by key, and how often their bodies had been called."""

    @property
    def workflows(self) -> Sequence[Workflow[Any, Any]]:
        return [self.talk.workflow, *self.talk.others]

    def app(self, probe: CrashPoints | None = None) -> EddaApp:
        self._probe = probe
        return EddaApp(
            "crash",
            storage=self.witness.database.storage(probe),
            engine=self.remains.engine,
            probe=probe,
            workflows=self.workflows,
            settings=self.calm if probe is not None else HASTY,
            ids=self.ids,
        )

    async def use(self, app: EddaApp) -> str:
        async with asyncio.timeout(DEADLINE):
            await app.initialize()
            async with self._relaying(app):
                try:
                    return repr(await self.talk.play(app, Stage(self.run_id, self.remains.engine, self._probe)))
                except LookupError as error:
                    return repr(error)

    @asynccontextmanager
    async def _relaying(self, app: EddaApp) -> AsyncIterator[None]:
        if not self.talk.sends:
            yield
            return
        engine = app.engine
        relayer = Relayer(
            engine.storage, RecordingSink(), clock=engine.clock, codec=engine.codec, settings=RELAYING, listens=False
        )
        engine.relayer = relayer
        relayer.start()
        try:
            yield
            await relayer.stop(1)
        finally:
            relayer.kill()

    async def _look_after(self) -> frozenset[str]:
        await self._check_rows()
        self._recorded = {place: memory.calls[place] for place in await self._done()}
        return await super()._look_after()

    async def _check_rows(self) -> None:
        """A commit may still be on its way, though whoever sent it is dead."""
        latest = asyncio.get_running_loop().time() + PATIENCE
        while (fault := await self._find_fault()) is not None:
            assert asyncio.get_running_loop().time() < latest, fault
            await asyncio.sleep(0.05)

    async def _find_fault(self) -> str | None:
        truths = [await look(self.remains) for look in self.talk.together]
        if len(set(truths)) > 1:
            return f"half of it is there: {truths}"
        expected = await self._done()
        if self.talk.undone is not None and len(expected) == len(self.talk.writes):
            expected.remove(f"{self.run_id}{self.talk.undone}")
        found = [place for place in await self.remains.places() if place != self.run_id]
        return None if sorted(expected) == found else f"done are {expected}, and there are rows of {found}"

    async def _done(self) -> list[str]:
        places = [f"{self.run_id}{write}" for write in self.talk.writes]
        return [place for place in places if await self.remains.is_done(place)]

    async def check_remains(self) -> None:
        await self._check_rows()
        assert all(memory.calls[place] == times for place, times in self._recorded.items()), "what was done ran again"
        for name in self.talk.cast:
            await self._check_run(RunId(f"{self.run_id}{name}"))
        facts = await self.witness.storage.run_values(self.run_id)
        assert tuple(Codec().decode(fact.value) for fact in facts) == self.talk.facts

    async def _check_run(self, run_id: RunId) -> None:
        storage = self.witness.storage
        record = await storage.get(run_id)
        assert record is not None
        assert record.status in ENDED
        histories = [await storage.history(run_id, generation) for generation in range(record.generation + 1)]
        for generation, history in enumerate(histories):
            check_history(history)
            for entry in history:
                assert await storage.find_step_commit(run_id, generation, entry.step) is None, "it is recorded twice"
        check_letters([entry for history in histories for entry in history])
        assert await storage.waits(run_id) == ()


def check_letters(entries: Sequence[Entry]) -> None:
    letters = [entry.inbox_no for entry in entries if entry.inbox_no is not None]
    assert letters == list(range(1, len(letters) + 1)), "the inbox was not read in order"
    received = Counter(entry.event for entry in entries if entry.kind is EntryKind.MESSAGE and entry.ok)
    assert set(received.values()) <= {1}, "a message was received twice"


@pytest.fixture(autouse=True)
def quick_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edda.engine.run.effects.MESSAGE_LEASE", QUICK_LEASE)


@pytest.mark.parametrize("how", CrashMode)
@pytest.mark.parametrize("scenario", TALK_SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("kind", DURABLE)
@pytest.mark.timeout(300)
async def test_a_crash_at_any_statement_separates_nothing_that_belongs_together(
    kind: str, scenario: Talk, how: CrashMode, make_database: MakeDatabase
) -> None:
    async with AsyncExitStack() as stack:
        lanes = [await stack.enter_async_context(witness_of(make_database(kind))) for _ in range(LANES)]
        engines = {lane: await stack.enter_async_context(engine_of(lane.database)) for lane in lanes}
        points = await points_of(partial(Talker, lanes[0], engines[lanes[0]]), scenario)
        points = [point for point in points if _counts(kind, how, point)]
        await crash_side_by_side(lanes, lambda lane: Talker(lane, engines[lane], scenario), points, how)


def _counts(kind: str, how: CrashMode, point: CrashPoint) -> bool:
    is_change = CHANGES.search(point.statement) is not None
    if how is CrashMode.UNKNOWN:
        return (kind != "sqlite" or "COMMIT" in point.statement) if is_change else is_first_or_all(point)
    return is_change and LASTS[kind].search(point.statement) is not None


async def points_of(new_player: Callable[[Talk], Talker], scenario: Talk) -> list[CrashPoint]:
    """What every app sends at its start and at its end, and every run besides its history, is tested elsewhere."""
    start, plain, probe = CrashPoints(), CrashPoints(), CrashPoints()
    app = new_player(PLAIN).app(start)
    await app.initialize()
    at_start = set(start.seen())
    await app.shutdown(1)
    await new_player(PLAIN).undisturbed(plain)
    common = {point.statement for point in plain.seen() if not COMMITS.search(point.statement)}
    player = new_player(scenario)
    calm = await player.undisturbed(probe)
    assert calm.result == scenario.expected
    await player.check_remains()
    points = [point for point in probe.seen() if point not in at_start and point.statement not in common]
    return [point for point in points if point.nth <= MOST_PERIODS or not PERIODIC.search(point.statement)]
