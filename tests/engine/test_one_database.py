"""The storage and `ctx.session` are on one database, whichever way it was said which."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from edda import EddaApp, RetryPolicy, WorkflowContext, activity, workflow
from edda.databases import open_storage
from edda.databases import url_of as url_of_engine
from edda.storage.postgres.target import PostgresTarget
from edda.workflow.workflow import Workflow
from tests.conftest import Database, MakeDatabase, OnServer

from .conftest import url_of
from .orders import driver_url

ONCE = RetryPolicy(max_attempts=1)
NAMES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE name = 'edda_run'",
    "postgres": "SELECT current_database()",
    "mysql": "SELECT database()",
}


@pytest.fixture(params=("sqlite", "postgres", "mysql"))
def database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    return make_database(request.param)


def name_of(database: Database) -> str:
    return urlsplit(database.url).path[1:] if isinstance(database, OnServer) else "edda_run"


def asking(question: str) -> Workflow[[], str]:
    @activity(retry_policy=ONCE)
    async def ask(ctx: WorkflowContext) -> str:
        return str((await ctx.session.execute(text(question))).scalar_one())

    @workflow
    async def run(ctx: WorkflowContext) -> str:
        return await ask(ctx)

    return run


async def test_sessions_are_on_the_database_of_the_storage_that_was_given(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDDA_DB_URL", "sqlite:///other.db")
    app = EddaApp("shop", storage=database.storage(), workflows=[run := asking(NAMES[database.kind])])
    assert urlsplit(app.db_url).scheme == urlsplit(url_of(database)).scheme
    async with app:
        assert await app.run(run) == name_of(database)
    assert not {"other.db", "edda.db"} & set(os.listdir(tmp_path))


async def test_the_storage_is_on_the_database_of_the_users_engine(database: Database) -> None:
    # An option that only the engine's driver understands is no concern of the storage.
    options = {"sqlite": "?timeout=7", "postgres": "?command_timeout=7", "mysql": "?connect_timeout=7"}
    engine = create_async_engine(driver_url(database) + options[database.kind])
    async with EddaApp("shop", engine=engine, workflows=[run := asking(NAMES[database.kind])]) as app:
        assert await app.run(run) == name_of(database)
    await engine.dispose()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://host/db?pool_sise=3", "no option 'pool_sise'; did you mean EddaApp(pool_size=...)?"),
        ("postgresql://host/db?pool_size=3", "'pool_size'; it is an argument: EddaApp(pool_size=...)"),
        ("postgresql://host/db?ssl_mode=require", "'ssl_mode'; did you mean 'sslmode'?"),
        ("postgresql://a:1,b:2/db?target_session_attr=primary", "did you mean 'target_session_attrs'?"),
        ("postgresql://host/db?statment_cache_size=0", "did you mean 'statement_cache_size'?"),
        ("postgresql://host/db?statement_cache_size=none", "statement_cache_size is a number, not 'none'"),
        ("postgresql://host/db?pooler=pgbouncer", "pooler is one of auto, none, session, transaction"),
        ("postgresql://host/db?options=search_path", "options is written '-c name=value"),
        ("mysql://host/db?unix_sockett=/x", "did you mean 'unix_socket'?"),
        ("mysql://host/db?pool_size=3", "EddaApp(pool_size=...)"),
        ("mariadb://host/db?xyz=1", "no option 'xyz' (known: charset, ssl, ssl_ca, unix_socket)"),
        ("sqlite:///file.db?mode=ro", "no option 'mode' (known: none)"),
        ("sqlite:///file.db?pool_size=3", "EddaApp(pool_size=...)"),
        ("memory://?x=1", "no option 'x'"),
    ],
)
def test_an_option_that_is_not_known_is_named(url: str, words: str) -> None:
    with pytest.raises(ValueError, match="db_url: ") as caught:
        open_storage(url.replace("//host", "//me:hunter2@host"))
    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://host/db?sslmode=require&application_name=shop&search_path=a,b",
        "postgresql+asyncpg://host/db?ssl=require&prepared_statement_cache_size=0",
        "postgres://a:1,b:2/db?target_session_attrs=read-write&connect_timeout=3",
        "postgresql://host/db?statement_cache_size=0&pooler=transaction",
        "postgresql://host/db?pgbouncer=true",
        "postgresql://host/db?options=-c%20search_path%3Da&my.setting=1",
        "postgresql://me@/db?host=a:1&host=b:2",
        "mysql://host/db?charset=utf8mb4&unix_socket=/tmp/socket",
    ],
)
def test_an_option_that_is_known_is_taken(url: str) -> None:
    open_storage(url)


@pytest.mark.databases("postgres")
@pytest.mark.parametrize("url", ["postgresql://shop@a:1,b:2/db", "postgresql+asyncpg://shop@/db?host=a:1&host=b:2"])
def test_all_hosts_of_a_url_are_used(url: str) -> None:
    target = PostgresTarget(url_of_engine(create_async_engine(url)) if "+" in url else url)
    assert "a:1,b:2" in unquote(target._dsn)


async def test_options_of_the_url_reach_sessions_as_well(make_database: MakeDatabase) -> None:
    database: Any = make_database("postgres")
    url = f"{database.url}?options=-c%20work_mem%3D123kB&ssl=disable&statement_cache_size=0"
    async with EddaApp("shop", url, workflows=[run := asking("SHOW work_mem")]) as app:
        assert await app.run(run) == "123kB"
