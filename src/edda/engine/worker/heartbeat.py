"""The heartbeat: a thread with a connection of its own, so that a busy event loop does not lose its lease.

While the loop is blocked the lease is still renewed, for as long as it takes: a step that blocks for ten minutes ends
well after ten minutes, and no second worker is blocked by taking it over. After `stall_limit` the worker's *other* runs
are given to whichever worker is free, and only the one that blocks is kept.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from edda.core.model import MICROSECONDS, WorkerId
from edda.engine.settings import Settings
from edda.engine.tasks import Backoff
from edda.errors import StorageConflictError, StorageUnavailableError
from edda.storage.ports import HeartbeatConnection, Workers

from . import supervision
from .watchdog import Culprit, Watchdog

logger = logging.getLogger(__name__)

JUMP = 2.0
"""Seconds by which the database's clock has to differ from ours to have been set."""


class HeartbeatListener(Protocol):
    """Told on the worker's own loop."""

    def on_heartbeat(self, database_now: int, sent: float, received: float) -> None: ...

    def on_heartbeat_failed(self, error: Exception) -> None:
        """The first of those that failed in a row."""
        ...

    def on_taken_over(self) -> None: ...

    def clock_jumped(self) -> None:
        """The database's clock was set: what compares stored times with it has to be looked at."""
        ...

    def runs_handed_over(self) -> None:
        """The loop was blocked, and most of the worker's runs are no longer its own."""
        ...


class Heartbeat:
    def __init__(
        self,
        storage: Workers,
        worker: WorkerId,
        settings: Settings,
        listener: HeartbeatListener,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._worker = worker
        self._settings = settings
        self._listener = listener
        self._monotonic = monotonic
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edda-heartbeat", daemon=True)
        self._watchdog = Watchdog(self._loop, threading.get_ident(), monotonic)
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self.sent_at = monotonic()
        """When the last good heartbeat was sent; the lease counts from there."""
        self.ok_since = monotonic()
        """Since when every heartbeat got its answer; restarts with every interruption."""
        self.has_handed_over = False
        """Set by the heartbeat's thread; the worker starts nothing until it has looked which runs it still owns."""
        self._jumped_at = -math.inf
        """When the database's clock was last seen to have been set."""
        self._culprit: Culprit | None = None
        """What blocks the loop for longer than the stall limit."""
        self._backoff = Backoff()
        self._clock_seen: tuple[int, float, float] | None = None

    def start(self) -> None:
        self._watchdog.tick()
        self._thread.start()

    async def stop(self) -> None:
        self.kill()
        await asyncio.to_thread(self._thread.join, self._settings.call_timeout)

    def kill(self) -> None:
        self._stop.set()
        self._watchdog.cancel()
        if self._own_loop is not None and self._ending is not None:
            with suppress(RuntimeError):  # the thread has closed its loop already
                self._own_loop.call_soon_threadsafe(self._ending.set)

    @property
    def has_died(self) -> bool:
        """The thread ended though it was not told to."""
        return not self._stop.is_set() and self._thread.ident is not None and not self._thread.is_alive()

    @property
    def lease_is_safe(self) -> bool:
        return self._monotonic() - self.sent_at < self._settings.self_fence

    @property
    def may_take_over(self) -> bool:
        """True once our own heartbeats have gone well for a while: then others' silence means something."""
        now = self._monotonic()
        settled = now - self.ok_since >= self._settings.takeover_grace
        # By then every live worker has renewed its lease on the new time.
        settled = settled and now - self._jumped_at >= max(self._settings.takeover_grace, self._settings.lease / 2)
        return settled and now - self.sent_at < self._settings.heartbeat + 2

    def see_clock(self, database_now: int, sent: float, received: float) -> None:
        """Compare an answer of the database with the last one. If its clock was set meanwhile, every lease looks old or
        new: no worker is taken over until all had the time to renew. Called by either thread."""
        seen, self._clock_seen = self._clock_seen, (database_now, sent, received)
        if seen is None:
            return
        then, sent_then, received_then = seen
        passed = (database_now - then) / MICROSECONDS
        # The clock was read between sending and receiving, both times: slow answers alone prove nothing.
        if not sent - received_then - JUMP < passed < received - sent_then + JUMP:
            logger.warning(
                "the database's clock was set by %+.1f s; no take-over until every worker has renewed its lease",
                passed - (received - received_then),
            )
            self._jumped_at = received
            self._call_on_loop(self._listener.clock_jumped)

    # In the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:  # the thread is joined by no caller that would look at its error
            logger.critical("heartbeat of %s ended (%r); a new worker follows it", self._worker, error, exc_info=True)
            self._call_on_loop(self._listener.on_taken_over)

    async def _live(self) -> None:
        self._own_loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        watching = supervision.start("watchdog of the event loop", self._watchdog.run, name="edda-watchdog")
        try:
            await supervision.keep(f"heartbeat of {self._worker}", self._beat_for_ever)
        finally:
            watching.cancel()

    async def _beat_for_ever(self) -> None:
        pulse: HeartbeatConnection | None = None
        try:
            while not self._stop.is_set():
                try:
                    pulse = pulse or await self._storage.open_heartbeat()
                    if not await self._beat(pulse):
                        return
                    pause = self._settings.heartbeat
                    await self._look_for_stall(pulse)
                    self._backoff = Backoff()
                except (StorageUnavailableError, StorageConflictError, TimeoutError) as error:
                    if self._backoff.warn(logger, "heartbeat of %s failed (%s), trying again", self._worker, error):
                        self._call_on_loop(self._listener.on_heartbeat_failed, error)
                    self.ok_since = self._monotonic()
                    pause = min(1.0, self._settings.heartbeat)
                await self._rest(pause)
        finally:
            if pulse is not None:
                await pulse.close()

    async def _rest(self, seconds: float) -> None:
        assert self._ending is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    async def _beat(self, pulse: HeartbeatConnection) -> bool:
        sent = self._monotonic()
        async with asyncio.timeout(max(4.0, self._settings.heartbeat)):
            now = await pulse.beat(self._worker, int(self._settings.lease * MICROSECONDS))
        received = self._monotonic()
        if self._stop.is_set():
            return False
        if now is None:
            self._call_on_loop(self._listener.on_taken_over)
            return False
        self.see_clock(now, sent, received)
        self.sent_at = sent
        self._call_on_loop(self._listener.on_heartbeat, now, sent, received)
        return True

    async def _look_for_stall(self, pulse: HeartbeatConnection) -> None:
        """Give all runs but the one that blocks the loop to other workers, at every beat until the loop is free: a
        claim that was under way may have brought more."""
        culprit = self._culprit or self._watchdog.culprit()  # read before it is asked whether the loop is still blocked
        if self._watchdog.blocked_for < self._settings.stall_limit:
            self._culprit = None
            return
        if self._culprit is None:
            self._culprit = culprit
            logger.critical(
                "event loop has been blocked for %.0f s by %s; other workers get the other runs of %s. The stack:\n%s",
                self._watchdog.blocked_for,
                culprit.description,
                self._worker,
                self._watchdog.stack(),
            )
        self.has_handed_over = True
        moved = await pulse.hand_over(self._worker, culprit.run_id)
        if moved:
            logger.warning("handed %d runs of %s to other workers", moved, self._worker)
        self._call_on_loop(self._listener.runs_handed_over)

    def _call_on_loop(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the worker's loop is closed: there is nothing left to tell
            self._stop.set()
