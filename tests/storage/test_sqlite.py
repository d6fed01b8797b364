"""A SQLite file that several processes share: write lock, lock files, checkpoints, sudden death."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from edda.core.model import CancelOutcome, Fence, RunId, Suspend, WorkerId
from edda.core.states import RunStatus
from edda.errors import StorageConflictError, StorageRejectedError, StorageUnavailableError
from edda.storage.shared.migrations import migrations
from edda.storage.sqlite import SQLiteStorage, connection
from edda.storage.sqlite.locks import close_write_lock, open_write_lock

from .probes import Listener
from .processes import (
    PATIENCE,
    exists,
    hear,
    kill,
    migrate_an_empty_file,
    opened,
    others_can_lock,
    own_a_run,
    process,
    stop_in_a_transaction,
    use_it_in_a_forked_child,
    write_to_both,
    write_until_one_has_enough,
)
from .records import HOUR, LATER, done, entry, new_run, start
from .worker import Worker

pytestmark = pytest.mark.databases("sqlite")

MEGABYTE = b"x" * (1 << 20)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return os.path.realpath(tmp_path / "edda.db")


@pytest.fixture
async def storage(path: str) -> AsyncIterator[SQLiteStorage]:
    storage = await opened(path)
    yield storage
    await storage.close()


@pytest.fixture
async def worker(storage: SQLiteStorage) -> Worker:
    worker = Worker(storage, "here")
    await worker.register()
    return worker


# Dying


async def test_a_process_killed_in_a_transaction_leaves_nothing_of_it_and_no_lock(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    with process(stop_in_a_transaction, path) as (child, pipe):
        await hear(pipe)
        kill(child)
    assert await worker.write() == frozenset()
    assert [e.seq for e in await storage.history(RunId("run-1"))] == [1]


async def test_the_runs_of_a_killed_process_move_at_once_during_its_lease(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    with process(own_a_run, path, "there") as (child, pipe):
        await hear(pipe)
        assert await storage.take_over(worker.id) is None
        kill(child)
    takeover = await storage.take_over(worker.id)
    assert takeover is not None
    assert (takeover.worker, takeover.moved) == ("there", 1)
    assert [run.run_id for run in (await worker.claim()).runs] == ["run-of-there"]
    assert await storage.read_fence(WorkerId("there")) is None
    assert not exists(f"{path}.worker-there")


async def test_a_stopped_process_keeps_its_runs_until_its_lease_is_over(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    with process(own_a_run, path, "there") as (child, pipe):
        await hear(pipe)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        assert await storage.take_over(worker.id) is None
        heartbeat = await storage.open_heartbeat()
        assert await heartbeat.beat(WorkerId("there"), -HOUR) is not None
        await heartbeat.close()
        assert await storage.take_over(worker.id) is not None
        kill(child)


async def test_a_killed_storage_looks_dead_to_its_own_process_and_a_live_one_does_not(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    other = await opened(path)
    await Worker(other, "other").register()
    assert await storage.take_over(worker.id) is None
    assert await others_can_lock(f"{path}.worker-here", f"{path}.worker-other") == [False, False]
    other.kill()
    takeover = await storage.take_over(worker.id)
    assert takeover is not None
    assert takeover.worker == "other"


async def test_a_closed_storage_leaves_its_workers_to_be_taken_over_at_once(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    other = await opened(path)
    await Worker(other, "other").register()
    await other.close()
    assert await storage.take_over(worker.id) is not None


async def test_a_worker_that_its_own_process_took_over_can_come_back(storage: SQLiteStorage, path: str) -> None:
    worker = Worker(storage, "slow")
    await worker.register(-HOUR)
    assert await storage.take_over(WorkerId("here")) is not None
    assert not exists(f"{path}.worker-slow")
    await worker.register()
    assert await others_can_lock(f"{path}.worker-slow") == [False]


async def test_a_retired_worker_leaves_no_file(storage: SQLiteStorage, worker: Worker, path: str) -> None:
    assert exists(f"{path}.worker-here")
    await storage.remove_worker(worker.id)
    assert not exists(f"{path}.worker-here")


async def test_a_worker_that_could_not_register_is_not_held_for_alive(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    with pytest.raises(StorageRejectedError, match="already"):
        await worker.register()
    with pytest.raises(StorageRejectedError):
        await Worker(storage, "n\udc80").register()
    assert await storage.take_over(WorkerId("other")) is None
    assert await others_can_lock(f"{path}.worker-here") == [False]


async def test_statements_in_the_queue_of_a_killed_storage_are_not_sent(path: str, storage: SQLiteStorage) -> None:
    other = await opened(path)
    lock = open_write_lock(f"{path}.lock")
    with lock:
        waiting = [asyncio.ensure_future(other.start([start(f"run-{i}")])) for i in range(3)]
        await asyncio.sleep(0)  # they are in the queue of the thread, which waits for the write lock
        other.kill()
    close_write_lock(lock)
    for future in waiting:
        with pytest.raises(StorageUnavailableError):
            await future
    assert await storage.get(RunId("run-0")) is None


# The write lock


async def test_processes_that_migrate_an_empty_file_at_once_all_succeed(path: str) -> None:
    with ExitStack() as stack:
        pipes = [stack.enter_context(process(migrate_an_empty_file, path))[1] for _ in range(3)]
        applied = [await hear(pipe) for pipe in pipes]
    assert sorted(applied) == [(), (), tuple(migration.name for migration in migrations("sqlite"))]


async def test_busy_processes_get_the_write_lock_equally_often(path: str) -> None:
    await (await opened(path)).close()
    with ExitStack() as stack:
        arguments = [(path, f"w{i}", 150) for i in range(3)]
        pipes = [stack.enter_context(process(write_until_one_has_enough, *a))[1] for a in arguments]
        for pipe in pipes:
            await hear(pipe)
        for pipe in pipes:
            pipe.send("go")
        counts = [await hear(pipe) for pipe in pipes]
    assert max(counts) == 150
    assert min(counts) > 30, counts


async def test_two_processes_on_the_same_two_files_do_not_look_like_a_deadlock(tmp_path: Path) -> None:
    paths = (str(tmp_path / "a.db"), str(tmp_path / "b.db"))
    for path in paths:
        await (await opened(path)).close()
    with ExitStack() as stack:
        pipes = [stack.enter_context(process(write_to_both, paths, name))[1] for name in ("x", "y")]
        for pipe in pipes:
            await hear(pipe)
        for pipe in pipes:
            pipe.send("go")
        assert [await hear(pipe) for pipe in pipes] == ["done", "done"]


async def test_storages_of_one_process_share_the_lock_so_closing_one_does_not_drop_it(
    storage: SQLiteStorage, path: str
) -> None:
    file = f"{path}.lock"
    lock = open_write_lock(file)
    with lock:
        other = open_write_lock(file)
        assert other is lock
        close_write_lock(other)
        assert await others_can_lock(file) == [False]
    assert await others_can_lock(file) == [True]
    close_write_lock(lock)


async def test_a_forked_child_holds_no_lock_and_has_to_open_its_own_storage(path: str) -> None:
    with process(use_it_in_a_forked_child, path) as (_, pipe):
        refused, has_turn, has_worker = await hear(pipe)
    assert "fork" in refused
    assert (has_turn, has_worker) == (False, False)


async def test_a_foreign_writer_is_waited_for_and_then_reported_as_a_conflict(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BUSY_TIMEOUT", 50)
    storage = await opened(path)
    foreign = sqlite3.connect(path, isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageConflictError):
        await storage.start([start("run-1")])
    foreign.execute("ROLLBACK")
    foreign.close()
    assert await storage.start([start("run-1")]) == {"run-1"}
    await storage.close()


# The WAL


def wal_size(path: str) -> int:
    return os.stat(f"{path}-wal").st_size


async def test_the_wal_is_checkpointed_and_written_from_its_start_again(worker: Worker, path: str) -> None:
    sizes = []
    for count in range(20):
        await worker.write(new_run(f"run-{count}", entry(1, MEGABYTE), transition=done()))
        sizes.append(wal_size(path))
    assert max(sizes) < connection.CHECKPOINT_AT + 3 * len(MEGABYTE)
    assert os.stat(path).st_size > 10 * len(MEGABYTE)


async def test_a_checkpoint_is_not_repeated_until_the_wal_has_filled_again(path: str) -> None:
    probe = Listener()
    storage = await opened(path, probe)
    worker = Worker(storage, "here")
    await worker.register()
    for count in range(5):
        await worker.write(new_run(f"run-{count}", entry(1, MEGABYTE), transition=done()))
    for _ in range(50):
        await worker.write()
    assert len([sql for when, sql in probe.heard if when == "before" and "wal_checkpoint" in sql]) == 1
    await storage.close()


async def test_only_the_holder_of_the_write_lock_checkpoints(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CHECKPOINT_AT", 1 << 40)
    monkeypatch.setattr(connection, "TRUNCATE_AT", 1 << 40)
    storage = await opened(path)
    worker = Worker(storage, "here")
    await worker.register()
    for count in range(12):
        await worker.write(new_run(f"run-{count}", entry(1, MEGABYTE), transition=done()))
        await storage.get(RunId("run-0"))
    assert wal_size(path) > 12 * len(MEGABYTE)
    await storage.close()
    assert not exists(f"{path}-wal")


async def test_a_wal_that_a_reader_held_up_is_cut_once_the_reader_is_gone(
    worker: Worker, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TRUNCATE_AT", 8 << 20)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM edda_run").fetchone()
    for count in range(12):
        await worker.write(new_run(f"run-{count}", entry(1, MEGABYTE), transition=done()))
    assert wal_size(path) > 12 * len(MEGABYTE)
    reader.execute("COMMIT")
    reader.close()
    await worker.write()
    assert wal_size(path) == 0


async def test_a_full_disk_takes_nothing_and_heals(storage: SQLiteStorage, worker: Worker, path: str) -> None:
    batch = [new_run(f"run-{i}", entry(1, MEGABYTE), transition=done()) for i in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal_size(path) + 4096, hard))
    try:
        with pytest.raises(StorageUnavailableError):
            await worker.write(*batch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert await storage.read_fence(worker.id) == Fence(worker.id, 0, 0)
    assert await storage.get(RunId("run-0")) is None
    assert await worker.write(*batch) == frozenset()


# In memory


async def test_a_database_in_memory_does_all_of_it_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage = await opened(":memory:")
    worker = Worker(storage, "here")
    await worker.register()
    await worker.write(
        new_run("run-1", entry(1), transition=Suspend(0, LATER, RunStatus.WAITING_FOR_TIMER)),
        new_run("run-2", entry(1), transition=done(b"two")),
    )
    assert await storage.cancel(RunId("run-1"), b"stop") is CancelOutcome.REQUESTED
    (claimed,) = (await worker.claim()).runs
    assert (claimed.run_id, len(claimed.entries), len(claimed.inbox)) == ("run-1", 1, 1)
    ended = await storage.get(RunId("run-2"))
    assert ended is not None
    assert ended.value == b"two"
    assert await worker.beat() is not None
    await storage.notify()
    await storage.wait_for_notification(PATIENCE)
    await storage.close()
    assert os.listdir(tmp_path) == []


async def test_a_refused_batch_leaves_a_database_in_memory_as_it_was() -> None:
    storage = await opened(":memory:")
    worker = Worker(storage, "here")
    await worker.register()
    with pytest.raises(StorageRejectedError):
        await worker.write(new_run("run-1", entry(1), entry(1)))
    assert await storage.get(RunId("run-1")) is None
    assert await worker.write(new_run("run-1", entry(1))) == frozenset()
    await storage.close()


# Opening


async def test_an_old_sqlite_is_refused_by_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with pytest.raises(StorageUnavailableError, match="too old"):
        await SQLiteStorage(path).open()


async def test_a_file_that_cannot_be_opened_is_reported_and_leaves_nothing_running(tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailableError):
        await SQLiteStorage(str(tmp_path / "missing" / "edda.db")).open()
    (tmp_path / "note.db").write_text("this is no database, but it is long enough to look like something" * 20)
    with pytest.raises(StorageUnavailableError):
        await SQLiteStorage(str(tmp_path / "note.db")).open()


def test_an_unknown_durability_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="FULL"):
        SQLiteStorage(path, synchronous="MAYBE")


async def test_the_same_file_by_another_name_is_the_same_database(storage: SQLiteStorage, path: str) -> None:
    os.symlink(path, f"{path}.link")
    other = await opened(f"{path}.link")
    await storage.start([start("run-1")])
    assert await other.get(RunId("run-1")) is not None
    assert not exists(f"{path}.link.lock")
    await other.close()


class Interrupted(sqlite3.Connection):
    """A connection that `kill` interrupts at the worst time: even its rollback fails."""

    def rollback(self) -> None:
        raise sqlite3.OperationalError("interrupted")


class Death:
    """Raised right after the first rows."""

    def before(self, statement: str) -> None:
        pass

    def after(self, statement: str) -> None:
        if "INSERT" in statement:
            raise RuntimeError("dead")


def test_a_transaction_that_could_not_be_rolled_back_ends_with_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while the error, and with it the frames of its traceback, is still referenced."""
    path, real = str(tmp_path / "edda.db"), sqlite3.connect
    dying = connection.Connection(path, "OFF", Death())
    dying.run_in_transaction(lambda db: db.run("CREATE TABLE note (n)"))
    dying.read(lambda db: db._close_raw())
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: real(*args, factory=Interrupted, **options))
    with pytest.raises(RuntimeError) as held:
        dying.run_in_transaction(lambda db: db.run_many("INSERT INTO note VALUES (?)", [(1,), (2,)]))
    with real(path, timeout=0) as other:
        other.execute("BEGIN IMMEDIATE")
    other.close()
    dying.close()
    assert held.value.args == ("dead",)
