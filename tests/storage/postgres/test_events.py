"""Events on PostgreSQL: locks before the snapshot, and transactions of several messages."""

from __future__ import annotations

import asyncio
from zlib import crc32

import pytest

from edda.core.model import AckInbox, BatchResult, RunId
from edda.errors import StorageConflictError
from edda.storage.ports import Storage
from edda.storage.postgres import pool
from edda.storage.postgres.accept_sql import ACCEPT
from edda.storage.postgres.connection import COMMIT
from tests.conftest import MakeDatabase, MakeStorage
from tests.storage.conftest import MakeWorker
from tests.storage.other_session import WAITING, Death, Log, Outsider, become
from tests.storage.records import SOURCE, SUSPENDED, TYPE, done, entry, incoming, key, new_run, run_write, wait
from tests.storage.worker import Worker

OPEN = """
SELECT count(*) FROM pg_stat_activity
 WHERE application_name = 'edda' AND datname = current_database() AND state LIKE 'idle in transaction%'"""
TYPES, KEYS = 4712, 4713


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that are made from now on wait for locks only briefly."""
    monkeypatch.setitem(pool.SETTINGS, "lock_timeout", "20ms")


def bucket(name: bytes) -> int:
    return crc32(name) % 256


async def hold(outsider: Outsider, kind: int, name: bytes) -> None:
    await outsider.execute("SELECT pg_advisory_xact_lock($1, $2)", kind, bucket(name))


async def share(outsider: Outsider, kind: int, name: bytes) -> None:
    await outsider.execute("SELECT pg_advisory_xact_lock_shared($1, $2)", kind, bucket(name))


async def test_a_batch_with_waits_is_one_statement_between_its_locks_and_the_commit(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker
) -> None:
    log = Log()
    worker = await make_worker("worker-1", on=await make_storage(log))
    await worker.send(new_run("a"), new_run("b"))
    del log.sent[:]
    await worker.send(
        run_write("a", transition=SUSPENDED, waits=[wait("a", "w", "order")]),
        run_write("b", transition=done()),
        new_run("c", entry(1)),
    )
    assert len(log.sent) == 3


async def test_a_batch_that_drops_waits_and_frees_events_is_one_statement(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker
) -> None:
    log = Log()
    worker = await make_worker("worker-1", on=await make_storage(log))
    await worker.send(new_run("a", waits=[wait("a", "v", "refund"), wait("a", "w", "order")]))
    await storage.accept([incoming("e1", "order")], {})
    del log.sent[:]
    await worker.send(run_write("a", entry(1, n=1), transition=AckInbox(1), cancelled_waits=["v"], released_items=[1]))
    assert len(log.sent) == 1
    assert await storage.waits(RunId("a")) == ()


async def test_a_post_is_one_statement_between_its_locks_and_the_commit(
    make_storage: MakeStorage, storage: Storage, worker: Worker
) -> None:
    await worker.send(new_run("a", transition=SUSPENDED, waits=[wait("a", "w", "order")]))
    log = Log()
    acceptor = await make_storage(log)
    del log.sent[:]
    await acceptor.accept([incoming("e1", "order"), incoming("e2")], {})
    assert len(log.sent) == 3


async def test_a_wait_looks_only_when_the_post_under_its_key_is_in(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    """Its locks are a statement of their own: one that looks as well sees what was there when it began."""
    await worker.send(new_run("a"))
    number = await outsider.fetchval("SELECT nextval('edda_event_seq')")
    post = outsider.transaction()
    await post.start()
    await hold(outsider, KEYS, key("order"))
    waiting = asyncio.create_task(worker.send(run_write("a", transition=SUSPENDED, waits=[wait("a", "w", "order")])))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute("INSERT INTO edda_event VALUES ($1, 's', 'e', 't', NULL, 1, 'body')", number)
    await outsider.execute("INSERT INTO edda_event_key VALUES ($1, $2)", key("order"), number)
    await post.commit()
    assert await waiting == BatchResult(refused={RunId("a"): frozenset({"w"})})
    assert [item.value for item in await storage.read_inboxes(worker.id)] == [b"body"]


async def test_a_post_looks_only_when_the_wait_under_its_key_is_in(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a"))
    batch = outsider.transaction()
    await batch.start()
    await share(outsider, KEYS, key("order"))
    accepting = asyncio.create_task(storage.accept([incoming("e", "order")], {}))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute("INSERT INTO edda_wait VALUES ('a', 'w', $1, '', 't', '')", key("order"))
    await batch.commit()
    accepted = await accepting
    assert accepted is not None
    assert accepted.woke
    assert [item.step for item in await storage.read_inboxes(worker.id)] == ["w"]


async def test_a_wait_for_an_event_to_this_run_alone_looks_when_the_post_is_in(
    worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a"))
    post = outsider.transaction()
    await post.start()
    await hold(outsider, KEYS, key("order", "a"))
    waiting = asyncio.create_task(worker.send(run_write("a", transition=SUSPENDED, waits=[wait("a", "w", "order")])))
    await become(lambda: outsider.fetchval(WAITING))
    await post.rollback()
    assert await waiting == BatchResult()


async def test_waits_under_one_key_do_not_wait_for_each_other(worker: Worker, outsider: Outsider) -> None:
    async with outsider.transaction():
        await share(outsider, KEYS, key("order"))
        assert await worker.send(new_run("a", waits=[wait("a", "w", "order")])) == BatchResult()


async def test_a_path_set_is_learned_only_when_the_posts_of_its_type_are_in(
    storage: Storage, outsider: Outsider
) -> None:
    post = outsider.transaction()
    await post.start()
    await share(outsider, TYPES, TYPE.encode())
    learning = asyncio.create_task(storage.register_match_paths(TYPE, "order"))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute("INSERT INTO edda_event VALUES (4711, 's', 'e', $1, NULL, 1, '')", TYPE)
    await post.commit()
    assert await learning == 4711


async def test_a_post_looks_at_the_version_only_when_the_path_set_is_learned(
    storage: Storage, outsider: Outsider
) -> None:
    learner = outsider.transaction()
    await learner.start()
    await hold(outsider, TYPES, TYPE.encode())
    accepting = asyncio.create_task(storage.accept([incoming("e")], {}))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute("INSERT INTO edda_event_type VALUES ($1, 1)", TYPE)
    await learner.commit()
    assert await accepting is None
    assert await storage.find_event(SOURCE, "e") is None


async def test_a_post_locks_runs_in_the_order_of_their_ids(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a", waits=[wait("a", "w", "order")]), new_run("b", waits=[wait("b", "w", "order")]))
    batch = outsider.transaction()
    await batch.start()
    await outsider.execute("SELECT 1 FROM edda_open_run WHERE run_id = 'a' FOR UPDATE")
    accepting = asyncio.create_task(storage.accept([incoming("e", "order")], {}))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute("SELECT 1 FROM edda_open_run WHERE run_id = 'b' FOR UPDATE NOWAIT")
    await batch.rollback()
    await accepting
    assert len(await storage.read_inboxes(worker.id)) == 2


async def test_a_wait_dropped_while_a_post_waits_for_its_run_leaves_the_event_to_another_wait(
    storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    await worker.send(new_run("a", waits=[wait("a", "v", "order"), wait("a", "w", "order")]))
    batch = outsider.transaction()
    await batch.start()
    await outsider.execute("SELECT 1 FROM edda_open_run WHERE run_id = 'a' FOR UPDATE")
    accepting = asyncio.create_task(storage.accept([incoming("e", "order")], {}))
    await become(lambda: outsider.fetchval(WAITING))
    await outsider.execute("DELETE FROM edda_wait WHERE step = 'v'")
    await batch.commit()
    await accepting
    assert [(item.inbox_no, item.step) for item in await storage.read_inboxes(worker.id)] == [(1, "w")]


async def test_waits_left_behind_without_a_run_do_not_hold_up_a_post(storage: Storage, outsider: Outsider) -> None:
    for step in "vw":
        await outsider.execute("INSERT INTO edda_wait VALUES ('gone', $1, $2, '', 't', '')", step, key("order"))
    accepted = await asyncio.wait_for(storage.accept([incoming("e", "order")], {}), 10)
    assert accepted is not None
    assert accepted.new == {0}
    assert not accepted.woke


@pytest.mark.usefixtures("impatient")
async def test_locks_that_do_not_come_are_a_conflict_and_leave_nothing_open(
    make_storage: MakeStorage, storage: Storage, worker: Worker, outsider: Outsider
) -> None:
    async with outsider.transaction():
        await hold(outsider, KEYS, key("order"))
        await hold(outsider, TYPES, TYPE.encode())
        for call in (
            worker.send(new_run("a", waits=[wait("a", "w", "order")])),
            storage.accept([incoming("e", "order")], {}),
            storage.register_match_paths(TYPE, "order"),
        ):
            with pytest.raises(StorageConflictError):
                await call
    assert await outsider.fetchval(OPEN) == 0
    assert await worker.send(new_run("a", waits=[wait("a", "w", "order")])) == BatchResult()
    accepted = await storage.accept([incoming("e", "order")], {})
    assert accepted is not None
    assert accepted.woke


async def test_a_batch_with_waits_behind_its_fence_leaves_nothing_open(worker: Worker, outsider: Outsider) -> None:
    await outsider.execute("UPDATE edda_fence SET ownership_version = ownership_version + 1")
    assert await worker.send(new_run("a", waits=[wait("a", "w", "order")])) is None
    assert await outsider.fetchval(OPEN) == 0
    assert await outsider.fetchval("SELECT count(*) FROM edda_wait") == 0


async def test_a_process_that_dies_before_the_commit_has_registered_nothing(
    make_storage: MakeStorage, storage: Storage, make_worker: MakeWorker
) -> None:
    log = Log()
    worker = await make_worker("worker-1", on=await make_storage(log))
    log.fail_before[COMMIT] = Death()
    with pytest.raises(Death):
        await worker.send(new_run("a", waits=[wait("a", "w", "order")]))
    await become(lambda: storage.accept([incoming("e", "order")], {}))
    assert await storage.get(RunId("a")) is None
    assert await storage.read_fence(worker.id) == worker.fence


async def test_a_process_that_dies_before_the_commit_has_accepted_nothing(
    make_storage: MakeStorage, storage: Storage
) -> None:
    log = Log()
    dying = await make_storage(log)
    log.fail_after[ACCEPT] = Death()
    with pytest.raises(Death):
        await dying.accept([incoming("e", "order")], {})
    accepted = await storage.accept([incoming("e", "order")], {})
    assert accepted is not None
    assert accepted.new == {0}


async def test_the_first_event_of_a_new_database_is_newer_than_a_run(make_database: MakeDatabase) -> None:
    """A sequence that was never used gives the same last value as one that was used once."""
    new = make_database("postgres", fresh=True).storage()
    await new.migrate()
    worker = Worker(new, "worker-1")
    await worker.register()
    await worker.send(new_run("a"))
    await new.accept([incoming("e", "order")], {})
    written = await worker.send(run_write("a", transition=SUSPENDED, waits=[wait("a", "w", "order")]))
    await new.close()
    assert written == BatchResult(refused={RunId("a"): frozenset({"w"})})


async def test_posts_with_the_same_events_in_other_orders_do_not_deadlock(
    make_storage: MakeStorage, storage: Storage
) -> None:
    """Under other types and keys, so that no advisory lock keeps them apart."""
    other = await make_storage()
    for number in range(20):
        ids = [f"{number}-{i}" for i in range(20)]
        here = [incoming(id, f"here {id}", type="here") for id in ids]
        there = [incoming(id, f"there {id}", type="there") for id in reversed(ids)]
        answers = await asyncio.gather(storage.accept(here, {}), other.accept(there, {}))
        assert sum(len(accepted.new) for accepted in answers if accepted is not None) == 20
