"""Detects from another thread that the worker's event loop is blocked, and which code blocks it.

A step or a workflow that blocks (`time.sleep`, a long computation, a synchronous client) stops every run of its
process, and no code on the loop can report it. The watchdog costs two wake-ups a second; it reads the name of the step
from the stack of the blocked thread, so that steps have no cost.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from edda.core.model import RunId
from edda.engine.run.attempt import Attempt
from edda.engine.run.run import LiveRun

logger = logging.getLogger(__name__)

TICK = 0.5
"""Seconds between two ticks of the loop, and between two checks of them."""
FIRST_WARNING = 1.0
GROWTH = 4.0
"""Warnings come after 1, 4, 16, 64, ... seconds of one block."""
PAUSED_FROM = 2.0
"""Seconds by which the watchdog itself has to be late to log that the whole process did not run."""

_LIBRARY = str(Path(__file__).parents[1])
_STANDARD = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


class Culprit(NamedTuple):
    """What the loop's thread executes."""

    run_id: RunId | None
    description: str
    """For the log: the step or workflow and the innermost line of the user's code."""


class Watchdog:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, thread: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Watches `loop`, which runs in the thread with this number. `tick` is called on that loop, all else is called
        in the watchdog's own thread."""
        self._loop = loop
        self._thread = thread
        self._monotonic = monotonic
        self._ticked = monotonic()
        self._checked = monotonic()
        self._cpu = time.process_time()
        self._timer: asyncio.TimerHandle | None = None
        self._next_warning = FIRST_WARNING
        self._blocked_from: float | None = None
        self._described = ""
        self._blocked_for = 0.0
        """Seconds since the loop should have ticked, at the last check."""

    @property
    def blocked_for(self) -> float:
        """Seconds since the loop should have ticked, without the time that the whole process was stopped. The loop may
        have ticked since the last check; and until the next check it is unknown whether the process was stopped."""
        return min(self._blocked_for, max(0.0, self._monotonic() - self._ticked - TICK))

    def tick(self) -> None:
        self._ticked = self._monotonic()
        self._timer = self._loop.call_later(TICK, self.tick)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def run(self) -> None:
        self._checked = self._monotonic()
        while True:
            await asyncio.sleep(TICK)
            self.check()

    def check(self) -> None:
        now, cpu = self._monotonic(), time.process_time()
        late = now - self._checked - TICK
        if late > PAUSED_FROM:
            self._log_paused(late, cpu - self._cpu)
            self._ticked += late  # the loop could not tick either
        self._checked, self._cpu = now, cpu
        self._blocked_for = max(0.0, now - self._ticked - TICK)
        if self._blocked_for >= self._next_warning:
            self._warn()
        elif self._blocked_for < FIRST_WARNING and self._blocked_from is not None:
            logger.warning(
                "event loop is free again after %.1f s; it was blocked by %s",
                self._ticked - self._blocked_from,
                self._described,
            )
            self._blocked_from, self._next_warning = None, FIRST_WARNING

    def _warn(self) -> None:
        if self._blocked_from is None:
            self._blocked_from = self._ticked
        self._next_warning = self._blocked_for * GROWTH
        self._described = self.culprit().description
        logger.warning(
            "event loop has been blocked for %.1f s by %s; no other run of this process goes on until it returns. Make "
            "the activity a plain `def`, which runs in a thread, or await in it",
            self._blocked_for,
            self._described,
        )

    def _log_paused(self, seconds: float, cpu: float) -> None:
        if cpu > seconds / 2:
            logger.warning(
                "no thread of this process got the interpreter for %.1f s, though it was computing: a C extension "
                "kept the GIL, in %s",
                seconds,
                self.culprit().description,
            )
        else:
            logger.warning(
                "this process was paused for %.1f s (SIGSTOP, a stopped container, a debugger, a sleeping machine, or "
                "no processor time); going on",
                seconds,
            )

    def culprit(self) -> Culprit:
        """What blocks the loop, by its stack."""
        where: str | None = None
        run: tuple[RunId, str] | None = None
        with _no_garbage_collection():
            frame = sys._current_frames().get(self._thread)
            while frame is not None:
                if where is None and not _is_known(frame):
                    where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                if run is None:
                    run = _run_of(frame)
                frame = frame.f_back
        where = where or "code that is not known"
        if run is None:
            return Culprit(None, f"code outside of any run, at {where}")
        return Culprit(run[0], f"{run[1]}, at {where}")

    def stack(self) -> str:
        with _no_garbage_collection():
            frame = sys._current_frames().get(self._thread)
            return "".join(traceback.format_stack(frame)) if frame is not None else "unknown"


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """For reading another thread's frames. In Python 3.11 each frame that is read allocates, an allocation may collect
    garbage, and a finalizer may let the other thread run, which frees the frames that are being read: the process
    crashes, or waits for ever."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_known(frame: FrameType) -> bool:
    """Whether it belongs to this library, to Python's own, or to no file at all."""
    file = frame.f_code.co_filename
    return file.startswith(("<", _LIBRARY)) or (file.startswith(_STANDARD) and "site-packages" not in file)


def _run_of(frame: FrameType) -> tuple[RunId, str] | None:
    """The run that a frame of this library works for, and a name for what it does; None if it is no such frame."""
    if not frame.f_code.co_filename.startswith(_LIBRARY):
        return None
    actor = frame.f_locals.get("self")
    try:
        if isinstance(actor, Attempt):
            run_id = actor.run.run_id
            return run_id, f"step {actor.command.id} of run {run_id} ({actor.run.workflow.name})"
        if isinstance(actor, LiveRun):
            return actor.run_id, f"the workflow code of run {actor.run_id} ({actor.workflow.name})"
    except AttributeError:  # the other thread is in its constructor
        pass
    return None
