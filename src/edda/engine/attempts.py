"""One attempt of a step in the real world: on the real loop, or in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from edda.core.model import Done, RunId
from edda.core.paths import show
from edda.errors import ActivityTimeoutError, HeartbeatTimeoutError, LeaseLostError, TerminalError
from edda.workflow.activity import Happened, StepCall, is_async
from edda.workflow.context import ActivityContext
from edda.workflow.current import here
from edda.workflow.limits import UNLIMITED

from .progress import Progress
from .steps import Failure, Judge, Outcome, Success, Threads
from .work import Bench, Registrar, Work

if TYPE_CHECKING:
    from edda.core.codec import Codec
    from edda.workflow.execution import Command

    from .bodies import Step
    from .herald import Herald
    from .slots import Slot


class Place(Registrar, Protocol):
    """Where bodies run."""

    codec: Codec
    threads: Threads


class Owner(Protocol):
    """Who began the attempt."""

    run: tuple[RunId, str, int]
    epoch: int
    judge: Judge
    place: Place
    herald: Herald | None

    def overdue(self, attempt: Attempt, error: ActivityTimeoutError) -> None: ...

    def progressed(self, attempt: Attempt, details: bytes) -> None: ...

    def gone(self, attempt: Attempt) -> None:
        """It was cancelled, maybe before its first turn: then it could not say so itself."""
        ...


class Attempt:
    __slots__ = (
        "_bench",
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
        self.progress = Progress(owner.place.loop, command.details, self._progressed)
        self.failure: Failure | None = None
        """Why it was given up, if it took too long."""
        self.task: asyncio.Task[None] | None = None
        self._owner = owner
        self._slot = slot
        self._timer: asyncio.TimerHandle | None = None
        self._is_asking = False
        self._is_in_thread = False
        run_id, _, gen = owner.run
        self._bench = Bench(owner.place, run_id, owner.epoch, gen, command.id, command.attempt)

    @property
    def is_given_up(self) -> bool:
        return self.progress.is_given_up

    # What it does

    async def run(self) -> Outcome | None:
        """None if it was cancelled: there is nothing to record."""
        owner, call = self._owner, self.call
        judge = owner.judge
        outcome: Outcome | None = None
        try:
            if call.reconcile is not None and self._may_have_happened:
                outcome = await self._ask()
            if outcome is None:
                if self.progress.is_given_up:
                    return None
                if owner.herald is not None:
                    owner.herald.tell_begun(self.command)
                result = await self._call(call.fn, call.is_async, self._context())
        except BaseException as error:  # SystemExit too: an activity's error ends the activity, never the worker
            return self._failed(error)
        else:
            if outcome is None:
                outcome = judge.accept(self.command, call, result)
            return outcome if self._bench.work is None else await self._conclude(self._bench.work, outcome)
        finally:
            if self._bench.work is not None:
                await self._bench.work.roll_back()

    def _failed(self, error: BaseException) -> Outcome | None:
        judge = self._owner.judge
        if isinstance(error, KeyboardInterrupt):
            raise error
        if not isinstance(error, asyncio.CancelledError):
            return judge.reject(self.command, self.call, self.number, error)
        if self.is_given_up or _cancelled_from_outside():
            return None
        return judge.fail(TerminalError(f"{self.command.id} raised CancelledError in its own code"))

    @property
    def _may_have_happened(self) -> bool:
        return self.number > 1 or self.command.replayed

    async def _ask(self) -> Outcome | None:
        reconcile = self.call.reconcile
        assert reconcile is not None
        self._is_asking = True
        answer = await self._call(reconcile, is_async(reconcile), self._context("reconcile/"))
        self._is_asking = False
        self._silence()
        judge = self._owner.judge
        if answer is None and self.command.is_question:
            return judge.fail(TerminalError(f"{self.command.id} did not happen"))
        if answer is None:
            return None
        if isinstance(answer, Happened):
            return judge.accept(self.command, self.call, answer.result)
        wrong = f"the reconcile function of {self.command.id} returned {show(answer)}: it has to return "
        return judge.fail(TypeError(f"{wrong}Happened(result) if the effect happened, and None if it did not"))

    # What it does through Edda

    async def _conclude(self, work: Work, outcome: Outcome) -> Outcome | None:
        if not isinstance(outcome, Success):
            return outcome
        if not work.needs_commit:
            return Success(outcome.value, outcome.result, (*work.dispatches, *work.outgoing))
        self._silence()  # what is being committed is not too late any more
        try:
            async with self.step.committing:
                if self.is_given_up or self.step.has_succeeded:
                    return None
                return await _finish(self._owner.place.loop.create_task(self._commit(work, outcome)))
        except asyncio.CancelledError:
            return None

    async def _commit(self, work: Work, success: Success) -> Outcome | None:
        command, call, judge = self.command, self.call, self._owner.judge
        try:
            await work.commit(success.value)
        except LeaseLostError:
            return None
        except Exception as error:
            await work.roll_back()
            known = await work.find_done()
            if known is None:
                return judge.reject(command, call, self.number, error)
            result = self._owner.place.codec.decode(known.value, call.returns)
            return Success(known.value, result, (known,))
        return Success(success.value, success.result, (Done(command.id, self.number, success.value, 0),))

    def _context(self, effects: str = "") -> ActivityContext:
        place = self._owner.place
        return ActivityContext(
            self._owner.run,
            self.command.id,
            self.number,
            place.clock.now,
            place.codec,
            self.progress,
            self._bench,
            effects,
        )

    def _call(self, fn: Callable[..., Any], on_loop: bool, ctx: ActivityContext) -> Awaitable[Any]:
        call = self.call
        here.set(ctx)
        args = (ctx, *call.args) if call.takes_context else call.args
        if not on_loop:
            return self._owner.place.threads.run(lambda: self._run_in_thread(fn, args))
        if call.limits is not UNLIMITED:
            self.progress.begin()
            self._watch()
        running: Awaitable[Any] = fn(*args, **call.kwargs)
        return running

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

    def _progressed(self, details: bytes) -> None:
        self._owner.progressed(self, details)

    def _left_thread(self) -> None:
        if self.task is None and self._slot is not None:  # given up so early that nobody was there to free it
            self._slot.free()

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
        self._silence()
        self.task = None
        if self._slot is not None and not self._is_in_thread:
            self._slot.free()


async def _finish(commit: asyncio.Task[Outcome | None]) -> Outcome | None:
    """A cancel does not stop it, for it may be in already; a second one does."""
    try:
        return await asyncio.shield(commit)
    except asyncio.CancelledError:
        return await commit


def _cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
