"""`hand_over`: the other runs of a blocked worker are ready for others, and its next batch is refused."""

from __future__ import annotations

from edda.core.model import Fence, RunId, WorkerId, WorkerInfo
from edda.storage.ports import Storage

from .records import HOUR, WORKFLOW, run_write, start


async def test_all_runs_but_one_are_handed_over_behind_the_fence(storage: Storage) -> None:
    worker, other = WorkerId("w1"), WorkerId("w2")
    for one in (worker, other):
        await storage.register(WorkerInfo(one, "shop", "host/1", 1), HOUR)
    runs = [RunId(f"run{number}") for number in range(3)]
    assert await storage.write(Fence(worker, 0, 0), [run_write(run, start=start(run)) for run in runs]) is not None
    heartbeat = await storage.open_heartbeat()
    try:
        assert await heartbeat.hand_over(worker, runs[1]) == 2
        assert await storage.owned_runs(worker) == {runs[1]: 1}
        assert await storage.read_fence(worker) == Fence(worker, 1, 1)
        claim = await storage.claim(other, [WORKFLOW], 10)
        assert sorted(run.run_id for run in claim.runs) == [runs[0], runs[2]]
        assert await heartbeat.hand_over(worker, None) == 1
        assert await storage.owned_runs(worker) == {}
        assert await heartbeat.hand_over(worker, None) == 0
    finally:
        await heartbeat.close()
