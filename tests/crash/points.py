"""The points at which a crash leaves something of its own behind."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

from edda.testing import How, Point

CHANGES = re.compile(r"\b(INSERT|UPDATE|DELETE|COMMIT|NOTIFY)\b")
LASTS = {"sqlite": re.compile("COMMIT"), "postgres": CHANGES, "mysql": CHANGES}
"""Dying at any other statement leaves what dying at the next of these leaves; on SQLite nothing lasts but a commit."""


def telling(kind: str, how: How, points: Iterable[Point], known: Container[Point] = ()) -> list[Point]:
    """Without those known from another scenario."""
    return [point for point in points if point not in known and _tells(kind, how, point.statement)]


def _tells(kind: str, how: How, statement: str) -> bool:
    """A lost answer is an error for whoever asked; within a transaction in a file, one for the whole of it."""
    is_change = CHANGES.search(statement) is not None
    return LASTS[kind].search(statement) is not None if is_change else how is How.UNKNOWN
