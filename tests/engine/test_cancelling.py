"""Cancelling and timing out: a run can be stopped at every point of its life, and cleans up after itself."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest

from edda import EddaApp, RunStatus, WorkflowCancelledError, WorkflowContext, activity, sleep, workflow
from edda.core.model import EntryKind
from edda.errors import WorkflowTimeoutError
from edda.workflow.activity import Activity

from .conftest import MakeApp
from .facts import until_status


async def test_a_waiting_run_is_cancelled_and_its_cleanup_runs(app: EddaApp) -> None:
    cleaned: list[str] = []

    @activity
    async def clean(ctx: WorkflowContext) -> None:
        cleaned.append(ctx.activity_id)

    @workflow
    async def nap(ctx: WorkflowContext) -> None:
        try:
            await sleep(ctx, 3600)
        finally:
            await clean(ctx)

    run_id = await app.start(nap)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    assert await app.handle(run_id).cancel("enough")
    with pytest.raises(WorkflowCancelledError, match="enough"):
        await app.handle(run_id).result(timeout=20)
    assert cleaned == ["clean:1"]
    assert await app.handle(run_id).status() is RunStatus.CANCELLED


async def test_a_running_run_is_cancelled_in_the_middle_of_its_activity(app: EddaApp) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    @activity
    async def work(ctx: WorkflowContext) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.set()
            raise

    @workflow
    async def job(ctx: WorkflowContext) -> None:
        await work(ctx)

    run_id = await app.start(job)
    await begun.wait()
    assert await app.cancel(run_id)
    with pytest.raises(WorkflowCancelledError):
        await app.handle(run_id).result(timeout=20)
    assert stopped.is_set()


async def test_a_run_of_another_process_is_cancelled_too(make_app: MakeApp) -> None:
    begun = asyncio.Event()

    @activity
    async def work(ctx: WorkflowContext) -> None:
        begun.set()
        await asyncio.Event().wait()

    @workflow
    async def job(ctx: WorkflowContext) -> None:
        await work(ctx)

    owner, other = await make_app(), await make_app(worker=False)
    run_id = await owner.start(job)
    await begun.wait()
    assert await other.cancel(run_id, "from afar")
    with pytest.raises(WorkflowCancelledError, match="from afar"):
        await other.handle(run_id).result(timeout=20)


async def test_a_run_that_has_not_begun_is_cancelled_without_any_effect(make_app: MakeApp) -> None:
    effects: list[int] = []

    @activity
    async def work(ctx: WorkflowContext) -> None:
        effects.append(1)

    @workflow
    async def job(ctx: WorkflowContext) -> None:
        await work(ctx)

    client = await make_app(worker=False)
    run_id = await client.start(job)
    assert await client.cancel(run_id)
    assert await client.cancel(run_id), "asking twice is fine"
    await make_app()
    with pytest.raises(WorkflowCancelledError):
        await client.handle(run_id).result(timeout=20)
    assert effects == []


async def test_a_finished_run_cannot_be_cancelled(app: EddaApp) -> None:
    @workflow
    async def quick(ctx: WorkflowContext) -> str:
        return "done"

    run_id = await app.start(quick)
    await app.handle(run_id).result(timeout=20)
    assert await app.cancel(run_id) is False
    assert await app.handle(run_id).result(timeout=20) == "done"
    assert await app.handle(run_id).status() is RunStatus.COMPLETED


async def test_a_cancel_survives_a_restart_before_it_is_read(make_app: MakeApp) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> None:
        await sleep(ctx, 3600)

    first = await make_app()
    run_id = await first.start(nap)
    await until_status(first, run_id, RunStatus.WAITING_FOR_TIMER)
    await first.shutdown()
    client = await make_app(worker=False)
    assert await client.cancel(run_id)
    await make_app()
    with pytest.raises(WorkflowCancelledError):
        await client.handle(run_id).result(timeout=20)


async def test_a_workflow_may_refuse_to_be_cancelled(app: EddaApp) -> None:
    @workflow
    async def stubborn(ctx: WorkflowContext) -> str:
        try:
            await sleep(ctx, 3600)
        except asyncio.CancelledError:
            await sleep(ctx, 0.02)
        return "finished all the same"

    run_id = await app.start(stubborn)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    await app.cancel(run_id)
    assert await app.handle(run_id).result(timeout=20) == "finished all the same"
    kinds = [entry.kind for entry in await app.handle(run_id).history()]
    assert kinds == [EntryKind.CANCEL, EntryKind.TIMER]


async def test_a_run_over_its_time_fails_while_it_waits(app: EddaApp) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> None:
        await sleep(ctx, 3600)

    run_id = await nap.options(timeout=0.2).start()
    with pytest.raises(WorkflowTimeoutError, match=run_id):
        await app.handle(run_id).result(timeout=20)
    assert await app.handle(run_id).status() is RunStatus.FAILED
    assert [entry.kind for entry in await app.handle(run_id).history()] == [EntryKind.TIMEOUT]


async def test_a_run_over_its_time_fails_while_it_works(app: EddaApp) -> None:
    @activity
    async def stuck(ctx: WorkflowContext) -> None:
        await asyncio.Event().wait()

    @workflow
    async def job(ctx: WorkflowContext) -> None:
        await stuck(ctx)

    with pytest.raises(TimeoutError):
        await job.options(timeout=0.2).run()


async def test_a_run_over_its_time_fails_after_a_restart(make_app: MakeApp) -> None:
    cleaned: list[int] = []

    @activity
    async def clean(ctx: WorkflowContext) -> None:
        cleaned.append(1)

    @workflow
    async def nap(ctx: WorkflowContext) -> None:
        try:
            await sleep(ctx, 3600)
        finally:
            await clean(ctx)

    first = await make_app()
    run_id = await nap.options(timeout=0.5).start()
    await first.shutdown()
    second = await make_app()
    with pytest.raises(WorkflowTimeoutError):
        await second.handle(run_id).result(timeout=20)
    assert cleaned == [1]


async def test_a_run_within_its_time_is_not_disturbed(app: EddaApp) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> str:
        await sleep(ctx, 0.02)
        return "in time"

    assert await nap.options(timeout=3600).run() == "in time"


async def late_outcome(app: EddaApp, slow: Activity[[], str], begun: threading.Event) -> tuple[str, bool, str]:
    """Of an activity that was abandoned when it had begun."""

    @activity
    def until_begun(ctx: WorkflowContext) -> bool:
        return begun.wait(20)

    @workflow
    async def impatient(ctx: WorkflowContext) -> str:
        task = asyncio.create_task(slow(ctx))
        await until_begun(ctx)
        task.cancel()
        await asyncio.wait([task])
        await sleep(ctx, 0.05)
        return "gave up"

    run_id = await app.start(impatient)
    assert await app.handle(run_id).result(timeout=20) == "gave up"
    (late,) = [entry for entry in await app.handle(run_id).history() if entry.kind is EntryKind.LATE]
    return late.step.rpartition("/")[2], late.ok, app.engine.codec.decode(late.value)


async def test_what_an_abandoned_activity_did_all_the_same_is_recorded(app: EddaApp) -> None:
    begun = threading.Event()

    @activity
    async def book(ctx: WorkflowContext) -> str:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "booked"

    assert await late_outcome(app, book, begun) == ("book:1", True, "booked")


async def test_what_an_abandoned_thread_did_all_the_same_is_recorded(app: EddaApp) -> None:
    """Nobody can stop a thread: its effect happens, so it must be known."""
    begun, stopped = threading.Event(), threading.Event()

    @activity
    def book(ctx: WorkflowContext) -> str:
        begun.set()
        stopped.wait(0.3)  # long enough to be abandoned meanwhile
        return "booked"

    assert await late_outcome(app, book, begun) == ("book:1", True, "booked")
