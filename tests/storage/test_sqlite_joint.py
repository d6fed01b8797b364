"""What is special about transactions that users share with Edda on one file: they hold its turn, and a thread."""

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
from edda.storage.shared import step_commit as joints
from edda.storage.sqlite import SQLiteStorage, connection
from edda.storage.sqlite.locks import FairLock, acquire_lock_file, release_lock_file
from tests.engine.facts import until

from .joints import step_record, transaction
from .processes import PATIENCE, opened, others_can_lock
from .records import HOUR, born, dispatch, entry, incoming, key, outgoing, start
from .worker import Worker

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
    async with transaction(storage) as joint:
        await joint.execute(TABLE, {})
    return storage


async def noted(storage: SQLiteStorage) -> list[int]:
    async with transaction(storage) as joint:
        return [id for (id,) in await joint.fetch("SELECT id FROM note ORDER BY id", {})]


# What users hold in their hands


async def test_the_connection_of_a_transaction_does_what_users_need(storage: SQLiteStorage) -> None:
    joint = await storage.begin()
    users = joint.connection
    assert await users.execute(ADD, (1, b"one")) == 1
    assert await users.execute("INSERT INTO note (id, body) VALUES (:id, :body)", {"id": 2, "body": b"two"}) == 1
    await users.executemany(ADD, [(3, b"three"), (4, b"four")])
    assert await users.fetch("SELECT id FROM note WHERE id > ? ORDER BY id", (2,)) == [(3,), (4,)]
    assert await users.fetchone("SELECT body FROM note WHERE id = :id", {"id": 1}) == (b"one",)
    assert await users.fetchone("SELECT body FROM note WHERE id = 9") is None
    await joint.commit()
    assert await noted(storage) == [1, 2, 3, 4]


async def test_code_that_needs_the_drivers_own_connection_runs_in_the_transactions_thread(
    storage: SQLiteStorage,
) -> None:
    joint = await storage.begin()

    def work(raw: sqlite3.Connection) -> str:
        raw.execute(ADD, (1, b"one"))
        return threading.current_thread().name

    assert await joint.connection.run(work) == "edda-sqlite-joint"
    joint.connection.raw.execute(ADD, (2, b"two"))
    await joint.commit()
    assert await noted(storage) == [1, 2]


async def test_what_is_left_behind_on_the_drivers_own_connection_meets_nobody_else(storage: SQLiteStorage) -> None:
    joint = await storage.begin()
    raw = joint.connection.raw
    raw.row_factory = sqlite3.Row
    raw.executemany(ADD, [(n, b"") for n in range(100)])
    await joint.commit()
    joint = await storage.begin()
    half_read = joint.connection.raw.execute("SELECT id FROM note")
    assert half_read.fetchone() == (0,)
    await joint.commit()
    await storage.start([start("run-1")])
    joint = await storage.begin()
    assert await joint.connection.fetchone("SELECT count(*) FROM note") == (100,)
    await joint.rollback()


async def test_nothing_goes_in_after_the_end(storage: SQLiteStorage) -> None:
    joint = await storage.begin()
    await joint.commit()
    with pytest.raises(StorageUnavailableError, match="over"):
        await joint.connection.execute(ADD, (1, b""))
    with pytest.raises(StorageUnavailableError, match="over"):
        assert joint.connection.raw
    with pytest.raises(StorageUnavailableError, match="over"):
        await joint.commit()
    await joint.rollback()
    assert await noted(storage) == []


async def test_what_sqlite_rolled_back_by_itself_is_not_committed_by_halves(storage: SQLiteStorage) -> None:
    joint = await storage.begin()
    await joint.connection.execute(ADD, (1, b""))
    with pytest.raises(sqlite3.IntegrityError):
        await joint.connection.execute("INSERT OR ROLLBACK INTO note (id) VALUES (1)")
    with pytest.raises(StorageConflictError):
        await joint.connection.execute(ADD, (2, b""))
    with pytest.raises(StorageConflictError):
        await joint.commit()
    assert await noted(storage) == []


