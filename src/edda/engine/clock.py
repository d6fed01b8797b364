"""The engine's clock: the database's clock, estimated between two answers.

The engine reads the time through a `Clock` only, so that tests can set it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from edda.core.model import MICROSECONDS

SET_BACK = 0.5
"""Seconds that the database's clock has to fall behind its earlier answers to have been set back. Clocks that run at
different speeds do not drift that far within eight answers."""


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now(self) -> int:
        """Microseconds on the database's clock; goes back only if that clock was set back."""
        ...

    def observe(self, database_now: int, sent: float, received: float) -> None:
        """Use an answer of the database to a statement that was sent at `sent`, and arrived at `received`, both on the
        monotonic clock."""
        ...

    def call_at(self, when: int, callback: Callable[[], object]) -> TimerHandle: ...

    async def sleep(self, seconds: float) -> None: ...


class DatabaseClock:
    """A lower bound of the database's clock: its last answer, plus the time since that arrived.

    The database read its clock before the answer arrived, so the estimate is late by at most a round trip and never
    early: no timer fires before it is due on the database's clock.

    The database read its clock after the statement was sent, so each answer is an upper bound as well. A lower bound
    above a newer upper bound means that the clock was set back, and the estimate falls at once. A slow answer alone
    does not prove that.
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
        self._offset = max(self._offsets)  # the tightest lower bound of the last eight

    def call_at(self, when: int, callback: Callable[[], object]) -> TimerHandle:
        delay = max(0.0, (when - self.now()) / MICROSECONDS)
        # A loop's timers may fire up to a clock tick early; callers compare with now() and set the timer again.
        return asyncio.get_running_loop().call_later(min(delay, 86400.0), callback)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
