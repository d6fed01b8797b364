"""The outcomes of a step, and when it is retried."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from edda.core.codec import Codec
from edda.core.exceptions import MAX_MESSAGE, encode_failure, format_exception
from edda.core.model import MICROSECONDS, OutboxEvent, RunId, StagedEvent, StepCommit
from edda.core.retry import RetryPolicy
from edda.core.value_path import truncate
from edda.errors import ConfigurationError, RetryExhaustedError

if TYPE_CHECKING:
    from edda.workflow.activity import ActivityCall
    from edda.workflow.execution import Command


Part = StagedEvent | OutboxEvent | StepCommit


class Success(Struct, frozen=True):
    value: bytes
    result: Any
    parts: tuple[Part, ...] = ()
    """Records that are written with its entry."""


class Failure(Struct, frozen=True):
    value: bytes
    error: BaseException


class Retry(Struct, frozen=True):
    """Another try is due `delay` seconds from now."""

    value: bytes
    error: BaseException
    delay: float


Outcome = Success | Failure | Retry


class Unready(Struct, frozen=True):
    """No outcome: this process is not configured for the step, and the run waits for one that is."""

    error: ConfigurationError


class OutcomePolicy(Struct, frozen=True):
    """Decides between failure and retry for the steps of one run."""

    run_id: RunId
    codec: Codec
    default: RetryPolicy
    """Of steps without a policy of their own."""
    now: Callable[[], int]

    def _policy_of(self, command: Command) -> RetryPolicy:
        call: ActivityCall = command.call
        return call.retry_policy or self.default

    def delay(self, command: Command, attempt: int) -> float:
        """Seconds to wait after the failed attempt number `attempt`."""
        return self._policy_of(command).delay(attempt, f"{self.run_id}/{command.id}")

    def on_error(self, command: Command, attempt: int, error: BaseException) -> Failure | Retry:
        policy = self._policy_of(command)
        if not policy.covers(error):
            return self.failure(error)
        delay = self.delay(command, attempt)
        elapsed = (self.now() - command.issued_at) / MICROSECONDS
        if policy.allows(attempt, elapsed + delay):
            return Retry(encode_failure(self.codec, error), error, delay)
        return self._exhaust(command, attempt, error)

    def counts_crashes(self, command: Command) -> bool:
        """Whether deaths of the process are failed attempts of the step, and there is an end to its attempts."""
        policy = self._policy_of(command)
        return policy.count_crashes and policy.max_attempts is not None

    def reject_crashed(self, command: Command, error: BaseException) -> Failure | None:
        """Whether the attempt before the next one, in which the process died, was the last."""
        attempt, elapsed = command.attempt - 1, (self.now() - command.issued_at) / MICROSECONDS
        if self._policy_of(command).allows(attempt, elapsed):
            return None
        return self._exhaust(command, attempt, error)

    def _exhaust(self, command: Command, attempt: int, error: BaseException) -> Failure:
        exhausted = RetryExhaustedError(
            f"{command.id} failed {attempt} times, the last time with {truncate(format_exception(error), MAX_MESSAGE)}"
        )
        exhausted.__cause__ = error
        return self.failure(exhausted)

    def failure(self, error: BaseException) -> Failure:
        return Failure(encode_failure(self.codec, error), error)
