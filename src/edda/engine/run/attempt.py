"""One attempt of an activity: its time limits, its heartbeats and details, its transaction, its result."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from edda.core.model import RunId, StepCommit
from edda.core.value_path import repr_short
from edda.engine.log import tell_error
from edda.engine.tasks import Backoff, start_task
from edda.errors import (
    ActivityCancelledError,
    ActivityTimeoutError,
    AppError,
    ConfigurationError,
    HeartbeatTimeoutError,
    LeaseLostError,
    MigrationError,
    StorageError,
    TerminalError,
)
from edda.storage.shared.step_faults import Fault, find_fault
from edda.workflow.activity import ActivityCall, Happened, is_async
from edda.workflow.client import current_context
from edda.workflow.context import ActivityContext
from edda.workflow.limits import UNLIMITED

from .effects import DrainingError, EffectServices, LazyEffects, StepEffects
from .outcome_policy import ActivityThreads, Failure, Outcome, OutcomePolicy, Success, Unready

if TYPE_CHECKING:
    from edda.core.codec import Codec
    from edda.engine.log import RunLog
    from edda.workflow.execution import Command

    from .activities import RunningStep
    from .concurrency import Slot
    from .hooks import RunHooks


MIN_INTERVAL = 1.0
"""Seconds between two recorded details."""
INTERVAL_FRACTION = 0.05
"""And so much of the attempt's age, so that one of ten hours leaves some 200 entries."""


_lock = Lock()
"""One for all: it is held for a moment only, and few attempts need any."""


