"""Task helpers: start, cancel and wait, retry, back off, grace timers, outages."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context
from typing import Any, TypeVar

from msgspec import Struct

from edda.core.model import RunId, WorkerId
from edda.errors import MigrationError, StorageConflictError, StorageUnavailableError

from . import log

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRYABLE_ERRORS = (StorageUnavailableError, StorageConflictError)
"""The database is away, or rolled a transaction back: the same call may succeed later."""
TRANSIENT_ERRORS = (*RETRYABLE_ERRORS, MigrationError)
"""Tables that are missing come back, too, as when a backup is being restored."""


def start_task(
    work: Coroutine[Any, Any, T],
    *,
    name: str | None = None,
    context: Context | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> asyncio.Task[T]:
    """A task that starts in a later turn of the loop, with any task factory of the user's loop.

    With `asyncio.eager_task_factory` (Python 3.12) `create_task` would run it at once, inside its caller: attempts of
    steps nested in each other until the stack is full, and a task that is over before its caller has stored it.
    """
    return asyncio.Task(work, loop=loop or asyncio.get_running_loop(), name=name, context=context)


class Backoff(Struct):
    seconds: float = 0.01
    """The next pause is at most this long."""
    limit: float = 1.0
    has_warned: bool = False

    async def pause(self) -> None:
        await asyncio.sleep(self.next())

    def next(self) -> float:
        """Seconds of the next pause, for callers that sleep otherwise."""
        seconds = self.seconds * random.uniform(0.5, 1.0)
        self.seconds = min(self.seconds * 2, self.limit)
        return seconds

    def warn(self, logger: logging.Logger, message: str, *args: object) -> bool:
        """The first call logs a warning and returns True, later ones log debug lines: an outage of an hour must not
        fill the log. An error without a text, such as a `TimeoutError`, is logged as its class."""
        texts = [type(one).__name__ if isinstance(one, BaseException) and not str(one) else one for one in args]
        is_first, self.has_warned = not self.has_warned, True
        logger.log(logging.WARNING if is_first else logging.DEBUG, message, *texts)
        return is_first


RECANCEL_AFTER = 5.0
"""Seconds after which a task that has not ended is cancelled again: time for its clean-up after the first cancel."""


async def cancel_and_wait(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel the tasks, and wait until they have ended.

    One cancel is not enough: up to Python 3.11 `asyncio.wait_for`, which database drivers use, swallows a cancel that
    arrives together with the answer.
    """
    running = {task for task in tasks if task is not None}
    while running:
        for task in running:
            task.cancel()
        ended, running = await asyncio.wait(running, timeout=RECANCEL_AFTER)
        for task in ended:
            if not task.cancelled():
                task.exception()  # else asyncio logs that it was never retrieved


OUTAGE_LOG_INTERVAL = 30.0
"""Seconds between two lines: a thousand steps that wait for an hour must not fill the log."""


class Outage:
    """The log lines of one worker about a database that does not answer."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._waiting = 0
        self._log_at = 0.0
        self._began: float | None = None

    def begin(self, error: BaseException) -> None:
        """A warning of this error was logged."""
        if self._began is None and not isinstance(error, StorageConflictError):
            self._began = time.monotonic()

    def end(self, sent: float) -> None:
        """A statement that was sent at this time was answered."""
        if self._began is not None and sent > self._began:
            log.write("database_back", worker=self._worker, seconds=time.monotonic() - self._began)
            self._began = None

    @contextmanager
    def wait(self, run_id: RunId, step: str, error: BaseException) -> Iterator[None]:
        """While a step waits because of the error."""
        self._waiting += 1
        try:
            now = time.monotonic()
            if now >= self._log_at:
                self._log_at = now + OUTAGE_LOG_INTERVAL
                self.begin(error)
                fields = {"run": run_id, "step": step, "error": log.format_error(error), "steps": self._waiting}
                log.write("database_away", worker=self._worker, **fields)
            yield
        finally:
            self._waiting -= 1


async def retry_transient(call: Callable[[], Awaitable[T]], doing: str = "", outage: Outage | None = None) -> T:
    """For a call that may be sent twice: until the database answers. Without `doing` it logs nothing."""
    backoff = Backoff()
    while True:
        try:
            return await call()
        except TRANSIENT_ERRORS as error:
            is_first = bool(doing) and backoff.warn(logger, "%s failed (%s), trying again", doing, error)
            if is_first and outage is not None:
                outage.begin(error)
            await backoff.pause()


def halves(items: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """For a batch that the database refuses as a whole: each half is sent by itself until the bad item is alone."""
    middle = len(items) // 2
    return items[:middle], items[middle:]


_swap_current_task: Any = getattr(asyncio.tasks, "_swap_current_task", None)


class _NoCurrentTask:
    """Workflow code may only run while no task of the real loop is current (Python 3.14 insists)."""

    __slots__ = ("_loop", "_task")

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = _swap_current_task(self._loop, None)

    def __exit__(self, *_: object) -> None:
        _swap_current_task(self._loop, self._task)


_NO_CHANGE = nullcontext()


def no_current_task() -> AbstractContextManager[None]:
    return _NO_CHANGE if _swap_current_task is None else _NoCurrentTask()
