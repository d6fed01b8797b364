"""Rows of the reference that need several processes, or one that is killed in the middle of its work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from edda import EddaApp, RunStatus
from edda.core.model import EntryKind
from tests.conftest import Database, MakeDatabase

from .conftest import MORTAL, MakeApp, url_of
from .processes import Process, program
from .programs import shop
from .programs.ledger import recorded

LEASE = MORTAL.lease


@asynccontextmanager
async def doomed_worker(database: Database) -> AsyncIterator[Process]:
    async with program("serve", url_of(database), LEASE, hang=True) as process:
        await process.hear("serving")
        yield process


async def survivor(make_app_on: MakeApp, database: Database) -> EddaApp:
    return await make_app_on(on=database, workflows=shop.WORKFLOWS, settings=MORTAL)


async def client(make_app_on: MakeApp, database: Database) -> EddaApp:
    return await make_app_on(on=database, worker=False)


async def test_a_kill_in_the_activity_after_a_timer_does_not_leave_the_run_waiting(
    shared_database: Database, make_app_on: MakeApp, tmp_path: Path
) -> None:
    """W1: the run is `running` while its code runs, so another worker takes it over and ends it."""
    ledger = tmp_path / "ledger"
    caller = await client(make_app_on, shared_database)
    async with doomed_worker(shared_database) as worker:
        run_id = await caller.start(shop.rest_and_deliver, str(ledger), 0.2)
        await worker.hear("working")
        assert await caller.handle(run_id).status() is RunStatus.RUNNING
        await worker.kill()
    await survivor(make_app_on, shared_database)
    assert await caller.handle(run_id).result(timeout=30) == "parcel done"
    kinds = [entry.kind for entry in await caller.handle(run_id).history()]
    assert kinds == [EntryKind.TIMER, EntryKind.STEP]
    assert len(recorded(ledger)) == 2, "once in each process"


async def test_two_processes_on_one_database_share_the_work_and_repeat_nothing(
    shared_database: Database, make_app_on: MakeApp, tmp_path: Path
) -> None:
    """W6b: two hundred runs, two processes, each activity once; on a SQLite file too."""
    ledger = tmp_path / "ledger"
    caller = await client(make_app_on, shared_database)
    async with AsyncExitStack() as workers:
        both = [program("serve", url_of(shared_database), 15.0) for _ in range(2)]
        for process in await asyncio.gather(*map(workers.enter_async_context, both)):
            await process.hear("serving")
        run_ids = await asyncio.gather(
            *(caller.start(shop.deliver, str(ledger), f"item{number}") for number in range(200))
        )
        for run_id in run_ids:
            await caller.handle(run_id).result(timeout=60)
    items = [line.split()[0] for line in recorded(ledger)]
    assert sorted(items) == sorted(f"item{number}" for number in range(200))


async def test_work_goes_on_soon_after_a_kill(shared_database: Database, make_app_on: MakeApp, tmp_path: Path) -> None:
    """W26: a lease and a sweep after kill -9 the run is finished elsewhere, not minutes later."""
    ledger = tmp_path / "ledger"
    caller = await client(make_app_on, shared_database)
    async with doomed_worker(shared_database) as worker:
        run_id = await caller.start(shop.deliver, str(ledger), "letter")
        await worker.hear("working")
        await survivor(make_app_on, shared_database)
        await worker.kill()
        killed = time.monotonic()
        assert await caller.handle(run_id).result(timeout=30) == "letter done"
    assert time.monotonic() - killed < LEASE + 6


async def test_a_timer_fires_on_time_after_a_graceful_restart(make_app: MakeApp, tmp_path: Path) -> None:
    """W26: what waited when the service was restarted goes on when it is due, at once."""
    first = await make_app(workflows=shop.WORKFLOWS)
    run_id = await first.start(shop.rest_and_deliver, str(tmp_path / "ledger"), 0.6)
    await first.shutdown()
    second = await make_app(workflows=shop.WORKFLOWS)
    assert await second.handle(run_id).result(timeout=30) == "parcel done"
    record = await second.client.read_run(run_id)
    assert record.ended_at is not None
    assert 0.6 <= (record.ended_at - record.created_at) / 1e6 < 6


async def test_two_processes_that_start_at_once_on_a_new_database_both_live(
    shared_database: Database, make_database: MakeDatabase, make_app_on: MakeApp, tmp_path: Path
) -> None:
    """W37: the second migrator waits for the first instead of dying of it."""
    fresh = make_database(shared_database.kind, fresh=True)
    async with AsyncExitStack() as workers:
        several = [program("serve", url_of(fresh), 15.0) for _ in range(3)]
        for process in await asyncio.gather(*map(workers.enter_async_context, several)):
            await process.hear("serving")
        caller = await client(make_app_on, fresh)
        run_id = await caller.start(shop.deliver, str(tmp_path / "ledger"), "letter")
        assert await caller.handle(run_id).result(timeout=30) == "letter done"


async def test_a_process_that_died_on_this_host_is_not_waited_for(
    shared_database: Database, make_app_on: MakeApp, tmp_path: Path
) -> None:
    """Its lease would hold for ten minutes more; its process number is gone."""
    ledger = tmp_path / "ledger"
    caller = await client(make_app_on, shared_database)
    async with program("serve", url_of(shared_database), 600.0, hang=True) as worker:
        await worker.hear("serving")
        run_id = await caller.start(shop.deliver, str(ledger), "letter")
        await worker.hear("working")
        await worker.kill()
    await survivor(make_app_on, shared_database)
    assert await caller.handle(run_id).result(timeout=15) == "letter done"
