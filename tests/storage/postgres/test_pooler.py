"""A connection pooler in front of the server is recognised, and gets no statement that it could mix up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from edda import EddaApp, RetryPolicy, RunStatus, WorkflowContext, activity, workflow
from edda.core.model import StagedEvent, StagedKind, WorkerId
from edda.errors import StorageError, StorageUnavailableError
from edda.storage.postgres import PostgresStorage
from edda.storage.postgres.pool import SETTINGS, SHARED_SETTINGS, PostgresConnectionFactory
from edda.storage.postgres.target import MAX_POOLER_CHECKS, Pooling, PostgresTarget
from edda.storage.shared import step_commit
from edda.storage.sqlalchemy_sessions import caller_transaction
from edda.workflow.workflow import registry
from tests.conftest import OnPostgres, behind_pgbouncer
from tests.engine.conditions import reason_of, until_status

ONCE = RetryPolicy(max_attempts=1)
TIMEOUT = "SELECT current_setting('idle_in_transaction_session_timeout')"
# The names that every client of asyncpg gives its first statements, and the unnamed one.
USUAL_NAMES = ("", *(f"__asyncpg_stmt_{n:x}__" for n in range(1, 40)))


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_workflows", {})


@pytest.fixture
def pooled(database: OnPostgres) -> str:
    """The database's URL through a pooler by transaction with one server connection, which all clients share."""
    return behind_pgbouncer(database, "transaction", 1)


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[PostgresStorage]:
    storage = PostgresStorage(url, **options)
    try:
        await storage.open()
        await storage.migrate()
        yield storage
    finally:
        await storage.close()


async def leave_statements(url: str) -> None:
    """As another client of the pooler: statements that change its rows, on every name that a client may use next."""
    connection = await asyncpg.connect(url, statement_cache_size=0)
    try:
        async with connection.transaction():
            await connection.execute("DEALLOCATE ALL")
            for name in USUAL_NAMES:
                await connection.prepare("SELECT 'of another client'", name=name)
    finally:
        connection.terminate()


@pytest.mark.parametrize("mode", ["transaction", "session"])
async def test_a_pooler_is_recognised_and_told_of_once(
    database: OnPostgres, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "edda")
    async with opened(behind_pgbouncer(database, mode, 20)) as storage:
        await asyncio.gather(*(storage.now() for _ in range(10)))
        assert storage.session_target().is_pooled()
    told = [record for record in caplog.records if "pooler" in record.message]
    assert len(told) == 1
    assert "?pooler=session" in told[0].message


async def test_a_server_without_a_pooler_is_taken_for_one(database: OnPostgres) -> None:
    async with opened(database.url) as storage:
        assert not storage.session_target().is_pooled()


async def test_a_pooler_that_accepts_all_start_up_parameters_is_recognised(database: OnPostgres) -> None:
    """This pooler refuses nothing; only the process number of the server shows it."""
    from tests.servers import start_pgbouncer

    ignored = {"ignore_startup_parameters": ",".join(SETTINGS)}
    behind_pgbouncer(database, "transaction")  # skips where there is none
    url = start_pgbouncer(database.url, database.server.answers, mode="transaction", settings=ignored)
    target = PostgresTarget(url)
    connection = await target.connect(SETTINGS)
    assert connection.is_pooled
    assert target.pooling is Pooling.TRANSACTION
    connection.terminate()


async def test_a_pooler_by_statement_is_refused_with_the_cure(database: OnPostgres) -> None:
    with pytest.raises(StorageError, match="pool_mode = transaction"):
        async with opened(behind_pgbouncer(database, "statement")):
            pass


async def test_a_pooler_by_transaction_that_is_called_one_by_session_is_refused(pooled: str) -> None:
    with pytest.raises(StorageError, match="remove pooler=session"):
        async with opened(f"{pooled}?pooler=session"):
            pass


async def test_statements_of_other_clients_are_never_executed(pooled: str) -> None:
    async with opened(pooled, pool_size=2) as storage:
        await leave_statements(pooled)
        assert await storage.now() > 1_000_000
        shared = await storage.begin()
        assert await shared.fetch("SELECT :n::int", {"n": 7}) == [(7,)]
        await shared.rollback()
        await leave_statements(pooled)
        assert [await storage.read_fence(WorkerId(name)) for name in ("a", "b")] == [None, None]


