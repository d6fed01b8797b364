"""A database that lost commits, or a second process that writes for the same worker: no run fails by it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from edda import EddaApp, RunStatus, WorkflowContext, activity, sleep, workflow
from edda.core.model import BatchResult, Claim, EntryKind, Fence, RunId, RunWrite, WorkerId, WorkerInfo
from edda.engine.settings import Settings
from edda.engine.worker.worker import Worker
from edda.errors import StorageUnavailableError
from edda.workflow.workflow import Workflow
from tests.conftest import Database

from .conditions import PATIENCE, until
from .conftest import MORTAL, MakeApp
from .rollback_of_database import Past

MANY = 20


def worker_of(app: EddaApp) -> Worker:
    worker = app.engine.worker
    assert worker is not None
    return worker


class HeldClaim:
    """Stands before the database: claims wait until they are let go."""

    def __init__(self, app: EddaApp, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.let_go = asyncio.Event(), asyncio.Event()
        self._claim = app.engine.storage.claim
        monkeypatch.setattr(app.engine.storage, "claim", self.claim)

    async def claim(self, worker: WorkerId, names: Sequence[str], limit: int, *seen: int) -> Claim:
        self.asked.set()
        await self.let_go.wait()
        return await self._claim(worker, names, limit, *seen)


class Bodies:
    """Of a step in several processes: those of the first worker wait, the others go through."""

    def __init__(self) -> None:
        self.begun: dict[str, int] = {}
        self.let_go = asyncio.Event()

    def workflow(self) -> Workflow[[str], str]:
        @activity
        async def work(ctx: WorkflowContext, name: str) -> str:
            self.begun[name] = self.begun.get(name, 0) + 1
            if self.begun[name] == 1:
                await self.let_go.wait()
            return f"{name} done"

        @workflow
        async def job(ctx: WorkflowContext, name: str) -> str:
            done = await work(ctx, name)
            await sleep(ctx, 0.01)
            return await work(ctx, done)

        return job


async def has_whole_history(app: EddaApp, run_id: str) -> bool:
    entries = await app.handle(run_id).history()
    return [entry.seq for entry in entries] == list(range(1, len(entries) + 1))


async def check_all(app: EddaApp, run_ids: Sequence[str]) -> None:
    for number, run_id in enumerate(run_ids):
        assert await app.handle(run_id).result(timeout=PATIENCE) == f"job{number} done done"
        assert await app.handle(run_id).status() is RunStatus.COMPLETED
        kinds = [entry.kind for entry in await app.handle(run_id).history()]
        assert kinds == [EntryKind.STEP, EntryKind.TIMER, EntryKind.STEP]
        assert await has_whole_history(app, run_id)


@pytest.mark.parametrize("first", ["the slow worker", "the new worker"])
async def test_a_claim_that_the_database_lost_is_noticed_and_fails_no_run(
    shared_database: Database, make_app_on: MakeApp, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The worker that lost it has written no batch since: its fence row is as it left it."""
    bodies = Bodies()
    job = bodies.workflow()
    slow = await make_app_on(on=shared_database, settings=MORTAL)
    lost, held = worker_of(slow), HeldClaim(slow, monkeypatch)
    client = await make_app_on(on=shared_database, worker=False)
    run_ids = [await client.start(job.options(id=f"job-{number}"), f"job{number}") for number in range(MANY)]
    await asyncio.wait_for(held.asked.wait(), PATIENCE)
    before = await Past.of(shared_database)
    held.let_go.set()
    await until(lambda: len(bodies.begun) == MANY, "all runs are claimed and in their steps")

    await before.restore()
    if first == "the slow worker":
        bodies.let_go.set()
        await until(lambda: slow.engine.worker is not lost, "the slow worker has noticed")
    await make_app_on(on=shared_database, settings=MORTAL)
    if first == "the new worker":
        await until(lambda: all(count == 2 for count in list(bodies.begun.values())[:MANY]), "the runs go on elsewhere")
        bodies.let_go.set()
    await check_all(client, run_ids)
    await until(lambda: slow.engine.worker is not lost, "the slow worker has noticed")


