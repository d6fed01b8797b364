"""A step that needs what its process does not have parks its run: a deployment is at fault, not the run."""

from __future__ import annotations

import sys

import pytest
from sqlalchemy import text

from edda import EddaApp, RunStatus, WorkflowContext, activity, compensation, on_failure, workflow
from edda.engine.settings import Settings
from edda.errors import AppError
from tests.conftest import Database, MakeDatabase

from .conditions import reason_of, until_status
from .conftest import MakeApp

pytestmark = pytest.mark.databases("sqlite")

PATIENT = Settings(linger=0.0, sweep=0.1, takeover_grace=0.0, poll=0.1, parked_first=3600.0, parked_most=7200.0)
"""Only a new worker tries a parked run."""


@pytest.fixture
def database(make_database: MakeDatabase) -> Database:
    return make_database("sqlite")


class Shop:
    def __init__(self) -> None:
        self.log: list[str] = []
        log = self.log

        @compensation
        async def cancel(ctx: WorkflowContext, has_session: bool) -> None:
            if has_session:
                await ctx.session.execute(text("SELECT 1"))
            log.append("cancelled")

        @activity
        @on_failure(cancel)
        async def book(ctx: WorkflowContext, has_session: bool) -> None:
            log.append("booked")

        @activity
        async def store(ctx: WorkflowContext) -> int:
            found = await ctx.session.execute(text("SELECT 7"))
            return int(found.scalar_one())

        @workflow
        async def order(ctx: WorkflowContext) -> int:
            await book(ctx, False)
            return await store(ctx)

        @workflow
        async def undone(ctx: WorkflowContext) -> None:
            await book(ctx, True)
            raise ValueError("as planned")

        self.order, self.undone = order, undone


@pytest.fixture
def without_sqlalchemy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Until it is undone, an import of it fails as if it were not installed."""
    monkeypatch.delitem(sys.modules, "edda.storage.sqlalchemy_sessions", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sqlalchemy"]:
        monkeypatch.setitem(sys.modules, name, None)  # this is how Python refuses an import
    return monkeypatch


async def parked(app: EddaApp, run_id: str) -> None:
    await until_status(app, run_id, RunStatus.PARKED)
    reason = await reason_of(app, run_id)
    assert reason.startswith("ConfigurationError: step ")
    assert "pip install 'edda-framework[sqlalchemy]'" in reason


async def test_a_step_that_needs_a_missing_package_parks_its_run(
    make_app: MakeApp, without_sqlalchemy: pytest.MonkeyPatch
) -> None:
    shop = Shop()
    app = await make_app(settings=PATIENT)
    run_id = await app.start(shop.order)
    await parked(app, run_id)
    assert "'store:1'" in await reason_of(app, run_id)
    await app.shutdown()
    assert shop.log == ["booked"], "nothing is undone"
    without_sqlalchemy.undo()
    app = await make_app(workflows=[shop.order], settings=PATIENT)
    assert await app.handle(run_id).result(timeout=30) == 7
    assert shop.log == ["booked"]


async def test_an_undo_that_needs_a_missing_package_waits_for_it(
    make_app: MakeApp, without_sqlalchemy: pytest.MonkeyPatch
) -> None:
    shop = Shop()
    app = await make_app(settings=PATIENT)
    run_id = await app.start(shop.undone)
    await parked(app, run_id)
    await app.shutdown()
    assert shop.log == ["booked"]
    without_sqlalchemy.undo()
    app = await make_app(workflows=[shop.undone], settings=PATIENT)
    with pytest.raises(ValueError, match="as planned"):
        await app.handle(run_id).result(timeout=30)
    assert shop.log == ["booked", "cancelled"]


async def test_a_database_in_memory_fails_the_step(make_app_on: MakeApp, make_database: MakeDatabase) -> None:
    """Its runs end with their process: no deployment could mend them, and nobody is to wait for one."""
    shop = Shop()
    app = await make_app_on(on=make_database("memory"))
    with pytest.raises(AppError, match="memory:// has none"):
        await app.run(shop.order)
    assert shop.log == ["booked", "cancelled"]
