"""One worker: it holds the runs that it drives, and starts, drains and ends with them.

A worker that was taken over is not repaired: it drops everything from memory, and the engine starts a new one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from edda.core.model import (
    MICROSECONDS,
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
)
from edda.engine.journal import JournalWriter, RunWriter
from edda.engine.log import ParkingLog
from edda.engine.log import runs as run_logger
from edda.engine.log import write as log_line
from edda.engine.run.run import LiveRun
from edda.engine.run.waits import PAGE_SIZE, EventCursors
from edda.engine.tasks import RETRYABLE_ERRORS, Outage, cancel_and_wait, retry_transient, start_task
from edda.errors import InstanceNotFoundError, LeaseLostError
from edda.workflow.client import Client
from edda.workflow.execution import Command
from edda.workflow.workflow import Workflow

from . import host, supervision
from .claims import ClaimLoop
from .heartbeat import Heartbeat
from .maintenance import Pruner, TakeOver

if TYPE_CHECKING:
    from edda.engine.engine import Engine

logger = logging.getLogger(__name__)

T = TypeVar("T")


class InboxPoller:
    """Reads the inboxes of the worker's live runs: after a notification, every poll, and when a run asks for it."""

    def __init__(self, worker: Worker) -> None:
        self.task: asyncio.Task[None] | None = None
        """Reads the inboxes of the runs that asked for it."""
        self._worker = worker
        self._storage = worker.services.storage
        self._is_reading = False
        self._requests: set[LiveRun] = set()

    @property
    def is_idle(self) -> bool:
        return not self._is_reading and self.task is None

    async def run(self) -> None:
        """Wait for notifications of other processes; after each, and every `poll` seconds, read and wake the worker."""
        worker, services = self._worker, self._worker.services
        while not worker.draining:
            try:
                await self._storage.wait_for_notification(services.settings.poll)
                self._is_reading = True
                if worker.live:
                    await self.read()
            except RETRYABLE_ERRORS as error:
                logger.debug("waiting for notifications failed (%s), trying again", error)
                await services.clock.sleep(services.settings.poll)
            self._is_reading = False
            worker.notified()

    def request(self, run: LiveRun) -> None:
        """Read the inboxes now, then call the run's `inbox_checked`."""
        self._requests.add(run)
        if self.task is None:
            self.task = supervision.start("reading inboxes", self._read_requested, name="edda-inbox")

    async def _read_requested(self) -> None:
        while self._requests:
            runs, self._requests = self._requests, set()
            try:
                await retry_transient(self.read, "reading inboxes", self._worker.outage)
            except BaseException:  # the supervision calls this method again if it is an error: these runs wait for it
                self._requests |= runs
                raise
            for run in runs:
                run.inbox_checked()
        self.task = None

    async def read(self) -> None:
        for item in await self._storage.read_inboxes(self._worker.worker_id):
            run = self._worker.live.get(item.run_id)
            if run is not None:
                run.read_inbox_item(item)


