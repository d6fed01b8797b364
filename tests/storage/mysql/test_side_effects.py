"""Exclusive messages, staged events, the outbox and shared transactions on MariaDB and MySQL: the number and size of
messages to the server, the locks, and the settings of the user's connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from edda.core.model import BatchResult, EntryKind, OutboxEvent, RunId, RunValue, SendLater, StagedEvent, StagedKind
from edda.errors import LeaseLostError
from edda.storage.mysql import MySQLStorage
from edda.storage.mysql.connection import BEGIN, COMMIT, MySQLSession
from edda.storage.mysql.locks import LOCK_EXCLUSIVE, LOCK_SHARED, lock_mixed
from edda.storage.mysql.statement import bind
from edda.storage.mysql.transactions import MySQLTransaction
from edda.storage.shared import step_commit
from edda.storage.shared.named_parameters import to_pyformat
from edda.storage.sqlalchemy_sessions import caller_transaction
from tests.storage.probes import Listener
from tests.storage.records import (
    HOUR,
    LATER,
    SUSPENDED,
    done,
    entry,
    incoming,
    new_run,
    outbox_event,
    run_write,
    staged_event,
    start,
    wait,
)
from tests.storage.shared_transactions import step_record, transaction
from tests.storage.worker import Worker

from .locks import LOCK_RUN, connection_of, shorten_lock_waits, until, waiting

R1 = RunId("run-1")
DROP = b"DELETE FROM edda_wait WHERE run_id = %b"
SETTINGS = "SELECT @@sql_mode, @@time_zone, @@innodb_lock_wait_timeout"
ANY_BYTES = bytes(range(256)) * 4
PLENTY = [*(f"a{n:03}" for n in range(20)), "z"]


@pytest.fixture
async def theirs(url: str, storage: MySQLStorage) -> AsyncIterator[AsyncSession]:
    """A session of SQLAlchemy's, as the user's own code opens it, with the isolation that is the server's default."""
    engine = create_async_engine(url.replace("mysql://", "mysql+asyncmy://"))
    async with AsyncSession(engine) as session:
        yield session
    await engine.dispose()


async def kinds(storage: MySQLStorage, worker: Worker) -> dict[RunId, EntryKind]:
    return {item.run_id: item.kind for item in await storage.read_inboxes(worker.id)}


# Messages to the server


async def test_what_a_run_says_travels_with_its_batch(worker: Worker, listener: Listener) -> None:
    await worker.write(new_run("run-1"))
    listener.heard.clear()
    said = run_write(
        "run-1",
        staged_events=[staged_event("a"), staged_event("b")],
        outbox_events=[outbox_event("c")],
        values=[RunValue("progress", b"1")],
        recorded_steps=["pay:1"],
    )
    assert await worker.send(said) == BatchResult()
    assert len(listener.heard) == 2


async def test_a_batch_in_which_nobody_says_anything_has_no_statement_more(worker: Worker, listener: Listener) -> None:
    await worker.write(new_run("run-1"))
    listener.heard.clear()
    await worker.write(run_write("run-1", entry(1), transition=done()))
    ((_, text), _) = listener.heard
    for table in ("edda_staged_event", "edda_outbox", "edda_run_value", "edda_step_commit"):
        assert table not in text


async def test_an_end_that_must_leave_nothing_unread_takes_one_message(worker: Worker, listener: Listener) -> None:
    await worker.write(new_run("run-1"))
    listener.heard.clear()
    assert await worker.send(run_write("run-1", transition=replace(done(), expected_inbox_count=0))) == BatchResult()
    assert len(listener.heard) == 2