class ActivityHeartbeat:
    """`record` is called on the loop with those details that are to be recorded. Bodies call from any thread."""

    __slots__ = (
        "_loop",
        "_newest",
        "_planned",
        "_record",
        "_recorded_at",
        "_timer",
        "beat_at",
        "begun_at",
        "details",
        "is_given_up",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, details: bytes | None, record: Callable[[bytes], None]) -> None:
        self.details = details
        """The last of an earlier attempt."""
        self.is_given_up = False
        self.begun_at = self.beat_at = time.monotonic()
        self._loop = loop
        self._record = record
        self._recorded_at = -math.inf
        self._newest: bytes | None = None
        self._planned = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.begun_at = self.beat_at = time.monotonic()

    def heartbeat(self, details: bytes | None) -> None:
        if self.is_given_up:
            raise asyncio.CancelledError("nobody waits for this attempt any more")
        self.beat_at = time.monotonic()
        if details is not None and self._store_latest(details):
            self._loop.call_soon_threadsafe(self._schedule_flush)

    def _store_latest(self, details: bytes) -> bool:
        """Whether they are the first since the last recorded ones: the loop is woken once for many."""
        with _lock:
            planned, self._planned = self._planned, True
            self._newest = details
        return not planned

    def _schedule_flush(self) -> None:
        if self.is_given_up:
            return
        pause = max(MIN_INTERVAL, INTERVAL_FRACTION * (self._recorded_at - self.begun_at))
        rest = self._recorded_at + pause - time.monotonic()
        if rest <= 0:
            self.flush()
        else:
            self._timer = self._loop.call_later(rest, self.flush)

    def flush(self) -> None:
        """Have the newest details recorded, if they are not."""
        self._silence()
        with _lock:
            details, self._newest, self._planned = self._newest, None, False
        if details is not None:
            self._recorded_at = time.monotonic()
            self._record(details)

    def cancel(self) -> None:
        """From now on nobody listens."""
        self.is_given_up = True
        self._record = _ignore  # it knows the attempt, which knows this: only the collector would free them
        if self._timer is not None:
            self._silence()

    def _silence(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _ignore(_details: bytes) -> None:
    pass


class AttemptServices(EffectServices, Protocol):
    """Where bodies run."""

    codec: Codec
    threads: ActivityThreads


class AttemptListener(Protocol):
    """Who began the attempt."""

    run: tuple[RunId, str, int]
    epoch: int
    judge: OutcomePolicy
    place: AttemptServices
    herald: RunHooks | None
    log: RunLog

    def on_attempt_timed_out(self, attempt: Attempt, error: ActivityTimeoutError) -> None: ...

    def progressed(self, attempt: Attempt, details: bytes) -> None: ...

    def on_attempt_cancelled(self, attempt: Attempt) -> None:
        """It was cancelled, maybe before its first turn: then it could not say so itself."""
        ...


_REPEATS = 20
"""So often in a row an attempt that reached the database, and whose transaction was rolled back or lost its connection,
is run again before it counts as failed: its own code may be the cause. While the database is away there is no limit."""
_LONGEST_PAUSE = 10.0
"""Seconds between two looks whether the database is back."""


class _FaultError(Exception):
    """The attempt ended by a fault of the database, which is the cause of this error: it does not count."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.value)
        self.fault = fault


class Attempt:
    __slots__ = (
        "_bench",
        "_is_asking",
        "_is_in_thread",
        "_owner",
        "_pause",
        "_repeats",
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

    def __init__(self, owner: AttemptListener, step: RunningStep, command: Command, slot: Slot | None) -> None:
        self.step = step
        self.command = command
        self.call: ActivityCall = command.call
        self.number = command.attempt
        self.progress = ActivityHeartbeat(owner.place.loop, command.last_heartbeat, self._progressed)
        self.failure: Failure | None = None
        """Why it was given up, if it took too long."""
        self.task: asyncio.Task[None] | None = None
        self._owner = owner
        self._slot = slot
        self._timer: asyncio.TimerHandle | None = None
        self._is_asking = False
        self._is_in_thread = False
        self._repeats = 0
        """How often in a row the database was reached and did not commit."""
        self._pause: asyncio.Future[None] | None = None
        """Until the database is looked at again."""
        self._bench = self._new_bench()

    @property
    def is_given_up(self) -> bool:
        return self.progress.is_given_up

    @property
    def run_key(self) -> tuple[RunId, str, int]:
        """Run, workflow and generation."""
        return self._owner.run

    def _new_bench(self) -> LazyEffects:
        run_id, _, gen = self._owner.run
        return LazyEffects(self._owner.place, run_id, self._owner.epoch, gen, self.command.id, self.number)

    # What it does

    async def run(self) -> Outcome | Unready | None:
        """None if it was cancelled: there is nothing to record."""
        conflicts, outages = Backoff(), Backoff(0.05, _LONGEST_PAUSE)
        while True:
            try:
                return await self._run()
            except _FaultError as ended:
                error, fault = ended.__cause__ or ended, ended.fault
            self._cancel_timer()  # the limits of an attempt are those of its body, which does not run now
            self._repeats = 0 if fault is Fault.AWAY else self._repeats + 1
            if fault is Fault.CONFLICT:
                told = tell_error(error)
                self._owner.log.write(
                    "step_repeated", self.command.input, step=self.command.id, attempt=self.number, error=told
                )
                await conflicts.pause()
            elif not await self._wait_for_database(error, outages):
                return None
            self._bench = self._new_bench()

    async def _wait_for_database(self, error: BaseException, backoff: Backoff) -> bool:
        """Returns when a transaction can be begun: the body, which may do more than use the database, is not run again
        before that. False if the worker stops, so that another one runs the step."""
        place, run_id = self._owner.place, self._owner.run[0]
        while True:
            with place.outage.wait(run_id, self.command.id, error):
                if not await self._rest(backoff.next()):
                    return False
                try:
                    await (await place.transactions.begin()).rollback()
                    return True
                except AppError:  # a storage without transactions: nothing to wait for
                    return True
                except (StorageError, MigrationError) as still:
                    error = still

    async def _rest(self, seconds: float) -> bool:
        """False if the worker stops, or stops meanwhile."""
        if not self._owner.place.draining:
            self._pause = self._owner.place.loop.create_future()
            await asyncio.wait((self._pause,), timeout=seconds)
            self._pause = None
        return not self._owner.place.draining

    def drain(self) -> None:
        """The worker stops: it waits for the database no longer."""
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    async def _run(self) -> Outcome | Unready | None:
        owner, call = self._owner, self.call
        judge = owner.judge
        outcome: Outcome | None = None
        try:
            if call.reconcile is not None and self._may_have_run_before:
                outcome = await self._run_reconcile()
            if outcome is None:
                if self.progress.is_given_up:
                    return None
                if owner.herald is not None:
                    owner.herald.attempt_started(self.command)
                if owner.log.is_verbose:
                    owner.log.write("step_begun", step=self.command.id, attempt=self.number)
                result = await self._call(call.fn, call.is_async, self._context())
        except BaseException as error:  # SystemExit too: an activity's error ends the activity, never the worker
            self._repeat_after(self._fault_of(error), error)
            return self.failed(error)
        else:
            if outcome is None:
                outcome = judge.on_result(self.command, call, result)
            return outcome if self._bench.work is None else await self._commit_effects(self._bench.work, outcome)
        finally:
            if self._bench.work is not None:
                await self._bench.work.roll_back()

    def _fault_of(self, error: BaseException) -> Fault | None:
        """Without a transaction of the step's own a driver's error is one of its code with some other database."""
        work = self._bench.work
        return find_fault(error, None, is_ours=False) if work is None else work.fault_of(error)

    def _repeat_after(self, fault: Fault | None, error: BaseException) -> None:
        if fault is Fault.AWAY or (fault is not None and self._repeats < _REPEATS):
            raise _FaultError(fault) from error

    def failed(self, error: BaseException) -> Outcome | Unready | None:
        """None if this worker gave the attempt up. A CancelledError that the worker did not ask for is a failure like
        any other: an attempt without an outcome would be begun again at once and for ever."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        if isinstance(error, asyncio.CancelledError):
            if self.is_given_up:
                return None
            cancelled = ActivityCancelledError(
                f"{self.command.id}, attempt {self.number}, ended in CancelledError, and Edda did not cancel it: its "
                "code, or a library that it uses, cancelled the attempt's task, or awaited a task that was cancelled"
            )
            cancelled.__cause__ = error
            error = cancelled
        if isinstance(error, ConfigurationError):
            return Unready(error)
        return self._owner.judge.on_error(self.command, self.call, self.number, error)

    @property
    def _may_have_run_before(self) -> bool:
        return self.number > 1 or self.command.is_replay

    async def _run_reconcile(self) -> Outcome | None:
        reconcile = self.call.reconcile
        assert reconcile is not None
        self._is_asking = True
        answer = await self._call(reconcile, is_async(reconcile), self._context("reconcile/"))
        self._is_asking = False
        self._cancel_timer()
        judge = self._owner.judge
        if answer is None and self.command.check_only:
            return judge.failure(TerminalError(f"{self.command.id} did not happen"))
        if answer is None:
            return None
        if isinstance(answer, Happened):
            return judge.on_result(self.command, self.call, answer.result)
        wrong = f"the reconcile function of {self.command.id} returned {repr_short(answer)}: it has to return "
        return judge.failure(TypeError(f"{wrong}Happened(result) if the effect happened, and None if it did not"))

    # What it does through Edda

    async def _commit_effects(self, work: StepEffects, outcome: Outcome) -> Outcome | Unready | None:
        if not isinstance(outcome, Success):
            return outcome
        if not work.needs_commit:
            return Success(outcome.value, outcome.result, (*work.dispatches, *work.outgoing))
        self._cancel_timer()  # what is being committed is not too late any more
        try:
            async with self.step.committing:
                if self.is_given_up or self.step.has_succeeded:
                    return None
                return await _shield_commit(start_task(self._commit(work, outcome), loop=self._owner.place.loop))
        except asyncio.CancelledError as error:
            return self.failed(error)

    async def _commit(self, work: StepEffects, success: Success) -> Outcome | Unready | None:
        command, call = self.command, self.call
        try:
            await work.commit(success.value)
        except LeaseLostError:
            return None
        except Exception as error:  # of the driver, of SQLAlchemy or of ours: `fault_of` tells them apart
            fault = work.fault_of(error)
            await work.roll_back()
            try:
                known = await work.find_step_commit()
            except DrainingError:
                return None
            if known is None:
                self._repeat_after(fault, error)
                return self.failed(error)
            result = self._owner.place.codec.decode(known.value, call.returns)
            return Success(known.value, result, (known,))
        return Success(success.value, success.result, (StepCommit(command.id, self.number, success.value, 0),))

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
        current_context.set(ctx)
        args = (ctx, *call.args) if call.takes_context else call.args
        if not on_loop:
            return self._owner.place.threads.run(lambda: self._run_in_thread(fn, args))
        if call.limits is not UNLIMITED:
            self.progress.start()
            self._check_timeouts()
        running: Awaitable[Any] = fn(*args, **call.kwargs)
        return running

    def _run_in_thread(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.is_given_up:
            raise asyncio.CancelledError("given up while it waited for a thread")
        loop = self._owner.place.loop
        self._is_in_thread = True
        if self.call.limits is not UNLIMITED:
            self.progress.start()
            loop.call_soon_threadsafe(self._check_timeouts)
        try:
            return fn(*args, **self.call.kwargs)
        finally:
            self._is_in_thread = False
            if self._slot is not None:
                with suppress(RuntimeError):  # the loop is closed, and nobody waits for the slot any more
                    loop.call_soon_threadsafe(self._release_slot)

    def _progressed(self, details: bytes) -> None:
        self._owner.progressed(self, details)

    def _release_slot(self) -> None:
        if self.task is None and self._slot is not None:  # given up so early that nobody was there to free it
            self._slot.free()

    # How long it may take

    def _check_timeouts(self) -> None:
        """Comes back whenever the attempt could be overdue."""
        rests = [] if self.is_given_up else self._remaining_times()
        if not rests:
            return
        rest, error = min(rests, key=lambda one: one[0])
        if rest <= 0:
            self._owner.on_attempt_timed_out(self, error)
        else:
            self._timer = self._owner.place.loop.call_later(rest, self._check_timeouts)

    def _remaining_times(self) -> list[tuple[float, ActivityTimeoutError]]:
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

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Its end

    def cancel(self) -> None:
        """Nobody waits for it any more. What it does all the same counts."""
        if not self.is_given_up:
            self.force_cancel()

    def force_cancel(self) -> None:
        """Do not even wait for a thread, if it was given up before."""
        self.progress.cancel()
        self._cancel_timer()
        if self.task is not None:
            self.task.add_done_callback(lambda _: self._owner.on_attempt_cancelled(self))
            self.task.cancel()

    def close(self) -> None:
        """It is over. The task, its context and this know each other: only the collector would free them."""
        self.progress.cancel()
        self._cancel_timer()
        self.task = None
        if self._slot is not None and not self._is_in_thread:
            self._slot.free()


async def _shield_commit(commit: asyncio.Task[Outcome | Unready | None]) -> Outcome | Unready | None:
    """A cancel does not stop it, for it may be in already; a second one does."""
    try:
        return await asyncio.shield(commit)
    except asyncio.CancelledError:
        return await commit
