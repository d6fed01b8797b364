"""PostgreSQL: snapshots, lost connections, open transactions, LISTEN."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from edda.core.model import Fence, RunId, WorkerId
from edda.core.states import RunStatus
from edda.errors import (
    StorageConflictError,
    StorageError,
    StorageRejectedError,
    StorageUnavailableError,
)
from edda.storage.ports import Storage
from edda.storage.postgres import PostgresStorage
from edda.storage.postgres.connection import COMMIT, PostgresConnection, PostgresSession
from edda.storage.postgres.pool import NOTIFY, PostgresConnectionFactory, PostgresPool
from edda.storage.postgres.target import PostgresTarget
from edda.storage.postgres.workers import DELETE_WORKER
from tests.conftest import MakeDatabase, MakeStorage, OnPostgres
from tests.storage.conftest import MakeWorker
from tests.storage.other_session import WAITING, Death, Log, Outsider, become
from tests.storage.records import HOUR, LAPSED, WORKFLOW, done, entry, new_run, run_write, start
from tests.storage.worker import Worker

ALL_GONE = """
SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'edda' AND datname = current_database()"""
CUT = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
 WHERE application_name = 'edda' AND datname = current_database()"""


@pytest.fixture
def empty(make_database: MakeDatabase) -> OnPostgres:
    """A database for this test alone, without tables."""
    database = make_database("postgres", fresh=True)
    assert isinstance(database, OnPostgres)
    return database


@pytest.fixture
async def session(database: OnPostgres) -> AsyncIterator[PostgresSession]:
    session = await PostgresConnectionFactory(PostgresTarget(database.url), probe=None).connect(30)
    yield session
    await session.close()


async def test_a_batch_is_one_statement(make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker) -> None:
    log = Log()
    worker = await make_worker("worker-1", on=await make_storage(log))
    await worker.write(new_run("a"), new_run("b"), new_run("c"))
    del log.sent[:]
    await worker.write(
        run_write("a", entry(1)), run_write("b", entry(1), transition=done()), new_run("d", entry(1), transition=done())
    )
    assert len(log.sent) == 1


async def test_one_row_of_history_alone_is_written_without_arrays(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker
) -> None:
    log = Log()
    worker = await make_worker("worker-1", on=await make_storage(log))
    await worker.write(new_run("a"))
    await worker.write(run_write("a", entry(1, b"one")))
    assert "unnest" not in log.sent[-1]
    assert await storage.history(RunId("a")) == (entry(1, b"one"),)


async def test_the_servers_default_isolation_level_does_not_matter(empty: OnPostgres) -> None:
    name = empty.url.rpartition("/")[2]
    empty.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    session = await PostgresConnectionFactory(PostgresTarget(empty.url), probe=None).connect(30)
    alone = await session.fetch("SHOW transaction_isolation")
    async with session.transaction():
        inside = await session.fetch("SHOW transaction_isolation")
    await session.close()
    assert alone[0][0] == inside[0][0] == "read committed"


async def test_the_servers_time_zone_does_not_matter(empty: OnPostgres, outsider: Outsider) -> None:
    name = empty.url.rpartition("/")[2]
    empty.execute(f"ALTER DATABASE {name} SET timezone = 'Asia/Kathmandu'")
    storage = empty.storage()
    before = await outsider.fetchval("SELECT extract(epoch from clock_timestamp())")
    now = await storage.now()
    await storage.close()
    assert 0 <= now / 1_000_000 - float(before) < 60


async def test_a_takeover_waits_for_the_batch_in_flight_and_takes_what_that_wrote(
    storage: Storage, make_worker: MakeWorker, outsider: Outsider
) -> None:
    await make_worker("dead", lease=LAPSED)
    batch = outsider.transaction()
    await batch.start()
    await outsider.execute("UPDATE edda_fence SET batch_no = batch_no + 1 WHERE worker = 'dead'")
    takeover = asyncio.create_task(storage.take_over(WorkerId("alive")))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute("INSERT INTO edda_open_run VALUES ('a', 'w', 'running', 'dead', 1, 0, 0)")
    await batch.commit()
    taken = await takeover
    assert taken is not None
    assert taken.moved == 1
    assert await storage.owned_runs(WorkerId("dead")) == {}


