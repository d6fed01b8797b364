"""How a run ends or begins its next generation: the End or Recur record, signals, hooks."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edda.core.codec import Codec
from edda.core.exceptions import encode_failure
from edda.core.model import End, EntryKind
from edda.core.signature import Signature
from edda.core.states import RunStatus
from edda.engine.clock import Clock
from edda.engine.log import tell_error
from edda.errors import (
    CompensationError,
    HistoryLimitError,
    ParkedError,
    PayloadError,
    WorkflowCancelledError,
    WorkflowError,
    WorkflowTimeoutError,
)
from edda.workflow.execution import RecurRequested

from .hooks import RunHooks

if TYPE_CHECKING:
    from edda.workflow.execution import Execution
from collections.abc import Sequence

from msgspec.structs import replace

from edda.core.model import NO_CRASHES, ClaimedRun, EndWatcher, Entry, Recur, RunSignal
from edda.workflow.children import RunEnded
from edda.workflow.context import RunContext
from edda.workflow.execution import Execution

from .waits import EventWaits
from .writes import RunWriteBuffer


class EndRecords:
    def __init__(
        self,
        name: str,
        codec: Codec,
        signature: Signature,
        clock: Clock,
        herald: RunHooks | None,
        limit: int,
        count_rejected: Callable[[], int],
    ) -> None:
        self._name = name
        """For people: the workflow and the run."""
        self._limit = limit
        self._count_rejected = count_rejected
        self._codec = codec
        self._signature = signature
        self._clock = clock
        self._herald = herald
        self.reason = ""
        """Why the run failed or was cancelled, for people."""

    def to_end(self, execution: Execution, stop: EntryKind | None) -> End:
        """`stop` is what stopped the run, if anything did.

        Raises `ParkedError` if the run cannot go on, but has not ended either, and `Recurrence`.
        """
        try:
            result = execution.outcome()
        except CancelledError as error:
            return self._end_of_stopped(error, stop)
        except (ParkedError, KeyboardInterrupt, RecurRequested):
            raise
        except CompensationError as error:
            if isinstance(error.__cause__, CancelledError):
                error.__cause__ = self._stop_reason(error.__cause__, stop)
            return self.failed(error)
        except BaseException as error:  # whatever a workflow ends with is its outcome, SystemExit included
            return self.failed(error)
        if self._herald is not None:
            self._herald.run_completed(result)
        return End(RunStatus.COMPLETED, execution.value, self._clock.now())

    def encode(self, result: Any) -> bytes:
        try:
            return self._codec.encode_typed(result, self._signature.returns)
        except PayloadError as error:
            raise PayloadError(f"the result of {self._name} cannot be stored: {error}") from None

    def _end_of_stopped(self, error: CancelledError, stop: EntryKind | None) -> End:
        reason = self._stop_reason(error, stop)
        return self.cancelled(str(reason)) if isinstance(reason, WorkflowCancelledError) else self.failed(reason)

    def _stop_reason(self, error: CancelledError, stop: EntryKind | None) -> WorkflowError:
        if stop is EntryKind.TIMEOUT:
            return WorkflowTimeoutError(f"{self._name} passed its deadline")
        if stop is EntryKind.LIMIT:
            return self.limit_error()
        return WorkflowCancelledError(str(error.args[0]) if error.args and error.args[0] else "cancelled")

    def limit_error(self) -> HistoryLimitError:
        rejected = self._count_rejected()
        misfits = f" {rejected:,} of them are events that did not fit the model of a wait." if rejected else ""
        return HistoryLimitError(
            f"{self._name} has a history of {self._limit:,} entries, which is the limit.{misfits} "
            "Let the workflow begin anew with ctx.recur() once in a while, or give parts of it to children; "
            "Settings(history_limit=...) raises the limit."
        )

    def cancelled(self, reason: str) -> End:
        self.reason = reason
        if self._herald is not None:
            self._herald.run_cancelled()
        return End(RunStatus.CANCELLED, self._codec.encode(reason), self._clock.now())

    def failed(self, error: BaseException) -> End:
        self.reason = tell_error(error)
        if self._herald is not None:
            self._herald.run_failed(error)
        return End(RunStatus.FAILED, encode_failure(self._codec, error), self._clock.now())


Completion = tuple[End | Recur, tuple[RunSignal, ...]]


class RunCompletion:
    def __init__(
        self,
        claimed: ClaimedRun,
        codec: Codec,
        clock: Clock,
        draft: RunWriteBuffer,
        waits: EventWaits,
        context: RunContext,
        signature: Signature,
        herald: RunHooks | None,
        limit: int,
    ) -> None:
        self.watchers = claimed.watchers
        """Who is told, besides the parent."""
        self._claimed = claimed
        self._clock = clock
        self._draft = draft
        self._waits = waits
        self._context = context
        self._endings = EndRecords(
            f"{claimed.workflow} {claimed.run_id}", codec, signature, clock, herald, limit, self._count_rejected
        )
        self._end: End | None = None

    def complete(self, execution: Execution, stops: Sequence[EntryKind]) -> Completion:
        """For a run whose code is done; `stops` are what stopped it. Raises `ParkedError` if it has not ended either.

        Asked again if the run could not leave, it gives the same end, but with all that is known by then.
        """
        if self._end is None:
            try:
                self._end = self._endings.to_end(execution, stops[0] if stops else None)
            except RecurRequested as recurrence:
                if execution.late_cancel is None:
                    return self._recur(execution, recurrence.input), ()
                self._end = self._endings.cancelled(execution.late_cancel)
        return self._with_signals(self._end)

    def encode(self, result: Any) -> bytes:
        """What a workflow returned; raises `PayloadError` if it cannot be stored."""
        return self._endings.encode(result)

    def failed(self, error: BaseException) -> tuple[End, tuple[RunSignal, ...]]:
        self._end = self._endings.failed(error)
        return self._with_signals(self._end)

    def cancelled_unread(self, reason: str) -> tuple[End, tuple[RunSignal, ...]]:
        """Of a run whose code did not read the inbox: it happens only if nothing came in since that was recorded."""
        end, letters = self._with_signals(self._endings.cancelled(reason))
        return replace(end, settled=self._draft.absorbed), letters

    def _count_rejected(self) -> int:
        before = sum(entry.kind is EntryKind.REJECTED for entry in self._claimed.entries)
        return before + self._draft.rejected

    def history_limit_reached(self) -> Completion:
        return self.failed(self._endings.limit_error())

    @property
    def reason(self) -> str:
        """Why the run failed or was cancelled, for people."""
        return self._endings.reason

    def _with_signals(self, end: End) -> tuple[End, tuple[RunSignal, ...]]:
        """With a letter for everybody who waits for it."""
        claimed, watchers = self._claimed, self.watchers
        if claimed.parent is not None and claimed.parent_step is not None:
            watchers = (EndWatcher(claimed.parent, claimed.parent_step), *watchers)
        letters = self._signals_to(watchers, end) if watchers else ()
        settled = self._draft.absorbed if self._waits.may_have_exclusive_messages else None
        return replace(end, watchers=len(self.watchers), settled=settled), letters

    def _signals_to(self, watchers: Sequence[EndWatcher], end: End) -> tuple[RunSignal, ...]:
        told = RunEnded(self._claimed.run_id, end.status, end.value).pack()
        return tuple(RunSignal(one.run_id, EntryKind.CHILD, one.step, told) for one in watchers)

    def _recur(self, execution: Execution, input: bytes) -> Recur:
        at = max(self._clock.now(), execution.now)
        entry = Entry(
            1, EntryKind.RECUR, "", "", True, at, value=self._waits.export_cursors(self._context.subscriptions)
        )
        return Recur(self._draft.absorbed, input, at, entry)

    def next_generation(self, recur: Recur) -> ClaimedRun:
        """The next generation, as it would be claimed."""
        return replace(
            self._claimed,
            gen=self._claimed.gen + 1,
            input=recur.input,
            created_at=recur.at,
            absorbed=recur.absorbed,
            attempts=0,
            entries=(recur.entry,),
            mail=(),
            waits=(),
            done=(),
            watchers=self.watchers,
            undoing=False,
            end_if_parked=False,
            crashes=NO_CRASHES,
        )
