"""Steps of one worker that wait for the database, and the one log line about all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from edda.core.model import RunId, WorkerId

from . import log

EVERY = 30.0
"""Seconds between two lines: a thousand steps that wait for an hour must not fill the log."""


class Outage:
    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._waiting = 0
        self._tell_at = 0.0

    @contextmanager
    def wait(self, run_id: RunId, step: str, error: BaseException) -> Iterator[None]:
        """While a step waits because of the error."""
        self._waiting += 1
        try:
            self._tell(run_id, step, error)
            yield
        finally:
            self._waiting -= 1

    def _tell(self, run_id: RunId, step: str, error: BaseException) -> None:
        now = time.monotonic()
        if now >= self._tell_at:
            self._tell_at = now + EVERY
            told = log.tell_error(error)
            log.write("database_away", worker=self._worker, run=run_id, step=step, error=told, steps=self._waiting)
