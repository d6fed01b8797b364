"""That the database is back is told once, after an outage that was told."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NoReturn

import pytest

from edda import EddaApp, WorkflowContext, workflow
from edda.errors import StorageUnavailableError
from tests.conftest import MakeDatabase
from tests.proxy import DatabaseProxy

from .conditions import until
from .conftest import MORTAL, MakeApp, url_of


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record for record in caplog.records if vars(record).get("edda_line") == "database_back"]
    assert all(record.levelno == logging.INFO for record in lines)
    return [record.getMessage() for record in lines]


async def test_the_end_of_an_outage_is_told_once_by_each_worker(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "edda")

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        pass

    app = await make_app(settings=MORTAL)
    await app.run(order)
    storage: Any = app.engine.storage

    async def fail(*args: Any, **options: Any) -> NoReturn:
        raise StorageUnavailableError("the database does not answer")

    storage.write = fail
    running = asyncio.create_task(app.run(order))
    await until(lambda: "has no answer" in caplog.text, "the outage is told")
    del storage.write
    await until(lambda: told(caplog) != [], "the end is told")
    await running
    (line,) = told(caplog)
    assert "the database answers again after" in line


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
async def test_a_server_that_was_down_is_told_to_be_back(
    make_database: MakeDatabase, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.INFO, "edda")
    async with DatabaseProxy(url_of(make_database(kind))) as proxy:
        app = EddaApp("shop", proxy.url, settings=MORTAL)
        try:
            await app.initialize()
            await proxy.refuse()
            await until(lambda: "heartbeat of" in caplog.text, "the outage is told")
            await proxy.restore()
            await until(lambda: told(caplog) != [], "the end is told")
            assert len(told(caplog)) == 1
        finally:
            await app.shutdown(grace=0.0)
