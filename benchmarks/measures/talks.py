"""J: messages through channels, and events out of the outbox."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.databases import Database
from benchmarks.drivers.driver import PATIENCE
from benchmarks.effort import Effort
from benchmarks.figures import Arrived, Emitted, Figures, Flow, Listening, Resources, Talking, Waiting
from benchmarks.process import DriverProcess, migrate, opened, start_module
from benchmarks.systems import System

COMPETITORS = 10
SUBSCRIBERS = 2
EVENTS_PER_WORKFLOW = 5
WARM_UPS = 20
STALL = 10.0
"""Seconds without anything new after which the rest is given up."""


async def talking(system: System, database: Database, effort: Effort) -> Figures:
    await migrate(system, database)
    messages = min(system.messages, effort.message_limit)
    competing = await talk(system, database, "competing", COMPETITORS, 1, messages)
    broadcast = await talk(system, database, "broadcast", SUBSCRIBERS, SUBSCRIBERS, messages)
    async with listening() as (sink, address):
        outbox = await emit(system, database, sink, address, messages // EVENTS_PER_WORKFLOW)
    return Talking(competing, broadcast, outbox)


async def talk(system: System, database: Database, mode: str, listeners: int, copies: int, messages: int) -> Flow:
    async with opened(system, database, *system.wake_flags) as worker:
        await worker.ask(Waiting, "listen", channel=mode, mode=mode, count=listeners, within=PATIENCE)
        what = {"channel": mode, "copies": copies, "in_flight": system.talks_in_flight, "stall": STALL}
        await worker.ask(Flow, "talk", first=0, count=WARM_UPS, **what, within=PATIENCE)
        return await worker.ask(Flow, "talk", first=WARM_UPS, count=messages, **what, within=PATIENCE)


async def emit(system: System, database: Database, sink: DriverProcess, address: str, workflows: int) -> Flow:
    async with opened(system, database, *system.wake_flags, f"--broker={address}") as worker:
        what = {"events": EVENTS_PER_WORKFLOW, "in_flight": system.talks_in_flight}
        # The first one alone: the reference breaks when a workflow it has not seen is started twice at once.
        await worker.ask(Emitted, "emit", count=1, **what)
        warm_up = await sink.ask(Arrived, "arrived", count=EVENTS_PER_WORKFLOW, stall=STALL, within=PATIENCE)
        before = await worker.ask(Resources, "resources")
        emitted = await worker.ask(Emitted, "emit", count=workflows, **what, within=PATIENCE)
        expected = workflows * EVENTS_PER_WORKFLOW
        arrived = await sink.ask(Arrived, "arrived", count=warm_up.count + expected, stall=STALL, within=10 * PATIENCE)
        after = await worker.ask(Resources, "resources")
    return Flow(
        expected,
        arrived.count - warm_up.count,
        arrived.at - emitted.at,
        after.cpu_seconds - before.cpu_seconds,
        arrived.repeated,
    )


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[DriverProcess, str]]:
    """The receiver, in a process of its own, and its address."""
    async with start_module(Path(sys.executable), "sink") as sink:
        yield sink, (await sink.ask(Listening, "listen")).address
