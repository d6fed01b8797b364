"""The heartbeat: a thread with a connection of its own, so that a busy event loop does not lose its lease."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from edda.core.model import MICROSECONDS, WorkerId
from edda.errors import StorageConflictError, StorageUnavailableError
from edda.storage.ports import Pulse, Workers

from .settings import Settings

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Told on the worker's own loop."""

    def beat(self, database_now: int, received: float) -> None: ...

    def taken_over(self) -> None: ...


class Heartbeat:
    def __init__(
        self,
        storage: Workers,
        worker: WorkerId,
        settings: Settings,
        listener: Listener,
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
        self._loop_thread = threading.get_ident()
        self.sent_at = monotonic()
        """When the last good heartbeat was sent; the lease counts from there."""
        self.healthy_since = monotonic()
        """Since when every heartbeat got its answer; restarts with every interruption."""
        self._loop_ticked = monotonic()
        self._ticker: asyncio.TimerHandle | None = None
        self._database_before: tuple[int, float] | None = None

    def start(self) -> None:
        self._tick()
        self._thread.start()

    async def stop(self) -> None:
        self.kill()
        await asyncio.to_thread(self._thread.join, 10)

    def kill(self) -> None:
        self._stop.set()
        if self._ticker is not None:
            self._ticker.cancel()

    @property
    def is_fresh(self) -> bool:
        return self._monotonic() - self.sent_at < self._settings.self_fence

    @property
    def may_take_over(self) -> bool:
        """True once our own heartbeats have gone well for a while: then others' silence means something."""
        now = self._monotonic()
        settled = now - self.healthy_since >= self._settings.takeover_grace
        return settled and now - self.sent_at < self._settings.heartbeat + 2

    def _tick(self) -> None:
        self._loop_ticked = self._monotonic()
        self._ticker = self._loop.call_later(min(1.0, self._settings.heartbeat), self._tick)

    def _run(self) -> None:
        try:
            asyncio.run(self._beat_for_ever())
        except BaseException:  # nobody joins this thread: what ends it must be said here
            logger.critical("the heartbeat of %s died; its lease will lapse", self._worker, exc_info=True)

    async def _beat_for_ever(self) -> None:
        pulse: Pulse | None = None
        try:
            while not self._stop.is_set():
                if self._loop_is_stuck():
                    return
                try:
                    pulse = pulse or await self._storage.pulse()
                    if not await self._beat(pulse):
                        return
                    pause = self._settings.heartbeat
                except (StorageUnavailableError, StorageConflictError, TimeoutError) as error:
                    logger.warning("heartbeat of %s failed: %s", self._worker, error)
                    self.healthy_since = self._monotonic()
                    pause = min(1.0, self._settings.heartbeat)
                self._stop.wait(pause)  # nothing else runs on this thread's loop
        finally:
            if pulse is not None:
                await pulse.close()

    async def _beat(self, pulse: Pulse) -> bool:
        sent = self._monotonic()
        async with asyncio.timeout(max(4.0, self._settings.heartbeat)):
            now = await pulse.beat(self._worker, int(self._settings.lease * MICROSECONDS))
        received = self._monotonic()
        if self._stop.is_set():
            return False
        if now is None:
            self._tell(self._listener.taken_over)
            return False
        self._watch_clock(now, received)
        self.sent_at = sent
        self._tell(self._listener.beat, now, received)
        return True

    def _watch_clock(self, database_now: int, received: float) -> None:
        """A database whose clock jumped makes every lease look old or new: let everybody renew first."""
        if self._database_before is not None:
            then, at = self._database_before
            if abs((database_now - then) / MICROSECONDS - (received - at)) > 2:
                logger.warning("the database's clock jumped; no take-over for %s s", self._settings.takeover_grace)
                self.healthy_since = received
        self._database_before = (database_now, received)

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the worker's loop is closed: there is nobody to tell
            self._stop.set()

    def _loop_is_stuck(self) -> bool:
        stuck = self._monotonic() - self._loop_ticked
        if stuck < self._settings.stall_limit:
            return False
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)) if frame else "unknown"
        logger.critical(
            "the event loop has been stuck for %.0f s; its lease is given up. It is here:\n%s", stuck, stack
        )
        return True
