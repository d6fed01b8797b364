"""The rules of the journal writer, on a storage whose answers are lost and whose rows are locked at chosen batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import cast

import pytest

from edda.core.model import BatchResult, Entry, EntryKind, Fence, RunId, RunSignal, RunWrite, WorkerId, WorkerInfo
from edda.engine import journal
from edda.engine.journal import JournalStorage, JournalWriter, RunWriter
from edda.engine.tasks import Outage, cancel_and_wait
from edda.errors import (
    MigrationError,
    StorageConflictError,
    StorageLockedError,
    StorageRejectedError,
    StorageUnavailableError,
)
from edda.storage.memory.storage import MemoryStorage
from tests.storage.records import HOUR, SUSPENDED, end_signal, entry, new_run, next_generation, run_write, wait

from .conditions import until

WORKER = WorkerId("w1")
A, B, C = RunId("run-a"), RunId("run-b"), RunId("run-c")

Send = Callable[[], Awaitable[BatchResult | None]]


class Source:
    """A run with some writes; like a run in memory it enqueues itself again after a commit."""

    def __init__(self, owner: Owner, run_id: RunId) -> None:
        self.run_id, self.epoch, self.is_stored = run_id, 1, True
        self.results: list[BatchResult] = []
        self.written: list[RunWrite] = []
        self.rejected: list[RunWrite] = []
        self._owner = owner
        self._writes: deque[RunWrite] = deque()

    @property
    def signal_targets(self) -> frozenset[RunId]:
        return frozenset(signal.run_id for write in self._writes for signal in write.signals)

    def write(self, *writes: RunWrite) -> None:
        self._writes += writes
        self._owner.writer.enqueue(self)

    def next_write(self, limit: int) -> RunWrite | None:
        return self._writes.popleft() if self._writes else None

    def on_committed(self, write: RunWrite, result: BatchResult) -> None:
        self.written.append(write)
        self.results.append(result)
        if self._writes:
            self._owner.writer.enqueue(self)

    def on_rejected(self, write: RunWrite, error: StorageRejectedError) -> None:
        self.rejected.append(write)


class Database:
    """A storage in memory. `faults` are the fates of the next batches: each may send the batch, or not."""

    def __init__(self) -> None:
        self.stored = MemoryStorage()
        self.faults: deque[Callable[[Send], Awaitable[BatchResult | None]]] = deque()
        self.batches: list[tuple[RunId, ...]] = []
        self.tokens: list[int] = []
        self.locks: set[RunId] = set()
        self.on_read_owned: Callable[[], object] = lambda: None

    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        self.batches.append(tuple(write.run_id for write in batch))
        self.tokens.append(token)

        async def send() -> BatchResult | None:
            return await self.stored.write(fence, batch, token)

        if self.faults:
            return await self.faults.popleft()(send)
        if self.locks.intersection(write.run_id for write in batch):
            raise StorageLockedError("lock wait time-out")
        return await send()

    async def locked(self, runs: Collection[RunId]) -> frozenset[RunId]:
        return frozenset(self.locks & set(runs))

    async def read_fence(self, worker: WorkerId) -> Fence | None:
        return await self.stored.read_fence(worker)

    async def owned_runs(self, worker: WorkerId) -> dict[RunId, int]:
        self.on_read_owned()
        return await self.stored.owned_runs(worker)

    async def get(self, run_id: RunId) -> object:
        return await self.stored.get(run_id)


class Owner:
    """The worker of these runs."""

    def __init__(self, database: Database) -> None:
        self.outage = Outage(WORKER)
        self.sources = {run_id: Source(self, run_id) for run_id in (A, B, C)}
        self.lost: list[RunId] = []
        self.writer = JournalWriter(cast(JournalStorage, database), Fence(WORKER, 0, 0), self)
        self.task = asyncio.create_task(self.writer.run())

    @property
    def live(self) -> Mapping[RunId, RunWriter]:
        return self.sources

    def run_lost(self, source: RunWriter, why: str) -> None:
        self.lost.append(source.run_id)
        self.sources.pop(source.run_id, None)


async def lose_answer(send: Send) -> BatchResult | None:
    await send()
    raise StorageUnavailableError("the answer was lost on purpose")


async def roll_back(send: Send) -> BatchResult | None:
    raise StorageConflictError("rolled back on purpose")


async def time_out_at_lock(send: Send) -> BatchResult | None:
    raise StorageLockedError("lock wait time-out on purpose")


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FIRST_LOCK_CHECK", 0.02)
    monkeypatch.setattr(journal, "MAX_LOCK_CHECK", 0.05)


@pytest.fixture
async def database() -> Database:
    database = Database()
    await database.stored.open()
    await database.stored.register(WorkerInfo(WORKER, "test", "here", 1), HOUR)
    return database


@pytest.fixture
async def owner(database: Database) -> AsyncIterator[Owner]:
    """Its three runs are stored."""
    owner = Owner(database)
    for run_id, source in owner.sources.items():
        source.write(new_run(run_id))
    await until(lambda: all(source.written for source in owner.sources.values()), "the runs are stored")
    database.batches.clear()
    for source in owner.sources.values():
        source.written.clear()
        source.results.clear()
    yield owner
    await cancel_and_wait(owner.task)


def step(run_id: RunId, seq: int, *, signals: Sequence[RunSignal] = ()) -> RunWrite:
    return run_write(run_id, entry(seq), signals=signals)


async def until_written(source: Source, *writes: RunWrite) -> None:
    await until(lambda: len(source.written) >= len(writes), f"{len(writes)} writes of {source.run_id} are committed")
    assert source.written == list(writes)


# Batches whose outcome is unknown


async def test_a_batch_without_an_answer_is_sent_again_though_its_runs_are_lost(
    owner: Owner, database: Database
) -> None:
    """Else the writer would not know that its fence has moved on, and its next batch would find another one's."""
    lost, other = owner.sources[A], owner.sources[B]

    async def lose_run_and_answer(send: Send) -> BatchResult | None:
        del owner.sources[A]
        return await lose_answer(send)

    database.faults.append(lose_run_and_answer)
    lost.write(step(A, 1))
    await until(lambda: database.batches[-1:] == [()], "the batch is sent without the run")
    other.write(step(B, 1))
    await until_written(other, step(B, 1))
    assert not owner.task.done()
    assert lost.written == []