async def test_a_constraint_that_is_looked_at_last_is_the_drivers_error(storage: SQLiteStorage) -> None:
    def refer_to_nothing(raw: sqlite3.Connection) -> None:
        raw.execute("COMMIT")
        raw.execute("PRAGMA foreign_keys = ON")
        raw.execute("BEGIN IMMEDIATE")
        raw.execute("CREATE TABLE mark (note INTEGER REFERENCES note DEFERRABLE INITIALLY DEFERRED)")
        raw.execute("INSERT INTO mark VALUES (7)")

    joint = await storage.begin()
    await joint.connection.run(refer_to_nothing)
    with pytest.raises(sqlite3.IntegrityError):
        await joint.commit()
    async with transaction(storage) as other:
        assert await other.fetch("SELECT 1 FROM sqlite_master WHERE name = 'mark'", {}) == []


async def test_a_commit_on_a_full_disk_says_that_nobody_knows_and_leaves_the_next_one_alone(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    joint = await storage.begin()
    await joint.connection.execute(ADD, (1, MEGABYTE[: 1 << 17]))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.stat(f"{path}-wal").st_size + 4096, hard))
    try:
        with pytest.raises(StorageUnavailableError):
            await joint.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await joint.rollback()
    assert await noted(storage) == []
    await worker.write(born("run-1"))


# The turn


