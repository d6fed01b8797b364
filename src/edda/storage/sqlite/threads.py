"""The threads that work on an SQLite file.

Each connection has a thread of its own, and the thread has a queue of jobs. A job is a function of the connection that
does everything one port method asks for: a transaction travels to its thread whole, never as single statements.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import wraps
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar, TypeVarTuple

from edda.errors import StorageUnavailableError
from edda.storage.ports import StatementProbe

from .connection import MEMORY, Connection, OpenedFile, Version

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
P = ParamSpec("P")

JOIN_SECONDS = 0.2
ANSWER_ATTEMPTS = 600
ANSWER_PAUSE = 0.1
QUERY_TIMEOUT = 5.0
"""Seconds after which a query of the viewer or the CLI fails with an error."""

logger = logging.getLogger(__name__)

_QueuedJob = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class JobQueue:
    """The jobs of one thread, in the order in which they were submitted."""

    def __init__(self, stopped_error: str) -> None:
        """`stopped_error`: the text of the error that `submit` raises after `stop`."""
        self._stopped_error = stopped_error
        self._queue: SimpleQueue[_QueuedJob | None] = SimpleQueue()
        self._guard = threading.Lock()
        self.is_stopped = False
        self._process = os.getpid()

    def submit(self, act: Callable[[], T]) -> asyncio.Future[T]:
        """A cancelled caller does not stop a job that has begun: like a statement that was sent, it may be done."""
        if os.getpid() != self._process:
            raise StorageUnavailableError("opened before a fork: open a storage of its own in the child process")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._guard:
            if self.is_stopped:
                raise StorageUnavailableError(self._stopped_error)
            self._queue.put((act, future))
        return future

    def stop(self) -> None:
        """Refuse new jobs; `run_jobs` returns after those that are in the queue."""
        with self._guard:
            if not self.is_stopped:
                self.is_stopped = True
                self._queue.put(None)

    def run_jobs(self) -> None:
        """Runs in the thread. Every future gets an answer: a caller whose future has none waits for ever."""
        while (job := self._queue.get()) is not None:
            try:
                _run_job(*job)
            except Exception as error:  # no memory for the answer, most likely
                _answer_at_last(job[1], error)
            del job  # results may be large, and the next job may be long in coming


def _run_job(act: Callable[[], Any], future: asyncio.Future[Any]) -> None:
    if future.cancelled():  # the caller was cancelled before the job began
        return
    try:
        outcome, error = act(), None
    except BaseException as raised:  # every error belongs to the caller, a test's simulated process death too
        outcome, error = None, raised
    with suppress(RuntimeError):  # the loop was closed meanwhile, and the caller with it
        future.get_loop().call_soon_threadsafe(_set_answer, future, outcome, error)


def _answer_at_last(future: asyncio.Future[Any], error: Exception) -> None:
    """The job is done or not, and handing over its answer failed: answer with that error, as often as it takes."""
    for number in range(ANSWER_ATTEMPTS):
        try:
            if number == 0:
                logger.error("a SQLite thread could not hand over an answer (%r); its caller asks again", error)
            lost = StorageUnavailableError(f"the answer was lost: {error!r}")
            with suppress(RuntimeError):  # the loop was closed meanwhile
                future.get_loop().call_soon_threadsafe(_set_answer, future, None, lost)
        except Exception:  # still no memory
            time.sleep(ANSWER_PAUSE)
        else:
            return


def _set_answer(future: asyncio.Future[Any], outcome: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(outcome)
    else:
        future.set_exception(error)


class ConnectionThread:
    """One connection and the thread that alone uses it."""

    def __init__(self, name: str, connection: Connection) -> None:
        self._connection = connection
        self._jobs = JobQueue("the storage is closed")
        self._thread = threading.Thread(target=self._work, name=f"edda-sqlite-{name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self._jobs.run_jobs()
        self._connection.close()

    def transact(self, job: Callable[[Connection], T]) -> asyncio.Future[T]:
        return self._jobs.submit(lambda: self._connection.run_in_transaction(job))

    def hold(self, job: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Run the job with the file's write lock; it begins and ends its transactions itself."""
        return self._jobs.submit(lambda: self._connection.with_write_lock(job))

    def read(self, job: Callable[[Connection], T], timeout: float | None = None) -> asyncio.Future[T]:
        return self._jobs.submit(lambda: self._connection.read(job, timeout))

    async def close(self) -> None:
        """Returns when the thread has done its jobs and ended: it may have to wait for the write lock to close its
        connection."""
        self._jobs.stop()
        while self._thread.is_alive():  # in short pieces: a cancelled close leaves no helper thread behind in a join
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    def kill(self) -> None:
        self._connection.kill()
        self._jobs.stop()

    def join(self, timeout: float) -> None:
        """Wait for the thread after `kill`."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)


class ReadCache:
    """Answers of one connection, kept until the next commit of any process.

    For few questions with small answers: those that loops ask by the clock, so that an idle database runs no statement.
    """

    def __init__(self) -> None:
        self._version: Version | None = None
        self._answers: dict[tuple[Any, ...], Any] = {}

    def get(self, db: Connection, ask: Callable[[Connection, *Ts], T], *args: *Ts) -> T:
        version = db.version()  # read before the answer, which may be newer than this version but never older
        if version != self._version:
            self._version, self._answers = version, {}
        question = (ask, *args)
        if question not in self._answers:
            self._answers[question] = ask(db, *args)
        answer: T = self._answers[question]
        return answer


class SQLitePool:
    """The connections that all parts of one storage share: one writes, one reads, one answers the queries of people.

    A database in memory has one connection only, which does everything.
    """

    def __init__(self, path: str, synchronous: str, probe: StatementProbe | None) -> None:
        self.path = path
        self.in_memory = path == MEMORY
        self.cache = ReadCache()
        """Belongs to the reader's connection."""
        self._synchronous = synchronous
        self._probe = probe
        self._file = None if self.in_memory else OpenedFile(path)
        self._writer: ConnectionThread | None = None
        self._reader: ConnectionThread | None = None
        self._observer: ConnectionThread | None = None

    async def open(self) -> None:
        if self._file is not None:
            self._file.forget()
        self._writer = self.connection_thread("writer", lent=self.in_memory)
        await self._writer.transact(lambda db: None)
        if self.in_memory:
            self._reader = self._writer
        else:
            self._reader = self.connection_thread("reader")
            await self._reader.read(lambda db: None)  # opens it now, not while a step holds the write lock for long

    def connection_thread(self, name: str, *, lent: bool = False, is_probed: bool = True) -> ConnectionThread:
        probe = self._probe if is_probed else None
        return ConnectionThread(name, Connection(self.path, self._synchronous, probe, lent=lent, file=self._file))

    @property
    def writer(self) -> ConnectionThread:
        return _require_open(self._writer)

    async def transact(self, job: Callable[[Connection], T]) -> T:
        return await self.writer.transact(job)

    async def read(self, job: Callable[[Connection], T]) -> T:
        return await _require_open(self._reader).read(job)

    async def read_after_writes(self, job: Callable[[Connection], T]) -> T:
        """Read on the writer's thread, so behind every transaction that was submitted before."""
        return await self.writer.read(job)

    async def query(self, job: Callable[[Connection], T]) -> T:
        """Read on a connection of its own, with a time-out: the engine's reads do not wait for a long query."""
        writer = self.writer
        if self.in_memory:
            return await writer.read(job, QUERY_TIMEOUT)
        if self._observer is None:
            self._observer = self.connection_thread("observer")
        return await self._observer.read(job, QUERY_TIMEOUT)

    async def cached_read(self, ask: Callable[[Connection, *Ts], T], *args: *Ts) -> T:
        return await self.read(lambda db: self.cache.get(db, ask, *args))

    def pop_threads(self) -> Iterator[ConnectionThread]:
        """The threads that are open; from then on the pool counts as closed."""
        threads = (self._observer, self._reader, self._writer)
        self._observer = self._reader = self._writer = None
        return (thread for thread in threads if thread)


