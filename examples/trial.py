"""A test of a workflow that waits for a month, in milliseconds: virtual time moves to the next timer."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from edda import WorkflowContext, activity, sleep, workflow
from edda.testing import VirtualApp

SENT: list[str] = []


@activity
async def send_mail(ctx: WorkflowContext, to: str, text: str) -> None:
    SENT.append(f"{ctx.now():%d %B}: {text}")


@workflow
async def trial(ctx: WorkflowContext, customer: str) -> None:
    await send_mail(ctx, customer, "welcome")
    await sleep(ctx, timedelta(days=27))
    await send_mail(ctx, customer, "three days left")
    await sleep(ctx, timedelta(days=3))
    await send_mail(ctx, customer, "your trial has ended")


async def main() -> None:
    async with VirtualApp() as app:
        await app.run(trial, "ada@example.org")
    print("\n".join(SENT))
    assert SENT == ["01 January: welcome", "28 January: three days left", "31 January: your trial has ended"]


if __name__ == "__main__":
    asyncio.run(main())