async def test_statements_of_other_clients_are_never_executed_in_a_session(pooled: str) -> None:
    @activity(retry_policy=ONCE)
    async def ask(ctx: WorkflowContext, number: int) -> int:
        await leave_statements(pooled)
        return int((await ctx.session.execute(text("SELECT :n + 1"), {"n": number})).scalar_one())

    @workflow
    async def asking(ctx: WorkflowContext) -> list[int]:
        return [await ask(ctx, number) for number in range(3)]

    async with EddaApp("shop", pooled, workflows=[asking]) as app:
        assert await app.run(asking) == [1, 2, 3]


async def test_names_of_statements_are_no_other_clients(database: OnPostgres) -> None:
    """Where a pooler is not recognised, the server refuses the statement instead of executing another's."""
    target = PostgresTarget(database.url)
    names = set()
    for _ in range(2):
        connection = await target.connect(SETTINGS)
        names.add((await connection.prepare("SELECT 1")).get_name())
        await connection.close()
    assert len(names) == 2
    assert not names & set(USUAL_NAMES)


async def test_a_pooler_that_was_not_recognised_is_when_a_statement_is_gone(database: OnPostgres) -> None:
    address = PostgresConnectionFactory(PostgresTarget(database.url), probe=None)
    session = await address.connect(30)
    await session.fetch("SELECT 1")
    await session.execute("DEALLOCATE ALL")  # as if this were another server connection
    with pytest.raises(StorageUnavailableError):
        await session.fetch("SELECT 1")
    assert address.target.is_pooled
    again = await address.connect(30)
    assert (await again.fetch("SELECT 1"))[0][0] == 1
    await again.close()


@pytest.mark.parametrize("option", ["", "?pooler=session"])
async def test_time_outs_hold_behind_a_pooler(database: OnPostgres, option: str) -> None:
    url = behind_pgbouncer(database, "session" if option else "transaction", 20 if option else 1) + option
    async with opened(url) as storage:
        async with storage._pool.session() as session, session.transaction():
            assert (await session.fetch(TIMEOUT))[0][0] == "5s"
            assert (await session.fetch("SHOW lock_timeout"))[0][0] == "5s"
        async with storage._queries.session() as session, session.transaction():
            assert (await session.fetch("SHOW transaction_read_only"))[0][0] == "on"
        shared = await storage.begin()
        assert await shared.fetch(TIMEOUT, {}) == [("1min",)]
        await shared.rollback()
    if not option:
        plain = await asyncpg.connect(url, statement_cache_size=0)
        async with plain.transaction():
            assert await plain.fetchval(TIMEOUT) == "0"  # nothing stays on the server connection
        await plain.close()


async def test_settings_of_the_url_hold_behind_a_pooler(pooled: str) -> None:
    target = PostgresTarget(f"{pooled}?search_path=a,b&options=-c%20work_mem%3D123kB&application_name=shop")
    connection = await target.connect(SHARED_SETTINGS, is_shared=True)
    async with connection.transaction():
        found = [await connection.fetchval(f"SHOW {name}") for name in ("search_path", "work_mem", "application_name")]
    connection.terminate()
    assert found == ["a,b", "123kB", "shop"]


async def test_an_engine_of_the_users_that_keeps_prepared_statements_is_refused(pooled: str) -> None:
    @activity(retry_policy=ONCE)
    async def ask(ctx: WorkflowContext) -> int:
        return int((await ctx.session.execute(text("SELECT 1"))).scalar_one())

    @workflow
    async def asking(ctx: WorkflowContext) -> int:
        return await ask(ctx)

    careful = {"statement_cache_size": 0, "prepared_statement_cache_size": 0, "prepared_statement_name_func": str}
    driver = pooled.replace("postgresql://", "postgresql+asyncpg://")
    for arguments in ({}, careful):
        engine = create_async_engine(driver, connect_args=arguments)
        async with EddaApp("shop", engine=engine, workflows=[asking]) as app:
            if arguments:
                assert await app.run(asking) == 1
            else:
                run_id = await app.start(asking)
                await until_status(app, run_id, RunStatus.PARKED)
                assert "prepared_statement_name_func" in await reason_of(app, run_id)
        await engine.dispose()


@pytest.mark.parametrize("option", ["pooler=transaction", "statement_cache_size=0"])
def test_sessions_keep_no_prepared_statements_where_the_storage_keeps_none(option: str) -> None:
    arguments = PostgresStorage(f"postgresql://host/db?{option}").session_target().arguments()
    assert arguments["prepared_statement_cache_size"] == 0
    assert arguments["prepared_statement_name_func"]() == "", "a name would stay on the server connection"
    direct = PostgresStorage("postgresql://host/db").session_target().arguments()
    assert direct["prepared_statement_cache_size"] > 0


