"""Figures of the whole: workers, backlog, throughput, latency, and the change token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from edda.core.model import End, Rejected, RunId, WorkerInfo
from edda.core.queries import Audit, Backlog, Definition, EventSchema, Latency, TimeBucket
from edda.core.states import RunStatus
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .conftest import MakeWorker
from .records import (
    HOUR,
    LAPSED,
    LATER,
    done,
    ended,
    entry,
    incoming,
    new_run,
    next_generation,
    outbox_event,
    parked,
    run_write,
    staged_event,
    start,
    suspended,
)
from .worker import Worker

R1 = RunId("run-1")


# Workers


async def test_without_workers_the_crew_is_empty(storage: Storage) -> None:
    assert await storage.list_workers() == ()


async def test_list_workers_counts_the_runs_of_each(storage: Storage, make_worker: MakeWorker) -> None:
    before = await storage.now()
    one = await make_worker("one")
    two = await make_worker("two", LAPSED)
    await one.write(new_run("run-1"), new_run("run-2"), new_run("run-3", transition=suspended()))
    records = {record.info.id: record for record in await storage.list_workers()}
    assert records.keys() == {one.id, two.id}
    first, second = records[one.id], records[two.id]
    assert first.info == WorkerInfo(one.id, "shop", "host", 4711)
    assert (first.runs, first.is_lapsed) == (2, False)
    assert (second.runs, second.is_lapsed) == (0, True)
    now = await storage.now()
    assert before <= first.started_at <= second.started_at <= now
    assert before + HOUR <= first.expires_at <= now + HOUR
    assert second.expires_at < now


async def test_the_newest_of_the_crew_comes_first_and_who_left_is_gone(
    storage: Storage, make_worker: MakeWorker
) -> None:
    for name in ("c", "a", "b"):
        await make_worker(name)
    records = await storage.list_workers()
    assert [record.started_at for record in records] == sorted((r.started_at for r in records), reverse=True)
    await storage.remove_worker(records[0].info.id)
    assert await storage.list_workers() == records[1:]


async def test_a_heartbeat_prolongs_the_lease_that_is_seen(storage: Storage, worker: Worker) -> None:
    (before,) = await storage.list_workers()
    await worker.beat(lease=3 * HOUR)
    (after,) = await storage.list_workers()
    assert after.expires_at >= before.expires_at + HOUR


# The backlog


async def test_nothing_to_do_is_a_backlog_of_zeros(storage: Storage) -> None:
    assert await storage.backlog() == Backlog(0, None, 0, None, 0, 0, 0, None, 0)


async def test_the_backlog_counts_ready_and_waiting_runs(storage: Storage, worker: Worker) -> None:
    await storage.start([start("r1", ready_at=5_000), start("r2", ready_at=7_000), start("r3", ready_at=LATER)])
    await worker.write(
        new_run("mine"),
        new_run("w1", transition=suspended()),
        new_run("w2", transition=suspended(status=RunStatus.WAITING_FOR_CHILD)),
        new_run("due", transition=replace(suspended(), ready_at=6_000)),
        new_run("p1", transition=parked()),
        new_run("p2", transition=parked(ready_at=8_000)),
        new_run("undoing", transition=suspended(), compensating=True),
    )
    backlog = await storage.backlog()
    assert (backlog.ready, backlog.oldest_ready) == (4, 5_000)
    assert (backlog.waiting, backlog.oldest_wait) == (2, 1_000)
    assert backlog.parked == 1


async def test_a_run_with_inbox_is_ready_since_its_inbox_came(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=suspended()))
    before = await storage.now()
    await storage.cancel(R1, b"stop")
    backlog = await storage.backlog()
    assert backlog.oldest_ready is not None
    assert backlog.ready == 1
    assert before <= backlog.oldest_ready <= await storage.now()


async def test_a_run_that_was_resumed_is_ready_since_its_beginning(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=parked()))
    assert await storage.resume(R1)
    assert (await storage.backlog()).oldest_ready == 1_000


async def test_the_backlog_counts_outbox_and_staged_events(storage: Storage, worker: Worker) -> None:
    await storage.enqueue([replace(outbox_event("o1"), created_at=10), replace(outbox_event("o2", "b"), created_at=20)])
    await storage.enqueue([replace(outbox_event("o3", "c"), created_at=30)])
    (first, *_) = await storage.claim_outbox(10, HOUR)
    await storage.record_send_results([Rejected(first.seq, 1, "no")])
    await worker.write(new_run("run-1"))
    await worker.write(run_write("run-1", staged_events=[staged_event("a"), staged_event("b")]))
    backlog = await storage.backlog()
    assert (backlog.outbox_pending, backlog.outbox_dead, backlog.oldest_outbox) == (2, 1, 20)
    assert backlog.staged_events == 2


# Throughput and latency


async def test_where_nothing_happened_there_are_empty_buckets(storage: Storage) -> None:
    assert await storage.throughput(100, 10, 3) == (TimeBucket(100), TimeBucket(110), TimeBucket(120))
    assert await storage.throughput(100, 10, 0) == ()
    assert await storage.latency(0, 100) == Latency(0, 0, 0)


async def test_buckets_count_started_and_ended_runs(storage: Storage, worker: Worker) -> None:
    await storage.start([start(f"s{at}", created_at=at) for at in (99, 100, 109, 110, 129, 130)])
    await worker.write(
        new_run("d1", transition=ended(RunStatus.COMPLETED, 100)),
        new_run("d2", transition=ended(RunStatus.COMPLETED, 109)),
        new_run("d3", transition=ended(RunStatus.COMPLETED, 130)),
        new_run("f1", transition=ended(RunStatus.FAILED, 120)),
        new_run("c1", transition=ended(RunStatus.CANCELLED, 129)),
        new_run("c2", transition=ended(RunStatus.CANCELLED, 99)),
    )
    assert await storage.throughput(100, 10, 3) == (
        TimeBucket(100, started=2, completed=2),
        TimeBucket(110, started=1),
        TimeBucket(120, started=1, failed=1, cancelled=1),
    )


async def test_a_generation_that_follows_another_was_not_started(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=next_generation(at=1_005)))
    assert await storage.throughput(1_000, 10, 1) == (TimeBucket(1_000, started=1),)


async def test_latency_is_that_of_the_runs_that_ended_last(storage: Storage, worker: Worker) -> None:
    await worker.write(*(new_run(f"run-{n}", transition=ended(RunStatus.COMPLETED, 1_000 + n)) for n in range(1, 101)))
    assert await storage.latency(0, 1_000) == Latency(100, 50, 95)
    assert await storage.latency(0, 5) == Latency(5, 98, 100)
    assert await storage.latency(1_098, 1_000) == Latency(3, 99, 100)
    assert await storage.latency(2_000, 1_000) == Latency(0, 0, 0)


async def test_latency_counts_from_the_generation_that_ended(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=next_generation(at=5_000)))
    await worker.write(run_write("run-1", generation=1, transition=ended(RunStatus.FAILED, 5_007)))
    assert await storage.latency(0, 10) == Latency(1, 7, 7)


# The change token


async def test_the_mark_stays_while_nothing_happens(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    mark = await storage.change_token()
    await storage.get(R1)
    await storage.backlog()
    assert await storage.change_token() == mark


CHANGES: dict[str, Callable[[Storage, Worker], Awaitable[object]]] = {
    "a run is started": lambda s, w: s.start([start("new")]),
    "a run is claimed": lambda s, w: w.claim(),
    "a run is cancelled": lambda s, w: s.cancel(R1, b"stop"),
    "a resting run is cancelled": lambda s, w: s.cancel(RunId("asleep"), b"stop"),
    "a run goes on": lambda s, w: w.write(run_write("run-1", entry(1))),
    "a run ends": lambda s, w: w.write(run_write("run-1", transition=End(RunStatus.FAILED, b"", 1))),
    "a run is resumed": lambda s, w: s.resume(RunId("parked")),
    "a run is opened again": lambda s, w: s.reopen(RunId("done"), 0, 0),
    "a run is deleted": lambda s, w: s.delete(RunId("done")),
    "an event comes": lambda s, w: s.accept([incoming("e1")], {}),
    "an event is to be sent": lambda s, w: s.enqueue([outbox_event("o1")]),
    "a worker leaves": lambda s, w: s.remove_worker(w.id),
    "somebody does something": lambda s, w: s.add_audit(Audit(1, "me", "cancel", "run-1")),
    "there is new code": lambda s, w: s.save_definitions([Definition("new", "shop", b"{}", 1)], []),
    "the code is another": lambda s, w: s.save_definitions([Definition("order", "shop", b"{}", 4)], []),
    "there is a new form": lambda s, w: s.save_definitions([], [EventSchema("order", "refunded", b"{}")]),
    "a form is another": lambda s, w: s.save_definitions([], [EventSchema("order", "paid", b'{"a": 2}')]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("who", ["we", "another process"])
async def test_the_mark_changes_as_soon_as(
    storage: Storage, make_storage: MakeStorage, worker: Worker, change: str, who: str
) -> None:
    await worker.write(
        new_run("run-1"),
        new_run("asleep", transition=suspended()),
        new_run("parked", transition=parked()),
        new_run("done", transition=done()),
    )
    await storage.start([start("ready")])
    await storage.save_definitions([Definition("order", "shop", b"{}", 5)], [EventSchema("order", "paid", b'{"a": 1}')])
    other = storage if who == "we" else await make_storage()
    mark = await other.change_token()
    assert await other.change_token() == mark
    await CHANGES[change](storage, worker)
    assert await other.change_token() != mark


async def test_the_mark_changes_when_a_worker_comes(storage: Storage, make_worker: MakeWorker) -> None:
    mark = await storage.change_token()
    await make_worker("worker-1")
    assert await storage.change_token() != mark
