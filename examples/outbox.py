"""Two services with separate databases: the outbox sends the shop's events again until the warehouse accepts them.

python examples/outbox.py
"""

import asyncio

from edda import EddaApp, WorkflowContext, activity, send_event_transactional, wait_event, workflow
from edda.cloudevents.event import CloudEvent
from edda.errors import EventPostponedError


class BadLine:
    """Simulates a bad network; over HTTP use EddaApp(outbox_enabled=True, broker_url="https://...")."""

    tries = 0

    async def send(self, event: CloudEvent) -> None:
        self.tries += 1
        if self.tries < 3:
            print(f"try {self.tries}: nobody answers")
            raise EventPostponedError("nobody answers")
        await warehouse.handle_cloudevent(event)
        print(f"try {self.tries}: the warehouse has it")

    async def close(self) -> None:
        pass


@activity
async def take_payment(ctx: WorkflowContext, order_id: str) -> None:
    # Stored in one commit with the activity's result: both are stored, or neither.
    await send_event_transactional(ctx, "order.paid", "/shop", {"order_id": order_id})


@workflow
async def order(ctx: WorkflowContext, order_id: str) -> None:
    await take_payment(ctx, order_id)


@workflow
async def delivery(ctx: WorkflowContext) -> str:
    paid = await wait_event(ctx, "order.paid")
    return f"order {paid.data['order_id']} is delivered"


shop = EddaApp("shop", "memory://", workflows=[order], outbox_enabled=True, sink=BadLine())
warehouse = EddaApp("warehouse", "memory://", workflows=[delivery])


async def main() -> None:
    async with shop, warehouse:
        run = await warehouse.start(delivery)
        await shop.run(order, "A-17")
        print("the order is paid")
        print(await warehouse.handle(run).result())


if __name__ == "__main__":
    asyncio.run(main())
