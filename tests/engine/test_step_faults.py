"""Faults of Edda's own database while a step uses it: its attempt is not counted, but run again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import text

from edda import EddaApp, RetryPolicy, RunStatus, WorkflowContext, activity, workflow
from edda.errors import NotConnectedError, RetryExhaustedError
from edda.storage.shared import step_commit as joints
from tests.conftest import Database, MakeDatabase, OnServer
from tests.proxy import DatabaseProxy

from .conditions import PATIENCE, until, until_status
from .conftest import RESTLESS, MakeApp, url_of
from .orders import WAYS, Orders, open_orders

ONCE = RetryPolicy(max_attempts=1)

pytestmark = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(params=("postgres", "mysql"))
def database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    return make_database(request.param)


@pytest.fixture
async def orders(database: Database) -> AsyncIterator[Orders]:
    async with open_orders(database) as orders:
        yield orders


@pytest.fixture
async def proxy(database: Database) -> AsyncIterator[DatabaseProxy]:
    async with DatabaseProxy(url_of(database)) as proxy:
        yield proxy


class Step:
    """A workflow of one step that may have one attempt. `act` is called by the body, with the number of the call."""

    def __init__(self, act: Callable[[int, WorkflowContext], Awaitable[None]], **limits: Any) -> None:
        self.calls = 0
        self.attempts: list[int] = []

        @activity(retry_policy=ONCE, **limits)
        async def write(ctx: WorkflowContext) -> int:
            self.calls += 1
            self.attempts.append(ctx.attempt)
            await act(self.calls, ctx)
            return self.calls

        @workflow(name="writing")
        async def writing(ctx: WorkflowContext) -> int:
            return await write(ctx)

        self.workflow = writing


def lines_of(caplog: pytest.LogCaptureFixture, name: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if vars(record).get("edda_line") == name]


OpenApp = Callable[[], Awaitable[EddaApp]]


@pytest.fixture
async def open_app(proxy: DatabaseProxy) -> AsyncIterator[OpenApp]:
    """An app that reaches its database through the proxy."""
    made: list[EddaApp] = []

    async def open() -> EddaApp:
        app = EddaApp("test", proxy.url, settings=RESTLESS)
        made.append(app)
        await app.initialize()
        return app

    yield open
    await proxy.restore()
    for app in made:
        await app.shutdown(grace=0.0)


@pytest.mark.parametrize("moment", ["before its transaction", "in its transaction", "before its commit"])
async def test_a_connection_that_is_cut_or_refused_costs_no_attempt(
    way: str, moment: str, open_app: OpenApp, proxy: DatabaseProxy, orders: Orders, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(call: int, ctx: WorkflowContext) -> None:
        if call == 1 and moment == "before its transaction":
            await proxy.refuse()
        if moment == "in its transaction":
            if way == "session":
                await ctx.session.execute(text("SELECT 1"))
                if call == 1:
                    await proxy.refuse()
                await orders.write(way, ctx, "lute")
            else:
                async with ctx.transaction() as connection:
                    if call == 1:
                        await proxy.refuse()
                    await orders.insert(connection, "lute")
            return
        await orders.write(way, ctx, "lute")
        if call == 1 and moment == "before its commit":
            await proxy.refuse()

    step = Step(act)
    app = await open_app()
    with caplog.at_level(logging.INFO, "edda"):
        run_id = await app.start(step.workflow)
        await until(lambda: bool(lines_of(caplog, "database_away")), "the log has a line on it")
        await proxy.restore()
        assert await app.handle(run_id).result(timeout=PATIENCE) >= 2
    assert set(step.attempts) == {1}
    assert await orders.items() == ["lute"]
    assert len(lines_of(caplog, "database_away")) == 1
    assert not lines_of(caplog, "step_failed") + lines_of(caplog, "retries_exhausted")


RAISE = {
    "postgres": "DO $$ BEGIN RAISE EXCEPTION 'a fault' USING ERRCODE = '{}'; END $$",
    "mysql": "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {}, MESSAGE_TEXT = 'running with the --read-only option'",
}
FAULTS = {
    "postgres": ("25006", "53100", "53300", "57P01", "57P03", "08006", "58030"),
    "mysql": ("1290", "1792", "1836", "1040", "1114", "1021", "1047", "1053"),
}
ERRORS = {
    "postgres": ("P0001", "42P01", "42601", "23505", "22012", "57014", "53400", "42501"),
    "mysql": ("1146", "1064", "1062", "1365", "1317", "1142", "1644"),
}


async def send(way: str, ctx: WorkflowContext, statement: str) -> None:
    if way == "session":
        await ctx.session.execute(text(statement.replace(":", "\\:")))
        return
    async with ctx.transaction() as connection:
        if "asyncmy" in type(connection).__module__:
            async with connection.cursor() as cursor:
                await cursor.execute(statement)
        else:
            await connection.execute(statement)


async def test_a_server_that_cannot_write_costs_no_attempt(
    way: str, database: Database, make_app: MakeApp, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edda.engine.run.attempt._MAX_PAUSE", 0.1)
    faults = FAULTS[database.kind]

    async def act(call: int, ctx: WorkflowContext) -> None:
        if call <= len(faults):
            await send(way, ctx, RAISE[database.kind].format(faults[call - 1]))
        await orders.write(way, ctx, "lute")

    step = Step(act)
    app = await make_app()
    assert await app.run(step.workflow) == len(faults) + 1
    assert set(step.attempts) == {1}
    assert await orders.items() == ["lute"]


async def test_errors_of_the_users_own_count_as_ever(way: str, database: Database, make_app: MakeApp) -> None:
    app = await make_app()
    for code in ERRORS[database.kind]:

        async def act(call: int, ctx: WorkflowContext, code: str = code) -> None:
            await send(way, ctx, RAISE[database.kind].format(code))

        step = Step(act)
        with pytest.raises(RetryExhaustedError):
            await app.run(step.workflow)
        assert step.calls == 1, code


async def test_a_table_of_the_users_that_is_missing_counts_and_one_of_ours_does_not(
    way: str, database: Database, make_app: MakeApp, orders: Orders, caplog: pytest.LogCaptureFixture
) -> None:
    async def use_missing(call: int, ctx: WorkflowContext) -> None:
        await send(way, ctx, "SELECT 1 FROM not_there")

    app = await make_app()
    step = Step(use_missing)
    with pytest.raises(RetryExhaustedError):
        await app.run(step.workflow)
    assert step.calls == 1

    assert isinstance(database, OnServer)
    rename = {"postgres": "ALTER TABLE {} RENAME TO {}", "mysql": "RENAME TABLE {} TO {}"}[database.kind]

    async def write(call: int, ctx: WorkflowContext) -> None:
        await orders.write(way, ctx, "lute")

    step = Step(write)
    await asyncio.to_thread(database.execute, rename.format("edda_step_commit", "edda_done_away"))
    try:
        run_id = await app.start(step.workflow)
        await until(lambda: bool(lines_of(caplog, "database_away")), "the log has a line on it")
    finally:
        await asyncio.to_thread(database.execute, rename.format("edda_done_away", "edda_step_commit"))
    await app.handle(run_id).result(timeout=PATIENCE)
    assert set(step.attempts) == {1}
    assert await orders.items() == ["lute"]


async def test_a_commit_without_an_answer_that_is_not_in_costs_no_attempt(
    way: str, open_app: OpenApp, proxy: DatabaseProxy, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost after the record was sent and before the COMMIT is."""
    record = joints.write_step_commit
    cuts = 0

    async def record_and_cut(*args: Any) -> None:
        nonlocal cuts
        await record(*args)
        cuts += 1
        if cuts == 1:
            await proxy.refuse()
            asyncio.get_running_loop().call_later(0.5, lambda: asyncio.ensure_future(proxy.restore()))

    async def act(call: int, ctx: WorkflowContext) -> None:
        await orders.write(way, ctx, "lute")

    step = Step(act)
    app = await open_app()
    monkeypatch.setattr(joints, "write_step_commit", record_and_cut)
    assert await app.run(step.workflow) == 2
    assert step.attempts == [1, 1]
    assert await orders.items() == ["lute"]


