"""An idle SQLite file: reads by the clock are answered from the cache until the next commit."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edda import EddaApp, WorkflowContext, wait_event, workflow
from edda.core.model import MICROSECONDS, RunId, SendLater, Sent, WorkerId
from edda.engine.settings import Settings
from edda.errors import StorageUnavailableError
from edda.storage.shared import step_commit
from edda.storage.sqlite import SQLiteStorage
from edda.storage.sqlite.locks import close_write_lock, open_write_lock
from edda.testing import VirtualClock
from edda.workflow.workflow import registry
from tests.engine.conditions import until, until_out_of_memory

from .probes import Listener, Trap
from .processes import PATIENCE, exists, opened
from .records import (
    HOUR,
    LAPSED,
    WORKFLOW,
    done,
    entry,
    incoming,
    key,
    new_run,
    next_generation,
    outbox_event,
    staged_event,
    start,
)
from .shared_transactions import transaction
from .worker import Worker

pytestmark = pytest.mark.databases("sqlite")

RESTLESS = Settings(
    heartbeat=0.1, sweep=0.1, orphan_sweep=60.0, poll=0.1, prune_every=0.1, run_retention_days=1, takeover_grace=0.0
)
"""Every loop runs many times a second, except the checks of owned and unclaimed runs once a minute."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return os.path.realpath(tmp_path / "edda.db")


@pytest.fixture
def probe() -> Trap:
    return Trap()


@pytest.fixture
async def storage(path: str, probe: Trap) -> AsyncIterator[SQLiteStorage]:
    storage = await opened(path, probe)
    yield storage
    await storage.close()


@pytest.fixture
async def worker(storage: SQLiteStorage) -> Worker:
    worker = Worker(storage, "here")
    await worker.register()
    return worker


async def fall_silent(probe: Listener) -> None:
    """Every loop reads once more after the last commit."""
    silent_since = time.monotonic()

    def is_silent() -> bool:
        nonlocal silent_since
        if probe.heard:
            probe.heard.clear()
            silent_since = time.monotonic()
        return time.monotonic() - silent_since > 1

    await until(is_silent, "nothing is said for a second")


