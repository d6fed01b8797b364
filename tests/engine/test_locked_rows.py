"""A row that another transaction has locked holds up its own run, and no other run of the worker."""

from __future__ import annotations

import asyncio
import logging

import pytest

from edda import EddaApp, RunStatus, WorkflowContext, activity, workflow
from tests.conftest import Database, MakeDatabase

from .conditions import PATIENCE, until
from .conftest import MakeApp
from .rollback_of_database import Access, access

MANY = 20
SHARE = {"postgres": "FOR SHARE", "mysql": "LOCK IN SHARE MODE"}


@pytest.fixture(params=["postgres", "mysql"])
def database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    return make_database(request.param)


class Steps:
    """Those of some runs wait until they are let go."""

    def __init__(self) -> None:
        self.begun: set[str] = set()
        self.let_go = asyncio.Event()

        @activity
        async def work(ctx: WorkflowContext, name: str) -> str:
            self.begun.add(name)
            if name.startswith("held"):
                await self.let_go.wait()
            return f"{name} done"

        @workflow
        async def job(ctx: WorkflowContext, name: str) -> str:
            return await work(ctx, name)

        @workflow
        async def parent(ctx: WorkflowContext, name: str) -> str:
            return await job.run(name)

        self.job, self.parent = job, parent

    async def until_begun(self, *names: str) -> None:
        await until(lambda: self.begun >= set(names), f"{names} have begun")


async def lock(outsider: Access, database: Database, *run_ids: str) -> None:
    """As a step does that is about to commit."""
    for run_id in run_ids:
        assert await outsider.fetch(f"SELECT 1 FROM edda_open_run WHERE run_id = '{run_id}' {SHARE[database.kind]}")


async def check_others(app: EddaApp, steps: Steps) -> None:
    run_ids = [await app.start(steps.job, f"other{number}") for number in range(MANY)]
    for number, run_id in enumerate(run_ids):
        assert await app.handle(run_id).result(timeout=PATIENCE) == f"other{number} done"


async def test_runs_go_on_beside_runs_whose_rows_are_locked(
    app: EddaApp, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps()
    names = ["held1", "held2", "held3"]
    run_ids = [await app.start(steps.job.options(id=f"run-{name}"), name) for name in names]
    await steps.until_begun(*names)
    same = app.engine.worker
    with caplog.at_level(logging.WARNING, "edda"):
        async with access(database) as outsider:
            await lock(outsider, database, *run_ids)
            steps.let_go.set()
            await check_others(app, steps)
            assert [await app.handle(run_id).status() for run_id in run_ids] == [RunStatus.RUNNING] * 3
            about = [record for record in caplog.records if "locked" in record.getMessage()]
            await until(lambda: any("run-held" in record.getMessage() for record in caplog.records), "it is told of")
            assert len(about) < 10
    for name, run_id in zip(names, run_ids, strict=True):
        assert await app.handle(run_id).result(timeout=PATIENCE) == f"{name} done"
        assert len(await app.handle(run_id).history()) == 1
    assert app.engine.worker is same


async def test_a_run_whose_target_is_locked_holds_up_no_other(app: EddaApp, database: Database) -> None:
    """A child's end is a letter to its parent, whose row is locked for it."""
    steps = Steps()
    run_id = await app.start(steps.parent.options(id="run-parent"), "held")
    await steps.until_begun("held")
    async with access(database) as outsider:
        await lock(outsider, database, run_id)
        steps.let_go.set()
        await check_others(app, steps)
        assert await app.handle(run_id).status() is not RunStatus.COMPLETED
    assert await app.handle(run_id).result(timeout=PATIENCE) == "held done"


async def test_a_table_that_is_locked_holds_up_all_and_fails_none(make_app: MakeApp, database: Database) -> None:
    steps = Steps()
    app = await make_app()
    run_id = await app.start(steps.job, "held")
    await steps.until_begun("held")
    if database.kind == "mysql":
        pytest.skip("LOCK TABLES there ends with the connection, and waits for every open transaction")
    async with access(database) as outsider:
        await outsider.fetch("LOCK TABLE edda_open_run IN EXCLUSIVE MODE")
        steps.let_go.set()
        starting = asyncio.create_task(app.start(steps.job, "other"))
        await asyncio.sleep(2.5)  # two time-outs of the journal
    assert await app.handle(run_id).result(timeout=PATIENCE) == "held done"
    assert await app.handle(await starting).result(timeout=PATIENCE) == "other done"