async def make_suspects(client: EddaApp, workflow: str) -> None:
    """Two processes claim all runs and die."""
    storage = client.engine.storage
    for name in ("first", "second"):
        worker = WorkerInfo(WorkerId(name), "test", "elsewhere", 1)
        await storage.register(worker, 3_600_000_000)
        assert len((await storage.claim(worker.id, [workflow], MANY)).runs) == MANY
        await storage.remove_worker(worker.id, died=True)


async def test_a_claim_of_suspects_that_the_database_lost_is_noticed_and_fails_no_run(
    shared_database: Database, make_app_on: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = Bodies()
    job = bodies.workflow()
    client = await make_app_on(on=shared_database, worker=False)
    run_ids = [await client.start(job.options(id=f"job-{number}"), f"job{number}") for number in range(MANY)]
    await make_suspects(client, job.name)
    storage = shared_database.storage()
    asked, let_go, claim_suspects = asyncio.Event(), asyncio.Event(), storage.claim_suspects

    async def claim_late(*args: Any) -> Claim:
        asked.set()
        await let_go.wait()
        return await claim_suspects(*args)

    monkeypatch.setattr(storage, "claim_suspects", claim_late)
    slow = await make_app_on(on=shared_database, settings=MORTAL, storage=storage)
    lost = worker_of(slow)
    await asyncio.wait_for(asked.wait(), PATIENCE)
    before = await Past.of(shared_database)
    let_go.set()
    await until(lambda: len(bodies.begun) > 0, "a group of them is claimed and in its steps")

    await before.restore()
    bodies.let_go.set()
    await until(lambda: slow.engine.worker is not lost, "the slow worker has noticed")
    await make_app_on(on=shared_database, settings=MORTAL)
    await check_all(client, run_ids)


async def test_a_new_worker_without_suspects_starts_runs_beside_one_that_is_busy(make_app: MakeApp) -> None:
    """The first run begins before the worker has looked for suspects, and does not end."""
    bodies = Bodies()
    job = bodies.workflow()
    app = await make_app(settings=MORTAL)
    for number in range(MANY):
        await app.start(job, f"job{number}")
    await until(lambda: len(bodies.begun) == MANY, "all runs are in their steps", within=10.0)
    bodies.let_go.set()


async def test_batches_that_the_database_lost_are_written_again(
    shared_database: Database, make_app_on: MakeApp
) -> None:
    bodies = Bodies()
    job = bodies.workflow()
    app = await make_app_on(on=shared_database, settings=MORTAL)
    run_ids = [await app.start(job, f"job{number}") for number in range(MANY)]
    await until(lambda: len(bodies.begun) == MANY, "all runs are in their steps")
    before, lost = await Past.of(shared_database), worker_of(app)
    bodies.let_go.set()
    await check_all(app, run_ids)
    await before.restore()
    await app.start(job, "job")  # it writes, and notices
    await until(lambda: app.engine.worker is not lost, "the worker has noticed")
    await check_all(app, run_ids)


async def test_a_move_that_the_database_lost_leaves_no_run_without_a_driver(
    shared_database: Database, make_app_on: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run was taken from its owner, which has let go of it; then the database gives it back to that owner."""
    bodies = Bodies()
    job = bodies.workflow()
    app = await make_app_on(on=shared_database, settings=MORTAL)
    run_id = await app.start(job, "job0")
    await until(lambda: len(bodies.begun) == 1, "the run is in its step")
    before, lost = await Past.of(shared_database), worker_of(app)
    held = HeldClaim(app, monkeypatch)
    await app.engine.storage.release_run(RunId(run_id))
    bodies.let_go.set()
    await until(lambda: not lost.live, "the worker has let go of the run")
    await before.restore()
    await app.start(job, "job")  # something to write, so that it looks at its fence
    held.let_go.set()
    await until(lambda: app.engine.worker is not lost, "the worker has noticed")
    await check_all(app, [run_id])


async def test_a_batch_of_a_clone_is_not_taken_for_our_own(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process and its copy write for one worker. The one whose batch got no answer finds its number in the fence row,
    but it was the other's batch."""
    begun: list[str] = []

    @activity
    async def work(ctx: WorkflowContext, name: str) -> str:
        begun.append(name)
        return name

    @workflow
    async def job(ctx: WorkflowContext) -> list[str]:
        return [await work(ctx, name) for name in ("one", "two", "three")]

    app = await make_app(settings=MORTAL)
    lost, write = worker_of(app), app.engine.storage.write

    async def write_as_the_clone(fence: Fence, batch: Sequence[RunWrite], *token: int) -> BatchResult | None:
        if any(entry.step == "work:2" for bundle in batch for entry in bundle.entries):
            monkeypatch.setattr(app.engine.storage, "write", write)
            assert await write(fence, [], *(one ^ 1 for one in token)) is not None
            raise StorageUnavailableError("the answer was lost on purpose")
        return await write(fence, batch, *token)

    monkeypatch.setattr(app.engine.storage, "write", write_as_the_clone)
    run_id = await app.start(job)
    assert await app.handle(run_id).result(timeout=PATIENCE) == ["one", "two", "three"]
    assert [entry.step for entry in await app.handle(run_id).history()] == ["work:1", "work:2", "work:3"]
    assert begun == ["one", "two", "two", "three"]
    assert app.engine.worker is not lost, "it knows that it is not alone"


async def test_a_batch_whose_answer_was_lost_is_known_by_its_token(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    @activity
    async def work(ctx: WorkflowContext, name: str) -> str:
        begun.append(name)
        return name

    @workflow
    async def job(ctx: WorkflowContext) -> list[str]:
        return [await work(ctx, name) for name in ("one", "two", "three")]

    app = await make_app(settings=MORTAL)
    same, write = worker_of(app), app.engine.storage.write

    async def write_without_an_answer(fence: Fence, batch: Sequence[RunWrite], *token: int) -> BatchResult | None:
        answer = await write(fence, batch, *token)
        if any(entry.step == "work:2" for bundle in batch for entry in bundle.entries) and answer is not None:
            raise StorageUnavailableError("the answer was lost on purpose")
        return answer

    monkeypatch.setattr(app.engine.storage, "write", write_without_an_answer)
    assert await app.run(job) == ["one", "two", "three"]
    assert begun == ["one", "two", "three"]
    assert app.engine.worker is same


async def test_a_record_that_another_worker_has_written_drops_the_run_and_never_fails_it(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    let_go, begun = asyncio.Event(), []

    @activity
    async def work(ctx: WorkflowContext, name: str) -> str:
        begun.append(ctx.instance_id)
        if name == "slow" and begun.count(ctx.instance_id) == 1:
            await let_go.wait()
        return "ours"

    @workflow
    async def job(ctx: WorkflowContext, name: str) -> str:
        return await work(ctx, name)

    app = await make_app(settings=Settings(poll=0.05, linger=0.0))
    same, storage = worker_of(app), app.engine.storage
    example = await app.start(job, "slow")
    let_go.set()
    await app.handle(example).result(timeout=PATIENCE)
    (entry,) = await storage.history(RunId(example))
    let_go.clear()
    run_ids = [await app.start(job, "slow") for _ in range(5)]
    healthy = [await app.start(job, "quick") for _ in range(5)]
    await until(lambda: all(run_id in begun for run_id in run_ids), "the bodies have begun")

    ghost = WorkerInfo(WorkerId("ghost"), "ghost", "elsewhere", 1)
    await storage.register(ghost, 60_000_000)
    theirs = replace(entry, value=app.engine.codec.encode("theirs"))
    bundles = [RunWrite(RunId(run_id), 1, 0, (theirs,)) for run_id in run_ids]
    assert await storage.write(Fence(ghost.id, 0, 0), bundles) is not None
    with caplog.at_level(logging.WARNING, "edda"):
        let_go.set()
        for run_id in run_ids:
            assert await app.handle(run_id).result(timeout=PATIENCE) == "theirs"
            assert await app.handle(run_id).status() is RunStatus.COMPLETED
    for run_id in healthy:
        assert await app.handle(run_id).result(timeout=PATIENCE) == "ours"
    assert app.engine.worker is same, "only the runs are dropped, not the worker"
    for run_id in run_ids:
        about = [record for record in caplog.records if run_id in record.getMessage()]
        assert len(about) <= 3, [record.getMessage() for record in about]
