"""Dispatches: decided in one commit, and taken into the log of events exactly once, by whoever comes first."""

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
from .records import ASLEEP, SOURCE, TYPE, born, bundle, dispatch, done, entry, incoming, start, wait
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")


def plain(stored: Sequence[StagedEventRow]) -> list[StagedEvent]:
    return [StagedEvent(one.kind, one.body) for one in stored]


async def numbers(storage: Storage) -> list[int]:
    return [one.seq for one in await storage.staged_events(1_000)]


async def say(worker: Worker, *names: str) -> list[int]:
    """Dispatches of these names, by a run of its own; returns the numbers of all that wait."""
    run = f"said {' '.join(names)}"
    await worker.write(replace(born(run), dispatches=tuple(dispatch(name) for name in names)))
    return await numbers(worker.storage)


# Saying


async def test_dispatches_are_read_in_the_order_of_their_bundle(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    said = [dispatch("m"), dispatch("z", StagedKind.EVENT), dispatch("a"), StagedEvent(StagedKind.MESSAGE, b"")]
    await worker.write(born("run-1"))
    assert await worker.send(bundle("run-1", dispatches=said)) == BatchResult()
    for witness in (storage, await make_storage()):
        stored = await witness.staged_events(10)
        assert plain(stored) == said
        assert [one.seq for one in stored] == sorted({one.seq for one in stored})


async def test_the_lowest_numbers_are_read_first(storage: Storage, worker: Worker) -> None:
    assert await storage.staged_events(10) == ()
    for name in "cab":
        await say(worker, name)
    assert plain(await storage.staged_events(2)) == [dispatch("c"), dispatch("a")]
    assert len(await storage.staged_events(3)) == 3


async def test_runs_that_speak_in_one_batch_keep_their_own_order(storage: Storage, worker: Worker) -> None:
    names = {f"run-{n}": [f"{n}-{turn}" for turn in range(5)] for n in reversed(range(20))}
    await worker.write(
        *(
            replace(born(run, entry(1)), dispatches=tuple(dispatch(name) for name in said))
            for run, said in names.items()
        )
    )
    stored = plain(await storage.staged_events(1_000))
    assert len(stored) == 100
    for said in names.values():
        places = [stored.index(dispatch(name)) for name in said]
        assert places == sorted(places)


@pytest.mark.parametrize("kind", StagedKind)
async def test_every_kind_and_any_bytes_come_back(storage: Storage, worker: Worker, kind: StagedKind) -> None:
    body = bytes(range(256)) * 400
    await worker.write(replace(born("run-1"), dispatches=(StagedEvent(kind, body),)))
    assert plain(await storage.staged_events(1)) == [StagedEvent(kind, body)]


async def test_a_batch_behind_its_fence_dispatches_nothing(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    assert await storage.write(Fence(worker.id, 0, 0), [bundle("run-1", dispatches=[dispatch("a")])]) is None
    assert await storage.staged_events(10) == ()


async def test_a_batch_that_is_refused_dispatches_nothing(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1", entry(1)))
    with pytest.raises(StorageRejectedError):
        await worker.send(bundle("run-1", entry(1), dispatches=[dispatch("a")]))
    assert await storage.staged_events(10) == ()


async def test_dispatches_go_in_though_the_end_is_refused(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    refused = bundle("run-1", entry(1), move=done(), dispatches=[dispatch("a")])
    assert await worker.send(refused) == BatchResult(unmet={R1: frozenset()})
    assert plain(await storage.staged_events(10)) == [dispatch("a")]


async def test_dispatches_go_in_though_the_run_is_not_released(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.accept([incoming("e1", "order")], {})
    kept = bundle("run-1", move=ASLEEP, waits=[wait("run-1", "w", "order")], dispatches=[dispatch("a")])
    assert await worker.send(kept) == BatchResult(unmet={R1: frozenset({"w"})})
    assert plain(await storage.staged_events(10)) == [dispatch("a")]


async def test_a_dispatch_outlives_its_run(storage: Storage, worker: Worker) -> None:
    await worker.write(replace(born("run-1", move=done()), dispatches=(dispatch("a"),)))
    assert await storage.prune_runs(await storage.now(), 10) == 1
    assert plain(await storage.staged_events(10)) == [dispatch("a")]


# Forwarding


async def test_exactly_the_forwarded_ones_go_with_the_commit_that_stores_their_events(
    storage: Storage, worker: Worker
) -> None:
    first, second, third = await say(worker, "a", "b", "c")
    accepted = await storage.accept([incoming("e1"), incoming("e2")], {}, [third, first])
    assert accepted == AcceptResult(frozenset({0, 1}), woke=False)
    assert await numbers(storage) == [second]
    assert await storage.find_event(SOURCE, "e1") is not None


async def test_an_empty_post_only_takes_the_dispatches_away(storage: Storage, worker: Worker) -> None:
    first, second = await say(worker, "a", "b")
    assert await storage.accept([], {}, [first]) == AcceptResult(frozenset(), woke=False)
    assert await numbers(storage) == [second]


async def test_a_forwarded_event_that_is_known_already_is_not_forwarded_again(storage: Storage, worker: Worker) -> None:
    await storage.accept([incoming("e1")], {})
    (only,) = await say(worker, "a")
    assert await storage.accept([incoming("e1")], {}, [only]) == AcceptResult(frozenset(), woke=False)
    assert await numbers(storage) == []


async def test_what_was_forwarded_wakes_and_starts_runs(storage: Storage, worker: Worker) -> None:
    await worker.send(born("run-1", move=ASLEEP, waits=[wait("run-1", "w", "order")]))
    (only,) = await say(worker, "a")
    accepted = await storage.accept([incoming("e1", "order", starts=[start("run-2")])], {}, [only])
    assert accepted == AcceptResult(frozenset({0}), woke=True)
    assert {run.run_id for run in (await worker.claim()).runs} == {R1, R2}
    assert await numbers(storage) == []


@pytest.mark.parametrize("gone", [0, 1])
async def test_nothing_is_stored_if_a_dispatch_was_forwarded_by_somebody_else(
    storage: Storage, worker: Worker, gone: int
) -> None:
    await worker.send(born("run-1", move=ASLEEP, waits=[wait("run-1", "w", "order")]))
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


async def test_an_empty_post_with_a_dispatch_that_is_gone_is_a_conflict(storage: Storage, worker: Worker) -> None:
    first, second = await say(worker, "a", "b")
    await storage.accept([], {}, [first])
    with pytest.raises(StorageConflictError):
        await storage.accept([], {}, [first, second])
    assert await numbers(storage) == [second]


async def test_a_post_made_with_old_shapes_leaves_the_dispatches(storage: Storage, worker: Worker) -> None:
    (only,) = await say(worker, "a")
    assert await storage.accept([incoming("e1")], {TYPE: 9}, [only]) is None
    assert await numbers(storage) == [only]


async def test_a_post_that_is_refused_leaves_the_dispatches(storage: Storage, worker: Worker) -> None:
    (only,) = await say(worker, "a")
    with pytest.raises(StorageRejectedError):
        await storage.accept([incoming("e\0")], {}, [only])
    assert await numbers(storage) == [only]


async def test_a_number_is_never_given_out_twice(storage: Storage, worker: Worker) -> None:
    """Who is late with one would take another's away."""
    both = await say(worker, "a", "b")
    await storage.accept([], {}, both)
    (new,) = await say(worker, "c")
    assert new > max(both)


# At the same time


async def forward(storage: Storage, name: str, total: int) -> None:
    """Until `total` events are in the log; a dispatch becomes an event whose id says who forwarded it."""
    while len(await storage.events_of_type(TYPE, 0, 2**62, total)) < total:
        stored = await storage.staged_events(5)
        post = [incoming(f"{name} {one.seq}") for one in stored]
        try:
            await storage.accept(post, {}, [one.seq for one in stored])
        except StorageConflictError:
            continue


async def test_of_forwarders_at_the_same_time_one_forwards_a_dispatch(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    other = await make_storage()
    expected = await say(worker, *(f"{n}" for n in range(60)))
    async with asyncio.timeout(90):
        await asyncio.gather(*(forward(each, f"{n}", 60) for n, each in enumerate((storage, storage, other, other))))
    forwarded = [int(stored.event.id.split()[1]) for stored in await storage.events_of_type(TYPE, 0, 2**62, 200)]
    assert sorted(forwarded) == expected
    assert await storage.staged_events(1) == ()


async def test_no_dispatch_is_lost_while_others_come_in(
    storage: Storage, make_storage: MakeStorage, make_worker: MakeWorker
) -> None:
    other = await make_storage()
    workers = [await make_worker("worker-1"), await make_worker("worker-2", on=other)]

    async def speak(worker: Worker) -> None:
        for turn in range(20):
            run = f"{worker.id}-{turn}"
            await worker.write(replace(born(run), dispatches=(dispatch(f"{run}-a"), dispatch(f"{run}-b"))))

    async with asyncio.timeout(90):
        await asyncio.gather(*(speak(worker) for worker in workers), forward(storage, "1", 80), forward(other, "2", 80))
    forwarded = [int(stored.event.id.split()[1]) for stored in await storage.events_of_type(TYPE, 0, 2**62, 200)]
    assert len(set(forwarded)) == len(forwarded) == 80
    assert await storage.staged_events(1) == ()
