"""Steps that kill their process: the run is found and parked, and the runs beside it complete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from edda import EddaApp, RunStatus
from tests.conftest import Database

from .conditions import reason_of, until
from .conftest import MakeApp, url_of
from .processes import Process, program
from .programs.killer import (
    counted_killer,
    innocent,
    killer,
    noisy_killer,
    polled_counted_killer,
    polled_killer,
)

WORKFLOWS = [innocent, killer, noisy_killer, counted_killer, polled_killer, polled_counted_killer]


class Supervisor:
    """Starts the program again each time it dies."""

    def __init__(self, url: str) -> None:
        self.deaths = 0
        self._url = url
        self._process: Process | None = None

    async def run(self) -> None:
        while True:
            async with program("killer", self._url) as process:
                self._process = process
                await process.died()
                self.deaths += 1


@asynccontextmanager
async def supervised(database: Database) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(url_of(database))
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def client(shared_database: Database, make_app_on: MakeApp) -> EddaApp:
    """Starts and looks, and runs nothing."""
    return await make_app_on(on=shared_database, workflows=WORKFLOWS, worker=False)


async def start_innocents(app: EddaApp, count: int, seconds: float) -> list[str]:
    return [await app.start(innocent.options(id=f"innocent-{number}"), seconds) for number in range(count)]


async def until_ended(app: EddaApp, run_ids: list[str], within: float = 120.0) -> None:
    async def ended() -> bool:
        await asyncio.sleep(0.1)
        return all([(await app.client.read_run(run_id)).ended_at is not None for run_id in run_ids])

    await until(ended, f"{len(run_ids)} runs ended", within)


async def until_parked(app: EddaApp, run_id: str, within: float = 120.0) -> None:
    async def parked() -> bool:
        await asyncio.sleep(0.1)
        return await app.handle(run_id).status() is RunStatus.PARKED

    await until(parked, f"{run_id} is parked", within)


@pytest.mark.timed
async def test_a_step_that_kills_its_process_is_parked_and_the_runs_beside_it_complete(
    client: EddaApp, shared_database: Database
) -> None:
    await client.start(killer.options(id="killer"))
    innocents = await start_innocents(client, 20, 0.5)
    async with supervised(shared_database) as supervisor:
        await until_parked(client, "killer")
        await until_ended(client, innocents)
        deaths = supervisor.deaths
        assert deaths in (5, 6), "two with all, one in a group, perhaps one beside runs of its group, two alone"
        reason = await reason_of(client, "killer")
        assert reason.startswith(f"ProcessDiedError: {deaths} processes died")
        assert "die:1" in reason
        assert (await client.client.read_run("killer")).deaths == deaths
        for run_id in innocents:
            assert await client.handle(run_id).status() is RunStatus.COMPLETED
        await client.client.resume_run("killer")
        await until(lambda: supervisor.deaths > deaths, "it is tried again after it was resumed by hand", 60)


@pytest.mark.timed
async def test_timers_beside_a_step_that_kills_its_process_are_no_progress(
    client: EddaApp, shared_database: Database
) -> None:
    await client.start(noisy_killer.options(id="killer"))
    async with supervised(shared_database) as supervisor:
        await until_parked(client, "killer")
        assert "die_soon:1" in await reason_of(client, "killer")
        assert supervisor.deaths == 5


@pytest.mark.timed
async def test_steps_of_another_branch_that_end_beside_a_step_that_kills_are_no_progress(
    client: EddaApp, shared_database: Database
) -> None:
    await client.start(polled_killer.options(id="killer"))
    innocents = await start_innocents(client, 5, 0.5)
    async with supervised(shared_database) as supervisor:
        await until_parked(client, "killer")
        await until_ended(client, innocents)
        assert "die_soon:1 (" in await reason_of(client, "killer")
        assert "poll:" not in await reason_of(client, "killer"), "these ended in between"
        assert supervisor.deaths in (5, 6)
        for run_id in innocents:
            assert await client.handle(run_id).status() is RunStatus.COMPLETED


@pytest.mark.timed
async def test_deaths_beside_steps_of_another_branch_count_as_attempts(
    client: EddaApp, shared_database: Database
) -> None:
    await client.start(polled_counted_killer.options(id="killer"))
    async with supervised(shared_database) as supervisor:
        await until_ended(client, ["killer"])
        outcome = await client.handle("killer").result()
        assert outcome.startswith("RetryExhaustedError: die_soon_twice:1 failed 2 times")
        assert supervisor.deaths == 4, "two that anything may have caused, two alone"


@pytest.mark.timed
async def test_deaths_count_as_attempts_if_the_retry_policy_says_so(client: EddaApp, shared_database: Database) -> None:
    await client.start(counted_killer.options(id="killer"))
    innocents = await start_innocents(client, 3, 0.3)
    async with supervised(shared_database) as supervisor:
        await until_ended(client, ["killer", *innocents])
        outcome = await client.handle("killer").result()
        assert outcome.startswith("RetryExhaustedError: die_twice:1 failed 2 times")
        assert supervisor.deaths in (4, 5)


@pytest.mark.timed
async def test_processes_that_are_asked_to_stop_are_no_deaths(client: EddaApp, shared_database: Database) -> None:
    """Ten deploys while one long step is in flight."""
    await client.start(innocent.options(id="long"), 600.0)

    async def is_owned() -> bool:
        return (await client.client.read_run("long")).owner is not None

    for _ in range(10 if shared_database.kind == "sqlite" else 3):
        async with program("killer", url_of(shared_database)) as process:
            await until(is_owned, "it is claimed")
            process.stop()
            await process.ended()
    record = await client.client.read_run("long")
    assert (record.status, record.deaths) == (RunStatus.RUNNING, 0)
