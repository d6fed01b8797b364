"""`engine=` has to lead to the database of the runs: elsewhere no step could ever be recorded."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from edda import EddaApp, WorkflowContext, activity, workflow
from edda.errors import AppError
from tests.conftest import Database, MakeDatabase

from .conftest import MakeApp, url_of
from .orders import driver_url


async def make_tables(database: Database) -> None:
    async with EddaApp("other", url_of(database), worker=False):
        pass


@pytest.mark.parametrize("with_tables", [True, False])
async def test_an_engine_on_another_database_is_refused_at_the_start(
    shared_database: Database, make_database: MakeDatabase, with_tables: bool
) -> None:
    """Whether or not there are tables of Edda's in it: with them, nothing failed, and the step began again for ever."""
    other = make_database(shared_database.kind, fresh=not with_tables)
    if with_tables:
        await make_tables(other)
    engine = create_async_engine(driver_url(other))
    app = EddaApp("shop", url_of(shared_database), engine=engine)
    with pytest.raises(AppError, match="another database") as caught:
        await app.initialize()
    for url in (url_of(shared_database), engine.url.render_as_string(hide_password=True)):
        assert url.rpartition("/")[2] in str(caught.value)
    await engine.dispose()


async def test_an_engine_on_another_kind_of_database_is_refused(
    shared_database: Database, make_database: MakeDatabase
) -> None:
    other = make_database("postgres" if shared_database.kind == "sqlite" else "sqlite")
    await make_tables(other)
    engine = create_async_engine(driver_url(other))
    with pytest.raises(AppError, match="another database"):
        await EddaApp("shop", url_of(shared_database), engine=engine).initialize()
    await engine.dispose()


async def test_an_engine_on_the_database_of_the_runs_is_used(shared_database: Database, make_app_on: MakeApp) -> None:
    engine = create_async_engine(driver_url(shared_database))

    @activity
    async def count(ctx: WorkflowContext) -> int:
        return int((await ctx.session.execute(text("SELECT 1"))).scalar_one())

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await count(ctx)

    app = await make_app_on(on=shared_database, engine=engine)
    assert await app.run(order) == 1
    await app.shutdown(grace=0.0)
    await engine.dispose()