async def test_a_run_that_is_created_asking_for_a_message_takes_two_messages(
    worker: Worker, listener: Listener
) -> None:
    listener.heard.clear()
    born_asking = new_run("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "jobs", exclusive=True)])
    assert await worker.send(born_asking) == BatchResult()
    assert len(listener.heard) == 4


# Exclusive keys


def test_buckets_of_both_kinds_are_locked_in_one_order() -> None:
    statements = list(lock_mixed({1, 2, 5, 6, 9}, {5, 9}))
    assert statements == [
        bind(LOCK_SHARED, [1, 2]),
        bind(LOCK_EXCLUSIVE, [5]),
        bind(LOCK_SHARED, [6]),
        bind(LOCK_EXCLUSIVE, [9]),
    ]
    assert list(lock_mixed({2, 1}, set())) == [bind(LOCK_SHARED, [1, 2])]


async def test_a_message_passes_by_who_stopped_waiting_while_it_came_in(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(*(new_run(run, waits=[wait(run, "w", "jobs", exclusive=True)]) for run in ("a", "b")))
    await stranger.send(bind(BEGIN), bind(LOCK_RUN, "a"), bind(DROP, "a"))
    accepting = await waiting(stranger, storage._pool, storage.accept([incoming("1", exclusive=["jobs"])], {}))
    await stranger.run(COMMIT)
    accepted = await accepting
    assert accepted is not None
    assert accepted.woke
    assert await kinds(storage, worker) == {RunId("b"): EntryKind.MESSAGE}
    assert await storage.take_message(wait("c", "w", "jobs").key, HOUR) is None


async def test_a_message_is_kept_if_the_only_one_stopped_waiting_while_it_came_in(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(new_run("a", waits=[wait("a", "w", "jobs", exclusive=True)]))
    await stranger.send(bind(BEGIN), bind(LOCK_RUN, "a"), bind(DROP, "a"))
    accepting = await waiting(stranger, storage._pool, storage.accept([incoming("1", exclusive=["jobs"])], {}))
    await stranger.run(COMMIT)
    accepted = await accepting
    assert accepted is not None
    assert not accepted.woke
    offer = await storage.take_message(wait("c", "w", "jobs").key, HOUR)
    assert offer is not None
    assert (offer.kind, offer.body) == (StagedKind.REDELIVERY, b"1")


async def test_a_message_finds_the_only_one_of_many_who_does_not_get_it_anyway(
    storage: MySQLStorage, worker: Worker
) -> None:
    await worker.write(
        *(
            new_run(run, waits=[wait(run, "all", "news"), wait(run, "one", "jobs", exclusive=True)][run == "z" :])
            for run in PLENTY
        )
    )
    assert await storage.accept([incoming("1", "news", exclusive=["jobs"])], {}) is not None
    expected = dict.fromkeys(map(RunId, PLENTY), EntryKind.EVENT)
    assert await kinds(storage, worker) == {**expected, RunId("z"): EntryKind.MESSAGE}


# Locks


async def test_nobody_waits_for_an_event_that_is_about_to_be_committed(storage: MySQLStorage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.enqueue([outbox_event("a"), outbox_event("b"), outbox_event("of another key", "other")])
    await shorten_lock_waits(storage._pool)
    await shorten_lock_waits(storage._journal)
    shared = await storage.begin()
    await step_commit.insert_outbox(shared, [outbox_event("theirs")])
    first, *_ = await storage.claim_outbox(10, HOUR)
    await storage.record_send_results([SendLater(first.seq, first.attempts, LATER, "busy")])
    await storage.enqueue([outbox_event("c")])
    await worker.write(run_write("run-1", entry(1), outbox_events=[outbox_event("d")]))
    assert await storage.retry_outbox(None) == 0
    assert await storage.prune_outbox(LATER, 10) == 0
    await shared.commit()
    assert [record.event.id for record in await storage.find_outbox()] == [
        *("a", "b", "of another key", "theirs", "c", "d")
    ]


async def test_nobody_waits_for_a_staged_event_that_is_about_to_be_committed(
    storage: MySQLStorage, worker: Worker
) -> None:
    await worker.write(replace(new_run("run-1"), staged_events=(staged_event("a"), staged_event("b"))))
    ours = [one.seq for one in await storage.staged_events(10)]
    await shorten_lock_waits(storage._pool)
    shared = await storage.begin()
    await step_commit.stage_events(shared, [staged_event("theirs")])
    assert await storage.accept([incoming("1")], {}, ours) is not None
    await shared.commit()
    assert [one.body for one in await storage.staged_events(10)] == [staged_event("theirs").body]


async def test_a_claim_of_events_for_others_waits_for_the_one_before_it(
    storage: MySQLStorage, stranger: MySQLSession
) -> None:
    await storage.enqueue([outbox_event("a")])
    await stranger.send(bind(BEGIN), bind(LOCK_EXCLUSIVE, [768]))
    claiming = await waiting(stranger, storage._pool, storage.claim_outbox(10, HOUR))
    await stranger.run(b"DELETE FROM edda_outbox")
    await stranger.run(COMMIT)
    assert await claiming == ()


# Packets


async def test_more_rows_than_one_statement_takes_are_all_settled(storage: MySQLStorage) -> None:
    events = [outbox_event(f"e{n:04}", f"k{n % 700}") for n in range(2_500)]
    await storage.enqueue(events)
    claimed = await storage.claim_outbox(3_000, HOUR)
    assert [record.event for record in claimed] == events
    await storage.record_send_results([SendLater(x.seq, 1, LATER, "busy") for x in claimed[:700]])
    assert {record.due for record in await storage.find_outbox(limit=3_000)} == {LATER}


async def test_an_event_larger_than_a_packet_is_refused_and_the_rest_of_its_kind_is_one_commit(
    storage: MySQLStorage,
) -> None:
    packet = (await storage._pool.run(b"SELECT @@max_allowed_packet")).rows[0][0]
    large = [replace(outbox_event(f"e{n}"), body=b"'" * (packet // 5)) for n in range(5)]  # quotes are sent doubled
    with pytest.raises(Exception, match="max_allowed_packet"):
        await storage.enqueue([*large, replace(outbox_event("huge"), body=b"x" * packet)])
    assert await storage.find_outbox() == ()
    await storage.enqueue(large)
    assert [record.event.id for record in await storage.find_outbox()] == [event.id for event in large]


async def test_text_that_is_too_long_is_refused_not_cut(storage: MySQLStorage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    long = "é" * 513
    for said in (
        run_write("run-1", outbox_events=[outbox_event("a", long)]),
        run_write("run-1", values=[RunValue(long, b"")]),
    ):
        with pytest.raises(Exception, match="too long"):
            await worker.send(said)
    async with transaction(storage) as shared:
        with pytest.raises(Exception, match="too long"):
            await step_commit.insert_outbox(shared, [outbox_event("a", long)])
    assert await storage.find_outbox() == ()


# The user's connection


@pytest.mark.parametrize(
    ("sql", "translated"),
    [
        ("SELECT :a, :b_2", "SELECT %(a)s, %(b_2)s"),
        ("SELECT ':a', \":a\", `:a`, :a", "SELECT ':a', \":a\", `:a`, %(a)s"),
        (r"SELECT 'it''s \' :a', :a", r"SELECT 'it''s \' :a', %(a)s"),
        ("SELECT :a -- :a\n, :a # :a\n, :a /* :a\n */", "SELECT %(a)s -- :a\n, %(a)s # :a\n, %(a)s /* :a\n */"),
        ("SELECT 5--:a", "SELECT 5--%(a)s"),
        ("SELECT x::text, @n := :a", "SELECT x::text, @n := %(a)s"),
        ("SELECT 7 % 5, '%s' LIKE :a", "SELECT 7 %% 5, '%%s' LIKE %(a)s"),
        ("SELECT 12:30", "SELECT 12:30"),
    ],
)
def test_names_are_translated_where_they_stand_for_values(sql: str, translated: str) -> None:
    assert to_pyformat(sql) == translated


async def test_the_users_code_finds_the_servers_own_settings_but_strict(storage: MySQLStorage) -> None:
    globals = SETTINGS.replace("@@", "@@global.")
    async with transaction(storage) as shared:
        ((mode, *rest),) = await shared.fetch(SETTINGS, {})
        ((server_mode, *server_rest),) = await shared.fetch(globals, {})
    assert rest == server_rest
    assert set(mode.split(",")) == {*filter(None, server_mode.split(",")), "STRICT_ALL_TABLES"}


async def test_a_connection_is_used_again_after_a_clean_end_and_only_then(storage: MySQLStorage) -> None:
    async def connection(shared: MySQLTransaction) -> int:
        return int((await shared.fetch("SELECT CONNECTION_ID()", {}))[0][0])

    first = await storage.begin()
    known = await connection(first)
    await first.commit()
    second = await storage.begin()
    assert await connection(second) == known
    with pytest.raises(Exception, match="no_such_table"):
        await second.execute("SELECT * FROM no_such_table", {})
    assert await connection(second) == known
    await second.rollback()
    third = await storage.begin()
    assert await connection(third) == known
    await third.execute("SET autocommit = 0", {})
    await third.commit()
    fourth = await storage.begin()
    assert await connection(fourth) != known
    await fourth.rollback()


async def test_a_connection_that_its_user_left_in_a_statement_is_not_used_again(storage: MySQLStorage) -> None:
    shared = await storage.begin()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(shared.connection.cursor().execute("SELECT SLEEP(60)"), 0.2)
    await shared.rollback()
    async with transaction(storage) as again:
        assert again.connection is not shared.connection
        assert (await again.fetch("SELECT 1", {}))[0][0] == 1


async def test_a_statement_of_the_users_may_take_longer_than_the_timeout_of_edda(storage: MySQLStorage) -> None:
    shared = await storage.begin()
    shared._session._timeout = 0.05
    assert (await shared.fetch("SELECT SLEEP(0.5)", {}))[0][0] == 0
    shared._session._timeout = 30
    await shared.rollback()


async def test_a_connection_that_is_killed_before_the_commit_commits_nothing(
    storage: MySQLStorage, stranger: MySQLSession, worker: Worker
) -> None:
    shared = await storage.begin()
    await step_commit.stage_events(shared, [staged_event("a")])
    await stranger.run(b"KILL %b", (await shared.fetch("SELECT CONNECTION_ID()", {}))[0][0])

    async def is_dead() -> bool:
        return not shared._session.is_usable

    await until(is_dead)
    with pytest.raises(Exception, match=r"(?i)gone|closed|connect"):
        await shared.commit()
    await shared.rollback()
    assert await storage.staged_events(1) == ()
    async with transaction(storage) as again:
        assert (await again.fetch("SELECT 1", {}))[0][0] == 1


async def test_users_connections_are_not_those_of_the_journal_or_the_pool(storage: MySQLStorage) -> None:
    shared = await storage.begin()
    ours = [await connection_of(pool) for pool in (storage._journal, storage._pool)]
    assert (await shared.fetch("SELECT CONNECTION_ID()", {}))[0][0] not in ours
    await shared.rollback()


# The caller's own session


async def test_a_session_of_sqlalchemy_takes_all_that_edda_writes(
    storage: MySQLStorage, worker: Worker, theirs: AsyncSession
) -> None:
    await worker.write(new_run("run-1"))
    event = OutboxEvent("größer-🧾", "it's", "a:b", "100 %", ANY_BYTES, 2**53 + 1, R1)
    said = step_record(
        "run-1",
        "größer-🧾:1",
        value=ANY_BYTES,
        staged_events=[StagedEvent(StagedKind.EVENT, ANY_BYTES)],
        outbox_events=[event],
    )
    shared = caller_transaction(theirs)
    assert await step_commit.start(shared, start("run-2", ready_at=1)) is True
    assert await step_commit.start(shared, start("run-2", ready_at=1)) is False
    await step_commit.write_step_commit(shared, said)
    await theirs.commit()
    assert await storage.find_step_commit(R1, 0, "größer-🧾:1") == said.commit
    assert [one.body for one in await storage.staged_events(10)] == [ANY_BYTES]
    assert [record.event for record in await storage.find_outbox()] == [event]
    assert [run.run_id for run in (await worker.claim()).runs] == ["run-2"]


async def test_a_session_of_sqlalchemy_sees_that_the_run_is_somebody_elses(
    storage: MySQLStorage, worker: Worker, theirs: AsyncSession
) -> None:
    await worker.write(new_run("run-1"))
    await theirs.execute(text("SELECT * FROM edda_open_run"))  # what it read then is not what counts
    await storage.release_run(R1)
    with pytest.raises((LeaseLostError, DBAPIError), match=r"no longer this worker's|changed since"):
        await step_commit.write_step_commit(caller_transaction(theirs), step_record("run-1"))
    await theirs.rollback()
    assert await storage.find_step_commit(R1, 0, "pay:1") is None


async def test_the_offer_of_a_message_is_confirmed_by_the_step_that_used_it(
    storage: MySQLStorage, worker: Worker, theirs: AsyncSession
) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("1", exclusive=["jobs"])], {})
    offer = await storage.take_message(wait("c", "w", "jobs").key, -HOUR)
    assert offer is not None
    assert await storage.staged_events(10) == (offer,)  # its time is over
    await step_commit.write_step_commit(caller_transaction(theirs), step_record("run-1", taken=[offer.seq]))
    await theirs.commit()
    assert await storage.staged_events(10) == ()
