"""Transactions that a user's code and Edda share: all is committed or nothing, and other writers are not delayed."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import pytest
from msgspec.structs import replace

from edda.core.model import BatchResult, RunId
from edda.errors import AppError, EddaError, StorageUnavailableError
from edda.storage.memory.storage import MemoryStorage
from edda.storage.ports import SharedTransaction, Storage
from edda.storage.shared import step_commit
from tests.conftest import Database, InFile, MakeDatabase, MakeStorage

from .conftest import MakeWorker
from .probes import Listener, SimulatedDeath, Trap
from .records import (
    WORKFLOW,
    done,
    entry,
    incoming,
    new_run,
    next_generation,
    outbox_event,
    run_write,
    staged_event,
    start,
)
from .shared_transactions import SQL_KINDS, step_record, transaction
from .worker import Worker

R1 = RunId("run-1")
ADD = "INSERT INTO edda_test_note (id, body) VALUES (:id, :body)"
FILES, SERVERS = SQL_KINDS[:1], SQL_KINDS[1:]
HELD = {"sqlite": 1, "postgres": 2, "mysql": 2}
"""How many transactions can be open at once: one on a file, as many as the pool has connections on a server."""


@pytest.fixture(params=SQL_KINDS)
def database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    return make_database(request.param)


only_on_files = pytest.mark.parametrize("database", FILES, indirect=True)
only_on_servers = pytest.mark.parametrize("database", SERVERS, indirect=True)


@pytest.fixture
async def notes(storage: Storage) -> Storage:
    """With a table of the user; tables with the prefix `edda_` are emptied between tests."""
    async with transaction(storage) as shared:
        await shared.execute(
            "CREATE TABLE IF NOT EXISTS edda_test_note (id INTEGER PRIMARY KEY, body VARCHAR(200))", {}
        )
    return storage


async def add(shared: SharedTransaction, *ids: int) -> None:
    for id in ids:
        assert await shared.execute(ADD, {"id": id, "body": f"note {id}"}) == 1


async def noted(storage: Storage) -> list[int]:
    async with transaction(storage) as shared:
        return [row[0] for row in await shared.fetch("SELECT id FROM edda_test_note ORDER BY id", {})]


async def fetch(storage: Storage, sql: str, **values: Any) -> list[tuple[Any, ...]]:
    async with transaction(storage) as shared:
        return [tuple(row) for row in await shared.fetch(sql, values)]


# All or nothing


async def test_what_is_committed_is_there_for_all(notes: Storage, make_storage: MakeStorage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    async with transaction(notes) as shared:
        await add(shared, 1, 2)
        assert await step_commit.start(shared, start("run-2", ready_at=1))
        effects = step_record("run-1", staged_events=[staged_event("a")], outbox_events=[outbox_event("b")])
        await step_commit.write_step_commit(shared, effects)
    for witness in (notes, await make_storage()):
        assert await noted(witness) == [1, 2]
        assert await witness.find_step_commit(R1, 0, "pay:1") == effects.commit
        assert len(await witness.staged_events(10)) == 1
        assert len(await witness.find_outbox()) == 1
        assert await witness.get(RunId("run-2")) is not None


async def test_a_rollback_leaves_nothing(notes: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    shared = await notes.begin()
    await add(shared, 1)
    await step_commit.start(shared, start("run-2", ready_at=1))
    await step_commit.stage_events(shared, [staged_event("a")])
    await step_commit.insert_outbox(shared, [outbox_event("b")])
    await step_commit.write_step_commit(
        shared, step_record("run-1", staged_events=[staged_event("c")], outbox_events=[outbox_event("d")])
    )
    await shared.rollback()
    assert await noted(notes) == []
    assert await notes.get(RunId("run-2")) is None
    assert await notes.staged_events(10) == ()
    assert await notes.find_outbox() == ()
    assert await notes.find_step_commit(R1, 0, "pay:1") is None
    async with transaction(notes) as shared:
        await add(shared, 1)
        assert await step_commit.start(shared, start("run-2", ready_at=1))
        await step_commit.write_step_commit(shared, step_record("run-1"))
    assert await noted(notes) == [1]


async def test_nothing_is_seen_before_the_commit(notes: Storage, make_storage: MakeStorage, worker: Worker) -> None:
    other = await make_storage()
    await worker.write(new_run("run-1"))
    async with transaction(notes) as shared:
        await step_commit.start(shared, start("run-2", ready_at=1))
        await step_commit.write_step_commit(
            shared, step_record("run-1", staged_events=[staged_event("a")], outbox_events=[outbox_event("b")])
        )
        for witness in (notes, other):
            assert await witness.get(RunId("run-2")) is None
            assert await witness.staged_events(10) == ()
            assert await witness.find_outbox() == ()
            assert await witness.find_step_commit(R1, 0, "pay:1") is None
    assert len(await other.staged_events(10)) == 1


async def test_a_transaction_sees_its_own_rows(notes: Storage) -> None:
    async with transaction(notes) as shared:
        await add(shared, 1)
        assert [tuple(row) for row in await shared.fetch("SELECT id, body FROM edda_test_note", {})] == [(1, "note 1")]


async def test_a_statement_that_fails_is_the_drivers_error_and_a_rollback_cleans_up(notes: Storage) -> None:
    for _ in range(5):
        shared = await notes.begin()
        await add(shared, 1)
        with pytest.raises(Exception, match=r"(?i)unique|duplicate") as caught:
            await add(shared, 1)
        assert not isinstance(caught.value, EddaError)
        await shared.rollback()
    assert await noted(notes) == []


async def share(storage: Storage, turn: int) -> None:
    """A note, a run, a step commit, a staged event and an outbox event, all of this round."""
    shared = await storage.begin()
    await add(shared, turn)
    await step_commit.start(shared, start(f"new-{turn}", ready_at=1))
    effects = step_record(
        f"run-{turn}", staged_events=[staged_event(f"{turn}")], outbox_events=[outbox_event(f"{turn}")]
    )
    await step_commit.write_step_commit(shared, effects)
    await shared.commit()


async def is_shared(storage: Storage, turn: int) -> bool:
    """Whether all of it is committed; fails if only a part is."""
    parts = (
        turn in await noted(storage),
        await storage.get(RunId(f"new-{turn}")) is not None,
        await storage.find_step_commit(RunId(f"run-{turn}"), 0, "pay:1") is not None,
        staged_event(f"{turn}").body in [one.body for one in await storage.staged_events(100)],
        outbox_event(f"{turn}") in [one.event for one in await storage.find_outbox()],
    )
    assert len(set(parts)) == 1, "a part of the transaction is in"
    return parts[0]


async def test_a_process_that_dies_at_any_point_leaves_all_of_it_or_nothing(
    notes: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    outcomes: list[bool] = []
    while not outcomes or not outcomes[-1]:
        turn, trap = len(outcomes), Trap()
        run = f"run-{turn}"
        await worker.write(new_run(run))
        dying = await make_storage(trap)
        await dying.now()
        trap.arm(turn, SimulatedDeath())
        with pytest.raises(SimulatedDeath):
            await share(dying, turn)
        dying.kill()
        async with asyncio.timeout(30):
            outcomes.append(await is_shared(notes, turn))
            assert await worker.send(run_write(run, entry(1))) == BatchResult()
            await notes.release_run(RunId(run))
            worker.fence = await notes.read_fence(worker.id) or worker.fence
    assert len(outcomes) > 10, "begin, five statements, commit"
    assert outcomes == [False] * (len(outcomes) - 1) + [True]


async def test_the_probe_stands_beside_every_statement(notes: Storage, make_storage: MakeStorage) -> None:
    for end in ("COMMIT", "ROLLBACK"):
        probe = Listener()
        storage = await make_storage(probe)
        await storage.now()
        probe.heard.clear()
        shared = await storage.begin()
        assert probe.heard, "beside the begin"
        await shared.execute("DELETE FROM edda_test_note WHERE id = :id", {"id": 1})
        await shared.fetch("SELECT id FROM edda_test_note", {})
        await (shared.commit() if end == "COMMIT" else shared.rollback())
        assert [when for when, _ in probe.heard] == ["before", "after"] * (len(probe.heard) // 2)
        texts = [text for _, text in probe.heard[::2]]
        assert texts == [text for _, text in probe.heard[1::2]]
        assert any("DELETE" in text for text in texts)
        assert any("SELECT id" in text for text in texts)
        assert end in texts[-1].upper()


async def test_a_commit_whose_answer_is_lost_has_an_unknown_outcome(
    notes: Storage, make_storage: MakeStorage, database: Database
) -> None:
    trap = Trap()
    cut = await make_storage(trap)
    for turn, is_in in enumerate((False, True)):
        for _ in range(HELD[database.kind] + 1):  # the pool must not lend a connection that was cut
            shared = await cut.begin()
            await shared.execute("DELETE FROM edda_test_note", {})
            await add(shared, turn)
            trap.arm(turn, StorageUnavailableError("cut"))
            with pytest.raises(StorageUnavailableError):
                await shared.commit()
            assert await noted(notes) == ([turn] if is_in else [])


# Statements


async def test_rows_are_counted(notes: Storage) -> None:
    async with transaction(notes) as shared:
        await add(shared, 1, 2, 3)
        change = "UPDATE edda_test_note SET body = :body WHERE id > :id"
        assert await shared.execute(change, {"id": 1, "body": "changed"}) == 2
        assert await shared.execute(change, {"id": 9, "body": "changed"}) == 0
        assert await shared.execute("DELETE FROM edda_test_note", {}) == 3


async def test_values_have_names(notes: Storage) -> None:
    async with transaction(notes) as shared:
        await add(shared, 1, 2, 3)
        await shared.execute(ADD, {"body": None, "id": 4})
        rows = await shared.fetch(
            "SELECT id, body FROM edda_test_note WHERE id >= :id AND id < :id + :more ORDER BY id",
            {"id": 2, "more": 1, "moreover": "not used"},
        )
        assert [tuple(row) for row in rows] == [(2, "note 2")]
        (row,) = await shared.fetch("SELECT body FROM edda_test_note WHERE id = :id", {"id": 4})
        assert row[0] is None


async def test_a_parameter_inside_a_literal_is_text(notes: Storage) -> None:
    texts = ["12:id:45", ":id", "it's :id", "100 %", "%s and %(id)s", "$1", "?"]
    async with transaction(notes) as shared:
        for n, text in enumerate(texts):
            literal = text.replace("'", "''")
            await shared.execute(f"INSERT INTO edda_test_note (id, body) VALUES (:id, '{literal}')", {"id": n})
        rows = await shared.fetch("SELECT body FROM edda_test_note WHERE id >= :id ORDER BY id", {"id": 0})
        assert [row[0] for row in rows] == texts
        rows = await shared.fetch("SELECT id FROM edda_test_note WHERE body LIKE '%:id%' AND id < :id", {"id": 2})
        assert [row[0] for row in rows] == [0, 1]
        rows = await shared.fetch("SELECT id FROM edda_test_note WHERE body LIKE '100 %'", {})
        assert [row[0] for row in rows] == [3]


@pytest.mark.parametrize(
    "text", ["größer-🧾", "'; DROP TABLE edda_test_note; --", "a\\b%s%%_:x", ":body", "$1 ? %(id)s"]
)
async def test_any_text_goes_in_and_comes_back(notes: Storage, text: str) -> None:
    async with transaction(notes) as shared:
        await shared.execute(ADD, {"id": 1, "body": text})
        (row,) = await shared.fetch("SELECT id FROM edda_test_note WHERE body = :text", {"text": text})
        assert row[0] == 1
    assert await fetch(notes, "SELECT id, body FROM edda_test_note") == [(1, text)]


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
async def test_a_cast_is_no_value(notes: Storage) -> None:
    assert await fetch(notes, "SELECT (:id)::int::text, '5'::int + :id::int, :id::bigint", id=2) == [("2", 7, 2)]


async def test_users_work_on_the_same_transaction_with_the_drivers_own_connection(
    notes: Storage, database: Database
) -> None:
    insert = "INSERT INTO edda_test_note (id, body) VALUES (7, 'theirs')"

    async def work(shared: SharedTransaction) -> None:
        connection = shared.connection
        if database.kind == "mysql":
            async with connection.cursor() as cursor:
                await cursor.execute(insert)
        else:
            await connection.execute(insert)
        await add(shared, 8)

    shared = await notes.begin()
    await work(shared)
    assert len(await shared.fetch("SELECT id FROM edda_test_note", {})) == 2
    await shared.rollback()
    assert await noted(notes) == []
    async with transaction(notes) as shared:
        assert shared.dialect == {"sqlite": "sqlite", "postgres": "postgresql", "mysql": "mysql"}[database.kind]
        await work(shared)
    assert await noted(notes) == [7, 8]


@only_on_servers
async def test_a_transaction_sees_what_others_have_committed_since_it_began(
    notes: Storage, make_storage: MakeStorage
) -> None:
    other = await make_storage()
    async with transaction(notes) as shared:
        assert await shared.fetch("SELECT id FROM edda_test_note", {}) in ([], ())
        async with transaction(other) as another:
            await add(another, 1)
        assert len(await shared.fetch("SELECT id FROM edda_test_note", {})) == 1


# Starting runs


async def test_a_run_that_was_started_can_be_claimed(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("e1"), incoming("e2")], {})
    full = replace(start("run-1", ready_at=5), deadline=99, parent=RunId("run-0"), parent_step="child:1", depth=3)
    async with transaction(storage) as shared:
        assert await step_commit.start(shared, full) is True
    (run,) = (await worker.claim()).runs
    assert (run.run_id, run.workflow, run.input, run.created_at) == (R1, WORKFLOW, full.input, full.created_at)
    assert (run.deadline, run.parent, run.parent_step, run.depth) == (99, "run-0", "child:1", 3)
    assert (run.generation, run.epoch, run.entries, run.inbox, run.waits, run.step_commits) == (0, 1, (), (), (), ())
    assert run.event_cursor == await storage.last_event() > 0


async def test_starting_a_run_twice_starts_it_once(storage: Storage, worker: Worker) -> None:
    other = replace(start("run-1", ready_at=7), input=b"other")
    async with transaction(storage) as shared:
        assert await step_commit.start(shared, start("run-1", ready_at=1)) is True
        assert await step_commit.start(shared, other) is False
    async with transaction(storage) as shared:
        assert await step_commit.start(shared, other) is False
    assert await storage.start([other]) == frozenset()
    record = await storage.get(R1)
    assert record is not None
    assert (record.input, record.ready_at) == (b"input of run-1", 1)


async def test_a_run_that_exists_in_any_state_is_not_started_again(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("owned"), new_run("ended", transition=done()), new_run("recurred"))
    await worker.write(run_write("recurred", transition=next_generation()))
    await storage.start([start("free")])
    async with transaction(storage) as shared:
        for run in ("owned", "ended", "recurred", "free"):
            assert await step_commit.start(shared, start(run, ready_at=1)) is False
        assert await step_commit.start(shared, start("new", ready_at=1)) is True
    assert await storage.owned_runs(worker.id) == {RunId("owned"): 1, RunId("recurred"): 1}


async def test_an_open_run_whose_first_generations_are_pruned_is_not_started_again(
    storage: Storage, worker: Worker
) -> None:
    await worker.write(new_run("run-1"))
    await worker.write(run_write("run-1", transition=next_generation(at=10)))
    assert await storage.prune_runs(1_000, 10) == 1
    async with transaction(storage) as shared:
        assert await step_commit.start(shared, start("run-1", ready_at=1)) is False
    assert await storage.owned_runs(worker.id) == {R1: 1}


@pytest.mark.parametrize("commits", [True, False])
async def test_of_two_who_start_a_run_the_second_waits_for_the_first(
    storage: Storage, make_storage: MakeStorage, commits: bool
) -> None:
    other = await make_storage()

    async def second() -> bool:
        async with transaction(other) as shared:
            return await step_commit.start(shared, start("run-1", ready_at=2))

    first = await storage.begin()
    assert await step_commit.start(first, start("run-1", ready_at=1)) is True
    waiting = asyncio.create_task(second())
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await (first.commit() if commits else first.rollback())
    async with asyncio.timeout(30):
        assert await waiting is not commits
    record = await storage.get(R1)
    assert record is not None
    assert record.ready_at == (1 if commits else 2)


async def test_a_run_is_started_once_by_transactions_and_calls_at_the_same_time(
    storage: Storage, make_storage: MakeStorage
) -> None:
    storages = [storage, await make_storage()]

    async def by_transaction(storage: Storage, run: str) -> bool:
        async with transaction(storage) as shared:
            return await step_commit.start(shared, start(run, ready_at=1))

    async def by_call(storage: Storage, run: str) -> bool:
        return bool(await storage.start([start(run, ready_at=1)]))

    for turn in range(10):
        async with asyncio.timeout(60):
            started = await asyncio.gather(
                *(way(each, f"run-{turn}") for each in storages for way in (by_transaction, by_call))
            )
        assert sorted(started) == [False, False, False, True]


# Connections


async def hold(storage: Storage, database: Database) -> list[SharedTransaction]:
    """As many transactions as can be open at once."""
    return [await storage.begin() for _ in range(HELD[database.kind])]


async def test_one_transaction_too_many_waits_for_another_to_end(notes: Storage, database: Database) -> None:
    async with asyncio.timeout(60):
        held = await hold(notes, database)
        waiting = asyncio.create_task(notes.begin())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await held.pop().rollback()
        shared = await waiting
        await add(shared, 1)
        await shared.commit()
        for each in held:
            await each.rollback()
    assert await noted(notes) == [1]


async def test_a_begin_that_is_cancelled_while_it_waits_leaves_its_place_to_others(
    notes: Storage, database: Database
) -> None:
    async with asyncio.timeout(60):
        for turn in range(3):
            held = await hold(notes, database)
            waiting = [asyncio.create_task(notes.begin()) for _ in range(3)]
            await asyncio.sleep(0.05 * turn)
            for task in waiting:
                task.cancel()
            assert {type(x) for x in await asyncio.gather(*waiting, return_exceptions=True)} == {asyncio.CancelledError}
            for each in held:
                await each.commit()
        for each in await hold(notes, database):
            await each.rollback()


async def test_a_begin_that_is_cancelled_at_any_time_leaves_no_transaction_open(
    notes: Storage, make_storage: MakeStorage, database: Database
) -> None:
    other = await make_storage()
    async with asyncio.timeout(100):
        for turn in range(20):
            task = asyncio.create_task(notes.begin())
            for _ in range(turn):
                await asyncio.sleep(0)
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(outcome, BaseException):
                await outcome.rollback()
            async with transaction(other) as shared:
                await add(shared, turn)
        for each in await hold(notes, database):
            await each.rollback()
    assert await noted(other) == list(range(20))


@only_on_servers
async def test_a_statement_that_is_cancelled_can_be_rolled_back(
    notes: Storage, make_storage: MakeStorage, database: Database
) -> None:
    other = await make_storage()
    sleep = {"postgres": "SELECT pg_sleep(60)", "mysql": "SELECT sleep(60)"}[database.kind]
    async with asyncio.timeout(50):
        for turn in range(HELD[database.kind] + 1):
            shared = await notes.begin()
            await add(shared, turn)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await shared.fetch(sleep, {})
            await shared.rollback()
            async with transaction(other) as another:  # its lock is gone
                await add(another, turn)
        async with transaction(notes) as shared:
            await add(shared, 9)
    assert await noted(notes) == [0, 1, 2, 9]


async def test_a_commit_that_is_cancelled_leaves_nothing_open(
    notes: Storage, make_storage: MakeStorage, database: Database
) -> None:
    other = await make_storage()
    async with asyncio.timeout(100):
        for turn in range(20):
            shared = await notes.begin()
            await add(shared, turn)
            task = asyncio.create_task(shared.commit())
            for _ in range(turn):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                await shared.rollback()
            async with transaction(other) as another:
                await another.execute("DELETE FROM edda_test_note", {})
        for each in await hold(notes, database):
            await each.rollback()
    assert await noted(notes) == []


@only_on_servers
async def test_the_journal_is_not_held_up_by_open_transactions(
    notes: Storage, worker: Worker, database: Database
) -> None:
    held = await hold(notes, database)
    waiting = asyncio.create_task(notes.begin())
    async with asyncio.timeout(60):
        for turn in range(5):
            assert await worker.send(new_run(f"run-{turn}", entry(1))) == BatchResult()
            await notes.accept([incoming(f"e{turn}")], {})
            await notes.claim_outbox(1, 1)
    for each in held:
        await each.rollback()
    await (await waiting).rollback()


@only_on_files
async def test_the_journal_of_a_file_waits_and_goes_on_when_the_transaction_ends(
    notes: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    workers = [await make_worker("ours"), await make_worker("theirs", on=await make_storage())]
    shared = await notes.begin()
    await add(shared, 1)
    writing = [asyncio.create_task(worker.send(new_run(f"run of {worker.id}"))) for worker in workers]
    assert await notes.get(R1) is None, "reading goes on"
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in writing)
    await shared.commit()
    async with asyncio.timeout(60):
        assert await asyncio.gather(*writing) == [BatchResult(), BatchResult()]


async def test_a_killed_process_lets_go_of_what_its_transactions_held(
    notes: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    dying = await make_storage()
    await worker.write(new_run("run-1"))
    shared = await dying.begin()
    await add(shared, 1)
    await step_commit.write_step_commit(shared, step_record("run-1"))
    dying.kill()
    async with asyncio.timeout(60):
        assert await notes.release_run(R1)
        async with transaction(notes) as another:
            await add(another, 1)
    assert await notes.find_step_commit(R1, 0, "pay:1") is None


async def test_a_storage_that_is_closed_rolls_back_what_is_open(
    notes: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    closing = await make_storage()
    await worker.write(new_run("run-1"))
    shared = await closing.begin()
    await add(shared, 1)
    await step_commit.write_step_commit(shared, step_record("run-1"))
    async with asyncio.timeout(60):
        await closing.close()
        assert await notes.release_run(R1)
        async with transaction(notes) as another:
            await add(another, 1)
    assert await notes.find_step_commit(R1, 0, "pay:1") is None


async def test_a_closed_storage_begins_nothing(notes: Storage, make_storage: MakeStorage) -> None:
    closed = await make_storage()
    await closed.close()
    with pytest.raises(StorageUnavailableError):
        await closed.begin()


# The write lock


async def test_a_write_lock_is_released_once_however_often_end_is_called(storage: Storage, worker: Worker) -> None:
    for _ in range(3):
        lock = await storage.acquire_write_lock()
        await lock.end()
        await lock.end()
    assert await worker.send(new_run("run-1")) == BatchResult()


@only_on_servers
async def test_a_write_lock_delays_no_writer_on_a_server(storage: Storage, worker: Worker) -> None:
    locks = [await storage.acquire_write_lock() for _ in range(5)]
    async with asyncio.timeout(60):
        assert await worker.send(new_run("run-1")) == BatchResult()
    for lock in locks:
        await lock.end()


def write_to(path: str, id: int) -> None:
    """As a connection that is not Edda's does, which does not wait for the write lock."""
    connection = sqlite3.connect(path, timeout=0)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO edda_test_note (id, body) VALUES (?, 'theirs')", (id,))
        connection.execute("COMMIT")
    finally:
        connection.close()


