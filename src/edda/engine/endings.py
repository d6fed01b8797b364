"""How a run ends: its outcome as a record, and as something to tell the hooks."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edda.core.codec import Codec
from edda.core.failure import encode_failure
from edda.core.model import End, EntryKind
from edda.core.signature import Signature
from edda.core.states import RunStatus
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

from .clock import Clock
from .herald import RunHooks
from .log import tell_error

if TYPE_CHECKING:
    from edda.workflow.execution import Execution


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
