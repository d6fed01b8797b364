"""A real app with runs in every state that lasts, events, messages and an outbox, served with its control API:
`python -m tests.web.api_fixture DATABASE_URL`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from pydantic import BaseModel

from edda import (
    EddaApp,
    RetryPolicy,
    RunStatus,
    WorkflowContext,
    activity,
    receive,
    sleep,
    subscribe,
    wait_event,
    workflow,
)
from edda.control.views import RunSearch
from edda.core.model import Rejected
from edda.web import WebApp
from edda.workflow.workflow import Workflow
from tests.engine.conditions import until
from tests.outbox.outbox_rows import put

from .listening import listening

COPIES = 60
"""Number of objects that each action uses up."""


def copies(name: str) -> tuple[str, ...]:
    return tuple(f"{name}-{number}" for number in range(COPIES))


LASTING = ("good", "waiting", "broken", "stuck", "asleep", "listening", "family", "chapters", "stopped")
ENDED, IDLE, FAILED, DEAD = copies("ended"), copies("idle"), copies("failed"), copies("dead")
MANY = tuple(f"many-{name}" for kind in ("ended", "idle", "failed") for name in copies(kind))
STATES = set(RunStatus) - {RunStatus.RUNNING, RunStatus.COMPENSATING, RunStatus.RECURRED}
"""Runs that stay in their state."""


class Payment(BaseModel):
    order_id: str
    amount: float


@activity(retry_policy=RetryPolicy(max_attempts=1))
async def pay(ctx: WorkflowContext, order_id: str) -> str:
    if order_id in {"broken", "failed"}:
        raise ValueError("no such card")
    return order_id


@workflow(name="desk_order")
async def place(ctx: WorkflowContext, order_id: str, amount: int = 1) -> str:
    ctx.set("amount", amount)
    await pay(ctx, order_id)
    if order_id in {"waiting", "idle"}:
        await wait_event(ctx, "order.paid", model=Payment, match={"order_id": ctx.instance_id})
    if order_id == "stuck":
        await asyncio.Event().wait()
    return order_id


@workflow(name="desk_anything")
async def take(ctx: WorkflowContext, /, **fields: Any) -> dict[str, Any]:
    return fields


@workflow(name="desk_rest")
async def rest(ctx: WorkflowContext) -> None:
    await sleep(ctx, 86_400)


@workflow(name="desk_listener")
async def listen(ctx: WorkflowContext) -> None:
    await subscribe(ctx, "calls")
    await receive(ctx, "calls")


@workflow(name="desk_family")
async def raise_child(ctx: WorkflowContext) -> None:
    await rest.run()


@workflow(name="desk_chapters")
async def tell(ctx: WorkflowContext, chapter: int = 1) -> int:
    if chapter < 3:
        await ctx.recur(chapter + 1)
    return chapter


OTHERS: dict[str, Workflow[..., Any]] = {
    "asleep": rest,
    "listening": listen,
    "family": raise_child,
    "chapters": tell,
    "stopped": rest,
}


async def fill(app: EddaApp) -> None:
    orders = {name: name for name in ("good", "waiting", "broken", "stuck")}
    orders |= {name: name.split("-")[-2] for name in (*ENDED, *IDLE, *FAILED, *MANY)}
    await asyncio.gather(*(app.start(place.options(id=name), order) for name, order in orders.items()))
    for name, kind in OTHERS.items():
        await app.start(kind.options(id=name))
    await app.cancel("stopped")
    for number in range(5):
        await app.send_event("order.created", "/desk", {"order_id": "good", "number": number})
        await app.publish("news", {"number": number})
    await _put_dead(app)
    await until(lambda: _is_at_rest(app), "every run has come to where it stays")


async def _put_dead(app: EddaApp) -> None:
    storage = app.engine.storage
    await put(storage, DEAD)
    claimed = await storage.claim_outbox(len(DEAD), 60_000_000)
    await storage.record_send_results([Rejected(one.seq, one.attempts, "410: it is gone") for one in claimed])
    await put(storage, copies("pending"))


async def _is_at_rest(app: EddaApp) -> bool:
    counts = await app.control.count_runs(RunSearch())
    return not counts.get(RunStatus.RUNNING) and counts.keys() >= STATES


async def serve(database: str) -> None:
    logging.getLogger("edda.engine").setLevel(logging.ERROR)  # the warning about the parked run is expected
    app = EddaApp("desk", database, workflows=[place, take, rest, listen, raise_child, tell])
    async with app:
        await fill(app)
        async with listening(WebApp(app, control=lambda: app.control)) as url:
            print(url, flush=True)
            await asyncio.to_thread(sys.stdin.read)  # until it is closed


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
