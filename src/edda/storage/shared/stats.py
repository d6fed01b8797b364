"""Percentiles of the durations of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edda.core.queries import Latency


def measure(durations: Iterable[int]) -> Latency:
    """By nearest rank: each percentile is the duration of one of the runs."""
    ordered = sorted(durations)
    if not ordered:
        return Latency(0, 0, 0)
    return Latency(len(ordered), _rank(ordered, 50), _rank(ordered, 95))


def _rank(ordered: Sequence[int], percent: int) -> int:
    return ordered[-(-percent * len(ordered) // 100) - 1]
