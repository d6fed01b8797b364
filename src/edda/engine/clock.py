"""Time, as the engine sees it: the database's clock, estimated between two looks at it.

Every reading of time in the engine goes through a `Clock`, so that tests can own it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from edda.core.model import MICROSECONDS


class Alarm(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now(self) -> int:
        """Microseconds on the database's clock; never goes back."""
        ...

    def observe(self, database_now: int, received: float) -> None:
        """Learn from an answer of the database that arrived at `received` on the monotonic clock."""
        ...

    def call_at(self, when: int, callback: Callable[[], object]) -> Alarm: ...

    async def sleep(self, seconds: float) -> None: ...


class DatabaseClock:
    """A lower bound of the database's clock: what it said, plus the time since the answer arrived.

    The answer was younger when it was made than when it arrived, so the estimate is late by at most a
    round trip and never early: no timer fires before the database would say that it is due.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offsets: deque[float] = deque(maxlen=8)
        self._offset = time.time() - monotonic()
        self._last = 0

    def now(self) -> int:
        estimate = int((self._monotonic() + self._offset) * MICROSECONDS)
        if estimate > self._last:
            self._last = estimate
        return self._last

    def observe(self, database_now: int, received: float) -> None:
        self._offsets.append(database_now / MICROSECONDS - received)
        self._offset = max(self._offsets)  # the tightest lower bound of the last few
        if abs(self._offset - self._offsets[-1]) > 1:  # the database's clock was set: old bounds mean nothing
            self._offset = self._offsets[-1]
            self._offsets.clear()

    def call_at(self, when: int, callback: Callable[[], object]) -> Alarm:
        delay = max(0.0, (when - self.now()) / MICROSECONDS)
        # A loop's timers may fire up to a clock tick early; callers look at now() again and come back.
        return asyncio.get_running_loop().call_later(min(delay, 86400.0), callback)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
