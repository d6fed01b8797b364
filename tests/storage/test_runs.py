"""Starting, cancelling and reading runs, from any process."""

from __future__ import annotations

import asyncio

import pytest

from edda.core.model import CancelOutcome, EntryKind, RunFilter, RunId, RunRecord, Start, Suspend
from edda.core.states import RunStatus
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .records import LATER, WORKFLOW, done, entry, new_run, run_write, start
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")


# Starting


async def test_a_started_run_is_ready_and_has_no_owner(storage: Storage) -> None:
    assert await storage.start([Start(R1, WORKFLOW, b"input", 17, deadline=99)]) == {R1}
    run = await storage.get(R1)
    assert run is not None
    assert (run.run_id, run.workflow, run.generation, run.status) == (R1, WORKFLOW, 0, RunStatus.RUNNING)
    assert (run.input, run.created_at, run.deadline) == (b"input", 17, 99)
    assert (run.owner, run.reason, run.ended_at, run.value) == (None, None, None, None)
    assert run.ready_at is not None
    assert run.ready_at <= await storage.now()


async def test_a_run_may_be_started_for_later(storage: Storage) -> None:
    await storage.start([start("run-1", ready_at=LATER)])
    run = await storage.get(R1)
    assert run is not None
    assert run.ready_at == LATER


async def test_starting_nothing_is_fine(storage: Storage) -> None:
    assert await storage.start([]) == frozenset()


async def test_an_id_that_exists_is_not_started_again(storage: Storage) -> None:
    await storage.start([Start(R1, WORKFLOW, b"first", 1)])
    assert await storage.start([Start(R1, "other", b"second", 2), start("run-2")]) == {R2}
    run = await storage.get(R1)
    assert run is not None
    assert (run.workflow, run.input) == (WORKFLOW, b"first")


async def test_an_id_twice_in_one_call_is_started_once(storage: Storage, worker: Worker) -> None:
    assert await storage.start([start("run-1"), start("run-1")]) == {R1}
    assert len((await worker.claim()).runs) == 1


async def test_a_finished_run_is_not_started_again(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=done()))
    assert await storage.start([start("run-1")]) == frozenset()
    assert (await worker.claim()).runs == ()
    run = await storage.get(R1)
    assert run is not None
    assert run.status is RunStatus.COMPLETED


async def test_two_processes_starting_the_same_ids_start_each_once(storage: Storage, make_storage: MakeStorage) -> None:
    other = await make_storage()
    for attempt in range(5):
        ids = [f"run-{attempt}-{number}" for number in range(20)]
        one, two = await asyncio.gather(
            storage.start([start(run_id) for run_id in ids]),
            other.start([start(run_id) for run_id in reversed(ids)]),
        )
        assert one | two == set(ids)
        assert not one & two


# Cancelling


async def test_a_run_that_never_was_cannot_be_cancelled(storage: Storage) -> None:
    assert await storage.cancel(R1, b"stop") is CancelOutcome.MISSING


async def test_an_ended_run_cannot_be_cancelled(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=done()))
    assert await storage.cancel(R1, b"stop") is CancelOutcome.ENDED


async def test_a_cancel_is_inbox_for_the_owner(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    before = await storage.now()
    assert await storage.cancel(R1, b"stop") is CancelOutcome.REQUESTED
    (item,) = await storage.read_inboxes(worker.id)
    assert (item.run_id, item.inbox_no, item.kind, item.step, item.value) == (
        R1,
        1,
        EntryKind.CANCEL,
        "",
        b"stop",
    )
    assert before <= item.at <= await storage.now()
    assert await storage.owned_runs(worker.id) == {R1: 1}


async def test_a_cancel_wakes_a_resting_run(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=Suspend(0, None, RunStatus.WAITING_FOR_EVENT, "order.paid")))
    assert await storage.cancel(R1, b"stop") is CancelOutcome.REQUESTED
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.ready_at, run.reason) == (RunStatus.RUNNING, 0, None)
    assert [run.run_id for run in (await worker.claim()).runs] == [R1]


async def test_a_run_is_cancelled_once(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    assert await storage.cancel(R1, b"first") is CancelOutcome.REQUESTED
    assert await storage.cancel(R1, b"second") is CancelOutcome.ALREADY
    assert [item.value for item in await storage.read_inboxes(worker.id)] == [b"first"]


async def test_of_two_cancels_at_once_one_wins(storage: Storage, make_storage: MakeStorage, worker: Worker) -> None:
    other = await make_storage()
    for number in range(5):
        run = RunId(f"run-{number}")
        await worker.write(new_run(run))
        outcomes = await asyncio.gather(storage.cancel(run, b"one"), other.cancel(run, b"two"))
        assert sorted(outcomes) == [CancelOutcome.ALREADY, CancelOutcome.REQUESTED]
    assert len(await storage.read_inboxes(worker.id)) == 5


async def test_a_cancel_and_a_release_at_once_leave_no_sleeping_item(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    for number in range(10):
        run = RunId(f"run-{number}")
        await worker.write(new_run(run))
        rest = run_write(run, transition=Suspend(0, None, RunStatus.WAITING_FOR_EVENT))
        await asyncio.gather(worker.write(rest), other.cancel(run, b"stop"))
        record = await storage.get(run)
        assert record is not None
        assert (record.owner, record.ready_at, record.status) == (None, 0, RunStatus.RUNNING)


# Reading


async def test_what_does_not_exist_is_not_found(storage: Storage) -> None:
    assert await storage.get(R1) is None
    assert await storage.history(R1) == ()
    assert await storage.history(R1, 3) == ()
    assert await storage.find(RunFilter()) == ()


async def test_the_history_of_a_generation_is_asked_for_by_number(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1)))
    assert await storage.history(R1, 0) == (entry(1),)
    assert await storage.history(R1, 1) == ()


