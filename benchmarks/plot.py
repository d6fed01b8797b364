"""The results in one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .bench import Plan
from .figures import Commits, Latency, Recovery, Replay, Throughput
from .results import Results, median
from .systems import System

COLOURS = {"ours": "#1b6ca8", "reference": "#c8553d", "dbos": "#7a9e48", "raw": "#a5a5a5"}
LINES = {"postgresql": "-", "sqlite": "--"}
HATCHES = {"postgresql": "", "sqlite": "///"}
BAR = 0.38

Value = Callable[[Results, str, str], float | None]


def draw(plan: Plan, results: Results, directory: Path) -> list[Path]:
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    panels = {"A": draw_throughput, "B": draw_latency, "F": draw_recovery, "G": draw_replay}
    for place, scenario in enumerate(plan.scenarios, 1):
        axes = figure.add_subplot((len(plan.scenarios) + 1) // 2, min(2, len(plan.scenarios)), place)
        panels[scenario.key](axes, plan, results)
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


def bars(axes: Axes, plan: Plan, results: Results, systems: Sequence[System], value: Value) -> None:
    """A group per system, a bar per database, on a log scale: the differences are orders of magnitude."""
    for offset, database in enumerate(plan.databases):
        for place, system in enumerate(systems):
            height = value(results, system.name, database)
            if height:
                bar = axes.bar(place + offset * BAR, height, BAR * 0.95, color=COLOURS[system.name])
                bar.patches[0].set(hatch=HATCHES[database], edgecolor="white")
                axes.bar_label(bar, labels=[f"{_figure(height)}\n{database}"], fontsize=7)
    axes.set_yscale("log")
    axes.margins(y=0.2)
    axes.set_xticks([place + BAR * (len(plan.databases) - 1) / 2 for place in range(len(systems))])
    axes.set_xticklabels([system.label for system in systems])
    axes.spines[["top", "right"]].set_visible(False)


def rate(results: Results, system: str, database: str) -> float | None:
    return median(results.figures(Throughput, "A", system, database), lambda each: each.rate)


def step_time(results: Results, system: str, database: str) -> float | None:
    commit = median(results.figures(Commits, "B", system, database), lambda each: each.median_ms)
    return commit or median(results.figures(Latency, "B", system, database), lambda each: each.step_ms)


def recovery_time(results: Results, system: str, database: str) -> float | None:
    return median(results.figures(Recovery, "F", system, database), lambda each: each.seconds)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
