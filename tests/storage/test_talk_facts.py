"""Facts: what a run says of itself, the newest of each name, for as long as the run is known."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from edda.core.model import AckInbox, BatchResult, End, EndWatcher, Fence, RunId, RunValue
from edda.core.states import RunStatus
from edda.errors import StorageRejectedError
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .records import ASLEEP, again, born, bundle, done, entry, incoming, wait
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")
HALF, FULL = RunValue("progress", b"50"), RunValue("progress", b"100")


async def test_a_fact_is_read_by_its_name_and_with_all_others(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    facts = [RunValue("place", b"Berlin"), HALF, RunValue("empty", b"")]
    await worker.write(born("run-1"), born("run-2"))
    assert await worker.send(bundle("run-1", facts=facts)) == BatchResult()
    for witness in (storage, await make_storage()):
        assert await witness.run_values(R1) == (facts[2], facts[0], facts[1])
        assert await witness.run_values(R1, "progress") == (HALF,)
        assert await witness.run_values(R1, "unknown") == ()
        assert await witness.run_values(R2) == ()
        assert await witness.run_values(RunId("missing")) == ()


async def test_facts_come_by_name_and_names_are_told_apart(storage: Storage, worker: Worker) -> None:
    names = ["a", "ä", "B", "b", "A", "a ", "größer-🧾", "'; --", "a\\b%s"]
    await worker.write(replace(born("run-1"), facts=tuple(RunValue(name, name.encode()) for name in names)))
    assert await storage.run_values(R1) == tuple(RunValue(name, name.encode()) for name in sorted(names))
    for name in names:
        assert await storage.run_values(R1, name) == (RunValue(name, name.encode()),)


async def test_any_bytes_come_back(storage: Storage, worker: Worker) -> None:
    fact = RunValue("blob", bytes(range(256)) * 400)
    await worker.write(replace(born("run-1"), facts=(fact,)))
    assert await storage.run_values(R1) == (fact,)


async def test_the_newest_of_a_name_counts(storage: Storage, worker: Worker) -> None:
    place = RunValue("place", b"Berlin")
    await worker.write(replace(born("run-1"), facts=(HALF, place)))
    await worker.write(bundle("run-1", entry(1), facts=[FULL]))
    assert await storage.run_values(R1) == (place, FULL)


async def test_many_runs_say_something_in_one_batch(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(30)]
    await worker.write(*(replace(born(run), facts=(RunValue("who", b"?"), HALF)) for run in runs))
    await worker.write(*(bundle(run, facts=[RunValue("who", run.encode())]) for run in runs))
    for run in runs:
        assert await storage.run_values(RunId(run)) == (HALF, RunValue("who", run.encode()))


async def test_a_batch_behind_its_fence_says_nothing(storage: Storage, worker: Worker) -> None:
    await worker.write(replace(born("run-1"), facts=(HALF,)))
    assert await storage.write(Fence(worker.id, 0, 0), [bundle("run-1", facts=[FULL])]) is None
    assert await storage.run_values(R1) == (HALF,)


@pytest.mark.parametrize("name", ["pro\0gress", "\ud800"])
async def test_a_fact_that_cannot_be_stored_refuses_its_batch(storage: Storage, worker: Worker, name: str) -> None:
    await worker.write(born("run-1"))
    with pytest.raises(StorageRejectedError):
        await worker.send(bundle("run-1", entry(1), facts=[HALF, RunValue(name, b"")]))
    assert await storage.run_values(R1) == ()
    assert await storage.history(R1) == ()


async def test_facts_are_written_though_the_end_is_refused(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    refused = bundle("run-1", entry(1), move=done(), facts=[FULL])
    assert await worker.send(refused) == BatchResult(unmet={R1: frozenset()})
    assert await storage.run_values(R1) == (FULL,)


async def test_facts_are_written_though_the_run_is_not_released(storage: Storage, worker: Worker) -> None:
    await worker.write(born("run-1"))
    await storage.accept([incoming("e1", "order")], {})
    kept = bundle("run-1", move=ASLEEP, waits=[wait("run-1", "w", "order")], facts=[HALF])
    assert await worker.send(kept) == BatchResult(unmet={R1: frozenset({"w"})})
    assert await storage.run_values(R1) == (HALF,)


async def test_facts_stay_after_the_end_and_go_with_the_run(storage: Storage, worker: Worker) -> None:
    await worker.write(replace(born("run-1"), facts=(HALF,)), replace(born("run-2"), facts=(HALF,)))
    await worker.write(bundle("run-1", move=End(RunStatus.COMPLETED, b"", 50), facts=[FULL]))
    assert await storage.run_values(R1) == (FULL,)
    assert await storage.prune_runs(100, 10) == 1
    assert await storage.run_values(R1) == ()
    assert await storage.run_values(R2) == (HALF,)


async def test_a_run_with_the_id_of_a_pruned_one_has_said_nothing(storage: Storage, worker: Worker) -> None:
    await worker.write(replace(born("run-1", move=done()), facts=(FULL,)))
    await storage.prune_runs(await storage.now(), 10)
    await worker.write(born("run-1"))
    assert await storage.run_values(R1) == ()


async def test_facts_stay_from_generation_to_generation(storage: Storage, worker: Worker) -> None:
    await worker.write(replace(born("run-1"), facts=(HALF,)))
    await worker.write(bundle("run-1", move=again(at=10), facts=[RunValue("place", b"Berlin")]))
    await worker.write(bundle("run-1", gen=1, move=AckInbox(0), facts=[FULL]))
    assert await storage.prune_runs(1_000, 10) == 1
    assert await storage.run_values(R1) == (RunValue("place", b"Berlin"), FULL)
