"""Sagas: what a run did is undone when it fails; the last thing first, each once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from edda import (
    CompensationError,
    EddaApp,
    RetryPolicy,
    RunStatus,
    WorkflowCancelledError,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    register_compensation,
    sleep,
    wait_event,
    workflow,
)
from edda.core.model import EntryKind

from .compensated_activity import ONCE, SOON, bookings, failure_of, order_with_slow_refund
from .conditions import until_status
from .conftest import MakeApp
from .events import result_of, send, start_waiting
from .histories import entries_of, kinds_in, undos_of, until_recorded


async def test_what_was_done_is_undone_once_and_the_last_first(app: EddaApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        await sleep(ctx, 0.02)
        await book(ctx, "hotel")
        await sleep(ctx, 0.02)
        raise ValueError("no car")

    run_id = await app.start(trip)
    with pytest.raises(ValueError, match="no car"):
        await result_of(app, run_id)
    assert log == ["book flight", "book hotel", "unbook hotel", "unbook flight"]
    assert await undos_of(app, run_id) == ["undo:1/unbook", "undo:2/unbook"]
    assert await app.handle(run_id).status() is RunStatus.FAILED


async def test_nothing_is_undone_in_a_run_that_succeeds(app: EddaApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @workflow
    async def trip(ctx: WorkflowContext) -> str:
        await book(ctx, "flight")
        register_compensation(ctx, book, "consolation")
        await sleep(ctx, 0.02)
        return await book(ctx, "hotel")

    assert await app.run(trip) == "hotel"
    assert log == ["book flight", "book hotel"]


async def test_a_failure_that_the_workflow_handles_undoes_nothing(app: EddaApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @activity(retry_policy=ONCE)
    async def fail(ctx: WorkflowContext) -> None:
        raise ValueError("no car")

    @workflow
    async def trip(ctx: WorkflowContext) -> str:
        try:
            await book(ctx, "flight")
            await fail(ctx)
        except Exception:
            await sleep(ctx, 0.02)
            return "by train"
        return "by air"

    assert await app.run(trip) == "by train"
    assert log == ["book flight"]


async def test_a_failure_after_one_that_was_handled_undoes_all(app: EddaApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        try:
            await book(ctx, "flight")
            raise ValueError("no car")
        except ValueError:
            await book(ctx, "train")
        raise ValueError("no train either")

    with pytest.raises(ValueError, match="no train either"):
        await app.run(trip)
    assert log == ["book flight", "book train", "unbook train", "unbook flight"]


async def test_a_step_that_failed_is_not_undone(app: EddaApp) -> None:
    undone: list[int] = []

    @compensation
    async def refund(ctx: WorkflowContext, amount: int) -> None:
        undone.append(amount)

    @activity(retry_policy=ONCE)
    @on_failure(refund)
    async def charge(ctx: WorkflowContext, amount: int) -> None:
        if amount > 10:
            raise ValueError("too much")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx, 5)
        await charge(ctx, 50)

    run_id = await app.start(order)
    assert "too much" in str(await failure_of(app, run_id))
    assert undone == [5]


async def test_parallel_branches_are_undone_in_the_reverse_order_of_their_ends(app: EddaApp) -> None:
    log: list[str] = []
    second_ended = asyncio.Event()

    @compensation
    async def unbook(ctx: WorkflowContext, what: str) -> None:
        log.append(what)

    @activity
    @on_failure(unbook)
    async def book(ctx: WorkflowContext, what: str) -> None:
        if what == "first":
            await second_ended.wait()

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        async def second() -> None:
            await book(ctx, "second")
            second_ended.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(book(ctx, "first"))
            group.create_task(second())
        await sleep(ctx, 0.02)
        raise ValueError("no car")

    with pytest.raises(ValueError, match="no car"):
        await app.run(trip)
    assert log == ["first", "second"]


async def test_what_a_branch_registered_is_undone(app: EddaApp) -> None:
    log: list[str] = []

    async def forget(ctx: WorkflowContext, what: str) -> None:
        log.append(what)

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        async def plan(what: str) -> None:
            await register_compensation(ctx, forget, what=what)
            await sleep(ctx, 0.02)

        register_compensation(ctx, forget, "all")
        await asyncio.gather(plan("a"), plan("b"))
        raise ValueError("no car")

    run_id = await app.start(trip)
    with pytest.raises(ValueError, match="no car"):
        await result_of(app, run_id)
    assert log == ["b", "a", "all"]
    assert await undos_of(app, run_id) == ["undo:1/forget", "undo:2/forget", "undo:3/forget"]


async def test_an_undo_that_fails_is_told_with_what_made_the_run_fail_and_the_others_run(app: EddaApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @compensation(name="return_car", retry_policy=ONCE)
    async def fail(ctx: WorkflowContext, car: str) -> None:
        raise ConnectionError(f"nobody takes {car} back")

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        register_compensation(ctx, fail, "the Fiat")
        await book(ctx, "hotel")
        raise ValueError("no money")

    run_id = await app.start(trip)
    error = await failure_of(app, run_id)
    assert isinstance(error, CompensationError)
    assert isinstance(error.__cause__, ValueError)
    assert str(error.__cause__) == "no money"
    assert [note.split()[0] for note in error.__notes__ if note.startswith("undo:")] == ["undo:2/return_car"]
    assert log == ["book flight", "book hotel", "unbook hotel", "unbook flight"]
    failed = [entry.step for entry in await entries_of(app, run_id, EntryKind.STEP) if not entry.ok]
    assert failed == ["undo:2/return_car"]
    assert await app.handle(run_id).status() is RunStatus.FAILED


async def test_an_undo_that_fails_says_why(app: EddaApp) -> None:
    @compensation(retry_policy=ONCE)
    async def return_car(ctx: WorkflowContext) -> None:
        raise ConnectionError("nobody takes the Fiat back")

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        register_compensation(ctx, return_car)
        raise ValueError("no money")

    with pytest.raises(CompensationError, match="nobody takes the Fiat back") as raised:
        await app.run(trip)
    assert any("nobody takes the Fiat back" in note for note in raised.value.__notes__)


async def test_a_cancelled_run_whose_undo_fails_has_failed_because_it_was_cancelled(app: EddaApp) -> None:
    @compensation(retry_policy=ONCE)
    async def fail(ctx: WorkflowContext) -> None:
        raise ConnectionError("no")

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        register_compensation(ctx, fail)
        await sleep(ctx, 3600)

    run_id = await app.start(trip)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    await app.cancel(run_id, "enough")
    error = await failure_of(app, run_id)
    assert isinstance(error, CompensationError)
    assert isinstance(error.__cause__, WorkflowCancelledError)
    assert "enough" in str(error.__cause__)


async def test_an_undo_is_tried_again_by_its_own_policy(make_app: MakeApp) -> None:
    app = await make_app(default_retry_policy=ONCE)
    attempts: list[int] = []
    keys: set[str] = set()

    @compensation(retry_policy=SOON)
    async def refund(ctx: WorkflowContext) -> None:
        attempts.append(ctx.attempt)
        keys.add(ctx.idempotency_key)
        if ctx.attempt < 3:
            raise ConnectionError("later")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        register_compensation(ctx, refund)
        raise ValueError("sold out")

    run_id = await app.start(order)
    with pytest.raises(ValueError, match="sold out"):
        await result_of(app, run_id)
    assert attempts == [1, 2, 3]
    assert len(keys) == 1
    assert (await kinds_in(app, run_id)).count(EntryKind.RETRY) == 2


async def test_an_undo_without_a_policy_is_tried_again_by_that_of_the_app(make_app: MakeApp) -> None:
    app = await make_app(default_retry_policy=RetryPolicy(initial_interval=0.01, max_attempts=2))
    attempts: list[int] = []

    async def refund(ctx: WorkflowContext) -> None:
        attempts.append(ctx.attempt)
        raise ConnectionError("never")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        register_compensation(ctx, refund)
        raise ValueError("sold out")

    with pytest.raises(CompensationError):
        await app.run(order)
    assert attempts == [1, 2]


async def test_a_run_that_undoes_says_so_also_after_a_restart(make_app: MakeApp) -> None:
    log: list[str] = []
    begun, go = asyncio.Event(), asyncio.Event()
    order = order_with_slow_refund(log, begun, go)

    first = await make_app()
    run_id = await first.start(order)
    await begun.wait()
    await until_status(first, run_id, RunStatus.COMPENSATING)
    await first.shutdown(grace=0)
    client = await make_app(worker=False)
    assert await client.handle(run_id).status() is RunStatus.COMPENSATING
    (found,) = (await client.find_instances(status="compensating"))["instances"]
    assert found["instance_id"] == run_id
    begun.clear()
    await make_app()
    await begun.wait()
    assert await client.handle(run_id).status() is RunStatus.COMPENSATING
    go.set()
    with pytest.raises(ValueError, match="sold out"):
        await result_of(client, run_id)
    assert log == ["book flight", "refund", "unbook flight"]


async def test_a_run_between_two_tries_of_an_undo_is_compensating(app: EddaApp) -> None:
    @compensation(retry_policy=RetryPolicy(initial_interval=3600))
    async def refund(ctx: WorkflowContext) -> None:
        raise ConnectionError("later")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        register_compensation(ctx, refund)
        raise ValueError("sold out")

    run_id = await app.start(order)
    await until_recorded(app, run_id, EntryKind.RETRY)
    await until_status(app, run_id, RunStatus.COMPENSATING)


async def test_undoing_goes_on_where_a_restart_interrupted_it(make_app: MakeApp) -> None:
    log: list[str] = []
    begun = asyncio.Event()
    book = bookings(log)

    @compensation
    async def refund(ctx: WorkflowContext, card: str) -> None:
        log.append(f"refund {card}")
        if card == "B" and log.count("refund B") == 1:
            begun.set()
            await asyncio.Event().wait()

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        for card in "ABC":
            register_compensation(ctx, refund, card)
        raise ValueError("sold out")

    first = await make_app()
    run_id = await first.start(order)
    await begun.wait()
    await first.shutdown(grace=0)
    second = await make_app()
    with pytest.raises(ValueError, match="sold out"):
        await result_of(second, run_id)
    assert log == ["book flight", "refund C", "refund B", "refund B", "refund A", "unbook flight"]


async def test_a_workflow_that_cleans_up_itself_is_undone_after_its_cleanup(app: EddaApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @workflow
    async def trip(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        try:
            await wait_event(ctx, "paid")
            raise ValueError("not enough")
        finally:
            await book(ctx, "therapy")

    run_id = await start_waiting(app, trip)
    await send(app, "paid", 1)
    with pytest.raises(ValueError, match="not enough"):
        await result_of(app, run_id)
    assert log == ["book flight", "book therapy", "unbook therapy", "unbook flight"]


async def test_an_undo_may_be_an_activity_that_the_workflow_also_calls(app: EddaApp) -> None:
    log: list[Any] = []

    @activity
    async def note(ctx: WorkflowContext, what: str) -> None:
        log.append((ctx.activity_id, what))

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await note(ctx, "begun")
        register_compensation(ctx, note, what="undone")
        raise ValueError("sold out")

    with pytest.raises(ValueError, match="sold out"):
        await app.run(order)
    assert log == [("note:1", "begun"), ("undo:1/note", "undone")]
