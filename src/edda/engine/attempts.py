"""One attempt of a step in the real world: on the real loop, or in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from edda.core.model import RunId
from edda.core.paths import show
from edda.errors import ActivityTimeoutError, HeartbeatTimeoutError, TerminalError
from edda.workflow.activity import Happened, StepCall, is_async
from edda.workflow.context import ActivityContext
from edda.workflow.current import here
from edda.workflow.limits import UNLIMITED

from .progress import Progress
from .steps import Failure, Judge, Outcome, Threads

if TYPE_CHECKING:
    from edda.core.codec import Codec
    from edda.workflow.execution import Command

    from .bodies import Step
    from .clock import Clock
    from .slots import Slot


class Place(Protocol):
    """Where bodies run."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    codec: Codec
    threads: Threads


class Owner(Protocol):
    """Who began the attempt."""

    run: tuple[RunId, str, int]
    judge: Judge

    @property
    def place(self) -> Place: ...

    def tell_begun(self, attempt: Attempt) -> None: ...

    def overdue(self, attempt: Attempt, error: ActivityTimeoutError) -> None: ...

    def progressed(self, attempt: Attempt, details: bytes) -> None: ...

    def gone(self, attempt: Attempt) -> None:
        """It was cancelled, maybe before its first turn: then it could not say so itself."""
        ...


class Attempt:
    __slots__ = (
        "_is_asking",
        "_is_in_thread",
        "_owner",
        "_slot",
        "_timer",
        "call",
        "command",
        "failure",
        "number",
        "progress",
        "step",
        "task",
    )

    def __init__(self, owner: Owner, step: Step, command: Command, slot: Slot | None) -> None:
        self.step = step
        self.command = command
        self.call: StepCall = command.call
        self.number = command.attempt
        self.progress = Progress(owner.place.loop, command.details, partial(owner.progressed, self))
        self.failure: Failure | None = None
        """Why it was given up, if it took too long."""
        self.task: asyncio.Task[None] | None = None
        self._owner = owner
        self._slot = slot
        self._timer: asyncio.TimerHandle | None = None
        self._is_asking = False
        self._is_in_thread = False

    @property
    def is_given_up(self) -> bool:
        return self.progress.is_given_up

    # What it does

    async def run(self) -> Outcome | None:
        """None if it was cancelled: there is nothing to record."""
        judge = self._owner.judge
        try:
            if self._may_have_happened:
                known = await self._ask()
                if known is None and self.command.is_question:
                    return judge.fail(TerminalError(f"{self.command.id} did not happen"))
                if known is not None:
                    return known
            if self.is_given_up:
                return None
            self._owner.tell_begun(self)
            result = await self._call(self.call.fn, self.call.is_async, self._context())
        except asyncio.CancelledError:
            if self.is_given_up or _cancelled_from_outside():
                return None
            return judge.fail(TerminalError(f"{self.command.id} raised CancelledError in its own code"))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: an activity's error ends the activity, never the worker
            return judge.reject(self.command, self.call, self.number, error)
        return judge.accept(self.command, self.call, result)

    @property
    def _may_have_happened(self) -> bool:
        return self.call.reconcile is not None and (self.number > 1 or self.command.replayed)

    async def _ask(self) -> Outcome | None:
        reconcile = self.call.reconcile
        assert reconcile is not None
        self._is_asking = True
        answer = await self._call(reconcile, is_async(reconcile), self._context("reconcile/"))
        self._is_asking = False
        judge = self._owner.judge
        if answer is None:
            return None
        if isinstance(answer, Happened):
            return judge.accept(self.command, self.call, answer.result)
        wrong = f"the reconcile function of {self.command.id} returned {show(answer)}: it has to return "
        return judge.fail(TypeError(f"{wrong}Happened(result) if the effect happened, and None if it did not"))

    def _context(self, effects: str = "") -> ActivityContext:
        place = self._owner.place
        return ActivityContext(
            self._owner.run, self.command.id, self.number, place.clock.now, place.codec, self.progress, effects
        )

    async def _call(self, fn: Callable[..., Any], on_loop: bool, ctx: ActivityContext) -> Any:
        here.set(ctx)
        args = (ctx, *self.call.args) if self.call.takes_context else self.call.args
        try:
            if on_loop:
                if self.call.limits is not UNLIMITED:
                    self.progress.begin()
                    self._watch()
                return await fn(*args, **self.call.kwargs)
            return await self._owner.place.threads.run(lambda: self._run_in_thread(fn, args))
        finally:
            self._silence()

    def _run_in_thread(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.is_given_up:
            raise asyncio.CancelledError("given up while it waited for a thread")
        loop = self._owner.place.loop
        self._is_in_thread = True
        if self.call.limits is not UNLIMITED:
            self.progress.begin()
            loop.call_soon_threadsafe(self._watch)
        try:
            return fn(*args, **self.call.kwargs)
        finally:
            self._is_in_thread = False
            if self._slot is not None:
                with suppress(RuntimeError):  # the loop is closed, and nobody waits for the slot any more
                    loop.call_soon_threadsafe(self._left_thread)

    def _left_thread(self) -> None:
        if self.task is None:  # given up so early that nobody was there to free the slot
            self._free_slot()

    # How long it may take

    def _watch(self) -> None:
        """Comes back whenever the attempt could be overdue."""
        rests = [] if self.is_given_up else self._rests()
        if not rests:
            return
        rest, error = min(rests, key=lambda one: one[0])
        if rest <= 0:
            self._owner.overdue(self, error)
        else:
            self._timer = self._owner.place.loop.call_later(rest, self._watch)

    def _rests(self) -> list[tuple[float, ActivityTimeoutError]]:
        """How much time is left, and what it is when there is none."""
        limits, progress, now = self.call.limits, self.progress, time.monotonic()
        what = f"{self.command.id}, attempt {self.number}, "
        rests: list[tuple[float, ActivityTimeoutError]] = []
        if limits.timeout is not None:
            error = ActivityTimeoutError(f"{what}took more than {limits.timeout:g} seconds")
            rests.append((progress.begun_at + limits.timeout - now, error))
        if limits.heartbeat_timeout is not None and not self._is_asking:
            quiet = HeartbeatTimeoutError(f"{what}gave no heartbeat for {limits.heartbeat_timeout:g} seconds")
            rests.append((progress.beat_at + limits.heartbeat_timeout - now, quiet))
        return rests

    def _silence(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Its end

    def give_up(self) -> None:
        """Nobody waits for it any more. What it does all the same counts."""
        if not self.is_given_up:
            self.drop()

    def drop(self) -> None:
        """Do not even wait for a thread, if it was given up before."""
        self.progress.give_up()
        self._silence()
        if self.task is not None:
            self.task.add_done_callback(lambda _: self._owner.gone(self))
            self.task.cancel()

    def close(self) -> None:
        """It is over. The task, its context and this know each other: only the collector would free them."""
        self.progress.give_up()
        self.task = None
        if not self._is_in_thread:
            self._free_slot()

    def _free_slot(self) -> None:
        if self._slot is not None:
            self._slot.free()


def _cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
