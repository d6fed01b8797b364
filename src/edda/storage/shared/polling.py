"""Notifications by polling, for databases that cannot notify other processes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

MIN_PAUSE, MAX_PAUSE = 0.05, 0.25
"""Seconds; the pause grows while no work is found."""
GROWTH = 1.5


class PollingNotifications:
    def __init__(self) -> None:
        self._notified = asyncio.Event()
        self._pause = MIN_PAUSE

    def expect_more(self) -> None:
        """Work was found just now: poll again soon."""
        self._pause = MIN_PAUSE

    async def notify(self) -> None:
        self.expect_more()
        self._notified.set()

    async def wait_for_notification(self, timeout: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(timeout, self._pause)):
                await self._notified.wait()
        if not self._notified.is_set():
            self._pause = min(self._pause * GROWTH, MAX_PAUSE)
        self._notified.clear()
