"""Staged events: written in one commit, and moved into the event log exactly once, by the first process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from edda.core.model import AcceptResult, BatchResult, EndWatcher, Fence, RunId, StagedEvent, StagedEventRow, StagedKind
from edda.errors import StorageConflictError, StorageRejectedError
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .conftest import MakeWorker
from .records import SOURCE, SUSPENDED, TYPE, done, entry, incoming, new_run, run_write, staged_event, start, wait
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")


def plain(stored: Sequence[StagedEventRow]) -> list[StagedEvent]:
    return [StagedEvent(one.kind, one.body) for one in stored]


async def numbers(storage: Storage) -> list[int]:
    return [one.seq for one in await storage.staged_events(1_000)]


async def say(worker: Worker, *names: str) -> list[int]:
    """Stages events of these names with a new run; returns the numbers of all staged events."""
    run = f"said {' '.join(names)}"
    await worker.write(replace(new_run(run), staged_events=tuple(staged_event(name) for name in names)))
    return await numbers(worker.storage)


# Staging


async def test_staged_events_are_read_in_the_order_of_their_write(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    effects = [
        staged_event("m"),
        staged_event("z", StagedKind.EVENT),
        staged_event("a"),
        StagedEvent(StagedKind.MESSAGE, b""),
    ]
    await worker.write(new_run("run-1"))
    assert await worker.send(run_write("run-1", staged_events=effects)) == BatchResult()
    for witness in (storage, await make_storage()):
        stored = await witness.staged_events(10)
        assert plain(stored) == effects
        assert [one.seq for one in stored] == sorted({one.seq for one in stored})


async def test_the_lowest_numbers_are_read_first(storage: Storage, worker: Worker) -> None:
    assert await storage.staged_events(10) == ()
    for name in "cab":
        await say(worker, name)
    assert plain(await storage.staged_events(2)) == [staged_event("c"), staged_event("a")]
    assert len(await storage.staged_events(3)) == 3


async def test_runs_that_speak_in_one_batch_keep_their_own_order(storage: Storage, worker: Worker) -> None:
    names = {f"run-{n}": [f"{n}-{turn}" for turn in range(5)] for n in reversed(range(20))}
    await worker.write(
        *(
            replace(new_run(run, entry(1)), staged_events=tuple(staged_event(name) for name in effects))
            for run, effects in names.items()
        )
    )
    stored = plain(await storage.staged_events(1_000))
    assert len(stored) == 100
    for effects in names.values():
        places = [stored.index(staged_event(name)) for name in effects]
        assert places == sorted(places)


@pytest.mark.parametrize("kind", StagedKind)
async def test_every_kind_and_any_bytes_come_back(storage: Storage, worker: Worker, kind: StagedKind) -> None:
    body = bytes(range(256)) * 400
    await worker.write(replace(new_run("run-1"), staged_events=(StagedEvent(kind, body),)))
    assert plain(await storage.staged_events(1)) == [StagedEvent(kind, body)]


async def test_a_batch_behind_its_fence_staged_events_nothing(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    assert await storage.write(Fence(worker.id, 0, 0), [run_write("run-1", staged_events=[staged_event("a")])]) is None
    assert await storage.staged_events(10) == ()


async def test_a_batch_that_is_refused_staged_events_nothing(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1", entry(1)))
    with pytest.raises(StorageRejectedError):
        await worker.send(run_write("run-1", entry(1), staged_events=[staged_event("a")]))
    assert await storage.staged_events(10) == ()


async def test_staged_events_go_in_though_the_end_is_refused(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    refused = run_write("run-1", entry(1), transition=done(), staged_events=[staged_event("a")])
    assert await worker.send(refused) == BatchResult(refused={R1: frozenset()})
    assert plain(await storage.staged_events(10)) == [staged_event("a")]


async def test_staged_events_go_in_though_the_run_is_not_released(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1", "order")], {})
    kept = run_write(
        "run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order")], staged_events=[staged_event("a")]
    )
    assert await worker.send(kept) == BatchResult(refused={R1: frozenset({"w"})})
    assert plain(await storage.staged_events(10)) == [staged_event("a")]


async def test_a_staged_event_outlives_its_run(storage: Storage, worker: Worker) -> None:
    await worker.write(replace(new_run("run-1", transition=done()), staged_events=(staged_event("a"),)))
    assert await storage.prune_runs(await storage.now(), 10) == 1
    assert plain(await storage.staged_events(10)) == [staged_event("a")]


# Moving into the log


async def test_exactly_the_forwarded_ones_go_with_the_commit_that_stores_their_events(
    storage: Storage, worker: Worker
) -> None:
    first, second, third = await say(worker, "a", "b", "c")
    accepted = await storage.accept([incoming("e1"), incoming("e2")], {}, [third, first])
    assert accepted == AcceptResult(frozenset({0, 1}), woke=False)
    assert await numbers(storage) == [second]
    assert await storage.find_event(SOURCE, "e1") is not None


async def test_an_empty_post_only_takes_the_staged_events_away(storage: Storage, worker: Worker) -> None:
    first, second = await say(worker, "a", "b")
    assert await storage.accept([], {}, [first]) == AcceptResult(frozenset(), woke=False)
    assert await numbers(storage) == [second]


async def test_a_forwarded_event_that_is_known_already_is_not_forwarded_again(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("e1")], {})
    (only,) = await say(worker, "a")
    assert await storage.accept([incoming("e1")], {}, [only]) == AcceptResult(frozenset(), woke=False)
    assert await numbers(storage) == []


async def test_what_was_forwarded_wakes_and_starts_runs(storage: Storage, worker: Worker) -> None:
    await worker.send(new_run("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order")]))
    (only,) = await say(worker, "a")
    accepted = await storage.accept([incoming("e1", "order", starts=[start("run-2")])], {}, [only])
    assert accepted == AcceptResult(frozenset({0}), woke=True)
    assert {run.run_id for run in (await worker.claim()).runs} == {R1, R2}
    assert await numbers(storage) == []


@pytest.mark.parametrize("gone", [0, 1])
async def test_nothing_is_stored_if_another_process_moved_a_staged_event(
    storage: Storage, worker: Worker, gone: int
) -> None:
    await worker.send(new_run("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order")]))
    both = await say(worker, "a", "b")
    await storage.accept([incoming("theirs")], {}, [both[gone]])
    with pytest.raises(StorageConflictError):
        await storage.accept([incoming("ours", "order", starts=[start("run-2")])], {}, both)
    assert await storage.find_event(SOURCE, "ours") is None
    assert await storage.get(R2) is None
    assert [each.step for each in await storage.waits(R1)] == ["w"]
    assert await numbers(storage) == [both[1 - gone]]
    accepted = await storage.accept([incoming("ours", "order")], {}, [both[1 - gone]])
    assert accepted == AcceptResult(frozenset({0}), woke=True)


async def test_an_empty_post_with_a_staged_event_that_is_gone_is_a_conflict(storage: Storage, worker: Worker) -> None:
    first, second = await say(worker, "a", "b")
    await storage.accept([], {}, [first])
    with pytest.raises(StorageConflictError):
        await storage.accept([], {}, [first, second])
    assert await numbers(storage) == [second]


async def test_a_post_made_with_old_path_sets_leaves_the_staged_events(storage: Storage, worker: Worker) -> None:
    (only,) = await say(worker, "a")
    assert await storage.accept([incoming("e1")], {TYPE: 9}, [only]) is None
    assert await numbers(storage) == [only]


async def test_a_post_that_is_refused_leaves_the_staged_events(storage: Storage, worker: Worker) -> None:
    (only,) = await say(worker, "a")
    with pytest.raises(StorageRejectedError):
        await storage.accept([incoming("e\0")], {}, [only])
    assert await numbers(storage) == [only]


async def test_a_number_is_never_given_out_twice(storage: Storage, worker: Worker) -> None:
    """Otherwise a late process would delete the staged event of another."""
    both = await say(worker, "a", "b")
    await storage.accept([], {}, both)
    (new,) = await say(worker, "c")
    assert new > max(both)


# At the same time


async def move_staged(storage: Storage, name: str, total: int) -> None:
    """Until `total` events are in the log; each staged event becomes an event whose id names the process."""
    while len(await storage.events_of_type(TYPE, 0, 2**62, total)) < total:
        stored = await storage.staged_events(5)
        post = [incoming(f"{name} {one.seq}") for one in stored]
        try:
            await storage.accept(post, {}, [one.seq for one in stored])
        except StorageConflictError:
            continue


async def test_of_forwarders_at_the_same_time_one_forwards_a_staged_event(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    expected = await say(worker, *(f"{n}" for n in range(60)))
    async with asyncio.timeout(90):
        await asyncio.gather(
            *(move_staged(each, f"{n}", 60) for n, each in enumerate((storage, storage, other, other)))
        )
    forwarded = [int(stored.event.id.split()[1]) for stored in await storage.events_of_type(TYPE, 0, 2**62, 200)]
    assert sorted(forwarded) == expected
    assert await storage.staged_events(1) == ()


async def test_no_staged_event_is_lost_while_others_come_in(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    workers = [await make_worker("worker-1"), await make_worker("worker-2", on=other)]

    async def speak(worker: Worker) -> None:
        for turn in range(20):
            run = f"{worker.id}-{turn}"
            await worker.write(
                replace(new_run(run), staged_events=(staged_event(f"{run}-a"), staged_event(f"{run}-b")))
            )

    async with asyncio.timeout(90):
        await asyncio.gather(
            *(speak(worker) for worker in workers), move_staged(storage, "1", 80), move_staged(other, "2", 80)
        )
    forwarded = [int(stored.event.id.split()[1]) for stored in await storage.events_of_type(TYPE, 0, 2**62, 200)]
    assert len(set(forwarded)) == len(forwarded) == 80
    assert await storage.staged_events(1) == ()
