"""Tables that are away for a while, as in a migration by hand: runs wait, and then go on, with the worker they had."""

from __future__ import annotations

import asyncio
import logging

import pytest

from edda import EddaApp, RunStatus, WorkflowContext, activity, sleep, workflow
from edda.core.model import EntryKind
from tests.conftest import Database, OnServer

from .conditions import until
from .conftest import MORTAL, MakeApp

TABLES = ("edda_history", "edda_open_run", "edda_fence", "edda_worker", "edda_result", "edda_run", "edda_inbox")
RENAME = {"postgres": "ALTER TABLE {} RENAME TO {}", "mysql": "RENAME TABLE {} TO {}"}


@pytest.mark.timed
@pytest.mark.parametrize("database", ["postgres", "mysql"], indirect=True)
@pytest.mark.parametrize("table", TABLES)
async def test_runs_outlive_a_table_that_is_away(
    database: Database, make_app: MakeApp, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(database, OnServer)
    done: list[int] = []

    @activity
    async def step(ctx: WorkflowContext, number: int) -> int:
        await asyncio.sleep(0.02)
        done.append(number)
        return number

    @workflow
    async def order(ctx: WorkflowContext, number: int) -> int:
        for _ in range(10):
            await step(ctx, number)
            await sleep(ctx, 0.05)
        return number

    app: EddaApp = await make_app(settings=MORTAL)
    runs = [await app.start(order, number) for number in range(5)]
    await until(lambda: len(done) >= 10, "all are under way")
    rename = RENAME[database.kind]
    with caplog.at_level(logging.WARNING):
        database.execute(rename.format(table, "edda_away"))
        try:
            await asyncio.sleep(2.0)  # longer than the lease
        finally:
            database.execute(rename.format("edda_away", table))
        lines = len(caplog.records)
    assert [await app.handle(run).result(timeout=30) for run in runs] == list(range(5))
    for run in runs:
        assert await app.handle(run).status() is RunStatus.COMPLETED
        steps = [entry.step for entry in await app.handle(run).history() if entry.kind is EntryKind.STEP]
        assert len(steps) == len(set(steps)) == 10
    assert lines <= 60