async def wait_in_vain(
    way: str, app: EddaApp, proxy: DatabaseProxy, orders: Orders, caplog: pytest.LogCaptureFixture, **limits: Any
) -> tuple[Step, str]:
    async def act(call: int, ctx: WorkflowContext) -> None:
        if call == 1:
            await proxy.refuse()
        await orders.write(way, ctx, "lute")

    step = Step(act, **limits)
    run_id = await app.start(step.workflow)
    await until(lambda: bool(lines_of(caplog, "database_away")), "the step waits")
    return step, run_id


async def test_a_step_that_waits_for_the_database_can_be_cancelled(
    way: str,
    open_app: OpenApp,
    proxy: DatabaseProxy,
    orders: Orders,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = await open_app()
    _, run_id = await wait_in_vain(way, app, proxy, orders, caplog)
    monkeypatch.setattr(app.engine.storage, "begin", refuse)  # the journal gets through again, the step does not
    await proxy.restore()
    await app.cancel(run_id)
    await until_status(app, run_id, RunStatus.CANCELLED)
    assert await orders.items() == []


async def refuse(holder: str = "") -> Any:
    raise NotConnectedError("refused")


async def test_a_step_that_waits_for_the_database_is_handed_back_by_a_shutdown(
    way: str,
    open_app: OpenApp,
    proxy: DatabaseProxy,
    orders: Orders,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = await open_app()
    step, run_id = await wait_in_vain(way, app, proxy, orders, caplog)
    monkeypatch.setattr(app.engine.storage, "begin", refuse)
    await proxy.restore()
    async with asyncio.timeout(PATIENCE):
        await app.shutdown(grace=600.0)
    other = await open_app()
    await other.handle(run_id).result(timeout=PATIENCE)
    assert set(step.attempts) == {1}
    assert await orders.items() == ["lute"]


async def test_the_time_limit_of_a_step_does_not_run_while_it_waits_for_the_database(
    way: str, open_app: OpenApp, proxy: DatabaseProxy, orders: Orders, caplog: pytest.LogCaptureFixture
) -> None:
    app = await open_app()
    step, run_id = await wait_in_vain(way, app, proxy, orders, caplog, timeout=0.5)
    await asyncio.sleep(1.0)  # what must not happen has this long to happen
    await proxy.restore()
    assert await app.handle(run_id).result(timeout=PATIENCE) == step.calls
    assert await orders.items() == ["lute"]


async def test_a_connection_that_each_run_of_the_step_loses_ends_its_patience(
    way: str, open_app: OpenApp, proxy: DatabaseProxy, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a body that rests in its transaction for longer than the server allows."""
    monkeypatch.setattr("edda.engine.run.attempt._MAX_REPEATS", 3)

    async def act(call: int, ctx: WorkflowContext) -> None:
        await orders.write(way, ctx, "lute")
        if way == "session":
            await ctx.session.flush()
        proxy.cut()
        if way == "transaction":
            async with ctx.transaction() as connection:
                await orders.insert(connection, "harp")
        else:
            await orders.write(way, ctx, "harp")

    step = Step(act)
    app = await open_app()
    run_id = await app.start(step.workflow)
    with pytest.raises(RetryExhaustedError):
        await app.handle(run_id).result(timeout=PATIENCE)
    assert step.calls == 4
    assert await orders.items() == []


async def test_many_steps_that_wait_share_one_line(
    way: str, open_app: OpenApp, proxy: DatabaseProxy, orders: Orders, caplog: pytest.LogCaptureFixture
) -> None:
    begun, gone = 0, asyncio.Event()

    @activity(retry_policy=ONCE)
    async def write(ctx: WorkflowContext, number: int) -> None:
        nonlocal begun
        begun += 1
        await gone.wait()
        await orders.write(way, ctx, f"lute {number}")

    @workflow
    async def writing(ctx: WorkflowContext, number: int) -> None:
        await write(ctx, number)

    app = await open_app()
    with caplog.at_level(logging.INFO, "edda"):
        runs = [await app.start(writing, number) for number in range(30)]
        await until(lambda: begun == 30, "all bodies have begun")
        await proxy.refuse()
        gone.set()
        await until(lambda: bool(lines_of(caplog, "database_away")), "the log has a line on it")
        await proxy.restore()
        for run_id in runs:
            await app.handle(run_id).result(timeout=PATIENCE)
    assert len(await orders.items()) == 30
    assert len(lines_of(caplog, "database_away")) == 1


@pytest.mark.parametrize(("fault", "end"), [("query_only = 1", "query_only = 0"), ("max_page_count = 1", "")])
async def test_a_sqlite_file_that_cannot_be_written_costs_no_attempt(
    way: str, fault: str, end: str, make_database: MakeDatabase, make_app: MakeApp
) -> None:
    database = make_database("sqlite")
    end = end or "max_page_count = 1000000"

    async with open_orders(database) as table:

        async def act(call: int, ctx: WorkflowContext) -> None:
            if call > 2:
                await table.write(way, ctx, "lute")
            elif way == "session":
                connection = (await ctx.session.connection()).sync_connection
                assert connection is not None
                driver: Any = connection.connection.driver_connection
                await driver.execute(f"PRAGMA {fault}")
                try:
                    for number in range(1_000):
                        await table.write(way, ctx, f"lute {number}")
                finally:
                    await driver.execute(f"PRAGMA {end}")
            else:
                async with ctx.transaction() as connection:
                    await connection.run(lambda db: db.execute(f"PRAGMA {fault}"))
                    raw = connection.raw
                    try:
                        for number in range(1_000):
                            await table.insert(connection, f"lute {number}")
                    finally:
                        raw.execute(f"PRAGMA {end}")

        step = Step(act)
        app = await make_app(on=database)
        assert await app.run(step.workflow) == 3
        assert set(step.attempts) == {1}
        assert await table.items() == ["lute"]
