"""F: a worker is killed, another one goes on."""

from __future__ import annotations

import asyncio
import random
import time

from benchmarks.databases import Database
from benchmarks.effort import Effort
from benchmarks.figures import Figures, Finished, Held, Recovery
from benchmarks.process import DriverProcess, migrate, opened
from benchmarks.systems import System

HELD = 50


async def recovery(system: System, database: Database, effort: Effort) -> Figures:
    """Fifty workflows in the middle of a step, kill -9, and another worker; default settings."""
    await migrate(system, database)
    async with opened(system, database) as victim:
        held = await victim.ask(Held, "hold", count=HELD, timeout=20.0)
        if database.kind in system.standby:
            async with opened(system, database) as heir:
                # At no particular moment of the heir's rounds: killed as it opens, its first look would find all.
                await asyncio.sleep(random.uniform(3.0, 8.0))
                return await outcome(heir, held, kill(victim), effort)
        killed_at = kill(victim)
        async with opened(system, database) as heir:
            return await outcome(heir, held, killed_at, effort)


def kill(victim: DriverProcess) -> float:
    victim.kill()
    return time.monotonic()


async def outcome(heir: DriverProcess, held: Held, killed_at: float, effort: Effort) -> Recovery:
    cap = effort.recovery_cap
    done = await heir.ask(Finished, "finish", count=held.count, timeout=cap, within=cap + 10)
    end = done.at if done.count >= held.count else time.monotonic()
    return Recovery(held.count, done.count, end - killed_at)
