"""Playing a scenario with a crash in it, and looking at what is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import accumulate, count, pairwise
from typing import Any

from msgspec import Struct

from edda import EddaApp
from edda.core.model import Entry, EntryKind, RunFilter, RunId, WorkerId
from edda.core.states import ENDED, OPEN
from edda.engine.client import Ids
from edda.engine.settings import Settings
from edda.errors import EddaError, StorageUnavailableError
from edda.storage.ports import HeartbeatConnection, Storage
from edda.testing import CrashMode, CrashPoint, CrashPoints
from edda.workflow.workflow import Workflow
from tests.conftest import Database

from .scenarios import ARGUMENT, Scenario, world

CALM = Settings(call_timeout=30, linger=0, takeover_grace=0, sweep=60, heartbeat=5, poll=5, parked_first=0.01)
"""For the process that will die: nothing by the clock, so that the statements are the same every time."""
HASTY = Settings(call_timeout=30, linger=0, takeover_grace=0, sweep=0.01, heartbeat=5, poll=0.2, parked_first=0.01)
"""For the one that comes after it."""
DEADLINE = 20.0

_runs = count(1)


class Outcome(Struct, frozen=True):
    result: str
    effects: dict[str, int]


class Disturbed(Struct, frozen=True):
    """What is known at the moment of the crash, and at the end."""

    outcome: Outcome
    struck: bool
    repeated: frozenset[str]
    """Steps that were recorded at the crash and ran again after it."""


class Witness:
    """Looks at a database from outside, and can end the leases of the dead."""

    def __init__(self, database: Database, storage: Storage, pulse: HeartbeatConnection) -> None:
        self.database = database
        self.storage = storage
        self._pulse = pulse

    async def expire(self, workers: Iterable[WorkerId]) -> None:
        """Put the end of their leases into the past, so that nobody has to wait for it."""
        for worker in workers:
            await self._pulse.beat(worker, -60_000_000)


@asynccontextmanager
async def witness_of(database: Database) -> AsyncIterator[Witness]:
    storage = database.storage()
    await storage.open()
    try:
        await storage.migrate()
        pulse = await storage.open_heartbeat()
        yield Witness(database, storage, pulse)
        await pulse.close()
    finally:
        await storage.close()


class RememberedIds(Ids):
    def __init__(self) -> None:
        super().__init__()
        self.workers: list[WorkerId] = []

    def worker(self) -> WorkerId:
        self.workers.append(super().worker())
        return self.workers[-1]


TRIES = 3
UNREACHED = 0.5
"""The part of the points that may go unreached. Looks come by the clock, and senders and readers meet in more than one
order, each with statements of its own: those seen in the calm play may not come again, least of all in a crowd. The
bound is there for a harness that reaches nothing."""


class Player:
    calm = CALM

    def __init__(self, witness: Witness, scenario: Scenario) -> None:
        self.witness = witness
        self.scenario = scenario
        self.run_id = RunId(f"{scenario.name}-{next(_runs)}")
        self.ids = RememberedIds()
        self.acknowledged: set[RunId] = set()

    @property
    def workflows(self) -> Sequence[Workflow[Any, Any]]:
        return [self.scenario.workflow]

    def app(self, probe: CrashPoints | None = None) -> EddaApp:
        settings = self.calm if probe is not None else HASTY
        return EddaApp(
            "crash",
            storage=self.witness.database.storage(probe),
            workflows=self.workflows,
            settings=settings,
            ids=self.ids,
        )

    async def use(self, app: EddaApp) -> str:
        """What a careful client does: the start has an id of its own, so it can be asked for again."""
        async with asyncio.timeout(DEADLINE):
            await app.initialize()
            await self.launch(app)
            await self.scenario.meddle(app, self.run_id)
            try:
                return repr(await app.handle(self.run_id).result())
            except EddaError as error:
                return type(error).__name__
            except LookupError as error:
                return repr(error)

    async def launch(self, app: EddaApp) -> None:
        starter = self.scenario.workflow.options(id=self.run_id)
        await app.start(starter, ARGUMENT.get(self.scenario.name, 1))

    async def undisturbed(self, probe: CrashPoints) -> Outcome:
        app = self.app(probe)
        result = await self.use(app)
        await app.shutdown(1)
        return Outcome(result, world.of(self.run_id))

    async def disturbed(self, point: CrashPoint, how: CrashMode) -> Disturbed:
        loop, struck = asyncio.get_running_loop(), asyncio.Event()
        probe = CrashPoints(point, how, on_strike=lambda: loop.call_soon_threadsafe(struck.set))
        app = self.app(probe)
        result = await self._until_dead(app, probe, struck)
        recorded = await self._look_after()
        before = world.of(self.run_id)
        if result is None:
            result = await self._recover()
        after = world.of(self.run_id)
        repeated = frozenset(step for step in recorded if after.get(step, 0) > before.get(step, 0))
        return Disturbed(Outcome(result, after), probe.struck, repeated)

    async def _until_dead(self, app: EddaApp, probe: CrashPoints, struck: asyncio.Event) -> str | None:
        """The result, or None if the process died first. Lost answers are survived, except while it starts."""
        client = asyncio.create_task(self._use_and_leave(app))
        death = asyncio.create_task(struck.wait())
        await asyncio.wait({client, death}, return_when=asyncio.FIRST_COMPLETED)
        if not probe.dead:
            death.cancel()
            with suppress(StorageUnavailableError):
                return await client
        app.kill()
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        return None

    async def _use_and_leave(self, app: EddaApp) -> str:
        result = await self.use(app)
        await app.shutdown(1)
        return result

    async def _look_after(self) -> frozenset[str]:
        """The steps whose outcome is recorded; and nobody waits for the dead worker's lease."""
        history = await self.witness.storage.history(self.run_id)
        await self.witness.expire(self.ids.workers)
        return frozenset(entry.step for entry in history if entry.kind is EntryKind.STEP)

    async def _recover(self) -> str:
        app = self.app()
        try:
            return await self.use(app)
        finally:
            await app.shutdown(1)

    async def prepare(self) -> None:
        """What has to be there before it begins."""

    async def leave_behind(self) -> None:
        """A worker dies in the middle of the run, and its lease is over."""
        world.held[self.run_id] = asyncio.Event()
        app = self.app()
        await app.initialize()
        await app.start(self.scenario.workflow.options(id=self.run_id), 1)
        await asyncio.wait_for(world.held[self.run_id].wait(), DEADLINE)
        app.kill()
        del world.held[self.run_id]
        await self._look_after()

    async def check_remains(self) -> None:
        """The invariants: ended once, a history without gaps, nothing left behind."""
        record = await self.witness.storage.get(self.run_id)
        assert record is not None
        assert record.status in ENDED
        check_history(await self.witness.storage.history(self.run_id))


