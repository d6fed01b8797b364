"""Cancelling and timing out: a run can be stopped at every point of its life, and cleans up after itself."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from edda import EddaApp, RunStatus, WorkflowCancelledError, WorkflowContext, activity, sleep, wait_event, workflow
from edda.core.model import EntryKind
from edda.errors import WorkflowTimeoutError
from edda.web import Token, TokenScope
from edda.workflow.activity import Activity
from tests.conftest import Database
from tests.web.calls import ask

from .conditions import until_status
from .conftest import MORTAL, MakeApp, url_of
from .events import result_of, send, start_waiting
from .histories import entries_of
from .processes import program
from .programs import shop
from .programs.ledger import recorded

SECRET = "a-secret-of-at-least-thirty-two-characters"


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


async def test_a_run_that_an_event_made_ready_is_cancelled_where_it_goes_on(make_app: MakeApp) -> None:
    """Both are in its inbox when it is claimed, and it reads them in their order."""
    effects: list[str] = []

    @activity
    async def work(ctx: WorkflowContext) -> None:
        effects.append("worked")

    @workflow
    async def job(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "go")
        await work(ctx)

    first = await make_app()
    run_id = await start_waiting(first, job)
    await first.shutdown()
    client = await make_app(worker=False)
    await send(client, "go")
    assert await client.handle(run_id).status() is RunStatus.RUNNING
    assert await client.cancel(run_id, "too late")
    await make_app()
    with pytest.raises(WorkflowCancelledError, match="too late"):
        await result_of(client, run_id)
    assert effects == []


async def test_a_run_is_cancelled_once_however_often_it_is_asked(app: EddaApp) -> None:
    @workflow
    async def slow(ctx: WorkflowContext) -> str:
        with suppress(asyncio.CancelledError):
            await sleep(ctx, 3600)
        return str((await wait_event(ctx, "go")).data)

    run_id = await app.start(slow)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    answers = [await app.cancel(run_id, f"reason {number}") for number in range(3)]
    assert answers == [True, True, True]
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    assert await app.cancel(run_id), "also when the first one was read"
    await send(app, "go", "on")
    assert await result_of(app, run_id) == "on"
    assert [entry.name for entry in await entries_of(app, run_id, EntryKind.CANCEL)] == ["reason 0"]


async def test_a_cancel_that_races_with_the_end_leaves_one_outcome(make_app: MakeApp) -> None:
    """Two hundred times, each a little later than the one before, by the owner and by another process."""
    app, other = await make_app(), await make_app(worker=False)
    begun, go = [asyncio.Event() for _ in range(200)], [asyncio.Event() for _ in range(200)]

    @activity
    async def work(ctx: WorkflowContext, number: int) -> int:
        begun[number].set()
        await go[number].wait()
        return number

    @workflow
    async def quick(ctx: WorkflowContext, number: int) -> int:
        return await work(ctx, number)

    async def race(number: int) -> None:
        run_id = await app.start(quick, number)
        await begun[number].wait()
        go[number].set()
        await asyncio.sleep(0.0001 * (number % 20))  # the point of the race: any moment around the end
        was_open = await (other if number % 2 else app).cancel(run_id)
        try:
            outcome = RunStatus.COMPLETED if await result_of(app, run_id) == number else None
        except WorkflowCancelledError:
            outcome = RunStatus.CANCELLED
        assert await other.handle(run_id).status() is outcome
        assert was_open or outcome is RunStatus.COMPLETED, "who had ended could not be cancelled"
        assert await other.cancel(run_id) is False

    for first in range(0, 200, 20):
        await asyncio.gather(*(race(number) for number in range(first, first + 20)))


async def test_a_run_is_cancelled_over_http(make_app: MakeApp) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> None:
        await sleep(ctx, 3600)

    app = await make_app(tokens=[Token("desk", frozenset({TokenScope.CONTROL}), SECRET)])
    run_id = await app.start(nap)
    await until_status(app, run_id, RunStatus.WAITING_FOR_TIMER)
    caller = {"host": "127.0.0.1:8001", "content-type": "application/json", "authorization": f"Bearer {SECRET}"}
    body = json.dumps({"reason": "by phone"}).encode()
    reply = await ask(app, path=f"/cancel/{run_id}", headers=caller, body=body)
    assert (reply.status, reply.json["instance_id"]) == (202, run_id)
    with pytest.raises(WorkflowCancelledError, match="by phone"):
        await result_of(app, run_id)
    assert (await ask(app, path=f"/cancel/{run_id}", headers=caller, body=body)).status == 409
    assert (await ask(app, path="/cancel/nobody", headers=caller, body=body)).status == 404


async def test_the_activity_of_another_process_is_stopped(
    shared_database: Database, make_app_on: MakeApp, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    caller = await make_app_on(on=shared_database, worker=False)
    async with program("serve", url_of(shared_database), MORTAL.lease, hang=True) as worker:
        await worker.hear("serving")
        run_id = await caller.start(shop.deliver, str(ledger), "parcel")
        await worker.hear("working")
        assert await caller.cancel(run_id, "from afar")
        with pytest.raises(WorkflowCancelledError, match="from afar"):
            await result_of(caller, run_id)
    assert len(recorded(ledger)) == 1


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


async def test_a_run_that_is_first_claimed_after_its_deadline_begins_no_step(make_app: MakeApp) -> None:
    begun: list[int] = []

    @activity
    async def charge(ctx: WorkflowContext) -> None:
        begun.append(1)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await charge(ctx)

    client = await make_app(worker=False)
    run_id = await client.start(order.options(id="late", timeout=0.1))
    await asyncio.sleep(0.15)  # the time that passes without a worker
    await make_app()
    with pytest.raises(WorkflowTimeoutError, match=run_id):
        await client.handle(run_id).result(timeout=20)
    assert begun == []


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
