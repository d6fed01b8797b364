"""Transactions that users share with Edda on one SQLite file: they hold its write lock, and use a thread."""

from __future__ import annotations

import asyncio
import os
import resource
import sqlite3
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from edda.core.model import RunId
from edda.errors import LeaseLostError, StorageConflictError, StorageUnavailableError
from edda.storage.ports import Dialect
from edda.storage.shared import step_commit
from edda.storage.sqlite import SQLiteStorage, connection
from edda.storage.sqlite.locks import FairLock, close_write_lock, open_write_lock
from tests.engine.conditions import until

from .processes import PATIENCE, opened, others_can_lock
from .records import HOUR, entry, incoming, key, new_run, outbox_event, staged_event, start
from .shared_transactions import step_record, transaction
from .worker import Worker

pytestmark = pytest.mark.databases("sqlite")

MEGABYTE = b"x" * (1 << 20)
TABLE = "CREATE TABLE note (id INTEGER PRIMARY KEY, body BLOB)"
ADD = "INSERT INTO note (id, body) VALUES (?, ?)"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return os.path.realpath(tmp_path / "edda.db")


@pytest.fixture
async def storage(path: str) -> AsyncIterator[SQLiteStorage]:
    storage = await with_notes(path)
    yield storage
    await storage.close()


@pytest.fixture
async def worker(storage: SQLiteStorage) -> Worker:
    worker = Worker(storage, "worker-1")
    await worker.register()
    return worker


async def with_notes(path: str) -> SQLiteStorage:
    storage = await opened(path)
    async with transaction(storage) as shared:
        await shared.execute(TABLE, {})
    return storage


async def noted(storage: SQLiteStorage) -> list[int]:
    async with transaction(storage) as shared:
        return [id for (id,) in await shared.fetch("SELECT id FROM note ORDER BY id", {})]


# The connection that users get


async def test_the_connection_of_a_transaction_does_what_users_need(storage: SQLiteStorage) -> None:
    shared = await storage.begin()
    users = shared.connection
    assert await users.execute(ADD, (1, b"one")) == 1
    assert await users.execute("INSERT INTO note (id, body) VALUES (:id, :body)", {"id": 2, "body": b"two"}) == 1
    await users.executemany(ADD, [(3, b"three"), (4, b"four")])
    assert await users.fetch("SELECT id FROM note WHERE id > ? ORDER BY id", (2,)) == [(3,), (4,)]
    assert await users.fetchone("SELECT body FROM note WHERE id = :id", {"id": 1}) == (b"one",)
    assert await users.fetchone("SELECT body FROM note WHERE id = 9") is None
    await shared.commit()
    assert await noted(storage) == [1, 2, 3, 4]


async def test_code_that_needs_the_drivers_own_connection_runs_in_the_transactions_thread(
    storage: SQLiteStorage,
) -> None:
    shared = await storage.begin()

    def work(raw: sqlite3.Connection) -> str:
        raw.execute(ADD, (1, b"one"))
        return threading.current_thread().name

    assert await shared.connection.run(work) == "edda-sqlite-transactions"
    shared.connection.raw.execute(ADD, (2, b"two"))
    await shared.commit()
    assert await noted(storage) == [1, 2]


async def test_settings_left_on_the_drivers_connection_affect_no_other_transaction(storage: SQLiteStorage) -> None:
    shared = await storage.begin()
    raw = shared.connection.raw
    raw.row_factory = sqlite3.Row
    raw.executemany(ADD, [(n, b"") for n in range(100)])
    await shared.commit()
    shared = await storage.begin()
    half_read = shared.connection.raw.execute("SELECT id FROM note")
    assert half_read.fetchone() == (0,)
    await shared.commit()
    await storage.start([start("run-1")])
    shared = await storage.begin()
    assert await shared.connection.fetchone("SELECT count(*) FROM note") == (100,)
    await shared.rollback()


