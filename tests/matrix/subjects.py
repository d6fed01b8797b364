"""One workflow per state: how a run is brought into the state, and what lets it end afterwards.

`Scene` holds the gates and counters that the activities use. They are shared by all apps of a test, so that a run that
moves to another worker finds the same world.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edda import (
    EddaApp,
    RetryPolicy,
    RunStatus,
    TerminalError,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    receive,
    send_to,
    sleep,
    subscribe,
    wait_event,
    workflow,
)
from edda.core.model import RunId, RunRecord
from edda.workflow.workflow import Workflow

from ..engine.conditions import until, until_status

EVENT = "matrix.event"
CHANNEL = "matrix"
LONG = 3600.0
BACK_OFF = 4.0
"""Until the next attempt: long enough to be out of memory meanwhile."""


@dataclass
class Scene:
    """What the steps of all subjects see of the world outside."""

    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    fails: set[str] = field(default_factory=set)
    """Runs whose failing step fails; taken out, it succeeds."""
    entered: Counter[str] = field(default_factory=Counter)
    """How often each gated step has begun, by run."""
    changed: set[str] = field(default_factory=set)
    """Workflows whose code no longer fits the histories that were recorded before."""

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    async def pass_gate(self, name: str) -> None:
        self.entered[name] += 1
        await self.gate(name).wait()


Serves = Callable[["Subject"], bool]
Reach = Callable[["World", str], Awaitable[None]]


@dataclass(frozen=True)
class Subject:
    """A state: the workflow whose runs get there, how it is seen that they are there, and how they end."""

    name: str
    status: RunStatus
    make: Callable[[Scene], Workflow[Any, Any]]
    reach: Reach
    finish: Callable[[World, str], Awaitable[None]]
    ends: RunStatus | None = RunStatus.COMPLETED
    """How a run ends that had no input but what `finish` gives it; None: it has ended before."""
    delay: float | None = None
    is_served: bool = True
    """Whether the workers know its workflow from the beginning."""
    is_orphan: bool = False
    """Its worker dies just before the input; the others have not noticed yet."""

    @property
    def workflow_name(self) -> str:
        return f"matrix_{self.name}"


@dataclass
class World:
    scene: Scene
    client: EddaApp
    workers: list[EddaApp]
    start_worker: Callable[[Serves], Awaitable[EddaApp]]
    """Another worker, for the workflows of the subjects that it serves and for all children."""
    flows: dict[str, Workflow[Any, Any]]
    """By the subject's name."""
    timeout: float | None = None
    """Of each run, if it has a deadline."""

    @property
    def worker(self) -> EddaApp:
        return self.workers[-1]

    async def record(self, run_id: str) -> RunRecord:
        return await self.client.client.read_run(run_id)

    async def start(self, subject: Subject, run_id: str) -> None:
        self.scene.fails.add(run_id)
        flow = self.flows[subject.name].options(id=run_id, delay=subject.delay, timeout=self.timeout)
        await flow.on(self.client.client).start()


# What the workflows are made of


@activity
async def begin(ctx: WorkflowContext) -> str:
    """Recorded first, so that changed code meets a history."""
    return "begun"


@activity
async def begin_otherwise(ctx: WorkflowContext) -> str:
    return "begun otherwise"


async def open_history(ctx: WorkflowContext, scene: Scene) -> None:
    await (begin_otherwise(ctx) if ctx.workflow_name in scene.changed else begin(ctx))


def _named(name: str, scene: Scene, body: Callable[[WorkflowContext], Awaitable[Any]]) -> Workflow[Any, Any]:
    @workflow(name=f"matrix_{name}")
    async def subject(ctx: WorkflowContext) -> Any:
        await open_history(ctx, scene)
        return await body(ctx)

    return subject


def policy(interval: float, attempts: int) -> RetryPolicy:
    return RetryPolicy(initial_interval=interval, max_interval=interval, max_attempts=attempts, max_duration=None)


