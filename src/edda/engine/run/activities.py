"""The activities of one run: steps wait for the journal and for a slot, run, and may get a successor."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from edda.core.model import MICROSECONDS, EntryKind, RunId
from edda.core.retry import RetryPolicy
from edda.engine.log import RunLog
from edda.engine.tasks import start_task
from edda.workflow.execution import Command

from .attempt import Attempt, AttemptServices
from .concurrency import ConcurrencyLimiter, Slot
from .hooks import RunHooks
from .outcome_policy import Failure, Outcome, OutcomePolicy, Retry, Success, Unready

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edda.errors import ActivityTimeoutError


class StartGate(Protocol):
    """What the worker lets through."""

    slots: ConcurrencyLimiter
    draining: bool

    @property
    def may_start_steps(self) -> bool:
        """False when the lease may have lapsed: start nothing in the world."""
        ...


Begin = Callable[[Command, Slot | None], None]


class StepQueue:
    def __init__(self, gate: StartGate) -> None:
        self._gate = gate
        self.waiting_for_journal: deque[Command] = deque()
        """In the order they were issued."""
        self.waiting_for_slot: set[Command] = set()
        """For a slot."""

    def add(self, command: Command) -> None:
        self.waiting_for_journal.append(command)

    def start_ready(self, committed: int, pending: Mapping[str, Command], begin: Begin) -> None:
        """Those whose history is durable."""
        waiting_for_journal = self.waiting_for_journal
        while waiting_for_journal and waiting_for_journal[0].after_entry <= committed and self._gate.may_start_steps:
            command = waiting_for_journal.popleft()
            if pending.get(command.id) is not command:
                continue
            most = command.call.limits.max_concurrent
            if most is None:
                begin(command, None)
            else:
                self.waiting_for_slot.add(command)
                self._gate.slots.acquire(command.name, most, command, partial(self._on_slot, command, begin))

    def _on_slot(self, command: Command, begin: Begin, slot: Slot) -> bool:
        self.waiting_for_slot.discard(command)
        if self._gate.draining or not self._gate.may_start_steps:
            self.waiting_for_journal.appendleft(command)
            return False
        begin(command, slot)
        return True

    @property
    def held(self) -> list[Command]:
        """Those that have not begun."""
        return [*self.waiting_for_journal, *self.waiting_for_slot]

    def remove(self, command: Command) -> None:
        """It is not to begin any more; those that wait for the journal are looked at when it is their turn."""
        if command in self.waiting_for_slot:
            self.waiting_for_slot.discard(command)
            self._gate.slots.cancel(command.name, command)

    def close(self) -> None:
        for command in tuple(self.waiting_for_slot):
            self.remove(command)


class ActivityServices(AttemptServices, StartGate, Protocol):
    """What bodies need of the worker."""

    retry_policy: RetryPolicy


class RunningStep:
    """A step, and those of its attempts whose bodies run: one, and any that were given up and go on all the same."""

    __slots__ = ("_committing", "attempts", "command", "has_succeeded", "is_abandoned", "successor")

    def __init__(self, command: Command) -> None:
        self.command = command
        self.attempts: list[Attempt] = []
        self.is_abandoned = False
        self.has_succeeded = False
        self.successor: Command | None = None
        """Asked for the same again while the abandoned body still runs, and waits for that."""
        self._committing: asyncio.Lock | None = None

    @property
    def committing(self) -> asyncio.Lock:
        """Its attempts commit one after another: what one has committed the next one must know."""
        if self._committing is None:
            self._committing = asyncio.Lock()
        return self._committing

    @property
    def is_live(self) -> bool:
        """Whether one of its bodies is not overdue."""
        return any(attempt.failure is None for attempt in self.attempts)

    def transfer_to(self, command: Command) -> None:
        self.command = command
        self.successor = None
        self.is_abandoned = self.has_succeeded = False


class ActivityRunner:
    """Tells its run of every body that is over (`settled`, with None if there is nothing to record), of details that
    are to be recorded (`progressed`), of abandoned steps that had to be undone if they ever began (`unbegun`), and of
    errors that are not a body's (`failed`)."""

    def __init__(
        self,
        stage: ActivityServices,
        run: tuple[RunId, str, int],
        epoch: int,
        herald: RunHooks | None,
        log: RunLog,
        *,
        settled: Callable[[Command, Outcome | Unready | None], None],
        progressed: Callable[[Command, bytes], None],
        unbegun: Callable[[Command], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.run = run
        self.epoch = epoch
        self.judge = OutcomePolicy(run[0], stage.codec, stage.retry_policy, stage.clock.now)
        self.place: AttemptServices = stage
        self.herald = herald
        self.log = log
        self._services = stage
        self._on_finished = settled
        self._on_heartbeat = progressed
        self._on_never_started = unbegun
        self._failed = failed
        self._queue = StepQueue(stage)
        self._resting: set[Command] = set()
        self._steps: dict[str, RunningStep] = {}
        """Those that have a body running, by id."""
        self._running: set[Attempt] = set()

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    @property
    def has_active_attempts(self) -> bool:
        """Whether there is more to wait for than bodies that were given up."""
        queue = self._queue
        return bool(queue.waiting_for_journal or queue.waiting_for_slot) or not all(
            attempt.is_given_up for attempt in self._running
        )

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._queue.waiting_for_journal or self._queue.waiting_for_slot)

    def has_attempt(self, step: str) -> bool:
        return step in self._steps

    @property
    def waiting_for_retry(self) -> int:
        return len(self._resting)

    # Beginning

    def enqueue(self, command: Command) -> None:
        self._resting.discard(command)
        step = self._steps.get(command.id)
        if step is not None and step.command is not command:
            if step.is_abandoned and step.is_live:
                step.successor = command
                return
            self._replace_step(step, command)
        self._queue.add(command)

    def _replace_step(self, step: RunningStep, command: Command) -> None:
        """Only bodies that were given up are left of it: what they do counts if the same is asked for."""
        if self._is_same(step.command, command):
            step.transfer_to(command)
        else:
            del self._steps[command.id]

    def _is_same(self, one: Command, other: Command) -> bool:
        return one.name == other.name and self._services.codec.equal(one.input, other.input)

    def schedule_retry(self, command: Command) -> int:
        """Until the next attempt is due, which is when it returns."""
        self._resting.add(command)
        return self._due(command)

    def _due(self, command: Command) -> int:
        assert command.retry_at is not None
        return command.retry_at + int(self.judge.delay(command, command.call, command.attempt - 1) * MICROSECONDS)

    def in_flight_before(self) -> list[Command]:
        """Steps that an earlier process may have begun, and this one has not."""
        return [command for command in self._queue.held if command.is_replay]

    def may_have_been_in_flight(self, pending: Iterable[Command], now: int) -> list[Command]:
        """Steps that earlier processes may have begun, also those whose next attempt is due and not begun yet."""
        return [one for one in pending if one.kind is EntryKind.STEP and self.may_have_begun(one, now)]

    def start_ready(self, committed: int, pending: Mapping[str, Command]) -> None:
        self._queue.start_ready(committed, pending, self._begin)

    def _begin(self, command: Command, slot: Slot | None) -> None:
        step, context = self._steps.get(command.id), command.context
        if step is None:
            step = self._steps[command.id] = RunningStep(command)
        elif context is not None:
            context = context.copy()  # an earlier attempt still runs in that one
        attempt = Attempt(self, step, command, slot)
        step.attempts.append(attempt)
        self._running.add(attempt)
        attempt.task = start_task(self._run(attempt), loop=self._services.loop, context=context)

    # Ending

    async def _run(self, attempt: Attempt) -> None:
        try:
            outcome = await attempt.run()
        except Exception as error:  # not the body's, which is an outcome: the run has to be given back
            self._remove(attempt)
            attempt.close()
            self._failed(error)
            return
        except KeyboardInterrupt:  # the process ends, and nobody is told anything
            self._remove(attempt)
            attempt.close()
            raise
        except BaseException as error:  # a cancelled rollback, or a fault of ours: the run must not wait for ever
            outcome = attempt.failed(error)
        if isinstance(outcome, Retry):
            attempt.progress.flush()
        self._end(attempt, outcome)

    def on_attempt_cancelled(self, attempt: Attempt) -> None:
        if attempt in self._running:
            self._end(attempt, None)

    def _end(self, attempt: Attempt, outcome: Outcome | Unready | None) -> None:
        self._remove(attempt)
        try:
            self._record_result(attempt, outcome)
        finally:
            attempt.close()  # frees its slot, for which another attempt of the same step may wait in vain

    def _remove(self, attempt: Attempt) -> None:
        step = attempt.step
        self._running.discard(attempt)
        step.attempts.remove(attempt)
        if not step.attempts and self._steps.get(step.command.id) is step:
            del self._steps[step.command.id]

    def _record_result(self, attempt: Attempt, outcome: Outcome | Unready | None) -> None:
        step, verdict = attempt.step, outcome
        if isinstance(outcome, Success):
            verdict = self._succeed(step, outcome)
        elif attempt.is_given_up or outcome is None:
            verdict = None
        elif not isinstance(outcome, Unready) and step.is_abandoned and not self._transfer_to_successor(step):
            verdict = Failure(outcome.value, outcome.error)  # there is no other attempt
        command = step.command
        if step.successor is not None:
            self._start_successor(step)
        self._on_finished(command, verdict)

    def _succeed(self, step: RunningStep, success: Success) -> Success | None:
        """The first success is the step's, whichever attempt it is of."""
        if step.has_succeeded:
            return None
        if step.successor is not None:
            self._transfer_to_successor(step)
        step.has_succeeded = True
        for other in step.attempts:
            other.cancel()
        self._resting.discard(step.command)
        self._queue.remove(step.command)
        return success

    def _transfer_to_successor(self, step: RunningStep) -> bool:
        """Whether somebody asked for the same again, who gets the outcome."""
        if step.successor is None or not self._is_same(step.command, step.successor):
            return False
        step.transfer_to(step.successor)
        return True

    def _start_successor(self, step: RunningStep) -> None:
        if step.successor is not None and not step.is_live:
            successor, step.successor = step.successor, None
            self.enqueue(successor)

    def on_attempt_timed_out(self, attempt: Attempt, error: ActivityTimeoutError) -> None:
        step, outcome = attempt.step, self.judge.on_error(attempt.command, attempt.call, attempt.number, error)
        attempt.failure = Failure(outcome.value, outcome.error)
        if isinstance(outcome, Retry):
            attempt.progress.flush()
        attempt.cancel()
        if step.is_abandoned and not self._transfer_to_successor(step):
            outcome = attempt.failure
        command = step.command
        self._start_successor(step)
        self._on_finished(command, outcome)

    def progressed(self, attempt: Attempt, details: bytes) -> None:
        if not attempt.step.is_abandoned:
            self._on_heartbeat(attempt.step.command, details)

    def report_progress(self) -> None:
        """The run leaves memory: what its bodies said is recorded as far as it is not."""
        for attempt in tuple(self._running):
            attempt.progress.flush()

    # Giving up

    def drain(self) -> None:
        """Attempts that wait for the database are over: another worker begins them again."""
        for attempt in self._running:
            attempt.drain()

    def abandon(self, command: Command, now: int) -> None:
        """Nobody awaits it any more. What has to be undone is not interrupted: nobody would know if it happened."""
        self._resting.discard(command)
        self._queue.remove(command)
        step = self._steps.get(command.id)
        if step is not None and step.command is command:
            step.is_abandoned = True
            if command.undo is None:
                for attempt in step.attempts:
                    attempt.cancel()
            elif step.is_live:
                return
        elif step is not None and step.successor is command:
            step.successor = None
        if command.undo is not None and not self.may_have_begun(command, now):
            self._on_never_started(command)

    def may_have_begun(self, command: Command, now: int) -> bool:
        """In a process that is gone: not if its next attempt was not due yet."""
        return command.is_replay and (command.retry_at is None or self._due(command) <= now)

    def cancel(self) -> None:
        self._queue.close()
        for attempt in tuple(self._running):
            attempt.force_cancel()

    def close(self) -> None:
        """Forget who wanted to know: the two would keep each other in memory."""
        self._on_finished = self._on_heartbeat = self._on_never_started = self._failed = _tell_nobody


def _tell_nobody(*_: object) -> None:
    pass
