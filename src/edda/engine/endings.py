"""How a run ends: its outcome as a record, and as something to tell the hooks."""

from __future__ import annotations

from asyncio import CancelledError
from typing import TYPE_CHECKING

from edda.core.codec import Codec
from edda.core.failure import encode_failure
from edda.core.model import End
from edda.core.states import RunStatus
from edda.errors import ParkedError, PayloadError, WorkflowTimeoutError

from .clock import Clock
from .herald import Herald

if TYPE_CHECKING:
    from edda.workflow.execution import Execution


class Endings:
    def __init__(self, name: str, codec: Codec, clock: Clock, herald: Herald | None) -> None:
        self._name = name
        """For people: the workflow and the run."""
        self._codec = codec
        self._clock = clock
        self._herald = herald

    def of(self, execution: Execution, timed_out: bool) -> End:
        """Raises `ParkedError` if the run cannot go on, but has not ended either."""
        try:
            result = execution.outcome()
            end = End(RunStatus.COMPLETED, self._codec.encode(result), self._clock.now())
        except CancelledError as error:
            return self._cancelled(error, timed_out)
        except (ParkedError, KeyboardInterrupt):
            raise
        except PayloadError as error:
            return self.failed(PayloadError(f"the result of {self._name} cannot be stored: {error}"))
        except BaseException as error:  # whatever a workflow ends with is its outcome, SystemExit included
            return self.failed(error)
        if self._herald is not None:
            self._herald.tell_completed(result)
        return end

    def _cancelled(self, error: CancelledError, timed_out: bool) -> End:
        if timed_out:
            return self.failed(WorkflowTimeoutError(f"{self._name} passed its deadline"))
        if self._herald is not None:
            self._herald.tell_cancelled()
        reason = str(error.args[0]) if error.args and error.args[0] else "cancelled"
        return End(RunStatus.CANCELLED, self._codec.encode(reason), self._clock.now())

    def failed(self, error: BaseException) -> End:
        if self._herald is not None:
            self._herald.tell_failed(error)
        return End(RunStatus.FAILED, encode_failure(self._codec, error), self._clock.now())
