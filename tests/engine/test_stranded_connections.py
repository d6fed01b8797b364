"""Connections on which no packet gets through any more, and of which no end is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from edda import EddaApp, WorkflowContext, activity, workflow
from edda.errors import StorageUnavailableError
from edda.storage.mysql import connection as mysql_connection
from edda.storage.postgres import pool as postgres_pool
from edda.workflow.workflow import Workflow
from tests.conftest import MakeDatabase
from tests.proxy import DatabaseProxy

from .conditions import PATIENCE
from .conftest import MORTAL, url_of

POOLS = {"postgres": postgres_pool, "mysql": mysql_connection}


@pytest.fixture(params=("postgres", "mysql"))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def proxy(kind: str, make_database: MakeDatabase) -> AsyncIterator[DatabaseProxy]:
    async with DatabaseProxy(url_of(make_database(kind))) as proxy:
        yield proxy


def test_the_journal_waits_ten_seconds_for_an_answer(kind: str) -> None:
    assert POOLS[kind].JOURNAL_TIMEOUT == 10.0 < POOLS[kind].ANSWER_TIMEOUT


async def test_starts_and_steps_go_on_when_the_journal_has_given_its_connection_up(
    kind: str, proxy: DatabaseProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(POOLS[kind], "JOURNAL_TIMEOUT", 1.0)
    begun: list[int] = []

    @activity
    async def work(ctx: WorkflowContext, number: int) -> int:
        begun.append(number)
        return number

    @workflow
    async def job(ctx: WorkflowContext, number: int) -> int:
        return await work(ctx, number)

    app = EddaApp("test", proxy.url, settings=MORTAL)
    await app.initialize()
    try:
        assert await app.run(job, 1) == 1
        proxy.strand()
        began = time.monotonic()
        run_id = await start_at_last(app, job)
        took = time.monotonic() - began
        assert await app.handle(run_id).result(timeout=PATIENCE) == 2
        assert took < mysql_connection.ANSWER_TIMEOUT / 2, "a start does not wait for the time-out of other connections"
    finally:
        await app.shutdown(grace=0.0)


async def start_at_last(app: EddaApp, job: Workflow[[int], int]) -> str:
    """As a caller does who is told that nothing was changed."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await app.start(job, 2)  # one after the other, as long as it takes
            except StorageUnavailableError:
                await asyncio.sleep(0.05)
