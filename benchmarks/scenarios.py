"""What is done to a system, from the outside."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from .databases import Database, commits
from .drivers.driver import PATIENCE, REST_SECONDS
from .figures import (
    Commits,
    Figures,
    Finished,
    Held,
    Latency,
    Opened,
    Recovery,
    Replay,
    Replayed,
    ReplayPoint,
    Suspended,
    Throughput,
)
from .process import DriverProcess, start
from .systems import System

IN_FLIGHT = 100
RAW_IN_FLIGHT = 10
HELD = 50
WARM_SECONDS = 0.7


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    seconds: float = 7.0
    recovery_cap: float = 120.0
    replay_cap: float = 30.0
    """No longer history is tried once writing one took this long."""
    replay_limit: int = 10_000


QUICK = Effort(seconds=2.0, recovery_cap=40.0, replay_cap=5.0, replay_limit=1_000)

Measure = Callable[[System, Database, Effort], Awaitable[Figures]]


async def throughput(system: System, database: Database, effort: Effort) -> Figures:
    """Five trivial steps per workflow, 100 workflows in flight; wall time for as many as fit the time box."""
    if system.is_raw:
        return await raw_commits(system, database, effort, RAW_IN_FLIGHT)
    await migrate(system, database)
    before = await commits(database)
    async with opened(system, database) as driver:
        # The first one alone: the reference breaks when a workflow it has not seen is started twice at once.
        await driver.ask(Throughput, "throughput", count=1, in_flight=1)
        warm_ups = await warm_up(driver)
        count = max(IN_FLIGHT, int(warm_ups[-1].rate * effort.seconds))
        measured = await driver.ask(Throughput, "throughput", count=count, in_flight=IN_FLIGHT)
    after = await commits(database)
    spent = None if before is None or after is None else after - before
    workflows = 1 + sum(each.workflows for each in (*warm_ups, measured))
    return replace(measured, commits=spent, session_workflows=workflows)


async def warm_up(driver: DriverProcess) -> list[Throughput]:
    """More and more, until it took long enough to tell how many fill the time box."""
    warm_ups: list[Throughput] = []
    count = IN_FLIGHT
    while not warm_ups or warm_ups[-1].seconds < WARM_SECONDS:
        warm_ups.append(await driver.ask(Throughput, "throughput", count=count, in_flight=IN_FLIGHT))
        count *= 4
    return warm_ups


async def latency(system: System, database: Database, effort: Effort) -> Figures:
    """Ten trivial steps in a row, one workflow at a time."""
    if system.is_raw:
        return await raw_commits(system, database, effort, 1)
    await migrate(system, database)
    async with opened(system, database) as driver:
        await driver.ask(Latency, "latency", seconds=0.5)
        return await driver.ask(Latency, "latency", seconds=effort.seconds)


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


async def raw_commits(system: System, database: Database, effort: Effort, in_flight: int) -> Commits:
    async with opened(system, database) as driver:
        await driver.ask(Commits, "commits", seconds=0.3, in_flight=in_flight)
        return await driver.ask(Commits, "commits", seconds=effort.seconds, in_flight=in_flight)


async def migrate(system: System, database: Database) -> None:
    """Open once and close, so that creating the tables is in no figure."""
    async with opened(system, database):
        pass


@asynccontextmanager
async def opened(system: System, database: Database) -> AsyncIterator[DriverProcess]:
    async with start(system, database.url) as driver:
        await driver.ask(Opened, "open")
        yield driver


@dataclass(frozen=True)
class Scenario:
    key: str
    title: str
    measure: Measure
    rounds: int | None = None
    """None: as many as asked for."""
    raw: bool = False


SCENARIOS = {
    scenario.key: scenario
    for scenario in (
        Scenario("A", "throughput: five steps, 100 workflows in flight", throughput, raw=True),
        Scenario("B", "latency: one step after the other, one workflow at a time", latency, raw=True),
        Scenario("F", "recovery after kill -9 of a worker with 50 workflows in mid-step", recovery, rounds=1),
        Scenario("G", "replay of a long history in a fresh process", replay, rounds=1),
    )
}
