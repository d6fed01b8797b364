"""The storage on one SQLite file, shared by as many processes of one host as like, or on a database in memory.

A thread writes, one reads, one watches for news. Whole transactions travel to the threads, never single statements.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from edda.core.model import (
    Bundle,
    CancelOutcome,
    Claim,
    Delivery,
    Entry,
    Fence,
    RunFilter,
    RunId,
    RunRecord,
    Start,
    Takeover,
    WorkerId,
    WorkerInfo,
)
from edda.errors import StorageUnavailableError
from edda.storage.ports import Probe

from . import journal, queue, runs, schema, workers
from .connection import MEMORY, OLDEST, SYNCHRONOUS, Connection
from .desk import Desk
from .lock import Presence
from .watch import Watch

T = TypeVar("T")

GOODBYE = 1.0
"""Seconds a kill waits for the statements that run; whoever stands in a queue for the file is left there."""


def system_microseconds() -> int:
    return time.time_ns() // 1000


class SQLiteStorage:
    def __init__(
        self,
        path: str,
        *,
        now: Callable[[], int] = system_microseconds,
        probe: Probe | None = None,
        synchronous: str = "FULL",
    ) -> None:
        """`synchronous` weaker than FULL may lose the last commits when the machine (not the process) dies."""
        if synchronous not in SYNCHRONOUS:
            raise ValueError(f"synchronous is one of {', '.join(SYNCHRONOUS)}, not {synchronous!r}")
        if path != MEMORY:
            path = os.path.realpath(path)
        self._path = path
        self._now = now
        self._probe = probe
        self._synchronous = synchronous
        self._presence = Presence(path)
        self._workers: set[WorkerId] = set()
        self._writer: Desk | None = None
        self._reader: Desk | None = None
        self._watch: Watch | None = None
        self._pulses: set[Desk] = set()
        self._news = asyncio.Event()

    # Its life

    async def open(self) -> None:
        if sqlite3.sqlite_version_info < OLDEST:
            wanted = ".".join(map(str, OLDEST))
            raise StorageUnavailableError(f"SQLite {sqlite3.sqlite_version} is too old: {wanted} or newer is needed")
        try:
            await self._open()
        except BaseException:  # failed or cancelled: nothing stays half open
            self.kill()
            raise

    async def _open(self) -> None:
        self._writer = self._desk("writer")
        await self._writer.transact(lambda db: None)
        if self._in_memory:
            self._reader = self._writer
        else:
            self._reader = self._desk("reader")
            self._watch = Watch(Connection(self._path, self._synchronous), self._news.set)
            await self._watch.open()

    async def close(self) -> None:
        for part in self._leave():
            await part.close()
        self._release_workers()

    def kill(self) -> None:
        parts = tuple(self._leave())
        for part in parts:
            part.kill()
        until = time.monotonic() + GOODBYE
        for part in parts:
            part.join(max(0.0, until - time.monotonic()))
        self._release_workers()

    async def migrate(self) -> tuple[str, ...]:
        return await self._transact(lambda db: schema.migrate(db, self._now()))

    async def pending_migrations(self) -> tuple[str, ...]:
        return await self._read(schema.pending)

    async def now(self) -> int:
        """Asks the database though the clock is ours, so that it fails when the database does."""
        await self._read(lambda db: db.row("SELECT 1"))
        return self._now()

    # Journal: what a worker asks about its own writes waits behind them

    async def write(self, fence: Fence, batch: Sequence[Bundle]) -> frozenset[RunId] | None:
        return await self._transact(lambda db: journal.write(db, fence, batch))

    async def read_fence(self, worker: WorkerId) -> Fence | None:
        return await _open_only(self._writer).read(lambda db: journal.read_fence(db, worker))

    async def owned(self, worker: WorkerId) -> dict[RunId, int]:
        return await _open_only(self._writer).read(lambda db: journal.owned(db, worker))

    # Workers

    async def register(self, worker: WorkerInfo, lease: int) -> int:
        if not self._in_memory:
            self._presence.hold(worker.id)
            self._workers.add(worker.id)
        try:
            return await self._transact(lambda db: workers.register(db, worker, lease, self._now()))
        except BaseException:  # whoever sees a row all the same may take it over at once
            self._release(worker.id)
            raise

    async def retire(self, worker: WorkerId) -> None:
        await self._transact(lambda db: workers.retire(db, worker, self._now()))
        self._bury(worker)

    async def neighbours(self, host: str) -> tuple[WorkerInfo, ...]:
        return await self._read(lambda db: workers.neighbours(db, host))

    async def take_over(self, me: WorkerId) -> Takeover | None:
        takeover = await self._transact(lambda db: workers.take_over(db, me, self._presence.is_lost, self._now()))
        if takeover:
            self._bury(takeover.worker)
        return takeover

    async def free_orphans(self) -> int:
        total = 0
        while freed := await self._transact(lambda db: workers.free_orphans(db, self._now())):
            total += freed
        return total

    async def disown(self, run_id: RunId) -> bool:
        return await self._transact(lambda db: workers.disown(db, run_id, self._now()))

    async def pulse(self) -> SQLitePulse:
        if self._in_memory:
            return SQLitePulse(_open_only(self._writer), self._now)
        _open_only(self._writer)
        desk = self._desk("pulse")
        self._pulses.add(desk)
        return SQLitePulse(desk, self._now, self._end_pulse)

    # Queue

    async def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int) -> Claim:
        return await self._transact(lambda db: queue.claim(db, worker, workflows, limit, self._now()))

    async def next_due(self, workflows: Sequence[str]) -> int | None:
        return await self._read(lambda db: queue.next_due(db, workflows, self._now()))

    async def unpark(self, workflows: Sequence[str]) -> int:
        return await self._transact(lambda db: queue.unpark(db, workflows, self._now()))

    async def mail(self, worker: WorkerId) -> tuple[Delivery, ...]:
        return await self._read(lambda db: queue.mail(db, worker))

    # Runs

    async def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        return await self._transact(lambda db: runs.start(db, starts, self._now()))

    async def cancel(self, run_id: RunId, value: bytes) -> CancelOutcome:
        return await self._transact(lambda db: runs.cancel(db, run_id, value, self._now()))

    async def get(self, run_id: RunId) -> RunRecord | None:
        return await self._read(lambda db: runs.get(db, run_id, self._now()))

    async def history(self, run_id: RunId, gen: int | None = None) -> tuple[Entry, ...]:
        return await self._read(lambda db: runs.history(db, run_id, gen))

    async def find(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        return await self._read(lambda db: runs.find(db, filter, self._now()))

    # News

    async def announce(self) -> None:
        """The commit itself is what other processes see; this wakes our own."""
        self._news.set()

    async def news(self, timeout: float) -> None:
        watch = self._watch
        if watch:
            watch.ask()
        try:
            async with asyncio.timeout(timeout):
                await self._news.wait()
        except TimeoutError:
            pass
        finally:
            self._news.clear()
            if watch:
                watch.rest()

    # Its parts

    @property
    def _in_memory(self) -> bool:
        return self._path == MEMORY

    def _desk(self, name: str) -> Desk:
        return Desk(name, Connection(self._path, self._synchronous, self._probe))

    async def _transact(self, job: Callable[[Connection], T]) -> T:
        return await _open_only(self._writer).transact(job)

    async def _read(self, job: Callable[[Connection], T]) -> T:
        return await _open_only(self._reader).read(job)

    async def _end_pulse(self, desk: Desk) -> None:
        self._pulses.discard(desk)
        await desk.close()

    def _leave(self) -> Iterator[Desk | Watch]:
        """Every part, each forgotten as it is given away."""
        while self._pulses:
            yield self._pulses.pop()
        watch, self._watch = self._watch, None
        reader, self._reader = self._reader, None
        writer, self._writer = self._writer, None
        yield from (part for part in (watch, reader, writer) if part)

    def _release_workers(self) -> None:
        """After the threads have ended: to look dead while one still writes would be a lie."""
        for worker in tuple(self._workers):
            self._release(worker)

    def _bury(self, worker: WorkerId) -> None:
        """Its lock too, should it be this very process that overslept."""
        self._release(worker)
        self._presence.remove(worker)

    def _release(self, worker: WorkerId) -> None:
        self._workers.discard(worker)
        self._presence.release(worker)


class SQLitePulse:
    """Beats on a connection of its own: a batch in the writer's queue does not hold it up."""

    def __init__(
        self, desk: Desk, now: Callable[[], int], end: Callable[[Desk], Awaitable[None]] | None = None
    ) -> None:
        self._desk = desk
        self._now = now
        self._end = end

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        return await self._desk.transact(lambda db: workers.beat(db, worker, lease, self._now()))

    async def close(self) -> None:
        end, self._end = self._end, None
        if end:
            await end(self._desk)


def _open_only(desk: Desk | None) -> Desk:
    if desk is None:
        raise StorageUnavailableError("the storage is not open")
    return desk
