"""The heartbeat: a thread with a connection of its own, so that a busy event loop does not lose its lease.

While the loop is blocked the lease is still renewed, without a limit: else another worker would take the blocking step
over, and be blocked by it. After `stall_limit` the worker's *other* runs are released for other workers, and only the
one that blocks is kept.
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
from edda.engine.tasks import RETRYABLE_ERRORS, Backoff
from edda.storage.ports import HeartbeatConnection, Workers

from . import supervision
from .watchdog import Culprit, Watchdog

logger = logging.getLogger(__name__)

CLOCK_JUMP = 2.0
"""Seconds by which the database's clock has to differ from this process's to have been set."""


class HeartbeatListener(Protocol):
    """The worker; called on its own loop."""

    def on_heartbeat(self, database_now: int, sent: float, received: float) -> None: ...

    def on_heartbeat_failed(self, error: Exception) -> None:
        """Called for the first of several failures in a row."""
        ...

    def on_taken_over(self) -> None: ...

    def clock_jumped(self) -> None:
        """The database's clock was set: stored times may lie in the future now."""
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
        """When the last answered heartbeat was sent; the lease counts from there."""
        self.ok_since = monotonic()
        """Since when every heartbeat was answered."""
        self.has_handed_over = False
        """Set by the heartbeat's thread; the worker starts no step until it has read which runs it still owns."""
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
        """The thread ended without a call of `stop` or `kill`."""
        return not self._stop.is_set() and self._thread.ident is not None and not self._thread.is_alive()

    @property
    def lease_is_safe(self) -> bool:
        return self._monotonic() - self.sent_at < self._settings.self_fence

    @property
    def may_take_over(self) -> bool:
        """True once this worker's own heartbeats were answered for `takeover_grace`: only then a lapsed lease proves
        that the other worker is gone."""
        now = self._monotonic()
        is_steady = now - self.ok_since >= self._settings.takeover_grace
        # By then every live worker has renewed its lease on the new time, or starts no step any more (`self_fence`).
        is_steady = is_steady and now - self._jumped_at >= max(self._settings.takeover_grace, self._settings.lease)
        return is_steady and now - self.sent_at < self._settings.heartbeat + 2

    def see_clock(self, database_now: int, sent: float, received: float) -> None:
        """Compare the database's time with its last answer. If its clock was set meanwhile, every lease seems lapsed or
        new: no worker is taken over until all had the time to renew. Called by either thread."""
        seen, self._clock_seen = self._clock_seen, (database_now, sent, received)
        if seen is None:
            return
        then, sent_then, received_then = seen
        passed = (database_now - then) / MICROSECONDS
        # Each time the clock was read between sending and receiving: slow answers alone prove nothing.
        if not sent - received_then - CLOCK_JUMP < passed < received - sent_then + CLOCK_JUMP:
            logger.warning(
                "the database's clock was set by %+.1f s; no take-over until every worker has renewed its lease",
                passed - (received - received_then),
            )
            self._jumped_at = received
            self._call_on_loop(self._listener.clock_jumped)

    # In the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._run_tasks())
        except BaseException as error:  # join() does not raise it
            logger.critical("heartbeat of %s ended (%r), starting a new worker", self._worker, error, exc_info=True)
            self._call_on_loop(self._listener.on_taken_over)

    async def _run_tasks(self) -> None:
        self._own_loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        watching = supervision.start("watchdog of the event loop", self._watchdog.run, name="edda-watchdog")
        try:
            await supervision.keep(f"heartbeat of {self._worker}", self._beat_loop)
        finally:
            watching.cancel()

    async def _beat_loop(self) -> None:
        connection: HeartbeatConnection | None = None
        try:
            while not self._stop.is_set():
                try:
                    connection = connection or await self._storage.open_heartbeat()
                    if not await self._beat(connection):
                        return
                    pause = self._settings.heartbeat
                    await self._check_stall(connection)
                    self._backoff = Backoff()
                except (*RETRYABLE_ERRORS, TimeoutError) as error:
                    if self._backoff.warn(logger, "heartbeat of %s failed (%s), trying again", self._worker, error):
                        self._call_on_loop(self._listener.on_heartbeat_failed, error)
                    self.ok_since = self._monotonic()
                    pause = min(1.0, self._settings.heartbeat)
                await self._rest(pause)
        finally:
            if connection is not None:
                await connection.close()

    async def _rest(self, seconds: float) -> None:
        assert self._ending is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    async def _beat(self, connection: HeartbeatConnection) -> bool:
        sent = self._monotonic()
        async with asyncio.timeout(max(4.0, self._settings.heartbeat)):
            now = await connection.beat(self._worker, int(self._settings.lease * MICROSECONDS))
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

    async def _check_stall(self, connection: HeartbeatConnection) -> None:
        """Release all runs but the one that blocks the loop, at every heartbeat until the loop is free: a claim that
        was under way may have added some."""
        culprit = self._culprit or self._watchdog.culprit()  # read before the check whether the loop is still blocked
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
        moved = await connection.hand_over(self._worker, culprit.run_id)
        if moved:
            runs = "run" if moved == 1 else "runs"
            logger.warning("heartbeat of %s released %d %s for other workers", self._worker, moved, runs)
        self._call_on_loop(self._listener.runs_handed_over)

    def _call_on_loop(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the worker's loop is closed
            self._stop.set()
