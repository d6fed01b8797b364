"""The first of several waits; the others are released."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from edda.core.value_path import repr_short

from .context import WorkflowContext

T = TypeVar("T")


@dataclass(frozen=True)
class First(Generic[T]):
    """Which wait was over first, by its keyword or its position, and what it gave."""

    name: str | int
    value: T


def wait_any(ctx: WorkflowContext, *waits: Awaitable[T], **named: Awaitable[T]) -> Coroutine[Any, Any, First[T]]:
    """`await wait_any(ctx, paid=wait_event(ctx, "paid"), late=sleep(ctx, 60))` gives the first, or raises its error.

    What the others would have received stays for the next wait.
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
    winner = next(place for place, branch in enumerate(branches) if branch.done())
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
            branch.exception()  # looked at: only the winner's error is anybody's business
