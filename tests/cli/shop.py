"""The app of the acceptance tests."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from edda import EddaApp, RetryPolicy, WorkflowContext, activity, receive, subscribe, wait_event, workflow

FIXED = Path(os.environ.get("EDDA_TEST_FIXED", "/nonexistent"))
"""While this file is missing, packing fails and weighing hangs."""


def is_fixed() -> bool:
    return FIXED.exists()


@activity
async def reserve(ctx: WorkflowContext, order_id: str) -> str:
    return f"shelf of {order_id}"


@activity(retry_policy=RetryPolicy(max_attempts=2, initial_interval=0.01))
def pack(ctx: WorkflowContext, order_id: str) -> str:
    if not is_fixed():
        raise ValueError(f"no box for {order_id}")
    return f"box of {order_id}"


@workflow
async def ship(ctx: WorkflowContext, order_id: str, count: int = 1) -> dict[str, object]:
    """Reserve, wait for the payment, and say what was shipped."""
    shelf = await reserve(ctx, order_id)
    paid = await wait_event(ctx, "payment.completed", match={"order_id": order_id})
    return {"shelf": shelf, "amount": paid.data["amount"], "count": count}


@workflow
async def wrap(ctx: WorkflowContext, order_id: str) -> str:
    await reserve(ctx, order_id)
    return await pack(ctx, order_id)


@workflow
async def weigh(ctx: WorkflowContext, order_id: str) -> str:
    shelf = await reserve(ctx, order_id)
    if not is_fixed():
        await asyncio.Event().wait()  # nobody will set it: the run is parked
    return f"weight of {shelf}"


@workflow
async def listen(ctx: WorkflowContext) -> str:
    """Say which order the counter calls."""
    await subscribe(ctx, "counter")
    message = await receive(ctx, "counter")
    return str(message.data["call"])


app = EddaApp("shop")
