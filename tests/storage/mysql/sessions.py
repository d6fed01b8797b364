"""Databases with rows, and sessions on them, for the tests of MySQL and MariaDB alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from edda.storage.mysql import MySQLStorage
from edda.storage.mysql.connection import MySQLConnectionFactory, MySQLSession
from tests import databases
from tests.conftest import need


@asynccontextmanager
async def seeded(seeds: Iterable[str]) -> AsyncIterator[str]:
    server = need(databases.mysql(), "MariaDB or MySQL", "EDDA_TEST_MYSQL_URL")
    url = server.create()
    storage = MySQLStorage(url)
    await storage.open()
    await storage.migrate()
    await storage.close()
    for statement in seeds:
        server.execute(statement, url)
    yield url
    server.drop(url)


@asynccontextmanager
async def session_at(url: str) -> AsyncIterator[MySQLSession]:
    """A session as the storage opens it."""
    address = MySQLConnectionFactory(url, None)
    address.open()
    session = await address.connect()
    yield session
    await session.close()
