"""Slots: so many bodies of an activity run in one process at once, and no more."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from edda import EddaApp, RetryExhaustedError, RetryPolicy, WorkflowContext, activity, sleep, workflow
from edda.engine.run.activity_limits import ConcurrencyLimiter, Slot
from edda.engine.settings import Settings

from .conditions import until
from .conftest import MakeApp

on_two_databases = pytest.mark.parametrize("database", ["memory", "sqlite"], indirect=True)


class Crowd:
    """Counts who is inside."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "2"])
def test_a_number_that_is_none_is_refused_with_the_activity_named(most: Any) -> None:
    def charge(ctx: WorkflowContext) -> None: ...

    with pytest.raises(ValueError, match="activity charge: max_concurrent must be a whole number, at least 1"):
        activity(max_concurrent=most)(charge)


@on_two_databases
async def test_no_more_bodies_than_allowed_run_at_once_across_runs(app: EddaApp) -> None:
    crowd = Crowd()

    @activity(max_concurrent=3)
    async def work(ctx: WorkflowContext) -> None:
        with crowd:
            await asyncio.sleep(0.01)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await asyncio.gather(*(work(ctx) for _ in range(4)))

    runs = [await app.start(order) for _ in range(5)]
    await asyncio.gather(*(app.handle(run).result(timeout=20) for run in runs))
    assert crowd.most == 3


@on_two_databases
async def test_threads_are_counted_as_well(app: EddaApp) -> None:
    crowd = Crowd()

    @activity(max_concurrent=2)
    def work(ctx: WorkflowContext) -> None:
        with crowd:
            threading.Event().wait(0.01)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await asyncio.gather(*(work(ctx) for _ in range(8)))

    await app.run(order)
    assert crowd.most == 2


@on_two_databases
async def test_who_came_first_is_first(app: EddaApp) -> None:
    began: list[int] = []
    first_began, go = asyncio.Event(), asyncio.Event()

    @activity(max_concurrent=1)
    async def work(ctx: WorkflowContext, number: int) -> None:
        began.append(number)
        first_began.set()
        await go.wait()

    @workflow
    async def order(ctx: WorkflowContext, number: int) -> None:
        await work(ctx, number)

    runs = [await app.start(order, 0)]
    await first_began.wait()
    worker = app.engine.worker
    assert worker is not None
    for number in range(1, 5):
        runs.append(await app.start(order, number))
        await until(lambda: worker.journal.is_idle, "it waits for a slot")
    go.set()
    await asyncio.gather(*(app.handle(run).result(timeout=20) for run in runs))
    assert began == [0, 1, 2, 3, 4]


@on_two_databases
async def test_a_step_that_is_abandoned_leaves_the_line(app: EddaApp) -> None:
    began: list[str] = []
    go = asyncio.Event()

    @activity(max_concurrent=1)
    async def work(ctx: WorkflowContext, name: str) -> str:
        began.append(name)
        await go.wait()
        return name

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        first = asyncio.create_task(work(ctx, "first"))
        second = asyncio.create_task(work(ctx, "second"))
        third = asyncio.create_task(work(ctx, "third"))
        await sleep(ctx, 0.02)
        second.cancel()
        await sleep(ctx, 0.01)
        go.set()
        return await first + await third

    assert await app.run(order) == "firstthird"
    assert began == ["first", "third"]


@on_two_databases
async def test_a_thread_that_was_given_up_keeps_its_slot_until_it_ends(app: EddaApp) -> None:
    crowd = Crowd()
    go = threading.Event()

    @activity(max_concurrent=1, timeout=0.1, retry_policy=RetryPolicy(max_attempts=1))
    def work(ctx: WorkflowContext, waits: bool) -> bool:
        with crowd:
            if waits:
                go.wait(20)
        return waits

    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        first, second = asyncio.create_task(work(ctx, True)), asyncio.create_task(work(ctx, False))
        await asyncio.wait([first])
        await sleep(ctx, 0.05)
        assert not second.done()
        go.set()
        return [type(first.exception()).__name__, await second]

    assert await app.run(order) == ["RetryExhaustedError", False]
    assert crowd.most == 1


@on_two_databases
async def test_a_thread_that_outlives_its_run_keeps_its_slot_too(make_app: MakeApp) -> None:
    app = await make_app(settings=Settings(late_grace=0.01))
    crowd = Crowd()
    go = threading.Event()

    @activity(max_concurrent=1, timeout=0.05, retry_policy=RetryPolicy(max_attempts=1))
    def work(ctx: WorkflowContext, waits: bool) -> bool:
        with crowd:
            if waits:
                go.wait(20)
        return waits

    @workflow
    async def order(ctx: WorkflowContext, waits: bool) -> bool:
        return await work(ctx, waits)

    with pytest.raises(RetryExhaustedError):
        await app.run(order, True)
    second = asyncio.create_task(app.run(order, False))
    await asyncio.wait([second], timeout=0.1)
    go.set()
    assert await second is False
    assert crowd.most == 1


