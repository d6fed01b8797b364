"""What every worker does for the whole database: it takes over from workers that died, frees orphans, corrects stored
times after the database's clock was set back, reports runs that no worker claims, and deletes old rows."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from edda.core.model import MICROSECONDS, WorkerStatus
from edda.core.queries import RunQuery
from edda.core.states import RunStatus
from edda.engine.clock import Clock
from edda.engine.log import write as log_line
from edda.engine.settings import Settings
from edda.engine.tasks import RETRYABLE_ERRORS, retry_transient
from edda.storage.ports import Pruning, Storage

from . import host

if TYPE_CHECKING:
    from .worker import Worker

logger = logging.getLogger(__name__)

UNCLAIMED = 30 * MICROSECONDS
"""How long a run has to be ready before it counts as unclaimed."""
MAX_CHECKED = 200
"""Newest open runs that are checked."""
UNCLAIMED_LOG_INTERVAL = 3600.0
"""Seconds between two lines about one workflow."""
PRUNE_BATCH = 500
PRUNE_PAUSE = 0.05
"""Seconds between two batches, so that other statements of the database are not held up."""
_DAY = 86_400 * MICROSECONDS


async def find_unclaimed(storage: Storage, now: int) -> Counter[str]:
    """How many of the newest open runs of each workflow are due and not claimed, most often because no process has the
    code of the workflow."""
    running = await storage.search(RunQuery(statuses=frozenset({RunStatus.RUNNING}), limit=MAX_CHECKED))
    unowned = (run for run in running if run.owner is None and run.ready_at is not None)
    # A run that was freed or has unread inbox items has ready_at 0; it was not ready before it was created.
    return Counter(run.workflow for run in unowned if max(run.ready_at or 0, run.created_at) < now - UNCLAIMED)


class TakeOver:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._storage = worker.services.storage
        self._settings = worker.services.settings
        self._names = worker.services.registry.names
        self._orphans_due = 0.0
        self._log_unclaimed_at: dict[str, float] = {}

    async def run(self) -> None:
        worker = self._worker
        while not worker.draining:
            if worker.heartbeat.has_died:
                worker.lost()
                return
            worker.parking_log.summarize()
            try:
                registered = await self._storage.registered_workers()
                if all(one.info.id != worker.worker_id for one in registered):
                    logger.warning("worker %s is no longer registered: it was taken over", worker.worker_id)
                    worker.lost()
                    return
                await self._sweep(registered)
            except RETRYABLE_ERRORS as error:
                logger.debug("sweep of worker %s failed (%s), trying again", worker.worker_id, error)
            await asyncio.sleep(self._settings.sweep * random.uniform(0.75, 1.25))

    async def _sweep(self, registered: Sequence[WorkerStatus]) -> None:
        worker = self._worker
        freed = await self.remove_dead_local_workers(registered)
        if worker.heartbeat.may_take_over:
            if any(one.is_lapsed and one.info.id != worker.worker_id for one in registered):
                freed += await self.take_over_lapsed() if await self._is_clock_steady() else 0
            if time.monotonic() >= self._orphans_due:
                self._orphans_due = time.monotonic() + self._settings.orphan_sweep
                freed += await self._storage.free_orphans()
                await self._log_unclaimed()
        if freed:
            await self._storage.notify()
            worker.wake()
        suspects = worker.claims.suspects
        if not suspects.are_due and await self._storage.has_suspects(self._names()):
            suspects.are_due = True
            worker.wake()

    async def _is_clock_steady(self) -> bool:
        """A clock that was set forward makes every lease seem lapsed: read it once more before a take-over."""
        heartbeat, sent = self._worker.heartbeat, time.monotonic()
        now = await self._storage.now()
        heartbeat.see_clock(now, sent, time.monotonic())
        return heartbeat.may_take_over

    async def _log_unclaimed(self) -> None:
        """The database does not know which workflows a live worker has. So a line is logged for workflows that this
        worker does not have; it may also be that all workers that have it are busy."""
        names, at = self._names(), time.monotonic()
        for workflow, runs in (await find_unclaimed(self._storage, self._worker.services.clock.now())).items():
            if workflow not in names and at >= self._log_unclaimed_at.get(workflow, 0.0):
                self._log_unclaimed_at[workflow] = at + UNCLAIMED_LOG_INTERVAL
                log_line("runs_unclaimed", worker=self._worker.worker_id, workflow=workflow, runs=runs)

    async def remove_dead_local_workers(self, registered: Sequence[WorkerStatus]) -> int:
        """Workers of this host whose processes have ended: their leases need not lapse first."""
        worker, removed = self._worker, 0
        for info in (one.info for one in registered if one.info.host == worker.info.host):
            if info.id != worker.worker_id and host.has_ended(info.id, info.pid):
                await self._storage.remove_worker(info.id, died=True)
                host.Presence(info.id).remove()
                log_line("worker_dead", worker=worker.worker_id, dead=info.id, process=info.pid)
                removed += 1
        return removed

    async def take_over_lapsed(self) -> int:
        moved = 0
        while (taken := await self._storage.take_over(self._worker.worker_id)) is not None:
            log_line("worker_taken_over", worker=self._worker.worker_id, runs=taken.moved, dead=taken.worker)
            moved += taken.moved
        return moved

    async def correct_times(self) -> None:
        """Times that were stored before the database's clock was set back lie in the future now."""
        lease = int(self._settings.lease * MICROSECONDS)
        corrected = await retry_transient(
            lambda: self._storage.mend_times(lease), "correcting stored times", self._worker.outage
        )
        if corrected:
            logger.warning("the database's clock was set back: ready runs that are made ready again: %d", corrected)
        # Rows of runs and of the outbox may be due that were not.
        self._worker.notified()
        self._worker.engine.notify_other_processes()


class Pruner:
    """Deletes rows that are older than the retention times, in small batches. Every worker prunes; each statement skips
    rows that another one has locked."""

    def __init__(self, storage: Pruning, clock: Clock, settings: Settings) -> None:
        self._storage = storage
        self._clock = clock
        self._settings = settings

    async def run(self, *, outbox_only: bool = False) -> None:
        """`outbox_only`: for a process that only relays, where the retention of other rows is not set."""
        prune = self.prune_sent if outbox_only else self.prune
        while True:
            await asyncio.sleep(self._settings.prune_every * random.uniform(0.5, 1.0))
            try:
                await prune()
            except RETRYABLE_ERRORS as error:
                logger.debug("pruning failed (%s), trying again later", error)

    async def prune(self) -> int:
        """Returns the number of deleted rows of all kinds."""
        messages = self._before(self._settings.message_retention_days)
        removed = await self._drain(self._storage.prune_events, messages)
        removed += await self._drain(self._storage.prune_inbox, messages)
        removed += await self.prune_sent()
        if self._settings.run_retention_days is not None:
            removed += await self._drain(self._storage.prune_runs, self._before(self._settings.run_retention_days))
        return removed

    async def prune_sent(self) -> int:
        """Outbox events that were sent; dead ones stay for people to look at."""
        return await self._drain(self._storage.prune_outbox, self._before(self._settings.message_retention_days))

    def _before(self, days: float) -> int:
        return self._clock.now() - int(days * _DAY)

    async def _drain(self, prune: Callable[[int, int], Awaitable[int]], before: int) -> int:
        total = 0
        while removed := await prune(before, PRUNE_BATCH):
            total += removed
            await asyncio.sleep(PRUNE_PAUSE)
        return total
