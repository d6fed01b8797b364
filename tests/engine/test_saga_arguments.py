"""What an undo is given: by name, what its own signature asks for, out of the call and the result it undoes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypedDict

import pytest
from pydantic import BaseModel

from edda import (
    EddaApp,
    RetryPolicy,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    register_compensation,
    sleep,
    workflow,
)
from edda.errors import ArgumentError, NotInWorkflowError, RetryExhaustedError
from edda.workflow.activity import Activity

from .events import result_of


@dataclass(frozen=True)
class Receipt:
    number: str
    amount: float


class ReceiptModel(BaseModel):
    number: str
    amount: float


class ReceiptDict(TypedDict):
    number: str
    amount: float


class ReceiptTuple(NamedTuple):
    number: str
    amount: float


async def charge_for_receipt(ctx: WorkflowContext, amount: float) -> Receipt:
    return Receipt("no. 7", amount + 1)


async def charge_for_model(ctx: WorkflowContext, amount: float) -> ReceiptModel:
    return ReceiptModel(number="no. 7", amount=amount + 1)


async def charge_for_typed_dict(ctx: WorkflowContext, amount: float) -> ReceiptDict:
    return {"number": "no. 7", "amount": amount + 1}


async def charge_for_tuple(ctx: WorkflowContext, amount: float) -> ReceiptTuple:
    return ReceiptTuple("no. 7", amount + 1)


async def charge_for_dict(ctx: WorkflowContext, amount: float) -> dict[str, Any]:
    return {"number": "no. 7", "amount": amount + 1}


async def charge_for_anything(ctx, amount):  # type: ignore[no-untyped-def]
    return {"number": "no. 7", "amount": amount + 1}


def charge_in_a_thread(ctx: WorkflowContext, amount: float) -> Receipt:
    return Receipt("no. 7", amount + 1)


async def undo_with(app: EddaApp, undo: Callable[..., Any], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call the function as an activity, fail after a replay, and let it be undone."""
    step: Activity[Any, Any] = activity(on_failure(undo)(fn))

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await step(ctx, *args, **kwargs)
        await sleep(ctx, 0.01)
        raise ValueError("sold out")

    with pytest.raises(ValueError, match="sold out"):
        await app.run(order)


@pytest.mark.parametrize(
    "charge",
    [
        charge_for_receipt,
        charge_for_model,
        charge_for_typed_dict,
        charge_for_tuple,
        charge_for_dict,
        charge_for_anything,
        charge_in_a_thread,
    ],
)
async def test_fields_of_the_result_come_by_name_and_win_over_arguments(
    app: EddaApp, charge: Callable[..., Any]
) -> None:
    given: list[Any] = []

    @compensation
    async def refund(ctx: WorkflowContext, number: str, amount: float) -> None:
        given.append((number, amount))

    await undo_with(app, refund, charge, 9.5)
    assert given == [("no. 7", 10.5)]


async def test_arguments_come_by_name_however_they_were_passed_and_with_defaults(app: EddaApp) -> None:
    given: list[Any] = []

    @compensation
    async def refund(ctx: WorkflowContext, currency: str, amount: float, *, card: str) -> None:
        given.append((amount, card, currency))

    async def charge(ctx: WorkflowContext, amount: float, card: str, currency: str = "EUR") -> None: ...

    await undo_with(app, refund, charge, 9.5, card="visa")
    assert given == [(9.5, "visa", "EUR")]


async def test_the_whole_result_comes_as_result_in_its_own_type(app: EddaApp) -> None:
    given: list[Any] = []

    @compensation
    async def refund(ctx: WorkflowContext, result: Receipt) -> None:
        given.append(result)

    await undo_with(app, refund, charge_for_receipt, 9.5)
    assert given == [Receipt("no. 7", 10.5)]


async def test_an_argument_called_result_stays_what_it_is(app: EddaApp) -> None:
    given: list[Any] = []

    @compensation
    async def forget(ctx: WorkflowContext, result: str) -> None:
        given.append(result)

    async def publish(ctx: WorkflowContext, result: str) -> int:
        return 7

    await undo_with(app, forget, publish, "3:1")
    assert given == ["3:1"]


async def test_what_nothing_fills_keeps_its_default(app: EddaApp) -> None:
    given: list[Any] = []

    @compensation
    async def refund(ctx: WorkflowContext, amount: float, reason: str = "the order failed") -> None:
        given.append((amount, reason))

    await undo_with(app, refund, charge_for_receipt, 9.5)
    assert given == [(10.5, "the order failed")]


async def test_what_fills_a_default_wins_over_it(app: EddaApp) -> None:
    given: list[Any] = []

    @compensation
    async def refund(ctx: WorkflowContext, number: str = "unknown") -> None:
        given.append(number)

    await undo_with(app, refund, charge_for_dict, 9.5)
    assert given == ["no. 7"]


async def test_an_undo_that_takes_anything_gets_everything(app: EddaApp) -> None:
    given: list[Any] = []

    @compensation
    async def refund(ctx: WorkflowContext, /, **known: Any) -> None:
        given.append(known)

    await undo_with(app, refund, charge_for_dict, 9.5)
    assert given == [{"number": "no. 7", "amount": 10.5, "result": {"number": "no. 7", "amount": 10.5}}]


async def test_a_plain_function_can_undo(app: EddaApp) -> None:
    given: list[Any] = []

    async def refund(ctx: WorkflowContext, number: str) -> None:
        given.append((number, ctx.activity_id))

    await undo_with(app, refund, charge_for_receipt, 9.5)
    assert given == [("no. 7", "undo:1/refund")]


