"""Data that does not fit the model of a wait: the wait goes on, and the history says what was rejected and why."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from edda import (
    EddaApp,
    RunStatus,
    WorkflowContext,
    activity,
    on_failure,
    publish,
    receive,
    send_to,
    sleep,
    subscribe,
    wait_any,
    wait_event,
    workflow,
)
from edda.control.views import HistorySearch
from edda.core.exceptions import decode_failure
from edda.core.model import EntryKind
from edda.engine.settings import Settings
from edda.errors import EventTimeoutError, EventValidationError, HistoryLimitError

from .conditions import reason_of, until, until_out_of_memory, until_status
from .conftest import MakeApp
from .events import registered, result_of, send, start_waiting, until_waiting_for
from .messages import logged, start_receiving

BAD: list[Any] = [{"amount": "much"}, {"order_id": "A"}, None, [], "text", 7, b"\x00\xff"]
GOOD = {"order_id": "A", "amount": 3}


class Payment(BaseModel):
    order_id: str
    amount: int


class Fragile(BaseModel):
    amount: int

    @field_validator("amount")
    @classmethod
    def look_up(cls, amount: int) -> int:
        return {3: 3}[amount]  # a KeyError, which pydantic does not turn into a ValidationError


async def rejected(app: EddaApp, run_id: str) -> list[tuple[str, bool]]:
    """The steps of the rejected entries, and whether each names its reason."""
    found = [entry for entry in await app.handle(run_id).history() if entry.kind is EntryKind.REJECTED]
    errors = [decode_failure(app.engine.codec, entry.value) for entry in found]
    return [(entry.step, isinstance(error, EventValidationError)) for entry, error in zip(found, errors, strict=True)]


async def until_rejected(app: EddaApp, run_id: str, count: int) -> None:
    async def are_rejected() -> bool:
        return len(await rejected(app, run_id)) == count

    await until(are_rejected, f"run {run_id} has rejected {count}")


@pytest.mark.parametrize("event_id", [None, "payment"])
async def test_a_malformed_event_does_not_end_the_wait(
    app: EddaApp, event_id: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> int:
        paid = (await wait_event(ctx, "paid", model=Payment, event_id=event_id)).data.amount
        await sleep(ctx, 0.01)
        return paid

    step = event_id or "paid:1"
    run_id = await start_waiting(app, order)
    with caplog.at_level(logging.WARNING):
        for number, data in enumerate(BAD):
            await send(app, "paid", data, id=f"bad-{number}")
        await until_rejected(app, run_id, len(BAD))
        await until_waiting_for(app, run_id, step)
        # The wait is registered while the run is still in memory; its status changes when it leaves.
        await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
        await send(app, "paid", GOOD)
        assert await result_of(app, run_id) == 3
    assert await rejected(app, run_id) == [(step, True)] * len(BAD)
    said = [record.getMessage() for record in caplog.records if "goes on waiting" in record.getMessage()]
    assert len(said) == len(BAD), "each once, whatever was replayed"
    for number, line in enumerate(said):
        assert f"run {run_id} of order: step {step} rejects" in line
        assert f"event 'bad-{number}' of type paid from /tests does not fit Payment" in line
        assert "\n" not in line


async def test_a_malformed_event_undoes_nothing(app: EddaApp) -> None:
    undone: list[str] = []

    @activity
    async def refund(ctx: WorkflowContext) -> None:
        undone.append("refund")

    @activity
    @on_failure(refund)
    async def charge(ctx: WorkflowContext) -> None: ...

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        await charge(ctx)
        return (await wait_event(ctx, "sent", model=Payment, match={"order_id": "A"})).data.order_id

    run_id = await start_waiting(app, order)
    await send(app, "sent", {"order_id": "A", "amount": "one"})
    await send(app, "sent", GOOD)
    assert await result_of(app, run_id) == "A"
    assert undone == []


async def test_events_from_before_the_wait_are_rejected_too(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[int]:
        await wait_event(ctx, "begin")
        return [(await wait_event(ctx, "paid", model=Payment)).data.amount for _ in range(2)]

    run_id = await start_waiting(app, order)
    for data in (BAD[0], GOOD, BAD[1], {**GOOD, "amount": 4}, BAD[2]):
        await send(app, "paid", data)
    await send(app, "begin")
    assert await result_of(app, run_id) == [3, 4]
    assert await rejected(app, run_id) == [("paid:1", True), ("paid:2", True)]


async def test_what_one_wait_rejects_another_run_may_accept(app: EddaApp) -> None:
    @workflow
    async def typed(ctx: WorkflowContext) -> int:
        return (await wait_event(ctx, "paid", model=Payment)).data.amount

    @workflow
    async def plain(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "paid")).data

    strict, open_ = await start_waiting(app, typed), await start_waiting(app, plain)
    await send(app, "paid", BAD[0])
    assert await result_of(app, open_) == BAD[0]
    await send(app, "paid", GOOD)
    assert await result_of(app, strict) == 3


async def test_a_malformed_event_wins_no_race(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        first = await wait_any(ctx, paid=wait_event(ctx, "paid", model=Payment), gone=wait_event(ctx, "gone"))
        return first.name

    run_id = await start_waiting(app, order)
    await send(app, "paid", BAD[0])
    await until_rejected(app, run_id, 1)
    await send(app, "gone")
    assert await result_of(app, run_id) == "gone"


async def test_rejected_events_do_not_prolong_the_wait(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> float:
        begun = ctx.now()
        with pytest.raises(EventTimeoutError):
            await wait_event(ctx, "paid", 2, model=Payment)
        return (ctx.now() - begun).total_seconds()

    run_id = await start_waiting(app, order)
    for number in range(3):
        await send(app, "paid", number)
    assert 2 <= await result_of(app, run_id) < 20


async def test_a_model_that_fails_by_itself_rejects(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return (await wait_event(ctx, "paid", model=Fragile)).data.amount

    run_id = await start_waiting(app, order)
    await send(app, "paid", {"amount": 1})
    await send(app, "paid", {"amount": 3})
    assert await result_of(app, run_id) == 3
    assert await rejected(app, run_id) == [("paid:1", True)]


async def test_a_rejected_event_does_not_come_again_in_the_next_generation(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext, total: int = 0) -> int:
        total += (await wait_event(ctx, "paid", model=Payment)).data.amount
        if total < 6:
            await ctx.recur(total=total)
        return total

    run_id = await start_waiting(app, order)
    for data in (BAD[0], GOOD, BAD[1], GOOD):
        await send(app, "paid", data)
    assert await result_of(app, run_id) == 6
    assert await rejected(app, run_id) == [("paid:1", True)], "of the second generation, one"


async def test_a_run_goes_on_elsewhere_after_it_rejected(make_app: MakeApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return (await wait_event(ctx, "paid", model=Payment)).data.amount

    first = await make_app()
    run_id = await start_waiting(first, order)
    await send(first, "paid", BAD[0])
    await until_rejected(first, run_id, 1)
    await until_waiting_for(first, run_id, "paid:1")
    await first.shutdown()
    second = await make_app()
    await send(second, "paid", GOOD)
    assert await result_of(second, run_id) == 3
    assert await rejected(second, run_id) == [("paid:1", True)]


async def test_a_model_that_no_longer_takes_what_was_accepted_parks_the_run(app: EddaApp) -> None:
    """Neither may the code get an error that it did not get before, nor may the event be passed over on replay."""
    models: list[type[BaseModel]] = [Payment]

    class Stricter(BaseModel):
        order_id: str
        amount: int
        currency: str

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        amount = (await wait_event(ctx, "paid", model=models[-1])).data.model_dump()["amount"]
        await sleep(ctx, 2)
        return amount

    run_id = await start_waiting(app, order)
    await send(app, "paid", GOOD)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    await until_out_of_memory(app)
    models.append(Stricter)
    await until_status(app, run_id, RunStatus.PARKED)
    assert "'paid:1' accepted its data when it arrived" in await reason_of(app, run_id)
    models.append(Payment)
    await app.control.resume_run(run_id)
    assert await result_of(app, run_id) == 3


async def test_a_model_that_takes_more_now_still_passes_over_what_was_rejected(app: EddaApp) -> None:
    models: list[Any] = [Payment]

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "paid", model=models[-1])).data

    run_id = await start_waiting(app, order)
    await send(app, "paid", {"late": True})
    await until_rejected(app, run_id, 1)
    await until_waiting_for(app, run_id, "paid:1")
    await until_out_of_memory(app)
    models.append(dict[str, Any])
    await send(app, "paid", GOOD)
    assert await result_of(app, run_id) == GOOD


# Channels


@pytest.mark.parametrize("mode", ["broadcast", "competing", "direct"])
async def test_a_malformed_message_does_not_end_the_wait(app: EddaApp, mode: Any) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[int]:
        await subscribe(ctx, "payments", mode)
        return [(await receive(ctx, "payments", model=Payment)).data.amount for _ in range(2)]

    run_id = await start_receiving(app, listen)
    for data in (BAD[0], GOOD, None, "x", {**GOOD, "amount": 4}):
        if mode == "direct":
            await send_to(app, run_id, data, "payments")
        else:
            await publish(app, "payments", data)
    assert await result_of(app, run_id) == [3, 4]
    assert await rejected(app, run_id) == [("payments:1", True), ("payments:2", True), ("payments:2", True)]


async def test_a_backlog_is_read_over_what_is_malformed(app: EddaApp) -> None:
    """Out of the log itself, many at a time."""

    @workflow
    async def listen(ctx: WorkflowContext) -> int:
        await subscribe(ctx, "payments")
        await wait_event(ctx, "begin")
        return sum([(await receive(ctx, "payments", model=Payment)).data.amount for _ in range(20)])

    run_id = await start_waiting(app, listen)
    for number in range(20):
        await publish(app, "payments", {"amount": number})
        await publish(app, "payments", {"order_id": "A", "amount": number})
    await send(app, "begin")
    assert await result_of(app, run_id) == sum(range(20))
    assert len(await rejected(app, run_id)) == 20


async def test_a_malformed_message_that_runs_compete_for_is_rejected_once_and_kept_in_the_log(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> int:
        await subscribe(ctx, "jobs", "competing")
        return (await receive(ctx, "jobs", model=Payment)).data.amount

    runs = [await start_receiving(app, work) for _ in range(2)]
    await publish(app, "jobs", BAD[0])

    async def is_rejected() -> bool:
        return sum([len(await rejected(app, run_id)) for run_id in runs]) == 1

    await until(is_rejected, "one of them has rejected it")
    for amount in (3, 4):
        await publish(app, "jobs", {"order_id": "A", "amount": amount})
    assert sorted(await asyncio.gather(*(result_of(app, run_id) for run_id in runs))) == [3, 4]
    assert sum([len(await rejected(app, run_id)) for run_id in runs]) == 1
    assert await logged(app, "jobs") == [BAD[0], GOOD, {**GOOD, "amount": 4}]


async def test_the_rejection_is_shown_with_its_reason(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid", model=Payment)

    run_id = await start_waiting(app, order)
    await send(app, "paid", {"order_id": "A", "amount": "much"}, id="bad")
    await until_rejected(app, run_id, 1)
    assert await registered(app, run_id) == ["paid:1"]
    (entry,) = [one for one in (await app.control.get_history(run_id, HistorySearch())).items if one.kind == "rejected"]
    assert entry.error is not None
    assert entry.error.type.endswith("EventValidationError")
    assert "amount: Input should be a valid integer" in entry.error.message
    assert entry.event is not None
    (consumer,) = (await app.control.get_event(entry.event)).consumers
    assert consumer.run_id == run_id


async def test_a_flood_of_malformed_events_does_not_flood_the_log_and_leaves_the_run_waiting(
    app: EddaApp, caplog: pytest.LogCaptureFixture
) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return (await wait_event(ctx, "paid", model=Payment)).data.amount

    run_id = await start_waiting(app, order)
    with caplog.at_level(logging.WARNING):
        await asyncio.gather(*(send(app, "paid", {"amount": "much"}, id=f"bad-{number}") for number in range(120)))
        await until_rejected(app, run_id, 120)
    counts = [
        vars(record)["edda_count"] for record in caplog.records if vars(record).get("edda_line") == "misfit_rejected"
    ]
    assert counts == [*range(1, 11), 100]
    (bar,) = (await app.control.get_timeline(run_id, None)).bars
    assert (bar.step, bar.rejected) == ("paid:1", 120)
    await send(app, "paid", GOOD)
    assert await result_of(app, run_id) == 3


async def test_a_history_that_is_full_of_rejected_events_says_so(make_app: MakeApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return (await wait_event(ctx, "paid", model=Payment)).data.amount

    app = await make_app(settings=Settings(history_limit=20, history_warning=10))
    run_id = await start_waiting(app, order)
    for number in range(20):
        await send(app, "paid", {"amount": "much"}, id=f"bad-{number}")
    with pytest.raises(HistoryLimitError, match="20 of them are events that did not fit"):
        await result_of(app, run_id)
