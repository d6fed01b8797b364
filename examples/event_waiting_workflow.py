"""Two orders wait for their payment, and neither of them is in memory.

    python examples/event_waiting_workflow.py          # serves them on port 8001 and prints what to type next
    python examples/event_waiting_workflow.py --send   # in a second terminal: act as the payment service
    python examples/event_waiting_workflow.py --once   # both in one process

ORD-123 waits for an event. ORD-124 waits a few seconds and then checks whether it was paid.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from tempfile import TemporaryDirectory
from types import CoroutineType

import uvicorn
from pydantic import BaseModel

from edda import EddaApp, EventTimeoutError, WorkflowContext, activity, send_event, wait_event, wait_timer, workflow
from edda.errors import EventDeliveryError

URL = "http://localhost:8001/events"
CURL = f"""curl -X POST {URL} \\
  -H "Content-Type: application/cloudevents+json" \\
  -d '{{
    "specversion": "1.0",
    "type": "payment.completed",
    "source": "payment-service",
    "id": "event-123",
    "datacontenttype": "application/json",
    "data": {{
      "order_id": "ORD-123",
      "transaction_id": "TXN-456",
      "amount": 99.99,
      "status": "success"
    }}
  }}'"""


class PaymentCompleted(BaseModel):
    order_id: str
    transaction_id: str
    amount: float
    status: str


@activity
async def start_payment_processing(ctx: WorkflowContext, order_id: str) -> str:
    print(f"🔄 {order_id}: payment started")  # call the payment service here, with ctx.idempotency_key
    return f"PAY-{order_id}"


@activity
async def create_order(ctx: WorkflowContext, order_id: str) -> None:
    print(f"🔄 {order_id}: created")


@activity
async def check_payment_status(ctx: WorkflowContext, order_id: str) -> bool:
    return False  # ask the payment service here


@activity
async def cancel_order(ctx: WorkflowContext, order_id: str) -> None:
    print(f"❌ {order_id}: cancelled")


@workflow
async def payment_workflow(ctx: WorkflowContext, order_id: str) -> str:
    payment_id = await start_payment_processing(ctx, order_id)
    try:
        event = await wait_event(
            ctx,
            event_type="payment.completed",
            timeout_seconds=300,
            model=PaymentCompleted,
            match={"order_id": order_id},  # ignore the events of other orders
        )
    except EventTimeoutError:
        await cancel_order(ctx, order_id)
        return "cancelled: nobody paid within five minutes"
    return f"{payment_id} completed with {event.data.transaction_id} over {event.data.amount}"


@workflow
async def order_with_timeout(ctx: WorkflowContext, order_id: str, seconds: int) -> str:
    await create_order(ctx, order_id)
    await wait_timer(ctx, duration_seconds=seconds)
    if await check_payment_status(ctx, order_id):
        return "completed"
    await cancel_order(ctx, order_id)
    return f"cancelled: not paid after {seconds} seconds"


async def main(once: bool) -> None:
    with TemporaryDirectory() as folder:  # a new database each time, so that you can send the event again
        async with serving(EddaApp("event-waiting", f"sqlite:///{folder}/orders.db")) as app:
            await payment_workflow.options(id="ORD-123").start("ORD-123")
            await order_with_timeout.options(id="ORD-124").start("ORD-124", seconds=3)
            await show_waiting(app)
            if once:
                await send()
            else:
                show_what_to_do()
            await asyncio.gather(show_end(app, "ORD-123"), show_end(app, "ORD-124"))


@asynccontextmanager
async def serving(app: EddaApp) -> AsyncIterator[EddaApp]:
    """`edda serve MODULE:APP` does this for a program that does nothing else."""
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
    with socket.create_server(("127.0.0.1", 8001)) as listening:
        async with app, asyncio.TaskGroup() as group:
            group.create_task(server.serve([listening]))
            yield app
            server.should_exit = True


async def show_waiting(app: EddaApp) -> None:
    for order, status, what in await both_waiting(app):
        print(f"⏸️  {order}: {status} ({what})")
    print(f"\nCoroutines of the two workflows in this process: {coroutines_in_memory()}", flush=True)


async def both_waiting(app: EddaApp) -> list[tuple[str, str, str | None]]:
    while True:
        page = await app.find_instances()
        found = sorted((one["instance_id"], one["status"], one["waiting_for"]) for one in page["instances"])
        if all(status.startswith("waiting") for _, status, _ in found) and not coroutines_in_memory():
            return found
        await asyncio.sleep(0.01)


def coroutines_in_memory() -> int:
    code = {payment_workflow.fn.__code__, order_with_timeout.fn.__code__}
    return sum(isinstance(one, CoroutineType) and one.cr_code in code for one in gc.get_objects())


def show_what_to_do() -> None:
    print(f"\nBe the payment service. In a second terminal, type\n\n{CURL}\n")
    print(f"or\n\npython {sys.argv[0]} --send\n", flush=True)


async def show_end(app: EddaApp, order: str) -> None:
    print(f"🏁 {order}: {await app.handle(order).result()}")


async def send() -> None:
    payment = PaymentCompleted(order_id="ORD-123", transaction_id="TXN-456", amount=99.99, status="success")
    event_id = await send_event("payment.completed", "payment-service", payment.model_dump(), broker_url=URL)
    print(f"📨 sent payment.completed, event {event_id}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--send", action="store_true", help="send the event to the one that serves")
    parser.add_argument("--once", action="store_true", help="serve, send and end")
    arguments = parser.parse_args()
    try:
        asyncio.run(send() if arguments.send else main(arguments.once))
    except EventDeliveryError as error:
        sys.exit(f"{error}\nIs the first terminal still running?")
    except OSError as error:
        sys.exit(f"port 8001 cannot be used: {error}")
    except KeyboardInterrupt:
        print("\nStopped.")
