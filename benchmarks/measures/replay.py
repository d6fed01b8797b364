"""G: a long history is replayed."""

from __future__ import annotations

import asyncio
import time

from benchmarks.databases import Database
from benchmarks.drivers.driver import PATIENCE, REST_SECONDS
from benchmarks.effort import Effort
from benchmarks.figures import Figures, Replay, Replayed, ReplayPoint, Suspended
from benchmarks.process import migrate, opened, start
from benchmarks.systems import System


async def replay(system: System, database: Database, effort: Effort) -> Figures:
    """A long history, a wait, and a fresh process that has to come back to the step after it."""
    await migrate(system, database)
    points: list[ReplayPoint] = []
    for steps in system.replay_sizes:
        if steps > effort.replay_limit or (points and points[-1].insert_seconds > effort.replay_cap):
            break
        points.append(await replay_once(system, database, steps))
    return Replay(tuple(points))


async def replay_once(system: System, database: Database, steps: int) -> ReplayPoint:
    async with opened(system, database) as writer:
        asleep = await writer.ask(Suspended, "suspend", steps=steps, within=PATIENCE)
        due = time.monotonic() + REST_SECONDS
    # Only a wait that is over when the reader opens shows the replay alone.
    await asyncio.sleep(max(0.0, due - time.monotonic()) + 0.2)
    async with start(system, database.url) as reader:
        replayed = await reader.ask(Replayed, "replay", run_id=asleep.run_id, timeout=90.0)
        return ReplayPoint(steps, asleep.seconds, replayed.total_seconds, replayed.replay_seconds)
