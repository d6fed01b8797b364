"""E: timers, all due at one instant and one at a time."""

from __future__ import annotations

import time

from benchmarks.databases import Database
from benchmarks.effort import Effort
from benchmarks.figures import Figures, Moments, Punctuality, Waiting
from benchmarks.process import DriverError, DriverProcess, migrate, opened
from benchmarks.systems import System

from .delays import delays

LONE_SECONDS = 1.5
"""Long enough for the workflow to leave memory."""


async def punctuality(system: System, database: Database, effort: Effort) -> Figures:
    await migrate(system, database)
    async with opened(system, database, *system.wake_flags) as worker:
        # The first ones of each kind are slow everywhere: connections, plans, caches.
        lone = [await late(worker, number, 1, LONE_SECONDS, effort) for number in range(effort.lone_timers + 1)]
        count = min(system.timers, effort.timer_limit)
        together = await late(worker, len(lone), count, system.timer_lead, effort)
    return Punctuality(
        delays(together, effort.wake_cap), delays((one for series in lone[1:] for one in series), effort.wake_cap)
    )


async def late(worker: DriverProcess, first: int, count: int, lead: float, effort: Effort) -> list[float | None]:
    due, cap = time.time() + lead, effort.wake_cap
    await worker.ask(Waiting, "doze", first=first, count=count, due=due, within=cap)
    if time.time() > due:
        raise DriverError(f"{count} timers could not be set within {lead:.0f} s")
    found = await worker.ask(
        Moments, "lateness", first=first, count=count, due=due, timeout=lead + cap, within=lead + cap + 10
    )
    return found.at
