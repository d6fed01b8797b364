"""Virtual time: a month passes in milliseconds, and every timer fires at its own moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from edda import RunStatus, WorkflowContext, activity, sleep, wait_until, workflow
from edda.errors import WorkflowTimeoutError
from edda.testing import VirtualApp

DAY = 86_400


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/virtual.db"


@pytest.fixture
async def still(url: str) -> AsyncIterator[VirtualApp]:
    """Its time passes only when it is told to."""
    async with VirtualApp(db_url=url, auto_skip=False) as app:
        yield app


async def test_thirty_days_pass_in_no_time(url: str) -> None:
    @workflow
    async def month(ctx: WorkflowContext) -> float:
        begun = ctx.now()
        for _ in range(30):
            await sleep(ctx, DAY)
        return (ctx.now() - begun).total_seconds()

    begun = time.monotonic()
    async with VirtualApp(db_url=url) as app:
        assert await app.run(month) == pytest.approx(30 * DAY, abs=1)
    assert time.monotonic() - begun < 20


async def test_timers_of_many_runs_fire_in_their_order(url: str) -> None:
    fired: list[int] = []

    @activity
    async def note(ctx: WorkflowContext, hours: int) -> None:
        fired.append(hours)

    @workflow
    async def alarm(ctx: WorkflowContext, hours: int) -> None:
        await sleep(ctx, timedelta(hours=hours))
        await note(ctx, hours)

    async with VirtualApp(db_url=url) as app:
        await asyncio.gather(*(app.run(alarm, hours) for hours in (5, 1, 4, 2, 3)))
    assert fired == [1, 2, 3, 4, 5]


async def test_time_stands_still_until_it_is_advanced(still: VirtualApp) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> str:
        await sleep(ctx, 3600)
        return "rested"

    before = still.now()
    run_id = await still.start(nap)
    await still.advance(3599)
    assert await still.handle(run_id).status() is RunStatus.WAITING_FOR_TIMER
    await still.advance(timedelta(seconds=1))
    assert await still.handle(run_id).result(timeout=20) == "rested"
    assert still.now() - before == timedelta(hours=1)


async def test_advancing_over_many_timers_fires_each_at_its_own_moment(still: VirtualApp) -> None:
    moments: list[float] = []
    begun = still.now()

    @activity
    async def note(ctx: WorkflowContext) -> None:
        moments.append((ctx.now() - begun).total_seconds())

    @workflow
    async def ticks(ctx: WorkflowContext) -> None:
        for _ in range(4):
            await sleep(ctx, 600)
            await note(ctx)

    run_id = await still.start(ticks)
    await still.advance(3600)
    await still.handle(run_id).result(timeout=20)
    assert moments == [600, 1200, 1800, 2400]


async def test_the_clock_can_start_anywhere_and_wait_until_a_date(url: str) -> None:
    leap_day = datetime(2028, 2, 29, 12, tzinfo=UTC)

    @workflow
    async def wait(ctx: WorkflowContext) -> datetime:
        await wait_until(ctx, leap_day)
        return ctx.now()

    async with VirtualApp(db_url=url, start=datetime(2028, 2, 1, tzinfo=UTC)) as app:
        assert await app.run(wait) == leap_day
        assert app.now() == leap_day


async def test_a_run_times_out_in_virtual_time(url: str) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> None:
        await sleep(ctx, timedelta(days=365))

    async with VirtualApp(db_url=url) as app:
        with pytest.raises(WorkflowTimeoutError):
            await app.run(nap.options(timeout=timedelta(days=7)))


async def test_a_delayed_start_waits_in_virtual_time(still: VirtualApp) -> None:
    @workflow
    async def late(ctx: WorkflowContext) -> str:
        return "here"

    run_id = await still.start(late.options(delay=3600))
    await still.advance(3500)
    assert await still.handle(run_id).status() is RunStatus.RUNNING
    await still.advance(100)
    assert await still.handle(run_id).result(timeout=20) == "here"


async def test_virtual_runs_survive_a_crash_of_their_app(tmp_path: Path) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> str:
        await sleep(ctx, 30 * DAY)
        return "rested"

    url = f"sqlite:///{tmp_path}/virtual.db"
    first = VirtualApp(db_url=url, auto_skip=False)
    await first.initialize()
    run_id = await first.start(nap)
    await first.settle()
    first.kill()
    async with VirtualApp(db_url=url) as second:
        assert await second.handle(run_id).result(timeout=20) == "rested"


async def test_the_fixture_gives_an_app_in_virtual_time(edda_app: VirtualApp) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> str:
        await sleep(ctx, timedelta(days=30))
        return "rested"

    assert await edda_app.run(nap) == "rested"
    assert await nap.run() == "rested", "it is the only app, so a plain run means it"