async def test_what_edda_adds_to_a_session_is_not_prepared_if_its_engine_keeps_no_statements(
    database: OnPostgres,
) -> None:
    """asyncpg has a cache of its own beside SQLAlchemy's."""
    driver = database.url.replace("postgresql://", "postgresql+asyncpg://")
    arguments = {"prepared_statement_cache_size": 0, "prepared_statement_name_func": str}
    prepared = text("SELECT count(*) FROM pg_prepared_statements WHERE name <> ''")
    async with opened(database.url):
        for connect_args, count in ((arguments, 0), ({}, 1)):
            engine = create_async_engine(driver, connect_args=connect_args)
            async with AsyncSession(engine) as session:
                before = (await session.execute(prepared)).scalar_one()
                staged = StagedEvent(StagedKind.EVENT, b"{}")
                await step_commit.stage_events(caller_transaction(session), (staged,))
                assert (await session.execute(prepared)).scalar_one() - before == count
                await session.rollback()
            await engine.dispose()


async def test_work_of_another_process_is_found_without_listen(pooled: str) -> None:
    @workflow
    async def answer(ctx: WorkflowContext) -> int:
        return 42

    async with (
        EddaApp("shop", pooled, worker=False, workflows=[answer]) as client,
        EddaApp("shop", pooled, workflows=[answer]),
    ):
        handle = client.handle(await client.start(answer))
        async with asyncio.timeout(30):
            assert await handle.result() == 42


async def test_all_that_a_session_can_do_works_behind_a_pooler(pooled: str, database: OnPostgres) -> None:
    database.execute("DROP TABLE IF EXISTS moods; DROP TYPE IF EXISTS mood; CREATE TYPE mood AS ENUM ('good', 'bad')")
    database.execute("CREATE TABLE moods (n int PRIMARY KEY, mood mood, facts jsonb)")

    @activity(retry_policy=ONCE)
    async def use(ctx: WorkflowContext) -> list[int]:
        session = ctx.session
        rows = [{"n": n, "facts": "{}"} for n in range(500)]
        await session.execute(text("INSERT INTO moods VALUES (:n, 'good', CAST(:facts AS jsonb))"), rows)
        try:
            async with session.begin_nested():
                await session.execute(text("INSERT INTO moods VALUES (:n)"), {"n": 0})
        except IntegrityError:
            pass
        seen = []
        async for (n,) in await session.stream(text("SELECT n FROM moods ORDER BY n")):
            if n % 100 == 0:  # another statement, while the first is still being read
                found = await session.execute(text("SELECT mood, facts FROM moods WHERE n = :n"), {"n": n})
                assert found.one() == ("good", {})
                seen.append(n)
        await session.run_sync(lambda inner: inner.execute(text("DELETE FROM moods WHERE n > 0")))
        return seen

    @activity(retry_policy=ONCE)
    async def use_driver(ctx: WorkflowContext) -> int:
        async with ctx.transaction() as connection:
            await connection.executemany("INSERT INTO moods VALUES ($1, $2)", [(n, "bad") for n in range(1, 9)])
            first, second = [await connection.prepare(f"SELECT {n} + $1::int") for n in (1, 2)]
            assert [await first.fetchval(1), await second.fetchval(1)] == [2, 3]
            async with connection.transaction():
                return len([row async for row in connection.cursor("SELECT mood FROM moods WHERE n > $1", 0)])

    @workflow
    async def using(ctx: WorkflowContext) -> tuple[list[int], int]:
        return await use(ctx), await use_driver(ctx)

    async with EddaApp("shop", pooled, workflows=[using]) as app:
        assert await app.run(using) == ([0, 100, 200, 300, 400], 8)
    database.execute("DROP TABLE moods; DROP TYPE mood")


@pytest.mark.parametrize("losses", [2, 3])
async def test_a_connection_that_the_pooler_drops_at_the_start_is_tried_again(
    pooled: str, losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = 0

    async def drop(target: PostgresTarget, settings: object) -> None:
        nonlocal lost
        lost += 1
        if lost <= losses:
            raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    monkeypatch.setattr(PostgresTarget, "_refuse_statement_mode", drop)
    storage = PostgresStorage(pooled)
    if losses < MAX_POOLER_CHECKS:
        await storage.open()
        await storage.close()
    else:
        with pytest.raises(StorageUnavailableError, match="no answer through the pooler"):
            await storage.open()
        storage.kill()
