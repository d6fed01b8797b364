"""The results in plain text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from .bench import Plan
from .effort import Effort
from .figures import (
    Booking,
    Commits,
    Delays,
    Flow,
    Idling,
    Latency,
    Posting,
    Posts,
    Punctuality,
    Recovery,
    Replay,
    Talking,
    Throughput,
    Waking,
)
from .machine import Machine
from .results import Results, median
from .systems import OURS, RAW, System

Row = Sequence[str]


def report(plan: Plan, results: Results) -> str:
    lines = ["", describe(results.machine)]
    for scenario in plan.scenarios:
        for database in (each for each in plan.databases if each in scenario.databases):
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


def waking(results: Results, database: str, systems: Sequence[System], effort: Effort) -> Iterator[Row]:
    yield ("", "events/s", "of ours", "CPU ms each", "done", "wake ms, p50", "p99", "from another process, p50", "p99")
    mine = median(results.figures(Waking, "C", OURS.name, database), lambda each: each.burst.rate)
    for system in systems:
        found = results.figures(Waking, "C", system.name, database)
        if found:
            rate, cpu = median(found, lambda each: each.burst.rate), median(found, lambda each: each.burst.cpu_ms)
            done = f"{sum(each.burst.finished for each in found)} of {sum(each.burst.sent for each in found)}"
            here, across = [each.here for each in found], [each.across for each in found if each.across]
            yield system.label, number(rate, 1), times(rate, mine), number(cpu, 2), done, *middle(here), *middle(across)


def middle(found: Sequence[Delays]) -> Row:
    p50, p99 = (
        statistics.median(values) if values else None
        for values in ([each.p50 for each in found], [each.p99 for each in found])
    )
    return number(p50, 1), number(p99, 1)


def idling(results: Results, database: str, systems: Sequence[System], effort: Effort) -> Iterator[Row]:
    yield ("", "waiting", "MB more", "CPU %", "statements/s", "server's count/s", "starting them, s")
    for system in systems:
        for each in results.figures(Idling, "D", system.name, database):
            for point in each.points:
                told = number(point.statements, 1), number(point.queries, 1)
                spent = number(point.added_mb, 1), number(point.cpu_percent, 2)
                yield system.label, f"{point.waiting:,}", *spent, *told, number(point.start_seconds, 0)


def punctuality(results: Results, database: str, systems: Sequence[System], effort: Effort) -> Iterator[Row]:
    yield ("", "timers", "least ms late", "p50", "p99", "most", "not in time", "alone: least", "p50", "most")
    for system in systems:
        for each in results.figures(Punctuality, "E", system.name, database):
            many, one = each.together, each.lone
            late = (number(value, 1) for value in (many.least, many.p50, many.p99, many.most))
            alone = (number(value, 1) for value in (one.least, one.p50, one.most))
            yield system.label, str(many.count), *late, str(many.missing), *alone


def posting(results: Results, database: str, systems: Sequence[System], effort: Effort) -> Iterator[Row]:
    yield ("", "events/s", "of raw", "p50 ms", "p99 ms", "refused")
    raw = median(results.figures(Commits, "I", RAW.name, database), lambda each: each.rate)
    for found in [results.figures(Posting, "I", OURS.name, database)]:
        if found:
            yield posts("single posts, 50 lines", [each.single for each in found], raw)
            yield posts("posts of 100, 8 lines", [each.batched for each in found], raw)
            yield posts("single posts at half the rate", [each.paced for each in found], raw)
            yield "answered and not stored", str(sum(each.lost for each in found)), "", "", "", ""
    if raw is not None:
        yield "raw commits, one connection", number(raw, 0), "", "", "", ""


def posts(label: str, found: Sequence[Posts], raw: float | None) -> Row:
    rate, p50, p99 = (
        statistics.median(values)
        for values in ([each.rate for each in found], [each.p50_ms for each in found], [each.p99_ms for each in found])
    )
    return (
        label,
        number(rate, 0),
        times(rate, raw),
        number(p50, 1),
        number(p99, 1),
        str(sum(each.refused for each in found)),
    )


def talking(results: Results, database: str, systems: Sequence[System], effort: Effort) -> Iterator[Row]:
    yield ("", "", "per second", "of ours", "CPU ms each", "arrived", "more than once")
    mine = results.figures(Talking, "J", OURS.name, database)
    for system in systems:
        found = results.figures(Talking, "J", system.name, database)
        for label, flow_of in FLOWS.items():
            if found:
                yield system.label, *flow(label, [flow_of(each) for each in found], [flow_of(each) for each in mine])


FLOWS: dict[str, Callable[[Talking], Flow]] = {
    "messages, 10 compete": lambda each: each.competing,
    "messages, to both of 2": lambda each: each.broadcast,
    "events out of the outbox": lambda each: each.outbox,
}


def flow(label: str, found: Sequence[Flow], mine: Sequence[Flow]) -> Row:
    rate, cpu = (
        statistics.median(values) for values in zip(*((each.rate, each.cpu_ms) for each in found), strict=True)
    )
    ours = statistics.median([each.rate for each in mine]) if mine else None
    arrived = f"{sum(each.arrived for each in found)} of {sum(each.expected for each in found)}"
    repeated = str(sum(each.repeated for each in found))
    return label, number(rate, 1), times(rate, ours), number(cpu, 2), arrived, repeated


def booking(results: Results, database: str, systems: Sequence[System], effort: Effort) -> Iterator[Row]:
    yield ("", "steps/s", "of ours", "CPU ms each", "commits each", "errors", "rows too many or too few")
    mine = median(results.figures(Booking, "K", OURS.name, database), lambda each: each.rate)
    for system in systems:
        found = results.figures(Booking, "K", system.name, database)
        if found:
            rate = median(found, lambda each: each.rate)
            cpu, commits = median(found, lambda each: each.cpu_ms), median(found, lambda each: each.commits_each)
            wrong = str(sum(each.work.errors for each in found)), str(sum(each.strays for each in found))
            yield system.label, number(rate, 1), times(rate, mine), number(cpu, 2), number(commits, 2), *wrong


ROWS = {
    "A": throughput,
    "B": latency,
    "C": waking,
    "D": idling,
    "E": punctuality,
    "F": recovery,
    "G": replay,
    "I": posting,
    "J": talking,
    "K": booking,
}