async def test_a_takeover_waits_for_the_claim_in_flight(
    storage: Storage, make_worker: MakeWorker, outsider: Outsider
) -> None:
    await make_worker("dead", lease=LAPSED)
    claim = outsider.transaction()
    await claim.start()
    await outsider.execute("SELECT 1 FROM edda_fence WHERE worker = 'dead' FOR KEY SHARE")
    takeover = asyncio.create_task(storage.take_over(WorkerId("alive")))
    await become(lambda: outsider.fetchval(WAITING))
    await claim.rollback()
    assert await takeover is not None


async def test_a_batch_does_not_wait_for_a_claim(storage: Storage, worker: Worker, outsider: Outsider) -> None:
    async with outsider.transaction():
        await outsider.execute("SELECT 1 FROM edda_fence WHERE worker = 'worker-1' FOR KEY SHARE")
        assert await worker.write(new_run("a")) == frozenset()


async def test_runs_are_locked_in_the_order_of_their_ids(worker: Worker, outsider: Outsider) -> None:
    await worker.write(new_run("a"), new_run("b"))
    deliverer = outsider.transaction()
    await deliverer.start()
    await outsider.execute("SELECT 1 FROM edda_open_run WHERE run_id = 'a' FOR UPDATE")
    batch = asyncio.create_task(worker.write(run_write("b", transition=done()), run_write("a", transition=done())))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute("SELECT 1 FROM edda_open_run WHERE run_id = 'b' FOR UPDATE NOWAIT")
    await deliverer.rollback()
    assert await batch == frozenset()


