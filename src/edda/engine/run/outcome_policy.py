"""How a step can turn out, and where sync bodies run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from edda.core.codec import Codec
from edda.core.exceptions import MAX_MESSAGE, encode_failure, tell
from edda.core.model import MICROSECONDS, OutboxEvent, RunId, StagedEvent, StepCommit
from edda.core.retry import RetryPolicy
from edda.core.value_path import truncate
from edda.errors import ConfigurationError, PayloadError, RetryExhaustedError

if TYPE_CHECKING:
    from edda.workflow.activity import ActivityCall
    from edda.workflow.execution import Command


Part = StagedEvent | OutboxEvent | StepCommit


class Success(Struct, frozen=True):
    value: bytes
    result: Any
    parts: tuple[Part, ...] = ()
    """What goes in with its entry."""


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
    """No outcome: this process is not set up for the step, and its run waits for one that is."""

    error: ConfigurationError


class ActivityThreads:
    """Where sync activities run; made at the first one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, body: Callable[[], Any]) -> Any:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._most, thread_name_prefix="edda-activity")
        context = copy_context()
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._pool, lambda: context.run(_call, body))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            return await running  # nobody can stop a thread: what it does counts, if late; a second cancel gives it up

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _call(body: Callable[[], Any]) -> Any:
    try:
        return body()
    except StopIteration as error:  # a future cannot carry it; a coroutine would turn it into the same
        raise RuntimeError("activity raised StopIteration") from error
    except KeyboardInterrupt as error:  # Ctrl-C reaches the main thread only: here it is an error of the body
        raise RuntimeError("activity raised KeyboardInterrupt") from error


class OutcomePolicy:
    """What becomes of the steps of one run when their attempts end."""

    def __init__(self, run_id: RunId, codec: Codec, policy: RetryPolicy, now: Callable[[], int]) -> None:
        self._run_id = run_id
        self._codec = codec
        self._policy = policy
        self._now = now

    def delay(self, command: Command, call: ActivityCall, attempt: int) -> float:
        """Seconds to wait after the failed attempt number `attempt`."""
        return self._policy_of(call).delay(attempt, f"{self._run_id}/{command.id}")

    def _policy_of(self, call: ActivityCall) -> RetryPolicy:
        return call.retry_policy or self._policy

    def on_result(self, command: Command, call: ActivityCall, result: Any) -> Success | Failure:
        """A result that cannot be stored, or not be undone, fails the step: trying again would repeat its effect."""
        try:
            value = self._codec.encode_typed(result, call.returns)
        except PayloadError as error:
            return self.failure(PayloadError(f"the result of {command.id} cannot be stored: {error}"))
        if call.undo is not None:
            try:
                call.undo.check(self._codec.decode(value, call.returns))
            except Exception as error:
                return self.failure(error)
        return Success(value, result)

    def on_error(self, command: Command, call: ActivityCall, attempt: int, error: BaseException) -> Failure | Retry:
        policy = self._policy_of(call)
        if not policy.covers(error):
            return self.failure(error)
        delay = self.delay(command, call, attempt)
        elapsed = (self._now() - command.issued_at) / MICROSECONDS
        if policy.allows(attempt, elapsed + delay):
            return Retry(encode_failure(self._codec, error), error, delay)
        return self._exhaust(command, attempt, error)

    def counts_crashes(self, call: ActivityCall) -> bool:
        """Whether deaths of the process are failed attempts of the step, and there is an end to its attempts."""
        policy = self._policy_of(call)
        return policy.count_crashes and policy.max_attempts is not None

    def reject_crashed(self, command: Command, call: ActivityCall, error: BaseException) -> Failure | None:
        """Whether the attempt before the next one, in which the process died, was the last."""
        attempt, elapsed = command.attempt - 1, (self._now() - command.issued_at) / MICROSECONDS
        if self._policy_of(call).allows(attempt, elapsed):
            return None
        return self._exhaust(command, attempt, error)

    def _exhaust(self, command: Command, attempt: int, error: BaseException) -> Failure:
        exhausted = RetryExhaustedError(
            f"{command.id} failed {attempt} times, the last time with {truncate(tell(error), MAX_MESSAGE)}"
        )
        exhausted.__cause__ = error
        return self.failure(exhausted)

    def failure(self, error: BaseException) -> Failure:
        return Failure(encode_failure(self._codec, error), error)


class _NoCurrentTask:
    """Workflow code may only run while no task of the real loop is current (Python 3.14 insists)."""

    __slots__ = ("_loop", "_task")

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = _swap_current_task(self._loop, None)

    def __exit__(self, *_: object) -> None:
        _swap_current_task(self._loop, self._task)


_swap_current_task: Any = getattr(asyncio.tasks, "_swap_current_task", None)
_AS_IT_IS = nullcontext()


def no_current_task() -> AbstractContextManager[None]:
    return _AS_IT_IS if _swap_current_task is None else _NoCurrentTask()
