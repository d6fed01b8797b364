"""C: workflows that wait for an event of their own, and how fast and how soon they get it."""

from __future__ import annotations

from benchmarks.databases import Database
from benchmarks.drivers.driver import PATIENCE
from benchmarks.effort import Effort
from benchmarks.figures import Burst, Delays, Figures, Moments, Waiting, Waking
from benchmarks.process import DriverProcess, migrate, opened
from benchmarks.systems import System

from .delays import delays

GAP = 0.05
"""Seconds between two events when it is not about how many."""
WARM_UPS = 50


async def waking(system: System, database: Database, effort: Effort) -> Figures:
    await migrate(system, database)
    async with opened(system, database, *system.wake_flags) as worker:
        await burst(worker, 0, WARM_UPS, effort)
        here = await single(worker, worker, WARM_UPS, effort)
        across = None
        if database.kind in system.senders:
            async with opened(system, database, *system.wake_flags, worker=False) as sender:
                across = await single(worker, sender, WARM_UPS + effort.wakes, effort)
        # Last: what a system has not finished when it is given up would be in the other figures.
        return Waking(await burst(worker, WARM_UPS + 2 * effort.wakes, effort.waits, effort), here, across)


async def burst(worker: DriverProcess, first: int, count: int, effort: Effort) -> Burst:
    await worker.ask(Waiting, "expect", first=first, count=count, act=False, within=PATIENCE)
    cap = effort.wake_cap
    return await worker.ask(Burst, "burst", first=first, count=count, timeout=cap, within=2 * cap + 30)


async def single(worker: DriverProcess, sender: DriverProcess, first: int, effort: Effort) -> Delays:
    """From the call that sends an event to the body of the step behind the wait."""
    these = {"first": first, "count": effort.wakes}
    await worker.ask(Waiting, "expect", **these, act=True, within=PATIENCE)
    sent = await sender.ask(Moments, "send", **these, gap=GAP, within=PATIENCE)
    cap = effort.wake_cap
    came = await worker.ask(Moments, "marks", **these, timeout=cap, within=cap + 10)
    return delays(
        (after - before if after and before else None for before, after in zip(sent.at, came.at, strict=True)), cap
    )
