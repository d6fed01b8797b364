"""Reconciling: before an effect is repeated, the activity can ask whether it happened already."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from edda import (
    EddaApp,
    Happened,
    HooksBase,
    RetryExhaustedError,
    RetryPolicy,
    WorkflowContext,
    activity,
    send_event,
    wait_event,
    workflow,
)
from edda.core.model import EntryKind

from .conditions import until
from .conftest import MORTAL, MakeApp

on_two_databases = pytest.mark.parametrize("database", ["memory", "sqlite"], indirect=True)

AT_ONCE = RetryPolicy(initial_interval=0.0, max_attempts=4)


class Bank:
    """A service that books what it is asked to, and may fail to say so."""

    def __init__(self) -> None:
        self.booked: dict[str, int] = {}
        self.asked: list[str] = []

    def book(self, key: str, amount: int) -> str:
        self.booked[key] = self.booked.get(key, 0) + amount
        return f"receipt for {amount}"

    def find(self, key: str) -> Happened[str] | None:
        self.asked.append(key)
        return Happened(f"receipt for {self.booked[key]}") if key in self.booked else None


@pytest.fixture
def bank() -> Bank:
    return Bank()


@on_two_databases
@pytest.mark.parametrize("in_thread", [False, True])
async def test_an_effect_that_happened_is_not_repeated(app: EddaApp, bank: Bank, in_thread: bool) -> None:
    def find(ctx: WorkflowContext, amount: int) -> Happened[str] | None:
        assert (threading.current_thread() is not threading.main_thread()) is in_thread
        return bank.find(ctx.idempotency_key)

    async def find_on_the_loop(ctx: WorkflowContext, amount: int) -> Happened[str] | None:
        return find(ctx, amount)

    @activity(retry_policy=AT_ONCE, reconcile=find if in_thread else find_on_the_loop)
    async def charge(ctx: WorkflowContext, amount: int) -> str:
        bank.book(ctx.idempotency_key, amount)
        raise ConnectionError("booked, but the answer was lost")

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await charge(ctx, 7)

    run_id = await app.start(order)
    assert await app.handle(run_id).result(timeout=20) == "receipt for 7"
    assert len(bank.asked) == 1, "not before the first attempt"
    entries = await app.handle(run_id).history()
    assert [(entry.kind, entry.attempt) for entry in entries] == [(EntryKind.RETRY, 1), (EntryKind.STEP, 2)]


@on_two_databases
async def test_an_effect_that_did_not_happen_is_tried_again(app: EddaApp, bank: Bank) -> None:
    @activity(retry_policy=AT_ONCE, reconcile=lambda ctx, amount: bank.find(ctx.idempotency_key))
    async def charge(ctx: WorkflowContext, amount: int) -> str:
        if ctx.attempt < 3:
            raise ConnectionError("nothing was booked")
        return bank.book(ctx.idempotency_key, amount)

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await charge(ctx, amount=7)

    assert await app.run(order) == "receipt for 7"
    assert len(bank.asked) == 2


@on_two_databases
async def test_the_first_attempt_after_a_crash_asks(make_app: MakeApp, bank: Bank) -> None:
    booked = asyncio.Event()

    @activity(reconcile=lambda ctx, amount: bank.find(ctx.idempotency_key))
    async def charge(ctx: WorkflowContext, amount: int) -> str:
        bank.book(ctx.idempotency_key, amount)
        booked.set()
        await asyncio.Event().wait()  # here the process dies
        return "never"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await charge(ctx, 7)

    doomed = await make_app(settings=MORTAL)
    run_id = await doomed.start(order)
    await booked.wait()
    assert bank.asked == []
    doomed.kill()
    app = await make_app(settings=MORTAL)
    assert await app.handle(run_id).result(timeout=30) == "receipt for 7"
    assert bank.booked == {f"{run_id}/0/charge:1": 7}


@on_two_databases
async def test_an_error_of_reconcile_is_judged_like_one_of_the_activity(app: EddaApp) -> None:
    asked: list[int] = []
    begun: list[int] = []

    async def find(ctx: WorkflowContext) -> Happened[str] | None:
        asked.append(ctx.attempt)
        if ctx.attempt < 4:
            raise ConnectionError("the bank does not answer")
        raise PermissionError("nor will it")

    @activity(
        retry_policy=RetryPolicy(initial_interval=0.0, non_retryable_error_types=(PermissionError,)), reconcile=find
    )
    async def charge(ctx: WorkflowContext) -> str:
        begun.append(ctx.attempt)
        raise ConnectionError("lost")

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await charge(ctx)

    with pytest.raises(PermissionError, match="nor will it"):
        await app.run(order)
    assert (begun, asked) == ([1], [2, 3, 4])


@on_two_databases
async def test_an_answer_that_is_none_of_the_two_fails_the_step_at_once(app: EddaApp) -> None:
    @activity(retry_policy=AT_ONCE, reconcile=lambda ctx: True)
    async def charge(ctx: WorkflowContext) -> str:
        raise ConnectionError("lost")

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await charge(ctx)

    with pytest.raises(TypeError, match=r"charge:1 returned True: .*Happened\(result\).* None"):
        await app.run(order)


@on_two_databases
async def test_reconcile_may_take_as_long_as_an_attempt(app: EddaApp) -> None:
    async def find(ctx: WorkflowContext) -> Happened[str] | None:
        await asyncio.Event().wait()
        return None

    @activity(timeout=0.05, retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=2), reconcile=find)
    async def charge(ctx: WorkflowContext) -> str:
        raise ConnectionError("lost")

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await charge(ctx)

    with pytest.raises(RetryExhaustedError, match="charge:1, attempt 2, took more than"):
        await app.run(order)


@on_two_databases
async def test_reconcile_need_not_beat_nor_does_its_time_count_for_the_body(app: EddaApp) -> None:
    async def find(ctx: WorkflowContext) -> Happened[str] | None:
        await asyncio.sleep(0.3)
        return None

    @activity(timeout=0.5, heartbeat_timeout=0.2, reconcile=find, retry_policy=AT_ONCE)
    async def charge(ctx: WorkflowContext) -> int:
        if ctx.attempt == 1:
            raise ConnectionError("lost")
        for _ in range(3):
            await asyncio.sleep(0.1)
            ctx.heartbeat()
        return ctx.attempt

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await charge(ctx)

    assert await app.run(order) == 2


@on_two_databases
async def test_a_thread_that_answers_too_late_does_not_begin_the_body(app: EddaApp) -> None:
    begun: list[int] = []
    go = threading.Event()

    def find(ctx: WorkflowContext) -> Happened[str] | None:
        if ctx.attempt == 2:
            go.wait(20)
        return None

    @activity(timeout=0.1, retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=3), reconcile=find)
    async def charge(ctx: WorkflowContext) -> int:
        begun.append(ctx.attempt)
        if ctx.attempt == 1:
            raise ConnectionError("lost")
        go.set()
        return ctx.attempt

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await charge(ctx)

    assert await app.run(order) == 3
    assert begun == [1, 3]


@on_two_databases
async def test_what_reconcile_does_through_edda_is_not_taken_for_what_the_body_does(app: EddaApp) -> None:
    async def find(ctx: WorkflowContext) -> Happened[str] | None:
        await send_event("asked", "bank", {})
        return None

    @activity(retry_policy=AT_ONCE, reconcile=find)
    async def charge(ctx: WorkflowContext) -> int:
        if ctx.attempt == 1:
            raise ConnectionError("lost")
        await send_event("charged", "bank", {})
        return ctx.attempt

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        await charge(ctx)
        return (await wait_event(ctx, "charged", timeout_seconds=20)).type

    assert await app.run(order) == "charged"


@on_two_databases
async def test_hooks_hear_of_bodies_not_of_questions(make_app: MakeApp, bank: Bank) -> None:
    heard: list[str] = []

    class Ear(HooksBase):
        async def on_activity_start(self, *_: Any) -> None:
            heard.append("start")

        async def on_activity_complete(self, *_: Any) -> None:
            heard.append("complete")

    app = await make_app(hooks=Ear())

    @activity(retry_policy=AT_ONCE, reconcile=lambda ctx: bank.find(ctx.idempotency_key))
    async def charge(ctx: WorkflowContext) -> str:
        bank.book(ctx.idempotency_key, 1)
        raise ConnectionError("lost")

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await charge(ctx)

    await app.run(order)
    await until(lambda: heard == ["start", "complete"], "one body and one outcome")


def charge(ctx: WorkflowContext, account: str, /, amount: int, currency: str = "EUR", *, note: str) -> None: ...


MISFITS: list[tuple[Any, str]] = [
    (lambda: None, "it has no first parameter for the context"),
    (lambda *, ctx: None, "it has no first parameter for the context"),
    (lambda ctx: None, "it has no 'account'; it has no 'amount'; it has no 'currency'; it has no 'note'"),
    (lambda ctx, account, /, amount, currency="", *, note, sum: None, "the activity has no 'sum'"),
    (lambda ctx, account, /, currency="", amount=1, *, note: None, "their order is 'account', 'amount', 'currency'"),
    (lambda ctx, account, /, amount, currency, *, note: None, "'currency' needs a default"),
    (lambda ctx, account, /, amount, note, currency="": None, "'note' is keyword-only in the activity"),
]


@pytest.mark.parametrize(("reconcile", "misfit"), MISFITS)
def test_reconcile_must_take_what_the_activity_takes(reconcile: Any, misfit: str) -> None:
    with pytest.raises(TypeError, match=f"activity charge: .* own parameters: .*{misfit}"):
        activity(reconcile=reconcile)(charge)


@pytest.mark.parametrize(
    "reconcile",
    [charge, lambda ctx, *args, **kwargs: None, lambda c, account, /, amount=1, currency="", *, note="": None],
)
def test_reconcile_that_takes_what_the_activity_takes_is_accepted(reconcile: Any) -> None:
    assert activity(reconcile=reconcile)(charge).name == "charge"
