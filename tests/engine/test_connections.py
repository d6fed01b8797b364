"""How many connections one process opens to a server, and what is said when one is cut."""

from __future__ import annotations

import asyncio
import logging

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from edda import EddaApp, WorkflowContext, activity, workflow
from edda.control.views import RunSearch
from edda.databases import max_connections
from edda.storage import sqlalchemy_sessions
from edda.storage.postgres import PostgresStorage
from tests.conftest import MakeDatabase

from .conditions import until
from .conftest import url_of
from .orders import driver_url

OTHERS = {
    "postgres": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
    "mysql": "SELECT count(*) FROM information_schema.processlist WHERE db = database() AND id <> connection_id()",
}
STEPS = 6
"""Of each kind at once: more than there are connections for."""


@pytest.mark.parametrize("kind", OTHERS)
async def test_a_process_opens_no_more_connections_than_it_says(kind: str, make_database: MakeDatabase) -> None:
    database = make_database(kind)
    inside, gate = 0, asyncio.Event()

    async def stay() -> None:
        nonlocal inside
        inside += 1
        await gate.wait()

    @activity
    async def use_session(ctx: WorkflowContext) -> None:
        await ctx.session.execute(text("SELECT 1"))
        await stay()

    @activity
    async def use_transaction(ctx: WorkflowContext) -> None:
        async with ctx.transaction():
            await stay()

    @workflow
    async def crowd(ctx: WorkflowContext) -> None:
        await asyncio.gather(*(step(ctx) for step in (use_session, use_transaction) for _ in range(STEPS)))

    app = EddaApp("shop", url_of(database), pool_size=1, workflows=[crowd])
    engine = create_async_engine(driver_url(database))
    async with app, engine.connect() as outside:
        run = asyncio.create_task(crowd.run())
        await until(lambda: inside == 4, "three sessions and one transaction are open")
        await asyncio.gather(*(app.control.list_runs(RunSearch()) for _ in range(STEPS)))
        count = (await outside.execute(text(OTHERS[kind]))).scalar_one()
        gate.set()
        await run
    await engine.dispose()
    assert 4 < count <= max_connections(pool_size=1)


async def test_a_connection_that_was_cut_is_no_error_in_anybodys_log() -> None:
    engine = sqlalchemy_sessions._open_engine(
        PostgresStorage("postgresql://nobody@127.0.0.1:1/nothing").session_target(), 1
    )
    assert not engine.pool.logger.isEnabledFor(logging.ERROR)
    await engine.dispose()
