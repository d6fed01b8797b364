"""Running the bodies of steps in the real world: on the real loop, or in threads."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any

from msgspec import Struct

from edda.core.codec import Codec
from edda.core.failure import encode_failure
from edda.core.paths import show
from edda.core.retry import RetryPolicy
from edda.errors import PayloadError, RetryExhaustedError, TerminalError
from edda.workflow.activity import StepCall
from edda.workflow.context import ActivityContext
from edda.workflow.execution import Command


class Success(Struct, frozen=True):
    value: bytes
    result: Any


class Failure(Struct, frozen=True):
    value: bytes
    error: BaseException


class Retry(Struct, frozen=True):
    """Another try is due `delay` seconds from now."""

    value: bytes
    error: BaseException
    delay: float


Outcome = Success | Failure | Retry


class Threads:
    """Where sync activities run; made at the first one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, call: StepCall, args: tuple[Any, ...]) -> Any:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._most, thread_name_prefix="edda-activity")
        context = copy_context()
        loop = asyncio.get_running_loop()
        body = loop.run_in_executor(self._pool, lambda: context.run(_call_in_thread, call, args))
        try:
            return await asyncio.shield(body)
        except asyncio.CancelledError:
            return await body  # nobody can stop a thread: what it does counts, if late; a second cancel gives it up

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def _call_in_thread(call: StepCall, args: tuple[Any, ...]) -> Any:
    try:
        return call.fn(*args, **call.kwargs)
    except StopIteration as error:  # a future cannot carry it; a coroutine would turn it into the same
        raise RuntimeError("activity raised StopIteration") from error


async def run_body(
    command: Command, ctx: ActivityContext, codec: Codec, policy: RetryPolicy, threads: Threads
) -> Outcome:
    """Run one attempt. Only a cancellation from outside gets through as an exception."""
    call: StepCall = command.call
    args = (ctx, *call.args) if call.takes_context else call.args
    try:
        result = await (call.fn(*args, **call.kwargs) if call.is_async else threads.run(call, args))
    except asyncio.CancelledError:
        if _cancelled_from_outside():
            raise
        return _fail(codec, TerminalError(f"{command.id} raised CancelledError in its own code"))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: an activity's error ends the activity, never the worker
        return _judge(command, ctx, codec, policy, error)
    return _store(command, codec, result)


def _store(command: Command, codec: Codec, result: Any) -> Success | Failure:
    """A result that cannot be stored fails the step at once: trying again would repeat its effect."""
    try:
        return Success(codec.encode(result), result)
    except PayloadError as error:
        return _fail(codec, PayloadError(f"the result of {command.id} cannot be stored: {error}"))


def _judge(
    command: Command, ctx: ActivityContext, codec: Codec, policy: RetryPolicy, error: BaseException
) -> Failure | Retry:
    if not policy.covers(error):
        return _fail(codec, error)
    attempt = command.attempt
    delay = policy.delay(attempt, f"{ctx.instance_id}/{command.id}")
    elapsed = (ctx.microseconds - command.issued_at) / 1_000_000
    if policy.allows(attempt, elapsed + delay):
        return Retry(encode_failure(codec, error), error, delay)
    exhausted = RetryExhaustedError(f"{command.id} failed {attempt} times, the last time with {show(error)}")
    exhausted.__cause__ = error
    return _fail(codec, exhausted)


def _fail(codec: Codec, error: BaseException) -> Failure:
    return Failure(encode_failure(codec, error), error)


def _cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _OutsideTask:
    """Workflow code may only run while no task of the real loop is current (Python 3.14 insists)."""

    __slots__ = ("_loop", "_task")

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = _swap(self._loop, None)

    def __exit__(self, *_: object) -> None:
        _swap(self._loop, self._task)


_swap: Any = getattr(asyncio.tasks, "_swap_current_task", None)
_AS_IT_IS = nullcontext()


def outside_task() -> AbstractContextManager[None]:
    return _AS_IT_IS if _swap is None else _OutsideTask()
