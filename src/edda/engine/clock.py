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

SET_BACK = 0.5
"""Seconds that the database's clock has to fall behind its earlier answers to have been set back. Two clocks that only
run at different speeds do not drift apart that far within eight answers."""


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now(self) -> int:
        """Microseconds on the database's clock; goes back only if that clock was set back."""
        ...

    def observe(self, database_now: int, sent: float, received: float) -> None:
        """Learn from an answer of the database that was asked for at `sent` and arrived at `received`, both on the
        monotonic clock."""
        ...

    def call_at(self, when: int, callback: Callable[[], object]) -> TimerHandle: ...

    async def sleep(self, seconds: float) -> None: ...


class DatabaseClock:
    """A lower bound of the database's clock: what it said, plus the time since the answer arrived.

    The answer was younger when it was made than when it arrived, so the estimate is late by at most a
    round trip and never early: no timer fires before the database would say that it is due.

    The clock was read after the question was sent, so each answer is an upper bound as well. A lower bound that is
    above a newer upper bound means that the clock was set back, and the estimate falls at once. A slow answer alone
    never proves that.
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

    def observe(self, database_now: int, sent: float, received: float) -> None:
        lower, upper = database_now / MICROSECONDS - received, database_now / MICROSECONDS - sent
        if not self._offsets or max(self._offsets) > upper + SET_BACK:  # the first answer, or the clock was set back
            self._offsets.clear()
            self._last = 0
        self._offsets.append(lower)
        self._offset = max(self._offsets)  # the tightest lower bound of the last few

    def call_at(self, when: int, callback: Callable[[], object]) -> TimerHandle:
        delay = max(0.0, (when - self.now()) / MICROSECONDS)
        # A loop's timers may fire up to a clock tick early; callers look at now() again and come back.
        return asyncio.get_running_loop().call_later(min(delay, 86400.0), callback)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
