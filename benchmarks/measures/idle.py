"""D: what workflows cost that only wait."""

from __future__ import annotations

import asyncio
import time

from benchmarks.databases import Database
from benchmarks.drivers.driver import STATEMENTS
from benchmarks.effort import Effort
from benchmarks.figures import Figures, IdlePoint, Idling, Resources, Waiting
from benchmarks.process import DriverProcess, migrate, opened
from benchmarks.servers import Counter, open_counter
from benchmarks.systems import System

WARM_UPS = 1_500
"""More than are in memory at once, so that what the process keeps for its own use is there before."""
STARTING = 900.0
SETTLING = 3.0
"""Seconds for the last commits to be told and counted."""


async def idling(system: System, database: Database, effort: Effort) -> Figures:
    await migrate(system, database)
    points: list[IdlePoint] = []
    async with opened(system, database, STATEMENTS) as worker, open_counter(database) as counter:
        waiting = (await expect(worker, 0, min(WARM_UPS, effort.crowd_limit))).count
        before = await worker.ask(Resources, "resources")
        warm = waiting
        for size in sorted({min(size, effort.crowd_limit) for size in system.crowds}):
            started = await expect(worker, waiting, size)
            waiting += size
            points.append(await watch(worker, counter, waiting - warm, started.seconds, before, effort))
    return Idling(tuple(points))


async def expect(worker: DriverProcess, first: int, count: int) -> Waiting:
    return await worker.ask(Waiting, "expect", first=first, count=count, act=True, within=STARTING)


async def watch(
    worker: DriverProcess, counter: Counter, waiting: int, start_seconds: float, before: Resources, effort: Effort
) -> IdlePoint:
    await asyncio.sleep(SETTLING)
    counted, began = await counter.read(), time.monotonic()
    first = await worker.ask(Resources, "resources")
    await asyncio.sleep(effort.idle_seconds)
    last = await worker.ask(Resources, "resources")
    count, seconds = await counter.read(), time.monotonic() - began
    return IdlePoint(
        waiting,
        start_seconds,
        (first.rss_bytes - before.rss_bytes) / 2**20,
        100 * (last.cpu_seconds - first.cpu_seconds) / seconds,
        None if last.statements is None or first.statements is None else (last.statements - first.statements) / seconds,
        None if count is None or counted is None else (count - counted) / seconds,
    )
