"""A worker whose lease may have lapsed starts no steps, and starts all of them once a heartbeat is answered."""

from __future__ import annotations

import time

import pytest

from edda import WorkflowContext, activity, workflow
from edda.core.model import RunId, WorkerId
from edda.engine.worker.heartbeat import Heartbeat
from edda.engine.worker.worker import Worker

from .conditions import until
from .conftest import MORTAL, MakeApp


class Lease:
    """Replaces what the heartbeat's thread knows of the lease."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_safe = True
        self.refused = 0
        monkeypatch.setattr(Heartbeat, "lease_is_safe", property(lambda _: self._ask()))

    def _ask(self) -> bool:
        self.refused += not self.is_safe
        return self.is_safe


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> Lease:
    return Lease(monkeypatch)


@activity
async def greet(ctx: WorkflowContext) -> str:
    return "hello"


def beat(worker: Worker) -> None:
    """What the heartbeat's thread schedules on the loop after an answer of the database."""
    now = time.monotonic()
    Worker.on_heartbeat(worker, worker.services.clock.now(), now, now)


@workflow
async def visit(ctx: WorkflowContext) -> str:
    return await greet(ctx)


async def test_a_held_step_starts_at_the_next_heartbeat_though_another_run_saw_the_safe_lease_first(
    make_app: MakeApp, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await make_app(workflows=[visit])
    worker = app.engine.worker
    assert worker is not None
    monkeypatch.setattr(worker, "on_heartbeat", lambda *_: None)  # of the thread; the test calls it itself
    lease.is_safe = False
    held = await app.start(visit)
    await until(lambda: lease.refused > 0, "a step of the first run was refused")

    # The thread has renewed the lease, and its callback is still in the loop's queue.
    lease.is_safe = True
    assert await app.handle(await app.start(visit)).result(timeout=30) == "hello"
    beat(worker)

    assert await app.handle(held).result(timeout=30) == "hello"


async def test_steps_start_after_a_hand_over_that_came_while_the_worker_read_what_it_owns(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = await make_app(workflows=[visit], settings=MORTAL)
    worker = app.engine.worker
    assert worker is not None
    storage, owned_runs = app.engine.storage, app.engine.storage.owned_runs

    async def hand_over_meanwhile(worker_id: WorkerId) -> dict[RunId, int]:
        monkeypatch.setattr(storage, "owned_runs", owned_runs)
        hand_over(worker)
        return await owned_runs(worker_id)

    monkeypatch.setattr(storage, "owned_runs", hand_over_meanwhile)
    hand_over(worker)
    await until(lambda: storage.owned_runs == owned_runs, "the worker has read what it owns")

    assert await app.handle(await app.start(visit)).result(timeout=30) == "hello"


def hand_over(worker: Worker) -> None:
    """As the heartbeat's thread does while the loop is blocked."""
    worker.heartbeat.has_handed_over = True
    worker.runs_handed_over()
