"""The overview with its bar charts, workers, workflows, and the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from edda.control.controller import Controller
from edda.control.views import RunSearch
from edda.core.states import WAITING, RunStatus
from edda.viewer.request import PageRequest, Rendered, Reply

_GAP = 0.2
"""Share of a bar's slot that stays empty."""
_MIN_HEIGHT = 3.0
"""Percent, so that 1 beside 1,000 is visible."""


@dataclass(frozen=True, slots=True)
class StackSegment:
    y: float
    height: float
    tone: str


@dataclass(frozen=True, slots=True)
class StackedBar:
    x: float
    width: float
    parts: tuple[StackSegment, ...]
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    columns: tuple[StackedBar, ...]
    highest: int
    total: int


def layout_bars(labels: Sequence[str], series: Sequence[tuple[str, Sequence[int]]]) -> Plot:
    """Each series is a tone with one number per label; the series are stacked."""
    sums = [sum(values[index] for _, values in series) for index in range(len(labels))]
    highest = max(sums, default=0)
    slot = 100 / max(1, len(labels))
    columns = tuple(
        StackedBar(
            round(index * slot, 3),
            round(slot * (1 - _GAP), 3),
            _stack_segments([(tone, values[index]) for tone, values in series], highest),
            label,
        )
        for index, label in enumerate(labels)
    )
    return Plot(columns, highest, sum(sums))


def _stack_segments(values: Sequence[tuple[str, int]], highest: int) -> tuple[StackSegment, ...]:
    parts, top = [], 100.0
    for tone, value in values:
        if value:
            height = min(top, max(_MIN_HEIGHT, value / highest * 100))
            top -= height
            parts.append(StackSegment(round(top, 3), round(height, 3), tone))
    return tuple(parts)


_LONG_WAIT = timedelta(days=1)
_LIST_LENGTH = 8
_PAGE = 50


async def show_overview(request: PageRequest, control: Controller) -> Reply:
    stats = await control.get_stats()
    failing = await control.list_runs(RunSearch(status=(RunStatus.FAILED, RunStatus.PARKED), limit=_LIST_LENGTH))
    waiting = await control.list_runs(RunSearch(status=tuple(WAITING), until=stats.at - _LONG_WAIT, limit=_LIST_LENGTH))
    recent = await control.list_runs(RunSearch(limit=_LIST_LENGTH))
    labels = [
        f"{b.since:%H:%M}: {b.started} started, {b.completed} completed, {b.failed} failed, {b.cancelled} cancelled"
        for b in stats.buckets
    ]
    ended = [("good", [b.completed for b in stats.buckets]), ("gone", [b.cancelled for b in stats.buckets])]
    return Rendered(
        "overview.html",
        {
            "stats": stats,
            "failing": failing.items,
            "waiting": waiting.items,
            "recent": recent.items,
            "started": layout_bars(labels, [("busy", [bucket.started for bucket in stats.buckets])]),
            "ended": layout_bars(labels, ended),
            "failed": layout_bars(labels, [("bad", [bucket.failed for bucket in stats.buckets])]),
        },
    )


async def show_workers(request: PageRequest, control: Controller) -> Reply:
    return Rendered("workers.html", {"workers": await control.list_workers()})


async def show_workflows(request: PageRequest, control: Controller) -> Reply:
    return Rendered("workflows.html", {"definitions": await control.list_definitions()})


async def show_audit(request: PageRequest, control: Controller) -> Reply:
    return Rendered("audit.html", {"page": await control.list_audits(request.query.get("cursor"), _PAGE)})