async def test_nothing_goes_in_after_the_end(storage: SQLiteStorage) -> None:
    shared = await storage.begin()
    await shared.commit()
    with pytest.raises(StorageUnavailableError, match="over"):
        await shared.connection.execute(ADD, (1, b""))
    with pytest.raises(StorageUnavailableError, match="over"):
        assert shared.connection.raw
    with pytest.raises(StorageUnavailableError, match="over"):
        await shared.commit()
    await shared.rollback()
    assert await noted(storage) == []


async def test_what_sqlite_rolled_back_by_itself_is_not_committed_by_halves(storage: SQLiteStorage) -> None:
    shared = await storage.begin()
    await shared.connection.execute(ADD, (1, b""))
    with pytest.raises(sqlite3.IntegrityError):
        await shared.connection.execute("INSERT OR ROLLBACK INTO note (id) VALUES (1)")
    with pytest.raises(StorageConflictError):
        await shared.connection.execute(ADD, (2, b""))
    with pytest.raises(StorageConflictError):
        await shared.commit()
    assert await noted(storage) == []


async def test_a_deferred_constraint_is_the_drivers_error(storage: SQLiteStorage) -> None:
    def refer_to_nothing(raw: sqlite3.Connection) -> None:
        raw.execute("COMMIT")
        raw.execute("PRAGMA foreign_keys = ON")
        raw.execute("BEGIN IMMEDIATE")
        raw.execute("CREATE TABLE mark (note INTEGER REFERENCES note DEFERRABLE INITIALLY DEFERRED)")
        raw.execute("INSERT INTO mark VALUES (7)")

    shared = await storage.begin()
    await shared.connection.run(refer_to_nothing)
    with pytest.raises(sqlite3.IntegrityError):
        await shared.commit()
    async with transaction(storage) as other:
        assert await other.fetch("SELECT 1 FROM sqlite_master WHERE name = 'mark'", {}) == []


async def test_a_commit_on_a_full_disk_has_an_unknown_outcome_and_the_next_one_works(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    shared = await storage.begin()
    await shared.connection.execute(ADD, (1, MEGABYTE[: 1 << 17]))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(f"{path}-wal").st_size + 4096, hard))
    try:
        with pytest.raises(StorageUnavailableError):
            await shared.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await shared.rollback()
    assert await noted(storage) == []
    await worker.write(new_run("run-1"))


# The write lock


