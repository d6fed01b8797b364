import asyncio

from edda import EddaApp, WorkflowContext, activity, sleep, workflow


@activity
async def charge(ctx: WorkflowContext, order_id: str, amount: float) -> str:
    return f"paid {amount:.2f}"  # call the payment service here, with ctx.idempotency_key


@workflow
async def order(ctx: WorkflowContext, order_id: str, amount: float) -> str:
    payment = await charge(ctx, order_id, amount)  # recorded: it never runs again
    await sleep(ctx, 1)  # days work as well: the run leaves memory
    return f"{order_id}: {payment}"


async def main() -> None:
    async with EddaApp("shop", "sqlite:///shop.db"):
        await order.options(id="order-A").start(order_id="A", amount=9.5)  # committed when it returns
        print(await order.handle("order-A").result())


asyncio.run(main())
