"""Continue as new: each round starts again under the same id, with an empty history."""

from __future__ import annotations

import asyncio

from edda import EddaApp, WorkflowContext, activity, send_event, sleep, wait_event, workflow

temperatures = [17, 18, 22, 31]


@activity
async def measure(ctx: WorkflowContext, round: int) -> int:
    print(f"round {round}: {temperatures[round]} degrees")
    return temperatures[round]


@workflow
async def watch(ctx: WorkflowContext, limit: int, round: int = 0) -> str:
    """A polling loop."""
    degrees = await measure(ctx, round)
    if degrees <= limit:
        await sleep(ctx, 0.1)
        await ctx.recur(limit, round + 1)  # does not return
    return f"too hot in round {round}"


@workflow
async def account(ctx: WorkflowContext, balance: float = 0.0) -> float:
    """An entity workflow: other programs change it by events that name its id."""
    for _ in range(100):
        event = await wait_event(ctx, "transfer", match={"account": ctx.instance_id})
        if event.data["amount"] == 0:
            break
        balance += event.data["amount"]
    else:
        await ctx.recur(balance)  # the next generation receives the events that arrived meanwhile
    return balance


async def main() -> None:
    async with EddaApp("weather", "sqlite:///weather.db"):
        print(await watch.run(limit=30))

        handle = account.handle(await account.start())
        for amount in [1] * 250 + [0]:
            await send_event("transfer", "/bank", {"account": handle.instance_id, "amount": amount})
        print(f"balance {await handle.result()}, entries in the last history: {len(await handle.history())}")


if __name__ == "__main__":
    asyncio.run(main())
