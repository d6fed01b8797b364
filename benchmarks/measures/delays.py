"""Percentiles of times that are called late or slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from benchmarks.figures import Delays


def delays(seconds: Iterable[float | None], given_up: float) -> Delays:
    """None: it had not happened when it was given up, so it took at least that long."""
    found = list(seconds)
    known = sorted(1000 * (given_up if each is None else each) for each in found)
    return Delays(percentile(known, 0.50), percentile(known, 0.99), known[-1], known[0], len(known), found.count(None))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so large a share does not exceed."""
    return ordered[ceil(share * len(ordered)) - 1]
