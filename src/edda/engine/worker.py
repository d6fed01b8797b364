"""One incarnation of a worker: it claims runs, drives them, and takes over from those that died.

A worker that was taken over is never mended: it forgets everything, and the engine makes a new one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from edda.core.codec import Codec
from edda.core.model import (
    MICROSECONDS,
    Bundle,
    ClaimedRun,
    End,
    Fence,
    Registered,
    Release,
    RunId,
    RunRecord,
    Start,
    StoredEvent,
    Watcher,
    WorkerInfo,
)
from edda.core.retry import RetryPolicy
from edda.errors import InstanceNotFoundError, LeaseLostError, StorageConflictError, StorageUnavailableError
from edda.storage.ports import Joints, Storage
from edda.workflow.current import Client
from edda.workflow.execution import Command
from edda.workflow.workflow import Workflow

from .backoff import Backoff
from .clock import Clock
from .dismissal import dismiss
from .doubt import Doubt
from .floors import Floors
from .heartbeat import Heartbeat
from .hooks import HookCaller
from .host import is_dead
from .journal import JournalWriter, Source
from .pages import PAGE
from .retention import Retention
from .run import LiveRun
from .settings import Settings
from .shapes import ShapeBook
from .slots import Slots
from .steps import Threads

if TYPE_CHECKING:
    from edda.storage.alchemy import Sessions

logger = logging.getLogger(__name__)

T = TypeVar("T")

Transient = (StorageUnavailableError, StorageConflictError)


class Worker:
    def __init__(
        self,
        info: WorkerInfo,
        storage: Storage,
        *,
        client: Client,
        clock: Clock,
        codec: Codec,
        threads: Threads,
        slots: Slots,
        hooks: HookCaller | None,
        settings: Settings,
        retry_policy: RetryPolicy,
        book: ShapeBook,
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
        self.joints: Joints = storage
        self.loop = asyncio.get_running_loop()
        self.client = client
        self.clock = clock
        self.codec = codec
        self.threads = threads
        self.slots = slots
        self.hooks = hooks
        self.settings = settings
        self.retry_policy = retry_policy
        self.book = book
        self.live: dict[RunId, LiveRun] = {}
        self.draining = False
        self.journal = JournalWriter(
            storage, Fence(info.id, 0, 0), owns=self._owns, owned_sources=self._sources, lost=self._lose
        )
        self._storage = storage
        self._find = find
        self._names = names
        self._on_end = on_end
        self._on_lost = on_lost
        self._on_dispatch = on_dispatch
        self._on_outgoing = on_outgoing
        self._on_news = on_news
        self._find_sessions = find_sessions
        self._nudged = asyncio.Event()
        self._emptied = asyncio.Event()
        self._sure = False
        self._planned_wake = 0
        self._is_looking = True
        """For something to claim; it begins with that."""
        self._is_hearing = False
        self._was_fresh = True
        self._telling: asyncio.Task[None] | None = None
        self._wanting_mail: set[LiveRun] = set()
        self._fetching: asyncio.Task[None] | None = None
        self._errands: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.heartbeat = Heartbeat(storage, info.id, settings, self)

    # Life

    async def start(self) -> None:
        self.clock.observe(
            await self._storage.register(self.info, int(self.settings.lease * MICROSECONDS)), time.monotonic()
        )
        await self._storage.unpark(self._names())
        await self.book.look()
        self.heartbeat.start()
        for duty in (self._flush, self._claim, self._sweep, self._listen, self._prune):
            self._tasks.append(asyncio.create_task(duty(), name=f"edda-{duty.__name__.strip('_')}"))

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
                run.stop_bodies()
            await self._until_empty()

    async def retire(self) -> None:
        await self._stop_tasks()
        await self.heartbeat.stop()
        try:
            await self._storage.retire(self.info.id)
            await self._storage.announce()
        except Transient as error:
            logger.warning("worker %s could not sign off (%s); its lease will lapse", self.info.id, error)

    async def abandon(self) -> None:
        """Taken over: nothing of this incarnation may have an effect any more."""
        self.kill()
        await dismiss(*self._tasks)

    def kill(self) -> None:
        """Stop at once and write nothing, as a dying process would."""
        self.draining = True
        self.heartbeat.kill()
        for task in (*self._tasks, *self._errands, *([self._fetching] if self._fetching else ())):
            task.cancel()
        for run in list(self.live.values()):
            run.abandon()
        self.live.clear()
        self._emptied.set()

    async def _stop_tasks(self) -> None:
        beside = [task for task in (self._telling, self._fetching, *self._errands) if task is not None]
        await dismiss(*self._tasks)
        await asyncio.gather(*beside, return_exceptions=True)

    async def _until_empty(self) -> None:
        while self.live:
            self._emptied.clear()
            await self._emptied.wait()

    @property
    def is_quiet(self) -> bool:
        """Nothing is under way in this process that could change anything by itself."""
        at_rest = all(run.is_resting for run in self.live.values())
        looks = self._is_looking or self._is_hearing or self._nudged.is_set()
        busy = looks or self._fetching is not None or self._errands
        return at_rest and self.journal.is_idle and not busy

    def alarms(self) -> list[int]:
        """When the runs that stay in memory go on."""
        return [run.alarm_at for run in self.live.values() if run.alarm_at is not None]

    @property
    def has_room(self) -> bool:
        return not self.draining and len(self.live) < self.settings.capacity

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
            start_seq=self.book.newest,
        )
        run = LiveRun(self, self._find(start.workflow), claimed, start)
        self.journal.put(run)
        self._drive(run)
        return run

    def nudge(self, sure: bool = False) -> None:
        """There may be something to claim, or surely is: then it need not be looked for first."""
        self._sure = self._sure or sure
        self._nudged.set()

    def _adopt(self, claimed: ClaimedRun) -> None:
        old = self.live.pop(claimed.run_id, None)
        if old is not None:  # stolen from us and claimed again before we noticed
            old.abandon()
        self._drive(LiveRun(self, self._find(claimed.workflow), claimed))

    def _drive(self, run: LiveRun) -> None:
        self.live[run.run_id] = run
        self.loop.call_soon(run.begin)

    @property
    def sessions(self) -> Sessions:
        return self._find_sessions()

    @property
    def may_act(self) -> bool:
        self._was_fresh = self.heartbeat.is_fresh
        return self._was_fresh

    def run_ended(self, run: LiveRun, end: End) -> None:
        self._remove(run)
        self._on_end(run.run_id, end)

    def run_released(self, run: LiveRun, release: Release, early: bool) -> None:
        self._remove(run)
        due = release.ready_at
        if self.draining:
            self._tell_others()
        elif early or (due is not None and due < self._planned_wake):
            self.nudge(sure=early)

    def run_recurred(self, run: LiveRun, following: ClaimedRun) -> None:
        if self.live.get(run.run_id) is run:
            self._drive(LiveRun(self, run.workflow, following, is_new=True))
            if self.draining:
                self.live[run.run_id].drain()

    def wrote_to(self, bundle: Bundle) -> None:
        if bundle.dispatches:
            self._on_dispatch()
        if bundle.outgoing:
            self._on_outgoing()
        here = {letter.run_id for letter in bundle.letters if letter.run_id in self.live}
        for run_id in here:
            self.fetch_mail(self.live[run_id])
        if bundle.children or any(letter.run_id not in here for letter in bundle.letters):
            self.nudge(sure=True)
            self._tell_others()

    def tell_committed(self, *, dispatches: bool, outgoing: bool, starts: bool) -> None:
        if dispatches:
            self._on_dispatch()
        if outgoing:
            self._on_outgoing()
        if starts:
            self.nudge(sure=True)
            self._tell_others()

    def _tell_others(self) -> None:
        """What is handed back must not wait for the others' next look; one call speaks for many runs."""
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._storage.announce(), name="edda-announce")

    def _remove(self, run: LiveRun) -> None:
        if self.live.get(run.run_id) is run:
            del self.live[run.run_id]
        self.journal.forget(run.run_id)
        if len(self.live) == self.settings.capacity - 1:
            self.nudge()
        if not self.live:
            self._emptied.set()

    def _owns(self, run_id: RunId, epoch: int) -> bool:
        run = self.live.get(run_id)
        return run is not None and run.epoch == epoch

    def _sources(self) -> Sequence[Source]:
        return list(self.live.values())

    def _lose(self, source: Source) -> None:
        run = self.live.get(source.run_id)
        if run is source:
            logger.warning("run %s was taken from this worker", run.run_id)
            run.abandon()
            self._remove(run)

    # What the heartbeat tells

    def beat(self, database_now: int, received: float) -> None:
        self.clock.observe(database_now, received)
        if not self._was_fresh and self.heartbeat.is_fresh:
            for run in list(self.live.values()):
                run.pump()

    def taken_over(self) -> None:
        self._on_lost(self)

    # Duties

    async def _flush(self) -> None:
        try:
            await self.journal.run()
        except LeaseLostError as error:
            logger.warning("%s", error)
            self._on_lost(self)

    async def _claim(self) -> None:
        backoff, doubt = Backoff(), Doubt(self.settings.poll, self.settings.orphan_sweep)
        while not self.draining:
            self._nudged.clear()
            try:
                if doubt.is_due:
                    await self._drop_strays()
                    doubt.looked()
                pause = await self._claim_ready()
                backoff = Backoff()
            except Transient as error:
                backoff.warn(logger, "claiming failed: %s", error)
                doubt.arise()
                await backoff.pause()
                continue
            await self._wait_for_work(pause)

    async def _drop_strays(self) -> None:
        """A claim whose answer was lost may have given us runs that we do not know of: nobody would drive them. Only
        who claims can tell, between two claims: else it could be one that is just coming in."""
        owned = await self._storage.owned(self.info.id)
        for run_id in owned.keys() - self.live.keys():
            logger.warning("run %s was claimed without our knowing; it is given back", run_id)
            await self._storage.disown(run_id)

    async def _claim_ready(self) -> float:
        """Claim all there is room for; returns the seconds until the next run is due."""
        names = self._names()
        while names and self.has_room and not self.journal.is_crowded:
            if not self._sure:
                due = await self._storage.next_due(names)
                if due != 0:
                    return self.settings.poll if due is None else min(due / MICROSECONDS, self.settings.poll)
            self._sure = False
            await self._claim_some(names)
        return self.settings.poll

    async def _claim_some(self, names: Sequence[str]) -> None:
        room = min(self.settings.capacity - len(self.live), self.settings.claim_batch)
        before = self.journal.ownership_reads
        claim = await self._storage.claim(self.info.id, names, room)
        self.clock.observe(claim.now, time.monotonic())
        ours = await self._still_ours(claim.runs, before) if claim.runs else ()
        for run in ours:
            if not self.draining:
                self._adopt(run)

    async def _still_ours(self, runs: Sequence[ClaimedRun], before: int) -> Sequence[ClaimedRun]:
        """A run stolen between its claim and now would be driven by two: if ownership was looked at
        meanwhile, the look may have missed it, so look again until it stands still."""
        while before != self.journal.ownership_reads:
            before = self.journal.ownership_reads
            owned = await self._storage.owned(self.info.id)
            runs = [run for run in runs if owned.get(run.run_id) == run.epoch]
        return runs

    async def _wait_for_work(self, pause: float) -> None:
        self._planned_wake = self.clock.now() + int(pause * MICROSECONDS)
        alarm = self.clock.call_at(self._planned_wake, self.nudge)
        self._is_looking = False
        try:
            await self._nudged.wait()
        finally:
            self._is_looking = True
            alarm.cancel()

    async def _listen(self) -> None:
        """Wake up when other processes say so, and read the mail of the runs we hold."""
        while not self.draining:
            try:
                await self._storage.news(self.settings.poll)
                self._is_hearing = True
                if self.live:
                    await self._read_mail()
            except Transient as error:
                logger.debug("listening failed: %s", error)
                await self.clock.sleep(self.settings.poll)
            self._is_hearing = False
            self.nudge()
            self._on_news()

    # Mail

    def fetch_mail(self, run: LiveRun) -> None:
        self._wanting_mail.add(run)
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch_mail(), name="edda-mail")

    async def _fetch_mail(self) -> None:
        backoff = Backoff()
        try:
            while self._wanting_mail:
                runs, self._wanting_mail = self._wanting_mail, set()
                try:
                    await self._read_mail()
                except Transient as error:
                    backoff.warn(logger, "reading mail failed: %s", error)
                    self._wanting_mail |= runs
                    await backoff.pause()
                    continue
                for run in runs:
                    run.mail_checked()
        finally:
            self._fetching = None

    async def prepare_wait(self, floors: Floors, command: Command) -> None:
        await self._persistently("preparing a wait", lambda: floors.prepare(command, self.book, self._storage))

    async def read_page(self, key: bytes, after: int) -> tuple[StoredEvent, ...]:
        return await self._persistently("reading messages", lambda: self._storage.page(key, after, PAGE))

    # Other runs

    async def attend(self, start: Start | None, run_id: RunId, watcher: Watcher | None) -> RunRecord:
        async def look() -> RunRecord:
            if start is not None:
                await self.client.store(start)
            record = await (self._storage.watch(run_id, watcher) if watcher else self._storage.get(run_id))
            if record is None:
                raise InstanceNotFoundError(f"no run has the id {run_id!r}")
            return record

        return await self._persistently("looking for another run", look)

    def fetch_watchers(self, run: LiveRun) -> None:
        errand = asyncio.create_task(self._fetch_watchers(run), name="edda-watchers")
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)

    async def _fetch_watchers(self, run: LiveRun) -> None:
        run.watchers_read(
            await self._persistently("reading who waits for a run", lambda: self._storage.watchers(run.run_id))
        )

    async def _persistently(self, doing: str, call: Callable[[], Awaitable[T]]) -> T:
        """For what can be done twice: until there is an answer."""
        backoff = Backoff()
        while True:
            try:
                return await call()
            except Transient as error:
                backoff.warn(logger, doing + " failed: %s", error)
                await backoff.pause()

    async def _read_mail(self) -> None:
        for letter in await self._storage.mail(self.info.id):
            run = self.live.get(letter.run_id)
            if run is not None:
                run.read_mail(letter)

    async def _sweep(self) -> None:
        orphans_due = 0.0
        while not self.draining:
            try:
                roster = await self._storage.roster()
                moved = await self._bury_neighbours(roster)
                if self.heartbeat.may_take_over:
                    if any(one.is_lapsed and one.info.id != self.info.id for one in roster):
                        moved += await self._take_over_all()
                    if time.monotonic() >= orphans_due:
                        orphans_due = time.monotonic() + self.settings.orphan_sweep
                        moved += await self._storage.free_orphans()
                if moved:
                    await self._storage.announce()
                    self.nudge()
            except Transient as error:
                logger.debug("sweep failed: %s", error)
            await asyncio.sleep(self.settings.sweep * random.uniform(0.75, 1.25))

    async def _bury_neighbours(self, roster: Sequence[Registered]) -> int:
        """Workers of this very host whose processes are gone: nobody has to wait for their leases."""
        buried = 0
        for info in (one.info for one in roster if one.info.host == self.info.host):
            if info.id != self.info.id and is_dead(info.pid):
                logger.warning("worker %s is dead: process %d is gone", info.id, info.pid)
                await self._storage.retire(info.id)
                buried += 1
        return buried

    async def _prune(self) -> None:
        await Retention(self._storage, self.clock, self.settings).run()

    async def _take_over_all(self) -> int:
        moved = 0
        while (taken := await self._storage.take_over(self.info.id)) is not None:
            logger.warning("took over %d runs of worker %s", taken.moved, taken.worker)
            moved += taken.moved
        return moved
