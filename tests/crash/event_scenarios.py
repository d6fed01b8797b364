"""Small workflows that wait for events, and careful senders: whoever got no answer sends the same event again."""

from __future__ import annotations

import asyncio
from typing import Any

from edda import EddaApp, EventTimeoutError, First, WorkflowContext, wait_any, wait_event, workflow
from edda.cloudevents.event import CloudEvent, make

from .scenarios import TICK, Scenario, act, world


def type_of(run_id: str, name: str) -> str:
    """Each run has types of its own, so that each makes its matches known anew."""
    return f"{name}.{run_id}"


def event_for(run_id: str, event_type: str, number: int = 0) -> CloudEvent:
    return make(
        type=event_type, source="/crash", id=f"{run_id}/{event_type}/{number}", data={"n": number, "run": run_id}
    )


async def send(app: EddaApp, run_id: str, *names: str) -> None:
    for name in names:
        await app.receive([event_for(run_id, type_of(run_id, name))])


async def next_event(ctx: WorkflowContext, name: str, timeout: float | None = None) -> int:
    event = await wait_event(ctx, type_of(ctx.instance_id, name), timeout, match={"run": ctx.instance_id})
    number: int = event.data["n"]
    return number


@workflow
async def awaiting(ctx: WorkflowContext, n: int) -> int:
    await act(ctx, n)
    n += await next_event(ctx, "paid")
    return await act(ctx, n)


@workflow
async def forestalled(ctx: WorkflowContext, n: int) -> int:
    await next_event(ctx, "go")
    await act(ctx, n)
    n += await next_event(ctx, "paid")
    return await act(ctx, n)


@workflow
async def late(ctx: WorkflowContext, n: int) -> int:
    """Whether the wait ends by the event or without it, the event is received once."""
    try:
        n += await next_event(ctx, "paid", TICK)
    except EventTimeoutError:
        n += await next_event(ctx, "paid")
    return await act(ctx, n)


@workflow
async def choosing(ctx: WorkflowContext, n: int) -> list[int]:
    waits = {name: next_event(ctx, name) for name in ("paid", "refused")}
    first: First[int] = await wait_any(ctx, **waits)
    await act(ctx, n)
    other = "refused" if first.name == "paid" else "paid"
    return [first.value, await next_event(ctx, other)]


@workflow
async def reading(ctx: WorkflowContext, n: int) -> list[int]:
    numbers = [await next_event(ctx, "part") for _ in range(3)]
    await act(ctx, n)
    return numbers


@workflow(event_handler=True)
async def summoned(ctx: WorkflowContext, n: int) -> int:
    return await act(ctx, await act(ctx, n))


async def send_when_it_waits(app: EddaApp, run_id: str) -> None:
    """It has done its first step and left memory."""

    def is_in_memory() -> bool:
        worker = app.engine.worker
        return worker is None or run_id in worker.live

    while "act:1" not in world.of(run_id) or is_in_memory():  # noqa: ASYNC110 - there is nobody to tell us
        await asyncio.sleep(TICK / 4)
    await send(app, run_id, "paid")


async def send_before_it_waits(app: EddaApp, run_id: str) -> None:
    await send(app, run_id, "paid", "go")


async def send_when_time_is_up(app: EddaApp, run_id: str) -> None:
    await asyncio.sleep(TICK)  # the very moment is the point
    await send(app, run_id, "paid")


async def send_both(app: EddaApp, run_id: str) -> None:
    await send(app, run_id, "refused", "paid")


async def post_several(app: EddaApp, run_id: str) -> None:
    await app.receive([event_for(run_id, type_of(run_id, "part"), number) for number in range(3)])


def _scenario(workflow: Any, expected: str, steps: int, meddle: Any) -> Scenario:
    return Scenario(workflow, expected, frozenset(f"act:{n}" for n in range(1, steps + 1)), meddle)


EVENT_SCENARIOS = (
    _scenario(awaiting, "2", 2, send_when_it_waits),
    _scenario(forestalled, "2", 2, send_before_it_waits),
    _scenario(late, "2", 1, send_when_time_is_up),
    _scenario(choosing, "[0, 0]", 1, send_both),
    _scenario(reading, "[0, 1, 2]", 1, post_several),
)
SUMMONED = Scenario(summoned, "3", frozenset({"act:1", "act:2"}))
