"""A real app on SQLite with a few runs, served with its control API: `python -m tests.web.desk FILE`."""

from __future__ import annotations

import asyncio
import sys

from edda import EddaApp, WorkflowContext, activity, wait_event, workflow
from edda.web import Web

from .listening import listening


@activity
async def pay(ctx: WorkflowContext, order_id: str) -> str:
    if order_id == "broken":
        raise ValueError("no such card")
    return order_id


@workflow(name="desk_order")
async def place(ctx: WorkflowContext, order_id: str, amount: int = 1) -> str:
    await pay(ctx, order_id)
    if order_id == "waiting":
        await wait_event(ctx, "order.paid")
    return order_id


async def serve(file: str) -> None:
    app = EddaApp("desk", f"sqlite:///{file}", workflows=[place])
    async with app:
        for order in ("good", "waiting", "broken"):
            await app.start(place.options(id=order), order)
        await app.send_event("order.created", "/desk", {"order_id": "good"})
        async with listening(Web(app, control=lambda: app.control)) as url:
            print(url, flush=True)
            await asyncio.to_thread(sys.stdin.read)  # until it is closed


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
