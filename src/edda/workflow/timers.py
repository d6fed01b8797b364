"""Waiting for time to pass. A run that only waits leaves memory and comes back when it is due."""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, overload

from edda.core.model import EntryKind

from .context import WorkflowContext, as_microseconds, execution_of, seconds_to_microseconds

if TYPE_CHECKING:
    from .execution import Execution

Duration = float | timedelta


@overload
def sleep(ctx: WorkflowContext, seconds: Duration) -> Coroutine[Any, Any, None]: ...


@overload
def sleep(ctx: WorkflowContext, *, duration_seconds: Duration) -> Coroutine[Any, Any, None]: ...


def sleep(
    ctx: WorkflowContext, seconds: Duration | None = None, *, duration_seconds: Duration | None = None
) -> Coroutine[Any, Any, None]:
    """Wait, durably: the run leaves memory and goes on when the time has passed, on any worker."""
    execution = execution_of(ctx, "sleep(ctx, seconds)")
    if (seconds is None) == (duration_seconds is None):
        raise TypeError("sleep(ctx, seconds): give the duration once, as `seconds` or as `duration_seconds`")
    duration = seconds if seconds is not None else duration_seconds
    assert duration is not None
    return _wait(execution, "sleep", execution.now + seconds_to_microseconds(duration, "sleep(ctx, seconds)"))


@overload
def sleep_until(ctx: WorkflowContext, target_time: datetime) -> Coroutine[Any, Any, None]: ...


@overload
def sleep_until(ctx: WorkflowContext, *, until: datetime) -> Coroutine[Any, Any, None]: ...


def sleep_until(
    ctx: WorkflowContext, target_time: datetime | None = None, *, until: datetime | None = None
) -> Coroutine[Any, Any, None]:
    """Wait, durably, for a moment given as an aware datetime; one in the past is over at once."""
    execution = execution_of(ctx, "sleep_until(ctx, target_time)")
    moment = target_time if target_time is not None else until
    if not isinstance(moment, datetime):
        raise TypeError(f"sleep_until(ctx, target_time): expected a datetime, got {moment!r}")
    if moment.tzinfo is None:
        raise ValueError(
            f"sleep_until(ctx, target_time): {moment!r} has no time zone; pass an aware datetime, such as "
            "ctx.now() + timedelta(days=1)"
        )
    return _wait(execution, "sleep_until", as_microseconds(moment))


def _wait(execution: Execution, name: str, due: int) -> Coroutine[Any, Any, None]:
    return execution.call(EntryKind.TIMER, name, due=due)


wait_timer = sleep
wait_until = sleep_until
