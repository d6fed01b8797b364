"""The end of waiting: one outcome, whatever comes at the same instant, and no event is lost by it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from edda import EddaApp, EventTimeoutError, WorkflowContext, activity, sleep, wait_event, workflow
from edda.core.model import BatchResult, EntryKind, Fence, RunWrite
from edda.testing import VirtualApp

from .conftest import MakeApp
from .events import result_of, send, start_waiting, until_waiting_for

SHORT = 0.05


async def test_a_wait_that_is_over_raises_a_timeout_error_and_the_workflow_goes_on(app: EddaApp) -> None:
    live: list[str] = []

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        try:
            await wait_event(ctx, "paid", SHORT, match={"order": 1})
        except TimeoutError as error:
            live.append(f"{type(error).__name__}: {error}")
        await sleep(ctx, 0.3)
        return live[-1]

    assert await app.run(order) == "EventTimeoutError: no event came within 0.05 seconds: paid where order = 1"
    assert len(live) >= 2, "it was replayed"
    assert len(set(live)) == 1


async def test_a_wait_that_nobody_catches_fails_the_run_with_its_own_error(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid", timedelta(seconds=SHORT))

    with pytest.raises(EventTimeoutError, match=r"within 0\.05 seconds: paid"):
        await app.run(order)


async def test_an_event_that_comes_after_the_timeout_is_for_the_next_wait(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        with pytest.raises(EventTimeoutError):
            await wait_event(ctx, "paid", SHORT)
        await wait_event(ctx, "go")
        return (await wait_event(ctx, "paid")).data

    run_id = await app.start(order)
    await until_waiting_for(app, run_id, "go:1")
    await send(app, "paid", 7)
    await send(app, "go")
    assert await result_of(app, run_id) == 7


async def test_an_event_that_came_in_time_is_received_however_late_the_run_goes_on(make_app: MakeApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return (await wait_event(ctx, "paid", 2)).data

    first = await make_app()
    run_id = await start_waiting(first, order)
    await first.shutdown()
    door = await make_app(worker=False)
    await send(door, "paid", 7)
    await asyncio.sleep(2.05)  # the time-out passes while nobody is there
    second = await make_app()
    assert await result_of(second, run_id) == 7


class HeldTimeout:
    """Stands before the database: the record of a time-out waits until it is let go."""

    def __init__(self, app: EddaApp, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decided, self.let_go = asyncio.Event(), asyncio.Event()
        self._write = app.engine.storage.write
        monkeypatch.setattr(app.engine.storage, "write", self.write)

    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        entries = [entry for bundle in batch for entry in bundle.entries]
        if any(entry.kind is EntryKind.EVENT and not entry.ok for entry in entries):
            self.decided.set()
            await self.let_go.wait()
        return await self._write(fence, batch, token)


async def test_a_timeout_that_won_against_an_event_leaves_it_to_the_next_wait(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        outcomes: list[Any] = []
        for timeout in (SHORT, None):
            try:
                outcomes.append((await wait_event(ctx, "paid", timeout)).data)
            except EventTimeoutError:
                outcomes.append("late")
        return outcomes

    held = HeldTimeout(app, monkeypatch)
    run_id = await app.start(order)
    await asyncio.wait_for(held.decided.wait(), 30)
    await send(app, "paid", 7)
    held.let_go.set()
    assert await result_of(app, run_id) == ["late", 7]
    kinds = [(entry.kind, entry.ok) for entry in await app.handle(run_id).history()]
    assert kinds == [(EntryKind.EVENT, False), (EntryKind.LATE_EVENT, True), (EntryKind.EVENT, True)]


async def test_an_event_given_back_keeps_its_place_in_the_order(app: EddaApp, monkeypatch: pytest.MonkeyPatch) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        with pytest.raises(EventTimeoutError):
            await wait_event(ctx, "part", SHORT)
        await wait_event(ctx, "go")
        return [(await wait_event(ctx, "part")).data for _ in range(3)]

    held = HeldTimeout(app, monkeypatch)
    run_id = await app.start(order)
    await asyncio.wait_for(held.decided.wait(), 30)
    for number in range(3):
        await send(app, "part", number)
    held.let_go.set()
    await send(app, "go")
    assert await result_of(app, run_id) == [0, 1, 2]


@pytest.mark.parametrize("nap", [False, True], ids=["live", "replayed"])
async def test_an_event_given_back_is_found_though_a_later_one_was_received_meanwhile(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch, nap: bool
) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        waits = (wait_event(ctx, "part", SHORT), wait_event(ctx, "part"))
        outcomes: list[Any] = await asyncio.gather(*waits, return_exceptions=True)
        assert isinstance(outcomes[0], EventTimeoutError)
        if nap:
            await sleep(ctx, 0.01)
        return [outcomes[1].data, (await wait_event(ctx, "part")).data]

    held = HeldTimeout(app, monkeypatch)
    run_id = await app.start(order)
    await asyncio.wait_for(held.decided.wait(), 30)
    for number in (1, 2):
        await send(app, "part", number)
    held.let_go.set()
    assert await result_of(app, run_id) == [2, 1]


async def test_an_event_that_comes_late_for_one_wait_is_not_taken_for_another_of_the_same_name(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        with pytest.raises(EventTimeoutError):
            await wait_event(ctx, "paid", SHORT, event_id="answer")
        answer = await wait_event(ctx, "refused", event_id="answer")
        return [answer.type, (await wait_event(ctx, "paid", event_id="answer")).type]

    held = HeldTimeout(app, monkeypatch)
    run_id = await app.start(order)
    await asyncio.wait_for(held.decided.wait(), 30)
    await send(app, "paid")
    held.let_go.set()
    await until_waiting_for(app, run_id, "answer")
    await send(app, "refused")
    assert await result_of(app, run_id) == ["refused", "paid"]


async def test_events_and_timeouts_at_the_same_instant_have_one_outcome_each(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext, number: int) -> list[Any]:
        outcomes: list[Any] = []
        while not outcomes or outcomes[-1] == "late":
            try:
                event = await wait_event(ctx, "paid", 0.1 if not outcomes else None, match={"order": number})
                outcomes.append(event.data["order"])
            except EventTimeoutError:
                outcomes.append("late")
        return outcomes

    run_ids = [await app.start(order, number) for number in range(20)]
    await asyncio.sleep(0.06)
    for number in range(20):
        await send(app, "paid", {"order": number})
        await asyncio.sleep(0.003)
    for number, run_id in enumerate(run_ids):
        assert await result_of(app, run_id) in ([number], ["late", number])


async def test_an_event_that_is_there_is_received_even_by_a_wait_of_no_time(app: EddaApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> list[Any]:
        await wait_event(ctx, "go")
        there = (await wait_event(ctx, "paid", timeout_seconds=0)).data
        with pytest.raises(EventTimeoutError):
            await wait_event(ctx, "paid", timeout_seconds=0)
        return [there]

    run_id = await start_waiting(app, order)
    await send(app, "paid", 7)
    await send(app, "go")
    assert await result_of(app, run_id) == [7]


async def test_a_crash_before_the_wait_was_stored_does_not_turn_its_event_into_a_timeout(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event came in time; that the run goes on after the time is no reason to say it did not."""
    asked = asyncio.Event()

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        await wait_event(ctx, "go")
        return (await wait_event(ctx, "paid", timeout_seconds=0.2)).data

    first = await make_app()
    run_id = await start_waiting(first, order)
    door = await make_app(worker=False)
    write = first.engine.storage.write

    async def write_but_no_wait(fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        if any(wait.type == "paid" for bundle in batch for wait in bundle.waits):
            asked.set()
            await asyncio.Event().wait()
        return await write(fence, batch, token)

    monkeypatch.setattr(first.engine.storage, "write", write_but_no_wait)
    await send(door, "go")
    await asyncio.wait_for(asked.wait(), 30)
    await send(door, "paid", 7)
    worker = first.engine.worker
    assert worker is not None
    first.kill()
    await asyncio.sleep(0.25)  # the time-out passes while nobody is there
    await door.engine.storage.remove_worker(worker.info.id)
    second = await make_app()
    assert await result_of(second, run_id) == 7


async def test_a_month_of_waiting_is_over_at_its_moment(edda_app: VirtualApp) -> None:
    @activity
    async def remind(ctx: WorkflowContext) -> None:
        return None

    @workflow
    async def order(ctx: WorkflowContext) -> float:
        begun = ctx.now()
        for _ in range(3):
            try:
                await wait_event(ctx, "paid", timeout_seconds=10 * 86_400)
            except EventTimeoutError:
                await remind(ctx)
        return (ctx.now() - begun).total_seconds()

    assert await edda_app.run(order) == pytest.approx(30 * 86_400, abs=1)
