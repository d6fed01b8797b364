"""A parked run stays parked whatever is put into its inbox, and has lost nothing of it when it goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from edda import (
    EddaApp,
    RunStatus,
    WorkflowCancelledError,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    publish,
    receive,
    sleep,
    subscribe,
    wait_event,
    workflow,
)
from edda.core.model import EndWatcher, EntryKind, RunFilter, RunId
from edda.engine.settings import Settings
from edda.workflow.workflow import Workflow
from tests.conftest import Database

from .compensated_activity import bookings
from .conditions import reason_of, until, until_status
from .conftest import MakeApp, url_of

PATIENT = Settings(linger=0.0, sweep=0.1, takeover_grace=0.0, poll=0.1, parked_first=3600.0, parked_most=7200.0)
"""Only a new worker tries a parked run."""

Deliver = Callable[[EddaApp, str], Awaitable[object]]


class Statements:
    """Counts what is sent to the database, and how much of it claims runs."""

    def __init__(self) -> None:
        self.claims = 0

    def before(self, statement: str) -> None:
        self.claims += any(words in statement for words in ("epoch = epoch + 1", "epoch = s.epoch + 1", "COMMIT claim"))

    def after(self, statement: str) -> None:
        pass


async def pay(app: EddaApp, n: int) -> None:
    await app.send_event("paid", "/bank", {"n": n})


async def pay_once(app: EddaApp, run_id: str) -> None:
    await pay(app, 1)


async def say(app: EddaApp, run_id: str) -> None:
    await publish(app, "news", {"n": 1})


async def cancel(app: EddaApp, run_id: str) -> None:
    assert await app.handle(run_id).cancel("not wanted")


async def watch(app: EddaApp, run_id: str) -> None:
    await app.engine.storage.add_watcher(RunId(run_id), EndWatcher(RunId("nobody"), "step:1"))


DELIVERIES: dict[str, Deliver] = {"event": pay_once, "message": say, "cancel": cancel, "watcher": watch}


class Shop:
    """An order that waits for events and messages, and code that does not fit it."""

    def __init__(self, make_app: MakeApp, database: Database) -> None:
        self.log: list[str] = []
        self.statements = Statements()
        self._make_app = make_app
        self._database = database
        book = bookings(self.log)

        @workflow(name="order")
        async def right(ctx: WorkflowContext) -> list[Any]:
            await subscribe(ctx, "news")
            await book(ctx, "flight")

            async def news() -> Any:
                return (await receive(ctx, "news")).data["n"]

            async def payments() -> list[Any]:
                return [(await wait_event(ctx, "paid")).data["n"] for _ in range(3)]

            return list(await asyncio.gather(payments(), news()))

        @workflow(name="order")
        async def wrong(ctx: WorkflowContext) -> list[Any]:
            await sleep(ctx, 1)
            return []

        self.right, self.wrong = right, wrong

    async def open(self, *workflows: Workflow[..., Any], settings: Settings = PATIENT) -> EddaApp:
        return await self._make_app(workflows=list(workflows), settings=settings)

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[EddaApp]:
        """With the code that does not fit."""
        storage = self._database.storage(self.statements)
        app = EddaApp("test", url_of(self._database), storage=storage, workflows=[self.wrong], settings=PATIENT)
        await app.initialize()
        try:
            yield app
        finally:
            await app.shutdown(grace=0.0)

    async def begin(self, deliver: Deliver = pay_once) -> str:
        """A run that waited, with something in its inbox that it has not read: a worker claims it for that."""
        first = await self.open(self.right)
        run_id = await first.start(self.right)
        await until_status(first, run_id, RunStatus.WAITING_FOR_EVENT)
        await first.shutdown(grace=0.0)
        outside = await self.open()
        await deliver(outside, run_id)
        await outside.shutdown(grace=0.0)
        return run_id


def parked_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "parked" in record.getMessage()]


async def until_parked_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The line is written after the commit that makes the status visible."""

    async def is_logged() -> bool:
        return bool(parked_lines(caplog))

    await until(is_logged, "that the run is parked is in the log")


@pytest.fixture
def shop(make_app: MakeApp, database: Database) -> Shop:
    return Shop(make_app, database)