async def test_a_claim_steps_over_runs_that_somebody_else_has_locked(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await storage.start([start("a", ready_at=1), start("b", ready_at=2)])
    async with outsider.transaction():
        await outsider.execute("SELECT 1 FROM edda_open_run WHERE run_id = 'a' FOR UPDATE")
        claim = await worker.claim(limit=1)
    assert [run.run_id for run in claim.runs] == ["b"]


async def test_the_workflow_that_has_waited_longest_is_served_first(storage: Storage, worker: Worker) -> None:
    await storage.start([start("late", workflow="x", ready_at=20), start("early", workflow="y", ready_at=10)])
    claim = await worker.claim("x", "y", limit=1)
    assert [run.run_id for run in claim.runs] == ["early"]


async def test_a_claim_that_history_has_overtaken_is_void(storage: Storage, worker: Worker, outsider: Outsider) -> None:
    """Stopped between the claim and its reads; meanwhile another worker claimed the run and read an inbox item."""
    await storage.start([start("a", ready_at=1), start("b", ready_at=1)])
    await outsider.execute(
        "INSERT INTO edda_history VALUES ('a', 0, 1, 1, 'cancel', '', '', true, 1, 1, 1, NULL, '', '')"
    )
    claim = await worker.claim()
    assert [run.run_id for run in claim.runs] == ["b"]


async def test_a_worker_with_very_many_runs_is_freed_in_steps(
    storage: Storage, make_worker: MakeWorker, outsider: Outsider
) -> None:
    await make_worker("dead", lease=LAPSED)
    await outsider.execute(
        """INSERT INTO edda_open_run (run_id, workflow, status, owner, epoch, generation, event_cursor)
           SELECT i, 'w', 'running', 'dead', 1, 0, 0 FROM generate_series(1, 5010) i"""
    )
    taken = await storage.take_over(WorkerId("alive"))
    assert taken is not None
    assert taken.moved == 5000
    assert await storage.free_orphans() == 10
    assert await storage.free_orphans() == 0


async def test_every_connection_that_is_cut_comes_back(storage: Storage, worker: Worker, outsider: Outsider) -> None:
    heartbeat = await storage.open_heartbeat()
    await heartbeat.beat(worker.id, HOUR)
    await outsider.execute(CUT)
    await worker.write(new_run("a"))
    assert await heartbeat.beat(worker.id, HOUR) is not None
    await heartbeat.close()
    assert await storage.get(RunId("a")) is not None


async def test_a_statement_that_is_cut_off_reports_no_answer(session: PostgresSession, outsider: Outsider) -> None:
    statement = asyncio.create_task(session.fetch("SELECT pg_sleep(60)"))
    await become(lambda: outsider.fetchval("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%'"))
    await outsider.execute(CUT)
    with pytest.raises(StorageUnavailableError):
        await statement
    assert not session.is_usable


async def test_a_connection_cancelled_in_the_middle_is_never_used_again(
    database: OnPostgres, outsider: Outsider
) -> None:
    pool = PostgresPool(PostgresConnectionFactory(PostgresTarget(database.url), probe=None), size=1)
    async with pool.session() as first:
        statement = asyncio.create_task(first.fetch("SELECT pg_sleep(60)"))
        await become(
            lambda: outsider.fetchval("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%'")
        )
        statement.cancel()
        with pytest.raises(asyncio.CancelledError):
            await statement
    async with pool.session() as second:
        assert second is not first
        assert (await second.fetch("SELECT 1"))[0][0] == 1
    await pool.close()


async def test_a_conflict_inside_a_transaction_leaves_the_connection_in_order(
    session: PostgresSession, storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    async with outsider.transaction():
        await outsider.execute("SELECT 1 FROM edda_fence FOR UPDATE")
        with pytest.raises(StorageConflictError):
            async with session.transaction():
                await session.execute("SELECT 1 FROM edda_fence FOR UPDATE NOWAIT")
    assert session.is_usable
    async with session.transaction():
        assert (await session.fetch("SELECT 1"))[0][0] == 1


async def test_a_deadlock_is_a_conflict_and_the_same_batch_can_be_sent_again(
    worker: Worker, outsider: Outsider
) -> None:
    await worker.write(new_run("a"), new_run("b"))
    async with outsider.transaction():
        await outsider.execute("SET LOCAL deadlock_timeout = '1min'")  # the storage is to be the victim
        await outsider.execute("SELECT 1 FROM edda_open_run WHERE run_id = 'a' FOR UPDATE")
        batch = asyncio.create_task(worker.write(run_write("a", transition=done()), run_write("b", transition=done())))
        await become(lambda: outsider.fetchval(WAITING))
        await outsider.execute("UPDATE edda_fence SET ownership_version = ownership_version WHERE worker = 'worker-1'")
        with pytest.raises(StorageConflictError):
            await batch
    assert await worker.write(run_write("a", transition=done()), run_write("b", transition=done())) == frozenset()


@pytest.mark.parametrize("text", ["nul \0", "half a pair \ud800"])
async def test_text_that_postgres_cannot_hold_is_rejected_and_nothing_is_written(worker: Worker, text: str) -> None:
    with pytest.raises(StorageRejectedError):
        await worker.write(new_run("good"), new_run("bad", workflow=text))
    assert await worker.storage.get(RunId("good")) is None
    assert await worker.write(new_run("good")) == frozenset()


async def test_a_death_inside_a_takeover_leaves_nothing_locked_and_nothing_done(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker
) -> None:
    await make_worker("dead", lease=LAPSED)
    log = Log()
    dying = await make_storage(log)
    log.fail_after[DELETE_WORKER] = Death()
    with pytest.raises(Death):
        await dying.take_over(WorkerId("dying"))
    await become(lambda: storage.take_over(WorkerId("alive")))  # as soon as the server sees that the client is gone


async def test_an_answer_lost_after_the_commit_has_taken_effect(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker
) -> None:
    await make_worker("dead", lease=LAPSED)
    log = Log()
    unlucky = await make_storage(log)
    log.fail_after[COMMIT] = StorageUnavailableError("cut")
    with pytest.raises(StorageUnavailableError):
        await unlucky.take_over(WorkerId("unlucky"))
    assert await storage.take_over(WorkerId("alive")) is None


async def test_a_killed_storage_stays_dead_until_it_is_opened_again(storage: Storage, worker: Worker) -> None:
    storage.kill()
    with pytest.raises(StorageUnavailableError, match="closed"):
        await worker.write(new_run("a"))
    await storage.open()
    assert await worker.write(new_run("a")) == frozenset()


async def test_kill_also_ends_the_heartbeat_of_another_thread(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    beaten, killed, trouble = threading.Event(), threading.Event(), []

    async def heart() -> None:
        heartbeat = await storage.open_heartbeat()
        await heartbeat.beat(worker.id, HOUR)
        beaten.set()
        await asyncio.to_thread(killed.wait, 10)
        try:
            await heartbeat.beat(worker.id, HOUR)
        except StorageUnavailableError as error:
            trouble.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(heart()))
    thread.start()
    await asyncio.to_thread(beaten.wait, 10)
    storage.kill()
    await become(lambda: outsider.fetchval(ALL_GONE))
    killed.set()
    await asyncio.to_thread(thread.join)
    assert len(trouble) == 1


async def test_two_processes_that_migrate_an_empty_database_at_once_both_succeed(empty: OnPostgres) -> None:
    storages = [empty.storage() for _ in range(4)]
    applied = await asyncio.gather(*(storage.migrate() for storage in storages))
    assert sorted(map(bool, applied)) == [False, False, False, True]
    assert await storages[0].pending_migrations() == ()
    for storage in storages:
        await storage.close()


async def test_a_database_without_the_tables_is_named_as_such(empty: OnPostgres) -> None:
    storage = empty.storage()
    with pytest.raises(StorageUnavailableError, match="not migrated"):
        await storage.get(RunId("a"))
    await storage.close()


async def test_a_server_that_is_too_old_is_refused(database: OnPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PostgresConnection, "get_server_version", lambda _: SimpleNamespace(major=11))
    storage = database.storage()
    with pytest.raises(StorageError, match=r"needs PostgreSQL 12 or newer; this server is 11"):
        await storage.open()
    await storage.close()


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    storage = PostgresStorage("postgresql://postgres@127.0.0.1:1/postgres")
    with pytest.raises(StorageUnavailableError, match="cannot connect"):
        await storage.open()
    await storage.close()


async def test_it_works_without_prepared_statements(database: OnPostgres, storage: Storage) -> None:
    """As behind a PgBouncer that pools by transaction."""
    pooled = PostgresStorage(database.url, statement_cache_size=0)
    worker = Worker(pooled, "worker-1")
    await worker.register()
    await worker.write(new_run("a"), new_run("b"))
    await worker.write(run_write("a", entry(1)))
    await worker.write(run_write("a", entry(2), transition=done()), run_write("b", entry(1)))
    record = await pooled.get(RunId("a"))
    await pooled.close()
    assert record is not None
    assert record.status is RunStatus.COMPLETED


async def test_announcements_made_at_once_share_one_notification(make_storage: MakeStorage, storage: Storage) -> None:
    log = Log()
    teller = await make_storage(log)
    await asyncio.gather(*(teller.notify() for _ in range(50)))
    assert 1 <= log.sent.count(NOTIFY) <= 2
    await asyncio.wait_for(storage.wait_for_notification(30), 10)


async def test_an_announcement_does_not_come_back_to_its_own_process(
    storage: Storage,
) -> None:
    await storage.notify()
    await storage.wait_for_notification(30)  # notified in the process
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(storage.wait_for_notification(30), 0.2)  # its own NOTIFY would have arrived long before


async def test_notifications_survive_a_cut_connection(
    make_storage: MakeStorage, storage: Storage, outsider: Outsider
) -> None:
    await outsider.execute(CUT)
    await asyncio.wait_for(storage.wait_for_notification(30), 10)  # a notification may have been missed
    listening = asyncio.create_task(storage.wait_for_notification(30))
    await become(lambda: outsider.fetchval("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"))
    await (await make_storage()).notify()
    await asyncio.wait_for(listening, 10)


async def test_an_announcement_without_a_database_is_only_a_hint_lost(storage: Storage) -> None:
    storage.kill()
    await storage.notify()


async def test_an_empty_batch_still_transitions_the_fence(storage: Storage, worker: Worker) -> None:
    assert await worker.write() == frozenset()
    assert await storage.read_fence(worker.id) == Fence(worker.id, 1, 0)


async def test_many_callers_share_few_connections(database: OnPostgres, storage: Storage, outsider: Outsider) -> None:
    busy = PostgresStorage(database.url, pool_size=2)
    await asyncio.gather(*(busy.get(RunId(str(i))) for i in range(50)))
    count = await outsider.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%later.generation%'"
        " AND pid <> pg_backend_pid()"
    )
    await busy.close()
    assert count == 2


async def test_claiming_hundreds_at_once(storage: Storage, worker: Worker) -> None:
    await storage.start([start(f"run{i:03}", ready_at=1) for i in range(250)])
    assert len((await worker.claim(WORKFLOW, limit=250)).runs) == 250
