"""One attempt of an activity: its time limits, its heartbeats, its transaction, its result."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from edda.core.model import StepCommit
from edda.core.type_models import TypeMismatchError
from edda.core.value_path import repr_short
from edda.engine.log import format_error
from edda.engine.tasks import Backoff, start_task
from edda.errors import (
    ActivityCancelledError,
    ActivityTimeoutError,
    AppError,
    ConfigurationError,
    HeartbeatTimeoutError,
    LeaseLostError,
    MigrationError,
    PayloadError,
    StorageError,
    TerminalError,
)
from edda.storage.shared.step_faults import Fault, find_fault
from edda.workflow.activity import UNLIMITED, ActivityCall, Happened, is_async
from edda.workflow.client import current_context
from edda.workflow.context import ActivityContext

from .effects import DrainingError, StepEffects
from .outcomes import Failure, Outcome, Retry, Success, Unready

if TYPE_CHECKING:
    from edda.workflow.execution import Command

    from .activities import ActivityRunner, RunningStep
    from .activity_limits import Slot


MIN_INTERVAL = 1.0
"""Seconds between two recorded details."""
INTERVAL_FRACTION = 0.05
"""Of the attempt's age, which the interval is at least: an attempt of ten hours leaves some 200 entries."""


_lock = Lock()
"""Shared by all attempts: it is held for a few instructions."""


class ActivityHeartbeat(Struct, eq=False):
    """Activities call `heartbeat` from any thread."""

    loop: asyncio.AbstractEventLoop
    details: bytes | None
    """The last ones of an earlier attempt."""
    record: Callable[[bytes], None]
    """Called on the loop with the details that are to be recorded."""
    is_given_up: bool = False
    begun_at: float = field(default_factory=time.monotonic)
    beat_at: float = field(default_factory=time.monotonic)
    recorded_at: float = -math.inf
    newest: bytes | None = None
    is_planned: bool = False
    timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.begun_at = self.beat_at = time.monotonic()

    def heartbeat(self, details: bytes | None) -> None:
        if self.is_given_up:
            raise asyncio.CancelledError("this attempt was given up")
        self.beat_at = time.monotonic()
        if details is not None:
            with _lock:
                was_planned, self.is_planned = self.is_planned, True
                self.newest = details
            if not was_planned:  # they are the first since the last recorded ones
                self.loop.call_soon_threadsafe(self._schedule_flush)

    def _schedule_flush(self) -> None:
        if self.is_given_up:
            return
        pause = max(MIN_INTERVAL, INTERVAL_FRACTION * (self.recorded_at - self.begun_at))
        rest = self.recorded_at + pause - time.monotonic()
        if rest <= 0:
            self.flush()
        else:
            self.timer = self.loop.call_later(rest, self.flush)

    def flush(self) -> None:
        """Record the newest details, unless they are recorded."""
        self._cancel_timer()
        with _lock:
            details, self.newest, self.is_planned = self.newest, None, False
        if details is not None:
            self.recorded_at = time.monotonic()
            self.record(details)

    def cancel(self) -> None:
        """The attempt was given up, or is over: its details are ignored."""
        self.is_given_up = True
        self.record = _ignore  # breaks the reference cycle with the attempt
        if self.timer is not None:
            self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def _ignore(_details: bytes) -> None:
    pass


_MAX_REPEATS = 20
"""How often in a row an attempt is run again whose transaction was rolled back or lost its connection. Then it counts
as failed: its own code may be the cause. While the database is away there is no limit."""
_MAX_PAUSE = 10.0
"""Seconds between two tries to begin a transaction while the database is away."""


