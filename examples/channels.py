"""A kitchen of workflows that exchange messages through channels: competing, direct and broadcast.

guest ──publish──► "orders" ──► one of the cooks    competing: each order is cooked once
cook ───send_to──► guest                            direct: the dish goes to the run that ordered it
main ───publish──► "bell" ────► every cook          broadcast: every cook receives the closing time
"""

from __future__ import annotations

import asyncio

from edda import EddaApp, WorkflowContext, activity, publish, receive, send_to, subscribe, wait_any, workflow


@activity
async def prepare(ctx: WorkflowContext, dish: str) -> str:
    return f"{dish}, hot"


@workflow
async def cook(ctx: WorkflowContext, cooked: int = 0) -> int:
    """Takes orders until the bell rings; continues as new after each order, so its history stays short."""
    await subscribe(ctx, "orders", mode="competing")
    await subscribe(ctx, "bell")
    ctx.set("listening", True)
    first = await wait_any(ctx, bell=receive(ctx, "bell"), order=receive(ctx, "orders"))
    if first.name == "order":
        order = first.value.data
        await send_to(ctx, order["guest"], await prepare(ctx, order["dish"]))
        await ctx.recur(cooked + 1)
    return cooked


@workflow
async def guest(ctx: WorkflowContext, dish: str) -> str:
    await publish(ctx, "orders", {"guest": ctx.instance_id, "dish": dish})
    served = await receive(ctx, "__direct__", model=str)
    return served.data


async def main() -> None:
    async with EddaApp("kitchen", "sqlite:///kitchen.db") as app:
        cooks = [cook.handle(await cook.start()) for _ in range(2)]
        for one in cooks:
            await one.wait("listening")  # a run that subscribes after the bell does not receive it
        guests = [guest.handle(await guest.start(dish)) for dish in ("soup", "fish", "cake", "tea")]
        for served in guests:
            print(await served.result())
        await publish(app, "bell", "closing time")
        print(f"{sum([await one.result() for one in cooks])} dishes, each cooked once")


if __name__ == "__main__":
    asyncio.run(main())
