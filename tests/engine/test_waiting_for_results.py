"""Whoever waits for a result in vain is told why the run has not ended, and what to do."""

from __future__ import annotations

import asyncio

import pytest

from edda import EddaApp, RunStatus, WorkflowContext, activity, wait_event, workflow
from edda.control.views import RunSearch
from edda.core.model import RunId, RunRecord, WorkerId, WorkerInfo
from edda.engine.open_runs import explain
from edda.workflow.workflow import Workflow
from tests.storage.worker import Worker

from .conditions import until_status
from .conftest import MakeApp


async def complaint(app: EddaApp, run_id: str, timeout: float = 0.2) -> str:
    with pytest.raises(TimeoutError) as raised:
        await app.handle(run_id).result(timeout=timeout)
    return str(raised.value)


async def test_a_parked_run_says_that_it_is_parked_and_why(make_app: MakeApp) -> None:
    @workflow
    async def stuck(ctx: WorkflowContext) -> None:
        await asyncio.Event().wait()

    app = await make_app(workflows=[stuck])
    run_id = await app.start(stuck)
    await until_status(app, run_id, RunStatus.PARKED)
    said = await complaint(app, run_id)
    assert "is parked and does not go on by itself with this code: DeadlockError" in said
    assert "Fix the code" in said


def test_a_reason_that_is_a_sentence_ends_with_one_dot() -> None:
    reason = "restore the steps, and the run goes on."
    run = RunRecord(RunId("r"), "order", 0, RunStatus.PARKED, b"", 0, None, None, 1, reason, None, None)
    assert "and the run goes on. Fix the code" in explain(run, 0, ())


async def test_a_run_that_no_worker_claims_says_so(make_app: MakeApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    client = await make_app(workflows=[order], worker=False)
    run_id = await client.start(order)
    assert "no worker is alive: start a process that has the workflow 'order'" in await complaint(client, run_id)
    await make_app(workflows=[_another()])
    assert "is a worker running that has the workflow 'order'" in await complaint(client, run_id)


def _another() -> Workflow[[], None]:
    @workflow
    async def another(ctx: WorkflowContext) -> None: ...

    return another


async def test_a_suspect_says_how_often_its_process_died(make_app: MakeApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    client = await make_app(workflows=[order], worker=False)
    run_id = await client.start(order)
    storage = client.engine.storage
    for name in ("a", "b"):
        worker = WorkerInfo(WorkerId(name), "test", "host", 1)
        await storage.register(worker, 3_600_000_000)
        assert [run.run_id for run in (await storage.claim(worker.id, ["order"], 10)).runs] == [RunId(run_id)]
        await storage.remove_worker(worker.id, died=True)
    assert "its process died 2 times" in await complaint(client, run_id)
    app = await make_app(workflows=[order])
    assert await app.handle(run_id).result(timeout=30) is None
    assert (await app.client.read_run(run_id)).deaths == 0


async def test_a_run_of_a_worker_that_is_lost_says_so(make_app: MakeApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    client = await make_app(workflows=[order], worker=False)
    run_id = await client.start(order)
    storage = client.engine.storage
    worker = Worker(storage, "w-lost")
    await worker.register(3_600_000_000)
    await worker.claim("order")
    assert (await complaint(client, run_id)).endswith("it goes on")
    assert (await client.control.get_run(run_id)).run.words == "runs on worker w-lost"
    await worker.beat(lease=-1_000_000)
    said = await complaint(client, run_id)
    assert "its worker w-lost has renewed no lease since 20" in said
    assert "another worker takes the run over as soon as one is running" in said
    for shown in ((await client.control.get_run(run_id)).run, (await client.control.list_runs(RunSearch())).items[0]):
        assert shown.words.startswith("has stopped: its worker w-lost has renewed no lease since 20")
    app = await make_app(workflows=[order])
    assert await app.handle(run_id).result(timeout=30) is None


async def test_a_run_that_works_or_waits_says_so(make_app: MakeApp) -> None:
    @activity
    async def work(ctx: WorkflowContext) -> None:
        await asyncio.sleep(60)

    @workflow
    async def busy(ctx: WorkflowContext) -> None:
        await work(ctx)

    @workflow
    async def waiting(ctx: WorkflowContext) -> None:
        await wait_event(ctx, "paid")

    app = await make_app(workflows=[busy, waiting])
    assert (await complaint(app, await app.start(busy))).endswith("it goes on")
    run_id = await app.start(waiting)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    assert "it waits for paid" in await complaint(app, run_id)


async def test_cancelling_a_parked_run_says_that_it_may_end_without_compensation(make_app: MakeApp) -> None:
    @workflow
    async def stuck(ctx: WorkflowContext) -> None:
        await asyncio.Event().wait()

    app = await make_app(workflows=[stuck])
    run_id = await app.start(stuck)
    await until_status(app, run_id, RunStatus.PARKED)
    said = (await app.control.cancel_run(run_id)).words
    assert "it is parked, and if its code still does not fit its history it ends without compensation" in said
