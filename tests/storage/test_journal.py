"""The journal: a batch is written whole, if the fence is unchanged, or not at all."""

from __future__ import annotations

import pytest

from edda.core.model import AckInbox, BatchResult, End, Entry, EntryKind, Fence, RunId, RunWrite, Suspend, WorkerId
from edda.core.states import RunStatus
from edda.errors import StorageRejectedError
from edda.storage.ports import Storage

from .conftest import MakeWorker
from .records import LATER, done, entry, new_run, run_write, start
from .worker import Worker

R1, R2, R3 = RunId("run-1"), RunId("run-2"), RunId("run-3")
WAITING = Suspend(0, LATER, RunStatus.WAITING_FOR_TIMER, "sleeps")
PARKED = Suspend(0, LATER, RunStatus.PARKED, "the code changed")


# The fence


async def test_a_batch_raises_the_number_of_its_fence(storage: Storage, worker: Worker) -> None:
    assert await worker.write(new_run("run-1")) == frozenset()
    assert await storage.read_fence(worker.id) == Fence(worker.id, 1, 0)


async def test_an_empty_batch_counts_too(storage: Storage, worker: Worker) -> None:
    assert await worker.write() == frozenset()
    assert await storage.read_fence(worker.id) == Fence(worker.id, 1, 0)


@pytest.mark.parametrize(("batch_no", "ownership_version"), [(0, 0), (2, 0), (1, 1), (0, 1)])
async def test_a_batch_with_another_fence_than_the_stored_one_is_not_written(
    storage: Storage, worker: Worker, batch_no: int, ownership_version: int
) -> None:
    await worker.write(new_run("run-1"))
    stale = Fence(worker.id, batch_no, ownership_version)
    assert await storage.write(stale, [run_write("run-1", entry(1)), new_run("run-2")]) is None
    assert await storage.read_fence(worker.id) == Fence(worker.id, 1, 0)
    assert await storage.history(R1) == ()
    assert await storage.get(R2) is None


async def test_a_batch_leaves_its_token_and_is_written_after_the_token_before_it_only(
    storage: Storage, worker: Worker
) -> None:
    """The number of the batch alone would also fit the batch of a cloned process."""
    assert await storage.write(worker.fence, [new_run("run-1")], 17) == BatchResult()
    assert await storage.read_fence(worker.id) == Fence(worker.id, 1, 0, 17)
    for batch in ([run_write("run-1", entry(1))], [run_write("run-1", entry(1)), new_run("run-2")], []):
        assert await storage.write(Fence(worker.id, 1, 0, 18), batch, 19) is None
    assert await storage.read_fence(worker.id) == Fence(worker.id, 1, 0, 17)
    assert await storage.history(R1) == ()
    assert await storage.write(Fence(worker.id, 1, 0, 17), [run_write("run-1", entry(1))], 19) == BatchResult()
    assert await storage.read_fence(worker.id) == Fence(worker.id, 2, 0, 19)


async def test_a_batch_is_not_written_to_a_database_that_lost_a_claim_of_its_worker(
    storage: Storage, worker: Worker
) -> None:
    await worker.write(new_run("run-1"))
    claimed = await worker.claim()
    assert claimed.number == 1
    assert await storage.write(Fence(worker.id, 1, 0, claims=2), [run_write("run-1", entry(1))]) is None
    assert await storage.history(R1) == ()
    assert await storage.write(Fence(worker.id, 1, 0, claims=1), [run_write("run-1", entry(1))]) == BatchResult()


async def test_a_worker_without_a_fence_row_writes_nothing(storage: Storage) -> None:
    nobody = Fence(WorkerId("nobody"), 0, 0)
    assert await storage.read_fence(nobody.worker) is None
    assert await storage.write(nobody, [new_run("run-1", entry(1), transition=done())]) is None
    assert await storage.get(R1) is None
    assert await storage.history(R1) == ()


