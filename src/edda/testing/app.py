"""An app with virtual time: a workflow that sleeps for 30 days is tested in milliseconds."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import count
from typing import Any

from edda.app import EddaApp
from edda.core.model import MICROSECONDS
from edda.engine.tasks import start_task
from edda.workflow.context import as_datetime, as_microseconds

NEW_YEAR_2030 = 1_893_456_000_000_000


class VirtualAlarm:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """`advance_to` calls the callbacks of `call_at` in order of their time, then of their registration."""

    def __init__(self, now: int = NEW_YEAR_2030) -> None:
        self._now = now
        self._alarms: list[tuple[int, int, VirtualAlarm]] = []
        self._order = count()

    def now(self) -> int:
        return self._now

    def observe(self, database_now: int, sent: float, received: float) -> None:
        pass  # the memory and SQLite storages take their time from this clock

    def call_at(self, when: int, callback: Callable[[], object]) -> VirtualAlarm:
        alarm = VirtualAlarm(callback)
        if when <= self._now:
            asyncio.get_running_loop().call_soon(self._fire, alarm)
        else:
            heapq.heappush(self._alarms, (when, next(self._order), alarm))
        return alarm

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def advance_to(self, time: int) -> None:
        while self._alarms and self._alarms[0][0] <= time:
            when, _, alarm = heapq.heappop(self._alarms)
            self._now = max(self._now, when)
            self._fire(alarm)
        self._now = max(self._now, time)

    @staticmethod
    def _fire(alarm: VirtualAlarm) -> None:
        callback, alarm.callback = alarm.callback, None
        if callback is not None:
            callback()


class VirtualApp(EddaApp):
    """An `EddaApp` in memory, or on a SQLite file, whose clock moves to the next timer whenever all runs wait.

    Args:
        service_name: As in `EddaApp`. Default "test".
        db_url: "memory://" (the default) or "sqlite:///...".
        auto_skip: Move the clock automatically. Default True; with False it moves only in `await app.advance(seconds)`.
        start: First time of the clock, an aware datetime. Default: 1 January 2030, 00:00 UTC.
        **options: The other options of `EddaApp`.
    """

    def __init__(
        self,
        service_name: str = "test",
        db_url: str = "memory://",
        *,
        auto_skip: bool = True,
        start: datetime | None = None,
        **options: Any,
    ) -> None:
        self.clock = VirtualClock(NEW_YEAR_2030 if start is None else as_microseconds(start))
        super().__init__(service_name, db_url, clock=self.clock, **options)
        self._auto_skip = auto_skip
        self._skipper: asyncio.Task[None] | None = None

    def now(self) -> datetime:
        """The time of the virtual clock, in UTC."""
        return as_datetime(self.clock.now())

    async def initialize(self, *, worker: bool | None = None) -> None:
        await super().initialize(worker=worker)
        if self._auto_skip and self._skipper is None:
            self._skipper = start_task(self._skip_forever(), name="edda-time-skipper")

    async def shutdown(self, grace: float | None = None) -> None:
        if self._skipper is not None:
            self._skipper.cancel()
            await asyncio.gather(self._skipper, return_exceptions=True)
            self._skipper = None
        await super().shutdown(grace)

    def kill(self) -> None:
        if self._skipper is not None:
            self._skipper.cancel()
            self._skipper = None
        super().kill()

    async def advance(self, duration: float | timedelta) -> None:
        """Move the clock by `duration` seconds; every timer in between fires at its own time, in order."""
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
        end = self.clock.now() + round(seconds * MICROSECONDS)
        await self.settle()
        while (due := await self._next_due()) is not None and due <= end:
            self._move_to(due)
            await self.settle()
        self._move_to(end)

    async def settle(self) -> None:
        """Wait until all runs wait for time, events or messages."""
        idle_checks = 0
        while idle_checks < 3:  # the engine is idle for an iteration or two of the loop between two pieces of work
            await asyncio.sleep(0.0005 if idle_checks else 0)
            idle_checks = idle_checks + 1 if self._is_idle() else 0

    def _is_idle(self) -> bool:
        worker = self.engine.worker
        engine, relayer = self.engine, self.engine.relayer
        if not (engine.ingest.is_idle and engine.staging.is_idle and (relayer is None or relayer.is_quiet)):
            return False
        return worker is None or worker.is_idle

    async def _next_due(self) -> int | None:
        worker = self.engine.worker
        times = [] if worker is None else worker.due_times()
        due = await self.engine.storage.next_due(self._names())
        if due is not None:
            times.append(self.clock.now() + due)
        if self.engine.relayer is not None:
            # 0 may be an event that is due but blocked by an earlier one of its key: moving to it would not move time.
            rest = await self.engine.storage.next_outbox_due()
            if rest:
                times.append(self.clock.now() + rest)
        return min(times, default=None)

    def _move_to(self, time: int) -> None:
        self.clock.advance_to(time)
        self.engine.staging.wake()
        if self.engine.relayer is not None:
            self.engine.relayer.wake()
        if self.engine.worker is not None:
            self.engine.worker.wake()

    async def _skip_forever(self) -> None:
        while True:
            await self.settle()
            due = await self._next_due()
            if due is None or not self._is_idle():
                await asyncio.sleep(0.001)
            else:
                self._move_to(due)
