"""How a run ends or begins its next generation: the End or Recur record, signals, hooks, log lines."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from typing import TYPE_CHECKING

from msgspec.structs import replace

from edda.core.exceptions import encode_failure
from edda.core.model import NO_CRASHES, ClaimedRun, End, EndWatcher, Entry, EntryKind, Recur, RunSignal, Suspend
from edda.core.redact import redact_credentials
from edda.core.states import RunStatus
from edda.engine.log import format_error, format_time
from edda.errors import (
    CompensationError,
    HistoryLimitError,
    ParkedError,
    WorkflowCancelledError,
    WorkflowError,
    WorkflowTimeoutError,
)
from edda.workflow.children import RunEnded
from edda.workflow.execution import Execution, RecurRequested

from . import inbox

if TYPE_CHECKING:
    from .run import LiveRun

logger = logging.getLogger(__name__)


class RunCompletion:
    def __init__(self, run: LiveRun) -> None:
        self.watchers = run.claimed.watchers
        """The runs that wait for this one's end, besides its parent."""
        self.reason = ""
        """Why the run failed or was cancelled, for the log."""
        self._run = run
        self._codec = run.services.codec
        self._name = f"{run.claimed.workflow} {run.run_id}"
        self.ends_unread: str | None = None
        """Why it is about to end as cancelled without its code."""
        self._end: End | None = None
        self._is_warned = len(run.claimed.entries) >= run.services.settings.history_warning

    def complete(self, execution: Execution) -> None:
        """The run's code is done. Called again after a refused End, the end is the same, with the watchers that are
        known by then."""
        run = self._run
        try:
            transition = self._end or self._to_transition(execution)
            if isinstance(transition, Recur):
                run.leave(transition)
            else:
                self._end = transition
                run.leave(*self._with_signals(transition))
        except ParkedError as error:  # it cannot go on, but has not ended either
            run.park(error)
        except KeyboardInterrupt:  # raised in its code: this process ends, and another one goes on with the run
            run.release_to_others()

    def _to_transition(self, execution: Execution) -> End | Recur:
        stop = self._run.stop_entries[0] if self._run.stop_entries else None
        try:
            result = execution.outcome()
        except CancelledError as error:
            reason = self._stop_reason(error, stop)
            return self._cancelled(str(reason)) if isinstance(reason, WorkflowCancelledError) else self._failed(reason)
        except (ParkedError, KeyboardInterrupt):
            raise
        except RecurRequested as recurrence:
            if execution.late_cancel is None:
                return self._recur(execution, recurrence.input)
            return self._cancelled(execution.late_cancel)
        except CompensationError as error:
            if isinstance(error.__cause__, CancelledError):
                error.__cause__ = self._stop_reason(error.__cause__, stop)
            return self._failed(error)
        except BaseException as error:  # any error that a workflow ends with is its outcome, SystemExit included
            return self._failed(error)
        if self._run.hooks is not None:
            self._run.hooks.run_completed(result)
        return End(RunStatus.COMPLETED, execution.value, self._run.services.clock.now())

    def failed(self, error: BaseException) -> tuple[End, tuple[RunSignal, ...]]:
        self._end = self._failed(error)
        return self._with_signals(self._end)

    def end_unread(self, error: Exception) -> None:
        """It was cancelled while it was parked, and its replay fails: end it without its code. The end is refused if an
        item arrived since the inbox was recorded."""
        run, codec = self._run, self._codec
        run.log.write("run_ends_unread", error=redact_credentials(f"{type(error).__name__}: {error}"))
        run.was_parked = False
        self.ends_unread = f"{type(error).__name__}: {error}"[:2000]
        inbox.read_all(run.claimed, run.writes, codec, run.services.clock.now())
        end, signals = self._with_signals(self._cancelled(inbox.cancel_reason(run.claimed, codec, error)))
        end = replace(end, expected_inbox_count=run.writes.inbox_read)
        run.leave(end, (*signals, *inbox.child_cancels(run.claimed, codec)))

    def check_history_length(self, execution: Execution) -> None:
        """Every entry makes each replay slower: warn, then stop the run, then fail it."""
        run, settings = self._run, self._run.services.settings
        if execution.compensator.has_begun:
            return
        if execution.length >= settings.history_limit and EntryKind.LIMIT not in run.stop_entries:
            run.append_entry(EntryKind.LIMIT, name="the history is too long")
        elif execution.length >= 2 * settings.history_limit:
            run.leave(*self.failed(self._limit_error()))
        elif execution.length >= settings.history_warning and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "run %s of %s has a history of %d entries, and at %d it is stopped: let it begin anew with ctx.recur()",
                run.run_id,
                run.workflow.name,
                execution.length,
                settings.history_limit,
            )

    def next_generation(self, recur: Recur) -> ClaimedRun:
        """As a worker would claim it."""
        claimed = self._run.claimed
        return replace(
            claimed,
            generation=claimed.generation + 1,
            input=recur.input,
            created_at=recur.at,
            inbox_read=recur.inbox_read,
            attempts=0,
            entries=(recur.entry,),
            inbox=(),
            waits=(),
            step_commits=(),
            watchers=self.watchers,
            compensating=False,
            end_if_parked=False,
            crashes=NO_CRASHES,
        )

    def _stop_reason(self, error: CancelledError, stop: EntryKind | None) -> WorkflowError:
        if stop is EntryKind.TIMEOUT:
            return WorkflowTimeoutError(f"{self._name} passed its deadline")
        if stop is EntryKind.LIMIT:
            return self._limit_error()
        return WorkflowCancelledError(str(error.args[0]) if error.args and error.args[0] else "cancelled")

    def _limit_error(self) -> HistoryLimitError:
        run = self._run
        rejected = sum(entry.kind is EntryKind.REJECTED for entry in run.claimed.entries) + run.writes.rejected
        misfits = f" {rejected:,} of them are events that did not fit the model of a wait." if rejected else ""
        return HistoryLimitError(
            f"{self._name} has a history of {run.services.settings.history_limit:,} entries, which is the limit."
            f"{misfits} Let the workflow begin anew with ctx.recur() once in a while, or give parts of it to children; "
            "Settings(history_limit=...) raises the limit."
        )

    def _cancelled(self, reason: str) -> End:
        self.reason = reason
        if self._run.hooks is not None:
            self._run.hooks.run_cancelled()
        return End(RunStatus.CANCELLED, self._codec.encode(reason), self._run.services.clock.now())

    def _failed(self, error: BaseException) -> End:
        self.reason = format_error(error)
        if self._run.hooks is not None:
            self._run.hooks.run_failed(error)
        return End(RunStatus.FAILED, encode_failure(self._codec, error), self._run.services.clock.now())

    def _with_signals(self, end: End) -> tuple[End, tuple[RunSignal, ...]]:
        """With a signal for each run that waits for it."""
        run, watchers = self._run, self.watchers
        claimed = run.claimed
        if claimed.parent is not None and claimed.parent_step is not None:
            watchers = (EndWatcher(claimed.parent, claimed.parent_step), *watchers)
        signals: tuple[RunSignal, ...] = ()
        if watchers:
            ended = RunEnded(claimed.run_id, end.status, end.value).pack()
            signals = tuple(RunSignal(one.run_id, EntryKind.CHILD, one.step, ended) for one in watchers)
        inbox_count = run.writes.inbox_read if run.may_have_exclusive_messages else None
        return replace(end, watchers=len(self.watchers), expected_inbox_count=inbox_count), signals

    def _recur(self, execution: Execution, input: bytes) -> Recur:
        run, at = self._run, max(self._run.services.clock.now(), execution.now)
        cursors = run.waits.cursors.export(run.context.subscriptions)
        return Recur(run.writes.inbox_read, input, at, Entry(1, EntryKind.RECUR, "", "", True, at, value=cursors))

    # Log lines

    def log_end(self, end: End, execution: Execution | None) -> None:
        log = self._run.log
        self._log_resumed()
        if end.status is RunStatus.FAILED:
            log.write("run_failed", error=self.reason)
        elif end.status is RunStatus.CANCELLED:
            log.write("run_cancelled", reason=self.reason)
        elif execution is not None and execution.unfinished:
            log.write("steps_unfinished", steps=", ".join(execution.unfinished))
        if end.status is RunStatus.COMPLETED and self._run.is_verbose:
            log.write("run_completed")

    def log_suspended(self, transition: Suspend) -> None:
        run = self._run
        if transition.status is RunStatus.PARKED:
            due = format_time(transition.ready_at) if transition.ready_at else "its resumption by hand"
            reason = redact_credentials(transition.reason or "")
            run.worker.parking_log.write(run.log, run.run_id, run.workflow.name, reason, due)
            return
        self._log_resumed()
        if run.is_verbose and transition.status is RunStatus.RUNNING:
            run.log.write("run_handed_back")
        elif run.is_verbose:
            until = "it comes" if transition.ready_at is None else format_time(transition.ready_at)
            run.log.write("run_suspended", status=transition.status.value, waits_for=run.waits_for, until=until)

    def _log_resumed(self) -> None:
        if self._run.was_parked:
            self._run.was_parked = False
            self._run.log.write("run_resumed")
