"""What one worker logs of a database that is away: one line about all steps that wait for it, and one when it is back.

The first part of the worker whose warning is logged begins the outage, the next heartbeat that is answered ends it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from edda.core.model import RunId, WorkerId
from edda.errors import StorageConflictError

from . import log

EVERY = 30.0
"""Seconds between two lines: a thousand steps that wait for an hour must not fill the log."""


class Outage:
    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._waiting = 0
        self._tell_at = 0.0
        self._began: float | None = None

    def begin(self, error: BaseException) -> None:
        """A warning of this error was logged."""
        if self._began is None and not isinstance(error, StorageConflictError):
            self._began = time.monotonic()

    def end(self, sent: float) -> None:
        """What was sent at this moment was answered."""
        if self._began is not None and sent > self._began:
            log.write("database_back", worker=self._worker, seconds=time.monotonic() - self._began)
            self._began = None

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
            self.begin(error)
            log.write("database_away", worker=self._worker, run=run_id, step=step, error=told, steps=self._waiting)
