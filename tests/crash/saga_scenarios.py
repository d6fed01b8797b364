"""Sagas, children, time-outs and runs that begin anew, and the world they act on: it keeps its own ledger."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from typing import Any

from edda import (
    CompensationError,
    EddaApp,
    Happened,
    RetryExhaustedError,
    RetryPolicy,
    RunStatus,
    TerminalError,
    WorkflowCancelledError,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    register_compensation,
    sleep,
    workflow,
)
from edda.errors import WorkflowTimeoutError
from edda.testing import CrashPoints
from edda.workflow.workflow import Workflow

from .event_scenarios import event_for, next_event, type_of
from .scenarios import TICK, Scenario, only_start

LATE = 8 * TICK
"""The deadline of a run that is to pass it."""


class Ledger:
    """An effect under a key is there once, however often it is asked for; a family is a run and its children."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        """How often a body was called, by key."""
        self.probes: dict[str, CrashPoints | None] = {}
        """Of the process that works on a family now."""
        self.reached: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """What a scenario is about begins here, and those who meddle wait for it."""
        self.released: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._effects: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self._runs: defaultdict[str, set[str]] = defaultdict(set)

    def call(self, ctx: WorkflowContext, family: str) -> None:
        self.calls[ctx.idempotency_key] += 1
        self._runs[family].add(ctx.instance_id)

    def write(self, ctx: WorkflowContext, family: str, effect: str) -> None:
        self._effects[family].setdefault(ctx.idempotency_key, effect)

    def has(self, ctx: WorkflowContext, family: str) -> bool:
        return ctx.idempotency_key in self._effects[family]

    def of(self, family: str) -> str:
        return " ".join(self._effects[family].values())

    def runs(self, family: str) -> set[str]:
        return {family, *self._runs[family]}

    def is_dead(self, family: str) -> bool:
        probe = self.probes.get(family)
        return probe is not None and probe.dead


ledger = Ledger()
quick = RetryPolicy(initial_interval=TICK / 4, max_attempts=4, jitter=0)
once = RetryPolicy(max_attempts=1)


@activity
async def do(ctx: WorkflowContext, family: str, what: str) -> str:
    ledger.call(ctx, family)
    ledger.write(ctx, family, f"+{what}")
    return what


@compensation
async def undo(ctx: WorkflowContext, family: str, what: str) -> None:
    ledger.call(ctx, family)
    ledger.write(ctx, family, f"-{what}")


@compensation(retry_policy=quick)
async def undo_at_last(ctx: WorkflowContext, family: str, what: str) -> None:
    ledger.call(ctx, family)
    if ctx.attempt == 1:
        raise ConnectionError("not yet")
    ledger.write(ctx, family, f"-{what}")


@compensation
async def never_undo(ctx: WorkflowContext, family: str, what: str) -> None:
    ledger.call(ctx, family)
    raise TerminalError(f"{what} stands")


@activity
@on_failure(undo)
async def make(ctx: WorkflowContext, family: str, what: str) -> str:
    ledger.call(ctx, family)
    ledger.write(ctx, family, f"+{what}")
    return what


@activity
@on_failure(undo_at_last)
async def make_stubborn(ctx: WorkflowContext, family: str, what: str) -> str:
    ledger.call(ctx, family)
    ledger.write(ctx, family, f"+{what}")
    return what


@activity
@on_failure(never_undo)
async def make_for_good(ctx: WorkflowContext, family: str, what: str) -> str:
    ledger.call(ctx, family)
    ledger.write(ctx, family, f"+{what}")
    return what


@activity
@on_failure(undo)
async def make_and_hold(ctx: WorkflowContext, family: str, what: str) -> str:
    """Does not return before the run was told of its cancel."""
    ledger.call(ctx, family)
    ledger.write(ctx, family, f"+{what}")
    ledger.reached[family].set()
    await ledger.released[family].wait()
    return what


@workflow
async def failing_saga(ctx: WorkflowContext, family: str) -> None:
    await make(ctx, family, "1")
    await make(ctx, family, "2")
    register_compensation(ctx, undo, family, "3")
    await do(ctx, family, "3")
    raise LookupError("no more")


@workflow
async def stumbling_saga(ctx: WorkflowContext, family: str) -> None:
    await make(ctx, family, "1")
    await make_for_good(ctx, family, "2")
    await make_stubborn(ctx, family, "3")
    raise LookupError("no more")


@workflow
async def cancelled_saga(ctx: WorkflowContext, family: str, held: int) -> None:
    try:
        for number in range(1, 7):
            await (make_and_hold if number == held else make)(ctx, family, str(number))
    except asyncio.CancelledError:
        ledger.released[family].set()
        raise


@workflow
async def child(ctx: WorkflowContext, family: str, what: str) -> str:
    return await do(ctx, family, what)


@workflow
async def parent(ctx: WorkflowContext, family: str) -> list[str]:
    results = [await child.run(family, "run")]
    started = await child.start(family, "started")
    results.append(await child.handle(started).result())
    results.append(await child.options(id=f"{family}-chosen").run(family, "chosen"))
    return results


@workflow
async def waiting_child(ctx: WorkflowContext, family: str) -> None:
    await make(ctx, family, "child")
    ledger.reached[family].set()
    await sleep(ctx, 3600)


@workflow
async def cancelled_parent(ctx: WorkflowContext, family: str) -> None:
    await make(ctx, family, "parent")
    await waiting_child.run(family)


@workflow
async def failing_child(ctx: WorkflowContext, family: str) -> None:
    await make(ctx, family, "child")
    raise LookupError("the child's own")


@workflow
async def disappointed_parent(ctx: WorkflowContext, family: str) -> None:
    await make(ctx, family, "parent")
    await failing_child.run(family)


@workflow
async def overdue(ctx: WorkflowContext, family: str) -> None:
    await make(ctx, family, "1")
    await sleep(ctx, 3600)


@activity(timeout=TICK, retry_policy=once)
@on_failure(undo)
def make_too_slowly(ctx: WorkflowContext, family: str, what: str) -> str:
    """In a thread, which goes on after it was given up, unless its process is dead."""
    ledger.call(ctx, family)
    latest = time.monotonic() + 1
    while not ctx.is_cancelled and time.monotonic() < latest:
        time.sleep(TICK / 20)  # nobody tells a thread
    if ledger.is_dead(family):
        raise ConnectionError("died with its process")
    ledger.write(ctx, family, f"+{what}")
    return what


@workflow
async def late_saga(ctx: WorkflowContext, family: str) -> None:
    await make(ctx, family, "1")
    await make_too_slowly(ctx, family, "2")


@activity(heartbeat_timeout=TICK, retry_policy=quick)
async def crawl(ctx: WorkflowContext, family: str) -> list[int]:
    """Its first attempt falls silent after page 7."""
    ledger.call(ctx, family)
    if ctx.heartbeat_details is None:
        ctx.heartbeat(7)
        await asyncio.sleep(60)
    return [ctx.heartbeat_details]


async def look_for_payment(ctx: WorkflowContext, family: str) -> Happened[str] | None:
    return Happened("paid") if ledger.has(ctx, family) else None


@activity(reconcile=look_for_payment)
async def pay(ctx: WorkflowContext, family: str) -> str:
    ledger.call(ctx, family)
    ledger.write(ctx, family, "+payment")
    await asyncio.sleep(TICK / 4)  # time to be lost in
    return "paid"


@workflow
async def careful(ctx: WorkflowContext, family: str) -> list[Any]:
    return [await pay(ctx, family), await crawl(ctx, family)]


@workflow
async def recurring(ctx: WorkflowContext, family: str, seen: list[int]) -> list[int]:
    seen = [*seen, await next_event(ctx, "part")]
    ledger.reached[family].set()
    await do(ctx, family, str(seen[-1]))
    if len(seen) < 3:
        await ctx.recur(family, seen)
    return seen


async def cancel_when_reached(app: EddaApp, run_id: str) -> None:
    await ledger.reached[run_id].wait()
    await app.cancel(run_id, "enough")


async def send_parts(app: EddaApp, run_id: str) -> None:
    events = [event_for(run_id, type_of(run_id, "part"), number) for number in range(3)]
    await app.receive(events[:1])
    await app.receive(events[1:])


class Whole(Scenario, frozen=True, kw_only=True):
    """The run gets its own id as its family, and then the arguments."""

    steps: frozenset[str] = frozenset()
    ledger: frozenset[str]
    """What the world may have seen at the end, in its order."""
    arguments: tuple[Any, ...] = ()
    children: tuple[Workflow[Any, Any], ...] = ()
    child_end: RunStatus = RunStatus.COMPLETED
    timeout: float | None = None
    once: str | None = None
    """A step whose body is called once whatever happens."""

    @property
    def name(self) -> str:
        return "-".join([self.workflow.name, *(str(part) for part in self.arguments if isinstance(part, int))])


def _whole(workflow: Any, expected: str, *ledger: str, meddle: Any = only_start, **options: Any) -> Whole:
    return Whole(workflow, expected, meddle=meddle, ledger=frozenset(ledger), **options)


def _cancelled_at(held: int) -> Whole:
    done = range(1, held + 1)
    effects = " ".join([*(f"+{number}" for number in done), *(f"-{number}" for number in reversed(done))])
    cancelled = WorkflowCancelledError.__name__
    return _whole(cancelled_saga, cancelled, effects, meddle=cancel_when_reached, arguments=(held,))


WHOLE_SCENARIOS = (
    _whole(failing_saga, "LookupError('no more')", "+1 +2 +3 -3 -2 -1"),
    _whole(stumbling_saga, CompensationError.__name__, "+1 +2 +3 -3 -1"),
    *(_cancelled_at(held) for held in range(1, 7)),
    _whole(parent, "['run', 'started', 'chosen']", "+run +started +chosen", children=(child,)),
    _whole(
        cancelled_parent,
        WorkflowCancelledError.__name__,
        "+parent +child -child -parent",
        meddle=cancel_when_reached,
        children=(waiting_child,),
        child_end=RunStatus.CANCELLED,
    ),
    _whole(
        disappointed_parent,
        """LookupError("the child's own")""",
        "+parent +child -child -parent",
        children=(failing_child,),
        child_end=RunStatus.FAILED,
    ),
    _whole(overdue, WorkflowTimeoutError.__name__, "", "+1 -1", timeout=LATE),
    _whole(late_saga, RetryExhaustedError.__name__, "+1 -1", "+1 +2 -2 -1"),
    _whole(careful, "['paid', [7]]", "+payment", once="pay:1"),
    _whole(recurring, "[0, 1, 2]", "+0 +1 +2", meddle=send_parts, arguments=([],)),
)
PLAIN = _whole(child, "'x'", "+x", arguments=("x",))
"""As little as a run can be."""
