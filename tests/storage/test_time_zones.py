"""Leases and due times are right even if the sessions of two processes have different time zones."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from edda.core.model import MICROSECONDS
from edda.storage.ports import Storage
from tests import databases
from tests.conftest import OnMySQL, OnPostgres, OnServer, need

from .records import HOUR, LAPSED, WORKFLOW, start
from .worker import Worker

NEW_YORK, KATHMANDU = "-05:00", "+05:45"


def _zoned(kind: str) -> OnServer:
    if kind == "postgres":
        return OnPostgres(need(databases.postgres(), "PostgreSQL", "EDDA_TEST_POSTGRES_URL"), fresh=True)
    # The zone is a setting of the whole server there, so it is changed only on a server of the tests.
    return OnMySQL(need(databases.own_mysql(), "MariaDB or MySQL of our own", "a PATH with mariadbd"), fresh=True)


def _move_to(database: OnServer, zone: str) -> None:
    """Sessions opened from now on have this zone."""
    if isinstance(database, OnPostgres):
        name = database.url.rpartition("/")[2]
        database.execute(f"ALTER DATABASE {name} SET timezone = '{zone}'")
    else:
        database.execute(f"SET GLOBAL time_zone = '{zone}'")


@pytest.fixture(params=["postgres", "mysql"])
async def storages(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Storage, Storage]]:
    """Two processes, eleven hours apart."""
    database = _zoned(request.param)
    storages = database.storage(), database.storage()
    for storage, zone in zip(storages, (NEW_YORK, KATHMANDU), strict=True):
        _move_to(database, zone)
        await storage.open()
        await storage.migrate()
    yield storages
    for storage in storages:
        await storage.close()
    database.drop()


async def test_both_read_the_same_time(storages: tuple[Storage, Storage]) -> None:
    for storage in storages:
        assert abs(await storage.now() - time.time() * MICROSECONDS) < HOUR / 2


async def test_a_lease_given_in_one_zone_holds_in_the_other(storages: tuple[Storage, Storage]) -> None:
    for here, there in (storages, storages[::-1]):
        worker = Worker(here, f"worker-{id(here)}")
        await worker.register(HOUR)
        assert await there.take_over(Worker(there, "taker").id) is None
        assert await worker.beat(HOUR) is not None
        assert await there.take_over(Worker(there, "taker").id) is None


async def test_a_lease_lapsed_in_one_zone_is_lapsed_in_the_other(storages: tuple[Storage, Storage]) -> None:
    for here, there in (storages, storages[::-1]):
        worker = Worker(here, f"worker-{id(here)}")
        await worker.register(LAPSED // 2)
        taken = await there.take_over(Worker(there, "taker").id)
        assert taken is not None
        assert taken.worker == worker.id


async def test_a_run_is_due_at_the_same_time_in_both(storages: tuple[Storage, Storage]) -> None:
    for here, there in (storages, storages[::-1]):
        now = await here.now()
        name = str(id(here))
        await here.start([start(f"due-{name}", ready_at=now), start(f"soon-{name}", ready_at=now + HOUR)])
        worker = Worker(there, f"worker-{name}")
        await worker.register()
        assert [run.run_id for run in (await worker.claim()).runs] == [f"due-{name}"]
        due = await there.next_due([WORKFLOW])
        assert due is not None
        assert HOUR / 2 < due <= HOUR