def make_event(name: str) -> Callable[[Scene], Workflow[Any, Any]]:
    async def body(ctx: WorkflowContext) -> str:
        await wait_event(ctx, EVENT, match={"run": ctx.instance_id})
        return "event"

    return lambda scene: _named(name, scene, body)


def make_timer(name: str) -> Callable[[Scene], Workflow[Any, Any]]:
    return lambda scene: _named(name, scene, lambda ctx: sleep(ctx, LONG))


def make_message(name: str) -> Callable[[Scene], Workflow[Any, Any]]:
    async def body(ctx: WorkflowContext) -> str:
        await subscribe(ctx, CHANNEL, "direct")
        await receive(ctx, CHANNEL)
        return "message"

    return lambda scene: _named(name, scene, body)


def make_plain(name: str) -> Callable[[Scene], Workflow[Any, Any]]:
    async def body(ctx: WorkflowContext) -> str:
        return "done"

    return lambda scene: _named(name, scene, body)


def make_step(name: str) -> Callable[[Scene], Workflow[Any, Any]]:
    def make(scene: Scene) -> Workflow[Any, Any]:
        @activity
        async def hold(ctx: WorkflowContext) -> str:
            await scene.pass_gate(ctx.instance_id)
            return "held"

        return _named(name, scene, hold)

    return make


def make_failing(name: str, interval: float, attempts: int) -> Callable[[Scene], Workflow[Any, Any]]:
    def make(scene: Scene) -> Workflow[Any, Any]:
        @activity(retry_policy=policy(interval, attempts))
        async def fail(ctx: WorkflowContext) -> str:
            scene.entered[ctx.instance_id] += 1
            if ctx.instance_id in scene.fails:
                raise ConnectionError("no answer")
            return "answered"

        return _named(name, scene, fail)

    return make


def make_child(name: str) -> Callable[[Scene], Workflow[Any, Any]]:
    def make(scene: Scene) -> Workflow[Any, Any]:
        @activity
        async def hold_child(ctx: WorkflowContext, parent: str) -> str:
            await scene.pass_gate(parent)
            return "child"

        @workflow(name=f"matrix_{name}_child")
        async def child(ctx: WorkflowContext, parent: str) -> str:
            return await hold_child(ctx, parent)

        return _named(name, scene, lambda ctx: child.run(ctx.instance_id))

    return make


def make_parked_event(name: str) -> Callable[[Scene], Workflow[Any, Any]]:
    """It stays in memory by its step while its wait is registered, so a worker that stops hands it back as ready."""

    def make(scene: Scene) -> Workflow[Any, Any]:
        @activity
        async def hold_here(ctx: WorkflowContext) -> None:
            await scene.pass_gate(ctx.instance_id)

        async def body(ctx: WorkflowContext) -> None:
            await asyncio.gather(hold_here(ctx), wait_event(ctx, EVENT, match={"run": ctx.instance_id}))

        return _named(name, scene, body)

    return make


def make_parked_child(name: str) -> Callable[[Scene], Workflow[Any, Any]]:
    def make(scene: Scene) -> Workflow[Any, Any]:
        @activity
        async def hold_there(ctx: WorkflowContext, gate: str) -> None:
            await scene.pass_gate(gate)

        @workflow(name=f"matrix_{name}_child")
        async def child(ctx: WorkflowContext, gate: str) -> None:
            await hold_there(ctx, gate)

        async def body(ctx: WorkflowContext) -> None:
            await asyncio.gather(hold_there(ctx, f"{ctx.instance_id}/own"), child.run(ctx.instance_id))

        return _named(name, scene, body)

    return make


def make_compensating(name: str, interval: float | None) -> Callable[[Scene], Workflow[Any, Any]]:
    """It fails after a step that is to be undone; the undo waits at the gate, or for its next attempt."""

    def make(scene: Scene) -> Workflow[Any, Any]:
        @compensation(retry_policy=policy(interval or 0.0, 100))
        async def undo(ctx: WorkflowContext) -> None:
            if interval is None:
                await scene.pass_gate(ctx.instance_id)
            else:
                scene.entered[ctx.instance_id] += 1
                if ctx.instance_id in scene.fails:
                    raise ConnectionError("no answer")

        @activity
        @on_failure(undo)
        async def do(ctx: WorkflowContext) -> None:
            return None

        async def body(ctx: WorkflowContext) -> None:
            await do(ctx)
            raise TerminalError("not possible")

        return _named(name, scene, body)

    return make