def _require_open(thread: ConnectionThread | None) -> ConnectionThread:
    if thread is None:
        raise StorageUnavailableError("the storage is not open")
    return thread


class Part:
    """A part of the storage. `transaction`, `read` and `query` below make its methods of plain functions that run in a
    thread of the pool and are given that thread's connection as their first argument."""

    _pool: SQLitePool
    _now: Callable[[], int]


Self = TypeVar("Self", bound=Part)


_Job = Callable[Concatenate[Self, Connection, P], T]
_Method = Callable[Concatenate[Self, P], Coroutine[Any, Any, T]]


def transaction(job: _Job[Self, P, T]) -> _Method[Self, P, T]:
    """Run the method in the writer's thread, with the file's write lock, as one transaction."""
    return _in_thread(job, SQLitePool.transact)


def read(job: _Job[Self, P, T]) -> _Method[Self, P, T]:
    """Run the method in the reader's thread. Each of its statements sees a snapshot of its own."""
    return _in_thread(job, SQLitePool.read)


def query(job: _Job[Self, P, T]) -> _Method[Self, P, T]:
    """Run the method in the thread for queries of people, with a time-out."""
    return _in_thread(job, SQLitePool.query)


def _in_thread(
    job: _Job[Self, P, T], run: Callable[[SQLitePool, Callable[[Connection], T]], Coroutine[Any, Any, T]]
) -> _Method[Self, P, T]:
    @wraps(job)
    async def method(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await run(self._pool, lambda db: job(self, db, *args, **kwargs))

    return method