async def test_a_run_that_was_lost_is_left_out_when_its_batch_is_sent_again(owner: Owner, database: Database) -> None:
    lost, other = owner.sources[A], owner.sources[B]

    async def lose_run(send: Send) -> BatchResult | None:
        del owner.sources[A]
        return await roll_back(send)

    database.faults.append(lose_run)
    lost.write(step(A, 1))
    other.write(step(B, 1))
    await until_written(other, step(B, 1))
    assert database.batches == [(A, B), (B,)]
    assert await database.stored.history(A) == ()


async def test_a_batch_keeps_its_token_and_no_other_batch_has_it(owner: Owner, database: Database) -> None:
    """Two processes with the same worker id, such as a machine and its clone, must not take each other's batch for
    their own."""
    database.tokens.clear()
    database.faults += [lose_answer, roll_back]
    source = owner.sources[A]
    source.write(step(A, 1))
    await until_written(source, step(A, 1))
    assert database.batches == [(A,)] * 3
    first = set(database.tokens)
    assert len(first) == 1, "it is the same batch each time it is sent"
    source.write(*(step(A, seq) for seq in range(2, 12)))
    await until(lambda: len(source.written) == 11, "eleven batches are written")
    assert len(set(database.tokens)) == 11


async def test_nothing_is_added_to_a_batch_without_an_answer(owner: Owner, database: Database) -> None:
    first, second = owner.sources[A], owner.sources[B]

    async def add_and_lose(send: Send) -> BatchResult | None:
        second.write(step(B, 1))
        return await lose_answer(send)

    database.faults.append(add_and_lose)
    first.write(step(A, 1))
    await until_written(second, step(B, 1))
    assert database.batches == [(A,), (A,), (B,)]
    assert first.written == [step(A, 1)]


async def test_a_batch_that_finds_a_table_missing_is_sent_again(owner: Owner, database: Database) -> None:
    """Tables come back, as when a backup is being restored."""

    async def miss_table(send: Send) -> BatchResult | None:
        raise MigrationError("no such table: edda_history")

    database.faults += [miss_table, miss_table]
    owner.sources[A].write(step(A, 1))
    await until_written(owner.sources[A], step(A, 1))
    assert not owner.task.done()


async def test_a_batch_without_an_answer_is_not_divided_at_a_lock(owner: Owner, database: Database) -> None:
    """A part of it that is held would be written again when its row is free."""
    first, second = owner.sources[A], owner.sources[B]
    database.locks = {A}

    async def unlock(send: Send) -> BatchResult | None:
        database.locks.clear()
        return await time_out_at_lock(send)

    database.faults += [lose_answer, time_out_at_lock, unlock]
    first.write(step(A, 1))
    second.write(step(B, 1))
    await until_written(second, step(B, 1))
    await until_written(first, step(A, 1))
    assert database.batches == [(A, B)] * 4
    assert owner.lost == []


async def test_waits_that_were_refused_without_an_answer_are_reported_as_refused(
    owner: Owner, database: Database
) -> None:
    sender, waiting = owner.sources[B], owner.sources[A]
    sender.write(step(B, 1, signals=[end_signal(A)]))
    await until(lambda: bool(sender.written), "the signal is sent")

    database.faults.append(lose_answer)
    write = run_write(A, transition=SUSPENDED, waits=[wait(A, "wait:1", "paid")])
    waiting.write(write)
    await until_written(waiting, write)
    assert waiting.results == [BatchResult(refused={A: frozenset({"wait:1"})})]


