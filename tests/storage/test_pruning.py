"""Pruning: old rows are deleted a few at a time, and none that a run still needs."""

from __future__ import annotations

from edda.core.model import AckInbox, BatchResult, End, RunFilter, RunId
from edda.core.states import RunStatus
from edda.storage.ports import Storage

from .records import HOUR, SOURCE, SUSPENDED, TYPE, done, entry, incoming, new_run, run_write, start, wait
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")
NEWEST = incoming("newest", type="newest")
"""The newest event is never pruned; this one is sent last, so that the others can be."""


async def soon(storage: Storage) -> int:
    """A time after everything in this test, by less than an hour."""
    return await storage.now() + HOUR // 2


async def tomorrow(storage: Storage) -> int:
    return await storage.now() + 24 * HOUR


async def logged(storage: Storage) -> list[str]:
    return [stored.event.id for stored in await storage.events_of_type(TYPE, 0, 2**62, 100)]


# Events


async def test_nothing_is_pruned_before_its_time(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w", "order")]))
    await storage.accept([incoming("e1", "order"), NEWEST], {})
    await worker.write(run_write("run-1", entry(1), transition=End(RunStatus.COMPLETED, b"", await storage.now())))
    past = await storage.now() - HOUR
    assert [await prune(past, 100) for prune in (storage.prune_events, storage.prune_inbox, storage.prune_runs)] == [
        0,
        0,
        0,
    ]
    assert await logged(storage) == ["e1"]
    assert len(await storage.history(R1)) == 1


async def test_an_old_event_is_no_longer_found_by_waits(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1", "order", "customer"), NEWEST], {})
    assert await storage.prune_events(await soon(storage), 100) == 1
    assert await storage.prune_events(await soon(storage), 100) == 0
    assert (
        await worker.send(run_write("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order")]))
        == BatchResult()
    )
    assert await logged(storage) == ["e1"]


async def test_an_old_event_that_is_no_longer_found_is_still_known(storage: Storage) -> None:
    await storage.accept([incoming("e1", "order"), NEWEST], {})
    await storage.prune_events(await soon(storage), 100)
    again = await storage.accept([incoming("e1", "order")], {})
    assert again is not None
    assert again.new == frozenset()


async def test_an_event_goes_an_hour_after_it_could_no_longer_be_found(storage: Storage) -> None:
    await storage.accept([incoming("e1", "order"), incoming("e2"), NEWEST], {})
    assert await storage.prune_events(await tomorrow(storage), 100) == 3
    assert await logged(storage) == []
    assert await storage.find_event(SOURCE, "e1") is None
    assert await storage.prune_events(await tomorrow(storage), 100) == 0


async def test_the_newest_event_stays_and_numbers_go_on(storage: Storage) -> None:
    await storage.accept([incoming("e1"), incoming("e2", "order")], {})
    last = await storage.last_event()
    await storage.prune_events(await tomorrow(storage), 100)
    assert await logged(storage) == ["e2"]
    assert await storage.last_event() == last
    await storage.accept([incoming("e1")], {})
    assert await storage.last_event() > last


