"""An activity that can be undone, for tests that fail after it."""

from __future__ import annotations

import asyncio

import pytest

from edda import (
    EddaApp,
    RetryPolicy,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    register_compensation,
    workflow,
)
from edda.workflow.activity import Activity
from edda.workflow.workflow import Workflow

from .events import result_of

ONCE = RetryPolicy(max_attempts=1)
SOON = RetryPolicy(initial_interval=0.01, max_attempts=3)


def bookings(log: list[str]) -> Activity[[str], str]:
    """An activity that can be undone; both note what they do."""

    @compensation
    async def unbook(ctx: WorkflowContext, what: str) -> None:
        log.append(f"unbook {what}")

    @activity
    @on_failure(unbook)
    async def book(ctx: WorkflowContext, what: str) -> str:
        log.append(f"book {what}")
        return what

    return book


def order_with_slow_refund(log: list[str], begun: asyncio.Event, go: asyncio.Event) -> Workflow[[], None]:
    """A workflow that books and fails; its second compensation sets one event and waits for the other."""
    book = bookings(log)

    @compensation
    async def refund(ctx: WorkflowContext) -> None:
        begun.set()
        await go.wait()
        log.append("refund")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        register_compensation(ctx, refund)
        raise ValueError("sold out")

    return order


async def failure_of(app: EddaApp, run_id: str) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - which one is the caller's question
        await result_of(app, run_id)
    return raised.value
