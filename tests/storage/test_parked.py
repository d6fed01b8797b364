"""Parked runs: inbox items leave them parked, a cancel makes them due, and new workers try them with pauses."""

from __future__ import annotations

import pytest

from edda.core.model import BatchResult, CancelOutcome, Crashes, EntryKind, RunId, Suspend, unpark_pause
from edda.core.queries import RunQuery
from edda.core.states import RunStatus
from edda.storage.ports import Storage

from .records import LATER, WORKFLOW, entry, incoming, new_run, run_write, wait
from .worker import Worker

R1 = RunId("run-1")
PARKED = Suspend(0, LATER, RunStatus.PARKED, "the code changed")
STATE = (RunStatus.PARKED, LATER, "the code changed")


async def state(storage: Storage) -> tuple[RunStatus, int | None, str | None]:
    record = await storage.get(R1)
    assert record is not None
    return record.status, record.ready_at, record.reason


async def test_a_run_with_unread_items_is_parked(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"stop")
    assert await worker.send(run_write("run-1", transition=PARKED)) == BatchResult()
    assert await state(storage) == STATE
    assert (await worker.claim()).runs == ()
    assert await storage.next_due([WORKFLOW]) not in (None, 0)


async def test_an_event_leaves_a_parked_run_parked(storage: Storage, worker: Worker) -> None:
    await worker.write(
        new_run("run-1", waits=[wait("run-1", "step1", "a")], transition=Suspend(0, 0, RunStatus.WAITING_FOR_EVENT))
    )
    (claimed,) = (await worker.claim()).runs
    await worker.write(run_write("run-1", transition=PARKED, epoch=claimed.epoch))
    accepted = await storage.accept([incoming("e-1", "a")], {})
    assert accepted is not None
    assert await state(storage) == STATE
    assert await storage.resume(R1)
    (claimed,) = (await worker.claim()).runs
    assert [item.event is not None for item in claimed.inbox] == [True]


async def test_a_cancel_has_a_parked_run_tried_at_once_and_ended_if_that_fails(
    storage: Storage, worker: Worker
) -> None:
    await worker.write(new_run("run-1", transition=PARKED))
    assert await storage.cancel(R1, b"stop") is CancelOutcome.REQUESTED
    assert await storage.cancel(R1, b"stop") is CancelOutcome.ALREADY
    assert await storage.next_due([WORKFLOW]) == 0
    (claimed,) = (await worker.claim()).runs
    assert claimed.end_if_parked
    assert [item.kind for item in claimed.inbox] == [EntryKind.CANCEL]
    await worker.write(run_write("run-1", transition=Suspend(0, LATER, RunStatus.PARKED, "still"), epoch=claimed.epoch))
    assert await storage.resume(R1)
    (claimed,) = (await worker.claim()).runs
    assert claimed.end_if_parked, "whoever parks it once more ends it"
    await worker.write(
        run_write("run-1", entry(1, n=1), transition=Suspend(1, 0, RunStatus.WAITING_FOR_TIMER), epoch=claimed.epoch)
    )
    (claimed,) = (await worker.claim()).runs
    assert not claimed.end_if_parked, "it went on"


async def test_a_run_cancelled_before_it_was_parked_can_be_cancelled_again(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    assert not await has_cancel(storage)
    assert await storage.cancel(R1, b"stop") is CancelOutcome.REQUESTED
    await worker.write(run_write("run-1", transition=PARKED))
    assert await has_cancel(storage)
    assert await storage.cancel(R1, b"again") is CancelOutcome.REQUESTED
    assert not await has_cancel(storage), "it ends now"
    (claimed,) = (await worker.claim()).runs
    assert claimed.end_if_parked
    assert [item.value for item in claimed.inbox] == [b"stop"], "a cancel goes in once"


async def has_cancel(storage: Storage) -> bool:
    """Whether both ways to read the run show a stored cancel."""
    record, (found,) = await storage.get(R1), await storage.search(RunQuery())
    assert record is not None
    assert record.has_cancel is found.has_cancel
    return record.has_cancel


async def test_a_cancel_leaves_a_run_parked_that_compensates_what_it_did(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await worker.write(run_write("run-1", transition=PARKED, compensating=True))
    assert await storage.cancel(R1, b"stop") is CancelOutcome.REQUESTED
    assert await state(storage) == STATE
    assert (await worker.claim()).runs == ()


async def test_what_is_parked_without_a_time_is_resumed_by_hand_alone(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await worker.write(run_write("run-1", transition=Suspend(0, None, RunStatus.PARKED, "its process dies")))
    assert await storage.wake_parked([WORKFLOW]) == 0
    assert (await worker.claim()).runs == ()
    assert await storage.resume(R1)
    (claimed,) = (await worker.claim()).runs
    assert claimed.crashes == Crashes()


async def test_new_workers_do_not_try_a_run_that_was_parked_just_now_again_and_again(
    storage: Storage, worker: Worker
) -> None:
    await worker.write(new_run("run-1"))
    tries, epoch = 0, 1
    for _ in range(12):
        await worker.write(run_write("run-1", transition=PARKED, epoch=epoch))
        await storage.wake_parked([WORKFLOW])
        claimed = (await worker.claim()).runs
        if not claimed:
            break
        tries, epoch = tries + 1, claimed[0].epoch
    assert 2 <= tries <= 7
    rest = await storage.next_due([WORKFLOW])
    assert rest is not None
    assert 0 < rest <= unpark_pause(tries + 1)


@pytest.mark.parametrize("attempts", [1, 2, 3, 8, 100])
def test_the_pause_of_new_workers_grows_and_has_an_end(attempts: int) -> None:
    assert (unpark_pause(attempts) == 0) is (attempts < 3)
    assert unpark_pause(attempts) <= 25_600_000