async def test_a_plain_function_that_blocks_can_undo_in_a_thread(app: EddaApp) -> None:
    given: list[Any] = []

    def refund(ctx: WorkflowContext, number: str) -> None:
        given.append(number)

    await undo_with(app, refund, charge_for_receipt, 9.5)
    assert given == ["no. 7"]


async def test_an_undo_gets_what_the_call_was_given_not_what_became_of_it(app: EddaApp) -> None:
    given: list[list[str]] = []

    async def unpack(ctx: WorkflowContext, items: list[str]) -> None:
        given.append(items)

    @activity
    @on_failure(unpack)
    async def pack(ctx: WorkflowContext, items: list[str]) -> None: ...

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        items = ["book"]
        await pack(ctx, items)
        items.append("pen")
        register_compensation(ctx, unpack, items)
        items.append("ink")
        raise ValueError("sold out")

    with pytest.raises(ValueError, match="sold out"):
        await app.run(order)
    assert given == [["book", "pen"], ["book"]]


async def test_one_function_undoes_several_activities(app: EddaApp) -> None:
    given: list[Any] = []

    async def forget(ctx: WorkflowContext, name: str) -> None:
        given.append(name)

    @activity
    @on_failure(forget)
    async def remember(ctx: WorkflowContext, name: str) -> None: ...

    @activity
    @on_failure(forget)
    async def invent(ctx: WorkflowContext) -> dict[str, str]:
        return {"name": "Zoe"}

    @workflow
    async def story(ctx: WorkflowContext) -> None:
        await remember(ctx, "Anna")
        await invent(ctx)
        raise ValueError("no end")

    with pytest.raises(ValueError, match="no end"):
        await app.run(story)
    assert given == ["Zoe", "Anna"]


@pytest.mark.parametrize("charge", [charge_for_receipt, charge_for_model, charge_for_typed_dict])
def test_a_parameter_that_nothing_will_ever_fill_is_an_error_where_it_is_written(charge: Callable[..., Any]) -> None:
    async def refund(ctx: WorkflowContext, nubmer: str) -> None: ...

    with pytest.raises(ArgumentError, match=r"refund.*'nubmer'.*has only 'amount', 'result', 'number'"):
        on_failure(refund)(charge)


def test_a_parameter_of_an_undo_without_a_result_is_an_error_where_it_is_written() -> None:
    async def refund(ctx: WorkflowContext, receipt: str) -> None: ...

    async def charge(ctx: WorkflowContext, amount: float) -> None: ...

    with pytest.raises(ArgumentError, match="'receipt'"):
        on_failure(refund)(charge)


def test_the_order_of_the_decorators_is_checked() -> None:
    async def refund(ctx: WorkflowContext) -> None: ...

    @activity
    async def charge(ctx: WorkflowContext) -> None: ...

    with pytest.raises(TypeError, match="under @activity"):
        on_failure(refund)(charge)


def test_what_cannot_be_called_cannot_undo() -> None:
    with pytest.raises(TypeError, match="expected a function, got 'refund'"):
        on_failure("refund")  # type: ignore[arg-type]


async def test_a_result_without_what_the_undo_needs_fails_the_step_at_once(app: EddaApp) -> None:
    calls: list[str] = []

    async def refund(ctx: WorkflowContext, number: str) -> None:
        calls.append("refund")

    @activity(retry_policy=RetryPolicy(initial_interval=0.01))
    @on_failure(refund)
    async def charge(ctx: WorkflowContext, amount: float) -> dict[str, Any]:
        calls.append("charge")
        return {"nmuber": "no. 7"}

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        try:
            await charge(ctx, 9.5)
        except ArgumentError as error:
            return str(error)
        return "charged"

    said = await app.run(order)
    assert "refund() cannot undo charge(): it needs 'number'" in said
    assert calls == ["charge"], "another try would do it again"


async def test_arguments_that_do_not_fit_are_an_error_where_the_undo_is_registered(app: EddaApp) -> None:
    @compensation
    async def refund(ctx: WorkflowContext, amount: float) -> None:
        raise AssertionError("never registered")

    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        said: list[str] = []
        wrong: tuple[dict[str, Any], ...] = ({}, {"amuont": 1.0}, {"amount": 1.0, "card": "visa"})
        for kwargs in wrong:
            try:
                register_compensation(ctx, refund, **kwargs)
            except ArgumentError as error:
                said.append(str(error))
        return said

    missing, misspelt, extra = await app.run(order)
    assert "amount" in missing
    assert "amuont" in misspelt
    assert "card" in extra


async def test_an_activity_cannot_register_an_undo(app: EddaApp) -> None:
    async def refund(ctx: WorkflowContext) -> None: ...

    @activity(retry_policy=RetryPolicy(max_attempts=1))
    async def charge(ctx: WorkflowContext) -> None:
        register_compensation(ctx, refund)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx)

    run_id = await app.start(order)
    with pytest.raises((NotInWorkflowError, RetryExhaustedError), match="activity"):
        await result_of(app, run_id)


async def _give_back(ctx: WorkflowContext, number: str, amount: float) -> None: ...


def test_an_undo_without_a_name_is_refused_where_it_is_given() -> None:
    nameless = partial(_give_back, amount=1.0)
    with pytest.raises(TypeError, match=r"has no name.*@compensation\(name="):
        on_failure(nameless)
    assert compensation(name="give_back")(nameless).name == "give_back"
