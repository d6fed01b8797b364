"""Task helpers: start, cancel and wait, back off, grace timers, rechecks of claims, outages."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, TypeVar

from edda.core.model import RunId, WorkerId
from edda.errors import StorageConflictError

from . import log

T = TypeVar("T")


def start_task(
    work: Coroutine[Any, Any, T],
    *,
    name: str | None = None,
    context: Context | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> asyncio.Task[T]:
    """A task that begins in a later turn of the loop, whatever factory for tasks the user's loop has.

    With `asyncio.eager_task_factory` (Python 3.12) `create_task` would run it at once, inside its maker: bodies of
    steps inside each other until the stack is full, and a task that is over before its maker has noted that it began.
    """
    return asyncio.Task(work, loop=loop or asyncio.get_running_loop(), name=name, context=context)


class Backoff:
    def __init__(self, first: float = 0.01, most: float = 1.0) -> None:
        self._next = first
        self._most = most
        self._warned = False

    async def pause(self) -> None:
        await asyncio.sleep(self.next())

    def next(self) -> float:
        """Seconds of the next pause, for who waits by itself."""
        seconds = self._next * random.uniform(0.5, 1.0)
        self._next = min(self._next * 2, self._most)
        return seconds

    def warn(self, logger: logging.Logger, message: str, *args: object) -> bool:
        """The first time as a warning, and True; a database that is away for an hour need not fill the log. An error
        without a text, such as a `TimeoutError`, is told by its class."""
        told = [type(one).__name__ if isinstance(one, BaseException) and not str(one) else one for one in args]
        is_first, self._warned = not self._warned, True
        logger.log(logging.WARNING if is_first else logging.DEBUG, message, *told)
        return is_first


RECANCEL_AFTER = 5.0
"""Seconds after which a task that goes on is cancelled once more: time enough to tidy up after the first one."""


async def cancel_and_wait(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel them, and wait until they are over.

    One cancel is not enough: what a task awaits may swallow it. Up to Python 3.11 `asyncio.wait_for` does if the cancel
    comes in the very moment of the answer, and database drivers use it.
    """
    going = {task for task in tasks if task is not None}
    while going:
        for task in going:
            task.cancel()
        over, going = await asyncio.wait(going, timeout=RECANCEL_AFTER)
        for task in over:
            if not task.cancelled():
                task.exception()  # looked at: whoever dismisses a task does not care how it ended


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


class ClaimRecheck:
    """When to look whether it did. Nobody knows how long a server that was cut off goes on with a statement, so that
    one look is not enough: it is looked at once, and then ever more rarely, for good.

    Without any sign of trouble it is looked at rarely, too: after a failover the database may say again that a run is
    ours which we had given up, and no connection need have told us of the failover."""

    def __init__(self, soonest: float, rarest: float) -> None:
        self._soonest = soonest
        self._rarest = rarest
        self._pause = soonest
        self._due = time.monotonic() + rarest

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def start(self) -> None:
        self._pause, self._due = self._soonest, 0.0

    def checked(self) -> None:
        self._due = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, self._rarest)


class Drops:
    """Runs that were dropped because another worker had written for them. They are freed for anybody to claim: at once
    the first time, then ever later. A record that no worker can write must not be tried in a tight loop."""

    LONGEST = 60.0

    def __init__(self) -> None:
        self._returns: dict[RunId, tuple[float, float]] = {}
        """Since when it may be freed, and how long it rests the next time."""

    def __contains__(self, run_id: RunId) -> bool:
        return run_id in self._returns

    def add(self, run_id: RunId) -> None:
        _, rest = self._returns.get(run_id, (0.0, 0.0))
        self._returns[run_id] = (time.monotonic() + rest, min(max(1.0, rest * 2), self.LONGEST))

    def may_return(self, run_id: RunId) -> bool:
        since, _ = self._returns.get(run_id, (0.0, 0.0))
        return time.monotonic() >= since

    def discard(self, run_id: RunId) -> None:
        self._returns.pop(run_id, None)


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
