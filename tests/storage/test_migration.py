"""Migrations: applied once, by the first process, and never to a database with unknown checksums."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from edda.core.model import RunId
from edda.errors import MigrationError
from edda.storage.ports import Storage
from edda.storage.shared.migrations import migrations
from tests.conftest import Database, InFile, MakeDatabase, MakeStorage, OnServer

from .records import start

EDITED = "UPDATE edda_migration SET checksum = 'edited'"
NEWER = "INSERT INTO edda_migration (name, checksum, applied_at) VALUES ('9999_from_the_future', 'x', 1)"


@pytest.fixture(params=["sqlite", "postgres", "mysql"])
def database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    """The memory storage has no schema."""
    return make_database(request.param, fresh=True)


def change(database: Database, statement: str) -> None:
    if isinstance(database, OnServer):
        database.execute(statement)
    elif isinstance(database, InFile):
        _change_file(database.path, statement)


def _change_file(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement)
    connection.close()


async def test_an_empty_database_misses_everything(database: Database, make_storage: MakeStorage) -> None:
    storage = await make_storage()
    names = tuple(migration.name for migration in migrations(database.kind))
    assert names
    assert await storage.pending_migrations() == names
    assert await storage.migrate() == names
    assert await storage.pending_migrations() == ()


async def test_migrating_twice_changes_nothing(storage: Storage) -> None:
    await storage.start([start("run-1")])
    assert await storage.migrate() == ()
    assert await storage.get(RunId("run-1")) is not None


async def test_processes_that_migrate_at_once_all_succeed(database: Database, make_storage: MakeStorage) -> None:
    storages = [await make_storage() for _ in range(3)]
    applied = await asyncio.gather(*(storage.migrate() for storage in storages))
    names = tuple(migration.name for migration in migrations(database.kind))
    assert sorted(applied, key=len) == [(), (), names]
    for storage in storages:
        assert await storage.pending_migrations() == ()
        await storage.start([start("run-1")])


async def test_an_edited_migration_is_an_error(database: Database, storage: Storage, make_storage: MakeStorage) -> None:
    change(database, EDITED)
    other = await make_storage()
    with pytest.raises(MigrationError, match="0001_initial"):
        await other.migrate()
    with pytest.raises(MigrationError, match="0001_initial"):
        await other.pending_migrations()


async def test_the_lock_is_free_again_after_a_failed_migration(
    database: Database, storage: Storage, make_storage: MakeStorage
) -> None:
    change(database, EDITED)
    one, two = await make_storage(), await make_storage()
    for other in (one, two, one):
        with pytest.raises(MigrationError):
            await other.migrate()


async def test_a_database_used_by_a_newer_release_is_accepted(database: Database, storage: Storage) -> None:
    change(database, NEWER)
    assert await storage.pending_migrations() == ()
    assert await storage.migrate() == ()
