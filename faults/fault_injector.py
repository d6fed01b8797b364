"""What happens to the workers from outside, one deed at a time."""

from __future__ import annotations

import random
from pathlib import Path

from edda import EddaApp
from edda.core.model import RunId
from edda.errors import EddaError

from .effect_log import Ledger
from .event_feeder import Feeder
from .sql_client import text
from .target_databases import Place
from .transactional_workload import listener, start_trade
from .worker import PROGRAM, start_some
from .worker_fleet import Fleet
from .workload import LEASE

WORKERS = 4

OPEN = "SELECT run_id FROM edda_open_run"
OWNED = f"{OPEN} WHERE owner IS NOT NULL"
OLDEST_OPEN = "SELECT MIN(r.created_at) FROM edda_open_run s JOIN edda_run r ON r.id = s.run_id"
PRUNE_MARGIN = 2_000_000
"""Microseconds: an event is dated a little before it gets its number."""
_BACKENDS = {
    "postgres": "SELECT pid FROM pg_stat_activity WHERE application_name = 'edda' AND datname = current_database()",
    "mysql": "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()",
}
_TERMINATE = {"postgres": "SELECT pg_terminate_backend({pid})", "mysql": "KILL {pid}"}


class FaultInjector:
    """Counts what it did."""

    def __init__(
        self, place: Place, fleet: Fleet, folder: Path, rng: random.Random, *, events: bool, trades: bool = False
    ) -> None:
        self._place = place
        self._fleet = fleet
        self._line = place.line()
        self._rng = rng
        self._events = events
        self._trades = trades
        self.client = EddaApp("supervisor", place.url, workflows=PROGRAM, worker=False, auto_migrate=False)
        self.feeder = Feeder(self.client, self._line)
        self._ledger = Ledger(folder / "supervisor.ledger")
        self.kills = self.stops = self.steals = self.cuts = self.pruned = self.cancels = 0

    async def open(self) -> None:
        await self.client.initialize()

    async def close(self) -> None:
        await self.client.shutdown()
        self._line.close()
        self._ledger.close()

    async def make(self) -> None:
        deeds = (
            self._kill,
            self._stop,
            self._steal,
            self._terminate,
            self._start,
            self._prune,
            self._feed,
            self._cancel,
            self._nothing,
        )
        often, very_often = 6 * self._events, 15 * (self._events or self._trades)
        await self._rng.choices(deeds, weights=(6, 30, 20, 6, 10, often, often, very_often, 28))[0]()

    async def _nothing(self) -> None:
        pass

    async def _kill(self) -> None:
        self._fleet.kill(self._rng.choice(self._fleet.members))
        self._fleet.launch()
        self.kills += 1

    async def _stop(self) -> None:
        awake = self._fleet.awake
        if len(awake) > WORKERS // 2:
            self._fleet.stop(self._rng.choice(awake), LEASE * self._rng.choice((0.5, 1.5, 2.5)))
            self.stops += 1

    async def _start(self) -> None:
        """A run that nobody owns yet, often one that a worker starts at the same moment."""
        try:
            self._ledger.note("acked", await self._start_any())
        except EddaError as error:
            self._ledger.note("failed", repr(error))

    async def _start_any(self) -> str:
        if not self._trades:
            return await start_some(self.client, self._events, sharing=0.5)
        if self._rng.random() < 0.2:
            return await self.client.start(listener)
        return await start_trade(self.client)

    async def _steal(self) -> None:
        """One run from a worker that lives."""
        owned = await self._line.rows(OWNED)
        try:
            if owned and await self.client.engine.storage.release_run(RunId(text(self._rng.choice(owned)[0]))):
                self.steals += 1
        except EddaError:  # the database is away or busy; another run will be stolen another time
            return

    async def _cancel(self) -> None:
        """Any run, whatever it is doing: also a child, one that undoes, one that is about to begin anew."""
        runs = await self._line.rows(OPEN)
        if not runs:
            return
        run_id = text(self._rng.choice(runs)[0])
        self._ledger.note("cancel", run_id)
        try:
            if await self.client.cancel(run_id):
                self.cancels += 1
        except EddaError:  # nobody knows whether the run was asked; it may end either way
            return

    async def _feed(self) -> None:
        """Else a run that waits for a type nobody sends any more would keep everything from being pruned."""
        await self.feeder.feed()

    async def _prune(self) -> None:
        """What came before the oldest open run was started is nobody's any more."""
        oldest = (await self._line.rows(OLDEST_OPEN))[0][0]
        if oldest is None:
            return
        storage, before = self.client.engine.storage, oldest - PRUNE_MARGIN
        try:
            self.pruned += await storage.prune_events(before, 100) + await storage.prune_inbox(before, 100)
        except EddaError:  # the database is away or busy; it is removed another time
            return

    async def _terminate(self) -> None:
        """A connection, from the server's side."""
        if self._place.kind not in _BACKENDS:
            return
        pids = await self._line.rows(_BACKENDS[self._place.kind])
        try:
            if pids:
                await self._line.once(_TERMINATE[self._place.kind].format(pid=int(self._rng.choice(pids)[0])))
                self.cuts += 1
        except Exception:  # a driver's: it ended by itself, or the whole server did
            self._line.close()