@pytest.fixture
def path(database: Database) -> str:
    assert isinstance(database, InFile)
    return str(database.path)


@only_on_files
async def test_the_journal_waits_for_the_holder_of_the_write_lock(
    notes: Storage, make_storage: MakeStorage, make_worker: MakeWorker, path: str
) -> None:
    workers = [await make_worker("ours"), await make_worker("theirs", on=await make_storage())]
    lock = await notes.acquire_write_lock()
    writing = [asyncio.create_task(worker.send(new_run(f"run of {worker.id}"))) for worker in workers]
    next_turn, next_joint = asyncio.create_task(notes.acquire_write_lock()), asyncio.create_task(notes.begin())
    await asyncio.sleep(0.2)
    await asyncio.to_thread(write_to, path, 1)
    assert not any(task.done() for task in (*writing, next_turn, next_joint))
    await lock.end()
    async with asyncio.timeout(60):
        await (await next_turn).end()
        await (await next_joint).rollback()
        assert await asyncio.gather(*writing) == [BatchResult(), BatchResult()]
    assert await noted(notes) == [1]


@only_on_files
async def test_the_write_lock_goes_from_process_to_process_without_conflicts(
    notes: Storage, make_storage: MakeStorage, worker: Worker, path: str
) -> None:
    async def write(storage: Storage, part: int) -> None:
        for n in range(10):
            lock = await storage.acquire_write_lock()
            try:
                await asyncio.to_thread(write_to, path, 100 * part + n)
            finally:
                await lock.end()

    async def journal() -> None:
        for n in range(10):
            await worker.send(new_run(f"run-{n}"))

    async with asyncio.timeout(100):
        await asyncio.gather(write(notes, 1), write(notes, 2), write(await make_storage(), 3), journal())
    assert len(await noted(notes)) == 30