@on_two_databases
async def test_an_attempt_in_line_is_not_made_if_the_one_before_succeeds_after_all(app: EddaApp) -> None:
    begun: list[int] = []
    go = threading.Event()

    @activity(max_concurrent=1, timeout=0.05, retry_policy=RetryPolicy(initial_interval=0.0))
    def work(ctx: WorkflowContext) -> int:
        begun.append(ctx.attempt)
        go.wait(20)
        return ctx.attempt

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await work(ctx)

    run_id = await app.start(order)

    async def is_tried_again() -> bool:
        return len(await app.handle(run_id).history()) == 1

    await until(is_tried_again, "the first attempt is overdue")
    go.set()
    assert await app.handle(run_id).result(timeout=20) == 1
    assert begun == [1]


@on_two_databases
async def test_the_next_attempt_stands_in_line_again(app: EddaApp) -> None:
    began: list[tuple[str, int]] = []

    @activity(max_concurrent=1, retry_policy=RetryPolicy(initial_interval=0.0))
    async def work(ctx: WorkflowContext, name: str) -> None:
        began.append((name, ctx.attempt))
        await asyncio.sleep(0.01)
        if ctx.attempt == 1:
            raise ConnectionError("again")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await asyncio.gather(work(ctx, "a"), work(ctx, "b"))

    await app.run(order)
    assert began == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


@on_two_databases
async def test_a_step_in_line_keeps_its_run_in_memory_and_is_handed_back_when_the_worker_drains(
    make_app: MakeApp,
) -> None:
    began: list[str] = []
    go = asyncio.Event()

    @activity(max_concurrent=1)
    async def work(ctx: WorkflowContext) -> str:
        began.append(ctx.instance_id)
        await go.wait()
        return "done"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await work(ctx)

    first = await make_app(settings=Settings(linger=0.0))
    runs = [await first.start(order), await first.start(order)]
    await until(lambda: len(began) == 1, "one of them has begun")
    worker = first.engine.worker
    assert worker is not None
    await until(lambda: worker.journal.is_idle, "all is written")
    assert set(worker.live) == set(runs)
    closing = asyncio.create_task(first.shutdown(grace=20))
    await until(lambda: set(worker.live) == set(began), "who waited in line was handed back")
    go.set()
    await closing
    assert len(began) == 1
    second = await make_app()
    assert [await second.handle(run).result(timeout=20) for run in runs] == ["done", "done"]
    assert sorted(began) == sorted(runs)


@on_two_databases
async def test_a_slot_that_is_freed_while_the_worker_drains_begins_nothing(make_app: MakeApp) -> None:
    began: list[str] = []
    go, other_may_end = asyncio.Event(), asyncio.Event()

    @activity(max_concurrent=1)
    async def work(ctx: WorkflowContext) -> str:
        began.append(ctx.activity_id)
        await go.wait()
        return ctx.activity_id

    @activity
    async def other(ctx: WorkflowContext) -> str:
        began.append(ctx.activity_id)
        await other_may_end.wait()
        return ctx.activity_id

    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        return [*await asyncio.gather(work(ctx), work(ctx), other(ctx))]

    first = await make_app()
    run_id = await first.start(order)
    await until(lambda: began == ["work:1", "other:1"], "two of them have begun")
    worker = first.engine.worker
    assert worker is not None
    closing = asyncio.create_task(first.shutdown(grace=20))
    await until(lambda: worker.draining, "the worker drains")
    go.set()

    async def is_recorded() -> bool:
        return len(await first.handle(run_id).history()) == 1

    await until(is_recorded, "the slot is free")
    assert began == ["work:1", "other:1"]
    other_may_end.set()
    await closing
    second = await make_app()
    assert await second.handle(run_id).result(timeout=20) == ["work:1", "work:2", "other:1"]
    assert began == ["work:1", "other:1", "work:2"]


def test_a_slot_that_is_refused_goes_to_the_next() -> None:
    slots, taken = ConcurrencyLimiter(), list[Slot]()
    slots.acquire("work", 1, "a", lambda slot: taken.append(slot) or True)  # type: ignore[func-returns-value]
    for number in range(2000):
        slots.acquire("work", 1, number, lambda slot: False)
    slots.acquire("work", 1, "b", lambda slot: taken.append(slot) or True)  # type: ignore[func-returns-value]
    taken[0].free()
    taken[0].free()
    assert len(taken) == 2
    slots.acquire("work", 1, "c", lambda slot: taken.append(slot) or True)  # type: ignore[func-returns-value]
    assert len(taken) == 2, "freeing twice does not make two slots of one"
    slots.cancel("work", "c")
    taken[1].free()
    assert len(taken) == 2
