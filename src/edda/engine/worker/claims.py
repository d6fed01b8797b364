"""The claim loop of one worker: it claims runs that are due, gives suspects their turns, and frees claims whose answer
was lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from edda.core.model import MICROSECONDS, Claim, ClaimedRun, RunId
from edda.engine.log import write as log_line
from edda.engine.tasks import RETRYABLE_ERRORS, Backoff
from edda.errors import LeaseLostError

from .process_deaths import SuspectTurns

if TYPE_CHECKING:
    from .worker import Worker

logger = logging.getLogger(__name__)


MAX_DROPPED_PAUSE = 60.0
"""Seconds before a run is freed that left memory because another worker had written for it."""


class ClaimLoop:
    def __init__(self, worker: Worker) -> None:
        settings = worker.services.settings
        self.dropped: dict[RunId, tuple[float, float]] = {}
        """Runs that left memory because another worker had written for them: from when on each may be freed, and its
        next pause."""
        self.suspects = SuspectTurns(settings)
        self.is_waiting = False
        """Between two claims; a new worker begins with a claim."""
        self.next_claim = 0
        """When the loop claims again by itself, on the database's clock."""
        self._worker = worker
        self._storage = worker.services.storage
        self._settings = settings
        self._names = worker.services.registry.names
        self._claims = 0
        """The number of the last claim that was answered."""
        self._recheck_pause = settings.poll
        self._recheck_at = time.monotonic() + settings.orphan_sweep
        self._woken = asyncio.Event()
        self._skip_due_check = False

    @property
    def is_idle(self) -> bool:
        return self.is_waiting and not self._woken.is_set()

    def wake(self, sure: bool = False) -> None:
        """There may be a run to claim. `sure`: there is one, so the loop claims without asking first."""
        self._skip_due_check = self._skip_due_check or sure
        self._woken.set()

    async def run(self) -> None:
        backoff, worker = Backoff(), self._worker
        while not worker.draining:
            self._woken.clear()
            try:
                if time.monotonic() >= self._recheck_at:
                    await self._release_unknown_claims()
                    self._recheck_at = time.monotonic() + self._recheck_pause
                    self._recheck_pause = min(self._recheck_pause * 2, self._settings.orphan_sweep)
                pause = await self.claim_ready()
                backoff = Backoff()
            except LeaseLostError as error:
                logger.warning("%s", error)
                worker.lost()
                return
            except RETRYABLE_ERRORS as error:
                if backoff.warn(logger, "claiming failed: %s", error):
                    worker.outage.begin(error)
                self.recheck()
                await backoff.pause()
                continue
            await self._wait_for_work(pause)

    async def _wait_for_work(self, pause: float) -> None:
        clock = self._worker.services.clock
        self.next_claim = clock.now() + int(pause * MICROSECONDS)
        alarm = clock.call_at(self.next_claim, self.wake)
        self.is_waiting = True
        try:
            await self._woken.wait()
        finally:
            self.is_waiting = False
            alarm.cancel()

    def recheck(self) -> None:
        """Compare the runs that the worker owns in the database with those in its memory, before the next claim.

        A server goes on with a statement whose connection was lost, and the claim may commit after the first check. So
        the check is repeated after `poll` seconds, then ever more rarely, down to every `orphan_sweep` seconds for as
        long as the worker lives. It is never given up: after a failover the database may name this worker as the owner
        of a run that it had released, without any error on its connections.
        """
        self._recheck_pause, self._recheck_at = self._settings.poll, 0.0

    def drop(self, run_id: RunId) -> None:
        """The run left memory because another worker had written for it. The recheck frees it for any worker to claim:
        at once the first time, then after a pause that doubles. Else a record that no worker can write would be tried
        in a tight loop."""
        _, pause = self.dropped.get(run_id, (0.0, 0.0))
        self.dropped[run_id] = (time.monotonic() + pause, min(max(1.0, pause * 2), MAX_DROPPED_PAUSE))
        self.recheck()  # the database may still name this worker as its owner
        self.wake()

    async def _release_unknown_claims(self) -> None:
        """A claim whose answer was lost may have given this worker runs that are not in its memory. Only the claim loop
        can tell, between two claims: at any other time the run may be one that is just being claimed."""
        worker_id = self._worker.worker_id
        owned = await self._storage.owned_runs(worker_id)
        for run_id in owned.keys() - self._worker.live.keys() - self._worker.resting:
            since, _ = self.dropped.get(run_id, (0.0, 0.0))
            if time.monotonic() >= since:
                level = logging.DEBUG if run_id in self.dropped else logging.WARNING
                logger.log(level, "run %s belongs to worker %s, which does not drive it; freed", run_id, worker_id)
                await self._storage.release_run(run_id)

    # Claiming

    async def claim_ready(self) -> float:
        """Claim as many due runs as there is room for; returns the seconds until the next run is due."""
        names, poll = self._names(), self._settings.poll
        rest = await self._run_suspects(names) if names else None
        if rest is not None:
            return min(rest, poll)
        while names and self._worker.has_capacity and not self._worker.journal.is_overloaded:
            if not self._skip_due_check:
                due = await self._storage.next_due(names)
                if due != 0:
                    return poll if due is None else min(due / MICROSECONDS, poll)
            self._skip_due_check = False
            room = min(self._worker.room, self._settings.claim_batch)
            await self._claim(partial(self._storage.claim, self._worker.worker_id, names, room))
        return poll

    async def _claim(self, claim_runs: Callable[[int], Awaitable[Claim]]) -> Sequence[ClaimedRun]:
        """Call `claim_runs` with the number of the last claim, and take its runs into memory. Claims of a worker go one
        after another."""
        worker = self._worker
        before, sent = worker.journal.ownership_checks, time.monotonic()
        claim = await claim_runs(self._claims)
        worker.services.clock.observe(claim.now, sent, time.monotonic())
        if claim.number is None:
            raise LeaseLostError(
                f"worker {worker.worker_id} was taken over, or the database lost a claim; starting anew"
            )
        self._claims = claim.number
        worker.journal.claimed(claim.number)
        runs: Sequence[ClaimedRun] = claim.runs
        # A run that was taken away between its claim and now would be driven by two workers. If the journal read
        # meanwhile which runs are ours, it did not know of these: read again until no such check came in between.
        while runs and before != worker.journal.ownership_checks:
            before = worker.journal.ownership_checks
            owned = await self._storage.owned_runs(worker.worker_id)
            runs = [run for run in runs if owned.get(run.run_id) == run.epoch]
        for run in runs:
            if not worker.draining:
                worker.add_claimed_run(run)
        return runs

    # Suspects

    def leave_turn(self, run_id: RunId) -> None:
        """The deaths of this run are void, or it left memory."""
        turns = self.suspects
        if turns.leave(run_id) or (turns.is_waiting and not turns.must_wait_for(self._worker.live)):
            self.wake()

    async def _run_suspects(self, names: Sequence[str]) -> float | None:
        """Give suspects their turn. Returns the seconds for which nothing else is claimed; None if there is no turn."""
        turns, live = self.suspects, self._worker.live
        if turns.is_open:
            if turns.left > 0:
                return turns.left
            logger.info("worker %s lets other runs in beside a suspect that goes on", self._worker.worker_id)
            turns.close()
        if turns.is_marked:
            if live:
                await self._storage.keep_company(self._worker.worker_id)
            turns.is_marked = False
        if not turns.are_due or turns.is_time_of_others:
            return None
        if turns.has_held_long and await self._storage.next_due(names) == 0:
            turns.give_way()
            return None
        if live:
            # Asked before anything is held back: most databases have no suspect most of the time.
            if not await self._storage.has_suspects(names):
                turns.found_none()
                return None
            if turns.must_wait_for(live) and (rest := turns.wait()) > 0:
                return rest
        return await self._claim_suspects(names)

    async def _claim_suspects(self, names: Sequence[str]) -> float | None:
        turns, worker = self.suspects, self._worker
        alone = not worker.live and not turns.has_found_killer
        runs = await self._claim_suspect_group(names, alone)
        if not runs:
            turns.found_none()
            return None
        while turns.has_found_killer and worker.room > 0 and (more := await self._claim_suspect_group(names, False)):
            runs = [*runs, *more]
        if alone and len(worker.live) > len(runs):  # a run was started here while the claim was under way
            await self._storage.keep_company(worker.worker_id)
        turns.open(runs, worker.live)
        company = (
            "alone" if len(runs) == 1 else f"with {len(runs) - 1} other such {'run' if len(runs) == 2 else 'runs'}"
        )
        if beside := len(worker.live) - len(runs):
            company = f"{company} beside {beside} {'run' if beside == 1 else 'runs'} that stayed in memory"
        for run in runs:
            log_line(
                "run_suspect",
                run=run.run_id,
                workflow=run.workflow,
                worker=worker.worker_id,
                deaths=run.crashes.deaths,
                company=company,
            )
        return turns.left

    async def _claim_suspect_group(self, names: Sequence[str], alone: bool) -> Sequence[ClaimedRun]:
        limit = max(1, min(self._worker.room, self._settings.claim_batch))
        return await self._claim(partial(self._storage.claim_suspects, self._worker.worker_id, names, limit, alone))
