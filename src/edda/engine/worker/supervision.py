"""Background tasks of the engine, and what happens when one ends with an unexpected error.

A duty that can be started again is, after a pause that grows with each failure in a row; the log has its first failure
with a traceback, and one line for each later one. A duty whose state cannot be rebuilt gives up its whole worker
instead, and the engine starts a new one (`Worker.fail`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from edda.engine.tasks import start_task

logger = logging.getLogger(__name__)

FIRST_PAUSE = 0.1
MAX_PAUSE = 30.0
HEALTHY_AFTER = 60.0
"""Seconds that a duty has to run without a failure for the next one to count as the first."""


class Failures:
    """Counts the failures in a row of one part of the engine, and sets the pause after each."""

    def __init__(self, what: str, max_pause: float = MAX_PAUSE) -> None:
        self.what = what
        self.count = 0
        self._max_pause = max_pause
        self._failed_at = 0.0

    def record(self, error: BaseException, action: str) -> float:
        """Log the failure; returns the seconds to pause before `action`, the next thing that is done."""
        now = time.monotonic()
        if now - self._failed_at > HEALTHY_AFTER + self._max_pause:
            self.count = 0
        self.count += 1
        self._failed_at = now
        pause = min(FIRST_PAUSE * 2.0 ** min(self.count - 1, 32), self._max_pause)
        details = error if self.count == 1 else None
        again = "" if self.count == 1 else f", {self.count} times in a row"
        logger.error(
            "%s failed unexpectedly%s (%s: %s), %s in %.1f s",
            self.what,
            again,
            type(error).__name__,
            error,
            action,
            pause,
            exc_info=details,
        )
        return pause


async def keep(what: str, duty: Callable[[], Awaitable[None]], on_failure: Callable[[], object] | None = None) -> None:
    """Run a duty to its end, and start it again after unexpected errors. `on_failure` is called before each pause."""
    failures = Failures(what)
    while True:
        try:
            return await duty()
        except Exception as error:  # a bug, or no memory: without this duty the process would be alive and idle
            pause = failures.record(error, "starting it again")
        if on_failure is not None:
            on_failure()
        await asyncio.sleep(pause)


def start(
    what: str,
    duty: Callable[[], Awaitable[None]],
    *,
    name: str,
    on_failure: Callable[[], object] | None = None,
) -> asyncio.Task[None]:
    """A task that runs `keep`."""
    return start_task(keep(what, duty, on_failure), name=name)


def start_once(what: str, work: Callable[[], Awaitable[None]], *, name: str) -> asyncio.Task[None]:
    """A task whose failure is only logged: its work is done again when it is next requested."""

    async def attempt() -> None:
        try:
            await work()
        except Exception as error:  # a bug, or no memory: the next request starts the work again
            logger.error("%s failed unexpectedly (%s: %s)", what, type(error).__name__, error, exc_info=error)

    return start_task(attempt(), name=name)