@only_on_files
async def test_a_write_lock_whose_caller_was_cancelled_is_released(
    notes: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    async with asyncio.timeout(100):
        for delay in (0.0, 0.01, 0.1):
            lock = await other.acquire_write_lock()
            waiting = [asyncio.create_task(notes.acquire_write_lock()) for _ in range(3)]
            await asyncio.sleep(delay)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            await lock.end()
            assert await worker.send(new_run(f"run-{delay}")) == BatchResult()
        lock = await notes.acquire_write_lock()
        await lock.end()


@only_on_files
@pytest.mark.parametrize("end", ["close", "kill"])
async def test_a_write_lock_ends_with_its_process(
    storage: Storage, make_storage: MakeStorage, worker: Worker, end: str
) -> None:
    dying = await make_storage()
    await dying.acquire_write_lock()
    async with asyncio.timeout(60):
        if end == "close":
            await dying.close()
        dying.kill()
        assert await worker.send(new_run("run-1")) == BatchResult()


# Memory


async def test_memory_has_no_transactions_to_share() -> None:
    storage = MemoryStorage()
    await storage.open()
    with pytest.raises(AppError, match="needs a database"):
        await storage.begin()
    lock = await storage.acquire_write_lock()
    await lock.end()
    assert await storage.find_step_commit(R1, 0, "pay:1") is None
    await storage.close()
