"""The workflow of the demo: an order in eight steps, three of them in parallel, with a durable timer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from demo_ledger import note
from edda import WorkflowContext, activity, sleep, workflow

COURIER_COMES_IN = 4.0
"""Seconds, so that the demo is short; the code would be the same for days."""


@dataclass(frozen=True)
class Order:
    id: str
    item: str
    price: float


@dataclass(frozen=True)
class Receipt:
    order: Order
    payment: str
    parcel: str
    courier: str


async def work(ctx: WorkflowContext, seconds: float) -> None:
    """Stands for a call to an external service: writes a line to the ledger and takes some time."""
    note(ctx.activity_id, ctx.idempotency_key)
    await asyncio.sleep(seconds)


@activity
async def check_stock(ctx: WorkflowContext, item: str) -> int:
    await work(ctx, 0.3)
    return 7


@activity
async def reserve_item(ctx: WorkflowContext, item: str) -> str:
    await work(ctx, 0.3)
    return "shelf 12"


@activity
async def charge_card(ctx: WorkflowContext, price: float) -> str:
    await work(ctx, 0.5)
    return f"paid {price:.2f}"


@activity
async def pack_parcel(ctx: WorkflowContext, shelf: str) -> str:
    await work(ctx, 2.0)
    return f"parcel from {shelf}"


@activity
async def print_label(ctx: WorkflowContext, order_id: str) -> str:
    await work(ctx, 0.4)
    return f"label {order_id}"


@activity
async def write_invoice(ctx: WorkflowContext, payment: str) -> str:
    await work(ctx, 0.7)
    return f"invoice, {payment}"


@activity
async def call_courier(ctx: WorkflowContext, parcel: str) -> str:
    await work(ctx, 0.4)
    return "courier 4"


@activity
async def send_receipt(ctx: WorkflowContext, order_id: str) -> str:
    await work(ctx, 0.3)
    return f"receipt for {order_id}"


@workflow
async def fulfil(ctx: WorkflowContext, order: Order) -> Receipt:
    await check_stock(ctx, order.item)
    shelf = await reserve_item(ctx, order.item)
    payment = await charge_card(ctx, order.price)
    parcel, _label, _invoice = await asyncio.gather(
        pack_parcel(ctx, shelf), print_label(ctx, order.id), write_invoice(ctx, payment)
    )
    await sleep(ctx, COURIER_COMES_IN)
    courier = await call_courier(ctx, parcel)
    await send_receipt(ctx, order.id)
    return Receipt(order, payment, parcel, courier)
