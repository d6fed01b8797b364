"""Messages, the outbox and shared transactions on PostgreSQL: snapshots older than locks, users' connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import asyncpg
import pytest
from asyncpg.transaction import Transaction

from edda.core.model import BatchResult, EntryKind, RunId, Suspend
from edda.core.states import RunStatus
from edda.errors import StorageConflictError, StorageUnavailableError
from edda.storage.ports import Storage
from edda.storage.postgres import PostgresStorage
from edda.storage.postgres.accept_sql import MAX_PER_KEY
from edda.storage.shared import step_commit
from edda.storage.shared.named_parameters import bind_positional
from tests.conftest import MakeDatabase, MakeStorage, OnPostgres
from tests.storage.conftest import MakeWorker
from tests.storage.other_session import WAITING, Log, Outsider, become
from tests.storage.records import (
    HOUR,
    SUSPENDED,
    entry,
    incoming,
    key,
    new_run,
    outbox_event,
    run_write,
    staged_event,
    wait,
)
from tests.storage.shared_transactions import step_record, transaction
from tests.storage.worker import Worker

from .test_events import KEYS, OPEN, hold, share
from .test_server import ALL_GONE, CUT

A = RunId("a")
OUTBOX = "SELECT pg_advisory_xact_lock(4714, 0)"
BACKEND = "SELECT pg_backend_pid() AS pid"


async def inbox(outsider: Outsider) -> list[tuple[object, ...]]:
    rows = await outsider.fetch("""
