"""The results in one picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .bench import Plan
from .figures import (
    Booking,
    Commits,
    Flow,
    Idling,
    Latency,
    Posting,
    Punctuality,
    Recovery,
    Replay,
    Talking,
    Throughput,
    Waking,
)
from .results import Results, median
from .systems import OURS, RAW, REFERENCE, System

COLOURS = {"ours": "#1b6ca8", "reference": "#c8553d", "dbos": "#7a9e48", "raw": "#a5a5a5"}
LINES = {"postgresql": "-", "sqlite": "--", "mysql": ":"}
HATCHES = {"postgresql": "", "sqlite": "///", "mysql": "..."}
BAR = 0.38

Value = Callable[[Results, str, str], float | None]


def draw(plan: Plan, results: Results, directory: Path) -> list[Path]:
    rows = (len(plan.scenarios) + 1) // 2
    figure = Figure(figsize=(12, 4.25 * rows), layout="constrained")
    for place, scenario in enumerate(plan.scenarios, 1):
        axes = figure.add_subplot(rows, min(2, len(plan.scenarios)), place)
        PANELS[scenario.key](axes, plan, results)
    machine = results.machine
    figure.suptitle(f"{machine.cpu}, {machine.cores} cores, Python {machine.python}", fontsize=9, color="#555555")
    paths = [directory / f"benchmarks.{suffix}" for suffix in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=130)
    return paths


def draw_throughput(axes: Axes, plan: Plan, results: Results) -> None:
    axes.set_title("A  five-step workflows per second (more is better)")
    bars(axes, plan, results, [system for system in plan.systems if not system.is_raw], rate)


def draw_latency(axes: Axes, plan: Plan, results: Results) -> None:
    axes.set_title("B  milliseconds per step, beside one bare commit (less is better)")
    bars(axes, plan, results, plan.systems, step_time)


def draw_waking(axes: Axes, plan: Plan, results: Results) -> None:
    axes.set_title("C  events per second to waiting workflows (more is better)")
    bars(axes, plan, results, [system for system in plan.systems if not system.is_raw], wake_rate)


def draw_idling(axes: Axes, plan: Plan, results: Results) -> None:
    axes.set_title("D  MB that waiting workflows add (less is better)")
    for system in plan.systems:
        for database in plan.databases:
            for found in results.figures(Idling, "D", system.name, database):
                waiting, added = zip(
                    *((point.waiting, max(0.0, point.added_mb)) for point in found.points), strict=True
                )
                (line,) = axes.plot(waiting, added, marker="o", label=f"{system.label}, {database}")
                line.set(color=COLOURS[system.name], linestyle=LINES[database])
    axes.set(xscale="log", yscale="symlog", xlabel="waiting workflows")
    axes.legend(fontsize=8)
    axes.grid(visible=True, which="both", alpha=0.2)


def draw_timers(axes: Axes, plan: Plan, results: Results) -> None:
    axes.set_title("E  timers due at once: ms late, p99 (less is better)")
    bars(axes, plan, results, [system for system in plan.systems if not system.is_raw], timer_lateness)
    counts = {
        f"{system.label} {found.together.count:,}": None
        for system in plan.systems
        for database in plan.databases
        for found in results.figures(Punctuality, "E", system.name, database)
    }
    axes.set_xlabel(f"timers: {', '.join(counts)}", fontsize=8)


def draw_posting(axes: Axes, plan: Plan, results: Results) -> None:
    axes.set_title("I  events stored per second over HTTP, beside bare commits")
    found = (("single posts", OURS, single_rate), ("posts of 100", OURS, batched_rate), ("raw commits", RAW, raw_rate))
    draw_groups(axes, [group(plan, results, label, system, value) for label, system, value in found])


def draw_recovery(axes: Axes, plan: Plan, results: Results) -> None:
    axes.set_title("F  seconds until 50 killed workflows are done (less is better)")
    bars(axes, plan, results, [system for system in plan.systems if not system.is_raw], recovery_time)
    axes.set_xlabel("second worker already running; for DBOS, and the reference on SQLite, started at once", fontsize=8)
    axes.axhline(plan.effort.recovery_cap, color="#555555", linewidth=0.8, linestyle=":")
    axes.annotate("given up", (0, plan.effort.recovery_cap), fontsize=8, va="bottom")


def draw_replay(axes: Axes, plan: Plan, results: Results) -> None:
    axes.set_title("G  seconds from opening to the step after the wait")
    for system in plan.systems:
        for database in plan.databases:
            for found in results.figures(Replay, "G", system.name, database):
                steps = [point.steps for point in found.points if point.steps > 1]
                seconds = [point.total_seconds for point in found.points if point.steps > 1]
                (line,) = axes.plot(steps, seconds, marker="o", label=f"{system.label}, {database}")
                line.set(color=COLOURS[system.name], linestyle=LINES[database])
    axes.set(xscale="log", yscale="log", xlabel="steps in the history")
    axes.legend(fontsize=8)
    axes.grid(visible=True, which="both", alpha=0.2)


def draw_talking(axes: Axes, plan: Plan, results: Results) -> None:
    axes.set_title("J  messages and outbox events per second (more is better)")
    found = [
        group(plan, results, f"{system.label},\n{label}", system, flow_rate(flow_of))
        for label, flow_of in FLOWS.items()
        for system in (OURS, REFERENCE)
    ]
    draw_groups(axes, found, log=True)
    axes.tick_params(axis="x", labelsize=7)


def draw_booking(axes: Axes, plan: Plan, results: Results) -> None:
    axes.set_title("K  steps per second, each with a row through the ORM (more is better)")
    bars(axes, plan, results, [system for system in plan.systems if not system.is_raw], booking_rate)


FLOWS: dict[str, Callable[[Talking], Flow]] = {
    "competing": lambda each: each.competing,
    "broadcast": lambda each: each.broadcast,
    "outbox": lambda each: each.outbox,
}


PANELS = {
    "A": draw_throughput,
    "B": draw_latency,
    "C": draw_waking,
    "D": draw_idling,
    "E": draw_timers,
    "F": draw_recovery,
    "G": draw_replay,
    "I": draw_posting,
    "J": draw_talking,
    "K": draw_booking,
}


@dataclass(frozen=True)
class Group:
    label: str
    colour: str
    heights: Mapping[str, float]
    """By database; those without a figure are not in it."""


def bars(axes: Axes, plan: Plan, results: Results, systems: Sequence[System], value: Value) -> None:
    """On a log scale: the differences are orders of magnitude."""
    draw_groups(axes, [group(plan, results, system.label, system, value) for system in systems], log=True)


def group(plan: Plan, results: Results, label: str, system: System, value: Value) -> Group:
    found = ((database, value(results, system.name, database)) for database in plan.databases)
    return Group(label, COLOURS[system.name], {database: height for database, height in found if height})


def draw_groups(axes: Axes, groups: Sequence[Group], *, log: bool = False) -> None:
    """A group per label, a bar per database."""
    if log and any(each.heights for each in groups):  # without a figure there is no scale either
        axes.set_yscale("log")
    for place, each in enumerate(groups):
        for offset, (database, height) in enumerate(each.heights.items()):
            bar = axes.bar(place + offset * BAR, height, BAR * 0.95, color=each.colour)
            bar.patches[0].set(hatch=HATCHES[database], edgecolor="white")
            axes.bar_label(bar, labels=[f"{_figure(height)}\n{database}"], fontsize=7)
    axes.margins(y=0.2)
    axes.set_xticks([place + BAR * (max(1, len(each.heights)) - 1) / 2 for place, each in enumerate(groups)])
    axes.set_xticklabels([each.label for each in groups])
    axes.spines[["top", "right"]].set_visible(False)


def rate(results: Results, system: str, database: str) -> float | None:
    return median(results.figures(Throughput, "A", system, database), lambda each: each.rate)


def step_time(results: Results, system: str, database: str) -> float | None:
    commit = median(results.figures(Commits, "B", system, database), lambda each: each.median_ms)
    return commit or median(results.figures(Latency, "B", system, database), lambda each: each.step_ms)


def recovery_time(results: Results, system: str, database: str) -> float | None:
    return median(results.figures(Recovery, "F", system, database), lambda each: each.seconds)


def wake_rate(results: Results, system: str, database: str) -> float | None:
    return median(results.figures(Waking, "C", system, database), lambda each: each.burst.rate)


def timer_lateness(results: Results, system: str, database: str) -> float | None:
    return median(results.figures(Punctuality, "E", system, database), lambda each: each.together.p99)


def single_rate(results: Results, system: str, database: str) -> float | None:
    return median(results.figures(Posting, "I", system, database), lambda each: each.single.rate)


def batched_rate(results: Results, system: str, database: str) -> float | None:
    return median(results.figures(Posting, "I", system, database), lambda each: each.batched.rate)


def raw_rate(results: Results, system: str, database: str) -> float | None:
    return median(results.figures(Commits, "I", RAW.name, database), lambda each: each.rate)


def flow_rate(flow_of: Callable[[Talking], Flow]) -> Value:
    def rate_of(results: Results, system: str, database: str) -> float | None:
        return median(results.figures(Talking, "J", system, database), lambda each: flow_of(each).rate)

    return rate_of


def booking_rate(results: Results, system: str, database: str) -> float | None:
    return median(results.figures(Booking, "K", system, database), lambda each: each.rate)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
