"""What became of the steps of one run, as entries of its history."""

from __future__ import annotations

from edda.core.codec import Codec
from edda.core.model import MICROSECONDS, EntryKind, StepCommit
from edda.engine.log import RunLog, tell_error, tell_moment
from edda.errors import RetryExhaustedError
from edda.workflow.compensation import UNDO_PREFIX
from edda.workflow.execution import Command, Execution

from .activities import ActivityRunner
from .hooks import RunHooks
from .host import AppendEntry
from .outcome_policy import Failure, Outcome, Retry, Success
from .timers import TimerQueue
from .writes import RunWriteBuffer


class StepOutcomes:
    def __init__(
        self,
        draft: RunWriteBuffer,
        bodies: ActivityRunner,
        timetable: TimerQueue,
        herald: RunHooks | None,
        log: RunLog,
        deliver: AppendEntry,
    ) -> None:
        self._draft = draft
        self._bodies = bodies
        self._timetable = timetable
        self._herald = herald
        self._log = log
        self._deliver: AppendEntry | None = deliver
        self.uncertain: list[Command] = []
        """Abandoned before they did anything, or given up for good: their bodies may still run, and succeed."""

    def mark_uncertain(self, command: Command) -> None:
        self.uncertain.append(command)

    def record(self, execution: Execution, command: Command, outcome: Outcome) -> None:
        if execution.pending.get(command.id) is not command:
            if isinstance(outcome, Failure) and self._may_still_succeed(execution, command):
                self.uncertain.append(command)
            elif not isinstance(outcome, Retry):  # nobody waits for it any more, but it happened
                self.uncertain = [one for one in self.uncertain if one is not command]
                self._record(execution, EntryKind.LATE, command, outcome)
        elif isinstance(outcome, Retry):
            self._record(execution, EntryKind.RETRY, command, outcome)
            if self._draft.transition is None:
                command.after_entry = execution.length
                self._timetable.add(self._bodies.schedule_retry(command), command)
        else:
            if command.is_uncertain and isinstance(outcome, Failure):
                self.uncertain.append(command)
            self._record(execution, EntryKind.STEP, command, outcome)

    def record_committed(self, execution: Execution, done: StepCommit, codec: Codec) -> None:
        """Its effect was committed by somebody who could not record it any more."""
        command = execution.pending.get(done.step)
        if command is not None and command.kind is EntryKind.STEP:
            result = codec.decode(done.value, command.call.returns)
            command.attempt = done.attempt
            self._record(execution, EntryKind.STEP, command, Success(done.value, result, (done,)))
        elif self._deliver is not None:
            self._draft.attach(done, execution.length + 1)
            name = done.step.rpartition("/")[2].partition(":")[0]
            self._deliver(EntryKind.LATE, done.step, name, value=done.value, attempt=done.attempt)

    def _may_still_succeed(self, execution: Execution, command: Command) -> bool:
        """Whether a failure does not say the last word: another body of the step runs, or one was better before."""
        if command.undo is None:
            return False
        return self._bodies.has_attempt(command.id) or not execution.undoing.awaits_outcome(command)

    def resolve_uncertain(self, execution: Execution, *, at_last: bool = False) -> None:
        """What was abandoned before it did anything, and what was given up and did not succeed all the same: there is
        nothing to undo."""
        over = [command for command in self.uncertain if at_last or not self._bodies.has_attempt(command.id)]
        self.uncertain = [command for command in self.uncertain if command not in over]
        for command in over:
            if (
                self._deliver is not None
                and self._draft.transition is None
                and execution.undoing.awaits_outcome(command)
            ):
                self._deliver(EntryKind.LATE, command.id, command.name, ok=False, input=command.input)

    def _record(self, execution: Execution, kind: EntryKind, command: Command, outcome: Outcome) -> None:
        seq = execution.length + 1
        if self._herald is not None:
            self._herald.step_finished(seq, command, outcome)
        if self._log.is_verbose or not isinstance(outcome, Success):
            self._tell(seq, command, outcome)
        if self._deliver is not None:
            if isinstance(outcome, Success):
                for part in outcome.parts:
                    self._draft.attach(part, execution.length + 1)
            self._deliver(
                kind,
                command.id,
                command.name,
                ok=isinstance(outcome, Success),
                input=b"" if kind is EntryKind.RETRY else command.input,
                value=outcome.value,
                attempt=command.attempt,
            )

    def _tell(self, seq: int, command: Command, outcome: Outcome) -> None:
        step = {"step": command.id, "attempt": command.attempt}
        if isinstance(outcome, Success):
            self._log.write_at(seq, "step_recorded", **step)
        elif isinstance(outcome, Retry):
            due = tell_moment(self._bodies.place.clock.now() + int(outcome.delay * MICROSECONDS))
            error = tell_error(outcome.error)
            self._log.write_at(seq, "step_retry", command.input, **step, error=error, delay=outcome.delay, next_try=due)
        else:
            is_last = isinstance(outcome.error, RetryExhaustedError)
            cause = outcome.error.__cause__ or outcome.error if is_last else outcome.error
            line = "retries_exhausted" if is_last else "step_failed"
            line = "compensation_failed" if command.id.startswith(UNDO_PREFIX) else line
            self._log.write_at(seq, line, command.input, **step, error=tell_error(cause))

    def close(self) -> None:
        """Forget who wanted to know: the two would keep each other in memory."""
        self._deliver = None
        self.uncertain.clear()