class _FaultError(Exception):
    """The attempt ended by a fault of the database, which is the cause of this error: it does not count."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.value)
        self.fault = fault


class Attempt:
    def __init__(self, owner: ActivityRunner, step: RunningStep, command: Command, slot: Slot | None) -> None:
        self.run = owner.run
        self.step = step
        self.command = command
        self.call: ActivityCall = command.call
        self.number = command.attempt
        self.heartbeat = ActivityHeartbeat(owner.run.worker.loop, command.last_heartbeat, self._on_heartbeat)
        self.failure: Failure | None = None
        """Why it was given up, if it took too long."""
        self.task: asyncio.Task[None] | None = None
        self.work: StepEffects | None = None
        """Its effects, created on first use: few attempts have any."""
        self._owner = owner
        self._slot = slot
        self._timer: asyncio.TimerHandle | None = None
        self._is_asking = False
        self._is_in_thread = False
        self._repeats = 0
        """How often in a row the database was reached and did not commit."""
        self._pause: asyncio.Future[None] | None = None
        """Done when the worker drains: the attempt then waits for the database no longer."""

    def effects(self) -> StepEffects:
        if self.work is None:
            self.work = StepEffects(self.run, self.command.id, self.number)
        return self.work

    def _on_heartbeat(self, details: bytes) -> None:
        if not self.step.is_abandoned:
            self.run.on_step_heartbeat(self.step.command, details)

    # Running

    async def run_task(self) -> None:
        owner = self._owner
        try:
            try:
                outcome = await self._run()
            except _FaultError as fault:
                outcome = await self._repeat(fault)
        except Exception as error:  # of the engine: an error of the activity is an outcome. The run is released
            owner.drop_attempt(self)
            self.run.fail(error)
            return
        except KeyboardInterrupt:  # the process ends: nothing is recorded
            owner.drop_attempt(self)
            raise
        except BaseException as error:  # a cancelled rollback, or an error of the engine: the step needs an outcome
            outcome = self._failed(error)
        if isinstance(outcome, Retry):
            self.heartbeat.flush()
        owner.on_attempt_ended(self, outcome)

    async def _repeat(self, ended: _FaultError) -> Outcome | Unready | None:
        """Run it again until the database has no part in its end; None if the worker drains meanwhile."""
        conflicts, outages = Backoff(), Backoff(0.05, _MAX_PAUSE)
        while True:
            error = ended.__cause__ or ended
            self._cancel_timer()  # the time limits hold while the activity's function runs, which it does not now
            self._repeats = 0 if ended.fault is Fault.AWAY else self._repeats + 1
            if ended.fault is Fault.CONFLICT:
                text, id = format_error(error), self.command.id
                self.run.log.write("step_repeated", self.command.input, step=id, attempt=self.number, error=text)
                await conflicts.pause()
            elif not await self._wait_for_database(error, outages):
                return None
            self.work = None
            try:
                return await self._run()
            except _FaultError as again:
                ended = again

    async def _wait_for_database(self, error: BaseException, backoff: Backoff) -> bool:
        """Returns when a transaction can be begun. Before that the activity's function, which may do more than use the
        database, is not run again. False if the worker drains: another one runs the step."""
        worker = self.run.worker
        while True:
            with worker.outage.wait(self.run.run_id, self.command.id, error):
                if not worker.draining:
                    self._pause = worker.loop.create_future()
                    await asyncio.wait((self._pause,), timeout=backoff.next())
                    self._pause = None
                if worker.draining:
                    return False
                try:
                    await (await worker.services.storage.begin()).rollback()
                    return True
                except AppError:  # a storage without transactions: nothing to wait for
                    return True
                except (StorageError, MigrationError) as still:
                    error = still

    def drain(self) -> None:
        """The worker drains: wait for the database no longer."""
        if self._pause is not None and not self._pause.done():
            self._pause.set_result(None)

    async def _run(self) -> Outcome | Unready | None:
        """None if it was cancelled: there is nothing to record."""
        call, run = self.call, self.run
        outcome: Outcome | None = None
        try:
            if call.reconcile is not None and (self.number > 1 or self.command.is_replay):
                outcome = await self._reconcile(call.reconcile)
            if outcome is None:
                if self.heartbeat.is_given_up:
                    return None
                if run.hooks is not None:
                    run.hooks.attempt_started(self.command)
                if run.is_verbose:
                    run.log.write("step_begun", step=self.command.id, attempt=self.number)
                result = await self._call(call.fn, call.is_async)
        except BaseException as error:  # SystemExit too: an activity's error ends the activity, never the worker
            # Without a transaction of the step's own, a driver's error comes from another database that its code uses.
            work = self.work
            fault = find_fault(error, None, is_ours=False) if work is None else work.fault_of(error)
            self._repeat_after(fault, error)
            return self._failed(error)
        else:
            if outcome is None:
                outcome = self._succeeded(result)
            return outcome if self.work is None else await self._commit_effects(self.work, outcome)
        finally:
            if self.work is not None:
                await self.work.roll_back()

    def _repeat_after(self, fault: Fault | None, error: BaseException) -> None:
        if fault is Fault.AWAY or (fault is not None and self._repeats < _MAX_REPEATS):
            raise _FaultError(fault) from error

    def _failed(self, error: BaseException) -> Outcome | Unready | None:
        """None if this worker gave the attempt up. A CancelledError that the worker did not ask for is a failure like
        any other: an attempt without an outcome would be begun again at once and for ever."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        if isinstance(error, asyncio.CancelledError):
            if self.heartbeat.is_given_up:
                return None
            cancelled = ActivityCancelledError(
                f"{self.command.id}, attempt {self.number}, ended in CancelledError, and Edda did not cancel it: its "
                "code, or a library that it uses, cancelled the attempt's task, or awaited a task that was cancelled"
            )
            cancelled.__cause__ = error
            error = cancelled
        if isinstance(error, ConfigurationError):
            return Unready(error)
        return self._owner.policy.on_error(self.command, self.number, error)

    def _succeeded(self, result: Any) -> Success | Failure:
        """A result that cannot be stored, or not be compensated, fails the step: a retry would repeat its effect."""
        codec, call = self.run.services.codec, self.call
        try:
            value = codec.encode(result, call.returns, self._log_mismatch)
        except PayloadError as error:
            return self._owner.policy.failure(
                PayloadError(f"the result of {self.command.id} cannot be stored: {error}")
            )
        if call.undo is not None:
            try:
                call.undo.check(codec.decode(value, call.returns))
            except Exception as error:
                return self._owner.policy.failure(error)
        return Success(value, result)

    def _log_mismatch(self, mismatch: TypeMismatchError) -> None:
        self.run.log.write("result_mismatch", step=self.command.id, path=mismatch.path, error=mismatch.reason)

    async def _reconcile(self, reconcile: Callable[..., Any]) -> Outcome | None:
        self._is_asking = True
        answer = await self._call(reconcile, is_async(reconcile), "reconcile/")
        self._is_asking = False
        self._cancel_timer()
        policy = self._owner.policy
        if answer is None and self.command.check_only:
            return policy.failure(TerminalError(f"{self.command.id} did not happen"))
        if answer is None:
            return None
        if isinstance(answer, Happened):
            return self._succeeded(answer.result)
        wrong = f"the reconcile function of {self.command.id} returned {repr_short(answer)}: it has to return "
        return policy.failure(TypeError(f"{wrong}Happened(result) if the effect happened, and None if it did not"))

    def _call(self, fn: Callable[..., Any], on_loop: bool, effect_prefix: str = "") -> Awaitable[Any]:
        call, run = self.call, self.run
        services = run.services
        ctx = ActivityContext(
            (run.run_id, run.workflow.name, run.generation),
            self.command.id,
            self.number,
            services.clock.now,
            services.codec,
            self.heartbeat,
            self,
            effect_prefix,
        )
        current_context.set(ctx)
        args = (ctx, *call.args) if call.takes_context else call.args
        if not on_loop:
            return services.threads.run(lambda: self._run_in_thread(fn, args))
        if call.limits is not UNLIMITED:
            self.heartbeat.start()
            self._check_timeouts()
        running: Awaitable[Any] = fn(*args, **call.kwargs)
        return running

    def _run_in_thread(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.heartbeat.is_given_up:
            raise asyncio.CancelledError("given up while it waited for a thread")
        loop = self.run.worker.loop
        self._is_in_thread = True
        if self.call.limits is not UNLIMITED:
            self.heartbeat.start()
            loop.call_soon_threadsafe(self._check_timeouts)
        try:
            return fn(*args, **self.call.kwargs)
        finally:
            self._is_in_thread = False
            if self._slot is not None:
                with suppress(RuntimeError):  # the loop is closed, and with it the queue for the slot
                    loop.call_soon_threadsafe(self._release_slot)

    def _release_slot(self) -> None:
        if self.task is None and self._slot is not None:  # its task ended while the thread still ran
            self._slot.free()

    # Committing

    async def _commit_effects(self, work: StepEffects, outcome: Outcome) -> Outcome | Unready | None:
        if not isinstance(outcome, Success):
            return outcome
        if not work.needs_commit:
            return Success(outcome.value, outcome.result, (*work.staged, *work.outbox))
        self._cancel_timer()  # a commit under way does not time out
        try:
            async with self.step.committing:
                if self.heartbeat.is_given_up or self.step.has_succeeded:
                    return None
                commit = start_task(self._commit(work, outcome), loop=self.run.worker.loop)
                try:
                    return await asyncio.shield(commit)
                except asyncio.CancelledError:  # it does not stop the commit, which may be through already
                    return await commit  # a second cancel does
        except asyncio.CancelledError as error:
            return self._failed(error)

    async def _commit(self, work: StepEffects, success: Success) -> Outcome | Unready | None:
        try:
            await work.commit(success.value)
        except LeaseLostError:
            return None
        except Exception as error:  # of the driver, of SQLAlchemy or of the engine: `fault_of` tells them apart
            fault = work.fault_of(error)
            await work.roll_back()
            try:
                known = await work.find_step_commit()
            except DrainingError:
                return None
            if known is None:
                self._repeat_after(fault, error)
                return self._failed(error)
            result = self.run.services.codec.decode(known.value, self.call.returns)
            return Success(known.value, result, (known,))
        return Success(success.value, success.result, (StepCommit(self.command.id, self.number, success.value, 0),))

    # Time limits

    def _check_timeouts(self) -> None:
        """Calls itself again when the next limit could be over."""
        if self.heartbeat.is_given_up:
            return
        limits, heartbeat, now = self.call.limits, self.heartbeat, time.monotonic()
        what = f"{self.command.id}, attempt {self.number}, "
        # For each limit the seconds that are left, and the error when there are none.
        remaining: list[tuple[float, ActivityTimeoutError]] = []
        if limits.timeout is not None:
            error = ActivityTimeoutError(f"{what}took more than {limits.timeout:g} seconds")
            remaining.append((heartbeat.begun_at + limits.timeout - now, error))
        if limits.heartbeat_timeout is not None and not self._is_asking:
            quiet = HeartbeatTimeoutError(f"{what}gave no heartbeat for {limits.heartbeat_timeout:g} seconds")
            remaining.append((heartbeat.beat_at + limits.heartbeat_timeout - now, quiet))
        if not remaining:
            return
        rest, error = min(remaining, key=lambda one: one[0])
        if rest <= 0:
            self._owner.on_attempt_timed_out(self, error)
        else:
            self._timer = self.run.worker.loop.call_later(rest, self._check_timeouts)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Ending

    def cancel(self, *, again: bool = False) -> None:
        """Give it up. If it succeeds all the same, that counts. `again`: also if it was given up before: then its
        thread is not waited for."""
        if self.heartbeat.is_given_up and not again:
            return
        self.heartbeat.cancel()
        self._cancel_timer()
        if self.task is not None:
            self.task.add_done_callback(lambda _: self._owner.on_attempt_cancelled(self))
            self.task.cancel()

    def close(self) -> None:
        """It is over. Breaks the reference cycle of the task, its context and this."""
        self.heartbeat.cancel()
        if self._timer is not None:
            self._cancel_timer()
        self.task = None
        if self._slot is not None and not self._is_in_thread:
            self._slot.free()
