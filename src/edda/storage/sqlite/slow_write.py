"""A write of the journal that has to wait for another writer of the file: the log says for whom, and for how long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType

SLOW = 1.0
"""Seconds until it is told of; then after twice as long, and so on."""
STALLED = 0.25
"""Seconds by which the event loop has to be late before that time is not counted: the write may have ended meanwhile,
and the loop that was blocked has not heard of it yet."""

logger = logging.getLogger(__name__)


class SlowWrite:
    def __init__(self, path: str, name_holder: Callable[[], str]) -> None:
        self._path = path
        self._name_holder = name_holder
        self._pause = SLOW

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun = time.monotonic()
        self._set_alarm(SLOW)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._alarm.cancel()

    def _set_alarm(self, pause: float) -> None:
        self._due = time.monotonic() + pause
        self._alarm = self._loop.call_later(pause, self._tell)

    def _tell(self) -> None:
        late = time.monotonic() - self._due
        if late > STALLED:
            self._begun += late
            self._set_alarm(STALLED)
            return
        holder = self._name_holder()
        logger.warning(
            "journal: nothing has been written to %s for %.0f s: %s; all runs of this worker wait until it ends",
            self._path,
            time.monotonic() - self._begun,
            f"{holder} holds its transaction open"
            if holder
            else "another process or thread writes, or the disk is slow",
        )
        self._pause *= 2
        self._set_alarm(self._pause)
