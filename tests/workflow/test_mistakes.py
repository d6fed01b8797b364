"""Mistakes as users write them: each error names the thing, says what was expected, and what to write."""

from __future__ import annotations

import asyncio
import builtins
import re
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from edda import (
    EddaApp,
    HooksBase,
    RetryExhaustedError,
    RetryPolicy,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    publish,
    receive,
    register_compensation,
    send_event,
    sleep,
    sleep_until,
    wait_any,
    wait_event,
    workflow,
)
from edda.engine.settings import Settings
from edda.errors import (
    AppError,
    ArgumentError,
    InstanceConflictError,
    InstanceNotFoundError,
    NotAwaitedError,
    NotInWorkflowError,
    PayloadError,
    StorageUnavailableError,
)
from edda.workflow.workflow import registry

T = TypeVar("T")

Mistake = Callable[[], Awaitable[object]]
MISTAKES: list[Any] = []


def mistake(error: type[BaseException], *words: str) -> Callable[[Mistake], Mistake]:
    """What it raises, and what its message contains."""

    def add(make: Mistake) -> Mistake:
        MISTAKES.append(pytest.param(make, error, words, id=make.__name__))
        return make

    return add


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_workflows", {})


@activity
async def charge(ctx: WorkflowContext, amount: float) -> str:
    return "paid"


def untyped(thing: Any) -> Any:
    """What a type checker would refuse; many users have none."""
    return thing


def misused(decorator: Any) -> Callable[[T], T]:
    """A decorator that is put where it does not belong."""
    return cast(Callable[[T], T], decorator)


async def run(body: Callable[[WorkflowContext], Awaitable[object]]) -> object:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return await body(ctx)

    async with EddaApp("shop", "memory://") as app:
        return await app.run(order)


# Without the context


@mistake(NotInWorkflowError, "charge()", "context", "await charge(ctx, amount)", "@workflow")
async def an_activity_outside_of_any_workflow() -> object:
    return await charge(untyped(None), 9.5)


@mistake(NotInWorkflowError, "charge()", "got 9.5", "await charge(ctx, amount)")
async def an_activity_without_its_context() -> object:
    return await run(lambda ctx: untyped(charge)(9.5))


@mistake(NotInWorkflowError, "charge()", "await charge(ctx, amount)")
async def an_activity_without_any_argument() -> object:
    return await run(lambda ctx: untyped(charge)())


@mistake(ArgumentError, "charge()", "'amount'", "do not pass the context")
async def an_activity_with_its_context_twice() -> object:
    return await run(lambda ctx: untyped(charge)(ctx, ctx, 9.5))


@mistake(NotInWorkflowError, "sleep()", "got 5", "await sleep(ctx, seconds)")
async def a_sleep_without_the_context() -> object:
    return await run(lambda ctx: untyped(sleep)(5))


@mistake(NotInWorkflowError, "wait_event()", "got 'paid'", "await wait_event(ctx, event_type)")
async def a_wait_without_the_context() -> object:
    return await run(lambda ctx: untyped(wait_event)("paid"))


@mistake(NotInWorkflowError, "sleep_until()", "await sleep_until(ctx, target_time)")
async def a_sleep_until_without_the_context() -> object:
    return await run(lambda ctx: untyped(sleep_until)(datetime.now()))


@mistake(NotInWorkflowError, "register_compensation()", "ctx, undo")
async def a_compensation_without_the_context() -> object:
    return untyped(register_compensation)(charge, 9.5)


@mistake(ArgumentError, "order()", "'n'", "got 2")
async def a_start_with_the_context() -> object:
    @workflow
    async def order(ctx: WorkflowContext, n: int) -> None: ...

    async with EddaApp("shop", "memory://"):
        return await untyped(order).start(None, 3)


# In the wrong place


@mistake(NotInWorkflowError, "charge()", "in the activity outer:1", "charge.fn", "in the workflow")
async def an_activity_in_an_activity() -> object:
    @activity
    async def outer(ctx: WorkflowContext) -> str:
        return await charge(ctx, 9.5)

    return await run(lambda ctx: outer(ctx))


@mistake(NotInWorkflowError, "sleep()", "in the activity rest:1", "await sleep(ctx, seconds)")
async def a_sleep_in_an_activity() -> object:
    @activity
    async def rest(ctx: WorkflowContext) -> None:
        await sleep(ctx, 1)

    return await run(lambda ctx: rest(ctx))


