"""Small workflows whose outcome and effects are known, to be crashed at every statement."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from edda import EddaApp, RetryPolicy, RunStatus, TerminalError, WorkflowContext, activity, sleep, workflow
from edda.workflow.workflow import Workflow

TICK = 0.02
"""Seconds; long enough to leave memory (nothing lingers in these tests), short enough to wait for."""


class World:
    """What the activities did, as the outside world saw it."""

    def __init__(self) -> None:
        self.effects: Counter[tuple[str, str]] = Counter()
        self.held: dict[str, asyncio.Event] = {}
        """Runs whose `hold` does not return; set when it has been reached."""

    def touch(self, ctx: WorkflowContext) -> None:
        self.effects[ctx.instance_id, ctx.activity_id] += 1

    def of(self, run_id: str) -> dict[str, int]:
        return {step: times for (run, step), times in self.effects.items() if run == run_id}


world = World()
quick = RetryPolicy(initial_interval=TICK, max_attempts=4, jitter=0)


@activity
async def act(ctx: WorkflowContext, value: int) -> int:
    world.touch(ctx)
    return value + 1


@activity(retry_policy=quick)
async def flaky(ctx: WorkflowContext, failures: int) -> int:
    world.touch(ctx)
    if ctx.attempt <= failures:
        raise ConnectionError(f"attempt {ctx.attempt}")
    return ctx.attempt


@activity
async def hang(ctx: WorkflowContext) -> int:
    world.touch(ctx)
    await asyncio.sleep(60)
    return 0


@activity
async def refuse(ctx: WorkflowContext) -> int:
    world.touch(ctx)
    raise TerminalError("no")


@activity
async def hold(ctx: WorkflowContext) -> int:
    world.touch(ctx)
    held = world.held.get(ctx.instance_id)
    if held is not None:
        held.set()
        await asyncio.sleep(60)
    return 1


@workflow
async def holding(ctx: WorkflowContext, n: int) -> int:
    n = await act(ctx, n)
    n += await hold(ctx)
    return await act(ctx, n)


@workflow
async def straight(ctx: WorkflowContext, n: int) -> int:
    for _ in range(3):
        n = await act(ctx, n)
    return n


@workflow
async def retried(ctx: WorkflowContext, n: int) -> list[int]:
    return [await flaky(ctx, n), await act(ctx, n)]


@workflow
async def timed(ctx: WorkflowContext, n: int) -> int:
    n = await act(ctx, n)
    await sleep(ctx, TICK)
    n = await act(ctx, n)
    await asyncio.sleep(TICK)
    return n


@workflow
async def gathered(ctx: WorkflowContext, n: int) -> list[int]:
    return list(await asyncio.gather(*(act(ctx, n + i) for i in range(3))))


async def branch(ctx: WorkflowContext, n: int, nap: float) -> int:
    n = await act(ctx, n)
    await sleep(ctx, nap)
    return await act(ctx, n)


@workflow
async def nested(ctx: WorkflowContext, n: int) -> list[Any]:
    async def pair(base: int) -> list[int]:
        return list(await asyncio.gather(branch(ctx, base, TICK), branch(ctx, base + 1, 2 * TICK)))

    return list(await asyncio.gather(pair(n), pair(n + 10)))


@workflow
async def timing_out(ctx: WorkflowContext, n: int) -> str:
    try:
        async with asyncio.timeout(2 * TICK):
            await hang(ctx)
    except TimeoutError:
        return f"late {await act(ctx, n)}"
    return "never"


@workflow
async def failing(ctx: WorkflowContext, n: int) -> str:
    await act(ctx, n)
    try:
        await refuse(ctx)
    except TerminalError as error:
        await act(ctx, n)
        raise LookupError(f"after {error}") from error
    return "never"


@workflow
async def cancelled(ctx: WorkflowContext, n: int) -> str:
    try:
        await act(ctx, n)
        await sleep(ctx, 3600)
    finally:
        if not ctx.is_unwinding:
            await act(ctx, n)
    return "never"


async def only_start(app: EddaApp, run_id: str) -> None:
    return None


async def cancel_it(app: EddaApp, run_id: str) -> None:
    while await app.handle(run_id).status() is RunStatus.RUNNING:  # noqa: ASYNC110 - the fact is in the database
        await asyncio.sleep(TICK / 4)
    await app.cancel(run_id, "enough")


class Scenario(Struct, frozen=True):
    workflow: Workflow[Any, Any]
    expected: str
    """repr of the result, or of the error."""
    steps: frozenset[str]
    """Steps with effects."""
    meddle: Callable[[EddaApp, str], Awaitable[None]] = only_start
    """What else a client does once the run is started."""
    repeatable: frozenset[str] = frozenset()
    """Steps that may run more than once even undisturbed."""

    @property
    def name(self) -> str:
        return self.workflow.name


def _steps(*names: str) -> frozenset[str]:
    return frozenset(names)


SCENARIOS = (
    Scenario(straight, "4", _steps("act:1", "act:2", "act:3")),
    Scenario(retried, "[3, 3]", _steps("flaky:1", "act:1"), repeatable=_steps("flaky:1")),
    Scenario(timed, "3", _steps("act:1", "act:2")),
    Scenario(gathered, "[2, 3, 4]", _steps("act:1", "act:2", "act:3")),
    Scenario(
        nested,
        "[[3, 4], [13, 14]]",
        frozenset(f"pair:{p}/branch:{b}/act:{a}" for p in (1, 2) for b in (1, 2) for a in (1, 2)),
    ),
    Scenario(timing_out, "'late 2'", _steps("hang:1", "act:1"), repeatable=_steps("hang:1")),
    Scenario(failing, "LookupError('after no')", _steps("act:1", "refuse:1", "act:2")),
    Scenario(cancelled, "WorkflowCancelledError", _steps("act:1", "act:2"), meddle=cancel_it),
)
HOLDING = Scenario(holding, "4", _steps("act:1", "hold:1", "act:2"), repeatable=_steps("hold:1"))
ARGUMENT = {"retried": 2}
