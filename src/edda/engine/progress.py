"""What one attempt says of itself while it runs: that it is alive, and how far it has come."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from threading import Lock

MIN_INTERVAL = 1.0
"""Seconds between two recorded details."""
INTERVAL_FRACTION = 0.05
"""And so much of the attempt's age, so that one of ten hours leaves some 200 entries."""


_lock = Lock()
"""One for all: it is held for a moment only, and few attempts need any."""


class ActivityHeartbeat:
    """`record` is called on the loop with those details that are to be recorded. Bodies call from any thread."""

    __slots__ = (
        "_loop",
        "_newest",
        "_planned",
        "_record",
        "_recorded_at",
        "_timer",
        "beat_at",
        "begun_at",
        "details",
        "is_given_up",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, details: bytes | None, record: Callable[[bytes], None]) -> None:
        self.details = details
        """The last of an earlier attempt."""
        self.is_given_up = False
        self.begun_at = self.beat_at = time.monotonic()
        self._loop = loop
        self._record = record
        self._recorded_at = -math.inf
        self._newest: bytes | None = None
        self._planned = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.begun_at = self.beat_at = time.monotonic()

    def heartbeat(self, details: bytes | None) -> None:
        if self.is_given_up:
            raise asyncio.CancelledError("nobody waits for this attempt any more")
        self.beat_at = time.monotonic()
        if details is not None and self._store_latest(details):
            self._loop.call_soon_threadsafe(self._schedule_flush)

    def _store_latest(self, details: bytes) -> bool:
        """Whether they are the first since the last recorded ones: the loop is woken once for many."""
        with _lock:
            planned, self._planned = self._planned, True
            self._newest = details
        return not planned

    def _schedule_flush(self) -> None:
        if self.is_given_up:
            return
        pause = max(MIN_INTERVAL, INTERVAL_FRACTION * (self._recorded_at - self.begun_at))
        rest = self._recorded_at + pause - time.monotonic()
        if rest <= 0:
            self.flush()
        else:
            self._timer = self._loop.call_later(rest, self.flush)

    def flush(self) -> None:
        """Have the newest details recorded, if they are not."""
        self._silence()
        with _lock:
            details, self._newest, self._planned = self._newest, None, False
        if details is not None:
            self._recorded_at = time.monotonic()
            self._record(details)

    def cancel(self) -> None:
        """From now on nobody listens."""
        self.is_given_up = True
        self._record = _ignore  # it knows the attempt, which knows this: only the collector would free them
        if self._timer is not None:
            self._silence()

    def _silence(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _ignore(_details: bytes) -> None:
    pass