def make_settling(name: str) -> Callable[[Scene], Workflow[Any, Any]]:
    """Cancelled, with a step to be undone, while its child is undoing what it did: that comes first."""

    def make(scene: Scene) -> Workflow[Any, Any]:
        @compensation
        async def undo_child(ctx: WorkflowContext, parent: str) -> None:
            await scene.pass_gate(parent)

        @activity
        @on_failure(undo_child)
        async def do_child(ctx: WorkflowContext, parent: str) -> None:
            return None

        @workflow(name=f"matrix_{name}_child")
        async def child(ctx: WorkflowContext, parent: str) -> None:
            await do_child(ctx, parent)
            await sleep(ctx, LONG)

        @compensation
        async def undo_parent(ctx: WorkflowContext) -> None:
            return None

        @activity
        @on_failure(undo_parent)
        async def do_parent(ctx: WorkflowContext) -> None:
            return None

        async def body(ctx: WorkflowContext) -> None:
            await do_parent(ctx)
            await child.run(ctx.instance_id)

        return _named(name, scene, body)

    return make


def make_recurring(name: str) -> Callable[[Scene], Workflow[Any, Any]]:
    def make(scene: Scene) -> Workflow[Any, Any]:
        @workflow(name=f"matrix_{name}")
        async def subject(ctx: WorkflowContext, is_second: bool = False) -> str:
            await open_history(ctx, scene)
            if not is_second:
                await ctx.recur(True)
            await wait_event(ctx, EVENT, match={"run": ctx.instance_id})
            return "event"

        return subject

    return make


# How a run gets into its state


def reach_status(status: RunStatus) -> Reach:
    async def reach(world: World, run_id: str) -> None:
        await until_status(world.client, run_id, status)

    return reach


async def reach_unclaimed(world: World, run_id: str) -> None:
    record = await world.record(run_id)
    assert record.status is RunStatus.RUNNING
    assert record.owner is None


async def reach_gate(world: World, run_id: str) -> None:
    await until(lambda: world.scene.entered[run_id] > 0, f"{run_id} is at its gate")


async def reach_compensating(world: World, run_id: str) -> None:
    await until_status(world.client, run_id, RunStatus.COMPENSATING)
    await reach_gate(world, run_id)


async def reach_compensating_again(world: World, run_id: str) -> None:
    async def waits() -> bool:
        record = await world.record(run_id)
        return record.status is RunStatus.COMPENSATING and record.owner is None

    await until(waits, f"{run_id} waits for the next attempt to undo")


async def reach_settling(world: World, run_id: str) -> None:
    await until_status(world.client, run_id, RunStatus.WAITING_FOR_CHILD)
    await world.client.cancel(run_id)
    await reach_gate(world, run_id)

    async def waits() -> bool:
        record = await world.record(run_id)
        return record.owner is None and record.status is RunStatus.COMPENSATING

    await until(waits, f"{run_id} waits for its child to end")


async def reach_parked_event(world: World, run_id: str) -> None:
    await reach_gate(world, run_id)

    async def waits() -> bool:
        return len(await world.client.engine.storage.waits(RunId(run_id))) == 1

    await until(waits, f"the wait of {run_id} is registered")


async def reach_parked_child(world: World, run_id: str) -> None:
    await reach_gate(world, run_id)
    await reach_gate(world, f"{run_id}/own")


async def reach_second_generation(world: World, run_id: str) -> None:
    async def waits() -> bool:
        record = await world.record(run_id)
        return record.generation == 1 and record.status is RunStatus.WAITING_FOR_EVENT

    await until(waits, f"{run_id} waits in its second generation")


async def reach_cancelled(world: World, run_id: str) -> None:
    await until_status(world.client, run_id, RunStatus.WAITING_FOR_EVENT)
    await world.client.cancel(run_id)
    await until_status(world.client, run_id, RunStatus.CANCELLED)


