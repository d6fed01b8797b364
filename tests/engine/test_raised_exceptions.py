"""Whatever the user's code raises, and wherever: the run ends, or goes on, as the table says."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from edda import (
    CompensationError,
    EddaApp,
    Happened,
    HooksBase,
    RetryExhaustedError,
    RetryPolicy,
    RunStatus,
    WorkflowCancelledError,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    workflow,
)
from edda.errors import ActivityCancelledError, RemoteError
from tests.conftest import Database, MakeDatabase

from .conditions import until
from .conftest import MakeApp

TWICE = RetryPolicy(max_attempts=2, initial_interval=0.0)


def cancel_this_task() -> None:
    """As a cancel scope does that was left open."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def await_cancelled_task() -> None:
    task = asyncio.create_task(asyncio.sleep(30))
    await asyncio.sleep(0)
    task.cancel()
    await task


def recurse() -> None:
    recurse()


def raiser(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def stop_iteration() -> None:
    next(iter(()))


@dataclass(frozen=True)
class Case:
    """What happens in the user's code, and what it comes to."""

    act: Callable[[], Any]
    step: type[BaseException]
    """What the workflow catches from an activity that does it."""
    run: type[BaseException]
    """What `result()` raises if the workflow's own code does it."""
    attempts: int = 2
    """How often an activity is tried that may be tried twice."""
    cause: type[BaseException] | None = None
    needs_loop: bool = False


RETRIED = RetryExhaustedError
CASES = {
    "CancelledError": Case(
        raiser(asyncio.CancelledError()), RETRIED, WorkflowCancelledError, cause=ActivityCancelledError
    ),
    "cancels its own task": Case(
        cancel_this_task, RETRIED, WorkflowCancelledError, cause=ActivityCancelledError, needs_loop=True
    ),
    "awaits a cancelled task": Case(
        await_cancelled_task, RETRIED, WorkflowCancelledError, cause=ActivityCancelledError, needs_loop=True
    ),
    "TimeoutError": Case(raiser(TimeoutError("slow")), RETRIED, TimeoutError, cause=TimeoutError),
    "GeneratorExit": Case(raiser(GeneratorExit()), RemoteError, RemoteError, attempts=1),
    "SystemExit": Case(lambda: sys.exit(3), RemoteError, RemoteError, attempts=1),
    "BaseExceptionGroup": Case(
        raiser(BaseExceptionGroup("several", [SystemExit(1), ValueError("a")])),
        ExceptionGroup,
        ExceptionGroup,
        attempts=1,
    ),
    "StopIteration": Case(stop_iteration, RETRIED, RuntimeError, cause=RuntimeError),
    "StopAsyncIteration": Case(raiser(StopAsyncIteration()), RETRIED, StopAsyncIteration, cause=StopAsyncIteration),
    "RecursionError": Case(recurse, RETRIED, RecursionError, cause=RecursionError),
    "MemoryError": Case(raiser(MemoryError()), RETRIED, MemoryError, cause=MemoryError),
}


async def do(case: Case) -> None:
    acted = case.act()
    if acted is not None:
        await acted
    if case.needs_loop:
        await asyncio.sleep(0)  # where a cancel is met


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = CASES[request.param]
    return found


@pytest.fixture(params=("memory", "sqlite"))
def place(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    return make_database(request.param)


async def check_step(app: EddaApp, case: Case, step: Any, tries: list[int]) -> None:
    caught: list[BaseException] = []

    @workflow
    async def call(ctx: WorkflowContext) -> str:
        try:
            await step(ctx)
        except Exception as error:
            caught.append(error)
        return "went on"

    assert await asyncio.wait_for(app.run(call), 30) == "went on"
    assert isinstance(caught[-1], case.step), repr(caught[-1])
    assert case.cause is None or isinstance(caught[-1].__cause__, case.cause), repr(caught[-1].__cause__)
    assert len(tries) == case.attempts


async def test_in_an_async_activity(place: Database, make_app_on: MakeApp, case: Case) -> None:
    app, tries = await make_app_on(on=place), list[int]()

    @activity(retry_policy=TWICE)
    async def step(ctx: WorkflowContext) -> None:
        tries.append(ctx.attempt)
        await do(case)

    await check_step(app, case, step, tries)


async def test_in_an_activity_in_a_thread(place: Database, make_app_on: MakeApp, case: Case) -> None:
    if case.needs_loop:
        pytest.skip("a thread has no task")
    app, tries = await make_app_on(on=place), list[int]()

    @activity(retry_policy=TWICE)
    def step(ctx: WorkflowContext) -> None:
        tries.append(ctx.attempt)
        case.act()

    await check_step(app, case, step, tries)


async def test_in_an_inline_step(place: Database, make_app_on: MakeApp, case: Case) -> None:
    app, tries = await make_app_on(on=place, default_retry_policy=TWICE), list[int]()

    async def body() -> None:
        tries.append(1)
        await do(case)

    await check_step(app, case, lambda ctx: ctx.step("inline", body), tries)


@pytest.mark.parametrize("use", ["session", "transaction"])
@pytest.mark.databases("sqlite")
async def test_in_a_transaction_of_an_activity(
    use: str, make_database: MakeDatabase, make_app_on: MakeApp, case: Case
) -> None:
    from sqlalchemy import text

    app, tries = await make_app_on(on=make_database("sqlite")), list[int]()

    @activity(retry_policy=TWICE)
    async def step(ctx: WorkflowContext) -> None:
        tries.append(ctx.attempt)
        if use == "session":
            await ctx.session.execute(text("CREATE TABLE IF NOT EXISTS paid (id int)"))
            await do(case)
        else:
            async with ctx.transaction():
                await do(case)

    await check_step(app, case, step, tries)


async def test_in_a_reconcile_function(place: Database, make_app_on: MakeApp, case: Case) -> None:
    app, tries = await make_app_on(on=place), list[int]()

    async def ask(ctx: WorkflowContext) -> Happened[None] | None:
        await do(case)
        return None

    @activity(retry_policy=TWICE, reconcile=ask)
    async def step(ctx: WorkflowContext) -> None:
        tries.append(ctx.attempt)
        raise ConnectionError("no answer")

    caught: list[BaseException] = []

    @workflow
    async def call(ctx: WorkflowContext) -> None:
        try:
            await step(ctx)
        except Exception as error:
            caught.append(error)

    await asyncio.wait_for(app.run(call), 30)
    assert tries == [1], "the second attempt asks first"
    assert isinstance(caught[-1], case.step), repr(caught[-1])


async def test_in_the_code_of_a_workflow(place: Database, make_app_on: MakeApp, case: Case) -> None:
    app = await make_app_on(on=place)

    @workflow
    async def fail(ctx: WorkflowContext) -> None:
        await do(case)

    run_id = await app.start(fail)
    with pytest.raises(case.run):
        await app.handle(run_id).result(timeout=30)
    is_cancelled = case.run is WorkflowCancelledError
    assert await app.handle(run_id).status() is (RunStatus.CANCELLED if is_cancelled else RunStatus.FAILED)


async def test_in_a_workflow_that_an_event_starts(place: Database, make_app_on: MakeApp, case: Case) -> None:
    @workflow(name="order.paid", event_handler=True)
    async def paid(ctx: WorkflowContext) -> None:
        await do(case)

    app = await make_app_on(on=place)
    await app.send_event("order.paid", "/shop", {})
    found = (await app.find_instances(workflow_name="order.paid"))["instances"]
    with pytest.raises(case.run):
        await app.handle(found[0]["instance_id"]).result(timeout=30)


async def test_in_a_compensation(place: Database, make_app_on: MakeApp, case: Case) -> None:
    app, tries = await make_app_on(on=place, default_retry_policy=TWICE), list[int]()

    @compensation
    async def refund(ctx: WorkflowContext) -> None:
        tries.append(ctx.attempt)
        await do(case)

    @activity
    @on_failure(refund)
    async def charge(ctx: WorkflowContext) -> None:
        pass

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx)
        raise LookupError("sold out")

    run_id = await app.start(order)
    with pytest.raises(CompensationError):
        await app.handle(run_id).result(timeout=30)
    assert len(tries) == case.attempts


async def test_in_a_hook(place: Database, make_app_on: MakeApp, case: Case, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    class Hooks(HooksBase):
        def watch_attempt(self, attempt: Any) -> None:
            if not case.needs_loop:
                case.act()

        async def on_workflow_start(self, instance_id: str, workflow_name: str, input_data: dict[str, Any]) -> None:
            await do(case)

        async def on_workflow_complete(self, instance_id: str, workflow_name: str, result: Any) -> None:
            told.append(result)

    app = await make_app_on(on=place, hooks=Hooks())

    @activity
    async def step(ctx: WorkflowContext) -> str:
        return "done"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await step(ctx)

    with caplog.at_level(logging.CRITICAL + 1, logger="edda"):
        assert await asyncio.wait_for(app.run(order), 30) == "done"
        await until(lambda: told == ["done"], "the hooks after it were called")


async def test_a_keyboard_interrupt_in_a_thread_is_an_error_of_the_activity(app: EddaApp) -> None:
    """Ctrl-C interrupts the main thread: in another one only the activity's own code can raise it."""

    @activity(retry_policy=TWICE)
    def step(ctx: WorkflowContext) -> None:
        raise KeyboardInterrupt

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        with suppress(RetryExhaustedError):
            await step(ctx)
        return "went on"

    assert await asyncio.wait_for(app.run(order), 30) == "went on"
