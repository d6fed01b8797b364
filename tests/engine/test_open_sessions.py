"""While a step holds its transaction on SQLite nobody else can write, but everybody can look."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import text

from edda import EddaApp, RunStatus, WorkflowContext, activity, workflow
from edda.errors import StorageUnavailableError
from edda.storage.sqlite import SQLiteStorage
from edda.storage.sqlite.connection import Connection
from tests.conftest import Database
from tests.web.calls import ask

from .conditions import PATIENCE, until

SOON = 4.0
"""Seconds; the page gives up after five."""


@pytest.fixture(params=["sqlite"])
def database(request: pytest.FixtureRequest, make_database: Callable[[str], Database]) -> Database:
    return make_database(request.param)


class Holding:
    """A run whose step holds its transaction until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = asyncio.Event(), asyncio.Event()


@pytest.fixture(params=["session", "transaction"])
async def holding(request: pytest.FixtureRequest, app: EddaApp) -> Holding:
    held = Holding()

    @activity
    async def hold(ctx: WorkflowContext) -> str:
        if request.param == "session":
            await ctx.session.execute(text("SELECT 1"))
            return await wait()
        async with ctx.transaction() as connection:
            await connection.execute("SELECT 1")
            return await wait()

    async def wait() -> str:
        held.begun.set()
        await held.let_go.wait()
        return "held"

    @workflow
    async def book(ctx: WorkflowContext) -> str:
        return await hold(ctx)

    @workflow
    async def quick(ctx: WorkflowContext) -> str:
        return "quick"

    await app.start(quick.options(id="quick-1"))
    assert await app.handle("quick-1").result(timeout=PATIENCE) == "quick"
    await app.start(book.options(id="book-1"))
    await asyncio.wait_for(held.begun.wait(), PATIENCE)
    return held


async def _page(app: EddaApp, path: str) -> None:
    reply = await ask(app, method="GET", path=path, headers={"host": "localhost"}, body=b"")
    assert reply.status == 200, (path, reply.status, reply.body)


LOOKS: dict[str, Callable[[EddaApp], Awaitable[object]]] = {
    "metrics": lambda app: _page(app, "/_edda/metrics"),
    "health": lambda app: _page(app, "/_edda/readyz"),
    "runs": lambda app: _page(app, "/_edda/"),
    "a run": lambda app: _page(app, "/_edda/runs/book-1"),
    "the API": lambda app: _page(app, "/_edda/api/v1/runs"),
    "status": lambda app: app.handle("book-1").status(),
    "history": lambda app: app.handle("book-1").history(),
    "result": lambda app: app.handle("quick-1").result(timeout=SOON),
    "find": lambda app: app.find_instances(),
}


async def test_looking_does_not_wait_for_a_step_that_holds_its_transaction(app: EddaApp, holding: Holding) -> None:
    late: list[str] = []
    for name, look in LOOKS.items():
        begun = time.monotonic()
        try:
            async with asyncio.timeout(2 * SOON):
                await look(app)
        except (AssertionError, StorageUnavailableError, TimeoutError) as error:
            late.append(f"{name} after {time.monotonic() - begun:.1f} s: {error!r}")
    assert not holding.let_go.is_set()
    assert await app.handle("book-1").status() is RunStatus.RUNNING
    holding.let_go.set()
    assert await app.handle("book-1").result(timeout=PATIENCE) == "held"
    assert not late


async def test_looking_does_not_wait_for_writers_that_wait_for_the_step(app: EddaApp, holding: Holding) -> None:
    sending = asyncio.create_task(app.send_event("paid", "/bank", {}))
    await until(lambda: not app.engine.ingest.is_idle, "an event is being stored")
    for _ in range(3):  # the first may come before the writer's thread waits for the lock
        for name in ("status", "history", "find", "a run"):
            async with asyncio.timeout(SOON):
                await LOOKS[name](app)
    holding.let_go.set()
    await asyncio.wait([sending])
    assert await app.handle("book-1").result(timeout=PATIENCE) == "held"


async def test_a_reader_that_lost_its_connection_opens_another_meanwhile(app: EddaApp, holding: Holding) -> None:
    storage = app.engine.storage
    assert isinstance(storage, SQLiteStorage)

    def fail(db: Connection) -> None:
        raise StorageUnavailableError("the connection was lost on purpose")

    for ask_storage in (storage._pool.read, storage._pool.query):
        with pytest.raises(StorageUnavailableError):
            await asyncio.wait_for(ask_storage(fail), SOON)
        assert await asyncio.wait_for(ask_storage(lambda db: db.row("SELECT 1")), SOON) == (1,)
    holding.let_go.set()
    assert await app.handle("book-1").result(timeout=PATIENCE) == "held"


async def test_a_journal_that_waits_for_a_step_names_it(
    app: EddaApp, holding: Holding, caplog: pytest.LogCaptureFixture
) -> None:
    @workflow
    async def slow(ctx: WorkflowContext) -> str:
        return "slow"

    with caplog.at_level(logging.WARNING, "edda"):
        starting = asyncio.create_task(app.run(slow))
        told = "step hold:1 of run book-1 holds its transaction open"
        await until(lambda: any(told in record.getMessage() for record in caplog.records), "it is told of")
        holding.let_go.set()
        assert await starting == "slow"
    assert len([record for record in caplog.records if "nothing has been written" in record.getMessage()]) < 5
