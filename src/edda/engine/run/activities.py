"""The activities of one run: a step waits for the journal and for a slot, its attempts run, its outcome is recorded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct, field

from edda.core.model import MICROSECONDS, EntryKind, StepCommit
from edda.engine.log import format_error, format_time
from edda.errors import RetryExhaustedError
from edda.workflow.compensation import UNDO_PREFIX
from edda.workflow.execution import Command, Execution

from .activity_limits import Slot
from .attempt import Attempt
from .outcomes import Failure, Outcome, OutcomePolicy, Retry, Success, Unready

if TYPE_CHECKING:
    from edda.errors import ActivityTimeoutError

    from .run import LiveRun


class RunningStep(Struct, eq=False):
    """A step and its attempts that run: the current one, and earlier ones that were given up and have not ended."""

    command: Command
    attempts: list[Attempt] = field(default_factory=list)
    is_abandoned: bool = False
    has_succeeded: bool = False
    successor: Command | None = None
    """A command for the same step, issued while an attempt of the abandoned one runs: it waits for that attempt."""
    _committing: asyncio.Lock | None = None

    @property
    def committing(self) -> asyncio.Lock:
        """Attempts of one step commit one after another: each has to know what the one before has committed."""
        if self._committing is None:
            self._committing = asyncio.Lock()
        return self._committing

    @property
    def is_live(self) -> bool:
        """Whether one of its attempts is not overdue."""
        return any(attempt.failure is None for attempt in self.attempts)

    def transfer_to(self, command: Command) -> None:
        self.command = command
        self.successor = None
        self.is_abandoned = self.has_succeeded = False


class ActivityRunner:
    run: LiveRun

    def __init__(self, run: LiveRun) -> None:
        services = run.services
        self.run = run
        self.worker = run.worker
        self.policy = OutcomePolicy(run.run_id, services.codec, services.retry_policy, services.clock.now)
        self.waiting_for_journal: deque[Command] = deque()
        """In the order they were issued."""
        self.waiting_for_slot: set[Command] = set()
        self.waiting_for_retry: set[Command] = set()
        self.running: set[Attempt] = set()
        self.steps: dict[str, RunningStep] = {}
        """Those with a running attempt, by id."""
        self.uncertain: list[Command] = []
        """Steps with a compensation that were abandoned before they started, or failed by a time limit: an attempt of
        the latter may still run, and succeed."""

    @property
    def is_busy(self) -> bool:
        return bool(self.running or self.waiting_for_journal or self.waiting_for_slot)

    @property
    def has_active_attempts(self) -> bool:
        """Whether the run waits for more than attempts that were given up."""
        return bool(self.waiting_for_journal or self.waiting_for_slot) or not all(
            attempt.heartbeat.is_given_up for attempt in self.running
        )

    # Starting

    def enqueue(self, command: Command) -> None:
        self.waiting_for_retry.discard(command)
        step = self.steps.get(command.id)
        if step is not None and step.command is not command:
            if step.is_abandoned and step.is_live:
                step.successor = command
                return
            # Only attempts that were given up are left of the step: their success counts if the command is the same.
            if self._is_same(step.command, command):
                step.transfer_to(command)
            else:
                del self.steps[command.id]
        self.waiting_for_journal.append(command)

    def _is_same(self, one: Command, other: Command) -> bool:
        return one.name == other.name and self.run.services.codec.equal(one.input, other.input)

    def schedule_retry(self, command: Command) -> None:
        self.waiting_for_retry.add(command)
        self.run.timers.add(self._due(command), command)

    def _due(self, command: Command) -> int:
        assert command.retry_at is not None
        return command.retry_at + int(self.policy.delay(command, command.attempt - 1) * MICROSECONDS)

    def in_flight_before(self) -> list[Command]:
        """Steps that an earlier process may have started, and this one has not."""
        return [command for command in (*self.waiting_for_journal, *self.waiting_for_slot) if command.is_replay]

    def may_have_been_in_flight(self, pending: Iterable[Command], now: int) -> list[Command]:
        """Steps that earlier processes may have started, also those whose next attempt is due and not started yet."""
        return [one for one in pending if one.kind is EntryKind.STEP and self._may_have_begun(one, now)]

    def _may_have_begun(self, command: Command, now: int) -> bool:
        """In an earlier process: not if its next attempt was not due yet."""
        return command.is_replay and (command.retry_at is None or self._due(command) <= now)

    def start_ready(self, committed: int, pending: Mapping[str, Command]) -> None:
        """Start the steps whose history is committed."""
        queue = self.waiting_for_journal
        while queue and queue[0].after_entry <= committed and self.worker.may_start_steps:
            command = queue.popleft()
            if pending.get(command.id) is not command:
                continue
            limit = command.call.limits.max_concurrent
            if limit is None:
                self._begin(command, None)
            else:
                self.waiting_for_slot.add(command)
                self.run.services.slots.acquire(command.name, limit, command, partial(self._on_slot, command))

    def _on_slot(self, command: Command, slot: Slot) -> bool:
        self.waiting_for_slot.discard(command)
        if self.worker.draining or not self.worker.may_start_steps:
            self.waiting_for_journal.appendleft(command)
            return False
        self._begin(command, slot)
        return True

    def _leave_slot_queue(self, command: Command) -> None:
        """The step is not to start any more; those that wait for the journal are checked when it is their turn."""
        if command in self.waiting_for_slot:
            self.waiting_for_slot.discard(command)
            self.run.services.slots.cancel(command.name, command)

    def _begin(self, command: Command, slot: Slot | None) -> None:
        step, context = self.steps.get(command.id), command.context
        if step is None:
            step = self.steps[command.id] = RunningStep(command)
        elif context is not None:
            context = context.copy()  # an earlier attempt still runs in that one
        attempt = Attempt(self, step, command, slot)
        step.attempts.append(attempt)
        self.running.add(attempt)
        # Not `create_task`, for the reason that `start_task` gives.
        attempt.task = asyncio.Task(attempt.run_task(), loop=self.worker.loop, context=context)

    # Ending

    def on_attempt_cancelled(self, attempt: Attempt) -> None:
        """Its task was cancelled, maybe before its first turn of the loop."""
        if attempt in self.running:
            self.on_attempt_ended(attempt, None)

    def drop_attempt(self, attempt: Attempt) -> None:
        """It is over, and has nothing to record."""
        self._remove(attempt)
        attempt.close()

    def _remove(self, attempt: Attempt) -> None:
        step = attempt.step
        self.running.discard(attempt)
        step.attempts.remove(attempt)
        if not step.attempts and self.steps.get(step.command.id) is step:
            del self.steps[step.command.id]

    def on_attempt_ended(self, attempt: Attempt, outcome: Outcome | Unready | None) -> None:
        self._remove(attempt)
        step, recorded = attempt.step, outcome
        try:
            if isinstance(outcome, Success):
                recorded = None if step.has_succeeded else outcome  # the first success of any attempt is the step's
                self._on_success(step)
            elif attempt.heartbeat.is_given_up or outcome is None:
                recorded = None
            elif not isinstance(outcome, Unready) and step.is_abandoned and not self._transfer_to_successor(step):
                recorded = Failure(outcome.value, outcome.error)  # there is no other attempt
            command = step.command
            if step.successor is not None:
                self._start_successor(step)
            self.run.on_step_finished(command, recorded)
        finally:
            attempt.close()  # frees its slot, for which another attempt of the same step may wait

    def _on_success(self, step: RunningStep) -> None:
        if not step.has_succeeded:
            if step.successor is not None:
                self._transfer_to_successor(step)
            step.has_succeeded = True
            for other in step.attempts:
                other.cancel()
            self.waiting_for_retry.discard(step.command)
            if self.waiting_for_slot:
                self._leave_slot_queue(step.command)

    def _transfer_to_successor(self, step: RunningStep) -> bool:
        """Whether the successor asks for the same: then it gets the outcome."""
        if step.successor is None or not self._is_same(step.command, step.successor):
            return False
        step.transfer_to(step.successor)
        return True

    def _start_successor(self, step: RunningStep) -> None:
        if step.successor is not None and not step.is_live:
            successor, step.successor = step.successor, None
            self.enqueue(successor)

    def on_attempt_timed_out(self, attempt: Attempt, error: ActivityTimeoutError) -> None:
        step, outcome = attempt.step, self.policy.on_error(attempt.command, attempt.number, error)
        attempt.failure = Failure(outcome.value, outcome.error)
        if isinstance(outcome, Retry):
            attempt.heartbeat.flush()
        attempt.cancel()
        if step.is_abandoned and not self._transfer_to_successor(step):
            outcome = attempt.failure
        command = step.command
        self._start_successor(step)
        self.run.on_step_finished(command, outcome)

    def flush_heartbeats(self) -> None:
        """The run leaves memory: record the newest details of each attempt."""
        for attempt in tuple(self.running):
            attempt.heartbeat.flush()

    # Giving up

    def drain(self) -> None:
        """End the attempts that wait for the database: another worker starts them again."""
        for attempt in self.running:
            attempt.drain()

    def abandon(self, command: Command, now: int) -> None:
        """The workflow's code does not await the step any more. A step with a compensation is not interrupted: it would
        be unknown whether its effect happened."""
        self.waiting_for_retry.discard(command)
        self._leave_slot_queue(command)
        step = self.steps.get(command.id)
        if step is not None and step.command is command:
            step.is_abandoned = True
            if command.undo is None:
                for attempt in step.attempts:
                    attempt.cancel()
            elif step.is_live:
                return
        elif step is not None and step.successor is command:
            step.successor = None
        if command.undo is not None and not self._may_have_begun(command, now):
            self.uncertain.append(command)

    def cancel_tasks(self) -> None:
        for command in tuple(self.waiting_for_slot):
            self._leave_slot_queue(command)
        for attempt in tuple(self.running):
            attempt.cancel(again=True)

    # Recording

    def record(self, execution: Execution, command: Command, outcome: Outcome) -> None:
        """Append the outcome to the history."""
        kind = EntryKind.STEP
        if execution.pending.get(command.id) is not command:
            if isinstance(outcome, Failure) and self._may_still_succeed(execution, command):
                self.uncertain.append(command)
                return
            if isinstance(outcome, Retry):
                return
            kind = EntryKind.LATE  # the code does not await it any more, but it happened
            self.uncertain = [one for one in self.uncertain if one is not command]
        elif isinstance(outcome, Retry):
            kind = EntryKind.RETRY
        elif isinstance(outcome, Failure) and command.is_uncertain:
            self.uncertain.append(command)
        self._append(execution, kind, command, outcome)
        if kind is EntryKind.RETRY and self.run.writes.transition is None:
            command.after_entry = execution.length
            self.schedule_retry(command)

    def _may_still_succeed(self, execution: Execution, command: Command) -> bool:
        """Whether the failure is not final: another attempt of the step runs, or has succeeded before."""
        if command.undo is None:
            return False
        return command.id in self.steps or not execution.compensator.awaits_outcome(command)

    def record_committed(self, execution: Execution, commit: StepCommit) -> None:
        """An earlier owner of the run committed the step's transaction, and could not record its entry any more."""
        run, command = self.run, execution.pending.get(commit.step)
        if command is not None and command.kind is EntryKind.STEP:
            result = run.services.codec.decode(commit.value, command.call.returns)
            command.attempt = commit.attempt
            self._append(execution, EntryKind.STEP, command, Success(commit.value, result, (commit,)))
        else:
            run.writes.attach(commit, execution.length + 1)
            name = commit.step.rpartition("/")[2].partition(":")[0]
            run.append_entry(EntryKind.LATE, commit.step, name, value=commit.value, attempt=commit.attempt)

    def resolve_uncertain(self, execution: Execution, *, at_last: bool = False) -> None:
        """Record that steps without a running attempt did not succeed: there is nothing to undo. `at_last`: all."""
        over = [command for command in self.uncertain if at_last or command.id not in self.steps]
        self.uncertain = [command for command in self.uncertain if command not in over]
        for command in over:
            if self.run.writes.transition is None and execution.compensator.awaits_outcome(command):
                self.run.append_entry(EntryKind.LATE, command.id, command.name, ok=False, input=command.input)

    def _append(self, execution: Execution, kind: EntryKind, command: Command, outcome: Outcome) -> None:
        run, seq, is_ok = self.run, execution.length + 1, isinstance(outcome, Success)
        if run.hooks is not None:
            run.hooks.step_finished(seq, command, outcome)
        if run.is_verbose or not is_ok:
            self._log(seq, command, outcome)
        if isinstance(outcome, Success):
            for part in outcome.parts:
                run.writes.attach(part, seq)
        run.append_entry(
            kind,
            command.id,
            command.name,
            ok=is_ok,
            input=b"" if kind is EntryKind.RETRY else command.input,
            value=outcome.value,
            attempt=command.attempt,
        )

    def _log(self, seq: int, command: Command, outcome: Outcome) -> None:
        log, step = self.run.log, {"step": command.id, "attempt": command.attempt}
        if isinstance(outcome, Success):
            log.write_at(seq, "step_recorded", **step)
        elif isinstance(outcome, Retry):
            due = format_time(self.run.services.clock.now() + int(outcome.delay * MICROSECONDS))
            error = format_error(outcome.error)
            log.write_at(seq, "step_retry", command.input, **step, error=error, delay=outcome.delay, next_try=due)
        else:
            is_last = isinstance(outcome.error, RetryExhaustedError)
            cause = outcome.error.__cause__ or outcome.error if is_last else outcome.error
            line = "retries_exhausted" if is_last else "step_failed"
            line = "compensation_failed" if command.id.startswith(UNDO_PREFIX) else line
            log.write_at(seq, line, command.input, **step, error=format_error(cause))
