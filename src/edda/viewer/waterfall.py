"""Geometry of the timeline: the start and the width of each bar, in percent of the drawing.

Percentages fit any page width, and SVG accepts them as attributes; the Content-Security-Policy forbids inline styles.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from edda.control.views import AttemptView, Bar, Timeline

Scale = Callable[[datetime], float]
"""From a time to percent."""

_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30)
_LONG_STEPS = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
_MAX_TICKS = 6
_MIN_WIDTH = 0.4
"""Percent, so that a bar without duration is visible."""


@dataclass(frozen=True, slots=True)
class AttemptSegment:
    x: float
    width: float
    tone: str


@dataclass(frozen=True, slots=True)
class Row:
    bar: Bar
    x: float
    width: float
    attempts: tuple[AttemptSegment, ...]
    """Empty if there was one attempt only."""
    seconds: float
    is_open: bool


@dataclass(frozen=True, slots=True)
class Tick:
    x: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Waterfall:
    rows: tuple[Row, ...]
    ticks: tuple[Tick, ...]


def draw(timeline: Timeline, *, even: bool = False) -> Waterfall:
    """`even` uses a logarithmic scale, on which short steps are visible beside waits of days."""
    scale = _even_scale(timeline) if even else _linear_scale(timeline)
    rows = tuple(_row(bar, timeline.until, scale) for bar in timeline.bars)
    return Waterfall(rows, () if even else _ticks(timeline))


def _row(bar: Bar, end: datetime, scale: Scale) -> Row:
    until = bar.until or end
    x, width = _extent(bar.since, until, scale)
    attempts = tuple(_attempt(one, end, scale) for one in bar.attempts) if len(bar.attempts) > 1 else ()
    return Row(bar, x, width, attempts, max(0.0, (until - bar.since).total_seconds()), bar.until is None)


def _attempt(attempt: AttemptView, end: datetime, scale: Scale) -> AttemptSegment:
    x, width = _extent(attempt.since, attempt.until or end, scale)
    return AttemptSegment(x, width, "busy" if attempt.ok is None else "good" if attempt.ok else "bad")


def _extent(since: datetime, until: datetime, scale: Scale) -> tuple[float, float]:
    x = scale(since)
    width = max(_MIN_WIDTH, scale(until) - x)
    return round(min(x, 100 - width), 3), round(width, 3)


def _linear_scale(timeline: Timeline) -> Scale:
    total = max(1e-6, (timeline.until - timeline.since).total_seconds())
    return lambda time: _clamp((time - timeline.since).total_seconds() / total * 100)


def _even_scale(timeline: Timeline) -> Scale:
    """The width of each interval between two times is the logarithm of its duration."""
    times = sorted({timeline.since, timeline.until, *(time for bar in timeline.bars for time in _times(bar))})
    starts = [0.0]
    for before, after in pairwise(times):
        starts.append(starts[-1] + 1 + math.log1p((after - before) / timedelta(milliseconds=1)))
    total = starts[-1] or 1.0

    def scale(time: datetime) -> float:
        index = max(0, bisect_right(times, time) - 1)
        return _clamp(starts[index] / total * 100)  # callers pass only times that are in the list

    return scale


def _times(bar: Bar) -> tuple[datetime, ...]:
    ends = (*(one.since for one in bar.attempts), *(one.until for one in bar.attempts if one.until))
    return (bar.since, *((bar.until,) if bar.until else ()), *ends)


def _clamp(percent: float) -> float:
    return min(100.0, max(0.0, percent))


def _ticks(timeline: Timeline) -> tuple[Tick, ...]:
    total = (timeline.until - timeline.since).total_seconds()
    if total <= 0:
        return ()
    step = next((one for one in (*_STEPS, *_LONG_STEPS) if total / one <= _MAX_TICKS), total / _MAX_TICKS)
    return tuple(Tick(round(n * step / total * 100, 3), n * step) for n in range(1, int(total / step + 1e-9) + 1))
