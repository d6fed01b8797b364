"""Retry of failed and cancelled runs: successful steps do not run again."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from edda import (
    EddaApp,
    RetryPolicy,
    RunStatus,
    WorkflowCancelledError,
    WorkflowContext,
    activity,
    sleep,
    wait_event,
    workflow,
)
from edda.core.model import EntryKind, RunId
from edda.errors import ActionRefusedError, InstanceNotFoundError, RetryExhaustedError
from edda.testing import CrashMode, CrashPoints
from edda.workflow.saga import on_failure
from edda.workflow.workflow import Workflow
from tests.conftest import Database
from tests.engine.conditions import until, until_status
from tests.engine.conftest import RESTLESS, MakeApp, url_of
from tests.engine.histories import kinds_in

ONCE = RetryPolicy(max_attempts=1)
IMPATIENT = RetryPolicy(max_attempts=3, initial_interval=0.01)


async def failed(app: EddaApp, run_id: str) -> None:
    await until_status(app, run_id, RunStatus.FAILED)


async def test_the_step_that_failed_is_tried_again_and_those_before_it_do_not_run_twice(app: EddaApp) -> None:
    bodies: Counter[str] = Counter()
    broken = True

    @activity
    async def reserve(ctx: WorkflowContext) -> str:
        bodies["reserve"] += 1
        return "seat 7"

    @activity(retry_policy=IMPATIENT)
    async def charge(ctx: WorkflowContext) -> str:
        bodies["charge"] += 1
        if broken:
            raise ConnectionError("no line to the bank")
        return "paid"

    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        return [await reserve(ctx), await charge(ctx)]

    run_id = await app.start(order)
    await failed(app, run_id)
    with pytest.raises(RetryExhaustedError):
        await app.handle(run_id).result()
    assert bodies == {"reserve": 1, "charge": 3}
    await app.handle(run_id).retry()
    await until(lambda: bodies["charge"] == 6, "all attempts were made again")
    await failed(app, run_id)
    broken = False
    await app.handle(run_id).retry()
    assert await app.handle(run_id).result(timeout=20) == ["seat 7", "paid"]
    assert bodies == {"reserve": 1, "charge": 7}
    assert await kinds_in(app, run_id) == [EntryKind.STEP, EntryKind.STEP]


async def test_a_run_goes_on_after_a_bug_in_its_own_code_was_fixed(app: EddaApp) -> None:
    bodies: Counter[str] = Counter()
    is_fixed = False

    @activity
    async def count(ctx: WorkflowContext) -> int:
        bodies["count"] += 1
        return 0

    @workflow
    async def divide(ctx: WorkflowContext) -> float:
        many = await count(ctx)
        return 1 / (many + is_fixed)

    run_id = await app.start(divide)
    await failed(app, run_id)
    is_fixed = True
    await app.handle(run_id).retry()
    assert await app.handle(run_id).result(timeout=20) == 1.0
    assert bodies["count"] == 1


async def test_a_failure_that_the_code_dealt_with_is_not_tried_again(app: EddaApp) -> None:
    bodies: Counter[str] = Counter()
    is_fixed = False

    @activity(retry_policy=ONCE)
    async def look(ctx: WorkflowContext) -> None:
        bodies["look"] += 1
        raise KeyError("nothing there")

    @activity
    async def make(ctx: WorkflowContext) -> None:
        bodies["make"] += 1

    @workflow
    async def look_or_make(ctx: WorkflowContext) -> str:
        try:
            await look(ctx)
        except Exception:
            await make(ctx)
        assert is_fixed, "a bug"
        return "made"

    run_id = await app.start(look_or_make)
    await failed(app, run_id)
    is_fixed = True
    await app.handle(run_id).retry()
    assert await app.handle(run_id).result(timeout=20) == "made"
    assert bodies == {"look": 1, "make": 1}


async def test_a_run_that_went_on_after_its_failure_has_to_begin_from_its_start(app: EddaApp) -> None:
    bodies: Counter[str] = Counter()
    broken = True

    @activity(retry_policy=ONCE)
    async def charge(ctx: WorkflowContext) -> str:
        bodies["charge"] += 1
        if broken:
            raise ConnectionError("no line to the bank")
        return "paid"

    @activity
    async def tell(ctx: WorkflowContext) -> None:
        bodies["tell"] += 1

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        try:
            return await charge(ctx)
        except Exception:
            await tell(ctx)
            raise

    run_id = await app.start(order)
    await failed(app, run_id)
    with pytest.raises(ActionRefusedError, match=r"tell:1.*from_start=True.*--from-start"):
        await app.handle(run_id).retry()
    assert await app.handle(run_id).status() is RunStatus.FAILED
    broken = False
    await app.handle(run_id).retry(from_start=True)
    assert await app.handle(run_id).result(timeout=20) == "paid"
    assert bodies == {"charge": 2, "tell": 1}


async def test_a_cancelled_wait_goes_on_waiting(app: EddaApp) -> None:
    bodies: Counter[str] = Counter()

    @activity
    async def invoice(ctx: WorkflowContext) -> None:
        bodies["invoice"] += 1

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        await invoice(ctx)
        event = await wait_event(ctx, "paid", match={"order": "A"})
        return str(event.data["by"])

    run_id = await app.start(order)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await app.handle(run_id).cancel("by mistake")
    with pytest.raises(WorkflowCancelledError):
        await app.handle(run_id).result(timeout=20)
    await app.handle(run_id).retry()
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await app.send_event("paid", "/shop", {"order": "A", "by": "card"})
    assert await app.handle(run_id).result(timeout=20) == "card"
    assert bodies["invoice"] == 1


async def test_from_the_start_a_run_gets_its_event_again(app: EddaApp) -> None:
    broken = True

    @activity(retry_policy=ONCE)
    async def ship(ctx: WorkflowContext) -> None:
        if broken:
            raise OSError("no truck")

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        event = await wait_event(ctx, "paid", match={"order": "A"})
        await ship(ctx)
        return str(event.data["by"])

    run_id = await app.start(order)
    await app.send_event("paid", "/shop", {"order": "A", "by": "card"})
    await failed(app, run_id)
    broken = False
    await app.handle(run_id).retry(from_start=True)
    assert await app.handle(run_id).result(timeout=20) == "card"


async def test_a_run_that_passed_its_deadline_goes_on_without_one(app: EddaApp) -> None:
    @workflow
    async def patient(ctx: WorkflowContext) -> str:
        await wait_event(ctx, "go")
        return "gone"

    run_id = await app.start(patient.options(timeout=0.05))
    await failed(app, run_id)
    await app.handle(run_id).retry()
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await app.send_event("go", "/test", {})
    assert await app.handle(run_id).result(timeout=20) == "gone"


async def test_a_run_that_was_undone_has_to_begin_from_its_start(app: EddaApp) -> None:
    done: list[str] = []
    broken = True

    async def release(ctx: WorkflowContext) -> None:
        done.append("release")

    @activity
    @on_failure(release)
    async def reserve(ctx: WorkflowContext) -> None:
        done.append("reserve")

    @activity(retry_policy=ONCE)
    async def charge(ctx: WorkflowContext) -> None:
        if broken:
            raise ConnectionError("no line to the bank")
        done.append("charge")

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        await reserve(ctx)
        await charge(ctx)
        return "ordered"

    run_id = await app.start(order)
    await failed(app, run_id)
    with pytest.raises(ActionRefusedError, match="undid what it had done"):
        await app.handle(run_id).retry()
    assert (await app.control.get_run(run_id)).from_start_only
    broken = False
    await app.handle(run_id).retry(from_start=True)
    assert await app.handle(run_id).result(timeout=20) == "ordered"
    assert done == ["reserve", "release", "reserve", "charge"]


async def test_a_child_that_failed_is_started_anew_by_its_parent(app: EddaApp) -> None:
    bodies: Counter[str] = Counter()
    broken = True

    @activity(retry_policy=ONCE)
    async def pack(ctx: WorkflowContext) -> str:
        bodies["pack"] += 1
        if broken:
            raise OSError("no box")
        return "packed"

    @activity
    async def reserve(ctx: WorkflowContext) -> None:
        bodies["reserve"] += 1

    @workflow
    async def ship(ctx: WorkflowContext) -> str:
        return await pack(ctx)

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        await reserve(ctx)
        return await ship.run()

    run_id = await app.start(order)
    await failed(app, run_id)
    broken = False
    await app.handle(run_id).retry()
    assert await app.handle(run_id).result(timeout=20) == "packed"
    assert bodies == {"pack": 2, "reserve": 1}


async def test_a_child_is_cancelled_with_its_parent_and_started_anew_with_it(app: EddaApp) -> None:
    @workflow
    async def ship(ctx: WorkflowContext) -> str:
        await wait_event(ctx, "truck")
        return "shipped"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await ship.run()

    run_id = await app.start(order)
    await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    await app.handle(run_id).cancel()
    await until_status(app, run_id, RunStatus.CANCELLED)
    await app.handle(run_id).retry()
    await until_status(app, run_id, RunStatus.WAITING_FOR_CHILD)
    await app.send_event("truck", "/test", {})
    assert await app.handle(run_id).result(timeout=20) == "shipped"


async def test_a_failed_child_can_be_tried_again_by_itself(app: EddaApp) -> None:
    broken = True
    children: list[str] = []

    @activity(retry_policy=ONCE)
    async def pack(ctx: WorkflowContext) -> str:
        children.append(ctx.instance_id)
        if broken:
            raise OSError("no box")
        return "packed"

    @workflow
    async def ship(ctx: WorkflowContext) -> str:
        return await pack(ctx)

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await ship.run()

    run_id = await app.start(order)
    await failed(app, run_id)
    broken = False
    await app.handle(children[0]).retry()
    assert await app.handle(children[0]).result(timeout=20) == "packed"
    assert await app.handle(run_id).status() is RunStatus.FAILED  # it was told, and stays so


async def test_a_retried_generation_begins_with_its_copied_entries(app: EddaApp) -> None:
    broken = True

    @activity(retry_policy=ONCE)
    async def work(ctx: WorkflowContext, round: int) -> None:
        if broken and round == 2:
            raise OSError("round two")

    @workflow
    async def rounds(ctx: WorkflowContext, round: int) -> int:
        await work(ctx, round)
        if round < 3:
            await ctx.recur(round + 1)
        return round

    run_id = await app.start(rounds, 1)
    await failed(app, run_id)
    broken = False
    await app.handle(run_id).retry(from_start=True)
    assert await app.handle(run_id).result(timeout=20) == 3


async def test_runs_that_have_not_failed_are_not_tried_again(app: EddaApp) -> None:
    @workflow
    async def nap(ctx: WorkflowContext, seconds: float) -> None:
        await sleep(ctx, seconds)

    asleep, over = await app.start(nap, 3600.0), await app.start(nap, 0.0)
    await app.handle(over).result(timeout=20)
    with pytest.raises(ActionRefusedError, match="completed"):
        await app.handle(over).retry()
    with pytest.raises(ActionRefusedError, match="has not ended"):
        await app.handle(asleep).retry(from_start=True)
    with pytest.raises(InstanceNotFoundError):
        await app.handle("nobody").retry()


async def test_two_concurrent_retries_reopen_a_run_once(app: EddaApp) -> None:
    bodies: Counter[str] = Counter()
    broken = True

    @activity(retry_policy=ONCE)
    async def charge(ctx: WorkflowContext) -> str:
        bodies["charge"] += 1
        if broken:
            raise ConnectionError("no line to the bank")
        return "paid"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await charge(ctx)

    run_id = await app.start(order)
    await failed(app, run_id)
    broken = False
    outcomes = await asyncio.gather(*(app.handle(run_id).retry() for _ in range(2)), return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, ActionRefusedError) for outcome in outcomes)
    assert None in outcomes
    assert await app.handle(run_id).result(timeout=20) == "paid"
    assert bodies["charge"] == 2
    assert (await app.client.read_run(run_id)).generation == 1


async def test_a_crash_at_any_statement_of_a_retry_leaves_the_run_as_it_was_or_open(
    database: Database, make_app: MakeApp
) -> None:
    bodies: Counter[str] = Counter()
    broken = True

    @activity
    async def reserve(ctx: WorkflowContext) -> None:
        bodies[ctx.instance_id] += 1

    @activity(retry_policy=ONCE)
    async def charge(ctx: WorkflowContext) -> str:
        if broken:
            raise ConnectionError("no line to the bank")
        return "paid"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        await reserve(ctx)
        return await charge(ctx)

    app = await make_app()
    listening = CrashPoints()
    await _retry_through(database, listening, await _failed_run(app, order))
    points = list(listening.seen())
    assert points
    for how in (CrashMode.BEFORE, CrashMode.AFTER, CrashMode.UNKNOWN):
        for point in points:
            broken = True
            run_id = await _failed_run(app, order)
            broken = False
            await _retry_through(database, CrashPoints(point, how), run_id)
            record = await app.client.read_run(run_id)
            if record.generation == 0:
                assert record.status is RunStatus.FAILED
                await app.handle(run_id).retry()
            assert await app.handle(run_id).result(timeout=20) == "paid"
            assert bodies[run_id] == 1
            assert len(await app.engine.storage.history(RunId(run_id), 0)) == 2


async def _failed_run(app: EddaApp, order: Workflow[[], str]) -> str:
    run_id = await app.start(order)
    await failed(app, run_id)
    return run_id


async def _retry_through(database: Database, probe: CrashPoints, run_id: str) -> None:
    """In a process of its own, as it were, that does nothing else and dies at the probe's point."""
    other = EddaApp("other", url_of(database), storage=database.storage(probe), worker=False, settings=RESTLESS)
    try:
        await other.initialize()
        await other.handle(run_id).retry()
    except BaseException as error:
        if not probe.struck or isinstance(error, asyncio.CancelledError):
            raise
    finally:
        other.kill() if probe.dead else await other.shutdown(grace=0.0)
