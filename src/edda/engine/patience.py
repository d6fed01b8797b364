"""How long to wait for something that may never come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class GraceTimer:
    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, lost: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._on_expired = lost
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def has_expired(self) -> bool:
        """Asked for the first time it begins."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._end)
        return self._is_over

    def _end(self) -> None:
        self._is_over = True
        self._on_expired()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
