"""Runs that compete for the messages of one channel, and put each into the till in a transaction."""

from __future__ import annotations

import asyncio

from edda import ChannelMessage, MessageTimeoutError, WorkflowContext, activity, receive, subscribe, wait_any, workflow

from .ledger_table import put_by_transaction
from .workload import IMPATIENT

CHANNEL = "faults.contest"
LAP = 50
"""Messages after which a contestant begins anew."""


@activity(retry_policy=IMPATIENT)
async def ring_up(ctx: WorkflowContext, message_id: str) -> None:
    await put_by_transaction(ctx, message_id)


@workflow(name="faults_contestant")
async def contestant(ctx: WorkflowContext) -> None:
    """For ever, until it is cancelled. Often several branches wait at once, and some do not wait for long."""
    await subscribe(ctx, CHANNEL, "competing")
    served = 0
    while served < LAP:
        served += sum(await asyncio.gather(*(_serve(ctx) for _ in range(ctx.rng.choice((1, 1, 2, 4))))))
    await ctx.recur()


async def _serve(ctx: WorkflowContext) -> int:
    try:
        message = await _receive(ctx)
    except MessageTimeoutError:
        return 0
    await ring_up(ctx, message.id)
    return 1


async def _receive(ctx: WorkflowContext) -> ChannelMessage:
    """Of two waits that race for one, the second may be brought a message that is nobody's then."""
    match ctx.rng.choices(("wait", "hurry", "race"), weights=(6, 2, 2))[0]:
        case "hurry":
            return await receive(ctx, CHANNEL, ctx.rng.uniform(0.001, 0.1))
        case "race":
            return (await wait_any(ctx, receive(ctx, CHANNEL), receive(ctx, CHANNEL))).value
        case _:
            return await receive(ctx, CHANNEL)


CONTESTANTS = (contestant,)
