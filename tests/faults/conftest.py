"""Places, fleets and clients for the tests with real worker processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from edda import EddaApp
from faults.target_databases import KINDS, Place, fresh
from faults.worker import Orders
from faults.worker_fleet import Fleet
from faults.workload import LEASE, WORKFLOWS

PATIENCE = 60.0

MakeFleet = Callable[..., Fleet]


async def until(fact: Callable[[], bool | Awaitable[bool]], what: str, within: float = PATIENCE) -> None:
    give_up = time.monotonic() + within
    while True:
        found = fact()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < give_up, f"not within {within} s: {what}"
        await asyncio.sleep(0.01)


def client_of(place: Place) -> EddaApp:
    """Starts and waits, but works on nothing itself."""
    return EddaApp("client", place.url, workflows=WORKFLOWS, worker=False, auto_migrate=False)


@pytest.fixture(params=KINDS)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    with fresh(request.param, tmp_path) as place:
        await place.prepare()
        yield place


@pytest.fixture
async def client(place: Place) -> AsyncIterator[EddaApp]:
    async with client_of(place) as app:
        yield app


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[MakeFleet]:
    made: list[Fleet] = []

    def make(place: Place, *, lease: float | None = LEASE) -> Fleet:
        made.append(Fleet(Orders(place.url, str(tmp_path), f"{place.kind}-{len(made)}-", lease=lease)))
        return made[-1]

    yield make
    for fleet in made:
        fleet.wake(all=True)
        fleet.close()
