"""What an event carries, as the workflow gets it: any data, and the model that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any, TypedDict

import pytest
from pydantic import BaseModel

from edda import EddaApp, EventValidationError, WorkflowContext, sleep, wait_event, workflow

from .events import result_of, send, start_waiting


class Payment(BaseModel):
    order_id: str
    amount: int


@dataclass(frozen=True)
class Parcel:
    number: str
    sent: date


class Note(TypedDict):
    text: str
    pages: int


async def test_data_arrives_as_it_was_sent(app: EddaApp) -> None:
    values: list[Any] = [{"a": {"b": [1, None]}}, [1, 2, 3], [], {}, "text", 7, 1.5, True, False, None, "", b"\x00\xff"]

    @workflow
    async def order(ctx: WorkflowContext, amount: int) -> list[Any]:
        return [(await wait_event(ctx, "any")).data for _ in range(amount)]

    run_id = await start_waiting(app, order, len(values))
    for value in values:
        await send(app, "any", value)
    received = await result_of(app, run_id)
    assert received == values
    assert list(map(type, received)) == list(map(type, values))


async def test_text_that_is_no_json_arrives_as_text(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> tuple[Any, str | None]:
        event = await wait_event(ctx, "note")
        return event.data, event.datacontenttype

    run_id = await start_waiting(app, order)
    await send(app, "note", "a < b", datacontenttype="text/plain")
    assert await result_of(app, run_id) == ("a < b", "text/plain")


async def test_data_becomes_the_model_that_was_asked_for(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        payment = await wait_event(ctx, "paid", model=Payment)
        parcel = await wait_event(ctx, "sent", model=Parcel)
        note = await wait_event(ctx, "noted", model=Note)
        several = await wait_event(ctx, "all.paid", model=list[Payment])
        return [repr(event.data) for event in (payment, parcel, note, several)]

    run_id = await start_waiting(app, order)
    await send(app, "all.paid", [{"order_id": "A", "amount": 1}, {"order_id": "B", "amount": 2}])
    await send(app, "noted", {"text": "x", "pages": 2})
    await send(app, "sent", {"number": "P1", "sent": "2030-02-01"})
    await send(app, "paid", {"order_id": "A", "amount": 1})
    assert await result_of(app, run_id) == [
        "Payment(order_id='A', amount=1)",
        "Parcel(number='P1', sent=datetime.date(2030, 2, 1))",
        "{'text': 'x', 'pages': 2}",
        "[Payment(order_id='A', amount=1), Payment(order_id='B', amount=2)]",
    ]


async def test_data_that_does_not_fit_raises_with_every_field_and_again_on_replay(app: EddaApp) -> None:
    live: list[str] = []

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        try:
            await wait_event(ctx, "paid", model=Payment, on_invalid="raise")
        except EventValidationError as error:
            live.append(str(error))
        await sleep(ctx, 0.5)  # long enough to leave memory even on a busy machine
        return live[-1]

    run_id = await start_waiting(app, order)
    await send(app, "paid", {"amount": "much"}, id="7")
    said = await result_of(app, run_id)
    assert said.startswith("event '7' of type paid from /tests does not fit Payment:\n")
    assert "order_id: Field required" in said
    assert "amount: Input should be a valid integer" in said
    assert len(live) >= 2, "it was replayed"
    assert len(set(live)) == 1


async def test_data_that_does_not_fit_fails_a_run_that_asks_for_the_error_and_does_not_catch_it(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid", model=Payment, on_invalid="raise")

    run_id = await start_waiting(app, order)
    await send(app, "paid", [1])
    with pytest.raises(EventValidationError, match="does not fit Payment"):
        await result_of(app, run_id)