@pytest.mark.parametrize(
    "status",
    [
        RunStatus.WAITING_FOR_EVENT,
        RunStatus.WAITING_FOR_TIMER,
        RunStatus.WAITING_FOR_MESSAGE,
        RunStatus.WAITING_FOR_CHILD,
        RunStatus.PARKED,
    ],
)
async def test_a_resting_run_counts_as_running_once_it_is_due(
    storage: Storage, worker: Worker, status: RunStatus
) -> None:
    await worker.write(
        new_run("due", transition=Suspend(0, 1, status)),
        new_run("later", transition=Suspend(0, LATER, status)),
        new_run("never", transition=Suspend(0, None, status)),
    )
    assert {run.run_id: run.status for run in await storage.find(RunFilter())} == {
        "due": RunStatus.RUNNING,
        "later": status,
        "never": status,
    }
    due = await storage.get(RunId("due"))
    assert due is not None
    assert due.status is RunStatus.RUNNING
    assert await found(storage, RunFilter(status=status)) == ["never", "later"]
    assert await found(storage, RunFilter(status=RunStatus.RUNNING)) == ["due"]


async def test_a_compensating_run_stays_compensating(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=Suspend(0, 1, RunStatus.COMPENSATING)))
    run = await storage.get(R1)
    assert run is not None
    assert run.status is RunStatus.COMPENSATING
    assert await found(storage, RunFilter(status=RunStatus.COMPENSATING)) == ["run-1"]


async def found(storage: Storage, filter: RunFilter) -> list[str]:
    return [run.run_id for run in await storage.find(filter)]


async def test_runs_are_found_newest_first(storage: Storage) -> None:
    await storage.start([start("b", created_at=2), start("a", created_at=2), start("c", created_at=1)])
    await storage.start([start("d", created_at=3)])
    assert await found(storage, RunFilter()) == ["d", "b", "a", "c"]


async def test_a_found_run_is_the_run_one_gets(storage: Storage, worker: Worker) -> None:
    await worker.write(
        new_run("open"),
        new_run("asleep", transition=Suspend(0, LATER, RunStatus.WAITING_FOR_TIMER, "sleeps")),
        new_run("done", transition=done()),
    )
    await storage.start([start("ready")])
    runs = await storage.find(RunFilter())
    assert len(runs) == 4
    assert list(runs) == [await storage.get(run.run_id) for run in runs]


async def test_pages_follow_each_other_without_gap_or_overlap(storage: Storage) -> None:
    await storage.start([start(f"run-{number:02}", created_at=number // 4) for number in range(22)])
    pages: list[RunRecord] = []
    filter = RunFilter(limit=5)
    while page := await storage.find(filter):
        pages.extend(page)
        filter = RunFilter(limit=5, before=(page[-1].created_at, page[-1].run_id))
    assert [run.run_id for run in pages] == [f"run-{number:02}" for number in reversed(range(22))]


async def test_runs_are_found_by_workflow(storage: Storage) -> None:
    await storage.start([start("a", workflow="one"), start("b", workflow="two")])
    assert await found(storage, RunFilter(workflow="two")) == ["b"]
    assert await found(storage, RunFilter(workflow="three")) == []


async def test_runs_are_found_by_the_time_of_their_start(storage: Storage) -> None:
    await storage.start([start(f"run-{at}", created_at=at) for at in (10, 20, 30, 40)])
    assert await found(storage, RunFilter(created_from=20)) == ["run-40", "run-30", "run-20"]
    assert await found(storage, RunFilter(created_to=30)) == ["run-20", "run-10"]
    assert await found(storage, RunFilter(created_from=15, created_to=35)) == ["run-30", "run-20"]


async def test_runs_are_found_by_their_result(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("open"), new_run("done", transition=done()))
    assert await found(storage, RunFilter(status=RunStatus.COMPLETED)) == ["done"]
    assert await found(storage, RunFilter(status=RunStatus.RUNNING)) == ["open"]
    assert await found(storage, RunFilter(status=RunStatus.FAILED)) == []


async def test_filters_and_pages_go_together(storage: Storage, worker: Worker) -> None:
    await worker.write(*(new_run(f"done-{number}", transition=done()) for number in range(6)))
    await storage.start([start(f"open-{number}", workflow="other") for number in range(6)])
    filter = RunFilter(status=RunStatus.COMPLETED, workflow=WORKFLOW, limit=4)
    first = await storage.find(filter)
    assert [run.run_id for run in first] == ["done-5", "done-4", "done-3", "done-2"]
    rest = RunFilter(
        status=RunStatus.COMPLETED, workflow=WORKFLOW, limit=4, before=(first[-1].created_at, first[-1].run_id)
    )
    assert await found(storage, rest) == ["done-1", "done-0"]
