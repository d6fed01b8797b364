"""Run values: the newest value of each name, for as long as the run is stored."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from edda.core.model import AckInbox, BatchResult, End, EndWatcher, Fence, RunId, RunValue
from edda.core.states import RunStatus
from edda.errors import StorageRejectedError
from edda.storage.ports import Storage
from tests.conftest import MakeStorage

from .records import SUSPENDED, done, entry, incoming, new_run, next_generation, run_write, wait
from .worker import Worker

R1, R2 = RunId("run-1"), RunId("run-2")
HALF, FULL = RunValue("progress", b"50"), RunValue("progress", b"100")


async def test_a_value_is_read_by_its_name_and_with_all_others(
    storage: Storage, make_storage: MakeStorage, worker: Worker
) -> None:
    values = [RunValue("place", b"Berlin"), HALF, RunValue("empty", b"")]
    await worker.write(new_run("run-1"), new_run("run-2"))
    assert await worker.send(run_write("run-1", values=values)) == BatchResult()
    for witness in (storage, await make_storage()):
        assert await witness.run_values(R1) == (values[2], values[0], values[1])
        assert await witness.run_values(R1, "progress") == (HALF,)
        assert await witness.run_values(R1, "unknown") == ()
        assert await witness.run_values(R2) == ()
        assert await witness.run_values(RunId("missing")) == ()


async def test_values_come_by_name_and_different_names_are_independent(storage: Storage, worker: Worker) -> None:
    names = ["a", "ä", "B", "b", "A", "a ", "größer-🧾", "'; --", "a\\b%s"]
    await worker.write(replace(new_run("run-1"), values=tuple(RunValue(name, name.encode()) for name in names)))
    assert await storage.run_values(R1) == tuple(RunValue(name, name.encode()) for name in sorted(names))
    for name in names:
        assert await storage.run_values(R1, name) == (RunValue(name, name.encode()),)


async def test_any_bytes_come_back(storage: Storage, worker: Worker) -> None:
    fact = RunValue("blob", bytes(range(256)) * 400)
    await worker.write(replace(new_run("run-1"), values=(fact,)))
    assert await storage.run_values(R1) == (fact,)


async def test_the_newest_of_a_name_counts(storage: Storage, worker: Worker) -> None:
    place = RunValue("place", b"Berlin")
    await worker.write(replace(new_run("run-1"), values=(HALF, place)))
    await worker.write(run_write("run-1", entry(1), values=[FULL]))
    assert await storage.run_values(R1) == (place, FULL)


async def test_many_runs_publish_values_in_one_batch(storage: Storage, worker: Worker) -> None:
    runs = [f"run-{n}" for n in range(30)]
    await worker.write(*(replace(new_run(run), values=(RunValue("who", b"?"), HALF)) for run in runs))
    await worker.write(*(run_write(run, values=[RunValue("who", run.encode())]) for run in runs))
    for run in runs:
        assert await storage.run_values(RunId(run)) == (HALF, RunValue("who", run.encode()))


async def test_a_batch_behind_its_fence_publishes_nothing(storage: Storage, worker: Worker) -> None:
    await worker.write(replace(new_run("run-1"), values=(HALF,)))
    assert await storage.write(Fence(worker.id, 0, 0), [run_write("run-1", values=[FULL])]) is None
    assert await storage.run_values(R1) == (HALF,)


@pytest.mark.parametrize("name", ["pro\0gress", "\ud800"])
async def test_a_value_that_cannot_be_stored_refuses_its_batch(storage: Storage, worker: Worker, name: str) -> None:
    await worker.write(new_run("run-1"))
    with pytest.raises(StorageRejectedError):
        await worker.send(run_write("run-1", entry(1), values=[HALF, RunValue(name, b"")]))
    assert await storage.run_values(R1) == ()
    assert await storage.history(R1) == ()


async def test_values_are_written_though_the_end_is_refused(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.add_watcher(R1, EndWatcher(R2, "w"))
    refused = run_write("run-1", entry(1), transition=done(), values=[FULL])
    assert await worker.send(refused) == BatchResult(refused={R1: frozenset()})
    assert await storage.run_values(R1) == (FULL,)


async def test_values_are_written_though_the_run_is_not_released(storage: Storage, worker: Worker) -> None:
    await worker.write(new_run("run-1"))
    await storage.accept([incoming("e1", "order")], {})
    kept = run_write("run-1", transition=SUSPENDED, waits=[wait("run-1", "w", "order")], values=[HALF])
    assert await worker.send(kept) == BatchResult(refused={R1: frozenset({"w"})})
    assert await storage.run_values(R1) == (HALF,)


async def test_values_stay_after_the_end_and_go_with_the_run(storage: Storage, worker: Worker) -> None:
    await worker.write(replace(new_run("run-1"), values=(HALF,)), replace(new_run("run-2"), values=(HALF,)))
    await worker.write(run_write("run-1", transition=End(RunStatus.COMPLETED, b"", 50), values=[FULL]))
    assert await storage.run_values(R1) == (FULL,)
    assert await storage.prune_runs(100, 10) == 1
    assert await storage.run_values(R1) == ()
    assert await storage.run_values(R2) == (HALF,)


async def test_a_run_with_the_id_of_a_pruned_one_has_no_values(storage: Storage, worker: Worker) -> None:
    await worker.write(replace(new_run("run-1", transition=done()), values=(FULL,)))
    await storage.prune_runs(await storage.now(), 10)
    await worker.write(new_run("run-1"))
    assert await storage.run_values(R1) == ()


async def test_values_stay_from_generation_to_generation(storage: Storage, worker: Worker) -> None:
    await worker.write(replace(new_run("run-1"), values=(HALF,)))
    await worker.write(run_write("run-1", transition=next_generation(at=10), values=[RunValue("place", b"Berlin")]))
    await worker.write(run_write("run-1", generation=1, transition=AckInbox(0), values=[FULL]))
    assert await storage.prune_runs(1_000, 10) == 1
    assert await storage.run_values(R1) == (RunValue("place", b"Berlin"), FULL)
