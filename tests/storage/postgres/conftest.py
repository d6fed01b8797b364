from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from edda.storage.postgres.connection import PostgresSession
from tests.conftest import MakeDatabase, OnPostgres
from tests.storage.other_session import Outsider

from .plans import seeded, session_at


@pytest.fixture
def database(make_database: MakeDatabase) -> OnPostgres:
    database = make_database("postgres")
    assert isinstance(database, OnPostgres)
    return database


@pytest.fixture
async def outsider(database: OnPostgres) -> AsyncIterator[Outsider]:
    """Another client of the same database, with statements of its own."""
    connection = await asyncpg.connect(database.url)
    yield connection
    await connection.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The URL of a database with the module's SEEDS in it."""
    async with seeded(request.module.SEEDS) as url:
        yield url


@pytest.fixture(params=["force_custom_plan", "force_generic_plan"])
async def session(request: pytest.FixtureRequest, url: str) -> AsyncIterator[PostgresSession]:
    async with session_at(url) as session:
        await session.execute(f"SET plan_cache_mode = {request.param}")
        yield session