SELECT d.run_id, d.step, d.kind, e.id FROM edda_inbox d JOIN edda_event e ON e.seq = d.event ORDER BY e.seq""")
    return [tuple(row) for row in rows]


# Round trips


async def test_a_batch_that_says_everything_is_one_statement(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker
) -> None:
    log = Log()
    worker = await make_worker("worker-1", on=await make_storage(log))
    await worker.send(new_run("a"), new_run("b"))
    del log.sent[:]
    await worker.send(
        run_write(
            "a",
            entry(1),
            staged_events=[staged_event("d")],
            outbox_events=[outbox_event("o")],
            recorded_steps=["pay:1"],
        )
    )
    assert len(log.sent) == 1


async def test_a_batch_of_one_entry_says_nothing_of_what_there_is_besides(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker
) -> None:
    log = Log()
    worker = await make_worker("worker-1", on=await make_storage(log))
    await worker.send(new_run("a"), new_run("b", waits=[wait("b", "w", "order")]))
    await worker.send(
        run_write("a", entry(1)), run_write("b", entry(1), transition=SUSPENDED, waits=[wait("b", "w", "order")])
    )
    for statement in log.sent:
        for table in ("edda_step_commit", "edda_staged_event", "edda_outbox", "edda_run_value", "ranked"):
            assert table not in statement


async def test_a_batch_that_takes_a_message_is_one_statement_between_its_locks_and_the_commit(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker
) -> None:
    log = Log()
    worker = await make_worker("worker-1", on=await make_storage(log))
    await worker.send(new_run("a"), new_run("b"))
    await storage.accept([incoming("m", exclusive=["jobs"])], {})
    del log.sent[:]
    await worker.send(
        *(run_write(run, transition=SUSPENDED, waits=[wait(run, "w", "jobs", exclusive=True)]) for run in "ab")
    )
    assert len(log.sent) == 3


async def test_a_run_that_is_created_with_a_message_costs_one_statement_more(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker
) -> None:
    log = Log()
    worker = await make_worker("worker-1", on=await make_storage(log))
    await storage.accept([incoming("m", exclusive=["jobs"])], {})
    del log.sent[:]
    written = await worker.send(new_run("a", transition=SUSPENDED, waits=[wait("a", "w", "jobs", exclusive=True)]))
    assert len(log.sent) == 4
    assert written == BatchResult(refused={A: frozenset({"w"})})
    assert await storage.owned_runs(worker.id) == {A: 1}


async def test_a_post_of_messages_is_one_statement_between_its_locks_and_the_commit(
    make_storage: MakeStorage, storage: Storage, worker: Worker
) -> None:
    await worker.send(new_run("a", transition=SUSPENDED, waits=[wait("a", "w", "jobs", exclusive=True)]))
    log = Log()
    acceptor = await make_storage(log)
    for id in ("met", "kept"):
        del log.sent[:]
        await acceptor.accept([incoming(id, exclusive=["jobs"])], {})
        assert len(log.sent) == 3


# Messages


async def test_who_takes_messages_has_their_key_alone(worker: Worker, outsider: Outsider) -> None:
    await worker.send(new_run("a"), new_run("b"))
    other = outsider.transaction()
    await other.start()
    await share(outsider, KEYS, key("jobs"))
    taking = asyncio.create_task(
        worker.send(run_write("a", transition=SUSPENDED, waits=[wait("a", "w", "jobs", exclusive=True)]))
    )
    await become(lambda: outsider.fetchval(WAITING))
    await other.rollback()
    assert await taking == BatchResult()


async def test_who_takes_messages_shares_the_keys_of_events(worker: Worker, outsider: Outsider) -> None:
    await worker.send(new_run("a"))
    both = [wait("a", "v", "order"), wait("a", "w", "jobs", exclusive=True)]
    async with outsider.transaction():
        await share(outsider, KEYS, key("order"))
        await share(outsider, KEYS, key("order", "a"))
        assert await worker.send(run_write("a", transition=SUSPENDED, waits=both)) == BatchResult()


async def test_a_wait_for_messages_looks_only_when_another_has_taken_his(worker: Worker, outsider: Outsider) -> None:
    await worker.send(new_run("a"))
    await worker.storage.accept([incoming("m", exclusive=["jobs"])], {})
    other = outsider.transaction()
    await other.start()
    await hold(outsider, KEYS, key("jobs"))
    taking = asyncio.create_task(
        worker.send(run_write("a", transition=SUSPENDED, waits=[wait("a", "w", "jobs", exclusive=True)]))
    )
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute("DELETE FROM edda_event_key")
    await other.commit()
    assert await taking == BatchResult()
    assert await inbox(outsider) == []


async def test_a_message_whose_wait_is_dropped_meanwhile_goes_to_another_run(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(*(new_run(run, waits=[wait(run, "w", "jobs", exclusive=True)]) for run in "ab"))
    await outsider.execute("CREATE TEMP TABLE first AS SELECT run_id FROM edda_wait ORDER BY ctid LIMIT 1")
    batch = outsider.transaction()
    await batch.start()
    await outsider.execute("SELECT 1 FROM edda_open_run JOIN first USING (run_id) FOR UPDATE")
    accepting = asyncio.create_task(storage.accept([incoming("m", exclusive=["jobs"])], {}))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute("DELETE FROM edda_wait USING first WHERE edda_wait.run_id = first.run_id")
    await batch.commit()
    accepted = await accepting
    assert accepted is not None
    assert accepted.woke
    assert [item.kind for item in await storage.read_inboxes(worker.id)] == [EntryKind.MESSAGE]
    assert await outsider.fetchval("SELECT count(*) FROM edda_wait") == 0
    assert await outsider.fetchval("SELECT count(*) FROM edda_event_key") == 0


async def test_a_message_whose_only_wait_is_dropped_meanwhile_is_kept(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a", waits=[wait("a", "w", "jobs", exclusive=True)]))
    batch = outsider.transaction()
    await batch.start()
    await outsider.execute("SELECT 1 FROM edda_open_run WHERE run_id = 'a' FOR UPDATE")
    accepting = asyncio.create_task(storage.accept([incoming("m", exclusive=["jobs"])], {}))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute("DELETE FROM edda_wait")
    await batch.commit()
    accepted = await accepting
    assert accepted is not None
    assert not accepted.woke
    assert await outsider.fetchval("SELECT count(*) FROM edda_event_key") == 1


async def test_waits_left_behind_without_a_run_get_no_message(storage: Storage, outsider: Outsider) -> None:
    for step in "vw":
        await outsider.execute("INSERT INTO edda_wait VALUES ('gone', $1, $2, '', 't', '')", step, key("jobs"))
    post = [incoming(id, exclusive=["jobs"]) for id in ("m1", "m2")]
    accepted = await asyncio.wait_for(storage.accept(post, {}), 10)
    assert accepted is not None
    assert accepted.new == {0, 1}
    assert await outsider.fetchval("SELECT count(*) FROM edda_event_key") == 2


@pytest.mark.parametrize("waiting", [0, 1, MAX_PER_KEY, 3 * MAX_PER_KEY])
async def test_as_many_messages_as_there_are_waits_go_out_in_one_post(
    storage: Storage, worker: Worker, outsider: Outsider, waiting: int
) -> None:
    runs = [f"run{i}" for i in range(waiting)]
    await worker.send(*(new_run(run, waits=[wait(run, "w", "jobs", exclusive=True)]) for run in runs))
    post = [incoming(f"m{i}", exclusive=["jobs"]) for i in range(2 * MAX_PER_KEY)]
    await storage.accept(post, {})
    items = await inbox(outsider)
    met = min(waiting, len(post))
    assert len({run for run, *_ in items}) == len({id for *_, id in items}) == len(items) == met
    assert await outsider.fetchval("SELECT count(*) FROM edda_event_key") == len(post) - met
    assert await outsider.fetchval("SELECT count(*) FROM edda_wait") == waiting - met


@pytest.mark.parametrize("messages", [0, 1, 60, 150])
async def test_as_many_waits_as_there_are_messages_take_one_in_one_batch(
    storage: Storage, worker: Worker, outsider: Outsider, messages: int
) -> None:
    await storage.accept([incoming(f"m{i}", exclusive=["jobs"]) for i in range(messages)], {})
    runs = [f"run{i:03}" for i in range(100)]
    await worker.send(*map(new_run, runs))
    written = await worker.send(
        *(run_write(r, transition=SUSPENDED, waits=[wait(r, "w", "jobs", exclusive=True)]) for r in runs)
    )
    assert written is not None
    met = min(messages, len(runs))
    items = await inbox(outsider)
    assert [id for *_, id in items] == [f"m{i}" for i in range(met)]
    assert set(written.refused) == {run for run, *_ in items}
    assert await outsider.fetchval("SELECT count(*) FROM edda_event_key") == messages - met
    assert await outsider.fetchval("SELECT count(*) FROM edda_wait") == len(runs) - met


async def test_waits_that_see_different_messages_lose_none(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    """One has had the first with all others, another has one to itself alone; who finds nothing may have to ask again,
    but nobody is registered while there is something for him."""
    await worker.send(*map(new_run, "abc"))
    await worker.send(run_write("a", transition=SUSPENDED, waits=[wait("a", "v", "order")]))
    await storage.accept(
        [incoming("m1", "order", exclusive=["jobs"]), incoming("m2", target="b", exclusive=["jobs"])], {}
    )
    (claimed,) = (await worker.claim()).runs
    asking = {"a": (claimed.epoch, 1), "b": (1, 0), "c": (1, 0)}
    while asking:
        written = await worker.send(
            *(
                run_write(
                    run,
                    epoch=epoch,
                    transition=Suspend(inbox_read, None, RunStatus.WAITING_FOR_MESSAGE),
                    waits=[wait(run, "w", "jobs", exclusive=True)],
                )
                for run, (epoch, inbox_read) in asking.items()
            )
        )
        assert written is not None
        had = {run for run, step, *_ in await inbox(outsider) if step == "w"}
        asking = {run: stand for run, stand in asking.items() if run in written.refused and run not in had}
    assert await inbox(outsider) == [
        ("a", "v", "event", "m1"),
        ("c", "w", "message", "m1"),
        ("b", "w", "message", "m2"),
    ]
    assert [run for (run,) in await outsider.fetch("SELECT run_id FROM edda_wait")] == ["a"]


# The outbox


async def test_a_claim_of_the_outbox_looks_only_when_what_goes_before_it_is_settled(
    storage: Storage, outsider: Outsider
) -> None:
    await storage.enqueue([outbox_event("e1"), outbox_event("e2"), outbox_event("e3", "others")])
    settling = outsider.transaction()
    await settling.start()
    await outsider.execute(OUTBOX)
    claiming = asyncio.create_task(storage.claim_outbox(10, HOUR))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute("UPDATE edda_outbox SET due = $1 WHERE id = 'e1'", 4 * 10**15)
    await settling.commit()
    assert [record.event.id for record in await claiming] == ["e3"]


async def test_a_claim_that_finds_nothing_writes_nothing(storage: Storage, outsider: Outsider) -> None:
    await storage.enqueue([outbox_event("e1"), outbox_event("e2")])
    await storage.claim_outbox(1, HOUR)
    before = await outsider.fetch("SELECT xmin, ctid FROM edda_outbox")
    assert await storage.claim_outbox(10, HOUR) == ()
    assert await outsider.fetch("SELECT xmin, ctid FROM edda_outbox") == before


# Transactions that users share


async def test_users_statements_are_planned_as_everywhere(storage: Storage, outsider: Outsider) -> None:
    for setting in ("enable_seqscan", "plan_cache_mode", "jit", "lock_timeout"):
        async with transaction(storage) as shared:
            ((here,),) = await shared.fetch("SELECT current_setting(:name)", {"name": setting})
        assert here == await outsider.fetchval("SELECT current_setting($1)", setting)


async def test_nothing_of_a_transaction_is_left_on_its_connection(storage: Storage, outsider: Outsider) -> None:
    seen = set()
    for _ in range(5):
        async with transaction(storage) as shared:
            ((pid,),) = await shared.fetch(BACKEND, {})
            ((path,),) = await shared.fetch("SELECT current_setting('search_path')", {})
            await shared.execute("SET search_path = nowhere", {})
            await shared.fetch("SELECT pg_advisory_lock(1, 2)", {})
            seen.add((pid, path))
    assert len({path for _, path in seen}) == 1
    assert len({pid for pid, _ in seen}) == 1
    async with transaction(storage) as shared:
        assert await outsider.fetchval("SELECT pg_try_advisory_lock(1, 2)")


async def test_a_transaction_of_the_driver_inside_is_a_savepoint(storage: Storage) -> None:
    shared = await storage.begin()
    await shared.execute("CREATE TEMP TABLE note (id int) ON COMMIT DROP", {})
    with suppress(ZeroDivisionError):
        async with shared.connection.transaction():
            await shared.connection.execute("INSERT INTO note VALUES (1)")
            raise ZeroDivisionError
    async with shared.connection.transaction():
        await shared.connection.execute("INSERT INTO note VALUES (2)")
    rows = await shared.fetch("SELECT id FROM note", {})
    await shared.commit()
    assert [tuple(row) for row in rows] == [(2,)]


async def test_a_commit_after_a_statement_that_failed_is_no_success(storage: Storage, worker: Worker) -> None:
    """The server rolls back and says so, but it is no error to it."""
    await worker.send(new_run("a"))
    shared = await storage.begin()
    await step_commit.write_step_commit(shared, step_record("a"))
    with pytest.raises(asyncpg.DivisionByZeroError):
        await shared.fetch("SELECT 1 / 0", {})
    with pytest.raises(asyncpg.InFailedSQLTransactionError):
        await shared.commit()
    assert await storage.find_step_commit(A, 0, "pay:1") is None


async def test_a_commit_that_the_server_refuses_is_its_own_error(storage: Storage, outsider: Outsider) -> None:
    """It is rolled back for certain: nobody has to wonder."""
    shared = await storage.begin()
    await shared.execute("CREATE TABLE edda_test_late (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)", {})
    await shared.execute("INSERT INTO edda_test_late VALUES (1), (1)", {})
    with pytest.raises(asyncpg.UniqueViolationError):
        await shared.commit()
    assert await outsider.fetchval("SELECT to_regclass('edda_test_late')") is None
    async with transaction(storage) as shared:
        await shared.fetch("SELECT 1", {})


@pytest.mark.parametrize(
    ("error", "is_known"),
    [
        (asyncpg.AdminShutdownError("terminating connection"), False),
        (asyncpg.ConnectionFailureError("connection lost"), False),
        (asyncpg.PostgresIOError("cannot fsync"), False),
        (asyncpg.InternalServerError("cache lookup failed"), False),
        (asyncpg.UniqueViolationError("duplicate key"), True),
        (asyncpg.SerializationError("could not serialize"), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_an_error_of_the_commit_says_whether_its_outcome_is_known(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, error: Exception, is_known: bool
) -> None:
    """If it is not, the engine has to find out whether the step is recorded."""

    async def fail(_: Transaction) -> None:
        raise error

    shared = await storage.begin()
    monkeypatch.setattr(Transaction, "commit", fail)
    with pytest.raises(type(error) if is_known else StorageUnavailableError):
        await shared.commit()
    await shared.rollback()


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_who_ends_the_transaction_himself_is_told(storage: Storage, worker: Worker, end: str) -> None:
    """What Edda adds would be a transaction of its own, in with the rest or not."""
    await worker.send(new_run("a"))
    shared = await storage.begin()
    await shared.connection.execute(end)
    with pytest.raises(asyncpg.NoActiveSQLTransactionError):
        await step_commit.write_step_commit(shared, step_record("a"))
    with pytest.raises(asyncpg.NoActiveSQLTransactionError):
        await shared.commit()
    await shared.rollback()
    assert await storage.find_step_commit(A, 0, "pay:1") is None
    async with transaction(storage) as shared:
        await step_commit.write_step_commit(shared, step_record("a"))


async def test_a_cut_connection_is_replaced(storage: Storage, outsider: Outsider) -> None:
    shared = await storage.begin()
    await outsider.execute(CUT)
    with pytest.raises(StorageUnavailableError):
        await shared.commit()
    await shared.rollback()
    async with transaction(storage) as shared:
        assert await shared.fetch("SELECT 1", {})


async def test_a_rollback_on_a_cut_connection_is_done(storage: Storage, outsider: Outsider) -> None:
    shared = await storage.begin()
    await outsider.execute(CUT)
    await shared.rollback()
    async with transaction(storage) as shared:
        assert await shared.fetch("SELECT 1", {})


async def test_a_user_who_stops_in_the_middle_does_not_hold_his_locks_for_ever(storage: Storage) -> None:
    async with transaction(storage) as shared:
        ((limit,),) = await shared.fetch("SELECT current_setting('idle_in_transaction_session_timeout')", {})
    assert limit == "1min"


async def test_a_process_that_stops_before_its_commit_holds_its_runs_row_for_seconds_only(
    storage: Storage, worker: Worker
) -> None:
    """The journal of every worker waits for that row."""
    idle_limit = "SELECT current_setting('idle_in_transaction_session_timeout')"
    await worker.send(new_run("a"))
    async with transaction(storage) as shared:
        await step_commit.write_step_commit(shared, step_record("a"))
        ((limit,),) = await shared.fetch(idle_limit, {})
    assert limit == "5s"
    async with transaction(storage) as shared:
        ((limit,),) = await shared.fetch(idle_limit, {})
    assert limit == "1min", "it holds for that transaction only"


async def test_the_connections_of_users_end_with_the_storage(
    database: OnPostgres, storage: Storage, outsider: Outsider
) -> None:
    await storage.close()
    for is_killed in (False, True):
        other = PostgresStorage(database.url, pool_size=2)
        shared = await other.begin()
        async with transaction(other):
            pass
        if is_killed:
            other.kill()
        else:
            await other.close()
        await become(lambda: outsider.fetchval(ALL_GONE))
        with pytest.raises(StorageUnavailableError):
            await shared.commit()
        with pytest.raises(StorageUnavailableError):
            await other.begin()


async def test_a_begin_that_fails_leaves_its_place_to_the_next(make_storage: MakeStorage, outsider: Outsider) -> None:
    log = Log()
    storage = await make_storage(log)
    begin = "BEGIN ISOLATION LEVEL READ COMMITTED"
    log.fail_after[begin] = StorageUnavailableError("cut")
    for _ in range(5):
        with pytest.raises(StorageUnavailableError):
            await storage.begin()
    del log.fail_after[begin]
    await become(lambda: outsider.fetchval(f"SELECT ({OPEN}) = 0"))
    async with asyncio.timeout(30), transaction(storage) as shared:
        await shared.fetch("SELECT 1", {})


async def test_a_forwarder_waits_for_a_step_that_uses_its_offer(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a"))
    await storage.accept([incoming("m", exclusive=["jobs"])], {})
    offer = await storage.take_message(key("jobs"), -HOUR)
    assert offer is not None
    shared = await storage.begin()
    await step_commit.write_step_commit(shared, step_record("a", taken=[offer.seq]))
    forwarding = asyncio.create_task(storage.accept([incoming("again", exclusive=["jobs"])], {}, [offer.seq]))
    await become(lambda: outsider.fetchval(WAITING))
    await shared.commit()
    with pytest.raises(StorageConflictError):
        await forwarding
    assert await outsider.fetchval("SELECT count(*) FROM edda_event") == 1


def test_a_storage_that_was_open_on_another_loop_can_be_opened_again(make_database: MakeDatabase) -> None:
    storage = make_database("postgres").storage()

    async def live() -> None:
        await storage.open()
        await asyncio.gather(*(storage.get(RunId(f"{i}")) for i in range(20)), storage.wait_for_notification(0.1))
        async with transaction(storage) as shared:
            await shared.fetch("SELECT 1", {})
        await storage.close()

    for _ in range(2):
        asyncio.run(live())


# Parameters


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT :a, :b, :a", "SELECT $1, $2, $1"),
        ("SELECT :a::int, now()::date", "SELECT $1::int, now()::date"),
        ("SELECT ':a', 'it''s :a', E'\\' :a', \":a\"", "SELECT ':a', 'it''s :a', E'\\' :a', \":a\""),
        ("SELECT $$ :a $$, $x$ :a $x$", "SELECT $$ :a $$, $x$ :a $x$"),
        ("SELECT 1 -- :a\n, :b /* :a\n */", "SELECT 1 -- :a\n, $1 /* :a\n */"),
        ("SELECT x[1:2], x[n:m], f(a := :b)", "SELECT x[1:2], x[n:m], f(a := $1)"),
    ],
)
def test_names_become_numbers_where_they_are_values(sql: str, expected: str) -> None:
    assert bind_positional(sql, {"a": 1, "b": 2})[0] == expected


def test_values_come_in_the_order_of_their_numbers() -> None:
    assert bind_positional("SELECT :b, :a, :b", {"a": 1, "b": 2, "c": 3}) == ("SELECT $1, $2, $1", [2, 1])
