"""Durable timers, `sleep` and `sleep_until`, and `wait_any`, which returns the first of several waits. A run that only
waits leaves memory until a wait ends."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar, overload

from edda.core.model import EntryKind
from edda.core.value_path import repr_short

from .context import WorkflowContext, as_microseconds, execution_of, seconds_to_microseconds

T = TypeVar("T")

Duration = float | timedelta


@overload
def sleep(ctx: WorkflowContext, seconds: Duration) -> Coroutine[Any, Any, None]: ...


@overload
def sleep(ctx: WorkflowContext, *, duration_seconds: Duration) -> Coroutine[Any, Any, None]: ...


def sleep(
    ctx: WorkflowContext, seconds: Duration | None = None, *, duration_seconds: Duration | None = None
) -> Coroutine[Any, Any, None]:
    """Wait durably for a number of seconds, or a timedelta: the run leaves memory, and any worker continues it."""
    execution = execution_of(ctx, "sleep(ctx, seconds)")
    if (seconds is None) == (duration_seconds is None):
        raise TypeError("sleep(ctx, seconds): give the duration once, as `seconds` or as `duration_seconds`")
    duration = seconds if seconds is not None else duration_seconds
    assert duration is not None
    due = execution.now + seconds_to_microseconds(duration, "sleep(ctx, seconds)")
    return execution.call(EntryKind.TIMER, "sleep", due=due)


@overload
def sleep_until(ctx: WorkflowContext, target_time: datetime) -> Coroutine[Any, Any, None]: ...


@overload
def sleep_until(ctx: WorkflowContext, *, until: datetime) -> Coroutine[Any, Any, None]: ...


def sleep_until(
    ctx: WorkflowContext, target_time: datetime | None = None, *, until: datetime | None = None
) -> Coroutine[Any, Any, None]:
    """Wait durably until a time, given as an aware datetime; one in the past ends the wait at once."""
    execution = execution_of(ctx, "sleep_until(ctx, target_time)")
    due = target_time if target_time is not None else until
    if not isinstance(due, datetime):
        raise TypeError(f"sleep_until(ctx, target_time): expected a datetime, got {due!r}")
    if due.tzinfo is None:
        raise ValueError(
            f"sleep_until(ctx, target_time): {due!r} has no time zone; pass an aware datetime, such as "
            "ctx.now() + timedelta(days=1)"
        )
    return execution.call(EntryKind.TIMER, "sleep_until", due=as_microseconds(due))


wait_timer = sleep
wait_until = sleep_until


@dataclass(frozen=True)
class First(Generic[T]):
    """The wait that ended first: its keyword or position, and its value."""

    name: str | int
    value: T


def wait_any(ctx: WorkflowContext, *waits: Awaitable[T], **named: Awaitable[T]) -> Coroutine[Any, Any, First[T]]:
    """Wait for the first of several waits; raises its error if it failed. The others are cancelled, and events or
    messages for them remain available to later waits.

    `await wait_any(ctx, paid=wait_event(ctx, "paid"), late=sleep(ctx, 60))` returns a `First` with the name `"paid"`
    or `"late"`.
    """
    names: list[str | int] = [*range(len(waits)), *named]
    if not names:
        raise TypeError(
            "wait_any(ctx, ...): expected at least one wait, such as wait_event(ctx, ...) or sleep(ctx, ...)"
        )
    given = [*waits, *named.values()]
    for name, wait in zip(names, given, strict=True):
        if not inspect.isawaitable(wait):
            raise TypeError(
                f"wait_any(ctx, ...): {name!r} is {repr_short(wait)}; "
                "expected a wait that was called and not awaited, such "
                "as wait_event(ctx, ...) or sleep(ctx, ...)"
            )
    return _race(names, given)


async def _race(names: Sequence[str | int], waits: Sequence[Awaitable[T]]) -> First[T]:
    branches = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(branches, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _release(branches)
        raise
    winner = next(index for index, branch in enumerate(branches) if branch.done())
    await _release(branches)
    return First(names[winner], branches[winner].result())


async def _release(branches: Sequence[asyncio.Future[T]]) -> None:
    losers = [branch for branch in branches if not branch.done()]
    for branch in losers:
        branch.cancel()
    while losers:
        await asyncio.wait(losers)
        losers = [branch for branch in losers if not branch.done()]
    for branch in branches:
        if not branch.cancelled():
            branch.exception()  # retrieved, so that asyncio does not log the errors of the losers
