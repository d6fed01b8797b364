"""Small plots: columns of one or two kinds over time, in percent of the drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_GAP = 0.2
"""Of a column's room, left empty."""
_LEAST = 3.0
"""Percent: one of a thousand is still to be seen."""


@dataclass(frozen=True, slots=True)
class BarSegment:
    y: float
    height: float
    tone: str


@dataclass(frozen=True, slots=True)
class StackedBar:
    x: float
    width: float
    parts: tuple[BarSegment, ...]
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    columns: tuple[StackedBar, ...]
    highest: int
    total: int


def layout_bars(labels: Sequence[str], series: Sequence[tuple[str, Sequence[int]]]) -> Plot:
    """Each series is a tone with one number for each label; they are drawn one upon the other."""
    sums = [sum(values[index] for _, values in series) for index in range(len(labels))]
    highest = max(sums, default=0)
    room = 100 / max(1, len(labels))
    columns = tuple(
        StackedBar(
            round(index * room, 3),
            round(room * (1 - _GAP), 3),
            _stack([(tone, values[index]) for tone, values in series], highest),
            label,
        )
        for index, label in enumerate(labels)
    )
    return Plot(columns, highest, sum(sums))


def _stack(values: Sequence[tuple[str, int]], highest: int) -> tuple[BarSegment, ...]:
    parts, foot = [], 100.0
    for tone, value in values:
        if value:
            height = min(foot, max(_LEAST, value / highest * 100))
            foot -= height
            parts.append(BarSegment(round(foot, 3), round(height, 3), tone))
    return tuple(parts)
