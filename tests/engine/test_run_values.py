"""What a run says of itself with ctx.set, and who reads it: the newest value, wherever the run stands."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel

from edda import (
    EddaApp,
    RunStatus,
    TerminalError,
    WorkflowContext,
    activity,
    on_failure,
    receive,
    send_to,
    sleep,
    wait_event,
    workflow,
)
from edda.errors import InstanceNotFoundError, NotInWorkflowError, PayloadError, PayloadTooLargeError, ValueNotSetError
from edda.testing import VirtualApp

from .conditions import until_status
from .conftest import MakeApp
from .events import result_of, send, start_waiting, until_waiting_for
from .histories import generation_of
from .messages import kill


async def test_a_value_is_read_from_outside_while_the_run_goes_on(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> None:
        ctx.set("stage", "packing")
        await wait_event(ctx, "go")
        ctx.set("stage", "shipping")
        await wait_event(ctx, "go")

    run_id = await start_waiting(app, work)
    handle = app.handle(run_id)
    assert await handle.get("stage") == "packing"
    await send(app, "go")
    await until_waiting_for(app, run_id, "go:2")
    assert await handle.get("stage") == "shipping"
    await send(app, "go")
    await result_of(app, run_id)
    assert await handle.get("stage") == "shipping", "it stays when the run is over"


async def test_another_process_reads_it_too(make_app: MakeApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> None:
        ctx.set("stage", 1)
        await wait_event(ctx, "go")

    app, door = await make_app(), await make_app(worker=False)
    run_id = await start_waiting(app, work)
    assert await door.handle(run_id).get("stage") == 1


async def test_what_was_never_set_is_the_default(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> None:
        ctx.set("nothing", None)

    run_id = await app.start(work)
    await result_of(app, run_id)
    handle = app.handle(run_id)
    assert await handle.get("stage") is None
    assert await handle.get("stage", "unknown") == "unknown"
    assert await handle.get("nothing", "unknown") is None, "None is a value"


async def test_the_newest_value_wins_also_within_one_step(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> None:
        for number in range(5):
            ctx.set("number", number)
        ctx.set("other", "x")
        await sleep(ctx, 0.01)
        for number in range(5, 10):
            ctx.set("number", number)

    run_id = await app.start(work)
    await result_of(app, run_id)
    assert await app.handle(run_id).get("number") == 9
    assert await app.handle(run_id).get("other") == "x"


async def test_every_run_has_its_own_values(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext, number: int) -> None:
        ctx.set("number", number)

    run_ids = [await app.start(work, number) for number in range(5)]
    for number, run_id in enumerate(run_ids):
        await result_of(app, run_id)
        assert await app.handle(run_id).get("number") == number


KEYS = ["a", "A", "a ", " a", "ä", "a\u0308", "ß", "ss", "x" * 200, "x" * 199 + "y", "🎺", "a/b", "a\n"]


async def test_keys_that_differ_in_anything_are_different(app: EddaApp) -> None:
    """A database may take them for the same: case, accents and spaces at the end count here."""

    @workflow
    async def work(ctx: WorkflowContext) -> None:
        for number, key in enumerate(KEYS):
            ctx.set(key, number)

    run_id = await app.start(work)
    await result_of(app, run_id)
    assert [await app.handle(run_id).get(key) for key in KEYS] == list(range(len(KEYS)))


class Progress(BaseModel):
    done: int
    at: datetime


async def test_a_value_of_any_kind_comes_back_as_it_was_set(app: EddaApp) -> None:
    moment = datetime(2030, 1, 1, tzinfo=UTC)

    @workflow
    async def work(ctx: WorkflowContext) -> None:
        ctx.set("bytes", b"\xff\x00")
        ctx.set("list", [1, {"a": (2, 3)}])
        ctx.set("time", moment)
        ctx.set("model", Progress(done=3, at=moment))

    run_id = await app.start(work)
    await result_of(app, run_id)
    handle = app.handle(run_id)
    assert await handle.get("bytes") == b"\xff\x00"
    assert await handle.get("list") == [1, {"a": (2, 3)}]
    assert await handle.get("time") == moment
    assert await handle.get("model", type=Progress) == Progress(done=3, at=moment)
    assert await handle.wait("model", type=Progress) == Progress(done=3, at=moment)


async def test_replay_neither_repeats_nor_takes_back(app: EddaApp) -> None:
    """A run that is replayed goes through its old values; nobody sees them again."""
    seen: list[Any] = []

    @activity
    async def look(ctx: WorkflowContext) -> None:
        seen.append(await app.handle(ctx.instance_id).get("number"))

    @workflow
    async def work(ctx: WorkflowContext) -> None:
        for number in range(4):
            ctx.set("number", number)
            await sleep(ctx, 0.01)
            await look(ctx)

    run_id = await app.start(work)
    await result_of(app, run_id)
    assert seen == [0, 1, 2, 3]


async def test_a_value_is_there_before_the_next_step_has_an_effect(app: EddaApp) -> None:
    @activity
    async def look(ctx: WorkflowContext) -> Any:
        return await app.handle(ctx.instance_id).get("number")

    @workflow
    async def work(ctx: WorkflowContext) -> list[Any]:
        await sleep(ctx, 0.01)
        seen = []
        for number in range(3):
            ctx.set("number", number)
            seen.append(await look(ctx))
        return seen

    assert await app.run(work) == [0, 1, 2]


async def test_values_go_over_to_the_next_generation_and_it_can_set_them_anew(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext, number: int = 0) -> None:
        if number == 0:
            ctx.set("first", "kept")
        ctx.set("number", number)
        if number < 3:
            await ctx.recur(number + 1)
        await wait_event(ctx, "go")

    run_id = await start_waiting(app, work)
    assert await generation_of(app, run_id) == 3
    handle = app.handle(run_id)
    assert await handle.get("first") == "kept"
    assert await handle.get("number") == 3


async def test_a_generation_that_was_replayed_sets_what_it_has_not_set_before(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext, number: int = 0) -> None:
        ctx.set("begun", number)
        await sleep(ctx, 0.01)
        ctx.set("middle", number)
        await sleep(ctx, 0.01)
        if number < 2:
            await ctx.recur(number + 1)

    run_id = await app.start(work)
    await result_of(app, run_id)
    handle = app.handle(run_id)
    assert [await handle.get("begun"), await handle.get("middle")] == [2, 2]


async def test_a_value_survives_a_crash(make_app: MakeApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> None:
        ctx.set("stage", 1)
        await wait_event(ctx, "go")
        ctx.set("stage", 2)
        await wait_event(ctx, "go")

    first, door = await make_app(), await make_app(worker=False)
    run_id = await start_waiting(first, work)
    await kill(first, door)
    assert await door.handle(run_id).get("stage") == 1
    await send(door, "go")
    second = await make_app()
    await until_waiting_for(second, run_id, "go:2")
    assert await door.handle(run_id).get("stage") == 2
    await kill(second, door)
    assert await door.handle(run_id).get("stage") == 2


async def test_a_value_that_was_set_before_a_crash_in_an_activity_is_there_and_is_set_again(make_app: MakeApp) -> None:
    begun = asyncio.Event()
    is_stuck = True

    @activity
    async def work(ctx: WorkflowContext) -> None:
        begun.set()
        if is_stuck:
            await asyncio.Event().wait()

    @workflow
    async def job(ctx: WorkflowContext) -> None:
        ctx.set("stage", "before")
        await work(ctx)
        ctx.set("stage", "after")

    first, door = await make_app(), await make_app(worker=False)
    run_id = await first.start(job)
    await asyncio.wait_for(begun.wait(), 30)
    assert await door.handle(run_id).wait("stage", timeout=30) == "before"
    is_stuck = False
    await kill(first, door)
    second = await make_app()
    await result_of(second, run_id)
    assert await door.handle(run_id).get("stage") == "after"


async def test_values_of_runs_that_fail_and_undo_are_kept(app: EddaApp) -> None:
    async def undo(ctx: WorkflowContext) -> None: ...

    @activity
    @on_failure(undo)
    async def work(ctx: WorkflowContext) -> None: ...

    @workflow
    async def job(ctx: WorkflowContext) -> None:
        await work(ctx)
        try:
            raise TerminalError("no")
        finally:
            ctx.set("stage", "failed")

    run_id = await app.start(job)
    with pytest.raises(TerminalError):
        await result_of(app, run_id)
    assert await app.handle(run_id).get("stage") == "failed"


async def test_leaving_memory_is_no_reason_to_set_anything(app: EddaApp) -> None:
    """`finally` runs at every suspend."""

    @workflow
    async def job(ctx: WorkflowContext) -> None:
        ctx.set("stage", "waiting")
        try:
            await wait_event(ctx, "go")
        finally:
            ctx.set("stage", "over")

    run_id = await start_waiting(app, job)
    assert await app.handle(run_id).get("stage") == "waiting"
    await send(app, "go")
    await result_of(app, run_id)
    assert await app.handle(run_id).get("stage") == "over"


# Waiting for it


async def test_wait_returns_as_soon_as_there_is_a_value(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "go")
        ctx.set("url", "https://example.com/1")
        await wait_event(ctx, "go")

    run_id = await start_waiting(app, work)
    waiting = asyncio.create_task(app.handle(run_id).wait("url", timeout=30))
    await asyncio.sleep(0)
    await send(app, "go")
    assert await waiting == "https://example.com/1"
    assert await app.handle(run_id).wait("url") == "https://example.com/1"


async def test_wait_in_another_process_returns_too(make_app: MakeApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> None:
        ctx.set("answer", (await receive(ctx, "__direct__")).data)

    app, door = await make_app(), await make_app(worker=False)
    run_id = await app.start(work)
    waiting = asyncio.create_task(door.handle(run_id).wait("answer", timeout=30))
    await until_status(door, run_id, RunStatus.WAITING_FOR_MESSAGE)
    await send_to(door, run_id, 42)
    assert await waiting == 42


async def test_wait_gives_up_after_its_time_and_the_run_goes_on(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> str:
        await wait_event(ctx, "go")
        return "done"

    run_id = await start_waiting(app, work)
    with pytest.raises(TimeoutError, match=rf"^run {run_id} did not set 'url' within 0\.2 seconds$"):
        await app.handle(run_id).wait("url", timeout=0.2)
    await send(app, "go")
    assert await result_of(app, run_id) == "done"


async def test_wait_says_so_if_the_run_ends_without_the_value(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> None:
        ctx.set("other", 1)
        await wait_event(ctx, "go")

    run_id = await start_waiting(app, work)
    waiting = asyncio.create_task(app.handle(run_id).wait("url", timeout=30))
    await send(app, "go")
    with pytest.raises(ValueNotSetError, match=rf"^run {run_id} has ended, and never set 'url'$") as never:
        await waiting
    assert isinstance(never.value, LookupError)


async def test_an_unknown_run_has_no_values(app: EddaApp) -> None:
    for reading in (app.handle("unknown").get("url"), app.handle("unknown").wait("url")):
        with pytest.raises(InstanceNotFoundError):
            await reading


async def test_values_can_be_waited_for_in_virtual_time(edda_app: VirtualApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> None:
        await sleep(ctx, 86_400)
        ctx.set("stage", "a day later")

    run_id = await edda_app.start(work)
    assert await edda_app.handle(run_id).wait("stage", timeout=30) == "a day later"


# What is not allowed


async def test_set_belongs_into_a_workflow(app: EddaApp) -> None:
    @activity
    async def try_it(ctx: WorkflowContext) -> str:
        with pytest.raises(NotInWorkflowError) as refused:
            ctx.set("stage", 1)
        return str(refused.value)

    @workflow
    async def work(ctx: WorkflowContext) -> str:
        return await try_it(ctx)

    assert await app.run(work) == "ctx.set() was called in an activity: call it in the code of the workflow"


async def test_reading_belongs_outside_or_into_an_activity(app: EddaApp) -> None:
    @activity
    async def read(ctx: WorkflowContext, run_id: str) -> Any:
        return [await app.handle(run_id).wait("number", timeout=30), await app.handle(run_id).get("number")]

    @workflow
    async def work(ctx: WorkflowContext) -> list[Any]:
        ctx.set("number", 7)
        complaints = []
        for verb in ("get", "wait"):
            with pytest.raises(NotInWorkflowError) as refused:
                await getattr(app.handle(ctx.instance_id), verb)("number")
            complaints.append(str(refused.value))
        return [*complaints, *await read(ctx, ctx.instance_id)]

    assert await app.run(work) == [
        "handle.get() in the code of a workflow: call it in an activity instead",
        "handle.wait() in the code of a workflow: call it in an activity instead",
        7,
        7,
    ]


@pytest.mark.parametrize("key", ["", "x" * 201, 7, None, "a\x00b", "half \ud800"])
async def test_a_key_that_is_none_is_refused(app: EddaApp, key: Any) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> str:
        with pytest.raises(ValueError, match=r"^ctx\.set") as refused:
            ctx.set(key, 1)
        return ascii(str(refused.value))

    assert await app.run(work) == ascii(f"ctx.set({key!r}): expected a key of 1 to 200 characters")


async def test_a_value_that_cannot_be_stored_is_refused_where_it_is_set(app: EddaApp) -> None:
    @workflow
    async def work(ctx: WorkflowContext) -> None:
        with pytest.raises(PayloadTooLargeError):
            ctx.set("large", "x" * 3_000_000)
        with pytest.raises(PayloadError):
            ctx.set("odd", object())

    run_id = await app.start(work)
    await result_of(app, run_id)
    assert await app.handle(run_id).get("large", "nothing") == "nothing"
