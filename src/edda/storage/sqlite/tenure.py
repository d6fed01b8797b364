"""Turns that are held for longer than a job: by a transaction of the user's, or for somebody else's connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from edda.errors import StorageUnavailableError

from .connection import Connection
from .desk import ConnectionThread
from .lane import JobQueue

T = TypeVar("T")


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
