"""Workers, their leases and their runs in dictionaries."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from edda.core.model import (
    NO_CRASHES,
    Fence,
    OutboxState,
    RunId,
    Takeover,
    WorkerId,
    WorkerInfo,
    WorkerStatus,
    suspect_groups,
)
from edda.core.states import RunStatus
from edda.errors import StorageDuplicateError
from edda.storage.ports import AT_ONCE, RECLAIM

from .tables import OpenRun, Tables

MAX_FREED = 5_000


class MemoryWorkers(Tables):
    def register(self, worker: WorkerInfo, lease: int) -> int:
        if worker.id in self.fences or worker.id in self.leases:
            raise StorageDuplicateError(f"worker {worker.id} is registered already")
        now = self.now()
        self.fences[worker.id] = Fence(worker.id, 0, 0)
        self.leases[worker.id] = now + lease
        self.infos[worker.id] = worker
        self.registered_at[worker.id] = now
        return now

    def registered_workers(self) -> tuple[WorkerStatus, ...]:
        now = self.now()
        return tuple(WorkerStatus(self.infos[id], expires_at < now) for id, expires_at in self.leases.items())

    def remove_worker(self, worker: WorkerId, died: bool = False) -> None:
        self.fences.pop(worker, None)
        self.leases.pop(worker, None)
        self._free(self.owned_by(worker), died)

    def take_over(self, me: WorkerId) -> Takeover | None:
        now = self.now()
        lapsed = [(expires_at, id) for id, expires_at in self.leases.items() if expires_at < now and id != me]
        if not lapsed:
            return None
        _, worker = min(lapsed)
        del self.leases[worker]
        self.fences.pop(worker, None)
        return Takeover(worker, self._free(self.owned_by(worker)[:MAX_FREED], died=True))

    def free_orphans(self) -> int:
        orphans = [run for run in self.open_runs.values() if run.owner is not None and run.owner not in self.fences]
        return self._free(orphans, died=True)

    def _free(self, runs: Sequence[OpenRun], died: bool) -> int:
        now = self.now()
        for run in runs:
            if died:
                run.free_from_dead(max(self.histories.get((run.run_id, run.generation), {}), default=0), now)
            else:
                run.free(now)
        suspects = sorted((run for run in runs if died and run.crashes.is_suspect), key=lambda run: run.run_id)
        for run, group in zip(suspects, suspect_groups([run.crashes for run in suspects]), strict=True):
            run.ready_at, run.suspect_at = None, now - group
        return len(runs)

    def release_run(self, run_id: RunId) -> bool:
        run = self.open_runs.get(run_id)
        if run is None or run.owner is None:
            return False
        self._bump_ownership(run.owner)
        self._free([run], died=False)
        return True

    def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        self._bump_ownership(worker)
        return self._free([run for run in self.owned_by(worker) if run.run_id != keep], died=False)

    def _bump_ownership(self, worker: WorkerId) -> None:
        if fence := self.fences.get(worker):
            self.fences[worker] = replace(fence, ownership_version=fence.ownership_version + 1)

    def is_ahead(self) -> bool:
        return any(start.created_at > self.now() for gens in self.runs.values() for start in gens.values())

    def mend_times(self, lease: int) -> int:
        now = self.now()
        self.leases = {worker: min(expires_at, now + lease) for worker, expires_at in self.leases.items()}
        for seq, row in self.outbox.items():
            if row.state is OutboxState.PENDING and row.due > now + RECLAIM:
                self.outbox[seq] = replace(row, due=now + RECLAIM)
        for seq, (due, staged) in self.staged.items():
            self.staged[seq] = min(due, now + RECLAIM), staged
        late = [run for run in self.open_runs.values() if self._is_late(run, now)]
        for run in late:
            run.ready_at = 0
        return len(late)

    def _is_late(self, run: OpenRun, now: int) -> bool:
        """A `running` run without an owner was ready when its row was written. Only a start with a delay is due
        later."""
        ready_at = run.ready_at
        if run.owner is not None or run.status is not RunStatus.RUNNING or ready_at is None or ready_at <= now:
            return False
        return run.epoch > 0 or ready_at <= self.runs[run.run_id][run.generation].created_at + AT_ONCE

    def keep_company(self, worker: WorkerId) -> None:
        for run in self.owned_by(worker):
            run.is_alone = False

    def clear_deaths(self, run_id: RunId, epoch: int) -> None:
        run = self.open_runs.get(run_id)
        if run is not None and run.owner is not None and run.epoch == epoch:
            run.crashes, run.is_alone = NO_CRASHES, False

    def beat(self, worker: WorkerId, lease: int) -> int | None:
        if worker not in self.leases:
            return None
        now = self.now()
        self.leases[worker] = now + lease
        return now
