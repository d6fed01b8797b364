"""Workers that stand still for a while: stopped by a signal, or blocked by a step. They come back by themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from edda import EddaApp, RunStatus
from edda.core.model import EntryKind
from tests.conftest import Database, InFile

from .conditions import until
from .conftest import url_of
from .processes import Process, program
from .programs import stalls
from .programs.ledger import recorded

pytestmark = pytest.mark.parametrize("database", ["sqlite", "postgres", "mysql"], indirect=True)


class Fleet:
    """Workers in processes of their own, and an app that runs nothing to look at what they do."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.url = url_of(database)
        self.ledger = folder / "ledger"
        self._folder = folder
        self._count = 0
        self.app = EddaApp("looker", self.url, worker=False, workflows=stalls.WORKFLOWS, settings=stalls.settings())

    @asynccontextmanager
    async def worker(self, stall_limit: float = 300.0) -> AsyncIterator[tuple[Process, Path]]:
        self._count += 1
        log = self._folder / f"log{self._count}"
        async with program("stalls", self.url, stall_limit, log, self.ledger) as process:
            await process.hear("serving")
            yield process, log

    def free(self) -> None:
        """Let the blocking steps go on."""
        Path(f"{self.ledger}.free").touch()

    async def finish(self, run_id: str) -> None:
        assert await self.app.handle(run_id).status() in RunStatus
        await self.app.handle(run_id).result(timeout=30)
        entries = await self.app.handle(run_id).history()
        recorded_steps = [entry.step for entry in entries if entry.kind is EntryKind.STEP]
        assert len(recorded_steps) == len(set(recorded_steps))

    async def finish_new(self) -> None:
        """A run that is started now is done by those who work now."""
        await self.finish(await self.app.start(stalls.steps, 3, 0.0))


@pytest.fixture
async def fleet(database: Database, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(database, tmp_path)
    async with fleet.app:
        yield fleet


async def stop_outside_transaction(process: Process, database: Database) -> None:
    """A process that is stopped in a transaction on a SQLite file keeps all others from writing until it goes on."""
    while True:
        os.kill(process.pid, signal.SIGSTOP)
        if not isinstance(database, InFile) or await asyncio.to_thread(_is_writable, database.path):
            return
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.sleep(0.01)


def _is_writable(path: Path) -> bool:
    with closing(sqlite3.connect(path, timeout=2.0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
        return True


async def pause(process: Process, seconds: float) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(process.pid, signal.SIGCONT)


async def has_line(log: Path, text: str) -> None:
    await until(lambda: text in log.read_text(), f"the log has {text!r}")


@pytest.mark.timed
async def test_a_process_that_was_stopped_for_less_than_its_lease_goes_on(fleet: Fleet) -> None:
    async with fleet.worker() as (process, _):
        runs = [await fleet.app.start(stalls.steps, 4, 0.2) for _ in range(3)]
        await pause(process, 0.7)
        for run in runs:
            await fleet.finish(run)
        await fleet.finish_new()


@pytest.mark.timed
async def test_a_process_that_was_stopped_with_no_other_worker_goes_on(fleet: Fleet) -> None:
    # Longer than its stall limit, too: the time of a pause is not the time of a block.
    async with fleet.worker(stall_limit=1.0) as (process, log):
        runs = [await fleet.app.start(stalls.steps, 4, 0.2) for _ in range(3)]
        await pause(process, 4.0)
        for run in runs:
            await fleet.finish(run)
        await fleet.finish_new()
        await has_line(log, "this process was paused for")
        assert "event loop has been blocked" not in log.read_text()


@pytest.mark.timed
async def test_a_process_that_was_stopped_and_taken_over_comes_back_as_a_new_worker(
    fleet: Fleet, database: Database
) -> None:
    async with fleet.worker(stall_limit=1.0) as (stopped, log):
        runs = [await fleet.app.start(stalls.steps, 6, 0.2) for _ in range(3)]
        await until(lambda: len(recorded(fleet.ledger)) >= 3, "the runs have begun")
        async with fleet.worker() as (_, other_log):
            await stop_outside_transaction(stopped, database)
            try:
                await has_line(other_log, "took over")
                for run in runs:
                    await fleet.finish(run)
            finally:
                os.kill(stopped.pid, signal.SIGCONT)
            await has_line(log, "a new worker begins")
        await fleet.finish_new()  # by the one that was stopped: the other one is gone


@pytest.mark.timed
async def test_a_step_that_blocks_longer_than_the_lease_keeps_its_run(fleet: Fleet) -> None:
    async with fleet.worker(), fleet.worker():
        run = await fleet.app.start(stalls.blocking, 4.0)
        await fleet.finish(run)
        await fleet.finish_new()
        lines = recorded(fleet.ledger)
        assert [line for line in lines if "blocks" in line] == [f"{run} blocks"]


@pytest.mark.timed
async def test_the_other_runs_of_a_blocked_worker_go_on_elsewhere_and_its_own_is_not_begun_twice(fleet: Fleet) -> None:
    async with fleet.worker(stall_limit=1.0) as (_, log):
        others = [await fleet.app.start(stalls.steps, 3, 0.4) for _ in range(3)]
        blocked = await fleet.app.start(stalls.blocking, 60.0)
        await until(lambda: f"{blocked} blocks" in recorded(fleet.ledger), "the loop is blocked")
        async with fleet.worker(stall_limit=1.0):
            for run in others:
                await fleet.finish(run)
            await fleet.finish_new()
        assert f"{blocked} done" not in recorded(fleet.ledger)
        fleet.free()
        await fleet.finish(blocked)
        await fleet.finish_new()
        await has_line(log, "event loop is free again after")
        text = log.read_text()
        assert "other workers get the other runs" in text
        assert f"step block:1 of run {blocked} (blocking)" in text
        assert [line for line in recorded(fleet.ledger) if line == f"{blocked} blocks"] == [f"{blocked} blocks"]


@pytest.mark.timed
async def test_a_blocked_loop_is_named_at_the_first_second_and_not_in_a_flood(
    fleet: Fleet,
) -> None:
    async with fleet.worker() as (_, log):
        run = await fleet.app.start(stalls.blocking_code, 6.0)
        await has_line(log, "event loop has been blocked for")
        assert await fleet.app.handle(run).status() is RunStatus.RUNNING
        await fleet.finish(run)
        await has_line(log, "event loop is free again after")
        warnings = [line for line in log.read_text().splitlines() if "has been blocked" in line]
        assert 1 <= len(warnings) <= 2
        assert f"the workflow code of run {run} (blocking_code)" in warnings[0]
        assert "stalls.py" in warnings[0]
        assert "in hold_up" in warnings[0]