async def test_a_batch_sent_again_is_in_once(storage: Storage, worker: Worker) -> None:
    batch = [new_run("run-1", entry(1))]
    before = worker.fence
    assert await storage.write(before, batch) == BatchResult()
    assert await storage.write(before, batch) is None
    assert await storage.read_fence(worker.id) == Fence(worker.id, 1, 0)
    assert await storage.history(R1) == (entry(1),)


# Starting


async def test_a_run_created_in_a_batch_is_owned_by_its_writer(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    assert await storage.owned_runs(worker.id) == {R1: 1}
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.owner, run.ready_at, run.input) == (RunStatus.RUNNING, worker.id, None, b"input of run-1")


async def test_a_run_without_an_owner_is_ready_at_its_time(storage: Storage, worker: Worker) -> None:
    await worker.write(
        run_write("run-1", start=start("run-1", ready_at=5), epoch=0),
        run_write("run-2", start=start("run-2", ready_at=LATER), epoch=0),
    )
    assert await storage.owned_runs(worker.id) == {}
    run = await storage.get(R2)
    assert run is not None
    assert (run.status, run.owner, run.ready_at) == (RunStatus.RUNNING, None, LATER)
    assert [(claimed.run_id, claimed.epoch) for claimed in (await worker.claim()).runs] == [(R1, 1)]


async def test_a_run_may_start_with_history(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1), entry(2), transition=AckInbox(0)))
    assert await storage.owned_runs(worker.id) == {R1: 1}
    assert await storage.history(R1) == (entry(1), entry(2))


async def test_a_run_may_start_and_end_in_one_batch(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1), transition=done(b"42")))
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.value, run.ended_at, run.owner) == (RunStatus.COMPLETED, b"42", 9_000, None)
    assert await storage.owned_runs(worker.id) == {}
    assert await storage.next_due([run.workflow]) is None
    assert await storage.history(R1) == (entry(1),)


async def test_a_run_may_start_and_go_to_sleep_in_one_batch(storage: Storage, worker: Worker) -> None:
    assert await worker.write(new_run("run-1", entry(1), transition=WAITING)) == frozenset()
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.owner, run.ready_at, run.reason) == (
        RunStatus.WAITING_FOR_TIMER,
        None,
        LATER,
        "sleeps",
    )
    assert await storage.history(R1) == (entry(1),)


async def test_a_run_that_slept_from_its_first_batch_on_is_claimed_under_the_next_epoch(
    storage: Storage, worker: Worker
) -> None:
    await worker.write(new_run("run-1", transition=Suspend(0, 0, RunStatus.WAITING_FOR_TIMER)))
    (run,) = (await worker.claim()).runs
    assert run.epoch == 2


# History and transitions of an owned run