async def test_the_loop_goes_on_while_somebody_waits_for_the_turn(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    await worker.write(born("run-1", entry(1)))
    pulse = await storage.open_heartbeat()
    await pulse.beat(worker.id, HOUR)
    turn = acquire_lock_file(f"{path}.lock")
    with turn:
        begun, taken = asyncio.ensure_future(storage.begin()), asyncio.ensure_future(storage.acquire_write_lock())
        async with asyncio.timeout(PATIENCE):
            assert await storage.get(RunId("run-1")) is not None
            assert len(await storage.history(RunId("run-1"))) == 1
            assert await pulse.beat(worker.id, HOUR) is not None
        assert not begun.done()
        assert not taken.done()
    release_lock_file(turn)
    await (await begun).rollback()
    await (await taken).end()
    await pulse.close()


async def test_what_is_read_does_not_wait_for_an_open_transaction(path: str) -> None:
    storage = await with_notes(path)
    joint = await storage.begin()
    async with asyncio.timeout(PATIENCE):
        assert await storage.get(RunId("run-1")) is None
        assert await storage.staged_events(10) == ()
        assert await storage.claim_outbox(10, HOUR) == ()
        assert await storage.find_step_commit(RunId("run-1"), 0, "pay:1") is None
    await joint.rollback()
    await storage.close()


async def test_the_journal_comes_before_transactions_that_asked_later(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    turn, order = acquire_lock_file(f"{path}.lock"), list[str]()

    async def use(name: str) -> None:
        joint = await storage.begin()
        order.append(name)
        await joint.commit()

    async def write() -> None:
        await worker.write(born("run-1"))
        order.append("journal")

    first = await storage.begin()
    later = [asyncio.ensure_future(use(f"use {n}")) for n in range(3)]
    written = asyncio.ensure_future(write())
    await until(lambda: bool(turn._threads._waiting), "the journal waits for its turn")
    await first.commit()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(written, *later)
    release_lock_file(turn)
    assert order == ["journal", "use 0", "use 1", "use 2"]


def has_grown(queue: FairLock, before: int) -> bool:
    return len(queue._waiting) > before


async def test_a_turn_goes_to_the_thread_that_has_waited_longest() -> None:
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


async def test_the_turn_is_free_when_a_commit_or_a_rollback_returns(storage: SQLiteStorage, path: str) -> None:
    for end in ("commit", "rollback"):
        joint = await storage.begin()
        assert await others_can_lock(f"{path}.lock") == [False]
        await getattr(joint, end)()
        assert await others_can_lock(f"{path}.lock") == [True]


async def test_the_wal_is_checkpointed_by_transactions_too(storage: SQLiteStorage, path: str) -> None:
    sizes = []
    for n in range(20):
        joint = await storage.begin()
        await joint.connection.execute(ADD, (n, MEGABYTE))
        if n % 2:
            assert joint.connection.raw.in_transaction  # it is closed at the end: the checkpoint comes before
        await joint.commit()
        sizes.append(os.stat(f"{path}-wal").st_size)
    assert max(sizes) < connection.CHECKPOINT_AT + 3 * len(MEGABYTE)


async def test_the_wal_is_checkpointed_after_somebody_elses_turn_too(storage: SQLiteStorage, path: str) -> None:
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute("PRAGMA wal_autocheckpoint = 0")
    sizes = []
    for n in range(12):
        turn = await storage.acquire_write_lock()
        foreign.execute(ADD, (n, MEGABYTE))
        await turn.end()
        sizes.append(os.stat(f"{path}-wal").st_size)
    foreign.close()
    assert max(sizes) < connection.CHECKPOINT_AT + 3 * len(MEGABYTE)


async def test_a_kill_ends_a_statement_of_the_users(path: str) -> None:
    storage = await with_notes(path)
    joint = await storage.begin()
    await joint.connection.execute(ADD, (1, b""))
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    counting = asyncio.ensure_future(joint.connection.fetch(endless))
    await asyncio.sleep(0.2)  # under way, or else in the queue: neither may be left behind
    storage.kill()
    with pytest.raises((sqlite3.OperationalError, StorageUnavailableError)):
        await asyncio.wait_for(counting, PATIENCE)
    assert await others_can_lock(f"{path}.lock") == [True]
    again = await opened(path)
    assert await noted(again) == []
    await again.close()


async def test_a_foreign_writer_is_a_conflict_and_the_turn_is_given_back(
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


# Somebody else's connection


class Session:
    """A user's own SQLAlchemy session, as Edda writes into it."""

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


async def test_a_session_of_sqlalchemy_takes_all_that_edda_has_to_say(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    await worker.write(born("run-1"))
    await storage.accept([incoming("e1", once=["jobs"])], {})
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    said = step_record("run-1", dispatches=[dispatch("a"), dispatch("b")], outgoing=[outgoing("o", run_id="run-1")])
    turn = await storage.acquire_write_lock()
    written = asyncio.ensure_future(worker.write(born("run-9")))
    async with AsyncSession(engine) as session:
        shared = Session(session)
        await shared.execute("INSERT INTO note (id) VALUES (:id)", {"id": 1})
        assert await joints.take_message(shared, key("jobs")) == b"e1"
        assert await joints.start(shared, start("run-2", ready_at=1))
        assert not await joints.start(shared, start("run-1", ready_at=1))
        with pytest.raises(LeaseLostError):
            await joints.write_step_commit(shared, step_record("run-1", epoch=7))
        await joints.write_step_commit(shared, said)
        assert not written.done()
        await shared.commit()
    await turn.end()
    await engine.dispose()
    await asyncio.wait_for(written, PATIENCE)
    assert await noted(storage) == [1]
    assert await storage.find_step_commit(RunId("run-1"), 0, said.done.step) == said.done
    assert [one.body for one in await storage.staged_events(10)] == [one.body for one in said.dispatches]
    assert [one.event for one in await storage.find_outbox()] == list(said.outgoing)
    assert [run.run_id for run in (await worker.claim()).runs] == ["run-2"]
    assert await storage.take_message(key("jobs"), HOUR) is None


# In memory


async def test_a_database_in_memory_shares_its_one_connection() -> None:
    storage = await with_notes(":memory:")
    worker = Worker(storage, "worker-1")
    await worker.register()
    await worker.write(born("run-1"))
    joint = await storage.begin()
    await joint.connection.execute(ADD, (1, b""))
    joint.connection.raw.execute(ADD, (2, b""))
    written = asyncio.ensure_future(worker.write(born("run-2")))
    await joints.write_step_commit(joint, step_record("run-1", dispatches=[dispatch("a")]))
    assert not written.done()
    await joint.commit()
    await asyncio.wait_for(written, PATIENCE)
    assert await noted(storage) == [1, 2]
    assert await storage.find_step_commit(RunId("run-1"), 0, "pay:1") is not None
    assert len(await storage.staged_events(10)) == 1
    joint = await storage.begin()
    await joint.connection.execute(ADD, (3, b""))
    await joint.rollback()
    assert await noted(storage) == [1, 2]
    await storage.close()


@pytest.mark.parametrize("end", ["close", "kill"])
async def test_a_database_in_memory_ends_with_a_transaction_open(end: str) -> None:
    storage = await with_notes(":memory:")
    joint = await storage.begin()
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
        await joint.connection.execute(ADD, (1, b""))


async def test_of_a_database_in_memory_nobody_else_can_have_the_turn() -> None:
    storage = await with_notes(":memory:")
    turn = await storage.acquire_write_lock()
    assert await storage.start([start("run-1")]) == {"run-1"}
    await turn.end()
    await turn.end()
    await storage.close()