@mistake(NotInWorkflowError, "wait_event()", "in the activity look:1", "in the workflow")
async def a_wait_in_an_activity() -> object:
    @activity
    async def look(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid")

    return await run(lambda ctx: look(ctx))


@mistake(NotInWorkflowError, "ctx.attempt", "in an activity only")
async def the_attempt_in_a_workflow() -> object:
    async def body(ctx: WorkflowContext) -> int:
        return ctx.attempt

    return await run(body)


@mistake(NotInWorkflowError, "ctx.recur()", "in the code of the workflow")
async def a_recurrence_in_an_activity() -> object:
    @activity
    async def again(ctx: WorkflowContext) -> None:
        await ctx.recur()

    return await run(lambda ctx: again(ctx))


@mistake(TypeError, "order is a workflow", "await order.start(...)", "await order.run(...)")
async def a_workflow_that_is_called() -> object:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    return await untyped(order)()


@mistake(AttributeError, "charge is an activity", ".run", "await charge(ctx, amount)")
async def an_activity_that_is_run() -> object:
    return await untyped(charge).run(9.5)


# Without await


def line_of(needle: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return str(1 + next(number for number, line in enumerate(lines) if needle in line and "line_of" not in line))


@mistake(NotAwaitedError, "charge:1", f"{__file__}:{line_of('# first forgotten')}", "write `await`")
async def a_forgotten_await() -> object:
    async def body(ctx: WorkflowContext) -> str:
        untyped(charge)(ctx, 9.5)  # first forgotten
        return "shipped"

    return await run(body)


@mistake(NotAwaitedError, "sleep:1", f"{__file__}:", "await")
async def a_forgotten_await_of_a_sleep() -> object:
    async def body(ctx: WorkflowContext) -> None:
        untyped(sleep)(ctx, 1)

    return await run(body)


@mistake(NotAwaitedError, "paid:1", f"{__file__}:", "await")
async def a_forgotten_await_of_an_event() -> object:
    async def body(ctx: WorkflowContext) -> None:
        untyped(wait_event)(ctx, "paid")

    return await run(body)


@mistake(NotAwaitedError, "send_event:1", f"{__file__}:", "await")
async def a_forgotten_await_of_a_send() -> object:
    async def body(ctx: WorkflowContext) -> None:
        untyped(send_event)("paid", "/bank", {})

    return await run(body)


@mistake(NotAwaitedError, "publish:1", "await")
async def a_forgotten_await_of_a_publish() -> object:
    async def body(ctx: WorkflowContext) -> None:
        untyped(publish)(ctx, "news", {})

    return await run(body)


@mistake(NotAwaitedError, "__direct__:1", "await")
async def a_forgotten_await_of_a_receive() -> object:
    async def body(ctx: WorkflowContext) -> None:
        untyped(receive)(ctx, "__direct__")

    return await run(body)


@mistake(NotAwaitedError, "parcel:1", f"{__file__}:", "await")
async def a_forgotten_await_of_a_child() -> object:
    @workflow
    async def parcel(ctx: WorkflowContext) -> None: ...

    async def body(ctx: WorkflowContext) -> None:
        untyped(parcel).start()

    return await run(body)


@mistake(NotAwaitedError, "note:1", "await")
async def a_forgotten_await_of_an_inline_step() -> object:
    async def body(ctx: WorkflowContext) -> None:
        untyped(ctx).step("note", print)

    return await run(body)


@mistake(NotAwaitedError, "charge:1", "await")
async def a_forgotten_await_of_what_is_returned() -> object:
    async def body(ctx: WorkflowContext) -> object:
        return charge(ctx, 9.5)

    return await run(body)


@mistake(PayloadError, "$.amount", "coroutine", "await it first")
async def a_forgotten_await_of_what_is_passed_on() -> object:
    return await run(lambda ctx: untyped(charge)(ctx, charge(ctx, 9.5)))


@mistake(TypeError, "handle(", "expected the id of a run", "await order.start(...)")
async def a_forgotten_await_of_a_start() -> object:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    async with EddaApp("shop", "memory://") as app:
        return await app.handle(untyped(order.start())).result()


@mistake(TypeError, "app.start", "got a coroutine", "app.start(order, ...)")
async def a_start_of_a_start() -> object:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    async with EddaApp("shop", "memory://") as app:
        return await app.start(untyped(order.start()))


# What is decorated


@mistake(TypeError, "@workflow", "`async def`", "async def order(ctx, ...)")
async def a_workflow_that_is_not_async() -> object:
    @misused(workflow)
    def order(ctx: WorkflowContext) -> None: ...

    return order


@mistake(TypeError, "@workflow", "Order is a class", "decorate a function")
async def a_workflow_that_is_a_class() -> object:
    @misused(workflow)
    class Order: ...

    return Order


@mistake(TypeError, "@workflow", "<lambda>", "async def")
async def a_workflow_that_is_a_lambda() -> object:
    return untyped(workflow)(lambda ctx: None)


@mistake(TypeError, "@workflow", "order is a generator", "return")
async def a_workflow_that_yields() -> object:
    @misused(workflow)
    async def order(ctx: WorkflowContext) -> Any:
        yield 1

    return order


@mistake(TypeError, "@activity", "lines is a generator", "list")
async def an_activity_that_yields() -> object:
    @misused(activity)
    def lines(ctx: WorkflowContext) -> Any:
        yield 1

    return lines


@mistake(TypeError, "@workflow", "Shop.order is a method", "a function of the module")
async def a_workflow_that_is_a_method() -> object:
    class Shop:
        @misused(workflow)
        async def order(self, ctx: WorkflowContext) -> None: ...

    return Shop


@mistake(TypeError, "@activity", "Shop.pay is a method", "a function of the module")
async def an_activity_that_is_a_method() -> object:
    class Shop:
        @misused(activity)
        async def pay(self, ctx: WorkflowContext) -> None: ...

    return Shop


@mistake(TypeError, "@activity", "A is a class", "decorate a function")
async def an_activity_that_is_a_class() -> object:
    @misused(activity)
    class A: ...

    return A


@mistake(TypeError, "@workflow", "order is a workflow already")
async def a_workflow_that_is_decorated_twice() -> object:
    @misused(workflow)
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    return order


@mistake(TypeError, "@workflow", "pay is an activity already")
async def a_workflow_that_is_an_activity() -> object:
    @misused(workflow)
    @activity
    async def pay(ctx: WorkflowContext) -> None: ...

    return pay


@mistake(TypeError, "@activity", "order is a workflow already")
async def an_activity_that_is_a_workflow() -> object:
    @misused(activity)
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    return order


@mistake(TypeError, "@workflow('order')", "@workflow(name='order')")
async def a_workflow_whose_name_has_no_keyword() -> object:
    return untyped(workflow)("order")


@mistake(TypeError, "@activity('pay')", "@activity(name='pay')")
async def an_activity_whose_name_has_no_keyword() -> object:
    return untyped(activity)("pay")


@mistake(TypeError, "@workflow(name=5)", "expected a text")
async def a_name_that_is_a_number() -> object:
    @misused(untyped(workflow)(name=5))
    async def order(ctx: WorkflowContext) -> None: ...

    return order


@mistake(ArgumentError, "order()", "context", "def order(ctx, ...)")
async def a_workflow_without_parameters() -> object:
    @misused(workflow)
    async def order() -> None: ...

    return order


@mistake(ArgumentError, "order()", "'amount', int", "def order(ctx: WorkflowContext, amount: int, ...)")
async def a_workflow_without_its_context() -> object:
    @misused(workflow)
    async def order(amount: int) -> None: ...

    return order


@mistake(ArgumentError, "pay()", "'amount', float", "def pay(ctx: WorkflowContext")
async def an_activity_without_a_place_for_its_context() -> object:
    @misused(activity)
    async def pay(amount: float) -> None: ...

    return pay


@mistake(ValueError, "'order'", "shop.orders", "shop.returns", "@workflow(name=...)")
async def two_workflows_of_one_name() -> object:
    async def first(ctx: WorkflowContext) -> None: ...

    async def second(ctx: WorkflowContext) -> None: ...

    first.__module__, second.__module__ = "shop.orders", "shop.returns"
    workflow(name="order")(first)
    return workflow(name="order")(second)


@mistake(TypeError, "@on_failure", "@on_failure(refund)")
async def an_undo_that_is_not_given() -> object:
    @misused(activity)
    @misused(on_failure)
    async def pay(ctx: WorkflowContext) -> None: ...

    return pay


@mistake(TypeError, "@on_failure", "under @activity", "pay")
async def an_undo_above_its_activity() -> object:
    @misused(untyped(on_failure)(charge))
    @activity
    async def pay(ctx: WorkflowContext, amount: float) -> None: ...

    return pay


@mistake(TypeError, "register_compensation", "register_compensation(ctx, refund, amount)")
async def a_compensation_that_was_called() -> object:
    async def body(ctx: WorkflowContext) -> None:
        register_compensation(ctx, untyped(charge(ctx, 9.5)))

    return await run(body)


# Options


@mistake(TypeError, "@workflow()", "'nmae'", "did you mean 'name'?")
async def a_typo_in_an_option_of_workflow() -> object:
    return untyped(workflow)(nmae="order")


@mistake(TypeError, "@activity()", "'retry_polcy'", "did you mean 'retry_policy'?")
async def a_typo_in_an_option_of_activity() -> object:
    return untyped(activity)(retry_polcy=None)


@mistake(TypeError, "@compensation()", "'nme'", "did you mean 'name'?")
async def a_typo_in_an_option_of_compensation() -> object:
    return untyped(compensation)(nme="refund")


@mistake(TypeError, "options()", "'timout'", "did you mean 'timeout'?")
async def a_typo_in_a_start_option() -> object:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    return untyped(order).options(timout=5)


@mistake(TypeError, "wait_event()", "'timeout'", "did you mean 'timeout_seconds'?")
async def a_typo_in_an_option_of_a_wait() -> object:
    return await run(lambda ctx: untyped(wait_event)(ctx, "paid", timeout=5))


@mistake(TypeError, "EddaApp()", "'pool_sise'", "did you mean 'pool_size'?")
async def a_typo_in_an_option_of_the_app() -> object:
    return EddaApp("shop", "memory://", pool_sise=5)


@mistake(TypeError, "EddaApp()", "'zebra'", "auto_migrate", "workflows")
async def an_option_that_resembles_none() -> object:
    return EddaApp("shop", "memory://", zebra=5)


@mistake(TypeError, "Settings()", "'leese'", "did you mean 'lease'?")
async def a_typo_in_a_setting() -> object:
    return untyped(Settings)(leese=5)


@mistake(TypeError, "RetryPolicy()", "'max_attemps'", "did you mean 'max_attempts'?")
async def a_typo_in_a_retry_policy() -> object:
    return untyped(RetryPolicy)(max_attemps=5)


@mistake(TypeError, "@activity(retry_policy=3)", "RetryPolicy(max_attempts=3)")
async def a_retry_policy_that_is_a_number() -> object:
    @misused(untyped(activity)(retry_policy=3))
    async def pay(ctx: WorkflowContext) -> None: ...

    return pay


@mistake(TypeError, "settings", "Settings(lease=30)")
async def settings_that_are_a_dictionary() -> object:
    return EddaApp("shop", "memory://", settings=untyped({"lease": 5}))


@mistake(TypeError, "hooks=HooksBase", "hooks=HooksBase()")
async def hooks_that_are_a_class() -> object:
    return EddaApp("shop", "memory://", hooks=untyped(HooksBase))


@mistake(TypeError, "workflows", "'order'", "functions themselves")
async def workflows_that_are_names() -> object:
    return EddaApp("shop", "memory://", workflows=untyped(["order"]))


@mistake(TypeError, "EddaApp(workflows=order)", "expected a list of workflows: [order]")
async def a_workflow_in_the_place_of_a_list() -> object:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    return EddaApp("shop", "memory://", workflows=untyped(order))


@mistake(ValueError, "order.options(timeout=)", "not negative", "-5")
async def a_negative_timeout() -> object:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    return order.options(timeout=-5)


@mistake(ValueError, "order.options(id=5)", "expected a text")
async def an_id_that_is_a_number() -> object:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    return order.options(id=untyped(5))


# Arguments


@mistake(ArgumentError, "order()", "needs 'n'")
async def a_missing_argument() -> object:
    @workflow
    async def order(ctx: WorkflowContext, n: int) -> None: ...

    async with EddaApp("shop", "memory://"):
        return await untyped(order).start()


@mistake(ArgumentError, "order()", "'amuont'", "did you mean 'amount'?")
async def a_typo_in_an_argument() -> object:
    @workflow
    async def order(ctx: WorkflowContext, amount: int) -> None: ...

    async with EddaApp("shop", "memory://"):
        return await untyped(order).start(amuont=3)


@mistake(ArgumentError, "order()", "'amount'", "expected int", "str")
async def an_argument_of_another_type() -> object:
    @workflow
    async def order(ctx: WorkflowContext, amount: int) -> None: ...

    async with EddaApp("shop", "memory://"):
        return await untyped(order).start(amount="three")


@mistake(PayloadError, "$.x.k[1]", "object", "plain data")
async def an_argument_that_cannot_be_stored() -> object:
    @activity
    async def pay(ctx: WorkflowContext, x: Any) -> None: ...

    return await run(lambda ctx: pay(ctx, {"k": [1, object()]}))


@mistake(PayloadError, "the result of pay:1", "$.k", "object", "plain data")
async def a_result_that_cannot_be_stored() -> object:
    @activity
    async def pay(ctx: WorkflowContext) -> Any:
        return {"k": object()}

    return await run(lambda ctx: pay(ctx))


@mistake(ValueError, "sleep(ctx, seconds)", "not negative", "-1")
async def a_negative_sleep() -> object:
    return await run(lambda ctx: sleep(ctx, -1))


@mistake(ValueError, "sleep_until(ctx, target_time)", "no time zone", "ctx.now() + timedelta")
async def a_moment_without_a_time_zone() -> object:
    return await run(lambda ctx: sleep_until(ctx, datetime(2030, 1, 1)))


@mistake(ValueError, "wait_event(timeout_seconds=)", "not negative", "-5")
async def a_negative_timeout_of_a_wait() -> object:
    return await run(lambda ctx: wait_event(ctx, "paid", timeout_seconds=-5))


@mistake(ValueError, "wait_event(event_type=5)", "expected a text")
async def an_event_type_that_is_a_number() -> object:
    return await run(lambda ctx: untyped(wait_event)(ctx, 5))


@mistake(TypeError, "wait_any(ctx, ...)", "0 is", "wait_event(ctx, ...)")
async def a_race_of_functions() -> object:
    return await run(lambda ctx: untyped(wait_any)(ctx, sleep))


@mistake(InstanceConflictError, "'A-17'", "other arguments", "another id")
async def an_id_that_is_taken() -> object:
    @workflow
    async def order(ctx: WorkflowContext, n: int) -> None: ...

    async with EddaApp("shop", "memory://"):
        await order.options(id="A-17").start(1)
        return await order.options(id="A-17").start(2)


@mistake(RetryExhaustedError, "pay:1", "2 times", "ValueError: a long explanation", "and its end")
async def an_error_whose_end_matters() -> object:
    @activity(retry_policy=RetryPolicy(max_attempts=2, initial_interval=0.0))
    async def pay(ctx: WorkflowContext) -> None:
        raise ValueError("a long explanation, " * 20 + "and its end")

    return await run(lambda ctx: pay(ctx))


# Apps


@mistake(TypeError, "app.start('order')", "expected a workflow", "@workflow")
async def a_start_by_name() -> object:
    async with EddaApp("shop", "memory://") as app:
        return await app.start(untyped("order"))


@mistake(TypeError, "app.run(charge)", "expected a workflow", "an activity")
async def a_run_of_an_activity() -> object:
    async with EddaApp("shop", "memory://") as app:
        return await app.run(untyped(charge), 9.5)


@mistake(AppError, "'shop'", "is not started", "async with app", "await app.initialize()")
async def an_app_that_is_not_started() -> object:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    return await EddaApp("shop", "memory://").start(order)


@mistake(AppError, "'shop'", "was shut down", "async with app")
async def an_app_that_was_shut_down() -> object:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    async with EddaApp("shop", "memory://") as app:
        pass
    return await app.start(order)


@mistake(AppError, "2 EddaApps", "app.start(workflow, ...)")
async def two_apps_and_a_start_that_names_none() -> object:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    async with EddaApp("shop", "memory://"), EddaApp("bank", "memory://"):
        return await order.start()


@mistake(ValueError, "EddaApp('sqlite:///shop.db')", "name of the service", 'EddaApp("shop"')
async def a_url_in_the_place_of_the_name() -> object:
    return EddaApp("sqlite:///shop.db")


@mistake(ValueError, "'shop.db'", "sqlite:///file.db")
async def a_file_in_the_place_of_the_url() -> object:
    return EddaApp("shop", "shop.db")


@mistake(ValueError, "'oracle://db/x'", "postgresql://", "memory://")
async def a_database_that_is_not_known() -> object:
    return EddaApp("shop", "oracle://db/x")


@mistake(StorageUnavailableError, "the folder /no/such/folder does not exist", "make it", "sqlite:///")
async def a_folder_that_does_not_exist() -> object:
    async with EddaApp("shop", "sqlite:////no/such/folder/shop.db"):
        return None


@mistake(StorageUnavailableError, "/tmp", "cannot be opened as a SQLite database")
async def a_folder_as_a_database() -> object:
    async with EddaApp("shop", "sqlite:////tmp"):
        return None


@mistake(TypeError, "'shop'", "`async with app:`")
async def a_with_that_is_not_async() -> object:
    with untyped(EddaApp("shop", "memory://")):
        return None


@mistake(InstanceNotFoundError, "'nope'")
async def a_run_that_does_not_exist() -> object:
    async with EddaApp("shop", "memory://") as app:
        return await app.handle("nope").result()


@mistake(ValueError, "find_instances(status='runing')", "did you mean 'running'?")
async def a_typo_in_a_status() -> object:
    async with EddaApp("shop", "memory://") as app:
        return await app.find_instances(status="runing")


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize(("make", "error", "words"), MISTAKES)
async def test_a_mistake_is_told_by_its_name_what_was_expected_and_what_to_write(
    make: Mistake, error: type[BaseException], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as raised:
        await asyncio.wait_for(make(), 30)
    message = str(raised.value)
    assert type(raised.value) is error
    for word in words:
        assert word in message
    for internal in ("NoneType", "_await_command", "has no attribute 'codec'", "object is not callable"):
        assert internal not in message


def test_an_app_is_used_on_the_loop_that_it_was_started_on() -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    app = EddaApp("shop", "memory://")
    try:
        asyncio.run(app.initialize())
        with pytest.raises(AppError, match=r"'shop' was started on another event loop.*asyncio\.run.*async with app"):
            asyncio.run(app.start(order))
    finally:
        app.kill()


@pytest.mark.parametrize(
    ("url", "driver", "extra"),
    [("postgresql://db/shop", "asyncpg", "postgres"), ("mysql://db/shop", "asyncmy", "mysql")],
)
def test_a_missing_driver_is_told_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, url: str, driver: str, extra: str
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] == driver:
            raise ModuleNotFoundError(f"No module named {driver!r}", name=driver)
        return real(name, *args, **options)

    for name in [name for name in sys.modules if re.match(rf"edda\.storage\.{extra}|{driver}", name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(AppError, match=re.escape(f"pip install 'edda-framework[{extra}]'")) as raised:
        EddaApp("shop", url)
    assert driver in str(raised.value)


async def test_a_run_that_forgot_an_await_undoes_what_it_did() -> None:
    undone: list[str] = []

    @compensation
    async def refund(ctx: WorkflowContext) -> None:
        undone.append("refund")

    async def body(ctx: WorkflowContext) -> None:
        register_compensation(ctx, refund)
        untyped(charge)(ctx, 9.5)

    with pytest.raises(NotAwaitedError, match="charge:1"):
        await run(body)
    assert undone == ["refund"]


async def test_coroutines_that_tasks_were_made_of_are_not_forgotten() -> None:
    """Cancelled before their first turn, closed by hand, or left over when another error ends the run."""

    async def cancelled(ctx: WorkflowContext) -> str:
        task = asyncio.create_task(charge(ctx, 9.5))
        task.cancel()
        await asyncio.wait([task])
        return "fine"

    async def closed(ctx: WorkflowContext) -> str:
        charge(ctx, 9.5).close()
        return "fine"

    async def raced(ctx: WorkflowContext) -> str:
        first = await wait_any(ctx, charge(ctx, 9.5), sleep(ctx, 60))
        return "fine" if first.value == "paid" else "late"

    for body in (cancelled, closed, raced):
        assert await run(body) == "fine"

    async def failed(ctx: WorkflowContext) -> None:
        untyped(charge)(ctx, 9.5)
        raise KeyError("price")

    with pytest.raises(KeyError, match="price"):
        await run(failed)


def test_two_workflows_of_one_name_in_a_module_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def first(ctx: WorkflowContext) -> None: ...

    async def second(ctx: WorkflowContext) -> None: ...

    workflow(name="order")(first)
    workflow(name="order")(second)
    assert not caplog.messages, "functions inside of functions may be made at each call"
    first.__qualname__, second.__qualname__ = "first", "second"
    workflow(name="refund")(first)
    workflow(name="refund")(first)
    assert not caplog.messages, "the same function again: its module was reloaded"
    workflow(name="refund")(second)
    (message,) = caplog.messages
    assert "'refund'" in message
    assert "first is replaced by second" in message
    assert "@workflow(name=...)" in message


async def test_the_cause_of_exhausted_retries_is_whole() -> None:
    with pytest.raises(RetryExhaustedError) as raised:
        await an_error_whose_end_matters()
    cause = raised.value.__cause__
    assert isinstance(cause, ValueError)
    assert str(cause).endswith("and its end")
