"""What can happen to a run: each input is given to the runs of all subjects at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from edda.control.views import RetryRequest
from edda.core.model import MICROSECONDS
from edda.errors import EddaError

from ..engine.conditions import until
from .subjects import World, give_event, give_message, served

Runs = dict[str, str]
"""The run of each subject, by the subject's name."""
Refusals = dict[str, str]
"""Subjects for whose runs the call raised one of Edda's errors, and its class."""


@dataclass(frozen=True)
class Input:
    name: str
    give: Callable[[World, Runs], Awaitable[Refusals]]
    deadline: bool = False
    """The runs are started with a deadline, which passes."""


def to_each(call: Callable[[World, str], Awaitable[object]]) -> Callable[[World, Runs], Awaitable[Refusals]]:
    async def give(world: World, runs: Runs) -> Refusals:
        refusals: Refusals = {}
        for name, run_id in runs.items():
            try:
                await call(world, run_id)
            except EddaError as error:
                refusals[name] = type(error).__name__
        return refusals

    return give


async def cancel(world: World, run_id: str) -> None:
    await world.client.cancel(run_id, "not wanted")


async def retry(world: World, run_id: str) -> None:
    world.scene.fails.discard(run_id)
    await world.client.control.retry_run(run_id, RetryRequest())


async def resume(world: World, run_id: str) -> None:
    await world.client.control.resume_run(run_id)


async def delete(world: World, run_id: str) -> None:
    await world.client.control.delete_run(run_id)


async def end_child(world: World, runs: Runs) -> Refusals:
    """By the gate of the child; that of the run's own step stays closed."""
    for name in ("child", "parked_child", "settling"):
        world.scene.gate(runs[name]).set()
    return {}


NO_DEADLINE = ("delayed", "deleted")
"""The deadline of a delayed run counts from its delay on; a deleted one has none."""


async def pass_deadline(world: World, runs: Runs) -> Refusals:
    deadlines = [(await world.record(run_id)).deadline for name, run_id in runs.items() if name not in NO_DEADLINE]
    last = max(one for one in deadlines if one is not None)

    async def is_past() -> bool:
        return await world.client.engine.storage.now() >= last

    await until(is_past, "the last deadline has passed")
    return {}


async def change_code(world: World, runs: Runs) -> Refusals:
    await world.worker.shutdown(grace=0.0)
    world.scene.changed.update(f"matrix_{name}" for name in runs)
    await world.start_worker(served)
    return {}


async def kill_worker(world: World, runs: Runs) -> Refusals:
    world.worker.kill()
    await world.start_worker(served)
    return {}


async def drain_worker(world: World, runs: Runs) -> Refusals:
    await world.worker.shutdown(grace=0.0)
    await world.start_worker(served)
    return {}


async def prune(world: World, runs: Runs) -> Refusals:
    """Everything that may go is old enough to go."""
    storage = world.client.engine.storage
    later = await storage.now() + 86_400 * MICROSECONDS
    for call in (storage.prune_events, storage.prune_inbox, storage.prune_runs, storage.prune_outbox):
        while await call(later, 100):
            pass
    return {}


INPUTS: Sequence[Input] = (
    Input("event", to_each(give_event)),
    Input("message", to_each(give_message)),
    Input("cancel", to_each(cancel)),
    Input("deadline", pass_deadline, deadline=True),
    Input("retry", to_each(retry)),
    Input("resume", to_each(resume)),
    Input("delete", to_each(delete)),
    Input("child_end", end_child),
    Input("new_code", change_code),
    Input("death", kill_worker),
    Input("drain", drain_worker),
    Input("prune", prune),
)