async def test_the_event_loop_continues_while_a_caller_waits_for_the_write_lock(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    await worker.write(new_run("run-1", entry(1)))
    heartbeat = await storage.open_heartbeat()
    await heartbeat.beat(worker.id, HOUR)
    lock = open_write_lock(f"{path}.lock")
    with lock:
        begun, taken = asyncio.ensure_future(storage.begin()), asyncio.ensure_future(storage.acquire_write_lock())
        async with asyncio.timeout(PATIENCE):
            assert await storage.get(RunId("run-1")) is not None
            assert len(await storage.history(RunId("run-1"))) == 1
            assert await heartbeat.beat(worker.id, HOUR) is not None
        assert not begun.done()
        assert not taken.done()
    close_write_lock(lock)
    await (await begun).rollback()
    await (await taken).end()
    await heartbeat.close()


async def test_what_is_read_does_not_wait_for_an_open_transaction(path: str) -> None:
    storage = await with_notes(path)
    shared = await storage.begin()
    async with asyncio.timeout(PATIENCE):
        assert await storage.get(RunId("run-1")) is None
        assert await storage.staged_events(10) == ()
        assert await storage.claim_outbox(10, HOUR) == ()
        assert await storage.find_step_commit(RunId("run-1"), 0, "pay:1") is None
    await shared.rollback()
    await storage.close()


async def test_the_journal_comes_before_transactions_that_asked_later(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    lock, order = open_write_lock(f"{path}.lock"), list[str]()

    async def use(name: str) -> None:
        shared = await storage.begin()
        order.append(name)
        await shared.commit()

    async def write() -> None:
        await worker.write(new_run("run-1"))
        order.append("journal")

    first = await storage.begin()
    later = [asyncio.ensure_future(use(f"use {n}")) for n in range(3)]
    written = asyncio.ensure_future(write())
    await until(lambda: bool(lock._threads._waiting), "the journal waits for the write lock")
    await first.commit()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(written, *later)
    close_write_lock(lock)
    assert order == ["journal", "use 0", "use 1", "use 2"]


def has_grown(queue: FairLock, before: int) -> bool:
    return len(queue._waiting) > before


async def test_the_write_lock_goes_to_the_thread_that_has_waited_longest() -> None:
    queue, order = FairLock(), list[int]()

    def take(number: int) -> None:
        queue.acquire()
        order.append(number)
        queue.release()

    queue.acquire()
    threads = [threading.Thread(target=take, args=(n,)) for n in range(5)]
    for thread in threads:
        before = len(queue._waiting)
        thread.start()
        await until(partial(has_grown, queue, before), "it stands in the queue")
    queue.release()
    for thread in threads:
        await asyncio.to_thread(thread.join, PATIENCE)
    assert order == [0, 1, 2, 3, 4]


async def test_the_write_lock_is_free_when_a_commit_or_a_rollback_returns(storage: SQLiteStorage, path: str) -> None:
    for end in ("commit", "rollback"):
        shared = await storage.begin()
        assert await others_can_lock(f"{path}.lock") == [False]
        await getattr(shared, end)()
        assert await others_can_lock(f"{path}.lock") == [True]


async def test_the_wal_is_checkpointed_by_transactions_too(storage: SQLiteStorage, path: str) -> None:
    sizes = []
    for n in range(20):
        shared = await storage.begin()
        await shared.connection.execute(ADD, (n, MEGABYTE))
        if n % 2:
            assert shared.connection.raw.in_transaction  # it is closed at the end: the checkpoint comes before
        await shared.commit()
        sizes.append(os.stat(f"{path}-wal").st_size)
    assert max(sizes) < connection.CHECKPOINT_AT + 3 * len(MEGABYTE)


async def test_the_wal_is_checkpointed_after_a_users_transaction_too(storage: SQLiteStorage, path: str) -> None:
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute("PRAGMA wal_autocheckpoint = 0")
    sizes = []
    for n in range(12):
        lock = await storage.acquire_write_lock()
        foreign.execute(ADD, (n, MEGABYTE))
        await lock.end()
        sizes.append(os.stat(f"{path}-wal").st_size)
    foreign.close()
    assert max(sizes) < connection.CHECKPOINT_AT + 3 * len(MEGABYTE)


async def test_a_kill_ends_a_statement_of_the_users(path: str) -> None:
    storage = await with_notes(path)
    shared = await storage.begin()
    await shared.connection.execute(ADD, (1, b""))
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    counting = asyncio.ensure_future(shared.connection.fetch(endless))
    await asyncio.sleep(0.2)  # running, or else in the queue: neither may be left behind
    storage.kill()
    with pytest.raises((sqlite3.OperationalError, StorageUnavailableError)):
        await asyncio.wait_for(counting, PATIENCE)
    assert await others_can_lock(f"{path}.lock") == [True]
    again = await opened(path)
    assert await noted(again) == []
    await again.close()


async def test_a_foreign_writer_is_a_conflict_and_the_write_lock_is_released(
    storage: SQLiteStorage, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BUSY_TIMEOUT", 50)
    impatient = await opened(path)
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageConflictError):
        await impatient.begin()
    assert await others_can_lock(f"{path}.lock") == [True]
    foreign.execute("ROLLBACK")
    foreign.close()
    await (await impatient.begin()).rollback()
    await impatient.close()


# A connection that is not Edda's


class Session:
    """A user's SQLAlchemy session, as Edda writes into it."""

    dialect: Dialect = "sqlite"
    is_certified = False
    is_lost = False
    has_begun = True

    def __init__(self, session: AsyncSession) -> None:
        self.connection = session

    async def execute(self, sql: str, values: Mapping[str, Any]) -> int:
        result: Any = await self.connection.execute(text(sql), values)
        return int(result.rowcount)

    async def fetch(self, sql: str, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        return (await self.connection.execute(text(sql), values)).fetchall()

    async def commit(self) -> None:
        await self.connection.commit()

    async def rollback(self) -> None:
        await self.connection.rollback()


async def test_a_session_of_sqlalchemy_takes_all_side_effects(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1", exclusive=["jobs"])], {})
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    effects = step_record(
        "run-1", staged_events=[staged_event("a"), staged_event("b")], outbox_events=[outbox_event("o", run_id="run-1")]
    )
    lock = await storage.acquire_write_lock()
    written = asyncio.ensure_future(worker.write(new_run("run-9")))
    async with AsyncSession(engine) as session:
        shared = Session(session)
        await shared.execute("INSERT INTO note (id) VALUES (:id)", {"id": 1})
        assert await step_commit.take_message(shared, key("jobs")) == b"e1"
        assert await step_commit.start(shared, start("run-2", ready_at=1))
        assert not await step_commit.start(shared, start("run-1", ready_at=1))
        with pytest.raises(LeaseLostError):
            await step_commit.write_step_commit(shared, step_record("run-1", epoch=7))
        await step_commit.write_step_commit(shared, effects)
        assert not written.done()
        await shared.commit()
    await lock.end()
    await engine.dispose()
    await asyncio.wait_for(written, PATIENCE)
    assert await noted(storage) == [1]
    assert await storage.find_step_commit(RunId("run-1"), 0, effects.commit.step) == effects.commit
    assert [one.body for one in await storage.staged_events(10)] == [one.body for one in effects.staged_events]
    assert [one.event for one in await storage.find_outbox()] == list(effects.outbox_events)
    assert [run.run_id for run in (await worker.claim()).runs] == ["run-2"]
    assert await storage.take_message(key("jobs"), HOUR) is None


# In memory


async def test_a_database_in_memory_shares_its_one_connection() -> None:
    storage = await with_notes(":memory:")
    worker = Worker(storage, "worker-1")
    await worker.register()
    await worker.write(new_run("run-1"))
    shared = await storage.begin()
    await shared.connection.execute(ADD, (1, b""))
    shared.connection.raw.execute(ADD, (2, b""))
    written = asyncio.ensure_future(worker.write(new_run("run-2")))
    await step_commit.write_step_commit(shared, step_record("run-1", staged_events=[staged_event("a")]))
    assert not written.done()
    await shared.commit()
    await asyncio.wait_for(written, PATIENCE)
    assert await noted(storage) == [1, 2]
    assert await storage.find_step_commit(RunId("run-1"), 0, "pay:1") is not None
    assert len(await storage.staged_events(10)) == 1
    shared = await storage.begin()
    await shared.connection.execute(ADD, (3, b""))
    await shared.rollback()
    assert await noted(storage) == [1, 2]
    await storage.close()


@pytest.mark.parametrize("end", ["close", "kill"])
async def test_a_database_in_memory_ends_with_a_transaction_open(end: str) -> None:
    storage = await with_notes(":memory:")
    shared = await storage.begin()
    waiting = asyncio.ensure_future(storage.start([start("run-1")]))
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE):
        if end == "close":
            await storage.close()
            assert await waiting == {"run-1"}  # it was in the queue before
        else:
            storage.kill()
            with pytest.raises(StorageUnavailableError):
                await waiting
    with pytest.raises(StorageUnavailableError):
        await shared.connection.execute(ADD, (1, b""))


async def test_a_database_in_memory_has_no_write_lock() -> None:
    storage = await with_notes(":memory:")
    lock = await storage.acquire_write_lock()
    assert await storage.start([start("run-1")]) == {"run-1"}
    await lock.end()
    await lock.end()
    await storage.close()
