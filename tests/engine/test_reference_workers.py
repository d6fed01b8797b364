"""What goes wrong in the reference with workers and leases, row by row, and holds here.

Rows that need several processes or a kill are in test_reference_kills.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from edda import (
    EddaApp,
    RunStatus,
    WorkflowContext,
    activity,
    sleep,
    workflow,
)
from edda.errors import AppError
from tests.conftest import Database, MakeDatabase, OnServer

from .conditions import until
from .conftest import MORTAL, MakeApp


@pytest.fixture
def west_of_utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("west_of_utc")
async def test_a_fresh_lease_is_not_taken_over_whatever_the_time_zone(
    make_database: MakeDatabase, database: Database, make_app: MakeApp
) -> None:
    """W2: a session west of UTC must not make a lease of this second look hours old."""
    place = make_database("postgres", fresh=True) if database.kind == "postgres" else database
    if isinstance(place, OnServer) and place.kind == "postgres":
        place.execute(f"ALTER DATABASE {place.url.rpartition('/')[2]} SET timezone TO 'America/New_York'")
    begun: list[str] = []
    finish = asyncio.Event()

    @activity
    async def work(ctx: WorkflowContext) -> int:
        begun.append(ctx.instance_id)
        await finish.wait()
        return len(begun)

    @workflow
    async def job(ctx: WorkflowContext) -> int:
        return await work(ctx)

    app, other = await make_app(on=place), await make_app(on=place)
    run_id = await app.start(job)
    await until(lambda: bool(begun), "the activity has begun")
    assert other.engine.worker is not None
    assert await other.engine.storage.take_over(other.engine.worker.info.id) is None
    assert await other.engine.storage.free_orphans() == 0
    finish.set()
    assert await app.handle(run_id).result(timeout=20) == 1


async def test_three_hundred_concurrent_starts_give_three_hundred_runs_with_one_effect_each(app: EddaApp) -> None:
    """W6a: no lock race, no failed start, no activity that ran twice."""
    effects: list[int] = []

    @activity
    async def charge(ctx: WorkflowContext, number: int) -> int:
        effects.append(number)
        return number

    @workflow
    async def order(ctx: WorkflowContext, number: int) -> int:
        return await charge(ctx, number)

    gate = asyncio.Semaphore(30)

    async def one(number: int) -> int:
        async with gate:
            run_id = await app.start(order, number)
        result: int = await app.handle(run_id).result(timeout=60)
        return result

    assert await asyncio.gather(*map(one, range(300))) == list(range(300))
    assert sorted(effects) == list(range(300))


async def test_starts_at_once_on_a_database_that_was_never_used_all_succeed(
    database: Database, make_database: MakeDatabase, make_app: MakeApp
) -> None:
    """W8: two services deployed at the same moment, and work for both from the first millisecond on."""
    fresh = make_database(database.kind, fresh=True)

    @workflow
    async def order(ctx: WorkflowContext, number: int) -> int:
        return number

    async def deploy() -> list[int]:
        app = await make_app(on=fresh)
        return await asyncio.gather(*(app.run(order, number) for number in range(25)))

    assert [*await asyncio.gather(deploy(), deploy())] == [list(range(25))] * 2


async def test_timers_fire_although_another_service_without_the_code_came_first(make_app: MakeApp) -> None:
    """W23: there is no leader that could lack the workflow."""

    @workflow
    async def nap(ctx: WorkflowContext) -> str:
        await sleep(ctx, 0.3)
        return "rested"

    @workflow
    async def unrelated(ctx: WorkflowContext) -> None: ...

    await make_app(service_name="billing", workflows=[unrelated])
    owner = await make_app(service_name="shop", workflows=[nap])
    begun = time.monotonic()
    assert await owner.run(nap) == "rested"
    assert time.monotonic() - begun < 10


async def test_runs_of_unknown_workflows_do_not_stand_in_the_way(make_app: MakeApp) -> None:
    """W24: ready runs whose code is elsewhere block nobody, and stay for their own worker."""

    @workflow
    async def foreign(ctx: WorkflowContext) -> str:
        return "at home"

    @workflow
    async def ours(ctx: WorkflowContext) -> str:
        return "ours"

    client = await make_app(worker=False)
    waiting = [await client.start(foreign) for _ in range(20)]
    mine = await client.start(ours)
    await make_app(workflows=[ours])
    assert await client.handle(mine).result(timeout=20) == "ours"
    assert {await client.handle(run_id).status() for run_id in waiting} == {RunStatus.RUNNING}
    await make_app(workflows=[foreign])
    assert {await client.handle(run_id).result(timeout=20) for run_id in waiting} == {"at home"}


async def test_runs_that_are_due_together_go_on_together(app: EddaApp) -> None:
    """W25: twelve resumed activities run side by side: each waits until all of them are there."""
    all_there = asyncio.Barrier(12)

    @activity
    async def meet(ctx: WorkflowContext) -> str:
        async with asyncio.timeout(20):
            await all_there.wait()
        return "met"

    @workflow
    async def meeting(ctx: WorkflowContext) -> str:
        await sleep(ctx, 0.1)
        return await meet(ctx)

    assert await asyncio.gather(*(app.run(meeting) for _ in range(12))) == ["met"] * 12


async def test_an_activity_longer_than_the_lease_is_not_started_again(make_app: MakeApp) -> None:
    """W27: the heartbeat keeps the lease for as long as the work takes."""
    begun: list[int] = []
    finish = asyncio.Event()

    @activity
    async def long_work(ctx: WorkflowContext) -> int:
        begun.append(ctx.attempt)
        await finish.wait()
        return len(begun)

    @workflow
    async def job(ctx: WorkflowContext) -> int:
        return await long_work(ctx)

    app = await make_app(settings=MORTAL)
    await make_app(settings=MORTAL)
    run_id = await app.start(job)
    worker = app.engine.worker
    assert worker is not None
    begin = time.monotonic()
    await until(lambda: worker.heartbeat.sent_at > begin + 1.2 * MORTAL.lease, "the first lease is over")
    finish.set()
    assert await app.handle(run_id).result(timeout=20) == 1
    assert begun == [1]


async def test_a_second_app_does_not_take_over_the_starts_of_the_first(
    make_app: MakeApp, other_database: Database
) -> None:
    """W36: each app keeps its own database, and a plain start() that could mean both is an error."""

    @workflow
    async def order(ctx: WorkflowContext, where: str) -> str:
        return where

    first, second = await make_app(), await make_app(on=other_database)
    assert await first.run(order, "first") == "first"
    assert await second.run(order, "second") == "second"
    for app, where in ((first, "first"), (second, "second")):
        assert [i["input_data"] for i in (await app.find_instances())["instances"]] == [{"where": where}]
    with pytest.raises(AppError, match="2 EddaApps"):
        await order.start("either")