@pytest.mark.parametrize("kind", [kind for kind in DELIVERIES if kind != "watcher"])
async def test_a_run_with_unread_letters_is_parked_once(
    shop: Shop, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = await shop.begin(DELIVERIES[kind])
    with caplog.at_level(logging.DEBUG, "edda"):
        async with shop.counted() as app:
            await until_status(app, run_id, RunStatus.PARKED)
            await until_parked_is_logged(caplog)
            caplog.clear()
            claims = shop.statements.claims
            await asyncio.sleep(1.0)  # a run that is not parked is replayed hundreds of times in it
            assert await app.handle(run_id).status() is RunStatus.PARKED
            assert "NonDeterminismError" in await reason_of(app, run_id)
            assert shop.statements.claims - claims <= 12, "it looks for other runs, once per poll"
    assert len(caplog.records) <= 5, [record.getMessage() for record in caplog.records][:20]


@pytest.mark.parametrize("kind", [kind for kind in DELIVERIES if kind != "cancel"])
async def test_a_parked_run_rests_when_something_arrives(
    shop: Shop, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_id = await shop.begin()
    async with shop.counted() as app:
        await until_status(app, run_id, RunStatus.PARKED)
        await until_parked_is_logged(caplog)
        before = await app.client.read_run(run_id)
        caplog.clear()
        for _ in range(5):
            await DELIVERIES[kind](app, run_id)
        await asyncio.sleep(0.5)
        after = await app.client.read_run(run_id)
    assert (after.status, after.reason, after.ready_at) == (RunStatus.PARKED, before.reason, before.ready_at)
    assert not parked_lines(caplog)


async def test_it_goes_on_with_all_that_came_meanwhile_in_order(shop: Shop) -> None:
    run_id = await shop.begin(pay_once)
    wrong = await shop.open(shop.wrong)
    await until_status(wrong, run_id, RunStatus.PARKED)
    await pay(wrong, 2)
    await publish(wrong, "news", {"n": 7})
    await pay(wrong, 3)
    await wrong.shutdown(grace=0.0)
    right = await shop.open(shop.right)
    assert await right.handle(run_id).result(timeout=30) == [[1, 2, 3], 7]


async def test_a_cancel_of_a_parked_run_ends_it_and_says_what_was_not_undone(shop: Shop) -> None:
    run_id = await shop.begin(pay_once)
    app = await shop.open(shop.wrong)
    await until_status(app, run_id, RunStatus.PARKED)
    assert await app.handle(run_id).cancel("fraud")
    expected = r"fraud .*none of its compensations ran.*book:1.*NonDeterminismError"
    with pytest.raises(WorkflowCancelledError, match=expected):
        await app.handle(run_id).result(timeout=30)
    assert await app.handle(run_id).status() is RunStatus.CANCELLED
    assert shop.log == ["book flight"]
    kinds = [entry.kind for entry in await app.handle(run_id).history()]
    assert kinds[-2:] == [EntryKind.LATE_EVENT, EntryKind.CANCEL], "what it had not read is recorded"


async def test_a_cancel_of_a_parked_run_undoes_all_if_the_code_fits_again(shop: Shop) -> None:
    run_id = await shop.begin()
    wrong = await shop.open(shop.wrong)
    await until_status(wrong, run_id, RunStatus.PARKED)
    await wrong.shutdown(grace=0.0)
    outside = await shop.open()
    await cancel(outside, run_id)
    right = await shop.open(shop.right)
    with pytest.raises(WorkflowCancelledError, match=r"not wanted$"):
        await right.handle(run_id).result(timeout=30)
    assert shop.log == ["book flight", "unbook flight"]


async def test_a_run_cancelled_before_it_was_parked_waits_for_its_code(shop: Shop) -> None:
    """During a bad deploy a cancel must not end runs without undoing what they did."""
    run_id = await shop.begin(cancel)
    wrong = await shop.open(shop.wrong)
    await until_status(wrong, run_id, RunStatus.PARKED)
    assert "; a cancel is stored" in (await wrong.control.get_run(run_id)).run.words
    await wrong.shutdown(grace=0.0)
    right = await shop.open(shop.right)
    with pytest.raises(WorkflowCancelledError, match="not wanted"):
        await right.handle(run_id).result(timeout=30)
    assert shop.log == ["book flight", "unbook flight"]


async def test_a_second_cancel_ends_a_run_that_was_cancelled_before_it_was_parked(shop: Shop) -> None:
    run_id = await shop.begin(cancel)
    wrong = await shop.open(shop.wrong)
    await until_status(wrong, run_id, RunStatus.PARKED)
    assert await wrong.handle(run_id).cancel("really")
    with pytest.raises(WorkflowCancelledError, match=r"not wanted .*none of its compensations"):
        await wrong.handle(run_id).result(timeout=30)


async def test_a_run_parked_while_it_undoes_stays_parked_when_it_is_cancelled(make_app: MakeApp) -> None:
    compensating, log = asyncio.Event(), list[str]()
    is_slow = True

    @compensation
    async def unbook(ctx: WorkflowContext, what: str) -> None:
        compensating.set()
        if is_slow:
            await asyncio.Event().wait()
        log.append(f"unbook {what}")

    @activity
    @on_failure(unbook)
    async def book(ctx: WorkflowContext, what: str) -> str:
        return what

    @workflow(name="trip")
    async def right(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        raise ValueError("no car")

    @workflow(name="trip")
    async def wrong(ctx: WorkflowContext) -> None:
        await book(ctx, "hotel")
        raise ValueError("no car")

    first = await make_app(workflows=[right], settings=PATIENT)
    run_id = await first.start(right)
    await compensating.wait()
    await first.shutdown(grace=0.0)
    second = await make_app(workflows=[wrong], settings=PATIENT)
    await until_status(second, run_id, RunStatus.PARKED)
    await cancel(second, run_id)
    await second.shutdown(grace=0.0)
    is_slow = False
    third = await make_app(workflows=[right], settings=PATIENT)
    with pytest.raises(ValueError, match="no car"):
        await third.handle(run_id).result(timeout=30)
    assert log == ["unbook flight"]


async def test_a_parked_child_ends_with_its_cancelled_parent(make_app: MakeApp) -> None:
    log: list[str] = []
    book = bookings(log)

    @workflow(name="child")
    async def right(ctx: WorkflowContext) -> None:
        await book(ctx, "hotel")
        await wait_event(ctx, "paid")

    @workflow(name="child")
    async def wrong(ctx: WorkflowContext) -> None:
        await sleep(ctx, 0.01)

    @workflow(name="parent")
    async def parent(ctx: WorkflowContext) -> None:
        await book(ctx, "flight")
        await right.run()

    first = await make_app(workflows=[right, parent], settings=PATIENT)
    parent_id = await first.start(parent)
    await until_status(first, parent_id, RunStatus.WAITING_FOR_CHILD)
    (child,) = await first.client.find_runs(RunFilter(workflow="child"))
    await until_status(first, child.run_id, RunStatus.WAITING_FOR_EVENT)
    await first.shutdown(grace=0.0)
    second = await make_app(workflows=[wrong, parent], settings=PATIENT)
    await pay(second, 1)
    await until_status(second, child.run_id, RunStatus.PARKED)
    await cancel(second, parent_id)
    with pytest.raises(WorkflowCancelledError, match="not wanted"):
        await second.handle(parent_id).result(timeout=30)
    assert log == ["book flight", "book hotel", "unbook flight"], "it waited for its child to end"
    with pytest.raises(WorkflowCancelledError, match=r"the run that started it was cancelled .*could not be replayed"):
        await second.handle(child.run_id).result(timeout=30)


async def test_the_rest_of_a_parked_run_grows_with_each_try(make_app: MakeApp) -> None:
    @workflow
    async def stuck(ctx: WorkflowContext) -> None:
        await asyncio.Event().wait()

    settings = Settings(linger=0.0, poll=0.05, parked_first=0.05, parked_most=0.4)
    app = await make_app(workflows=[stuck], settings=settings)
    run_id = await app.start(stuck)
    due: list[int] = []

    async def rested() -> bool:
        record = await app.client.read_run(run_id)
        if record.status is RunStatus.PARKED and record.ready_at is not None and record.ready_at not in due:
            due.append(record.ready_at)
        return len(due) >= 4

    await until(rested, "it was parked four times")
    between = [(later - earlier) / 1e6 for earlier, later in pairwise(due)]
    assert [rest >= least for rest, least in zip(between, (0.1, 0.2, 0.4), strict=True)] == [True] * 3, between