async def reach_deleted(world: World, run_id: str) -> None:
    await until_status(world.client, run_id, RunStatus.COMPLETED)
    await world.client.control.delete_run(run_id)


# What a run waits for


async def give_event(world: World, run_id: str) -> None:
    await world.client.send_event(EVENT, "/matrix", {"run": run_id})


async def give_message(world: World, run_id: str) -> None:
    await send_to(world.client, run_id, "hello", CHANNEL)


async def open_gate(world: World, run_id: str) -> None:
    world.scene.gate(run_id).set()
    world.scene.gate(f"{run_id}/own").set()


async def give_code_and_event(world: World, run_id: str) -> None:
    await open_gate(world, run_id)
    await give_event(world, run_id)


async def give_success(world: World, run_id: str) -> None:
    """The next attempt of its step succeeds."""
    world.scene.fails.discard(run_id)


async def give_cancel(world: World, run_id: str) -> None:
    await world.client.cancel(run_id)


async def give_code(world: World, run_id: str) -> None:
    await world.start_worker(every)


def every(_subject: Subject) -> bool:
    return True


def served(subject: Subject) -> bool:
    return subject.is_served


async def give_nothing(world: World, run_id: str) -> None:
    return


R = RunStatus
IN_TIMER, IN_EVENT = R.WAITING_FOR_TIMER, R.WAITING_FOR_EVENT
IN_MESSAGE, IN_CHILD = R.WAITING_FOR_MESSAGE, R.WAITING_FOR_CHILD

SUBJECTS: Sequence[Subject] = (
    Subject("delayed", R.RUNNING, make_plain("delayed"), reach_unclaimed, give_cancel, R.CANCELLED, delay=LONG),
    Subject("unclaimed", R.RUNNING, make_plain("unclaimed"), reach_unclaimed, give_code, is_served=False),
    Subject("step", R.RUNNING, make_step("step"), reach_gate, open_gate),
    Subject("orphan", R.RUNNING, make_step("orphan"), reach_gate, open_gate, is_orphan=True),
    Subject("event", IN_EVENT, make_event("event"), reach_status(IN_EVENT), give_event),
    Subject("timer", IN_TIMER, make_timer("timer"), reach_status(IN_TIMER), give_cancel, R.CANCELLED),
    Subject("message", IN_MESSAGE, make_message("message"), reach_status(IN_MESSAGE), give_message),
    Subject("child", IN_CHILD, make_child("child"), reach_status(IN_CHILD), open_gate),
    Subject(
        "backing_off",
        IN_TIMER,
        make_failing("backing_off", BACK_OFF, 100),
        reach_status(IN_TIMER),
        give_success,
    ),
    Subject("parked", R.PARKED, make_parked_event("parked"), reach_parked_event, give_code_and_event),
    Subject("parked_child", R.PARKED, make_parked_child("parked_child"), reach_parked_child, open_gate),
    Subject(
        "compensating", R.COMPENSATING, make_compensating("compensating", None), reach_compensating, open_gate, R.FAILED
    ),
    Subject(
        "compensating_again",
        R.COMPENSATING,
        make_compensating("compensating_again", BACK_OFF),
        reach_compensating_again,
        give_success,
        R.FAILED,
    ),
    Subject("settling", R.COMPENSATING, make_settling("settling"), reach_settling, open_gate, R.CANCELLED),
    Subject("recurred", IN_EVENT, make_recurring("recurred"), reach_second_generation, give_event),
    Subject("completed", R.COMPLETED, make_plain("completed"), reach_status(R.COMPLETED), give_nothing),
    Subject("failed", R.FAILED, make_failing("failed", 0.0, 1), reach_status(R.FAILED), give_nothing, R.FAILED),
    Subject("cancelled", R.CANCELLED, make_event("cancelled"), reach_cancelled, give_nothing, R.CANCELLED),
    Subject("deleted", R.COMPLETED, make_plain("deleted"), reach_deleted, give_nothing, None),
)
