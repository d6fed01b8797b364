"""One incarnation of a worker: it claims runs, drives them, and takes over from those that died.

A worker that was taken over is never mended: it forgets everything, and the engine makes a new one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from edda.core.codec import Codec
from edda.core.model import (
    MICROSECONDS,
    Claim,
    ClaimedRun,
    End,
    EndWatcher,
    Fence,
    RunId,
    RunRecord,
    RunWrite,
    Start,
    StoredEvent,
    Suspend,
    WorkerInfo,
    WorkerStatus,
)
from edda.core.retry import RetryPolicy
from edda.engine.clock import Clock
from edda.engine.events.match_paths import MatchPathCache
from edda.engine.hooks import HookCaller
from edda.engine.journal import JournalWriter, RunWriter
from edda.engine.log import runs as run_logger
from edda.engine.log import write as log_line
from edda.engine.parking_log import ParkingLog
from edda.engine.run.backlog import PAGE_SIZE
from edda.engine.run.concurrency import ConcurrencyLimiter
from edda.engine.run.cursors import EventCursors
from edda.engine.run.outcome_policy import ActivityThreads
from edda.engine.run.run import LiveRun
from edda.engine.settings import Settings
from edda.engine.tasks import Backoff, ClaimRecheck, Drops, Outage, cancel_and_wait
from edda.errors import (
    InstanceNotFoundError,
    LeaseLostError,
    MigrationError,
    StorageConflictError,
    StorageUnavailableError,
)
from edda.storage.ports import Storage, Transactions
from edda.workflow.client import Client
from edda.workflow.execution import Command
from edda.workflow.workflow import Workflow

from . import host, supervision
from .heartbeat import Heartbeat
from .pruner import Pruner
from .suspects import SuspectTurns
from .unclaimed import UnclaimedRuns

if TYPE_CHECKING:
    from edda.storage.sqlalchemy_sessions import Sessions

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OWNERSHIP = "edda-ownership"
_CLOCK = "edda-clock"
RETRYABLE_ERRORS = (StorageUnavailableError, StorageConflictError)


class Worker:
    def __init__(
        self,
        info: WorkerInfo,
        storage: Storage,
        *,
        client: Client,
        clock: Clock,
        codec: Codec,
        threads: ActivityThreads,
        slots: ConcurrencyLimiter,
        hooks: HookCaller | None,
        settings: Settings,
        retry_policy: RetryPolicy,
        book: MatchPathCache,
        find: Callable[[str], Workflow[Any, Any]],
        names: Callable[[], Sequence[str]],
        on_end: Callable[[RunId, End], None],
        on_lost: Callable[[Worker], None],
        on_dispatch: Callable[[], None],
        on_outgoing: Callable[[], None],
        on_news: Callable[[], None],
        find_sessions: Callable[[], Sessions],
    ) -> None:
        self.info = info
        self.worker_id = info.id
        self.transactions: Transactions = storage
        self.loop = asyncio.get_running_loop()
        self.client = client
        self.clock = clock
        self.codec = codec
        self.threads = threads
        self.slots = slots
        self.hooks = hooks
        self.settings = settings
        self.retry_policy = retry_policy
        self.match_paths = book
        self.live: dict[RunId, LiveRun] = {}
        self.draining = False
        self.outage = Outage(info.id)
        self.parking_log = ParkingLog()
        self.journal = JournalWriter(
            storage,
            Fence(info.id, 0, 0),
            owns=self._owns,
            owned_sources=self._sources,
            lost=self._run_lost,
            outage=self.outage,
        )
        self._storage = storage
        self._find = find
        self._names = names
        self._on_end = on_end
        self._on_lost = on_lost
        self._on_staged = on_dispatch
        self._on_outbox = on_outgoing
        self._on_notification = on_news
        self._find_sessions = find_sessions
        self._claims = 0
        """The number of the last claim that was answered."""
        self._claim_recheck = ClaimRecheck(settings.poll, settings.orphan_sweep)
        self._unknown_claims = Drops()
        self._woken = asyncio.Event()
        self._emptied = asyncio.Event()
        self._skip_due_check = False
        self._planned_wake = 0
        self._is_claiming = True
        """For something to claim; it begins with that."""
        self._is_reading_inbox = False
        self._lease_was_safe = True
        self._telling: asyncio.Task[None] | None = None
        self._inbox_requests: set[LiveRun] = set()
        self._fetching: asyncio.Task[None] | None = None
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: BaseException | None = None
        """What made this incarnation give up, unless it was taken over."""
        self._failures: dict[RunId, supervision.Failures] = {}
        """Of runs that this worker could not drive."""
        self._resting: set[RunId] = set()
        """Of these, the ones that are still owned, so that no worker tries them again at once."""
        self._worker_lock = host.Presence(info.id)
        self._awaiting: Counter[RunId] = Counter()
        """Runs with activities that wait for other runs, and how many of them do."""
        self._suspects = SuspectTurns(settings)
        self._unclaimed = UnclaimedRuns(storage, info.id)
        self.heartbeat = Heartbeat(storage, info.id, settings, self)

    # Life

    async def start(self) -> None:
        self._worker_lock.hold()
        sent = time.monotonic()
        now = await self._storage.register(self.info, int(self.settings.lease * MICROSECONDS))
        self.clock.observe(now, sent, time.monotonic())
        if await self._storage.is_ahead():
            await self._mend_times()
        await self._storage.wake_parked(self._names())
        # Before the first claim: which runs died with the process before this one decides what is claimed first.
        try:
            await self._remove_dead_local_workers(await self._storage.registered_workers())
        except Exception as error:  # an answer that is missing, or a defect: the sweep looks again, and reports it
            what = f"{type(error).__name__}: {error}"
            logger.warning("worker %s could not look for dead workers (%s); the sweep does", self.info.id, what)
        await self.match_paths.load_last_event()
        self.heartbeat.start()
        duties = (self._journal_loop, self._claim_loop, self._take_over_loop, self._notification_loop, self._prune_loop)
        self._tasks += [self._start_duty(duty) for duty in duties]

    def _start_duty(self, duty: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        name = getattr(duty, "__name__", "duty").strip("_")
        # Whatever a failed duty had claimed or asked for may be ours without our driving it.
        return supervision.start(
            f"{name} of worker {self.info.id}", duty, name=f"edda-{name}", on_failure=self._claim_recheck.start
        )

    def fail(self, error: BaseException) -> None:
        """Give up this incarnation: a part of it is lost that nothing can rebuild."""
        self.failure = self.failure or error
        self._on_lost(self)

    async def drain(self, grace: float) -> None:
        """Claim nothing more, let bodies finish within the grace, hand everything back."""
        self.draining = True
        for run in list(self.live.values()):
            run.drain()
        try:
            async with asyncio.timeout(grace):
                await self._until_empty()
        except TimeoutError:
            for run in list(self.live.values()):
                run.abandon_attempts()
            await self._hand_back_all()

    async def _hand_back_all(self) -> None:
        try:
            async with asyncio.timeout(self.settings.call_timeout):
                await self._until_empty()
        except TimeoutError:
            logger.warning(
                "worker %s: %d runs could not be handed back within %g s, the database does not answer; other workers "
                "take them over when its lease has lapsed",
                self.info.id,
                len(self.live),
                self.settings.call_timeout,
            )
            self.kill()

    async def retire(self) -> None:
        await self._stop_tasks()
        self.parking_log.summarize(all=True)
        await self.heartbeat.stop()
        try:
            async with asyncio.timeout(self.settings.call_timeout):
                await self._storage.remove_worker(self.info.id)
                await self._storage.notify()
            self._worker_lock.remove()
        except (*RETRYABLE_ERRORS, TimeoutError) as error:
            self._worker_lock.release()
            logger.warning("worker %s could not sign off (%r); its lease will lapse", self.info.id, error)

    async def abandon(self) -> None:
        """Taken over, or failed: nothing of this incarnation may have an effect any more. What it still owns is ready
        for others at once, instead of after its lease."""
        self.kill()
        await cancel_and_wait(*self._tasks)
        try:
            sent = time.monotonic()
            await self._storage.remove_worker(self.info.id)
            self.outage.end(sent)
            await self._storage.notify()
            self._worker_lock.remove()
        except RETRYABLE_ERRORS as error:
            logger.debug("worker %s could not sign off (%s); its lease will lapse", self.info.id, error)

    def kill(self) -> None:
        """Stop at once and write nothing, as a dying process would."""
        self.draining = True
        self.heartbeat.kill()
        for task in (*self._tasks, *self._background_tasks, *([self._fetching] if self._fetching else ())):
            task.cancel()
        for run in list(self.live.values()):
            try:
                run.abandon()
            except Exception as error:  # of one run: the others have to be let go all the same
                logger.error("letting go of run %s failed: %r", run.run_id, error, exc_info=error)
        self.live.clear()
        self._worker_lock.release()
        self._emptied.set()

    async def _stop_tasks(self) -> None:
        beside = [task for task in (self._telling, self._fetching, *self._background_tasks) if task is not None]
        await cancel_and_wait(*self._tasks)
        if beside:
            await asyncio.wait(beside, timeout=self.settings.call_timeout)
            await cancel_and_wait(*beside)

    async def _until_empty(self) -> None:
        while self.live:
            self._emptied.clear()
            await self._emptied.wait()

    @property
    def is_idle(self) -> bool:
        """Nothing is under way in this process that could change anything by itself."""
        at_rest = all(run.is_idle for run in self.live.values())
        looks = self._is_claiming or self._is_reading_inbox or self._woken.is_set()
        busy = looks or self._fetching is not None or self._background_tasks
        return at_rest and self.journal.is_idle and not busy

    def due_times(self) -> list[int]:
        """When the runs that stay in memory go on."""
        return [run.alarm_at for run in self.live.values() if run.alarm_at is not None]

    @property
    def has_capacity(self) -> bool:
        return not self.draining and not self._suspects.is_holding and self._room > 0

    @property
    def _room(self) -> int:
        """Runs that may still come into memory. A run whose activity waits for another run has given its place away:
        the run it waits for may be one that could not be claimed without it."""
        room = self.settings.capacity - len(self.live)
        return room + len(self._awaiting.keys() & self.live.keys()) if self._awaiting else room

    @contextmanager
    def awaiting(self, run_id: RunId) -> Iterator[None]:
        """While an activity of this run waits for another run."""
        self._awaiting[run_id] += 1
        if len(self.live) >= self.settings.capacity:
            self.wake()
        try:
            yield
        finally:
            self._awaiting[run_id] -= 1
            if not self._awaiting[run_id]:
                del self._awaiting[run_id]

    # Runs

    def begin(self, start: Start) -> LiveRun:
        """Start a run that is ours from its first record on."""
        claimed = ClaimedRun(
            start.run_id,
            start.workflow,
            gen=0,
            epoch=1,
            input=start.input,
            created_at=start.created_at,
            deadline=start.deadline,
            absorbed=0,
            attempts=0,
            entries=(),
            mail=(),
            start_seq=self.match_paths.last_event,
        )
        run = LiveRun(self, self._find(start.workflow), claimed, start)
        self.journal.enqueue(run)
        self._schedule_run(run)
        return run

    def wake(self, sure: bool = False) -> None:
        """There may be something to claim, or surely is: then it need not be looked for first."""
        self._skip_due_check = self._skip_due_check or sure
        self._woken.set()

    def _add_claimed_run(self, claimed: ClaimedRun) -> None:
        old = self.live.pop(claimed.run_id, None)
        if old is not None:  # stolen from us and claimed again before we noticed
            old.abandon()
        if run_logger.isEnabledFor(logging.DEBUG):
            told = {"run": claimed.run_id, "workflow": claimed.workflow, "worker": self.info.id}
            log_line("run_claimed", **told, entries=len(claimed.entries))
        self._schedule_run(LiveRun(self, self._find(claimed.workflow), claimed))

    def _schedule_run(self, run: LiveRun) -> None:
        self.live[run.run_id] = run
        self.loop.call_soon(run.begin)

    @property
    def sessions(self) -> Sessions:
        return self._find_sessions()

    @property
    def may_start_steps(self) -> bool:
        self._lease_was_safe = self.heartbeat.lease_is_safe and not self.heartbeat.has_handed_over
        return self._lease_was_safe

    def run_ended(self, run: LiveRun, end: End) -> None:
        self._failures.pop(run.run_id, None)
        self._remove(run)
        self._unknown_claims.discard(run.run_id)
        self._on_end(run.run_id, end)

    def run_unstored(self, run: LiveRun) -> None:
        self._remove(run)

    def withdraw(self, run: LiveRun) -> bool:
        """Forget a run that was begun here, if the journal has not taken its rows; False if they may be stored."""
        if run.is_start_taken:
            return False
        run.abandon()
        self._remove(run)
        return True

    def run_suspended(self, run: LiveRun, release: Suspend, early: bool) -> None:
        self._failures.pop(run.run_id, None)
        self._remove(run)
        due = release.ready_at
        if self.draining:
            self._notify_other_processes()
        elif early or (due is not None and due < self._planned_wake):
            self.wake(sure=early)

    def run_progressed(self, run: LiveRun) -> None:
        self._run_errand("edda-deaths", "clearing deaths", lambda: self._clear_deaths(run.run_id, run.epoch))

    async def _clear_deaths(self, run_id: RunId, epoch: int) -> None:
        await self._retry_forever("clearing deaths", lambda: self._storage.clear_deaths(run_id, epoch))
        # Not before: a suspect of the next turn may end the process at once.
        self._leave_turn(run_id)

    def _leave_turn(self, run_id: RunId) -> None:
        turns = self._suspects
        if turns.leave(run_id) or (turns.is_waiting and not turns.must_wait_for(self.live)):
            self.wake()

    def run_recurred(self, run: LiveRun, following: ClaimedRun) -> None:
        if self.live.get(run.run_id) is run:
            self._schedule_run(LiveRun(self, run.workflow, following, is_new=True))
            if self.draining:
                self.live[run.run_id].drain()

    def on_written(self, bundle: RunWrite) -> None:
        if bundle.dispatches:
            self._on_staged()
        if bundle.outgoing:
            self._on_outbox()
        here = {letter.run_id for letter in bundle.letters if letter.run_id in self.live}
        for run_id in here:
            self.request_inbox(self.live[run_id])
        if bundle.children or any(letter.run_id not in here for letter in bundle.letters):
            self.wake(sure=True)
            self._notify_other_processes()

    def on_step_committed(self, *, dispatches: bool, outgoing: bool, starts: bool) -> None:
        if dispatches:
            self._on_staged()
        if outgoing:
            self._on_outbox()
        if starts:
            self.wake(sure=True)
            self._notify_other_processes()

    def _notify_other_processes(self) -> None:
        """What is handed back must not wait for the others' next look; one call speaks for many runs."""
        if self._telling is None or self._telling.done():
            self._telling = supervision.start_once("announcing runs", self._announce, name="edda-announce")

    async def _announce(self) -> None:
        with suppress(*RETRYABLE_ERRORS):  # only a hint: other workers look by themselves every `poll` seconds
            await self._storage.notify()

    def _remove(self, run: LiveRun) -> None:
        if self.live.get(run.run_id) is run:
            del self.live[run.run_id]
        self.journal.unquarantine(run.run_id)
        self._leave_turn(run.run_id)
        if self._room == 1:
            self.wake()
        if not self.live:
            self._emptied.set()

    def _owns(self, run_id: RunId, epoch: int) -> bool:
        run = self.live.get(run_id)
        return run is not None and run.epoch == epoch

    def _sources(self) -> Sequence[RunWriter]:
        return list(self.live.values())

    def _run_lost(self, source: RunWriter, why: str) -> None:
        run = self.live.get(source.run_id)
        if run is source:
            logger.warning("run %s: %s; this worker drops it, and it goes on from its history", run.run_id, why)
            run.abandon()
            self._remove(run)
            self._unknown_claims.add(run.run_id)
            self._claim_recheck.start()  # it may be ours in the database all the same
            self.wake()

    # What the heartbeat tells

    def on_heartbeat(self, database_now: int, sent: float, received: float) -> None:
        self.clock.observe(database_now, sent, received)
        self.outage.end(sent)
        if not self._lease_was_safe and self.may_start_steps:
            for run in list(self.live.values()):
                run.advance()

    def on_heartbeat_failed(self, error: Exception) -> None:
        self.outage.begin(error)

    def on_taken_over(self) -> None:
        self._on_lost(self)

    def clock_jumped(self) -> None:
        if not any(task.get_name() == _CLOCK for task in self._background_tasks):
            self._run_errand(_CLOCK, "mending times", self._mend_times)

    async def _mend_times(self) -> None:
        """Times that were stored before the database's clock was set back lie in the future now."""
        lease = int(self.settings.lease * MICROSECONDS)
        mended = await self._retry_forever("mending times", lambda: self._storage.mend_times(lease))
        if mended:
            logger.warning("the database's clock was set back: %d runs that were ready are made ready again", mended)
        self._on_notification()
        self.wake()
        self._notify_other_processes()

    def runs_handed_over(self) -> None:
        """While the loop was blocked, the heartbeat gave our other runs away: look which ones are still ours."""
        if not any(task.get_name() == _OWNERSHIP for task in self._background_tasks):
            self._run_errand(_OWNERSHIP, "looking which runs are left", self._drop_handed_over)

    async def _drop_handed_over(self) -> None:
        self.heartbeat.has_handed_over = False  # before the look: what is handed over from now on is looked at again
        known = [run for run in self.live.values() if run.is_stored]
        self.journal.ownership_checks += 1
        owned = await self._retry_forever("reading which runs are ours", lambda: self._storage.owned_runs(self.info.id))
        for run in known:
            if owned.get(run.run_id) != run.epoch:
                self._run_lost(run, "it was handed over while the event loop was blocked")
        self._claim_recheck.start()  # a claim that was under way when the loop was blocked
        self.wake()
        for run in list(self.live.values()):
            run.advance()

    # What the runs tell

    def run_failed(self, run: LiveRun, error: Exception) -> None:
        """An error of the engine, or no memory, while this run was moved. What is in memory of it is forgotten; after
        a rest that grows with each failure in a row the run is given back, and goes on from its history."""
        if self.live.get(run.run_id) is not run:
            return
        run_id = run.run_id
        failures = self._failures.setdefault(run_id, supervision.Failures(f"driving run {run_id}"))
        pause = failures.record(error, "giving it back")
        self._resting.add(run_id)
        try:
            run.abandon()
        finally:
            self._remove(run)
            self.loop.call_later(pause, self._end_rest, run_id)

    def _end_rest(self, run_id: RunId) -> None:
        self._resting.discard(run_id)
        self._claim_recheck.start()
        self.wake()

    # Duties

    async def _journal_loop(self) -> None:
        try:
            await self.journal.run()
        except LeaseLostError as error:
            logger.warning("%s", error)
            self._on_lost(self)
        except Exception as error:  # the batch in hand is lost with it: a second writer would leave records out
            self.fail(error)

    async def _claim_loop(self) -> None:
        backoff, doubt = Backoff(), self._claim_recheck
        while not self.draining:
            self._woken.clear()
            try:
                if doubt.is_due:
                    await self._release_unknown_claims()
                    doubt.checked()
                pause = await self._claim_ready()
                backoff = Backoff()
            except LeaseLostError as error:
                logger.warning("%s", error)
                self._on_lost(self)
                return
            except RETRYABLE_ERRORS as error:
                if backoff.warn(logger, "claiming failed: %s", error):
                    self.outage.begin(error)
                doubt.start()
                await backoff.pause()
                continue
            await self._wait_for_work(pause)

    async def _release_unknown_claims(self) -> None:
        """A claim whose answer was lost may have given us runs that we do not know of: nobody would drive them. Only
        who claims can tell, between two claims: else it could be one that is just coming in."""
        owned = await self._storage.owned_runs(self.info.id)
        for run_id in owned.keys() - self.live.keys() - self._resting:
            if self._unknown_claims.may_return(run_id):
                level = logging.DEBUG if run_id in self._unknown_claims else logging.WARNING
                logger.log(level, "run %s belongs to worker %s, which does not drive it; freed", run_id, self.info.id)
                await self._storage.release_run(run_id)

    async def _claim_ready(self) -> float:
        """Claim all there is room for; returns the seconds until the next run is due."""
        names = self._names()
        rest = await self._run_suspects(names) if names else None
        if rest is not None:
            return min(rest, self.settings.poll)
        while names and self.has_capacity and not self.journal.is_overloaded:
            if not self._skip_due_check:
                due = await self._storage.next_due(names)
                if due != 0:
                    return self.settings.poll if due is None else min(due / MICROSECONDS, self.settings.poll)
            self._skip_due_check = False
            await self._claim_batch(names)
        return self.settings.poll

    async def _claim_batch(self, names: Sequence[str]) -> None:
        room = min(self._room, self.settings.claim_batch)
        await self._adopt_claimed(lambda seen: self._storage.claim(self.info.id, names, room, seen))

    async def _adopt_claimed(self, claim_runs: Callable[[int], Awaitable[Claim]]) -> Sequence[ClaimedRun]:
        """Claim, given the number of the last claim, and drive what it brought. Claims go one after another."""
        before, sent = self.journal.ownership_checks, time.monotonic()
        claim = await claim_runs(self._claims)
        self.clock.observe(claim.now, sent, time.monotonic())
        if claim.number is None:
            raise LeaseLostError(f"worker {self.info.id} was taken over, or the database lost a claim; starting anew")
        self._claims = claim.number
        self.journal.claimed(claim.number)
        ours = await self._recheck_ownership(claim.runs, before) if claim.runs else ()
        for run in ours:
            if not self.draining:
                self._add_claimed_run(run)
        return ours

    async def _run_suspects(self, names: Sequence[str]) -> float | None:
        """Give suspects their turn. Returns the seconds for which nothing else is to be claimed; None if there is no
        turn."""
        turns = self._suspects
        if turns.is_open:
            if turns.left > 0:
                return turns.left
            logger.info("worker %s lets other runs in beside a suspect that goes on", self.info.id)
            turns.close()
        if turns.is_marked:
            if self.live:
                await self._storage.keep_company(self.info.id)
            turns.is_marked = False
        if not turns.are_due or turns.is_time_of_others:
            return None
        if turns.has_held_long and await self._storage.next_due(names) == 0:
            turns.give_way()
            return None
        if self.live:
            # Known before anything is held back: most databases have no suspect most of the time.
            if not await self._storage.has_suspects(names):
                turns.found_none()
                return None
            if turns.must_wait_for(self.live) and (rest := turns.wait()) > 0:
                return rest
        return await self._claim_suspects(names)

    async def _claim_suspects(self, names: Sequence[str]) -> float | None:
        turns = self._suspects
        alone = not self.live and not turns.has_found_killer
        runs = await self._claim_suspect_group(names, alone)
        if not runs:
            turns.found_none()
            return None
        while turns.has_found_killer and self._room > 0 and (more := await self._claim_suspect_group(names, False)):
            runs = [*runs, *more]
        if alone and len(self.live) > len(runs):  # a run was begun here while the claim was under way
            await self._storage.keep_company(self.info.id)
        turns.open(runs, self.live)
        company = "alone" if len(runs) == 1 else f"with {len(runs) - 1} other such runs"
        if beside := len(self.live) - len(runs):
            company = f"{company} beside {beside} runs that stayed in memory"
        for run in runs:
            told = {"run": run.run_id, "workflow": run.workflow, "worker": self.info.id}
            log_line("run_suspect", **told, deaths=run.crashes.deaths, company=company)
        return turns.left

    async def _claim_suspect_group(self, names: Sequence[str], alone: bool) -> Sequence[ClaimedRun]:
        few = max(1, min(self._room, self.settings.claim_batch))
        return await self._adopt_claimed(
            lambda seen: self._storage.claim_suspects(self.info.id, names, few, alone, seen)
        )

    async def _recheck_ownership(self, runs: Sequence[ClaimedRun], before: int) -> Sequence[ClaimedRun]:
        """A run stolen between its claim and now would be driven by two: if ownership was looked at
        meanwhile, the look may have missed it, so look again until it stands still."""
        while before != self.journal.ownership_checks:
            before = self.journal.ownership_checks
            owned = await self._storage.owned_runs(self.info.id)
            runs = [run for run in runs if owned.get(run.run_id) == run.epoch]
        return runs

    async def _wait_for_work(self, pause: float) -> None:
        self._planned_wake = self.clock.now() + int(pause * MICROSECONDS)
        alarm = self.clock.call_at(self._planned_wake, self.wake)
        self._is_claiming = False
        try:
            await self._woken.wait()
        finally:
            self._is_claiming = True
            alarm.cancel()

    async def _notification_loop(self) -> None:
        """Wake up when other processes say so, and read the mail of the runs we hold."""
        while not self.draining:
            try:
                await self._storage.wait_for_notification(self.settings.poll)
                self._is_reading_inbox = True
                if self.live:
                    await self._read_inboxes()
            except RETRYABLE_ERRORS as error:
                logger.debug("listening failed: %s", error)
                await self.clock.sleep(self.settings.poll)
            self._is_reading_inbox = False
            self.wake()
            self._on_notification()

    # Mail

    def request_inbox(self, run: LiveRun) -> None:
        self._inbox_requests.add(run)
        if self._fetching is None:
            self._fetching = supervision.start("reading mail", self._read_requested_inboxes, name="edda-mail")

    async def _read_requested_inboxes(self) -> None:
        while self._inbox_requests:
            runs, self._inbox_requests = self._inbox_requests, set()
            try:
                await self._retry_forever("reading mail", self._read_inboxes)
            except BaseException:  # begun anew if it is an error: these runs wait for it
                self._inbox_requests |= runs
                raise
            for run in runs:
                run.inbox_checked()
        self._fetching = None

    async def ensure_wait_indexed(self, floors: EventCursors, command: Command) -> None:
        await self._retry_forever(
            "preparing a wait", lambda: floors.ensure_indexed(command, self.match_paths, self._storage)
        )

    async def read_backlog(self, key: bytes, after: int) -> tuple[StoredEvent, ...]:
        return await self._retry_forever(
            "reading messages", lambda: self._storage.events_under_key(key, after, PAGE_SIZE)
        )

    # Other runs

    async def start_or_watch(self, start: Start | None, run_id: RunId, watcher: EndWatcher | None) -> RunRecord:
        async def look() -> RunRecord:
            if start is not None:
                await self.client.insert_run(start)
            record = await (self._storage.add_watcher(run_id, watcher) if watcher else self._storage.get(run_id))
            if record is None:
                raise InstanceNotFoundError(f"no run has the id {run_id!r}")
            return record

        return await self._retry_forever("looking for another run", look)

    def fetch_watchers(self, run: LiveRun) -> None:
        self._run_errand("edda-watchers", "reading who waits for a run", lambda: self._fetch_watchers(run))

    def _run_errand(self, name: str, what: str, work: Callable[[], Awaitable[None]]) -> None:
        errand = supervision.start(what, work, name=name)
        self._background_tasks.add(errand)
        errand.add_done_callback(self._background_tasks.discard)

    async def _fetch_watchers(self, run: LiveRun) -> None:
        run.watchers_loaded(
            await self._retry_forever("reading who waits for a run", lambda: self._storage.watchers(run.run_id))
        )

    async def _retry_forever(self, doing: str, call: Callable[[], Awaitable[T]]) -> T:
        """For what can be done twice: until there is an answer."""
        backoff = Backoff()
        while True:
            try:
                return await call()
            except (
                *RETRYABLE_ERRORS,
                MigrationError,
            ) as error:  # tables that are away come back; the run must not fail by it
                if backoff.warn(logger, doing + " failed: %s", error):
                    self.outage.begin(error)
                await backoff.pause()

    async def _read_inboxes(self) -> None:
        for letter in await self._storage.read_inboxes(self.info.id):
            run = self.live.get(letter.run_id)
            if run is not None:
                run.read_inbox_item(letter)

    async def _take_over_loop(self) -> None:
        orphans_due = 0.0
        while not self.draining:
            if self.heartbeat.has_died:
                self._on_lost(self)
                return
            self.parking_log.summarize()
            try:
                roster = await self._storage.registered_workers()
                if all(one.info.id != self.info.id for one in roster):
                    logger.warning("worker %s is no longer registered: it was taken over", self.info.id)
                    self._on_lost(self)
                    return
                moved = await self._remove_dead_local_workers(roster)
                if self.heartbeat.may_take_over:
                    if any(one.is_lapsed and one.info.id != self.info.id for one in roster):
                        moved += await self._take_over_all() if await self._is_clock_steady() else 0
                    if time.monotonic() >= orphans_due:
                        orphans_due = time.monotonic() + self.settings.orphan_sweep
                        moved += await self._storage.free_orphans()
                        await self._unclaimed.look(self._names(), self.clock.now())
                if moved:
                    await self._storage.notify()
                    self.wake()
                if not self._suspects.are_due and await self._storage.has_suspects(self._names()):
                    self._suspects.are_due = True
                    self.wake()
            except RETRYABLE_ERRORS as error:
                logger.debug("sweep failed: %s", error)
            await asyncio.sleep(self.settings.sweep * random.uniform(0.75, 1.25))

    async def _is_clock_steady(self) -> bool:
        """A clock that was set forward makes every lease look lapsed: ask for it once more before anything is taken."""
        sent = time.monotonic()
        now = await self._storage.now()
        self.heartbeat.see_clock(now, sent, time.monotonic())
        return self.heartbeat.may_take_over

    async def _remove_dead_local_workers(self, roster: Sequence[WorkerStatus]) -> int:
        """Workers of this very host whose processes are gone: nobody has to wait for their leases."""
        buried = 0
        for info in (one.info for one in roster if one.info.host == self.info.host):
            if info.id != self.info.id and host.has_ended(info.id, info.pid):
                await self._storage.remove_worker(info.id, died=True)
                host.forget(info.id)
                log_line("worker_dead", worker=self.info.id, dead=info.id, process=info.pid)
                buried += 1
        return buried

    async def _prune_loop(self) -> None:
        await Pruner(self._storage, self.clock, self.settings).run()

    async def _take_over_all(self) -> int:
        moved = 0
        while (taken := await self._storage.take_over(self.info.id)) is not None:
            log_line("worker_taken_over", worker=self.info.id, runs=taken.moved, dead=taken.worker)
            moved += taken.moved
        return moved
