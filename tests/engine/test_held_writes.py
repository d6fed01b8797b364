"""The write of a run whose row is locked is committed once the row is free, also if no other run writes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest

from edda.core.model import BatchResult, Fence, RunId, RunWrite, WorkerId
from edda.engine import journal
from edda.engine.journal import JournalStorage, JournalWriter, RunWriter
from edda.engine.tasks import Outage, cancel_and_wait
from edda.errors import StorageLockedError, StorageRejectedError

from .conditions import until

WORKER = WorkerId("w1")
ALONE, OTHER = RunId("alone"), RunId("other")


class Source:
    """A run with some writes."""

    epoch, is_stored, signal_targets = 1, True, frozenset[RunId]()

    def __init__(self, writer: JournalWriter, run_id: RunId) -> None:
        self.run_id = run_id
        self.written: list[int] = []
        self._writer = writer
        cast(Owner, writer._owner).live[run_id] = self
        self._writes: deque[RunWrite] = deque()

    def write(self, number: int) -> None:
        self._writes.append(RunWrite(self.run_id, self.epoch, number))
        self._writer.enqueue(self)

    def next_write(self, limit: int) -> RunWrite | None:
        return self._writes.popleft() if self._writes else None

    def on_committed(self, write: RunWrite, result: BatchResult) -> None:
        self.written.append(write.generation)

    def on_rejected(self, write: RunWrite, error: StorageRejectedError) -> None:
        self.write(write.generation + 1)


class Database:
    """Refuses and locks what it is told to. The lock of a run in `hidden` is not one that `locked` finds."""

    def __init__(self) -> None:
        self.locks: set[RunId] = set()
        self.hidden: set[RunId] = set()
        self.refused: set[RunWrite] = set()

    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        if {write.run_id for write in batch} & (self.locks | self.hidden):
            raise StorageLockedError("lock wait time-out")
        if self.refused & set(batch):
            raise StorageRejectedError("value too long")
        return BatchResult()

    async def locked(self, runs: Collection[RunId]) -> frozenset[RunId]:
        return frozenset(self.locks & set(runs))


class Owner:
    """A worker that owns all runs that write."""

    def __init__(self) -> None:
        self.outage = Outage(WORKER)
        self.live: dict[RunId, RunWriter] = {}

    def run_lost(self, source: RunWriter, why: str) -> None: ...


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_LOCK_CHECK", 0.1)


@asynccontextmanager
async def writing(database: Database) -> AsyncIterator[JournalWriter]:
    writer = JournalWriter(
        cast(JournalStorage, database),
        Fence(WORKER, 0, 0),
        Owner(),
    )
    task = asyncio.create_task(writer.run())
    yield writer
    await cancel_and_wait(task)


async def test_a_held_write_follows_one_that_has_to_be_written_alone() -> None:
    database = Database()
    async with writing(database) as writer:
        alone, other = Source(writer, ALONE), Source(writer, OTHER)
        database.hidden = {ALONE}
        alone.write(1)
        await until(lambda: ALONE in writer._held, "the first run is held, and is written alone from now on")
        database.locks = {OTHER}
        other.write(1)
        await until(lambda: OTHER in writer._held, "the second run is held")
        for held in writer._held.values():
            held.due = 0.0  # both are found free by one check
        database.hidden, database.locks = set(), set()
        writer._wake.set()
        await until(lambda: alone.written == [1] and other.written == [1], "both are written")


async def test_a_run_whose_held_write_is_refused_can_write_another() -> None:
    database = Database()
    async with writing(database) as writer:
        source = Source(writer, ALONE)
        database.locks = {ALONE}
        source.write(1)
        await until(lambda: ALONE in writer._held, "the run is held")
        database.refused, database.locks = {RunWrite(ALONE, 1, 1)}, set()
        await until(lambda: source.written == [2], "what the run wrote instead is written")
