"""Events on MariaDB and MySQL: their numbers, lock buckets, and the number of messages to the server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from edda.core.model import Event, EventKey, NewEvent, RunId, RunWrite, Suspend
from edda.core.states import RunStatus
from edda.errors import StorageConflictError, StorageRejectedError
from edda.storage.mysql import MySQLStorage
from edda.storage.mysql.connection import BEGIN, MySQLSession
from edda.storage.mysql.locks import LOCK_EXCLUSIVE, LOCK_SHARED, of_keys, of_types
from edda.storage.mysql.statement import bind
from tests.storage.probes import Listener
from tests.storage.records import SOURCE, TYPE, entry, incoming, key, new_run, run_write, start, wait
from tests.storage.worker import Worker

from .locks import shorten_lock_waits

REST = Suspend(0, None, RunStatus.WAITING_FOR_EVENT)


@pytest.fixture
async def storage(url: str, listener: Listener) -> AsyncIterator[MySQLStorage]:
    storage = MySQLStorage(url, pool_size=1, probe=listener)
    await storage.open()
    await storage.migrate()
    for pool in (storage._journal, storage._pool):
        await shorten_lock_waits(pool)
    yield storage
    await storage.close()


async def packet_of(storage: MySQLStorage) -> int:
    return int((await storage._pool.run(b"SELECT @@max_allowed_packet")).rows[0][0])


async def number_of(storage: MySQLStorage, id: str) -> int:
    stored = await storage.find_event(SOURCE, id)
    assert stored is not None
    return stored.seq


def large(id: str, size: int, run: str) -> NewEvent:
    starts = (start(f"by {id}", ready_at=1),)
    return NewEvent(Event(SOURCE, id, TYPE, None, b"'" * size), (EventKey(key(run), key(run)),), starts)


# Messages


async def test_a_batch_takes_a_second_message_only_if_a_run_asks(worker: Worker, listener: Listener) -> None:
    async def messages(*batch: RunWrite) -> int:
        listener.heard.clear()
        assert await worker.send(*batch) is not None
        return len(listener.heard) // 2

    assert await messages(new_run("a"), new_run("b", transition=REST, waits=[wait("b", "1", "paid")])) == 1
    assert await messages(run_write("a", entry(1), transition=REST)) == 1
    await worker.write(new_run("c"))
    assert await messages(run_write("c", transition=REST, waits=[wait("c", "1", "paid")])) == 2


async def test_an_event_takes_two_messages_or_three_if_somebody_waits(
    storage: MySQLStorage, worker: Worker, listener: Listener
) -> None:
    await worker.write(new_run("run", transition=REST, waits=[wait("run", "1", "paid")]))
    for name, messages in (("shipped", 2), ("paid", 3)):
        listener.heard.clear()
        assert await storage.accept([incoming(name, name, starts=[start(f"by {name}")])], {})
        assert len(listener.heard) == 2 * messages


# Numbers


async def test_items_bring_the_right_events_where_numbers_are_not_given_out_one_by_one(
    storage: MySQLStorage, worker: Worker
) -> None:
    await worker.write(*(new_run(run, waits=[wait(run, "1", run)]) for run in ("a", "b", "c")))
    await storage._pool.run(b"SET SESSION auto_increment_increment = 3")
    await storage.accept([incoming(f"for {run}", run, starts=[start(f"by {run}")]) for run in ("c", "a", "b")], {})
    numbers = {run: await number_of(storage, f"for {run}") for run in ("a", "b", "c")}
    assert numbers["c"] + 6 == numbers["a"] + 3 == numbers["b"]
    assert {(item.run_id, item.event) for item in await storage.read_inboxes(worker.id)} == set(numbers.items())
    started = (await worker.claim()).runs
    assert {run.run_id: run.event_cursor for run in started} == {f"by {run}": n for run, n in numbers.items()}


async def test_a_post_larger_than_a_packet_is_still_one_commit(storage: MySQLStorage, worker: Worker) -> None:
    size = await packet_of(storage) // 5  # quotes are sent doubled
    runs = ["a", "b", "c", "d", "e"]
    await worker.write(*(new_run(run, waits=[wait(run, "1", run)]) for run in runs))
    post = [large(f"for {run}", size, run) for run in reversed(runs)]
    with pytest.raises(StorageRejectedError):
        await storage.accept([*post, incoming("x" * 2000)], {})
    assert await storage.last_event() == 0
    assert await storage.accept(post, {}) is not None
    numbers = {run: await number_of(storage, f"for {run}") for run in runs}
    assert sorted(numbers, key=lambda run: numbers[run]) == runs[::-1]
    assert {(item.run_id, item.event) for item in await storage.read_inboxes(worker.id)} == set(numbers.items())
    assert {run.event_cursor for run in (await worker.claim()).runs} == set(numbers.values())


# Locks


async def test_starting_a_run_does_not_wait_for_an_event_that_is_being_stored(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await storage.accept([incoming("first")], {})
    await stranger.send(
        bind(BEGIN),
        bind(b"INSERT INTO edda_event (source, id, type, received_at, body) VALUES ('s', 'second', 't', 1, '')"),
    )
    assert await storage.start([start("a")]) == {"a"}
    assert await worker.write(new_run("b")) == frozenset()
    await stranger.rollback()


async def test_whoever_brings_or_asks_waits_for_the_bucket_of_its_key_alone(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(new_run("run"))
    await stranger.send(bind(BEGIN), bind(LOCK_EXCLUSIVE, sorted(of_keys([key("paid")]))))
    with pytest.raises(StorageConflictError):
        await storage.accept([incoming("1", "paid")], {})
    with pytest.raises(StorageConflictError):
        await worker.send(run_write("run", transition=REST, waits=[wait("run", "1", "paid")]))
    assert await storage.accept([incoming("2", "shipped")], {}) is not None
    assert await worker.send(run_write("run", transition=REST, waits=[wait("run", "1", "sent")])) is not None
    await stranger.rollback()
    assert await storage.accept([incoming("1", "paid")], {}) is not None


async def test_those_who_ask_for_one_key_do_not_wait_for_each_other(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(new_run("run"))
    await stranger.send(bind(BEGIN), bind(LOCK_SHARED, sorted(of_keys([key("paid")]))))
    assert await worker.send(run_write("run", transition=REST, waits=[wait("run", "1", "paid")])) is not None
    await stranger.rollback()


async def test_learning_a_path_set_waits_for_those_who_store_events_of_its_type(
    storage: MySQLStorage, stranger: MySQLSession
) -> None:
    await stranger.send(bind(BEGIN), bind(LOCK_SHARED, sorted(of_types([TYPE]))))
    assert await storage.accept([incoming("1")], {}) is not None
    with pytest.raises(StorageConflictError):
        await storage.register_match_paths(TYPE, "order")
    newest = await number_of(storage, "1")
    assert await storage.register_match_paths("another type", "order") == newest
    await stranger.rollback()
    assert await storage.register_match_paths(TYPE, "order") == newest


async def test_an_event_pruned_between_finding_and_delivering_it_is_a_conflict(
    storage: MySQLStorage, worker: Worker, stranger: MySQLSession
) -> None:
    await worker.write(new_run("run"))
    await storage.accept([incoming("1", "paid")], {})
    await stranger.run(b"DELETE FROM edda_event")
    asking = run_write("run", entry(1), transition=REST, waits=[wait("run", "1", "paid")])
    with pytest.raises(StorageConflictError, match="pruned"):
        await worker.send(asking)
    assert await storage.history(RunId("run")) == ()
    await stranger.run(b"DELETE FROM edda_event_key")
    written = await worker.send(asking)
    assert written is not None
    assert written.refused == {}


async def test_pruning_steps_over_events_that_somebody_delivers(storage: MySQLStorage, stranger: MySQLSession) -> None:
    await storage.accept([incoming("1"), incoming("2"), incoming("3")], {})
    later = await storage.now() + 2 * 3600 * 1_000_000
    await stranger.send(
        bind(BEGIN),
        bind(b"SELECT 1 FROM edda_event WHERE seq = %b LOCK IN SHARE MODE", await number_of(storage, "1")),
    )
    assert await storage.prune_events(later, 10) == 1
    assert await storage.find_event(SOURCE, "1") is not None
    await stranger.rollback()
    assert await storage.prune_events(later, 10) == 1