async def test_history_grows_entry_by_entry(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await worker.write(run_write("run-1", entry(1)))
    await worker.write(run_write("run-1", entry(2)))
    assert await storage.history(R1) == (entry(1), entry(2))


async def test_history_is_read_in_pieces_or_of_one_step(storage: Storage, worker: Worker) -> None:
    lines = tuple(entry(seq) for seq in range(1, 8))
    await worker.write(new_run("run-1", *lines), new_run("run-2", entry(1)))
    assert await storage.history(R1, 0, limit=3) == lines[:3]
    assert await storage.history(R1, after=3, limit=3) == lines[3:6]
    assert await storage.history(R1, after=6, limit=3) == lines[6:]
    assert await storage.history(R1, after=2**62) == ()
    assert await storage.history(R1, step="step5") == lines[4:5]
    assert await storage.history(R1, step="step5", after=5) == ()
    assert await storage.history(R1, step="step50") == ()


async def test_one_batch_carries_many_runs_with_many_entries(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{number}" for number in range(30)]
    entries = [entry(seq, value=b"x" * seq) for seq in range(1, 21)]
    await worker.write(*(new_run(run) for run in runs))
    await worker.write(*(run_write(run, *entries) for run in runs))
    for run in runs:
        assert await storage.history(RunId(run)) == tuple(entries)


async def test_every_form_of_write_fits_into_one_batch(storage: Storage, worker: Worker) -> None:
    await worker.write(*(new_run(f"old-{number}") for number in range(5)))
    await storage.cancel(RunId("old-3"), b"stop")
    again = await worker.write(
        run_write("old-0", entry(1)),
        run_write("old-1", entry(1), transition=AckInbox(0)),
        run_write("old-2", entry(1), transition=WAITING),
        run_write("old-3", entry(1), transition=WAITING),
        run_write("old-4", entry(1), transition=done()),
        new_run("new-0", entry(1)),
        new_run("new-1", entry(1), transition=WAITING),
        new_run("new-2", entry(1), transition=done()),
        run_write("new-3", start=start("new-3", ready_at=LATER), epoch=0),
    )
    assert again == frozenset({RunId("old-3")})
    assert await storage.owned_runs(worker.id) == {RunId("old-0"): 1, RunId("old-1"): 1, RunId("new-0"): 1}
    for run in ("old-0", "old-1", "old-2", "old-3", "old-4", "new-0", "new-1", "new-2"):
        assert await storage.history(RunId(run)) == (entry(1),)


async def test_an_entry_comes_back_as_it_was(storage: Storage, worker: Worker) -> None:
    entries = tuple(
        Entry(seq, kind, f"{seq}.{kind}", "näme", ok=seq % 2 == 0, at=seq, attempt=seq * 3, inbox_no=None)
        for seq, kind in enumerate(EntryKind, start=1)
    )
    await worker.write(new_run("run-1", *entries))
    assert await storage.history(R1) == entries


async def test_what_is_read_is_not_inbox_any_more(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"stop")
    assert [item.inbox_no for item in await storage.read_inboxes(worker.id)] == [1]
    await worker.write(run_write("run-1", entry(1, n=1), transition=AckInbox(1)))
    assert await storage.read_inboxes(worker.id) == ()
    assert await storage.history(R1) == (entry(1, n=1),)


# Suspending


async def test_a_released_run_rests_until_its_time(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    assert await worker.write(run_write("run-1", entry(1), transition=WAITING)) == frozenset()
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.owner, run.ready_at, run.reason) == (RunStatus.WAITING_FOR_TIMER, None, LATER, "sleeps")
    assert await storage.owned_runs(worker.id) == {}
    assert (await worker.claim()).runs == ()


async def test_a_run_may_rest_without_a_time(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await worker.write(run_write("run-1", transition=Suspend(0, None, RunStatus.WAITING_FOR_EVENT, "order.paid")))
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.ready_at, run.reason) == (RunStatus.WAITING_FOR_EVENT, None, "order.paid")
    assert (await worker.claim()).runs == ()
    assert await storage.next_due([run.workflow]) is None


async def test_a_run_with_unread_inbox_is_ready_again_at_once(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    await storage.cancel(R1, b"stop")
    assert await worker.write(
        run_write("run-1", entry(1), transition=WAITING), run_write("run-2", transition=WAITING)
    ) == frozenset({R1})
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.owner, run.ready_at, run.reason) == (RunStatus.RUNNING, None, 0, None)
    assert await storage.history(R1) == (entry(1),)
    assert [claimed.run_id for claimed in (await worker.claim()).runs] == [R1]


async def test_a_run_that_read_its_inbox_may_rest(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"stop")
    rest = Suspend(1, LATER, RunStatus.WAITING_FOR_TIMER)
    assert await worker.write(run_write("run-1", entry(1, n=1), transition=rest)) == frozenset()
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.ready_at) == (RunStatus.WAITING_FOR_TIMER, LATER)


async def test_parking_is_counted_until_the_run_rests_for_another_reason(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    for attempts in (1, 2, 3):
        await worker.write(
            run_write("run-1", transition=Suspend(0, 0, RunStatus.PARKED, "the code changed"), epoch=attempts)
        )
        (run,) = (await worker.claim()).runs
        assert run.attempts == attempts
    await worker.write(run_write("run-1", transition=Suspend(0, 0, RunStatus.WAITING_FOR_TIMER), epoch=4))
    (run,) = (await worker.claim()).runs
    assert run.attempts == 0


async def test_a_run_parked_in_its_first_batch_counts_as_parked_once(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=Suspend(0, 0, RunStatus.PARKED, "the code changed")))
    (run,) = (await worker.claim()).runs
    assert run.attempts == 1


async def test_a_parked_run_shows_its_reason(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await worker.write(run_write("run-1", transition=PARKED))
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.reason) == (RunStatus.PARKED, "the code changed")


# Ending


@pytest.mark.parametrize("status", [RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED])
async def test_an_ended_run_has_a_result_and_no_owner(storage: Storage, worker: Worker, status: RunStatus) -> None:
    await worker.write(new_run("run-1"))
    assert await worker.write(run_write("run-1", entry(1), transition=End(status, b"value", 77))) == frozenset()
    run = await storage.get(R1)
    assert run is not None
    assert (run.status, run.value, run.ended_at) == (status, b"value", 77)
    assert (run.owner, run.ready_at, run.reason) == (None, None, None)
    assert await storage.owned_runs(worker.id) == {}


async def test_an_end_does_not_wait_for_unread_inbox(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.cancel(R1, b"stop")
    assert await worker.write(run_write("run-1", transition=done())) == frozenset()
    run = await storage.get(R1)
    assert run is not None
    assert run.status is RunStatus.COMPLETED
    assert await storage.read_inboxes(worker.id) == ()


# What the database refuses


async def refuse(storage: Storage, worker: Worker, *bad: RunWrite) -> None:
    """The whole batch is refused, and the next one is written with the same fence."""
    with pytest.raises(StorageRejectedError):
        await worker.write(new_run("run-2", entry(1)), *bad, new_run("run-3", entry(1), transition=done()))
    assert await storage.read_fence(worker.id) == worker.fence
    assert await storage.get(R2) is None
    assert await storage.get(R3) is None
    assert await storage.history(R2) == ()
    assert await worker.write(new_run("run-4", entry(1))) == frozenset()


async def test_a_batch_with_a_history_row_that_exists_is_refused_whole(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1, b"first")))
    await refuse(storage, worker, run_write("run-1", entry(2), entry(1, b"second")))
    assert await storage.history(R1) == (entry(1, b"first"),)


