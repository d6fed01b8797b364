"""The threads of an SQLite file: jobs, connections, held transactions, the change poller."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

from edda.errors import StorageUnavailableError

from .connection import Connection, Version

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


class ConnectionThread:
    def __init__(self, name: str, connection: Connection) -> None:
        self._connection = connection
        self._lane = JobThread(f"edda-sqlite-{name}", connection.close)

    def transact(self, job: Callable[[Connection], T]) -> asyncio.Future[T]:
        return self._lane.submit(lambda: self._connection.run_in_transaction(job))

    def hold(self, job: Callable[[Connection], T]) -> asyncio.Future[T]:
        return self._lane.submit(lambda: self._connection.with_write_lock(job))

    def read(self, job: Callable[[Connection], T], patience: float | None = None) -> asyncio.Future[T]:
        return self._lane.submit(lambda: self._connection.read(job, patience))

    async def close(self) -> None:
        await self._lane.close()

    def kill(self) -> None:
        self._connection.kill()
        self._lane.stop()

    def join(self, timeout: float) -> None:
        """After a kill."""
        self._lane.join(timeout)


class HeldTransaction:
    """A thread stands in the queue for the turn, and does in it whatever it is told, until the end."""

    def __init__(self, desk: ConnectionThread, prepare: Callable[[Connection], object], holder: str) -> None:
        self.holder = holder
        self._jobs = JobQueue("the transaction is over")
        self._prepare = prepare
        self._db: Connection | None = None
        self.over = desk.hold(self._serve)

    async def begin(self) -> None:
        begun = self._jobs.submit(_nothing)
        try:
            await asyncio.wait((begun, self.over), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:  # nobody wants it any more: it is given back as soon as it is had
            self.stop()
            raise
        if not begun.done():
            self.over.result()
            raise StorageUnavailableError("the storage was closed")

    def submit(self, act: Callable[[Connection], T]) -> asyncio.Future[T]:
        return self._jobs.submit(lambda: act(self.db))

    @property
    def db(self) -> Connection:
        if self._db is None or self._jobs.is_stopped:
            raise StorageUnavailableError("the transaction is over")
        return self._db

    @property
    def has_begun(self) -> bool:
        return self._db is not None

    @property
    def is_over(self) -> bool:
        return self._jobs.is_stopped

    def stop(self) -> None:
        self._jobs.stop()

    async def end(self) -> None:
        """Returns when the turn is given back, whoever ended it."""
        self.stop()
        await asyncio.wait((self.over,))

    def _serve(self, db: Connection) -> None:
        if self._jobs.is_stopped:
            return
        self._prepare(db)
        self._db = db
        self._jobs.run_jobs()


class _NoTurn:
    async def end(self) -> None: ...


NO_TURN = _NoTurn()


class HeldTransactions:
    """Those that hold the turn or wait for it; one thread and one connection for all, since only one can have it."""

    def __init__(self, desk: ConnectionThread) -> None:
        self._desk = desk
        self._all: set[HeldTransaction] = set()

    @property
    def holder(self) -> str:
        """Of the one that has the turn now; nothing if none has."""
        return next((tenure.holder for tenure in self._all if tenure.has_begun), "")

    async def begin(self, prepare: Callable[[Connection], object] | None = None, holder: str = "") -> HeldTransaction:
        tenure = HeldTransaction(self._desk, prepare or _nothing, holder)
        self._all.add(tenure)
        tenure.over.add_done_callback(lambda over: self._part(tenure, over))
        await tenure.begin()
        return tenure

    async def close(self) -> None:
        self._stop()
        await self._desk.close()

    def kill(self) -> None:
        self._desk.kill()
        self._stop()

    def join(self, timeout: float) -> None:
        self._desk.join(timeout)

    def _stop(self) -> None:
        for tenure in tuple(self._all):
            tenure.stop()

    def _part(self, tenure: HeldTransaction, over: asyncio.Future[None]) -> None:
        self._all.discard(tenure)
        if not over.cancelled():
            over.exception()  # told to who began it, if anybody still waits


def _nothing(*_: Any) -> None: ...


SHORTEST = 0.005
LONGEST = 0.05
GROWTH = 1.02
"""From the shortest pause to the longest in two quiet seconds: waking up costs far more than looking."""


class ChangePoller:
    """Looks from a thread and a connection of its own, and only while somebody asks.

    The connection never writes: its own commits would be news.
    """

    def __init__(self, connection: Connection, heard: Callable[[], None]) -> None:
        self._desk = ConnectionThread("watch", connection)
        self._on_change = heard
        self._seen: Version | None = None
        self._pause = SHORTEST
        self._askers = 0
        self._looking = False

    async def open(self) -> None:
        """News is what comes after this."""
        self._seen = await self._desk.read(Connection.version)

    async def close(self) -> None:
        self._askers = 0
        await self._desk.close()

    def kill(self) -> None:
        self._desk.kill()

    def join(self, timeout: float) -> None:
        self._desk.join(timeout)

    def start_polling(self) -> None:
        """Each asker calls `rest` in the end."""
        self._askers += 1
        self._look()

    def stop_polling(self) -> None:
        self._askers -= 1

    def _look(self) -> None:
        if not self._looking:
            self._looking = True
            self._desk.read(self._wait).add_done_callback(self._tell)

    def _tell(self, changed: asyncio.Future[bool]) -> None:
        self._looking = False
        try:
            news = changed.result()
        except Exception as error:  # the engine's own calls tell what is wrong; the next asker tries again
            logger.debug("watching the file failed, looking again later: %r", error)
            return
        if news:
            self._on_change()
        elif self._askers > 0:  # who came just as the thread gave up
            self._look()

    def _wait(self, db: Connection) -> bool:
        """In the thread: True at the first change, False when nobody asks any more."""
        while self._askers > 0:
            time.sleep(self._pause)
            if (version := db.version()) != self._seen:
                self._seen, self._pause = version, SHORTEST
                return True
            self._pause = min(self._pause * GROWTH, LONGEST)
        return False


Ts = TypeVarTuple("Ts")


class ReadCache:
    """Belongs to one connection. Only for few questions with small answers: all of them stay until the next commit."""

    def __init__(self) -> None:
        self._version: Version | None = None
        self._answers: dict[tuple[Any, ...], Any] = {}

    def get(self, db: Connection, ask: Callable[[Connection, *Ts], T], *args: *Ts) -> T:
        version = db.version()  # looked at before the answer, which may be newer than it but never older
        if version != self._version:
            self._version, self._answers = version, {}
        question = (ask, *args)
        if question not in self._answers:
            self._answers[question] = ask(db, *args)
        answer: T = self._answers[question]
        return answer
