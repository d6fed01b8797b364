"""Two nodes of a Galera cluster that both accept writes: certified writes exclude what locks exclude on one server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest

from edda import EddaApp, RetryPolicy, WorkflowContext, activity, workflow
from edda.cli.doctor import _check_cluster
from edda.core.model import EndWatcher, RunId, Sent, StepCommit, StoredEvent
from edda.errors import LeaseLostError, StorageConflictError, StorageError
from edda.storage.mysql import MySQLStorage
from edda.storage.mysql.connection import ASSERT_ROW_COUNT, BEGIN, COMMIT, MySQLSession, _refuse_group_replication
from edda.storage.mysql.statement import bind
from edda.storage.ports import Storage
from edda.storage.shared import step_commit
from edda.storage.shared.step_faults import is_conflict
from tests.databases import MySQLServer
from tests.galera import two_nodes
from tests.storage.records import (
    LAPSED,
    SOURCE,
    SUSPENDED,
    done,
    end_signal,
    entry,
    incoming,
    key,
    new_run,
    outbox_event,
    run_write,
    start,
    wait,
)
from tests.storage.worker import Worker

from .sessions import session_at

pytestmark = pytest.mark.processes


@pytest.fixture
def urls() -> Iterator[tuple[str, str]]:
    """Storages of one new database at both nodes."""
    cluster = two_nodes()
    server = MySQLServer(cluster.nodes[0].url)
    url = server.create()
    one, two = cluster.urls(url.rpartition("/")[2])
    give_up = time.monotonic() + 30
    while not MySQLServer.answers(two):  # the second node creates it a little later
        assert time.monotonic() < give_up
    yield one, two
    server.drop(url)


@pytest.fixture
async def storages(urls: tuple[str, str]) -> AsyncIterator[tuple[MySQLStorage, MySQLStorage]]:
    one, two = (MySQLStorage(url, pool_size=2) for url in urls)
    for storage in (one, two):
        await storage.open()
    await one.migrate()
    yield one, two
    for storage in (one, two):
        await storage.close()


async def worker_at(storage: Storage, name: str, lease: int | None = None) -> Worker:
    worker = Worker(storage, name)
    await (worker.register() if lease is None else worker.register(lease))
    return worker


async def patiently(call: Any, *args: Any) -> Any:
    """As the engine does: a transaction that was rolled back is sent again."""
    while True:
        with suppress(StorageConflictError):
            return await call(*args)


# A transaction stays one transaction


async def test_a_transaction_that_another_node_aborts_leaves_nothing(urls: tuple[str, str]) -> None:
    """Each transaction is one call of `send`, as a batch is."""
    async with session_at(urls[0]) as session:
        await session.run(b"CREATE TABLE tally (b INT PRIMARY KEY, v INT NOT NULL)")
        await session.run(b"CREATE TABLE mark (m VARCHAR(20), part INT, PRIMARY KEY (m, part))")
        await session.run(b"INSERT INTO tally VALUES (1, 0), (2, 0)")

    async def write(session: MySQLSession, name: str) -> int:
        count = 0
        for n in range(60):
            mark = f"{name}-{n}"
            try:
                await session.send(
                    bind(BEGIN),
                    bind(b"UPDATE tally SET v = v + 1 WHERE b = 1"),
                    bind(ASSERT_ROW_COUNT, 1),
                    bind(b"INSERT INTO mark VALUES (%b, 1)", mark),
                    bind(b"UPDATE tally SET v = v + 1 WHERE b = 2"),
                    bind(ASSERT_ROW_COUNT, 1),
                    bind(b"INSERT INTO mark VALUES (%b, 2)", mark),
                    bind(COMMIT),
                )
                count += 1
            except StorageConflictError:
                await session.rollback()
        return count

    async with session_at(urls[0]) as a, session_at(urls[1]) as b, session_at(urls[0]) as c, session_at(urls[1]) as d:
        counts = await asyncio.gather(
            *(write(session, name) for session, name in ((a, "a"), (b, "b"), (c, "c"), (d, "d")))
        )
        rows = (await a.run(b"SELECT part, COUNT(*) FROM mark GROUP BY part ORDER BY part")).rows
        tally = (await a.run(b"SELECT v FROM tally ORDER BY b")).rows
    total = sum(counts)
    assert (list(rows), list(tally)) == ([(1, total), (2, total)], [(total,), (total,)])


async def test_what_one_node_committed_is_seen_at_the_other(storages: tuple[MySQLStorage, MySQLStorage]) -> None:
    one, two = storages
    for n in range(50):
        await one.start([start(f"run-{n}")])
        assert await two.get(RunId(f"run-{n}")) is not None


async def test_both_nodes_can_be_migrated_at_once(urls: tuple[str, str]) -> None:
    storages = [MySQLStorage(url, pool_size=1) for url in (*urls, *urls)]
    for storage in storages:
        await storage.open()
    await asyncio.gather(*(storage.migrate() for storage in storages))
    for storage in storages:
        assert await storage.pending_migrations() == ()
        await storage.close()


# Events


async def test_no_wake_up_is_lost_between_a_wait_at_one_node_and_its_event_at_the_other(
    storages: tuple[MySQLStorage, MySQLStorage],
) -> None:
    one, two = storages
    worker = await worker_at(one, "worker-1")
    missed = []
    for n in range(100):
        run = f"run-{n}"
        await worker.write(new_run(run))
        written, _ = await asyncio.gather(
            worker.send(run_write(run, transition=SUSPENDED, waits=[wait(run, "1", run)])),
            patiently(two.accept, [incoming(run, run)], {}),
        )
        assert written is not None
        if run in written.refused:  # it found the event, and has it in its inbox
            reached = run in {item.run_id for item in await one.read_inboxes(worker.id)}
        else:  # the event found the wait, and made the run ready
            reached = run in {claimed.run_id for claimed in (await worker.claim()).runs}
        if not reached:
            missed.append(run)
    assert missed == []


async def test_events_of_one_key_appear_in_the_order_of_their_numbers(
    storages: tuple[MySQLStorage, MySQLStorage],
) -> None:
    seen: list[int] = []

    async def read() -> None:
        while len(seen) < 60:
            found: tuple[StoredEvent, ...] = await storages[0].events_under_key(
                key("paid"), seen[-1] if seen else 0, 100
            )
            seen.extend(event.seq for event in found)

    async def bring(storage: Storage, name: str) -> None:
        for n in range(30):
            await patiently(storage.accept, [incoming(f"{name}-{n}", "paid")], {})

    async with asyncio.timeout(60):
        await asyncio.gather(read(), bring(storages[0], "a"), bring(storages[1], "b"))
    assert len(set(seen)) == 60


async def test_an_event_after_the_start_of_a_run_is_found_whatever_number_its_node_gives_it(
    storages: tuple[MySQLStorage, MySQLStorage],
) -> None:
    one, two = storages
    worker = await worker_at(one, "worker-1")
    for n in range(20):
        run = f"run-{n}"
        await one.accept([incoming(f"before-{n}-{k}", f"other-{k}") for k in range(5)], {})
        await worker.write(new_run(run))
        await two.accept([incoming(f"after-{n}", run)], {})
        written = await worker.send(run_write(run, transition=SUSPENDED, waits=[wait(run, "1", run)]))
        assert written is not None
        assert written.refused == {RunId(run): frozenset({"1"})}


async def test_an_event_that_both_nodes_get_at_once_is_stored_once(
    storages: tuple[MySQLStorage, MySQLStorage],
) -> None:
    for n in range(30):
        accepted = await asyncio.gather(*(patiently(one.accept, [incoming(f"e{n}", "paid")], {}) for one in storages))
        assert sorted(len(one.new) for one in accepted) == [0, 1]


async def test_a_path_set_learned_at_one_node_turns_away_acceptors_of_the_other(
    storages: tuple[MySQLStorage, MySQLStorage],
) -> None:
    """Or the process that registers the match paths sees the stored events, and backfills their keys."""
    one, two = storages
    for n in range(25):
        kind = f"type-{n}"
        accepted, filled_from = await asyncio.gather(
            patiently(two.accept, [incoming(f"e{n}", type=kind)], {}),
            patiently(one.register_match_paths, kind, "shape"),
        )
        if accepted is not None:
            stored = await one.find_event(SOURCE, f"e{n}")
            assert stored is not None
            assert stored.seq <= filled_from


async def test_of_two_nodes_one_takes_a_message(storages: tuple[MySQLStorage, MySQLStorage]) -> None:
    await storages[0].accept([incoming(f"m{n}", exclusive=["jobs"]) for n in range(30)], {})
    taken = Counter[bytes]()

    async def take(storage: Storage) -> None:
        while (offer := await patiently(storage.take_message, key("jobs"), 10**9)) is not None:
            taken[offer.body] += 1

    async with asyncio.timeout(60):
        await asyncio.gather(*(take(one) for one in storages))
    assert taken == Counter(f"m{n}".encode() for n in range(30))


# Runs


async def test_a_worker_that_is_taken_over_at_the_other_node_claims_nothing(
    storages: tuple[MySQLStorage, MySQLStorage],
) -> None:
    one, two = storages
    heir = await worker_at(two, "heir")
    for n in range(25):
        lapsed = await worker_at(one, f"lapsed-{n}", LAPSED)
        await one.start([start(f"run-{n}")])
        await asyncio.gather(patiently(lapsed.claim), patiently(two.take_over, heir.id))
        assert await two.owned_runs(lapsed.id) == {} or await one.read_fence(lapsed.id) is not None
        while await two.take_over(heir.id):
            pass
        claimed = [run.run_id for run in (await patiently(heir.claim)).runs]
        assert claimed == [f"run-{n}"]


async def test_two_nodes_claim_each_run_once(storages: tuple[MySQLStorage, MySQLStorage]) -> None:
    workers = [await worker_at(storage, f"worker-{n}") for n, storage in enumerate(storages)]
    await storages[0].start([start(f"run-{n}") for n in range(60)])
    claimed = Counter[str]()

    async def claim(worker: Worker) -> None:
        while runs := (await patiently(worker.claim)).runs:
            claimed.update(run.run_id for run in runs)

    await asyncio.gather(*(claim(worker) for worker in workers))
    while sum(claimed.values()) < 60:
        await claim(workers[0])
    assert claimed == Counter(f"run-{n}" for n in range(60))


async def test_of_an_end_and_a_watcher_at_two_nodes_one_sees_the_other(
    storages: tuple[MySQLStorage, MySQLStorage],
) -> None:
    one, two = storages
    worker = await worker_at(one, "worker-1")
    await worker.write(new_run("watcher"))
    for n in range(25):
        run = RunId(f"run-{n}")
        await worker.write(new_run(run))
        written, record = await asyncio.gather(
            worker.send(run_write(run, transition=done(), signals=[end_signal("watcher", run.encode())])),
            two.add_watcher(run, EndWatcher(RunId("watcher"), run)),
        )
        assert written is not None
        assert record is not None
        assert (run in written.refused) is (record.ended_at is None)


async def test_a_step_is_recorded_before_its_run_is_taken_away_at_the_other_node_or_not_at_all(
    storages: tuple[MySQLStorage, MySQLStorage],
) -> None:
    one, two = storages
    owner, heir = await worker_at(one, "owner"), await worker_at(two, "heir")

    async def record(run: str, epoch: int) -> bool:
        shared = await one.begin()
        step = step_commit.StepCommitWrite(owner.id, RunId(run), epoch, 0, StepCommit("pay:1", 1, b"paid", 7))
        try:
            await step_commit.write_step_commit(shared, step)
            await shared.commit()
        except LeaseLostError:
            await shared.rollback()
            return False
        except Exception as error:
            await shared.rollback()
            if not is_conflict(error, "mysql"):
                raise
            return False
        return True

    async def steal(run: str, pause: float) -> tuple[StepCommit, ...]:
        await asyncio.sleep(pause)
        assert await patiently(two.release_run, RunId(run))
        while not (runs := (await patiently(heir.claim)).runs):
            pass
        found: tuple[StepCommit, ...] = runs[0].step_commits
        return found

    for n in range(30):
        run = f"run-{n}"
        await one.start([start(run)])
        (ours,) = (await patiently(owner.claim)).runs
        was_recorded, found = await asyncio.gather(record(run, ours.epoch), steal(run, n % 6 / 1000))
        assert bool(found) is was_recorded


async def test_a_batch_and_a_take_over_at_the_other_node_do_not_both_happen(
    storages: tuple[MySQLStorage, MySQLStorage],
) -> None:
    one, two = storages
    heir = await worker_at(two, "heir")
    for n in range(25):
        lapsed, run = await worker_at(one, f"lapsed-{n}", LAPSED), RunId(f"run-{n}")
        await lapsed.write(new_run(run))
        written, taken = await asyncio.gather(lapsed.send(run_write(run, entry(1))), patiently(two.take_over, heir.id))
        assert taken is not None
        (claimed,) = (await patiently(heir.claim)).runs
        assert len(claimed.entries) == (0 if written is None else 1)


async def test_relayers_of_two_nodes_send_the_events_of_one_key_in_order(
    storages: tuple[MySQLStorage, MySQLStorage],
) -> None:
    await storages[0].enqueue([outbox_event(f"{n:02}", f"key-{n % 3}") for n in range(30)])
    sent: list[tuple[str, str]] = []

    async def relay(storage: Storage, limit: int) -> None:
        while len(sent) < 30:
            for record in await patiently(storage.claim_outbox, limit, 10**9):
                sent.append((record.event.key, record.event.id))
                await patiently(storage.record_send_results, [Sent(record.seq)])

    async with asyncio.timeout(60):
        await asyncio.gather(relay(storages[0], 2), relay(storages[1], 3))
    assert sorted(id for _, id in sent) == [f"{n:02}" for n in range(30)]
    for name in ("key-0", "key-1", "key-2"):
        ids = [id for key, id in sent if key == name]
        assert ids == sorted(ids)


# The user's own transactions


@activity(retry_policy=RetryPolicy(max_attempts=1))
async def count_up(ctx: WorkflowContext) -> int:
    from sqlalchemy import text

    await ctx.session.execute(text("UPDATE counter SET v = v + 1 WHERE id = 1"))
    return 1


@workflow
async def counting(ctx: WorkflowContext) -> int:
    return sum([await count_up(ctx) for _ in range(5)])


async def test_rows_of_steps_at_two_nodes_that_meet_are_written_once(urls: tuple[str, str]) -> None:
    """All steps write one row, so that nearly every COMMIT conflicts; their retry policies allow one attempt."""
    apps = [EddaApp(f"node-{n}", url, workflows=[counting]) for n, url in enumerate(urls)]
    await apps[0].initialize()
    await apps[1].initialize()
    try:
        async with session_at(urls[0]) as session:
            await session.run(b"CREATE TABLE counter (id INT PRIMARY KEY, v INT NOT NULL)")
            await session.run(b"INSERT INTO counter VALUES (1, 0)")
            async with asyncio.timeout(90):
                assert await asyncio.gather(*(apps[n % 2].run(counting) for n in range(10))) == [5] * 10
            assert (await session.run(b"SELECT v FROM counter")).rows[0][0] == 50
    finally:
        for app in apps:
            await app.shutdown()


async def test_the_doctor_names_the_cluster(urls: tuple[str, str]) -> None:
    storage = MySQLStorage(urls[1], pool_size=1)
    await storage.open()
    try:
        found = await _check_cluster(storage)
    finally:
        await storage.close()
    assert found is not None
    assert (found.words, found.ok) == ("a node of a Galera cluster of 2, Primary", True)


# Groups of MySQL


def test_a_group_with_several_primaries_is_refused() -> None:
    settings = {"group_replication_single_primary_mode": "OFF", "group_replication_group_name": "aaaa"}
    with pytest.raises(StorageError, match="single-primary mode"):
        _refuse_group_replication(settings)
    _refuse_group_replication(settings | {"group_replication_single_primary_mode": "ON"})
    _refuse_group_replication(settings | {"group_replication_group_name": ""})