async def test_workers_with_nothing_to_do_send_no_statement(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_workflows", {})
    probe = Listener()

    @workflow
    async def vigil(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "dawn")

    @workflow
    async def glance(ctx: WorkflowContext) -> None: ...

    def make_app() -> EddaApp:
        return EddaApp("shop", f"sqlite:///{path}", settings=RESTLESS, probe=probe)

    async with make_app() as app, make_app():
        await asyncio.gather(*(app.start(vigil) for _ in range(20)))
        await app.run(glance)
        await app.send_event("dusk", "/sky", {})
        await until_out_of_memory(app)
        await fall_silent(probe)
        worker = app.engine.worker
        assert worker is not None
        begun = worker.heartbeat.sent_at
        await until(lambda: worker.heartbeat.sent_at > begun + 2, "the heart has beaten for two seconds")
        assert {sql for _, sql in probe.heard} == set()


async def test_the_next_due_time_comes_nearer_without_a_statement(path: str) -> None:
    probe, clock = Listener(), VirtualClock()
    storage = SQLiteStorage(path, now=clock.now, probe=probe)
    await storage.open()
    await storage.migrate()
    await storage.start([start("run-1", ready_at=clock.now() + 10)])
    assert await storage.next_due([WORKFLOW]) == 10
    probe.heard.clear()
    clock.advance_to(clock.now() + 3)
    assert await storage.next_due([WORKFLOW]) == 7
    clock.advance_to(clock.now() + 9)
    assert await storage.next_due([WORKFLOW]) == 0
    assert probe.heard == []
    await storage.close()


async def test_other_names_are_another_question(storage: SQLiteStorage) -> None:
    await storage.start([start("run-1")])
    assert await storage.next_due(["unknown"]) is None
    assert await storage.next_due(["unknown", WORKFLOW]) == 0


async def test_cached_answers_are_dropped_with_the_next_commit_of_any_process(
    storage: SQLiteStorage, worker: Worker, path: str
) -> None:
    assert await storage.next_due([WORKFLOW]) is None
    await storage.start([start("run-1")])
    assert await storage.next_due([WORKFLOW]) == 0
    assert [run.run_id for run in (await worker.claim()).runs] == ["run-1"]
    assert await storage.next_due([WORKFLOW]) is None
    with sqlite3.connect(path) as stranger:
        stranger.execute("UPDATE edda_open_run SET owner = NULL, ready_at = 1")
    stranger.close()
    assert await storage.next_due([WORKFLOW]) == 0


async def test_what_was_answered_is_forgotten_in_memory_too() -> None:
    storage = await opened(":memory:")
    assert await storage.next_due([WORKFLOW]) is None
    await storage.start([start("run-1")])
    assert await storage.next_due([WORKFLOW]) == 0
    await storage.close()


async def test_what_was_answered_on_a_lost_connection_is_asked_again(storage: SQLiteStorage, probe: Trap) -> None:
    """A new connection counts commits from the start, so its number may be the old one by chance."""
    assert await storage.next_due([WORKFLOW]) is None
    probe.arm(0, StorageUnavailableError("cut"))
    with pytest.raises(StorageUnavailableError):
        await storage.get(RunId("run-1"))
    probe.heard.clear()
    assert await storage.next_due([WORKFLOW]) is None
    assert probe.heard != []


async def test_rows_too_young_to_be_pruned_are_searched_once(
    storage: SQLiteStorage, worker: Worker, probe: Trap
) -> None:
    await storage.accept([incoming("e-1", "order")], {})
    await worker.write(new_run("run-1", transition=done()))
    for prune in (storage.prune_events, storage.prune_inbox, storage.prune_runs):
        assert await prune(1_000, 10) == 0
        probe.heard.clear()
        assert await prune(9_000, 10) == 0
        assert probe.heard == []
    assert await storage.prune_runs(9_001, 10) == 1


async def test_a_generation_too_young_to_be_pruned_is_searched_once(
    storage: SQLiteStorage, worker: Worker, probe: Trap
) -> None:
    await worker.write(new_run("run-1", transition=next_generation(at=5_000)))
    assert await storage.prune_runs(1_000, 10) == 0
    probe.heard.clear()
    assert await storage.prune_runs(5_000, 10) == 0
    assert probe.heard == []
    assert await storage.prune_runs(5_001, 10) == 1
    assert await storage.prune_runs(5_001, 10) == 0
    probe.heard.clear()
    assert await storage.prune_runs(HOUR, 10) == 0
    assert probe.heard == []


# Side effects


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def on_time(path: str, probe: Trap, clock: VirtualClock) -> AsyncIterator[SQLiteStorage]:
    storage = SQLiteStorage(path, now=clock.now, probe=probe)
    await storage.open()
    await storage.migrate()
    yield storage
    await storage.close()


async def test_nothing_to_move_to_send_or_to_take_is_searched_once(storage: SQLiteStorage, probe: Trap) -> None:
    for _ in range(2):
        probe.heard.clear()
        assert await storage.staged_events(10) == ()
        assert await storage.next_outbox_due() is None
        assert await storage.claim_outbox(10, HOUR) == ()
        assert await storage.take_message(key("jobs"), HOUR) is None
        assert await storage.prune_outbox(LAPSED, 10) == 0
    assert probe.heard == []


async def test_an_event_that_is_not_due_to_be_sent_is_waited_for_without_asking(
    on_time: SQLiteStorage, probe: Trap, clock: VirtualClock
) -> None:
    await on_time.enqueue([outbox_event("o1"), outbox_event("o2")])
    first, second = await on_time.claim_outbox(10, HOUR)
    due = clock.now() + 10
    await on_time.record_send_results([Sent(second.seq), SendLater(first.seq, first.attempts, due, "busy")])
    assert await on_time.next_outbox_due() == 10
    probe.heard.clear()
    clock.advance_to(clock.now() + 9)
    assert await on_time.next_outbox_due() == 1
    assert await on_time.claim_outbox(10, HOUR) == ()
    assert probe.heard == []
    clock.advance_to(due)
    assert [record.event.id for record in await on_time.claim_outbox(10, HOUR)] == ["o1"]


async def test_an_event_behind_one_that_is_being_sent_delays_no_writer(
    storage: SQLiteStorage, probe: Trap, path: str
) -> None:
    await storage.enqueue([outbox_event("o1"), outbox_event("o2")])
    assert len(await storage.claim_outbox(1, HOUR)) == 1
    lock = open_write_lock(f"{path}.lock")
    with lock:
        assert await asyncio.wait_for(storage.claim_outbox(1, HOUR), PATIENCE) == ()
    close_write_lock(lock)


async def test_a_redelivery_that_is_not_due_needs_no_statement(
    on_time: SQLiteStorage, probe: Trap, clock: VirtualClock
) -> None:
    await on_time.accept([incoming("e1", exclusive=["jobs"])], {})
    taken = await on_time.take_message(key("jobs"), 10)
    assert taken is not None
    assert await on_time.staged_events(10) == ()
    probe.heard.clear()
    clock.advance_to(clock.now() + 9)
    assert await on_time.staged_events(10) == ()
    assert probe.heard == []
    clock.advance_to(clock.now() + 1)
    assert await on_time.staged_events(10) == (taken,)


async def test_side_effects_of_a_users_transaction_are_noticed_at_once(storage: SQLiteStorage) -> None:
    assert await storage.staged_events(10) == ()
    assert await storage.next_outbox_due() is None
    async with transaction(storage) as shared:
        await step_commit.stage_events(shared, [staged_event("a")])
        await step_commit.insert_outbox(shared, [outbox_event("o1")])
    assert len(await storage.staged_events(10)) == 1
    assert await storage.next_outbox_due() == 0


async def test_a_batch_without_side_effects_sends_no_statement_for_them(worker: Worker, probe: Trap) -> None:
    await worker.write(new_run("run-1", entry(1)))
    probe.heard.clear()
    await worker.write(new_run("run-2", entry(1), transition=done()))
    tables = ("edda_step_commit", "edda_staged_event", "edda_outbox", "edda_run_value", "edda_event_key", "edda_inbox")
    assert not [sql for _, sql in probe.heard if any(table in sql for table in tables)]


async def test_a_storage_that_was_closed_hears_notifications_on_another_loop(path: str) -> None:
    storage = SQLiteStorage(path)

    async def live() -> None:
        await storage.open()
        await storage.wait_for_notification(0.01)
        await storage.close()

    for _ in range(2):
        await asyncio.to_thread(asyncio.run, live())


# The lease


async def test_a_beat_asks_once_whether_the_worker_is_still_there(worker: Worker, probe: Trap) -> None:
    heartbeat = await worker.storage.open_heartbeat()
    assert await heartbeat.beat(worker.id, HOUR) is not None
    probe.heard.clear()
    assert await heartbeat.beat(worker.id, HOUR) is not None
    assert probe.heard == []
    await worker.write()
    probe.heard.clear()
    assert await heartbeat.beat(worker.id, HOUR) is not None
    assert [sql for when, sql in probe.heard if when == "before"] == ["SELECT 1 FROM edda_worker WHERE id = ?"]
    await worker.storage.remove_worker(worker.id)
    assert await heartbeat.beat(worker.id, HOUR) is None
    await heartbeat.close()


async def test_a_lease_is_kept_and_ends_on_the_clock_of_the_storage(path: str) -> None:
    clock = VirtualClock()
    storage = SQLiteStorage(path, now=clock.now)
    await storage.open()
    await storage.migrate()
    worker, taker = Worker(storage, "here"), WorkerId("taker")
    await worker.register(15 * MICROSECONDS)
    clock.advance_to(clock.now() + 14 * MICROSECONDS)
    assert await worker.beat(15 * MICROSECONDS) == clock.now()
    clock.advance_to(clock.now() + 15 * MICROSECONDS)
    assert [one.is_lapsed for one in await storage.registered_workers()] == [False]
    assert await storage.take_over(taker) is None
    clock.advance_to(clock.now() + 1)
    assert [one.is_lapsed for one in await storage.registered_workers()] == [True]
    assert await storage.take_over(taker) is not None
    await storage.close()


async def test_a_worker_whose_file_was_deleted_keeps_its_lease_in_its_row(
    storage: SQLiteStorage, path: str, worker: Worker
) -> None:
    await worker.beat(-HOUR)
    os.unlink(f"{path}.worker-here")
    assert await worker.beat() is not None
    assert await storage.take_over(WorkerId("taker")) is None
    await worker.beat(-HOUR)
    assert await storage.take_over(WorkerId("taker")) is not None
    assert not exists(f"{path}.worker-here")


async def test_a_file_that_cannot_be_renewed_is_named(
    worker: Worker, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: str, *, ns: tuple[int, int]) -> None:
        raise PermissionError(1, "not yours")

    monkeypatch.setattr(os, "utime", refuse)
    with pytest.raises(StorageUnavailableError, match=r"edda\.db\.worker-here: .*not yours"):
        await worker.beat()


async def test_a_heartbeat_does_not_wait_for_the_write_lock(worker: Worker, storage: SQLiteStorage, path: str) -> None:
    heartbeat = await storage.open_heartbeat()
    assert await heartbeat.beat(worker.id, HOUR) is not None
    lock = open_write_lock(f"{path}.lock")
    with lock:
        assert await asyncio.wait_for(heartbeat.beat(worker.id, HOUR), PATIENCE) is not None
    close_write_lock(lock)
    await heartbeat.close()
