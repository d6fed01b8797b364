"""The workflows that the other programs and the tests share."""

from __future__ import annotations

import asyncio
import os

from edda import WorkflowContext, activity, sleep, workflow

from .ledger import record


def hangs() -> bool:
    """In a process that is going to be killed, work never ends."""
    return "EDDA_TEST_HANG" in os.environ


@activity
async def work(ctx: WorkflowContext, ledger: str, item: str) -> str:
    record(ledger, f"{item} {ctx.idempotency_key} {ctx.attempt}")
    if hangs():
        print("working", flush=True)
        await asyncio.Event().wait()
    return f"{item} done"


@workflow
async def deliver(ctx: WorkflowContext, ledger: str, item: str) -> str:
    return await work(ctx, ledger, item)


@workflow
async def rest_and_deliver(ctx: WorkflowContext, ledger: str, seconds: float) -> str:
    await sleep(ctx, seconds)
    return await work(ctx, ledger, "parcel")


WORKFLOWS = (deliver, rest_and_deliver)
