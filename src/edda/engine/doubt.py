"""What was asked of the database and not answered may still come into force."""

from __future__ import annotations

import math
import time


class Doubt:
    """When to look whether it did. Nobody knows how long a server that was cut off goes on with a statement, so that
    one look is not enough: it is looked at once, and then ever more rarely, for good."""

    def __init__(self, soonest: float, rarest: float) -> None:
        self._soonest = soonest
        self._rarest = rarest
        self._pause = soonest
        self._due = math.inf

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def arise(self) -> None:
        self._pause, self._due = self._soonest, 0.0

    def looked(self) -> None:
        self._due = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, self._rarest)
