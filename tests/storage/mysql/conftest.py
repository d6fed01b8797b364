from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from edda.storage.mysql import MySQLStorage
from edda.storage.mysql.connection import MySQLSession
from tests.conftest import MakeDatabase, OnMySQL
from tests.storage.probes import Listener
from tests.storage.worker import Worker

from .sessions import seeded, session_at


@pytest.fixture
def url(make_database: MakeDatabase) -> str:
    database = make_database("mysql")
    assert isinstance(database, OnMySQL)
    return database.url


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
async def storage(url: str, listener: Listener) -> AsyncIterator[MySQLStorage]:
    storage = MySQLStorage(url, pool_size=1, probe=listener)
    await storage.open()
    await storage.migrate()
    yield storage
    await storage.close()


@pytest.fixture
async def worker(storage: MySQLStorage) -> Worker:
    worker = Worker(storage, "worker-1")
    await worker.register()
    return worker


@pytest.fixture
async def stranger(url: str) -> AsyncIterator[MySQLSession]:
    """A session of another process."""
    async with session_at(url) as session:
        yield session


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def large(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The URL of a database with the module's SEEDS in it."""
    async with seeded(request.module.SEEDS) as url:
        yield url


@pytest.fixture
async def session(large: str) -> AsyncIterator[MySQLSession]:
    async with session_at(large) as session:
        yield session
