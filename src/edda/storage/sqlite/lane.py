"""A thread that does one job after the other and tells the event loop of whoever asked, once per job."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from edda.errors import StorageUnavailableError

T = TypeVar("T")

JOIN_SECONDS = 0.2
ANSWER_ATTEMPTS = 600
ANSWER_PAUSE = 0.1

logger = logging.getLogger(__name__)

_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class JobQueue:
    """What a thread is to do, one after the other."""

    def __init__(self, over: str) -> None:
        """`over`: what is said to who comes too late."""
        self._over = over
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._stopped = False
        self._process = os.getpid()

    def submit(self, act: Callable[[], T]) -> asyncio.Future[T]:
        """A cancelled caller does not stop a job that has begun: like any sent statement, it may still be done."""
        if os.getpid() != self._process:
            raise StorageUnavailableError("opened before a fork: open a storage of its own in the child process")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._guard:
            if self._stopped:
                raise StorageUnavailableError(self._over)
            self._queue.put((act, future))
        return future

    @property
    def is_stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """No more jobs; those in the queue are done, then the work is."""
        with self._guard:
            if not self._stopped:
                self._stopped = True
                self._queue.put(None)

    def run_jobs(self) -> None:
        """In the thread that does them. Every job gets an answer: a caller whose future is forgotten waits for ever."""
        while (job := self._queue.get()) is not None:
            try:
                _run_job(*job)
            except Exception as error:  # no memory for the answer, most likely
                _answer_at_last(job[1], error)
            del job  # results may be large, and the next job may be long in coming


class JobThread:
    def __init__(self, name: str, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._jobs = JobQueue("the storage is closed")
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, act: Callable[[], T]) -> asyncio.Future[T]:
        return self._jobs.submit(act)

    def stop(self) -> None:
        """No more jobs; those in the queue are done, then the thread finishes and ends."""
        self._jobs.stop()

    async def close(self) -> None:
        """Returns when the thread has ended: it may have to wait for its turn to close the connection."""
        self.stop()
        while self._thread.is_alive():  # in short pieces: who gives up waiting leaves no thread behind that waits
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    def join(self, timeout: float) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _work(self) -> None:
        self._jobs.run_jobs()
        self._finish()


def _run_job(act: Callable[[], Any], future: asyncio.Future[Any]) -> None:
    if future.cancelled():  # its caller gave up before it began
        return
    try:
        outcome, error = act(), None
    except BaseException as raised:  # all of it belongs to whoever asked, a test's simulated death too
        outcome, error = None, raised
    with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
        future.get_loop().call_soon_threadsafe(_settle, future, outcome, error)


def _answer_at_last(future: asyncio.Future[Any], error: Exception) -> None:
    """The job is done or not, and its answer could not be handed over: say so, as often as it takes."""
    for number in range(ANSWER_ATTEMPTS):
        try:
            if number == 0:
                logger.error("a SQLite thread could not hand over an answer (%r); its caller asks again", error)
            lost = StorageUnavailableError(f"the answer was lost: {error!r}")
            with suppress(RuntimeError):  # the loop was closed meanwhile
                future.get_loop().call_soon_threadsafe(_settle, future, None, lost)
        except Exception:  # still no memory
            time.sleep(ANSWER_PAUSE)
        else:
            return


def _settle(future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)
