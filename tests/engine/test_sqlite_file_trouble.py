"""An SQLite file that is removed, replaced or on a full disk: calls fail with its name, and the log says it once."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from edda import EddaApp, WorkflowContext, activity, workflow
from edda.engine.settings import Settings
from edda.errors import StorageUnavailableError
from edda.storage.sqlite import faults, journal
from edda.storage.sqlite.journal import SlowWriteLog

from .conditions import until

pytestmark = pytest.mark.databases("sqlite")

FILE = "edda.storage.sqlite.connection"
HASTY = Settings(call_timeout=1.0, shutdown_grace=0.2, takeover_grace=0.0)
SLOW = "edda.storage.sqlite.journal"


@activity
async def charge(ctx: WorkflowContext) -> int:
    return 1


@workflow(name="file_order")
async def order(ctx: WorkflowContext) -> int:
    return await charge(ctx)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[tuple[EddaApp, Path]]:
    path = tmp_path / "shop.db"
    async with EddaApp("shop", f"sqlite:///{path}", workflows=[order], settings=HASTY) as app:
        assert await app.run(order) == 1
        yield app, path


async def until_refused(app: EddaApp) -> str:
    """What a start says, once the file has been looked at again."""
    async with asyncio.timeout(30):
        while True:
            try:
                await app.start(order)
            except StorageUnavailableError as error:
                return str(error)
            await asyncio.sleep(0.05)


def critical(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == FILE and r.levelno == logging.CRITICAL]


async def test_a_file_that_is_removed_fails_calls_and_is_not_made_anew(
    shop: tuple[EddaApp, Path], caplog: pytest.LogCaptureFixture
) -> None:
    app, path = shop
    path.unlink()
    said = await until_refused(app)
    assert str(path) in said
    assert "was removed while this process uses it" in said
    assert "was removed" in await until_refused(app)
    assert not path.exists()
    assert len(critical(caplog)) == 1


async def test_a_client_without_a_worker_notices_it_too(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    async with EddaApp("shop", f"sqlite:///{path}", workflows=[order], worker=False, settings=HASTY) as app:
        await app.start(order)
        path.unlink()
        assert str(path) in await until_refused(app)


async def test_a_file_that_comes_back_is_used_again(
    shop: tuple[EddaApp, Path], caplog: pytest.LogCaptureFixture
) -> None:
    app, path = shop
    aside = path.with_suffix(".aside")
    path.rename(aside)
    assert "was removed" in await until_refused(app)
    aside.rename(path)
    assert await asyncio.wait_for(app.run(order), 30) == 1
    assert len(critical(caplog)) == 1


async def test_a_file_that_is_replaced_is_not_written_to(shop: tuple[EddaApp, Path]) -> None:
    app, path = shop
    other = path.with_suffix(".other")
    sqlite3.connect(other).close()
    other.touch()
    os.replace(other, path)
    assert "was replaced by another file" in await until_refused(app)
    assert path.stat().st_size == 0


# A full disk


class Room(NamedTuple):
    f_bavail: int
    f_frsize: int = 4096


@pytest.mark.parametrize(
    ("code", "free", "said"),
    [
        (sqlite3.SQLITE_FULL, 0, "/data/shop.db: trouble; the disk is full, 0 bytes are free"),
        (sqlite3.SQLITE_IOERR_WRITE, 1, "/data/shop.db: trouble; the disk is full, 4,096 bytes are free"),
        (sqlite3.SQLITE_IOERR_SHMSIZE, 0, "/data/shop.db: trouble; the disk is full"),
        (sqlite3.SQLITE_IOERR_READ, 1_000_000, "/data/shop.db: trouble"),
    ],
)
def test_an_error_of_the_disk_names_the_file_and_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, code: int, free: int, said: str
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: Room(free))
    error = sqlite3.OperationalError("trouble")
    vars(error)["sqlite_errorcode"] = code
    meaning = faults.translate(error, "/data/shop.db")
    assert isinstance(meaning, StorageUnavailableError)
    assert str(meaning).startswith(said)
    assert ("full" in str(meaning)) is ("full" in said)


async def test_a_result_in_vain_says_that_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox_count = asyncio.Event()

    @activity
    async def deliver(ctx: WorkflowContext) -> int:
        await inbox_count.wait()
        return 1

    @workflow(name="delivery")
    async def delivery(ctx: WorkflowContext) -> int:
        return await deliver(ctx)

    async def full(*args: object) -> None:
        raise StorageUnavailableError("shop.db: database or disk is full")

    url = f"sqlite:///{tmp_path / 'shop.db'}"
    async with EddaApp("shop", url, workflows=[delivery], settings=HASTY) as app:
        run_id = await app.start(delivery)
        monkeypatch.setattr(app.engine.storage, "write", full)
        inbox_count.set()
        with pytest.raises(TimeoutError, match=r"cannot write to the database.*shop.db: database or disk is full"):
            await app.handle(run_id).result(timeout=1)
        monkeypatch.undo()
        assert await app.handle(run_id).result(timeout=30) == 1


# A slow write


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == SLOW]


def block() -> None:
    time.sleep(1.0)


async def test_a_loop_that_was_blocked_is_not_called_a_slow_write(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SLOW_WRITE_SECONDS", 0.05)
    loop, written = asyncio.get_running_loop(), asyncio.Event()
    writer = threading.Timer(0.1, lambda: loop.call_soon_threadsafe(written.set))
    with SlowWriteLog("shop.db", lambda: ""):
        writer.start()
        block()  # as a step does, while the writer's thread commits
        await written.wait()
    assert waits(caplog) == []


async def test_a_write_that_is_slow_is_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SLOW_WRITE_SECONDS", 0.05)
    with SlowWriteLog("shop.db", lambda: ""):
        await until(lambda: bool(waits(caplog)), "the log says that it is slow")
    assert "nothing has been written to shop.db" in waits(caplog)[0]
