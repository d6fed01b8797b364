"""Beginning anew: a run goes on for ever under one id, and each generation has a short history of its own."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from edda import (
    EddaApp,
    EventTimeoutError,
    RetryPolicy,
    RunStatus,
    WorkflowCancelledError,
    WorkflowContext,
    activity,
    on_failure,
    register_compensation,
    sleep,
    wait_any,
    wait_event,
    workflow,
)
from edda.core.model import EntryKind, RunId
from edda.errors import ArgumentError, NotInWorkflowError, RetryExhaustedError, WorkflowTimeoutError
from edda.testing import VirtualApp

from .conditions import until, until_status
from .conftest import RESTLESS, MakeApp
from .events import result_of, send, start_waiting, until_waiting_for
from .histories import entries_by_generation, generation_of

QUICK = replace(RESTLESS, linger=0.5)
"""What is due soon stays in memory."""


async def until_generation(app: EddaApp, run_id: str, generation: int) -> None:
    async def is_reached() -> bool:
        return await generation_of(app, run_id) >= generation

    await until(is_reached, f"run {run_id} is in generation {generation}")


async def test_a_run_begins_anew_under_its_id_with_a_history_of_its_own(app: EddaApp) -> None:
    ids: set[str] = set()

    @activity
    async def fetch(ctx: WorkflowContext, page: int) -> int:
        ids.add(ctx.instance_id)
        return 10 * page

    @workflow
    async def crawl(ctx: WorkflowContext, page: int = 1, total: int = 0) -> list[int]:
        total += await fetch(ctx, page)
        await sleep(ctx, 0.01)
        if page < 3:
            await ctx.recur(page + 1, total=total)
        return [page, total]

    run_id = await app.start(crawl)
    assert await result_of(app, run_id) == [3, 60]
    assert ids == {run_id}
    assert await generation_of(app, run_id) == 2
    work = [EntryKind.STEP, EntryKind.TIMER]
    assert await entries_by_generation(app, run_id) == [
        work,
        [EntryKind.RECUR, *work],
        [EntryKind.RECUR, *work],
    ]
    assert [entry.kind for entry in await app.handle(run_id).history()] == [EntryKind.RECUR, *work]


async def test_a_run_begins_anew_before_it_has_done_anything(app: EddaApp) -> None:
    @workflow
    async def count(ctx: WorkflowContext, number: int) -> int:
        if number:
            await ctx.recur(number - 1)
        return number

    run_id = await app.start(count, 5)
    assert await result_of(app, run_id) == 0
    assert await entries_by_generation(app, run_id) == [[], *([EntryKind.RECUR] for _ in range(5))]


async def test_steps_of_two_generations_have_different_keys_and_chances(app: EddaApp) -> None:
    keys: list[str] = []

    @activity
    async def note(ctx: WorkflowContext) -> None:
        keys.append(ctx.idempotency_key)

    @workflow
    async def twice(ctx: WorkflowContext, before: str = "") -> bool:
        await note(ctx)
        drawn = str(ctx.uuid4())
        if not before:
            await ctx.recur(drawn)
        return before != drawn

    run_id = await app.start(twice)
    assert await result_of(app, run_id) is True
    assert keys == [f"{run_id}/0/note:1", f"{run_id}/1/note:1"]


async def test_a_run_goes_on_from_its_last_generation_after_a_restart(make_app: MakeApp) -> None:
    begun: list[int] = []
    stuck = asyncio.Event()

    @activity
    async def work(ctx: WorkflowContext, number: int) -> None:
        begun.append(number)
        if number == 2 and begun.count(2) == 1:
            stuck.set()
            await asyncio.Event().wait()

    @workflow
    async def count(ctx: WorkflowContext, number: int = 0) -> int:
        await work(ctx, number)
        if number < 3:
            await ctx.recur(number + 1)
        return number

    first = await make_app()
    run_id = await first.start(count)
    await stuck.wait()
    await first.shutdown(grace=0)
    second = await make_app()
    assert await result_of(second, run_id) == 3
    assert begun == [0, 1, 2, 2, 3]


async def test_events_come_once_and_in_order_whenever_they_come(app: EddaApp) -> None:
    """Before the first generation waits, between two of them, and while one waits."""

    @workflow
    async def consume(ctx: WorkflowContext, got: list[int]) -> list[int]:
        if not got:
            await wait_event(ctx, "begin")
        got.append((await wait_event(ctx, "number")).data)
        if len(got) in (2, 6):
            got.append((await wait_event(ctx, "number")).data)
        if len(got) < 10:
            await ctx.recur(got)
        return got

    run_id = await start_waiting(app, consume, [])
    for number in range(4):
        await send(app, "number", number)
    await send(app, "begin")
    for number in range(4, 7):
        await send(app, "number", number)
    await until_waiting_for(app, run_id, "number:1")
    for number in range(7, 10):
        await send(app, "number", number)
    assert await result_of(app, run_id) == list(range(10))


async def test_the_place_in_the_events_of_each_match_is_carried_over(app: EddaApp) -> None:
    @workflow
    async def consume(ctx: WorkflowContext, got: list[str]) -> list[str]:
        for order in "AB" if len(got) < 4 else "BA":
            got.append((await wait_event(ctx, "paid", match={"order": order})).data["note"])
        if len(got) < 6:
            await ctx.recur(got)
        return got

    run_id = await start_waiting(app, consume, [])
    for note in ("A1", "A2", "A3", "B1", "B2", "B3"):
        await send(app, "paid", {"order": note[0], "note": note})
    assert await result_of(app, run_id) == ["A1", "B1", "A2", "B2", "B3", "A3"]
    received, (recurred, *_) = [await app.engine.storage.history(RunId(run_id), generation) for generation in (1, 2)]
    floors, given_back, *_ = app.engine.codec.decode(recurred.value)
    numbers = [entry.event for entry in received if entry.kind is EntryKind.EVENT]
    assert (sorted(floors.values()), given_back) == (numbers, []), "nothing that was read is gone through again"


async def test_an_event_that_one_generation_passed_by_is_there_for_the_next(app: EddaApp) -> None:
    @workflow
    async def consume(ctx: WorkflowContext, got: list[str]) -> list[str]:
        match = None if got else {"order": "B"}
        got.append((await wait_event(ctx, "paid", match=match)).data["note"])
        if len(got) < 3:
            await ctx.recur(got)
        return got

    run_id = await start_waiting(app, consume, [])
    for note in ("A1", "B1", "A2"):
        await send(app, "paid", {"order": note[0], "note": note})
    assert await result_of(app, run_id) == ["B1", "A1", "A2"]


async def test_an_event_that_came_when_its_wait_was_over_is_there_for_the_next_generation(app: EddaApp) -> None:
    @workflow
    async def consume(ctx: WorkflowContext, tries: int = 0) -> list[int]:
        try:
            return [tries >= 1, (await wait_event(ctx, "number", timeout_seconds=0.05 if not tries else 20)).data]
        except EventTimeoutError:
            await ctx.recur(tries + 1)

    run_id = await app.start(consume)
    await until_generation(app, run_id, 1)
    await send(app, "number", 7)
    assert await result_of(app, run_id) == [True, 7]


async def test_an_event_that_was_received_does_not_come_again_by_another_wait(app: EddaApp) -> None:
    @workflow
    async def consume(ctx: WorkflowContext, got: list[str]) -> list[str]:
        match = None if got else {"order": "A"}
        got.append((await wait_event(ctx, "paid", match=match)).data["note"])
        if len(got) < 2:
            await ctx.recur(got)
        return got

    run_id = await start_waiting(app, consume, [])
    await send(app, "paid", {"order": "A", "note": "first"})
    await send(app, "paid", {"order": "A", "note": "second"})
    assert await result_of(app, run_id) == ["first", "second"]


async def test_a_run_that_begins_anew_all_the_time_can_be_cancelled(app: EddaApp) -> None:
    """However the cancel falls between two generations: it is never lost, and never meets the wrong one."""

    @workflow
    async def restless(ctx: WorkflowContext, number: int = 0) -> None:
        await ctx.step("note", int)
        await ctx.recur(number + 1)

    for _ in range(20):
        run_id = await app.start(restless)
        await until_generation(app, run_id, 1)
        assert await app.cancel(run_id, "enough")
        with pytest.raises(WorkflowCancelledError, match="enough"):
            await result_of(app, run_id)
        assert await app.handle(run_id).status() is RunStatus.CANCELLED


async def test_a_cancel_that_one_generation_refused_does_not_stop_the_next_one(app: EddaApp) -> None:
    @workflow
    async def stubborn(ctx: WorkflowContext, number: int = 0) -> int:
        try:
            await wait_event(ctx, "go")
        except asyncio.CancelledError:
            if ctx.is_unwinding:
                raise
            await ctx.recur(number + 1)
        return number

    run_id = await start_waiting(app, stubborn)
    for generation in (1, 2):
        await app.cancel(run_id)
        await until_generation(app, run_id, generation)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await send(app, "go")
    assert await result_of(app, run_id) == 2


async def test_the_time_of_a_run_is_that_of_all_its_generations(app: EddaApp) -> None:
    @workflow
    async def restless(ctx: WorkflowContext, number: int = 0) -> None:
        await sleep(ctx, 0.05)
        await ctx.recur(number + 1)

    began = time.monotonic()
    run_id = await app.start(restless.options(timeout=1.0))
    with pytest.raises(WorkflowTimeoutError):
        await result_of(app, run_id)
    assert time.monotonic() - began < 20
    assert await generation_of(app, run_id) > 0


async def test_what_an_earlier_generation_did_is_not_undone(app: EddaApp) -> None:
    undone: list[int] = []

    async def undo(ctx: WorkflowContext, number: int) -> None:
        undone.append(number)

    @workflow
    async def work(ctx: WorkflowContext, number: int = 0) -> None:
        register_compensation(ctx, undo, number)
        if number < 2:
            await ctx.recur(number + 1)
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        await app.run(work)
    assert undone == [2]


async def test_children_that_an_earlier_generation_started_are_on_their_own(app: EddaApp) -> None:
    @workflow
    async def child(ctx: WorkflowContext) -> str:
        return str((await wait_event(ctx, "go")).data)

    @workflow
    async def parent(ctx: WorkflowContext, number: int = 0) -> None:
        await child.options(id=f"child of {number}").start()
        if number == 0:
            await ctx.recur(1)
        await sleep(ctx, 3600)

    run_id = await app.start(parent)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    await app.cancel(run_id)
    await until_status(app, "child of 1", RunStatus.CANCELLED)
    await until_status(app, "child of 0", RunStatus.WAITING_FOR_EVENT)
    await send(app, "go", "on")
    assert await result_of(app, "child of 0") == "on"


async def test_nobody_catches_the_beginning_of_the_next_generation_by_accident(app: EddaApp) -> None:
    cleaned: list[int] = []

    @workflow
    async def work(ctx: WorkflowContext, number: int = 0) -> int:
        try:
            if number == 0:
                await ctx.recur(1)
        except Exception:
            return -1
        finally:
            cleaned.append(number)
        return number

    assert await app.run(work) == 1
    assert cleaned == [0, 1]


async def test_branches_that_are_left_over_are_cancelled_before_the_next_generation(app: EddaApp) -> None:
    cleaned: list[str] = []

    @activity
    async def clean(ctx: WorkflowContext) -> None:
        cleaned.append(ctx.idempotency_key)

    @workflow
    async def work(ctx: WorkflowContext, number: int = 0) -> int:
        async def watch() -> None:
            try:
                await wait_event(ctx, "never")
            finally:
                if not ctx.is_unwinding:
                    await clean(ctx)

        task = asyncio.create_task(watch())
        await sleep(ctx, 0.01)
        if number == 0:
            await ctx.recur(1)
        task.cancel()
        await asyncio.wait([task])
        return number

    run_id = await app.start(work)
    assert await result_of(app, run_id) == 1
    assert [key.split("/")[:2] for key in cleaned] == [[run_id, "0"], [run_id, "1"]]


async def test_only_the_workflow_itself_can_begin_anew(app: EddaApp) -> None:
    @activity(retry_policy=RetryPolicy(max_attempts=1))
    async def in_an_activity(ctx: WorkflowContext) -> None:
        await ctx.recur()

    @workflow
    async def work(ctx: WorkflowContext) -> list[str]:
        async def branch() -> None:
            await ctx.recur()

        said = []
        for attempt in (asyncio.create_task(branch()), in_an_activity(ctx)):
            try:
                await attempt
            except (NotInWorkflowError, RetryExhaustedError) as error:
                said.append(str(error))
        return said

    in_branch, in_activity = await app.run(work)
    assert "not in another task" in in_branch
    assert "in an activity" in in_activity


async def test_arguments_of_the_next_generation_are_checked_where_it_is_asked_for(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext, number: int = 0) -> int:
        refused = 0
        wrong: tuple[dict[str, Any], ...] = ({"nubmer": 1}, {"number": "one"}, {"number": 1, "other": 2})
        for kwargs in wrong:
            try:
                await ctx.recur(**kwargs)
            except ArgumentError:
                refused += 1
        return refused

    run_id = await app.start(work)
    assert await result_of(app, run_id) == 3
    assert await generation_of(app, run_id) == 0


async def test_the_result_is_that_of_the_last_generation_for_whoever_waits_elsewhere(make_app: MakeApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext, number: int = 0) -> int:
        await wait_event(ctx, "go")
        if number < 2:
            await ctx.recur(number + 1)
        return number

    owner, client = await make_app(), await make_app(worker=False)
    run_id = await start_waiting(owner, work)
    waiting = asyncio.create_task(result_of(client, run_id))
    for _ in range(3):
        await send(client, "go")
    assert await waiting == 2


async def test_who_waits_for_a_run_from_whichever_generation_on_gets_its_last_result(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext, number: int = 0) -> int:
        await wait_event(ctx, "go")
        if number < 3:
            await ctx.recur(number + 1)
        return number

    @workflow
    async def watch(ctx: WorkflowContext) -> int:
        return await work.handle("work").result()

    await app.start(work.options(id="work"))
    watchers: list[str] = []
    for generation in range(4):
        await until_generation(app, "work", generation)
        watchers.append(await app.start(watch))
        await until_status(app, watchers[-1], RunStatus.WAITING_FOR_CHILD)
        await send(app, "go")
    assert [await result_of(app, watcher) for watcher in watchers] == [3] * 4


async def test_a_year_of_months_passes_in_no_time() -> None:
    @workflow
    async def month(ctx: WorkflowContext) -> None:
        await sleep(ctx, timedelta(days=30))

    @workflow
    async def year(ctx: WorkflowContext, number: int = 1) -> int:
        await month.run()
        if number < 12:
            await ctx.recur(number + 1)
        return number

    async with VirtualApp() as app:
        began = app.now()
        assert await app.run(year) == 12
        assert app.now() - began == timedelta(days=360)


async def test_a_deadline_that_passes_when_the_code_is_done_stops_the_next_generation(app: EddaApp) -> None:
    """The code of the first is done; only a step that cannot be interrupted is still under way."""
    begun, may_end = asyncio.Event(), asyncio.Event()

    @activity
    @on_failure(sweep)
    async def hold(ctx: WorkflowContext) -> None:
        begun.set()
        await may_end.wait()

    @activity
    async def see_it_begin(ctx: WorkflowContext) -> None:
        await begun.wait()

    @workflow
    async def restless(ctx: WorkflowContext, generation: int = 0) -> None:
        if generation == 0:
            await wait_any(ctx, hold(ctx), see_it_begin(ctx))
            await ctx.recur(1)
        await sleep(ctx, 3600)

    run_id = await app.start(restless.options(timeout=1.0))
    record = await app.client.read_run(run_id)
    assert record.deadline is not None
    deadline = record.deadline

    async def is_over() -> bool:
        return app.engine.clock.now() > deadline + 50_000

    await until(is_over, "the deadline is over")
    may_end.set()
    with pytest.raises(WorkflowTimeoutError):
        await app.handle(run_id).result(timeout=20)
    first, second = await entries_by_generation(app, run_id)
    assert first == [EntryKind.STEP, EntryKind.LATE]
    assert second == [EntryKind.RECUR, EntryKind.TIMEOUT]


async def sweep(ctx: WorkflowContext) -> None: ...


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_ten_thousand_generations(make_app: MakeApp) -> None:
    app = await make_app(settings=QUICK)

    @workflow
    async def count(ctx: WorkflowContext, number: int = 0) -> int:
        if number < 10_000:
            await ctx.recur(number + 1)
        return number

    run_id = await app.start(count)
    assert await app.handle(run_id).result(timeout=60) == 10_000
    assert await generation_of(app, run_id) == 10_000
