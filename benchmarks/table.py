"""The results in plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .bench import Plan
from .figures import Commits, Latency, Recovery, Replay, Throughput
from .machine import Machine
from .results import Results, median
from .scenarios import Effort
from .systems import OURS, System

Row = Sequence[str]


def report(plan: Plan, results: Results) -> str:
    lines = ["", describe(results.machine)]
    for scenario in plan.scenarios:
        for database in plan.databases:
            rows = list(ROWS[scenario.key](results, database, plan.systems, plan.effort))
            lines += ["", f"{scenario.key}  {scenario.title} ({database})", *aligned(rows)]
    return "\n".join(lines)


def describe(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    server = ", ".join(f"{name} {value}" for name, value in machine.postgresql.items())
    return (
        f"{machine.cpu}, {machine.cores} cores, load {machine.load:.1f}; {versions}; SQLite {machine.sqlite}; {server}"
    )


def aligned(rows: Sequence[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def times(value: float | None, ours: float | None) -> str:
    return f"{value / ours:,.2f}x" if value and ours else "-"


def throughput(results: Results, database: str, systems: Sequence[System], effort: Effort) -> Iterator[Row]:
    yield ("", "workflows/s", "of ours", "CPU ms each", "commits each", "errors")
    mine = median(results.figures(Throughput, "A", OURS.name, database), lambda each: each.rate)
    for system in systems:
        found = results.figures(Throughput, "A", system.name, database)
        if found:
            rate = median(found, lambda each: each.rate)
            cpu, commits = median(found, lambda each: each.cpu_ms), median(found, lambda each: each.commits_each)
            errors = str(sum(each.errors for each in found))
            yield system.label, number(rate, 1), times(rate, mine), number(cpu, 2), number(commits, 2), errors
        for each in results.figures(Commits, "A", system.name, database)[:1]:
            rate = median(results.figures(Commits, "A", system.name, database), lambda raw: raw.rate)
            yield f"{system.label}/s, {each.in_flight} in flight", number(rate, 0), "", number(each.cpu_ms, 2), "", ""


def latency(results: Results, database: str, systems: Sequence[System], effort: Effort) -> Iterator[Row]:
    yield ("", "ms/step", "of ours", "ms/workflow")
    mine = median(results.figures(Latency, "B", OURS.name, database), lambda each: each.step_ms)
    for system in systems:
        steps = median(results.figures(Latency, "B", system.name, database), lambda each: each.step_ms)
        whole = median(results.figures(Latency, "B", system.name, database), lambda each: each.workflow_ms)
        commit = median(results.figures(Commits, "B", system.name, database), lambda each: each.median_ms)
        shown = commit if system.is_raw else steps
        yield system.label, number(shown, 2), times(shown, mine), number(whole, 1)


def recovery(results: Results, database: str, systems: Sequence[System], effort: Effort) -> Iterator[Row]:
    yield ("", "seconds", "finished", "second worker")
    for system in systems:
        for each in results.figures(Recovery, "F", system.name, database):
            seconds = number(each.seconds, 1) if each.complete else f"> {effort.recovery_cap:.0f}"
            how = "running" if database in system.standby else "started after the kill"
            yield system.label, seconds, f"{each.finished} of {each.held}", how


def replay(results: Results, database: str, systems: Sequence[System], effort: Effort) -> Iterator[Row]:
    yield ("", "steps", "open to next step, s", "µs per step more", "in workflow code, s", "writing it, s")
    for system in systems:
        for each in results.figures(Replay, "G", system.name, database):
            base = each.points[0]
            for point in each.points:
                more = 1e6 * (point.total_seconds - base.total_seconds) / max(1, point.steps - base.steps)
                total, code = number(point.total_seconds, 2), number(point.replay_seconds, 3)
                written = number(point.insert_seconds, 1)
                yield system.label, f"{point.steps:,}", total, number(more, 1), code, written


ROWS = {"A": throughput, "B": latency, "F": recovery, "G": replay}
