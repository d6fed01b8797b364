"""Queries on SQLite do not delay the engine, and have a time-out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edda.core.model import RunId
from edda.core.queries import RunQuery
from edda.core.states import RunStatus
from edda.errors import StorageUnavailableError
from edda.storage.sqlite import SQLiteStorage, queries, threads
from edda.storage.sqlite.connection import Connection

from .processes import opened
from .records import new_run, start
from .worker import Worker

R1 = RunId("run-1")
ENDLESS = "WITH RECURSIVE i(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i) SELECT count(*) FROM i"


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[SQLiteStorage]:
    storage = await opened(str(tmp_path / "edda.db"))
    yield storage
    await storage.close()


@pytest.mark.parametrize("place", ["edda.db", ":memory:"])
async def test_a_question_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    storage = await opened(place if place == ":memory:" else str(tmp_path / place))
    await storage.start([start("run-1")])
    with monkeypatch.context() as patch:
        patch.setattr(threads, "QUERY_TIMEOUT", 0.05)
        patch.setattr(queries, "_STAGED", ENDLESS + " WHERE ? > 0")
        with pytest.raises(StorageUnavailableError, match=r"no answer within 0\.05 s"):
            await storage.backlog()
    assert (await storage.backlog()).ready == 1
    assert await storage.get(R1) is not None
    await storage.close()


async def test_an_error_in_time_is_not_taken_for_a_late_answer(
    storage: SQLiteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "_STAGED", "SELECT nonsense")
    with pytest.raises(StorageUnavailableError, match="nonsense"):
        await storage.backlog()


async def test_runs_continue_during_a_long_query(storage: SQLiteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The query ends only after the engine's calls beside it are done."""
    worker = Worker(storage, "worker-1")
    await worker.register()
    worked = threading.Event()

    def wait(db: Connection, sql: str, *values: int) -> int:
        assert worked.wait(30)
        return 0

    monkeypatch.setattr(queries, "_number", wait)
    looking = asyncio.create_task(storage.backlog())
    await worker.write(new_run("run-1"))
    assert await storage.cancel(R1, b"stop")
    assert len(await storage.read_inboxes(worker.id)) == 1
    assert await storage.change_token()
    assert not looking.done()
    worked.set()
    await looking


async def test_a_database_in_memory_is_queried_on_its_only_connection() -> None:
    storage = await opened(":memory:")
    mark = await storage.change_token()
    await storage.start([start("run-1")])
    assert await storage.count(RunQuery()) == {RunStatus.RUNNING: 1}
    assert await storage.change_token() != mark
    await storage.close()


async def test_marks_of_two_storages_are_never_the_same(storage: SQLiteStorage, tmp_path: Path) -> None:
    other = await opened(str(tmp_path / "edda.db"))
    assert await other.change_token() != await storage.change_token()
    await other.close()


async def test_a_closed_storage_cannot_be_queried(tmp_path: Path) -> None:
    storage = await opened(str(tmp_path / "edda.db"))
    await storage.search(RunQuery())
    await storage.close()
    with pytest.raises(StorageUnavailableError):
        await storage.search(RunQuery())
