"""Starting runs and looking at them from outside."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from edda import EddaApp, RunStatus, WorkflowCancelledError, WorkflowContext, activity, sleep, workflow
from edda.core.model import EntryKind
from edda.errors import (
    ArgumentError,
    InstanceConflictError,
    InstanceNotFoundError,
    NotInWorkflowError,
    PayloadError,
    UnknownWorkflowError,
    WorkflowError,
)
from edda.workflow.workflow import Workflow

from .conditions import until_status
from .conftest import MakeApp


@pytest.fixture
def double() -> Workflow[[int], int]:
    @activity
    async def times_two(ctx: WorkflowContext, number: int) -> int:
        return 2 * number

    @workflow
    async def double(ctx: WorkflowContext, number: int) -> int:
        return await times_two(ctx, number)

    return double


async def test_a_plain_start_goes_to_the_only_app_and_its_handle_gives_the_result(
    app: EddaApp, double: Workflow[[int], int]
) -> None:
    run_id = await double.start(21)
    assert await double.handle(run_id).result(timeout=20) == 42
    assert await double.handle(run_id).status() is RunStatus.COMPLETED


async def test_run_starts_and_waits(app: EddaApp, double: Workflow[[int], int]) -> None:
    assert await double.run(4) == 8
    assert await app.run(double, 5) == 10


async def test_a_started_run_is_in_the_database_when_start_returns(
    make_app: MakeApp, double: Workflow[[int], int]
) -> None:
    app, other = await make_app(), await make_app(worker=False)
    run_id = await app.start(double, 1)
    assert (await other.client.read_run(run_id)).workflow == "double"


async def test_the_history_has_every_step_with_its_value(app: EddaApp, double: Workflow[[int], int]) -> None:
    run_id = await app.start(double, 3)
    await app.handle(run_id).result(timeout=20)
    (entry,) = await app.handle(run_id).history()
    assert (entry.seq, entry.kind, entry.step, entry.name, entry.ok) == (
        1,
        EntryKind.STEP,
        "times_two:1",
        "times_two",
        True,
    )
    assert app.engine.codec.decode(entry.value) == 6


async def test_a_result_that_is_not_there_in_time_is_a_timeout_and_the_run_goes_on(app: EddaApp) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> str:
        await sleep(ctx, 0.3)
        return "rested"

    run_id = await app.start(nap)
    with pytest.raises(TimeoutError, match=r"it waits for timer 'sleep:1'|it goes on"):
        await app.handle(run_id).result(timeout=0.01)
    assert await app.handle(run_id).result(timeout=20) == "rested"


async def test_a_delayed_run_begins_when_its_delay_is_over(app: EddaApp) -> None:
    @workflow
    async def late(ctx: WorkflowContext) -> float:
        return 0.0

    run_id = await late.options(delay=timedelta(seconds=0.3)).start()
    await app.handle(run_id).result(timeout=20)
    record = await app.client.read_run(run_id)
    assert record.ended_at is not None
    assert record.ended_at - record.created_at >= 300_000


async def test_the_same_id_and_arguments_are_the_same_run(app: EddaApp, double: Workflow[[int], int]) -> None:
    assert await double.options(id="one").start(7) == "one"
    assert await double.options(id="one").run(7) == 14
    assert await double.options(id="one").start(7) == "one"
    assert len((await app.find_instances())["instances"]) == 1


async def test_the_same_id_with_other_arguments_is_a_conflict(app: EddaApp, double: Workflow[[int], int]) -> None:
    @workflow
    async def other(ctx: WorkflowContext, number: int) -> None: ...

    await double.options(id="one").run(7)
    with pytest.raises(InstanceConflictError, match="other arguments"):
        await double.options(id="one").start(8)
    with pytest.raises(InstanceConflictError, match="workflow double"):
        await other.options(id="one").start(7)
    assert await double.handle("one").result(timeout=20) == 14


async def test_one_id_started_by_two_apps_at_once_is_one_run(make_app: MakeApp) -> None:
    effects: list[int] = []

    @activity
    async def charge(ctx: WorkflowContext) -> int:
        effects.append(1)
        return len(effects)

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await charge(ctx)

    apps = [await make_app(), await make_app()]
    starter = order.options(id="the-order")
    ids = await asyncio.gather(*(app.start(starter) for app in apps * 10))
    assert set(ids) == {"the-order"}
    assert [await app.handle("the-order").result(timeout=20) for app in apps] == [1, 1]
    assert len(effects) == 1


@pytest.mark.parametrize("id", ["", "   ", "x" * 256, "é" * 128, "a\0b", "\ud800", 7])
def test_an_id_must_be_a_text_that_fits_its_column(id: Any, double: Workflow[[int], int]) -> None:
    with pytest.raises(ValueError, match="255"):
        double.options(id=id)


@pytest.mark.parametrize("options", [{"timeout": -1}, {"delay": -1}, {"timeout": "soon"}, {"delay": True}])
def test_times_must_be_numbers_that_are_not_negative(options: dict[str, Any], double: Workflow[[int], int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        double.options(**options)


async def test_nothing_is_stored_of_a_start_that_does_not_fit(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext, id: str, amount: float = 1.0, *, gift: bool = False) -> None: ...

    untyped: Any = order
    for arguments, options in (((), {}), (("A", "much"), {}), (("A",), {"gfit": True}), ((1, 2, 3), {}), ((3,), {})):
        with pytest.raises(ArgumentError):
            await app.start(untyped, *arguments, **options)
    with pytest.raises((ArgumentError, PayloadError)):
        await app.start(untyped, "A", float("nan"))
    assert (await app.find_instances())["instances"] == []


async def test_an_error_of_the_workflow_is_raised_by_run_and_by_result(app: EddaApp) -> None:
    @workflow
    async def broken(ctx: WorkflowContext) -> None:
        raise KeyError("order")

    with pytest.raises(KeyError, match="order"):
        await app.run(broken)
    run_id = await app.start(broken)
    with pytest.raises(KeyError, match="order"):
        await app.handle(run_id).result(timeout=20)
    assert await app.handle(run_id).status() is RunStatus.FAILED


async def test_a_run_that_nobody_started_is_not_found(app: EddaApp) -> None:
    handle = app.handle("nobody")
    for question in (handle.status, handle.result, handle.history, handle.cancel):
        with pytest.raises(InstanceNotFoundError, match="nobody"):
            await question()


async def test_a_client_without_a_worker_starts_and_waits(make_app: MakeApp, double: Workflow[[int], int]) -> None:
    client = await make_app(worker=False)
    run_id = await client.start(double, 4)
    assert await client.handle(run_id).status() is RunStatus.RUNNING
    await make_app()
    assert await client.handle(run_id).result(timeout=20) == 8


async def test_a_workflow_started_through_an_app_in_the_body_of_another_is_refused(app: EddaApp) -> None:
    @workflow
    async def child(ctx: WorkflowContext, number: int) -> int:
        return number + 1

    @activity
    async def ask_child(ctx: WorkflowContext, number: int) -> int:
        return await child.options(id=ctx.idempotency_key).run(number)

    @workflow
    async def parent(ctx: WorkflowContext) -> int:
        return await ask_child(ctx, 1)

    @workflow
    async def careless(ctx: WorkflowContext) -> str:
        return await app.start(child, 1)

    assert await app.run(parent) == 2
    with pytest.raises(NotInWorkflowError, match=r"use child\.start"):
        await app.run(careless)


async def test_an_app_asked_for_a_workflow_it_does_not_know_keeps_the_run_for_others(make_app: MakeApp) -> None:
    @workflow
    async def known(ctx: WorkflowContext) -> None: ...

    @workflow
    async def elsewhere(ctx: WorkflowContext) -> str:
        return "there"

    app = await make_app(workflows=[known])
    run_id = await app.start(elsewhere)
    await app.run(known)
    assert await app.handle(run_id).status() is RunStatus.RUNNING
    await make_app(workflows=[elsewhere])
    assert await app.handle(run_id).result(timeout=20) == "there"


async def test_a_cancelled_result_names_the_reason(app: EddaApp) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> None:
        await sleep(ctx, 3600)

    run_id = await app.start(nap)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    assert await app.cancel(run_id, "changed my mind")
    with pytest.raises(WorkflowCancelledError, match="changed my mind"):
        await app.handle(run_id).result(timeout=20)


def test_errors_that_users_meet_are_workflow_errors() -> None:
    assert issubclass(ArgumentError, WorkflowError)
    assert issubclass(ArgumentError, TypeError)
    assert issubclass(UnknownWorkflowError, LookupError)
