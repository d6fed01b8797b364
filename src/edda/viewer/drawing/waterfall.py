"""The geometry of a waterfall: where each bar begins and how wide it is, in percent of the drawing.

Percents, so that the page can be of any width: SVG takes them as attributes, where the page's policy forbids styles.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from edda.control.views import AttemptView, Bar, Timeline

Place = Callable[[datetime], float]
"""From a moment to percent."""

_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30)
_LONG_STEPS = (60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
_MOST_TICKS = 6
_SHORTEST = 0.4
"""Percent: what takes no time is still to be seen."""


@dataclass(frozen=True, slots=True)
class BarSegment:
    x: float
    width: float
    tone: str


@dataclass(frozen=True, slots=True)
class Row:
    bar: Bar
    x: float
    width: float
    attempts: tuple[BarSegment, ...]
    """More than one only if it was tried more than once."""
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
    """`even` gives every stretch in which something happened room to be seen, beside waits of days."""
    place = _even_scale(timeline) if even else _true_scale(timeline)
    rows = tuple(_row(bar, timeline.until, place) for bar in timeline.bars)
    return Waterfall(rows, () if even else _ticks(timeline))


def _row(bar: Bar, end: datetime, place: Place) -> Row:
    until = bar.until or end
    x, width = _extent(bar.since, until, place)
    attempts = tuple(_attempt(one, end, place) for one in bar.attempts) if len(bar.attempts) > 1 else ()
    return Row(bar, x, width, attempts, max(0.0, (until - bar.since).total_seconds()), bar.until is None)


def _attempt(attempt: AttemptView, end: datetime, place: Place) -> BarSegment:
    x, width = _extent(attempt.since, attempt.until or end, place)
    return BarSegment(x, width, "busy" if attempt.ok is None else "good" if attempt.ok else "bad")


def _extent(since: datetime, until: datetime, place: Place) -> tuple[float, float]:
    x = place(since)
    width = max(_SHORTEST, place(until) - x)
    return round(min(x, 100 - width), 3), round(width, 3)


def _true_scale(timeline: Timeline) -> Place:
    whole = max(1e-6, (timeline.until - timeline.since).total_seconds())
    return lambda moment: _within((moment - timeline.since).total_seconds() / whole * 100)


def _even_scale(timeline: Timeline) -> Place:
    """Each stretch between two moments is as wide as the logarithm of its length."""
    moments = sorted({timeline.since, timeline.until, *(moment for bar in timeline.bars for moment in _moments(bar))})
    starts = [0.0]
    for before, after in pairwise(moments):
        starts.append(starts[-1] + 1 + math.log1p((after - before) / timedelta(milliseconds=1)))
    whole = starts[-1] or 1.0

    def place(moment: datetime) -> float:
        index = max(0, bisect_right(moments, moment) - 1)
        return _within(starts[index] / whole * 100)  # every moment that is asked for is one of them

    return place


def _moments(bar: Bar) -> tuple[datetime, ...]:
    ends = (*(one.since for one in bar.attempts), *(one.until for one in bar.attempts if one.until))
    return (bar.since, *((bar.until,) if bar.until else ()), *ends)


def _within(percent: float) -> float:
    return min(100.0, max(0.0, percent))


def _ticks(timeline: Timeline) -> tuple[Tick, ...]:
    whole = (timeline.until - timeline.since).total_seconds()
    if whole <= 0:
        return ()
    step = next((one for one in (*_STEPS, *_LONG_STEPS) if whole / one <= _MOST_TICKS), whole / _MOST_TICKS)
    return tuple(Tick(round(n * step / whole * 100, 3), n * step) for n in range(1, int(whole / step + 1e-9) + 1))
