"""The life of apps: starting, draining, several in one process, capacity, crashes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from edda import EddaApp, OutboxRelayer, RetryPolicy, RunStatus, WorkflowContext, activity, sleep, workflow
from edda.core.model import EntryKind
from edda.engine.settings import Settings
from edda.errors import AppError, EddaError, MigrationError
from edda.storage.shared.migrations import migrations
from tests.conftest import Database, MakeDatabase

from .conditions import until
from .conftest import MORTAL, RESTLESS, MakeApp, url_of


async def test_an_app_that_is_not_started_says_so(database: Database) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    app = EddaApp("shop", url_of(database), storage=database.storage())
    with pytest.raises(AppError, match="'shop' is not started"):
        await app.start(order)
    with pytest.raises(AppError, match="no EddaApp is started"):
        await order.start()
    with pytest.raises(AppError):
        app.handle("run")


async def test_starting_and_stopping_twice_is_the_same_as_once(make_app: MakeApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return "done"

    app = await make_app()
    await app.initialize()
    async with app:
        assert await app.run(order) == "done"
    await app.shutdown()
    await app.shutdown()
    with pytest.raises(AppError):
        await app.run(order)


async def test_an_app_can_be_started_again_after_it_was_stopped(make_app: MakeApp) -> None:
    @workflow
    async def order(ctx: WorkflowContext, number: int) -> int:
        return number

    app = await make_app()
    assert await app.run(order, 1) == 1
    await app.shutdown()
    await app.initialize()
    assert await app.run(order, 2) == 2


async def test_two_apps_need_to_be_told_apart_unless_one_of_them_runs_the_code(
    make_app: MakeApp, other_database: Database
) -> None:
    @workflow
    async def child(ctx: WorkflowContext) -> str:
        return "child"

    @activity
    async def start_child(ctx: WorkflowContext) -> str:
        return await child.start()

    @workflow
    async def parent(ctx: WorkflowContext) -> str:
        return await start_child(ctx)

    first, second = await make_app(), await make_app(on=other_database)
    with pytest.raises(AppError, match=r"app\.start"):
        await child.start()
    for app in (first, second):
        run_id = await app.run(parent)
        assert await app.handle(run_id).result(timeout=20) == "child"
        assert len((await app.find_instances(workflow_name="child"))["instances"]) == 1


async def test_a_shutdown_lets_a_step_finish_and_hands_the_run_on(make_app: MakeApp) -> None:
    effects: list[str] = []
    begun, finish = asyncio.Event(), asyncio.Event()

    @activity
    async def first_step(ctx: WorkflowContext) -> str:
        effects.append("first")
        begun.set()
        await finish.wait()
        return "first"

    @activity
    async def second_step(ctx: WorkflowContext) -> str:
        effects.append("second")
        return "second"

    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        return [await first_step(ctx), await second_step(ctx)]

    old = await make_app()
    run_id = await old.start(order)
    await begun.wait()
    stopping = asyncio.create_task(old.shutdown(grace=20))
    worker = old.engine.worker
    assert worker is not None
    await until(lambda: worker.draining, "the shutdown has begun")
    finish.set()
    await stopping
    new = await make_app()
    assert await new.handle(run_id).result(timeout=20) == ["first", "second"]
    assert effects == ["first", "second"]


async def test_a_step_that_outlives_the_grace_runs_again_elsewhere(make_app: MakeApp) -> None:
    begun: list[int] = []
    finish = asyncio.Event()

    @activity
    async def slow(ctx: WorkflowContext) -> int:
        begun.append(ctx.attempt)
        await finish.wait()
        return len(begun)

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        return await slow(ctx)

    old = await make_app()
    run_id = await old.start(order)
    await until(lambda: len(begun) == 1, "the step has begun")
    await old.shutdown(grace=0.05)
    finish.set()
    new = await make_app()
    assert await new.handle(run_id).result(timeout=20) == 2
    assert begun == [1, 1], "an interrupted attempt is not counted"


async def test_the_runs_of_a_crashed_app_go_on_in_another(make_app: MakeApp) -> None:
    effects: list[str] = []
    stuck = asyncio.Event()

    @activity
    async def work(ctx: WorkflowContext, what: str) -> str:
        effects.append(what)
        if what == "second" and effects.count("second") == 1:
            stuck.set()
            await asyncio.Event().wait()
        return what

    @workflow
    async def order(ctx: WorkflowContext) -> list[str]:
        return [await work(ctx, "first"), await work(ctx, "second")]

    doomed, survivor = await make_app(settings=MORTAL), await make_app(settings=MORTAL)
    run_id = await doomed.start(order)
    await stuck.wait()
    doomed.kill()
    assert await survivor.handle(run_id).result(timeout=30) == ["first", "second"]
    assert effects == ["first", "second", "second"], "what was recorded is not done again"


async def test_more_starts_than_there_is_room_for_all_finish(make_app: MakeApp) -> None:
    at_once = most = 0

    @activity
    async def work(ctx: WorkflowContext, number: int) -> int:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        return number

    @workflow
    async def order(ctx: WorkflowContext, number: int) -> int:
        await sleep(ctx, 0.01)
        return await work(ctx, number)

    app = await make_app(settings=Settings(capacity=4, linger=0.0, claim_batch=2))
    found = await asyncio.gather(*(app.run(order, number) for number in range(30)))
    assert found == list(range(30))
    assert most <= 4


async def test_two_apps_share_the_runs_of_one_database(make_app: MakeApp) -> None:
    effects: list[str] = []

    @activity
    async def work(ctx: WorkflowContext) -> None:
        effects.append(ctx.instance_id)
        await asyncio.sleep(0)

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await sleep(ctx, 0.05)
        await work(ctx)

    small = Settings(capacity=3, linger=0.0)
    apps = [await make_app(settings=small), await make_app(settings=small)]
    run_ids = await asyncio.gather(*(app.start(order) for app in apps for _ in range(15)))
    for run_id in run_ids:
        await apps[0].handle(run_id).result(timeout=30)
    assert sorted(effects) == sorted(run_ids), "each once"


async def test_a_run_costs_nothing_while_it_waits(make_app: MakeApp) -> None:
    @workflow
    async def nap(ctx: WorkflowContext) -> None:
        await sleep(ctx, 3600)

    app = await make_app()
    worker = app.engine.worker
    assert worker is not None
    tasks = len(asyncio.all_tasks())
    run_ids = [await app.start(nap) for _ in range(20)]
    await until(lambda: not worker.live, "no run is in memory")
    await until(lambda: len(asyncio.all_tasks()) <= tasks, "no run has a task")
    statuses = {await app.handle(run_id).status() for run_id in run_ids}
    assert statuses == {RunStatus.WAITING_FOR_TIMER}


async def test_a_lost_worker_is_replaced_and_the_app_goes_on(make_app: MakeApp) -> None:
    @activity
    async def work(ctx: WorkflowContext) -> str:
        return "done"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await work(ctx)

    app = await make_app(settings=MORTAL)
    lost = app.engine.worker
    assert lost is not None
    await app.engine.storage.remove_worker(lost.info.id)  # as a takeover does: its fence is gone
    assert await app.run(order) == "done"
    await until(lambda: app.engine.worker is not lost, "there is a new worker")
    assert await app.run(order) == "done"


async def test_a_stored_step_is_not_repeated_by_the_worker_that_took_over(make_app: MakeApp) -> None:
    effects: list[int] = []
    recorded = asyncio.Event()

    @activity
    async def pay(ctx: WorkflowContext) -> int:
        effects.append(1)
        return 5

    @activity
    async def wait(ctx: WorkflowContext) -> None:
        if not recorded.is_set():
            recorded.set()
            await asyncio.Event().wait()

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        paid = await pay(ctx)
        await wait(ctx)
        return paid

    doomed = await make_app(settings=MORTAL)
    run_id = await doomed.start(order)
    await recorded.wait()
    doomed.kill()
    app = await make_app(settings=MORTAL)
    assert await app.handle(run_id).result(timeout=30) == 5
    assert effects == [1]
    history = await app.handle(run_id).history()
    assert [entry.seq for entry in history if entry.kind is EntryKind.STEP] == [1, 2]


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
async def test_without_auto_migration_an_empty_database_is_refused(make_database: MakeDatabase, kind: str) -> None:
    empty = make_database(kind, fresh=True)
    app = EddaApp("shop", url_of(empty), auto_migrate=False, settings=RESTLESS)
    with pytest.raises(MigrationError, match=r"0001_initial.*edda migrate"):
        await app.initialize()
    assert await app.migrate() == tuple(migration.name for migration in migrations(kind))
    await app.initialize()
    await app.shutdown()


@pytest.mark.parametrize(
    "url",
    [
        "oracle://edda:s3cret@127.0.0.1/db",
        "postgresql://edda:s3cret@127.0.0.1:1/db",
        "mysql://edda:s3cret@127.0.0.1:1/db",
        "postgresql://edda:s3cret@127.0.0.1:not-a-port/db",
        "mysql://edda:s3cret@127.0.0.1/db?nonsense=1",
    ],
)
async def test_errors_about_a_database_hide_its_password(url: str) -> None:
    with pytest.raises((EddaError, ValueError, OSError)) as caught:
        await EddaApp("shop", url).initialize()
    error: BaseException | None = caught.value
    while error is not None:
        assert "s3cret" not in repr(error)
        error = error.__cause__ or error.__context__


def test_options_of_the_reference_are_accepted_and_typing_errors_are_not() -> None:
    EddaApp("shop", "memory://", outbox_enabled=True, pool_timeout=30, leader_lease_duration=10)
    with pytest.raises(TypeError, match="outbox_enabeld"):
        EddaApp("shop", "memory://", outbox_enabeld=True)


async def test_a_step_that_finishes_during_shutdown_may_still_use_the_app(make_app: MakeApp) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    @workflow
    async def greet(ctx: WorkflowContext, name: str) -> str:
        return f"hello {name}"

    @activity(retry_policy=RetryPolicy(max_attempts=1))
    async def start_another(ctx: WorkflowContext) -> str:
        began.set()
        await go_on.wait()
        return await greet.start("late")

    @workflow
    async def parent(ctx: WorkflowContext) -> str:
        return await start_another(ctx)

    app = await make_app()
    run_id = await app.start(parent)
    await began.wait()
    leaving = asyncio.create_task(app.shutdown())
    await asyncio.sleep(0)  # the drain has begun
    go_on.set()
    await leaving
    await app.initialize()
    assert await app.handle(await app.handle(run_id).result(timeout=10)).result(timeout=10) == "hello late"


@pytest.mark.parametrize("url", [5, b"sqlite:///shop.db", Path("shop.db")])
def test_a_url_that_is_no_str_is_refused_with_an_example(url: Any) -> None:
    kind = type(url).__name__
    with pytest.raises(
        TypeError, match=rf'EddaApp\(db_url=...\): expected .* as a str, not {kind}; write it like db_url="'
    ):
        EddaApp("x", url)
    with pytest.raises(TypeError, match=r"OutboxRelayer\(db_url=...\): expected the URL of the database as a str"):
        OutboxRelayer(url, "https://example.com/events")


def test_an_empty_url_is_not_taken_for_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDDA_DB_URL", "memory://")
    with pytest.raises(ValueError, match="the URL of the database is empty"):
        EddaApp("shop", "")
    assert EddaApp("shop").db_url == "memory://"


async def test_a_host_that_cannot_be_found_is_named() -> None:
    app = EddaApp("shop", "postgresql://shop:s3cret@no-such-host.invalid/shop")
    with pytest.raises(EddaError, match=r"cannot connect to PostgreSQL at .*no-such-host\.invalid/shop: ") as refused:
        await app.initialize()
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("method", ["start", "run"])
async def test_a_start_that_is_not_awaited_is_named_as_it_was_written(make_app: MakeApp, method: str) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> None: ...

    await make_app(workflows=[order])
    with pytest.warns(RuntimeWarning, match=rf"coroutine 'order\.{method}' was never awaited"):
        getattr(order, method)()