async def test_an_event_in_an_unread_item_stays(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w", "order")]))
    await storage.accept([incoming("e1", "order"), incoming("e2", "order"), NEWEST], {})
    await storage.prune_events(await tomorrow(storage), 100)
    assert await logged(storage) == ["e1"]
    assert [item.value for item in await storage.read_inboxes(worker.id)] == [b"e1"]
    await worker.write(run_write("run-1", entry(1, n=1), transition=AckInbox(1)))
    assert await storage.prune_events(await tomorrow(storage), 100) == 1
    assert await logged(storage) == []


async def test_an_event_that_can_still_be_found_stays(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w", "order")]))
    await storage.accept([incoming("e1", "order"), incoming("e2", "refund"), NEWEST], {})
    assert await storage.prune_events(await tomorrow(storage), 1) == 1
    assert await logged(storage) == ["e1", "e2"]
    await worker.send(run_write("run-1", transition=AckInbox(1), waits=[wait("run-1", "x", "refund")]))
    assert [item.value for item in await storage.read_inboxes(worker.id)] == [b"e2"]


async def test_an_event_in_a_item_to_an_ended_run_goes(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w", "order")]))
    await storage.accept([incoming("e1", "order"), NEWEST], {})
    await worker.write(run_write("run-1", transition=done()))
    await storage.prune_events(await tomorrow(storage), 100)
    assert await logged(storage) == []


async def test_events_go_oldest_first_and_no_more_than_asked_for(storage: Storage) -> None:
    await storage.accept([*(incoming(f"e{n}") for n in range(5)), NEWEST], {})
    assert await storage.prune_events(await tomorrow(storage), 2) == 2
    assert await logged(storage) == ["e2", "e3", "e4"]
    assert [await storage.prune_events(await tomorrow(storage), 2) for _ in range(3)] == [2, 1, 0]


async def test_keys_go_no_more_than_asked_for(storage: Storage) -> None:
    await storage.accept([*(incoming(f"e{n}", "order", "customer") for n in range(5)), NEWEST], {})
    assert [await storage.prune_events(await soon(storage), 2) for _ in range(4)] == [2, 2, 1, 0]


# Inbox items


async def test_read_items_of_an_open_run_go_and_unread_ones_stay(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"), new_run("run-2"))
    for run in (R1, R2):
        await storage.cancel(run, b"stop")
    await worker.write(run_write("run-1", entry(1, n=1), transition=AckInbox(1)))
    assert await storage.prune_inbox(await soon(storage), 100) == 1
    assert await storage.prune_inbox(await soon(storage), 100) == 0
    assert [item.run_id for item in await storage.read_inboxes(worker.id)] == [R2]


async def test_items_of_an_ended_run_go_read_or_not(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", step, "order") for step in ("a", "b")]))
    await storage.accept([incoming("e1", "order"), incoming("e2", "order")], {})
    await worker.write(run_write("run-1", entry(1, n=1), transition=AckInbox(1)))
    await worker.write(run_write("run-1", transition=done()))
    assert await storage.prune_inbox(await soon(storage), 100) == 2


async def test_a_read_item_stays_as_long_as_its_event(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w", "order")]))
    await storage.accept([incoming("e1", "order"), NEWEST], {})
    await worker.write(run_write("run-1", entry(1, n=1), transition=AckInbox(1)))
    assert await storage.prune_inbox(await soon(storage), 100) == 0
    again = run_write("run-1", transition=AckInbox(1), waits=[wait("run-1", "x", "order")])
    assert await worker.send(again) == BatchResult()
    await storage.prune_events(await tomorrow(storage), 100)
    assert await storage.prune_inbox(await soon(storage), 100) == 1


async def test_a_item_whose_event_was_given_back_goes(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", waits=[wait("run-1", "w", "order")]))
    await storage.accept([incoming("e1", "order")], {})
    await worker.send(run_write("run-1", entry(1, n=1), transition=AckInbox(1), released_items=[1]))
    assert await storage.prune_inbox(await soon(storage), 100) == 1


async def test_items_go_no_more_than_asked_for(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(5)]
    await worker.write(*(new_run(run) for run in runs))
    for run in runs:
        await storage.cancel(RunId(run), b"stop")
    await worker.write(*(run_write(run, transition=done()) for run in runs))
    assert [await storage.prune_inbox(await soon(storage), 2) for _ in range(4)] == [2, 2, 1, 0]


# Runs


async def test_an_old_run_goes_with_everything_of_its_own(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1)), new_run("run-2", entry(1)))
    for run in (R1, R2):
        await storage.cancel(run, b"stop")
    await worker.write(run_write("run-1", entry(2), transition=End(RunStatus.FAILED, b"", 50)))
    await worker.write(run_write("run-2", entry(2), transition=End(RunStatus.COMPLETED, b"", 100)))
    assert await storage.prune_runs(100, 100) == 1
    assert await storage.get(R1) is None
    assert await storage.history(R1) == ()
    assert [run.run_id for run in await storage.find(RunFilter())] == [R2]
    assert len(await storage.history(R2)) == 2
    assert await storage.prune_inbox(await soon(storage), 100) == 1


async def test_an_id_is_free_again_when_its_run_is_pruned(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1), transition=done()))
    await storage.prune_runs(await storage.now(), 100)
    assert await storage.start([start("run-1")]) == frozenset({R1})
    (run,) = (await worker.claim()).runs
    assert (run.entries, run.inbox, run.waits) == ((), (), ())


async def test_an_open_run_stays_however_old(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1)))
    await storage.start([start("run-2")])
    assert await storage.prune_runs(await tomorrow(storage), 100) == 0
    assert len(await storage.find(RunFilter())) == 2


async def test_runs_go_no_more_than_asked_for_and_oldest_first(storage: Storage, worker: Worker) -> None:
    await worker.write(*(new_run(f"run-{n}", transition=End(RunStatus.COMPLETED, b"", 9 - n)) for n in range(5)))
    assert await storage.prune_runs(100, 2) == 2
    assert {run.run_id for run in await storage.find(RunFilter())} == {"run-0", "run-1", "run-2"}
    assert [await storage.prune_runs(100, 2) for _ in range(3)] == [2, 1, 0]