class Worker:
    def __init__(self, info: WorkerInfo, engine: Engine) -> None:
        services = engine.services
        self.info = info
        self.worker_id = info.id
        self.services = services
        self.client: Client = engine.client
        self.loop = asyncio.get_running_loop()
        self.live: dict[RunId, LiveRun] = {}
        self.draining = False
        self.failure: BaseException | None = None
        """Why this worker gave up, unless it was taken over."""
        self.resting: set[RunId] = set()
        """Runs that failed in the engine and are still owned, so that no worker claims them again at once."""
        self.outage = Outage(info.id)
        self.parking_log = ParkingLog()
        self.journal = JournalWriter(services.storage, Fence(info.id, 0, 0), self)
        self.heartbeat = Heartbeat(services.storage, info.id, services.settings, self)
        self.claims = ClaimLoop(self)
        self.inbox = InboxPoller(self)
        self.takeover = TakeOver(self)
        self.engine = engine
        self._storage = services.storage
        self._has_held_steps = False
        """`may_start_steps` was False for some run since the last heartbeat that advanced all runs."""
        self._emptied = asyncio.Event()
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._failures: dict[RunId, supervision.Failures] = {}
        """Of runs that failed in the engine."""
        self._awaiting: Counter[RunId] = Counter()
        """Runs with activities that wait for other runs, and the number of these activities."""
        self._worker_lock = host.Presence(info.id)

    # Start and end

    async def start(self) -> None:
        services = self.services
        self._worker_lock.hold()
        sent = time.monotonic()
        now = await self._storage.register(self.info, int(services.settings.lease * MICROSECONDS))
        received = time.monotonic()
        services.clock.observe(now, sent, received)
        self.heartbeat.see_clock(now, sent, received)  # a clock that is set before the first heartbeat is noticed
        if await self._storage.is_ahead():
            await self.takeover.correct_times()
        await self._storage.wake_parked(services.registry.names())
        # Before the first claim: the deaths of the runs of an earlier process decide which runs are claimed first.
        try:
            await self.takeover.remove_dead_local_workers(await self._storage.registered_workers())
        except Exception as error:  # no answer, or a defect: the sweep tries it again, and reports it
            what = f"{type(error).__name__}: {error}"
            logger.warning("worker %s could not check for dead workers (%s), the sweep tries again", self.info.id, what)
        await services.match_paths.load_last_event()
        self.heartbeat.start()
        journal = start_task(self.journal.run(), name="edda-journal")
        journal.add_done_callback(self._journal_ended)
        duties = {
            "claims": self.claims.run,
            "take-over": self.takeover.run,
            "inbox": self.inbox.run,
            "pruning": Pruner(self._storage, services.clock, services.settings).run,
        }
        self._tasks.append(journal)
        for name, duty in duties.items():
            what = f"{name} of worker {self.info.id}"
            # A duty that failed in the middle of a claim may have left runs that this worker owns and does not drive.
            self._tasks.append(supervision.start(what, duty, name=f"edda-{name}", on_failure=self.claims.recheck))

    def _journal_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, LeaseLostError):
            logger.warning("%s", error)
            self.lost()
        elif isinstance(error, Exception):  # its batch is lost: a second writer would leave these records out
            self.fail(error)

    def lost(self) -> None:
        """The worker was taken over, or cannot go on."""
        self.engine.worker_lost(self)

    def fail(self, error: BaseException) -> None:
        """Give up this worker: a part of it is lost that cannot be rebuilt."""
        self.failure = self.failure or error
        self.lost()

    async def drain(self, grace: float) -> None:
        """Claim nothing more, let attempts finish within the grace, hand all runs back."""
        self.draining = True
        for run in list(self.live.values()):
            run.drain()
        if await self._is_empty_within(grace):
            return
        for run in list(self.live.values()):
            run.abandon_attempts()
        timeout = self.services.settings.call_timeout
        if not await self._is_empty_within(timeout):
            logger.warning(
                "worker %s: %d %s could not be handed back within %g s, the database does not answer; other workers "
                "take over when its lease has lapsed",
                self.info.id,
                len(self.live),
                "run" if len(self.live) == 1 else "runs",
                timeout,
            )
            self.kill()

    async def _is_empty_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self.live:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    async def retire(self) -> None:
        others = [task for task in (self.inbox.task, *self._background_tasks) if task is not None]
        await cancel_and_wait(*self._tasks)
        if others:
            await asyncio.wait(others, timeout=self.services.settings.call_timeout)
            await cancel_and_wait(*others)
        self.parking_log.summarize(all=True)
        await self.heartbeat.stop()
        try:
            async with asyncio.timeout(self.services.settings.call_timeout):
                await self._storage.remove_worker(self.info.id)
                await self._storage.notify()
            self._worker_lock.remove()
        except (*RETRYABLE_ERRORS, TimeoutError) as error:
            self._worker_lock.release()
            logger.warning("worker %s could not sign off (%r); its lease will lapse", self.info.id, error)

    async def abandon(self) -> None:
        """After a take-over or a failure: stop without further effects. The runs that it still owns are released at
        once, so that other workers need not wait for the end of its lease."""
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
        for task in (*self._tasks, *self._background_tasks, *([self.inbox.task] if self.inbox.task else ())):
            task.cancel()
        for run in list(self.live.values()):
            try:
                run.abandon()
            except Exception as error:  # of one run: the others have to be dropped all the same
                logger.error("dropping run %s failed: %r", run.run_id, error, exc_info=error)
        self.live.clear()
        self._worker_lock.release()
        self._emptied.set()

    def _run_in_background(
        self, name: str, what: str, work: Callable[[], Awaitable[None]], *, once: bool = False
    ) -> None:
        """`once`: not beside a task of the same name."""
        if once and any(task.get_name() == name for task in self._background_tasks):
            return
        task = supervision.start(what, work, name=name)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)

    @property
    def is_idle(self) -> bool:
        """Nothing is under way in this process that could change anything by itself."""
        at_rest = all(run.is_idle for run in self.live.values())
        parts_at_rest = self.claims.is_idle and self.inbox.is_idle and self.journal.is_idle
        return at_rest and parts_at_rest and not self._background_tasks

    def due_times(self) -> list[int]:
        """When the runs that stay in memory go on."""
        return [run.alarm_at for run in self.live.values() if run.alarm_at is not None]

    # Capacity

    @property
    def has_capacity(self) -> bool:
        if self.draining or self.claims.suspects.holding_since is not None:
            return False
        return len(self.live) < self.services.settings.capacity or self.room > 0

    @property
    def room(self) -> int:
        """Runs that may still come into memory. A run whose activity waits for another run does not count: the other
        run may be one that could not be claimed otherwise."""
        room = self.services.settings.capacity - len(self.live)
        return room + len(self._awaiting.keys() & self.live.keys()) if self._awaiting else room

    @contextmanager
    def awaiting(self, run_id: RunId) -> Iterator[None]:
        """While an activity of this run waits for another run."""
        self._awaiting[run_id] += 1
        if len(self.live) >= self.services.settings.capacity:
            self.wake()
        try:
            yield
        finally:
            self._awaiting[run_id] -= 1
            if not self._awaiting[run_id]:
                del self._awaiting[run_id]

    # Runs come into memory

    def begin(self, start: Start, workflow: Workflow[Any, Any]) -> LiveRun:
        """Start a run that is this worker's own from its first record on."""
        claimed = ClaimedRun(
            start.run_id,
            start.workflow,
            generation=0,
            epoch=1,
            input=start.input,
            created_at=start.created_at,
            deadline=start.deadline,
            inbox_read=0,
            attempts=0,
            entries=(),
            inbox=(),
            event_cursor=self.services.match_paths.last_event,
        )
        run = LiveRun(self, workflow, claimed, start)
        self.journal.enqueue(run)
        self.live[run.run_id] = run
        self.loop.call_soon(run.begin)
        return run

    def withdraw(self, run: LiveRun) -> bool:
        """Drop a run that was started here, if the journal has not taken its rows; False if they may be stored."""
        if run.writes.is_start_taken:
            return False
        run.abandon()
        self._remove(run)
        return True

    def wake(self, sure: bool = False) -> None:
        """There may be a run to claim. `sure`: there is one."""
        self.claims.wake(sure)

    def add_claimed_run(self, claimed: ClaimedRun) -> None:
        old = self.live.pop(claimed.run_id, None)
        if old is not None:  # taken from this worker, and claimed again before it noticed
            old.abandon()
        if run_logger.isEnabledFor(logging.DEBUG):
            log_line(
                "run_claimed",
                run=claimed.run_id,
                workflow=claimed.workflow,
                worker=self.info.id,
                entries=len(claimed.entries),
            )
        self._add(LiveRun(self, self.services.registry.find(claimed.workflow), claimed))

    def _add(self, run: LiveRun) -> None:
        self.live[run.run_id] = run
        self.loop.call_soon(run.begin)

    # What the runs report

    @property
    def may_start_steps(self) -> bool:
        may_start = self.heartbeat.lease_is_safe and not self.heartbeat.has_handed_over
        if not may_start:
            self._has_held_steps = True
        return may_start

    def run_ended(self, run: LiveRun, end: End) -> None:
        self._failures.pop(run.run_id, None)
        self._remove(run)
        self.claims.dropped.pop(run.run_id, None)
        self.engine.client.run_ended(run.run_id, end)

    def run_unstored(self, run: LiveRun) -> None:
        self._remove(run)

    def run_suspended(self, run: LiveRun, transition: Suspend, early: bool) -> None:
        self._failures.pop(run.run_id, None)
        self._remove(run)
        due = transition.ready_at
        if self.draining:
            self.engine.notify_other_processes()
        elif early or (due is not None and due < self.claims.next_claim):
            self.wake(sure=early)

    def run_recurred(self, run: LiveRun, next_generation: ClaimedRun) -> None:
        if self.live.get(run.run_id) is run:
            self._add(LiveRun(self, run.workflow, next_generation, is_new=True))
            if self.draining:
                self.live[run.run_id].drain()

    def run_progressed(self, run: LiveRun) -> None:
        self._run_in_background("edda-deaths", "clearing deaths", lambda: self._clear_deaths(run))

    async def _clear_deaths(self, run: LiveRun) -> None:
        await self._retry("clearing deaths", lambda: self._storage.clear_deaths(run.run_id, run.epoch))
        # Not before: a suspect of the next turn may end the process at once.
        self.claims.leave_turn(run.run_id)

    def run_failed(self, run: LiveRun, error: Exception) -> None:
        """An error of the engine, or no memory. The run is dropped from memory; after a pause that grows with each
        failure in a row it is released, and goes on from its history."""
        if self.live.get(run.run_id) is not run:
            return
        run_id = run.run_id
        failures = self._failures.setdefault(run_id, supervision.Failures(f"driving run {run_id}"))
        pause = failures.record(error, "giving it back")
        self.resting.add(run_id)
        try:
            run.abandon()
        finally:
            self._remove(run)
            self.loop.call_later(pause, self._end_rest, run_id)

    def _end_rest(self, run_id: RunId) -> None:
        self.resting.discard(run_id)
        self.claims.recheck()
        self.wake()

    def on_written(self, write: RunWrite) -> None:
        here = {signal.run_id for signal in write.signals if signal.run_id in self.live}
        for run_id in here:
            self.inbox.request(self.live[run_id])
        self.on_step_committed(
            staged=bool(write.staged_events),
            outbox=bool(write.outbox_events),
            starts=bool(write.children) or any(signal.run_id not in here for signal in write.signals),
        )

    def on_step_committed(self, *, staged: bool, outbox: bool, starts: bool) -> None:
        if staged:
            self.engine.events_staged()
        if outbox:
            self.engine.outbox_written()
        if starts:
            self.engine.notify_all()

    def _remove(self, run: LiveRun) -> None:
        if self.live.get(run.run_id) is run:
            del self.live[run.run_id]
        self.journal.unquarantine(run.run_id)
        self.claims.leave_turn(run.run_id)
        if self.room == 1:
            self.wake()
        if not self.live:
            self._emptied.set()

    # What the runs ask for

    def request_inbox(self, run: LiveRun) -> None:
        self.inbox.request(run)

    def fetch_watchers(self, run: LiveRun) -> None:
        self._run_in_background("edda-watchers", "reading the watchers of a run", lambda: self._fetch_watchers(run))

    async def _fetch_watchers(self, run: LiveRun) -> None:
        run.watchers_loaded(
            await self._retry("reading the watchers of a run", lambda: self._storage.watchers(run.run_id))
        )

    async def ensure_wait_indexed(self, cursors: EventCursors, command: Command) -> None:
        match_paths = self.services.match_paths
        await self._retry(
            "indexing the events of a wait", lambda: cursors.ensure_indexed(command, match_paths, self._storage)
        )

    async def read_backlog(self, key: bytes, after: int) -> tuple[StoredEvent, ...]:
        return await self._retry("reading messages", lambda: self._storage.events_under_key(key, after, PAGE_SIZE))

    async def start_or_watch(self, start: Start | None, run_id: RunId, watcher: EndWatcher | None) -> RunRecord:
        async def read() -> RunRecord:
            if start is not None:
                await self.client.insert_run(start)
            record = await (self._storage.add_watcher(run_id, watcher) if watcher else self._storage.get(run_id))
            if record is None:
                raise InstanceNotFoundError(f"no run has the id {run_id!r}")
            return record

        return await self._retry("starting or watching another run", read)

    async def _retry(self, doing: str, call: Callable[[], Awaitable[T]]) -> T:
        return await retry_transient(call, doing, self.outage)

    # What the journal asks for

    def run_lost(self, source: RunWriter, why: str) -> None:
        run = self.live.get(source.run_id)
        if run is source:
            logger.warning("run %s: %s; this worker drops it, and it goes on from its history", run.run_id, why)
            run.abandon()
            self._remove(run)
            self.claims.drop(run.run_id)

    # What the heartbeat reports

    def on_heartbeat(self, database_now: int, sent: float, received: float) -> None:
        self.services.clock.observe(database_now, sent, received)
        self.outage.end(sent)
        if self.heartbeat.has_handed_over:  # again, after a task that was under way at the time reset it
            self.runs_handed_over()
        # Cleared here alone: the heartbeat's thread makes the lease safe before it schedules this callback. A run that
        # asks in between may start its steps, and does not advance the runs that were refused before.
        if self._has_held_steps and self.may_start_steps:
            self._has_held_steps = False
            for run in list(self.live.values()):
                run.advance()

    def on_heartbeat_failed(self, error: Exception) -> None:
        self.outage.begin(error)

    def on_taken_over(self) -> None:
        self.lost()

    def clock_jumped(self) -> None:
        self._run_in_background("edda-clock", "correcting stored times", self.takeover.correct_times, once=True)

    def runs_handed_over(self) -> None:
        """While the loop was blocked, the heartbeat gave the other runs away: read which ones are still owned."""
        self._run_in_background("edda-ownership", "reading which runs are left", self._drop_handed_over, once=True)

    async def _drop_handed_over(self) -> None:
        self.heartbeat.has_handed_over = False  # before the read: runs that are handed over later are read again
        known = [run for run in self.live.values() if run.is_stored]
        self.journal.ownership_checks += 1
        owned = await self._retry("reading which runs are left", lambda: self._storage.owned_runs(self.info.id))
        for run in known:
            if owned.get(run.run_id) != run.epoch:
                self.run_lost(run, "it was handed over while the event loop was blocked")
        self.claims.recheck()  # a claim that was under way when the loop was blocked
        self.wake()
        for run in list(self.live.values()):
            run.advance()

    # Notifications

    def notified(self) -> None:
        """Another process may have written something."""
        self.wake()
        self.engine.wake_relayer()