async def test_a_suspend_without_an_answer_is_not_reported_as_refused(owner: Owner, database: Database) -> None:
    database.faults.append(lose_answer)
    write = run_write(A, transition=SUSPENDED, waits=[wait(A, "wait:1", "paid")])
    owner.sources[A].write(write)
    await until_written(owner.sources[A], write)
    assert owner.sources[A].results == [BatchResult()]


@pytest.mark.parametrize("has_unread", [False, True])
async def test_a_recur_without_an_answer_is_reported_as_it_was(
    owner: Owner, database: Database, has_unread: bool
) -> None:
    sender, recurring = owner.sources[B], owner.sources[A]
    sender.write(step(B, 1, signals=[end_signal(A)] if has_unread else ()))
    await until(lambda: bool(sender.written), "the signal is sent")

    database.faults.append(lose_answer)
    write = run_write(A, transition=next_generation())
    recurring.write(write)
    await until_written(recurring, write)
    assert recurring.results == [BatchResult(refused={A: frozenset()} if has_unread else {})]


# Runs that another process has taken


async def test_a_run_that_was_taken_is_dropped_and_the_others_go_on(owner: Owner, database: Database) -> None:
    taken, kept = owner.sources[A], owner.sources[B]
    checks_at_read: list[int] = []
    checks = owner.writer.ownership_checks
    database.on_read_owned = lambda: checks_at_read.append(owner.writer.ownership_checks)
    assert await database.stored.release_run(A)
    taken.write(step(A, 1))
    kept.write(step(B, 1))
    await until_written(kept, step(B, 1))
    assert owner.lost == [A]
    assert checks_at_read == [checks + 1], "a claim that is under way has to see that the owned runs are read"
    assert await database.stored.history(A) == ()


# Signals


async def test_a_run_is_in_no_batch_with_a_run_that_signals_it(owner: Owner, database: Database) -> None:
    for sender, target in ((A, B), (B, A)):
        database.batches.clear()
        owner.sources[A].written.clear()
        owner.sources[B].written.clear()
        number = 1 if sender == A else 2
        writes = {sender: step(sender, number, signals=[end_signal(target)]), target: step(target, number)}
        for run_id in (A, B):
            owner.sources[run_id].write(writes[run_id])
        for run_id in (A, B):
            await until_written(owner.sources[run_id], writes[run_id])
        assert database.batches == [(A,), (B,)]


async def test_two_runs_that_signal_a_third_share_a_batch(owner: Owner, database: Database) -> None:
    for run_id in (A, B):
        owner.sources[run_id].write(step(run_id, 1, signals=[end_signal(C)]))
    await until(lambda: all(owner.sources[run_id].written for run_id in (A, B)), "both are written")
    assert database.batches == [(A, B)]


# Records that are refused


async def test_only_the_run_with_a_refused_record_fails(owner: Owner) -> None:
    bad = run_write(B, Entry(1, EntryKind.STEP, "NUL \0 in it", "pay", ok=True, at=1))
    for run_id, write in ((A, step(A, 1)), (B, bad), (C, step(C, 1))):
        owner.sources[run_id].write(write)
    await until_written(owner.sources[A], step(A, 1))
    await until_written(owner.sources[C], step(C, 1))
    assert owner.sources[B].rejected == [bad]
    assert owner.lost == []


async def test_a_run_whose_next_record_exists_is_lost_and_does_not_fail(owner: Owner, database: Database) -> None:
    owner.sources[B].write(step(B, 1))
    await until_written(owner.sources[B], step(B, 1))
    again = owner.sources[B]
    for run_id in (A, B, C):
        owner.sources[run_id].write(step(run_id, 1))
    await until_written(owner.sources[A], step(A, 1))
    await until_written(owner.sources[C], step(C, 1))
    assert owner.lost == [B]
    assert again.rejected == []


# Rows that are locked


async def test_what_a_held_run_writes_meanwhile_follows(owner: Owner, database: Database) -> None:
    held, other = owner.sources[A], owner.sources[B]
    database.locks = {A}
    held.write(step(A, 1))
    await until(lambda: A in owner.writer._held, "the run is held")
    held.write(step(A, 2))
    other.write(step(B, 1))
    await until_written(other, step(B, 1))
    database.locks.clear()
    await until_written(held, step(A, 1), step(A, 2))


async def test_what_a_run_wrote_while_its_batch_timed_out_follows(owner: Owner, database: Database) -> None:
    held, other = owner.sources[A], owner.sources[B]

    async def write_more(send: Send) -> BatchResult | None:
        held.write(step(A, 2))
        return await time_out_at_lock(send)

    database.locks = {A}
    database.faults.append(write_more)
    held.write(step(A, 1))
    await until(lambda: A in owner.writer._held, "the run is held")
    other.write(step(B, 1))
    await until_written(other, step(B, 1))
    assert held.written == []
    assert (A,) not in database.batches[1:], "nothing is taken from a run that is held"
    database.locks.clear()
    await until_written(held, step(A, 1), step(A, 2))
