"""Match paths: a set of paths is registered once, and older events get their keys by a backfill."""

from __future__ import annotations

import asyncio

import pytest

from edda.core.model import BatchResult, MatchPaths, RunId
from edda.errors import StorageRejectedError
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .records import HOUR, SOURCE, SUSPENDED, TYPE, incoming, key, new_run, run_write, wait
from .worker import Worker

R1 = RunId("run-1")


async def number(storage: Storage, id: str) -> int:
    stored = await storage.find_event(SOURCE, id)
    assert stored is not None
    return stored.seq


async def test_a_type_without_waits_has_no_match_paths(storage: Storage) -> None:
    await storage.accept([incoming("e1")], {})
    assert await storage.match_paths([TYPE]) == {}
    assert await storage.match_paths([]) == {}


async def test_each_new_path_set_raises_the_version_of_its_type(storage: Storage) -> None:
    for shape in ("order", "customer", ""):
        await storage.register_match_paths(TYPE, shape)
    await storage.register_match_paths("other", "order")
    shapes = await storage.match_paths([TYPE, "other", "unknown"])
    assert {type: (known.version, sorted(known.known)) for type, known in shapes.items()} == {
        TYPE: (3, ["", "customer", "order"]),
        "other": (1, ["order"]),
    }


async def test_a_path_set_is_learned_once(storage: Storage) -> None:
    await storage.accept([incoming("e1")], {})
    first = await storage.register_match_paths(TYPE, "order")
    await storage.accept([incoming("e2")], {TYPE: 1})
    assert await storage.register_match_paths(TYPE, "order") == first
    assert await storage.match_paths([TYPE]) == {TYPE: MatchPaths(1, ("order",))}


async def test_learners_at_the_same_time_learn_each_path_set_once(storage: Storage, make_storage: MakeStorage) -> None:
    other = await make_storage()
    names = [f"shape-{n}" for n in range(5)]
    await asyncio.gather(*(each.register_match_paths(TYPE, name) for name in names for each in (storage, other)))
    shapes = await storage.match_paths([TYPE])
    assert (shapes[TYPE].version, sorted(shapes[TYPE].known)) == (5, names)


async def test_path_sets_and_types_are_compared_character_for_character(storage: Storage) -> None:
    for type, shape in (("paid", "a"), ("Paid", "a"), ("paid ", "a"), ("paid", "A"), ("paid", "á")):
        await storage.register_match_paths(type, shape)
    shapes = await storage.match_paths(["paid", "Paid", "paid "])
    assert {type: len(known.known) for type, known in shapes.items()} == {"paid": 3, "Paid": 1, "paid ": 1}


@pytest.mark.parametrize(("type", "shape"), [("order\0", "a"), (TYPE, "a\0"), (TYPE, "\ud800")])
async def test_a_path_set_that_cannot_be_stored_is_refused(storage: Storage, type: str, shape: str) -> None:
    with pytest.raises(StorageRejectedError):
        await storage.register_match_paths(type, shape)
    assert await storage.match_paths([TYPE]) == {}


async def test_what_came_before_a_path_set_was_learned_has_no_keys_of_it(storage: Storage) -> None:
    await storage.accept([incoming("e1")], {})
    filled_from = await storage.register_match_paths(TYPE, "order")
    await storage.accept([incoming("e2")], {TYPE: 1})
    assert await number(storage, "e1") <= filled_from < await number(storage, "e2")


async def test_filled_in_events_are_found(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1"), incoming("e2")], {})
    await storage.register_match_paths(TYPE, "order")
    first, second = await number(storage, "e1"), await number(storage, "e2")
    await storage.backfill_keys(TYPE, "order", [(key("order"), second)], first)
    assert await storage.register_match_paths(TYPE, "order") == first
    await storage.backfill_keys(TYPE, "order", [(key("order"), second), (key("order"), first)], first - 1)
    assert await storage.register_match_paths(TYPE, "order") == first - 1
    written = await worker.send(run_write("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order")]))
    assert written == BatchResult(refused={R1: frozenset({"w"})})
    assert [item.value for item in await storage.read_inboxes(worker.id)] == [b"e1"]


async def test_filling_less_far_than_before_does_not_raise_the_mark(storage: Storage) -> None:
    await storage.accept([incoming("e1"), incoming("e2")], {})
    await storage.register_match_paths(TYPE, "order")
    await storage.backfill_keys(TYPE, "order", [], 0)
    await storage.backfill_keys(TYPE, "order", [], await number(storage, "e1"))
    assert await storage.register_match_paths(TYPE, "order") == 0


async def test_an_event_that_was_pruned_is_not_filled_in(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1"), incoming("e2")], {})
    gone, kept = await number(storage, "e1"), await number(storage, "e2")
    await storage.register_match_paths(TYPE, "order")
    await storage.prune_events(await storage.now() + 2 * HOUR, 100)
    await storage.backfill_keys(TYPE, "order", [(key("order"), gone), (key("order"), kept)], 0)
    await worker.send(run_write("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order")]))
    assert [item.value for item in await storage.read_inboxes(worker.id)] == [b"e2"]


async def test_an_event_comes_before_a_path_set_is_learned_or_knows_of_it(
    storage: Storage, make_storage: MakeStorage
) -> None:
    other = await make_storage()
    for turn in range(40):
        type, id = f"type-{turn}", f"e{turn}"
        accepted, filled_from = await asyncio.gather(
            storage.accept([incoming(id, type=type)], {type: 0}), other.register_match_paths(type, "order")
        )
        stored = await storage.find_event(SOURCE, id)
        assert (stored is None) is (accepted is None)
        assert stored is None or stored.seq <= filled_from
