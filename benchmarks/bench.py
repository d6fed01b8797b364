"""The whole run: which system is measured when, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import databases
from .effort import Effort
from .figures import (
    Booking,
    Commits,
    Figures,
    Idling,
    Latency,
    Posting,
    Punctuality,
    Recovery,
    Replay,
    Sample,
    Talking,
    Throughput,
    Waking,
)
from .process import DriverError
from .scenarios import Scenario
from .systems import System


@dataclass(frozen=True)
class Turn:
    scenario: Scenario
    database: str
    round: int
    system: System


@dataclass(frozen=True)
class Plan:
    scenarios: Sequence[Scenario]
    databases: Sequence[str]
    systems: Sequence[System]
    rounds: int
    effort: Effort

    def turns(self) -> Iterator[Turn]:
        """Round robin: what disturbs the machine for a minute disturbs all systems alike."""
        for number in range(self.rounds):
            for scenario in self.scenarios:
                if scenario.rounds is None or number < scenario.rounds:
                    yield from self._round(number, scenario)

    def _round(self, number: int, scenario: Scenario) -> Iterator[Turn]:
        for database in self.databases:
            for system in self._rotated(number, scenario, database):
                yield Turn(scenario, database, number, system)

    def _rotated(self, number: int, scenario: Scenario, database: str) -> Sequence[System]:
        """Another one goes first in each round."""
        taking_part = [system for system in self.systems if scenario.takes(system, database)]
        first = number % max(1, len(taking_part))
        return [*taking_part[first:], *taking_part[:first]]


async def carry_out(plan: Plan) -> list[Sample]:
    turns, samples = list(plan.turns()), []
    for number, turn in enumerate(turns, 1):
        where = f"{turn.scenario.key} {turn.database} round {turn.round + 1} {turn.system.label}"
        print(f"[{number:3}/{len(turns)}] {where:<44}", end="", flush=True)
        started = time.monotonic()
        sample = await take(turn, plan.effort)
        said = summary(sample.figures) if sample.figures else f"FAILED: {sample.error}"
        print(f"{said}  ({time.monotonic() - started:.0f} s)", flush=True)
        samples.append(sample)
    return samples


async def take(turn: Turn, effort: Effort) -> Sample:
    """A system that fails is reported as such; the others go on."""
    figures, error = None, None
    with databases.fresh(turn.database) as database:
        try:
            figures = await turn.scenario.measure(turn.system, database, effort)
        except DriverError as failure:
            error = str(failure)
    return Sample(turn.scenario.key, turn.system.name, turn.database, turn.round, figures, error)


def summary(figures: Figures) -> str:
    match figures:
        case Throughput():
            failed = f", {figures.errors} errors" if figures.errors else ""
            return f"{figures.rate:8.1f} workflows/s, {figures.cpu_ms:.2f} ms CPU each{failed}"
        case Latency():
            return f"{figures.step_ms:8.2f} ms/step, {figures.workflow_ms:.1f} ms/workflow"
        case Commits():
            return f"{figures.rate:8.0f} commits/s, {figures.median_ms:.2f} ms each, {figures.in_flight} in flight"
        case Recovery():
            return f"{figures.seconds:8.1f} s, {figures.finished} of {figures.held} finished"
        case Replay():
            return ", ".join(f"{point.steps}: {point.total_seconds:.2f} s" for point in figures.points)
        case Booking():
            failed = f", {figures.work.errors} errors" if figures.work.errors else ""
            strays = f", {figures.strays:+} LINES" if figures.strays else ""
            return f"{figures.rate:8.1f} steps/s, {figures.cpu_ms:.2f} ms CPU each{failed}{strays}"
        case _:
            return summary_of_waiting(figures)


def summary_of_waiting(figures: Waking | Idling | Punctuality | Posting | Talking) -> str:
    match figures:
        case Waking():
            across = "-" if figures.across is None else f"{figures.across.p50:.1f} ms"
            return f"{figures.burst.rate:8.1f} events/s, woken in {figures.here.p50:.1f} ms, across {across}"
        case Idling():
            return ", ".join(f"{point.waiting}: {point.added_mb:.1f} MB" for point in figures.points)
        case Punctuality():
            return f"{figures.together.p99:8.1f} ms late (p99), alone {figures.lone.p50:.1f} ms"
        case Posting():
            lost = f", {figures.lost} LOST" if figures.lost else ""
            return f"{figures.single.rate:8.0f} events/s, {figures.batched.rate:.0f} in batches{lost}"
        case Talking():
            lost = f", {figures.lost} LOST" if figures.lost else ""
            competing, broadcast, outbox = (f"{flow.rate:.0f}" for flow in figures.flows)
            return f"{competing:>8} messages/s, broadcast {broadcast}, outbox {outbox}{lost}"
