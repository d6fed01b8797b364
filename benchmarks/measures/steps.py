"""A, B and K: workflows of steps, beside the bare driver's commits."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.databases import Database, commits
from benchmarks.drivers.driver import LEDGER
from benchmarks.drivers.ledger import count_lines, create_ledger
from benchmarks.drivers.session import STEPS_PER_WORKFLOW
from benchmarks.effort import Effort
from benchmarks.figures import Booking, Commits, Figures, Latency, Throughput
from benchmarks.process import DriverProcess, migrate, opened
from benchmarks.systems import System

IN_FLIGHT = 100
RAW_IN_FLIGHT = 10
WARM_SECONDS = 0.7


async def throughput(system: System, database: Database, effort: Effort) -> Figures:
    """Five trivial steps per workflow, 100 workflows in flight; wall time for as many as fit the time box."""
    if system.is_raw:
        return await raw_commits(system, database, effort, RAW_IN_FLIGHT)
    await migrate(system, database)
    return await run_many(system, database, effort, booking=False)


async def booking(system: System, database: Database, effort: Effort) -> Figures:
    """The same, and each step writes a row through SQLAlchemy's ORM, in one transaction with its own record."""
    await migrate(system, database)
    await create_ledger(database.url)
    work = await run_many(system, database, effort, booking=True)
    return Booking(work, STEPS_PER_WORKFLOW, await count_lines(database.url))


async def run_many(system: System, database: Database, effort: Effort, *, booking: bool) -> Throughput:
    before = await commits(database)
    async with opened(system, database, *([LEDGER] if booking else [])) as driver:
        # The first one alone: the reference breaks when a workflow it has not seen is started twice at once.
        await driver.ask(Throughput, "throughput", count=1, in_flight=1, booking=booking)
        warm_ups = await warm_up(driver, booking)
        count = max(IN_FLIGHT, int(warm_ups[-1].rate * effort.seconds))
        measured = await driver.ask(Throughput, "throughput", count=count, in_flight=IN_FLIGHT, booking=booking)
    after = await commits(database)
    spent = None if before is None or after is None else after - before
    workflows = 1 + sum(each.workflows for each in (*warm_ups, measured))
    return replace(measured, commits=spent, session_workflows=workflows)


async def warm_up(driver: DriverProcess, booking: bool) -> list[Throughput]:
    """More and more, until it took long enough to tell how many fill the time box."""
    warm_ups: list[Throughput] = []
    count = IN_FLIGHT
    while not warm_ups or warm_ups[-1].seconds < WARM_SECONDS:
        warm_ups.append(await driver.ask(Throughput, "throughput", count=count, in_flight=IN_FLIGHT, booking=booking))
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


async def raw_commits(system: System, database: Database, effort: Effort, in_flight: int) -> Commits:
    async with opened(system, database) as driver:
        await driver.ask(Commits, "commits", seconds=0.3, in_flight=in_flight)
        return await driver.ask(Commits, "commits", seconds=effort.seconds, in_flight=in_flight)