def check_history(history: Sequence[Entry]) -> None:
    assert [entry.seq for entry in history] == list(range(1, len(history) + 1))
    # What nobody knows when undoing begins is asked for once more.
    rounds = accumulate(entry.kind is EntryKind.SETTLED for entry in history)
    kinds = {EntryKind.STEP, EntryKind.TIMER}
    outcomes = [(entry.step, asked) for entry, asked in zip(history, rounds, strict=True) if entry.kind in kinds]
    assert len(outcomes) == len(set(outcomes)), "a step has two outcomes"
    assert all(earlier.at <= later.at for earlier, later in pairwise(history))


class Taker(Player):
    """Plays a run that another worker has left behind."""

    calm = Settings(call_timeout=30, linger=0, takeover_grace=0, sweep=0.05, heartbeat=5, poll=5)

    async def prepare(self) -> None:
        await self.leave_behind()


class Founder(Player):
    """Starts without an id of its own: the run is born in the journal's batch, and a client that got no answer
    does not know whether it was."""

    async def launch(self, app: EddaApp) -> None:
        if self.run_id not in self.acknowledged:
            self.run_id = RunId(await app.start(self.scenario.workflow, 1))
            self.acknowledged.add(self.run_id)


async def crash_side_by_side(
    lanes: Sequence[Witness], new_player: Callable[[Witness], Player], points: Sequence[CrashPoint], how: CrashMode
) -> None:
    """A share of the points on each database."""
    shares = [points[number :: len(lanes)] for number in range(len(lanes))]
    crashes = [_crash_at_each(partial(new_player, lane), share, how) for lane, share in zip(lanes, shares, strict=True)]
    missed = sum(await asyncio.gather(*crashes))
    assert missed <= len(points) * UNREACHED, f"{missed} of {len(points)} points were not reached"


async def _crash_at_each(new_player: Callable[[], Player], points: Iterable[CrashPoint], how: CrashMode) -> int:
    """How many points were not reached, though each was tried a few times."""
    missed = 0
    for point in points:
        for _ in range(TRIES):
            if await _crash(new_player(), point, how):
                break
        else:
            missed += 1
    return missed


async def _crash(player: Player, point: CrashPoint, how: CrashMode) -> bool:
    """Whether it was reached; the outcome must be right in any case."""
    await player.prepare()
    disturbed = await player.disturbed(point, how)
    place = f"{how} {point.nth} x {point.statement}"
    scenario = player.scenario
    assert disturbed.outcome.result == scenario.expected, place
    assert set(disturbed.outcome.effects) == scenario.steps, place
    assert not disturbed.repeated - scenario.repeatable, place
    await player.check_remains()
    return disturbed.struck


async def count_open_at_last(player: Player) -> int:
    """Open runs, after a worker has had its time with them."""
    async with player.app() as app, asyncio.timeout(DEADLINE):
        while left := await _count_open(app.engine.storage):  # noqa: ASYNC110 - the fact is in the database
            await asyncio.sleep(0.02)
        return left


async def _count_open(storage: Storage) -> int:
    return sum([len(await storage.find(RunFilter(status=status))) for status in OPEN])