async def test_a_batch_that_starts_an_existing_run_is_refused_whole(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await refuse(storage, worker, new_run("run-1"))


async def test_a_batch_that_ends_an_ended_run_is_refused_whole(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", transition=done(b"first")))
    await refuse(storage, worker, run_write("run-1", transition=done(b"second")))
    run = await storage.get(R1)
    assert run is not None
    assert run.value == b"first"


async def test_half_a_surrogate_pair_in_text_is_refused(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    bad = Entry(1, entry(1).kind, "step", "\ud800", ok=True, at=1)
    await refuse(storage, worker, run_write("run-1", bad))


async def test_nul_in_text_is_refused(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    bad = Entry(1, entry(1).kind, "step", "pay\0", ok=True, at=1)
    await refuse(storage, worker, run_write("run-1", bad))


async def test_a_time_beyond_64_bits_is_refused(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    bad = Entry(1, entry(1).kind, "step", "pay", ok=True, at=2**63)
    await refuse(storage, worker, run_write("run-1", bad))


async def test_the_fences_of_two_workers_are_independent(storage: Storage, make_worker: MakeWorker) -> None:
    one, two = await make_worker("one"), await make_worker("two")
    assert await one.write(new_run("run-1")) == frozenset()
    assert await two.write(new_run("run-2")) == frozenset()
    assert await one.write(run_write("run-1", entry(1))) == frozenset()
    assert await storage.owned_runs(one.id) == {R1: 1}
    assert await storage.owned_runs(two.id) == {R2: 1}
