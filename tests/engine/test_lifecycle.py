"""Starting and stopping one app from several tasks at once: there is never more than one engine, and none is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import permutations

import pytest

from edda import EddaApp, WorkflowContext, activity, workflow
from edda.engine.engine import Engine
from edda.errors import AppError, StorageUnavailableError
from tests.conftest import Database

from .conditions import until
from .conftest import RESTLESS, url_of

Action = Callable[[EddaApp], Awaitable[object]]


async def initialize(app: EddaApp) -> None:
    await app.initialize()


async def shutdown(app: EddaApp) -> None:
    await app.shutdown(grace=0.0)


async def enter_and_leave(app: EddaApp) -> None:
    async with app:
        pass


async def mounted(app: EddaApp) -> None:
    async with app.lifespan():
        pass


async def serve(app: EddaApp) -> None:
    """As an ASGI server does."""
    orders = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> dict[str, str]:
        return orders.pop(0)

    async def send(message: object) -> None: ...

    await app({"type": "lifespan"}, receive, send)


async def cancelled_start(app: EddaApp) -> None:
    starting = asyncio.create_task(app.initialize())
    await asyncio.sleep(0)
    starting.cancel()
    with suppress(asyncio.CancelledError):
        await starting


async def cancelled_stop(app: EddaApp) -> None:
    stopping = asyncio.create_task(app.shutdown(grace=0.0))
    await asyncio.sleep(0)
    stopping.cancel()
    with suppress(asyncio.CancelledError):
        await stopping


ACTIONS: tuple[Action, ...] = (
    initialize,
    shutdown,
    enter_and_leave,
    mounted,
    serve,
    cancelled_start,
    cancelled_stop,
)
PAIRS = [pytest.param(pair, id="+".join(action.__name__ for action in pair)) for pair in permutations(ACTIONS, 2)]
SAME = [pytest.param((action, action), id=f"{action.__name__}-twice") for action in ACTIONS]


_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def count_own_threads_only() -> None:
    """A thread that another test left behind in this process is not a fault of the tests here."""
    _others.clear()
    _others.update(threading.enumerate())


def parts_left() -> set[str]:
    """Names of this library's threads and tasks that were started in this test and are still there."""
    own = [thread for thread in threading.enumerate() if thread not in _others]
    threads = {thread.name for thread in own if thread.name.startswith("edda-")}
    return threads | {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("edda-")}


class Count:
    """How many engines were started and not stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive: set[Engine] = set()
        self.most = 0
        start, stop, kill = Engine.start, Engine.stop, Engine.kill

        async def counted_start(engine: Engine, with_worker: bool) -> None:
            self.alive.add(engine)
            self.most = max(self.most, len(self.alive))
            await start(engine, with_worker)

        async def counted_stop(engine: Engine, grace: float) -> None:
            await stop(engine, grace)
            self.alive.discard(engine)

        def counted_kill(engine: Engine) -> None:
            kill(engine)
            self.alive.discard(engine)

        monkeypatch.setattr(Engine, "start", counted_start)
        monkeypatch.setattr(Engine, "stop", counted_stop)
        monkeypatch.setattr(Engine, "kill", counted_kill)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


async def workers_of(database: Database) -> int:
    storage = database.storage()
    await storage.open()
    try:
        return len(await storage.registered_workers())
    finally:
        await storage.close()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("actions", PAIRS + SAME)
@pytest.mark.parametrize("is_started", [False, True], ids=["stopped", "started"])
async def test_whatever_is_called_at_once_there_is_one_engine_and_none_is_left(
    database: Database, count: Count, actions: tuple[Action, ...], is_started: bool
) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return "done"

    app = EddaApp("shop", url_of(database), storage=database.storage(), settings=RESTLESS)
    if is_started:
        await app.initialize()
    async with asyncio.timeout(30):
        await asyncio.gather(*(action(app) for action in actions))
    assert count.most <= 1
    if count.most == 1 and cancelled_stop not in actions:  # a cancelled stop leaves the worker's row to its lease
        assert await workers_of(database) == len(count.alive)
    await app.initialize()
    assert await app.run(order) == "done"
    assert count.most == 1
    assert len(count.alive) == 1
    await app.shutdown()
    assert not count.alive
    await until(lambda: not parts_left(), f"no thread or task is left of {parts_left()}")


async def test_two_starts_at_once_register_one_worker(database: Database, count: Count) -> None:
    app = EddaApp("shop", url_of(database), storage=database.storage(), settings=RESTLESS)
    try:
        await asyncio.gather(*(app.initialize() for _ in range(5)))
        assert len(await app.engine.storage.registered_workers()) == 1
        assert count.most == 1
    finally:
        await app.shutdown()
    await until(lambda: not parts_left(), "a connect that was cancelled has ended")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_start_that_fails_lets_the_next_one_try(
    database: Database, count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = database.storage()
    app = EddaApp("shop", url_of(database), storage=storage, settings=RESTLESS)
    pending, failures = storage.pending_migrations, iter([True])

    async def fail_once() -> Sequence[str]:
        await asyncio.sleep(0.01)
        if next(failures, False):
            raise StorageUnavailableError("away")
        return await pending()

    monkeypatch.setattr(storage, "pending_migrations", fail_once)
    first, second = await asyncio.gather(app.initialize(), app.initialize(), return_exceptions=True)
    assert isinstance(first, StorageUnavailableError)
    assert second is None
    assert len(count.alive) == 1
    await app.shutdown()
    assert not parts_left()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_killed_start_is_gone(database: Database, count: Count) -> None:
    app = EddaApp("shop", url_of(database), storage=database.storage(), settings=RESTLESS)
    starting = asyncio.create_task(app.initialize())
    await asyncio.sleep(0)
    app.kill()
    with suppress(AppError, StorageUnavailableError):
        await starting
    assert not count.alive
    await until(lambda: not parts_left(), f"no thread or task is left of {parts_left()}")
    await app.initialize()
    assert len(count.alive) == 1
    await app.shutdown()


@pytest.mark.parametrize("database", ["memory"], indirect=True)
async def test_a_step_may_ask_for_the_start_while_its_app_drains(database: Database) -> None:
    begun = asyncio.Event()
    app = EddaApp("shop", url_of(database), storage=database.storage(), settings=RESTLESS)

    @activity
    async def work(ctx: WorkflowContext) -> str:
        begun.set()
        await until(lambda: app.state.name == "DRAINING", "the app drains")
        await app.initialize()
        return "done"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await work(ctx)

    await app.initialize()
    await app.start(order)
    await begun.wait()
    async with asyncio.timeout(10):
        await app.shutdown(grace=20)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_migrating_a_started_app_leaves_it_started(database: Database) -> None:
    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return "done"

    app = EddaApp("shop", url_of(database), storage=database.storage(), settings=RESTLESS)
    async with app:
        assert await app.migrate() == ()
        assert await app.run(order) == "done"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_app_lives_on_one_event_loop_after_another(database: Database) -> None:
    app = EddaApp("shop", url_of(database), storage=database.storage(), settings=RESTLESS)

    async def live() -> None:
        await asyncio.gather(app.initialize(), app.initialize())
        await asyncio.gather(app.shutdown(), app.shutdown())

    for _ in range(2):
        asyncio.run(live())
