"""Crash points: simulate a crash before or after any SQL statement, or the loss of its answer.

points = CrashPoints()                      # first run without a crash: records the statements
async with EddaApp(db_url=url, probe=points): ...
for point in points.seen():                 # then once for each: crash there, start a new app, compare the results
    probe = CrashPoints(point, CrashMode.AFTER)
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
    """Simulates the end of the process. A BaseException, so that `except Exception` does not catch it."""


class CrashMode(StrEnum):
    BEFORE = "before"
    """Crash; the statement was not sent."""
    AFTER = "after"
    """Crash; the statement was executed, its answer is lost."""
    UNKNOWN = "unknown"
    """No crash; the statement was executed, and the connection broke before the answer."""


class CrashPoint(Struct, frozen=True):
    """The `nth` execution of a statement, counted from 1."""

    statement: str
    nth: int


class CrashPoints:
    """A probe for `EddaApp(probe=...)`: counts statements, and raises once at the chosen point.

    Args:
        point: Where to raise. Default None: only count.
        how: What to simulate. Default `CrashMode.AFTER`.
        on_strike: Called just before it raises, such as `app.kill`. Default None.
    """

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
        """All executions counted so far."""
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
            raise SimulatedCrash("the process has crashed already")
