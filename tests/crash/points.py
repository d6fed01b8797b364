"""The points at which a crash leaves something of its own behind."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

from edda.testing import CrashMode, CrashPoint
from tests import tiers

CHANGES = re.compile(r"\b(INSERT|UPDATE|DELETE|COMMIT|NOTIFY)\b")
LASTS = {"sqlite": re.compile("COMMIT"), "postgres": CHANGES, "mysql": CHANGES}
"""Dying at any other statement leaves what dying at the next of these leaves; on SQLite nothing lasts but a commit."""


def telling(
    kind: str, how: CrashMode, points: Iterable[CrashPoint], known: Container[CrashPoint] = ()
) -> list[CrashPoint]:
    """Without those known from another scenario."""
    return [point for point in points if point not in known and _tells(kind, how, point)]


def _tells(kind: str, how: CrashMode, point: CrashPoint) -> bool:
    """A lost answer is an error for whoever asked; within a transaction in a file, one for the whole of it."""
    if CHANGES.search(point.statement):
        return LASTS[kind].search(point.statement) is not None
    return how is CrashMode.UNKNOWN and is_first_or_all(point)


def is_first_or_all(point: CrashPoint) -> bool:
    """A statement that only reads leaves nothing behind, however often: its answer is lost once."""
    return point.nth == 1 or tiers.current().all_crash_points
