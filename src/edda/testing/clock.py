"""A clock that stands still until it is told to go on."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

NEW_YEAR_2030 = 1_893_456_000_000_000


class VirtualAlarm:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Alarms go off in order of their time, and of their making, as the clock is moved past them."""

    def __init__(self, now: int = NEW_YEAR_2030) -> None:
        self._now = now
        self._alarms: list[tuple[int, int, VirtualAlarm]] = []
        self._order = count()

    def now(self) -> int:
        return self._now

    def observe(self, database_now: int, sent: float, received: float) -> None:
        pass  # the databases it is used with take their time from this very clock

    def call_at(self, when: int, callback: Callable[[], object]) -> VirtualAlarm:
        alarm = VirtualAlarm(callback)
        if when <= self._now:
            asyncio.get_running_loop().call_soon(self._ring, alarm)
        else:
            heapq.heappush(self._alarms, (when, next(self._order), alarm))
        return alarm

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def advance_to(self, moment: int) -> None:
        while self._alarms and self._alarms[0][0] <= moment:
            when, _, alarm = heapq.heappop(self._alarms)
            self._now = max(self._now, when)
            self._ring(alarm)
        self._now = max(self._now, moment)

    @staticmethod
    def _ring(alarm: VirtualAlarm) -> None:
        callback, alarm.callback = alarm.callback, None
        if callback is not None:
            callback()
