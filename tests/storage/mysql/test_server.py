"""MariaDB and MySQL: the text protocol, packets, strict mode, locks by primary key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from edda.core.model import AckInbox, RunId, Suspend, Transition, WorkerId
from edda.core.states import RunStatus
from edda.errors import StorageConflictError, StorageRejectedError, StorageUnavailableError
from edda.storage.mysql import MySQLStorage
from edda.storage.mysql.connection import (
    ASSERT_ROW_COUNT,
    BEGIN,
    AssertionFailedError,
    MySQLConnectionFactory,
    MySQLSession,
)
from edda.storage.mysql.statement import Statement, bind, inserts, pack_messages, split_rows
from edda.storage.mysql.storage import _check_version
from edda.storage.shared.migrations import migrations
from tests.conftest import MakeDatabase
from tests.storage.probes import Trap
from tests.storage.records import LAPSED, LATER, done, entry, new_run, run_write, start
from tests.storage.worker import Worker

from .locks import CONNECTION, LOCK_RUN, connection_of, shorten_lock_waits, until

REST = Suspend(0, None, RunStatus.WAITING_FOR_EVENT)


@pytest.fixture
async def storage(url: str) -> AsyncIterator[MySQLStorage]:
    storage = MySQLStorage(url, pool_size=2)
    await storage.open()
    await storage.migrate()
    yield storage
    await storage.close()


# Sessions


async def test_every_session_is_strict_and_in_utc_and_reads_what_is_committed(stranger: MySQLSession) -> None:
    settings = b"SELECT @@sql_mode, @@time_zone, @@autocommit, @@innodb_lock_wait_timeout, @@character_set_client"
    assert (await stranger.run(settings)).rows[0] == (
        "STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION",
        "+00:00",
        1,
        5,
        "utf8mb4",
    )
    isolation = b"SHOW SESSION VARIABLES WHERE Variable_name IN ('tx_isolation', 'transaction_isolation')"
    assert {row[1] for row in (await stranger.run(isolation)).rows} == {"READ-COMMITTED"}


async def test_a_client_that_stops_inside_a_transaction_does_not_hold_its_locks_for_ever(
    stranger: MySQLSession,
) -> None:
    limits = b"SHOW SESSION VARIABLES WHERE Variable_name IN ('idle_transaction_timeout', 'wait_timeout')"
    assert {"5", "60"} & {row[1] for row in (await stranger.run(limits)).rows}


async def test_the_statements_behind_a_missed_expectation_do_not_run(storage: MySQLStorage, worker: Worker) -> None:
    with pytest.raises(AssertionFailedError):
        await storage._pool.send(
            bind(BEGIN),
            bind(b"DELETE FROM edda_worker"),
            bind(ASSERT_ROW_COUNT, 7),
            bind(b"DELETE FROM edda_fence; COMMIT"),
        )
    assert await storage.read_fence(worker.id) == worker.fence
    assert await worker.beat() is not None  # rolled back, and not left open to block others


async def test_a_refusal_costs_no_connection(storage: MySQLStorage, worker: Worker) -> None:
    before = await connection_of(storage._journal)
    await worker.write(new_run("run"))
    with pytest.raises(StorageRejectedError):
        await worker.write(new_run("run"))
    assert await connection_of(storage._journal) == before


async def test_a_lock_that_is_not_given_up_is_a_conflict(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(new_run("run"))
    before = await connection_of(storage._journal)
    await shorten_lock_waits(storage._journal)
    await stranger.send(bind(BEGIN), bind(LOCK_RUN, "run"))
    with pytest.raises(StorageConflictError):
        await worker.write(run_write("run", entry(1), transition=done()))
    await stranger.rollback()
    assert await connection_of(storage._journal) == before
    assert await storage.history(RunId("run")) == ()
    assert await worker.write(run_write("run", entry(1), transition=done())) == frozenset()


async def test_a_connection_that_the_server_closed_meanwhile_is_not_used(
    storage: MySQLStorage, stranger: MySQLSession
) -> None:
    async with storage._pool.session() as idle:
        connection = (await idle.run(CONNECTION)).rows[0][0]
    await stranger.run(b"KILL %b", connection)

    async def is_dead() -> bool:
        return not idle.is_usable

    await until(is_dead)
    assert await connection_of(storage._pool) != connection


async def test_a_connection_killed_in_mid_statement_is_an_unknown_outcome(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(new_run("run"))
    connection = await connection_of(storage._journal)
    await stranger.send(bind(BEGIN), bind(LOCK_RUN, "run"))
    writing = asyncio.create_task(worker.write(run_write("run", transition=done())))
    waiting = b"SELECT 1 FROM information_schema.innodb_trx WHERE trx_mysql_thread_id = %b AND trx_state = 'LOCK WAIT'"

    async def waits() -> bool:
        return bool((await stranger.run(waiting, connection)).rows)

    await until(waits, every=0.2)  # the server caches the list until queries pause for a tenth of a second
    await stranger.run(b"KILL %b", connection)
    with pytest.raises(StorageUnavailableError):
        await writing
    await stranger.rollback()
    assert await worker.write(run_write("run", transition=done())) == frozenset()


async def test_a_server_that_does_not_answer_in_time_is_unavailable(url: str) -> None:
    address = MySQLConnectionFactory(url, None)
    address.open()
    session = await address.connect(timeout=0.05)
    with pytest.raises(StorageUnavailableError):
        await session.run(b"SELECT SLEEP(20)")
    assert not session.is_usable


# Packets


async def test_a_batch_larger_than_a_packet_is_still_one_commit(storage: MySQLStorage, worker: Worker) -> None:
    packet = (await storage._pool.run(b"SELECT @@max_allowed_packet")).rows[0][0]
    value = bytes(range(256)) * (packet // 3 // 256)
    big = new_run("run", *(entry(seq, value) for seq in range(1, 6)))
    too_late = Worker(storage, "worker-1")
    await worker.write()
    assert await too_late.write(big) is None
    assert await storage.get(RunId("run")) is None
    assert await worker.write(big) == frozenset()
    assert [e.value for e in await storage.history(RunId("run"))] == [value] * 5


async def test_a_large_batch_that_is_refused_at_its_end_leaves_nothing(storage: MySQLStorage, worker: Worker) -> None:
    packet = (await storage._pool.run(b"SELECT @@max_allowed_packet")).rows[0][0]
    value = b"'" * (packet // 3)
    await worker.write(new_run("z"), run_write("y", entry(1)))
    with pytest.raises(StorageRejectedError):
        await worker.write(new_run("run", *(entry(seq, value) for seq in range(1, 4))), run_write("y", entry(1)))
    assert await storage.get(RunId("run")) is None
    assert await storage.read_fence(worker.id) == worker.fence


async def test_a_value_larger_than_a_packet_is_refused_and_nothing_is_sent(
    storage: MySQLStorage, worker: Worker
) -> None:
    packet = (await storage._pool.run(b"SELECT @@max_allowed_packet")).rows[0][0]
    before = await connection_of(storage._journal)
    with pytest.raises(StorageRejectedError, match="max_allowed_packet"):
        await worker.write(new_run("run", entry(1, b"x" * packet)))
    assert await connection_of(storage._journal) == before


async def test_an_id_that_is_too_long_is_refused_not_cut(storage: MySQLStorage, worker: Worker) -> None:
    long = "é" * 128
    with pytest.raises(StorageRejectedError):
        await worker.write(new_run(long))
    with pytest.raises(StorageRejectedError):
        await storage.start([start(long)])
    assert await storage.get(RunId(long)) is None
    assert await storage.start([start(long[1:])]) == {long[1:]}


async def test_ids_differ_by_a_blank_at_the_end(storage: MySQLStorage) -> None:
    assert await storage.start([start("run"), start("run ")]) == {"run", "run "}
    assert await storage.get(RunId("run  ")) is None


async def test_a_thousand_transitions_of_every_kind_fit_into_a_batch(storage: MySQLStorage, worker: Worker) -> None:
    runs = [f"run{i:04}" for i in range(1000)]
    await worker.write(*(new_run(run) for run in runs))
    await storage.cancel(RunId("run0001"), b"")
    transitions: list[Transition] = [AckInbox(0), REST, Suspend(0, 0, RunStatus.PARKED, "it's \\ why"), done()]
    again = await worker.write(*(run_write(run, entry(1), transition=transitions[i % 4]) for i, run in enumerate(runs)))
    assert again == frozenset({RunId("run0001")})
    assert len(await storage.owned_runs(worker.id)) == 250
    assert len((await worker.claim(limit=1000)).runs) == 251


def test_statements_are_packed_into_as_few_messages_as_fit() -> None:
    statements = [Statement("s", b"x" * 40) for _ in range(5)]
    assert [len(message.body) for message in pack_messages(statements, 100)] == [82, 82, 40]


def test_rows_are_packed_into_as_few_inserts_as_fit() -> None:
    assert [s.body for s in inserts(b"INSERT ", [b"(1)", b"(2)", b"(3)"], 16)] == [b"INSERT (1),(2)", b"INSERT (3)"]
    assert list(inserts(b"INSERT ", [], 16)) == []
    with pytest.raises(StorageRejectedError):
        list(split_rows([b"(1)", b"(12345678)"], 10))


# Locks


async def test_a_batch_waits_for_nobody_elses_run_however_small_the_table(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(*(new_run(run) for run in ("a", "b", "c", "theirs", "x", "y")))
    await shorten_lock_waits(storage._journal)
    await stranger.send(bind(BEGIN), bind(LOCK_RUN, "theirs"))
    batch = [
        run_write("a", transition=done()),
        run_write("b", transition=REST),
        run_write("x", transition=AckInbox(0)),
        run_write("y", transition=done()),
    ]
    assert await worker.write(*batch) == frozenset()
    await stranger.rollback()


async def test_a_takeover_waits_for_nobody_elses_run(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    lapsed = Worker(storage, "worker-0")
    await lapsed.register(LAPSED)
    await lapsed.write(new_run("a"), new_run("c"))
    await worker.write(new_run("b"))
    await shorten_lock_waits(storage._pool)
    await stranger.send(bind(BEGIN), bind(LOCK_RUN, "b"))
    takeover = await storage.take_over(worker.id)
    assert takeover is not None
    assert takeover.moved == 2
    await stranger.rollback()


async def test_unparking_waits_for_nobody_elses_run(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(new_run("a", transition=Suspend(0, LATER, RunStatus.PARKED)), new_run("b", transition=REST))
    await shorten_lock_waits(storage._pool)
    await stranger.send(bind(BEGIN), bind(LOCK_RUN, "b"))
    assert await storage.wake_parked(["checkout"]) == 1
    await stranger.rollback()


async def test_a_claim_steps_over_locked_runs(storage: MySQLStorage, worker: Worker, stranger: MySQLSession) -> None:
    await storage.start([start("a", ready_at=1), start("b", ready_at=2)])
    await stranger.send(bind(BEGIN), bind(LOCK_RUN, "a"))
    assert [run.run_id for run in (await worker.claim()).runs] == ["b"]
    await stranger.rollback()


async def test_more_runs_than_one_transaction_frees_are_found_as_orphans(
    storage: MySQLStorage, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edda.storage.mysql.workers.TAKEOVER_LIMIT", 2)
    lapsed = Worker(storage, "worker-0")
    await lapsed.register(LAPSED)
    await lapsed.write(*(new_run(f"run{i}") for i in range(5)))
    takeover = await storage.take_over(worker.id)
    assert takeover is not None
    assert takeover.moved == 2
    assert await storage.free_orphans() == 3
    assert await storage.free_orphans() == 0
    assert await storage.owned_runs(WorkerId("worker-0")) == {}


def test_a_storage_can_be_opened_again_on_another_loop(url: str) -> None:
    storage = MySQLStorage(url, pool_size=1)

    async def live() -> None:
        await storage.open()
        await asyncio.gather(
            storage.wait_for_notification(0.1), storage.now(), storage.now()
        )  # of one connection, so one waits
        await storage.close()

    for _ in range(2):
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(live())


# Migrations and addresses


MIGRATIONS = tuple(migration.name for migration in migrations("mysql"))


@pytest.mark.parametrize("point", [12, 30, 54])
async def test_a_migration_that_was_cut_off_is_finished_by_the_next(make_database: MakeDatabase, point: int) -> None:
    trap = Trap()
    storage = make_database("mysql", fresh=True).storage(trap)
    await storage.open()
    trap.arm(point, StorageUnavailableError("cut"))
    with pytest.raises(StorageUnavailableError):
        await storage.migrate()
    assert await storage.pending_migrations() == MIGRATIONS
    assert await storage.migrate() == MIGRATIONS
    await storage.close()


@pytest.mark.parametrize("version", ["10.6.1-MariaDB", "11.4.2-MariaDB-log", "8.0.11", "9.1.0-cloud"])
def test_supported_servers_are_let_in(version: str) -> None:
    _check_version(version)


@pytest.mark.parametrize("version", ["10.5.9-MariaDB", "5.7.44", "unheard of"])
def test_older_servers_are_named(version: str) -> None:
    with pytest.raises(Exception, match=version):
        _check_version(version)


def test_a_misspelt_option_in_the_url_is_an_error() -> None:
    with pytest.raises(ValueError, match="sll"):
        MySQLStorage("mysql://root@127.0.0.1/edda?sll=true")


async def test_a_password_with_odd_characters_is_taken_from_the_url_and_never_shown() -> None:
    storage = MySQLStorage("mysql://nobody:p%40ss%2Fword@127.0.0.1:1/edda?charset=utf8mb4")
    with pytest.raises(StorageUnavailableError) as caught:
        await storage.open()
    assert storage._factory._arguments["password"] == "p@ss/word"
    assert "ss/word" not in repr(caught.value) + repr(storage._factory)
