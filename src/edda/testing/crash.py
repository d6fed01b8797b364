"""Crash points: die before or after any statement, or lose the answer to it.

points = CrashPoints()                      # first run, undisturbed: which statements are there?
async with EddaApp(db_url=url, probe=points): ...
for point in points.seen():                 # then once for each: crash there, start anew, compare
    probe = CrashPoints(point, How.AFTER)
    ...
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum

from msgspec import Struct

from edda.errors import StorageUnavailableError


class SimulatedCrash(BaseException):
    """The process is dead from here on. Not an error that code could handle."""


class CrashMode(StrEnum):
    BEFORE = "before"
    """Die; the statement was never sent."""
    AFTER = "after"
    """Die; the statement had its effect, nobody saw the answer."""
    UNKNOWN = "unknown"
    """Live on; the statement had its effect, the connection broke before the answer."""


class CrashPoint(Struct, frozen=True):
    """The n-th time a statement was sent."""

    statement: str
    nth: int


class CrashPoints:
    """A probe for `EddaApp(probe=...)`. Counts statements; at the chosen point it strikes, once."""

    def __init__(
        self,
        point: CrashPoint | None = None,
        how: CrashMode = CrashMode.AFTER,
        on_strike: Callable[[], object] | None = None,
    ):
        self._point = point
        self._how = how
        self._on_strike = on_strike
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.struck = False
        self.dead = False

    def seen(self) -> Iterator[CrashPoint]:
        for statement, times in sorted(self._counts.items()):
            for nth in range(1, times + 1):
                yield CrashPoint(statement, nth)

    def before(self, statement: str) -> None:
        self._refuse_if_dead()
        with self._lock:
            self._counts[statement] += 1
            strike = self._how is CrashMode.BEFORE and self._is_here(statement)
        if strike:
            self._die(statement)

    def after(self, statement: str) -> None:
        self._refuse_if_dead()
        with self._lock:
            strike = self._how is not CrashMode.BEFORE and self._is_here(statement)
        if not strike:
            return
        if self._how is CrashMode.AFTER:
            self._die(statement)
        self._struck()
        raise StorageUnavailableError(f"simulated: the answer to {statement[:60]!r} was lost")

    def _is_here(self, statement: str) -> bool:
        point = self._point
        return (
            point is not None
            and not self.struck
            and point.statement == statement
            and point.nth == self._counts[statement]
        )

    def _die(self, statement: str) -> None:
        self.dead = True
        self._struck()
        raise SimulatedCrash(f"{self._how} {statement[:60]!r}")

    def _struck(self) -> None:
        self.struck = True
        if self._on_strike is not None:
            self._on_strike()

    def _refuse_if_dead(self) -> None:
        if self.dead:
            raise SimulatedCrash("the process is dead already")
