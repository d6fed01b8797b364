"""Runs that are ready and that no worker claims, most often because no process has the code of their workflow.

The database does not know which workflows a live worker has. So a run counts that has been ready for so long, and whose
workflow the asking worker does not have; it may also be that all workers that have it are busy.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from edda.core.model import MICROSECONDS, WorkerId
from edda.core.queries import RunQuery
from edda.core.states import RunStatus
from edda.engine.log import write
from edda.storage.ports import Storage

UNCLAIMED = 30 * MICROSECONDS
"""A run that has been ready for so long should have been claimed."""
LOOKED_AT = 200
"""Of the newest open runs."""
EVERY = 3600.0
"""Seconds between two lines about one workflow."""


async def find_unclaimed(storage: Storage, now: int) -> Counter[str]:
    """How many of the newest open runs of each workflow are due and not claimed."""
    running = await storage.search(RunQuery(statuses=frozenset({RunStatus.RUNNING}), limit=LOOKED_AT))
    due = (run for run in running if run.owner is None and run.ready_at is not None and run.ready_at < now - UNCLAIMED)
    return Counter(run.workflow for run in due)


class UnclaimedRuns:
    """The log lines of one worker about them."""

    def __init__(self, storage: Storage, worker: WorkerId) -> None:
        self._storage = storage
        self._worker = worker
        self._tell_at: dict[str, float] = {}

    async def look(self, names: Sequence[str], now: int) -> None:
        for workflow, runs in (await find_unclaimed(self._storage, now)).items():
            moment = time.monotonic()
            if workflow not in names and moment >= self._tell_at.get(workflow, 0.0):
                self._tell_at[workflow] = moment + EVERY
                write("runs_unclaimed", worker=self._worker, workflow=workflow, runs=runs)
