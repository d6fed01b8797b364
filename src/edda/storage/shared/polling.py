"""For databases that cannot call other processes: they look for work, and less often while nothing happens."""

from __future__ import annotations

import asyncio
from contextlib import suppress

_SHORTEST, _LONGEST = 0.05, 0.25
_GROWTH = 1.5


class PollingNews:
    def __init__(self) -> None:
        self._announced = asyncio.Event()
        self._pause = _SHORTEST

    def expect_more(self) -> None:
        """Something was found just now: look again soon."""
        self._pause = _SHORTEST

    async def notify(self) -> None:
        self.expect_more()
        self._announced.set()

    async def wait_for_notification(self, timeout: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(timeout, self._pause)):
                await self._announced.wait()
        if not self._announced.is_set():
            self._pause = min(self._pause * _GROWTH, _LONGEST)
        self._announced.clear()
