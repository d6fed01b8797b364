"""An app whose time is virtual: a workflow that sleeps for 30 days is tested in milliseconds."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

from edda.app import EddaApp
from edda.core.model import MICROSECONDS
from edda.engine.tasks import start_task
from edda.workflow.context import as_datetime, as_microseconds

from .clock import NEW_YEAR_2030, VirtualClock


class VirtualApp(EddaApp):
    """In memory by default, or on a SQLite file. Whenever nothing can go on, time skips to the next timer.

    With `auto_skip=False` time stands still until `await app.advance(seconds)`.
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
        return as_datetime(self.clock.now())

    async def initialize(self, *, worker: bool | None = None) -> None:
        await super().initialize(worker=worker)
        if self._auto_skip and self._skipper is None:
            self._skipper = start_task(self._skip_for_ever(), name="edda-time-skipper")

    async def shutdown(self, grace: float | None = None) -> None:
        await self._stop_skipping()
        await super().shutdown(grace)

    def kill(self) -> None:
        if self._skipper is not None:
            self._skipper.cancel()
            self._skipper = None
        super().kill()

    async def advance(self, duration: float | timedelta) -> None:
        """Let so much time pass; every timer on the way fires at its own moment, in order."""
        seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
        end = self.clock.now() + round(seconds * MICROSECONDS)
        await self.settle()
        while (due := await self._next_due()) is not None and due <= end:
            self._move_to(due)
            await self.settle()
        self._move_to(end)

    async def settle(self) -> None:
        """Wait until nothing can go on without time passing."""
        calm = 0
        while calm < 3:  # a loop turn or two may lie between two pieces of work
            await asyncio.sleep(0.0005 if calm else 0)
            calm = calm + 1 if self._is_quiet() else 0

    def _is_quiet(self) -> bool:
        worker = self.engine.worker
        engine, relayer = self.engine, self.engine.relayer
        if not (engine.intake.is_idle and engine.forwarder.is_idle and (relayer is None or relayer.is_quiet)):
            return False
        return worker is None or worker.is_idle

    async def _next_due(self) -> int | None:
        worker = self.engine.worker
        moments = [] if worker is None else worker.due_times()
        due = await self.engine.storage.next_due(self._names())
        if due is not None:
            moments.append(self.clock.now() + due)
        if self.engine.relayer is not None:
            # 0 may mean: due, but behind one of its key that is not. Time must not stand still for that.
            rest = await self.engine.storage.next_outbox_due()
            if rest:
                moments.append(self.clock.now() + rest)
        return min(moments, default=None)

    def _move_to(self, moment: int) -> None:
        self.clock.advance_to(moment)
        self.engine.forwarder.wake()
        if self.engine.relayer is not None:
            self.engine.relayer.wake()
        if self.engine.worker is not None:
            self.engine.worker.wake()

    async def _skip_for_ever(self) -> None:
        while True:
            await self.settle()
            due = await self._next_due()
            if due is None or not self._is_quiet():
                await asyncio.sleep(0.001)
            else:
                self._move_to(due)

    async def _stop_skipping(self) -> None:
        if self._skipper is not None:
            self._skipper.cancel()
            await asyncio.gather(self._skipper, return_exceptions=True)
            self._skipper = None
