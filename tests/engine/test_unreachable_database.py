"""Every call that a user awaits ends within `call_timeout` while the database is away, and says what is known of it."""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import multiprocessing
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

import edda
from edda import EddaApp, OutboxRelayer, RunStatus, WorkflowContext, WorkflowHandle, activity, wait_event, workflow
from edda.cloudevents.event import make
from edda.control.controller import Controller
from edda.control.local import LocalController
from edda.control.views import (
    BulkRequest,
    EventRequest,
    EventSearch,
    HistorySearch,
    MessageRequest,
    OutboxRequest,
    RetryRequest,
    RunSearch,
    StartRequest,
)
from edda.engine.settings import Settings
from edda.errors import OutcomeUnknownError, StorageUnavailableError
from edda.workflow.workflow import BoundWorkflow, Workflow
from tests.conftest import MakeDatabase
from tests.proxy import DatabaseProxy

from .conditions import until, until_status
from .conftest import url_of

BOUND = 1.0
SLACK = 9.0
"""Seconds more on a machine that has much else to do; without a bound it was half a minute and longer."""
SETTINGS = Settings(call_timeout=BOUND, linger=0.0, sweep=0.2, takeover_grace=0.0, shutdown_grace=0.2)


@activity
async def greet(ctx: WorkflowContext) -> str:
    return "hello"


class Shop:
    """An app, with a run that waits, one that completed and one that failed."""

    def __init__(self, app: EddaApp) -> None:
        @workflow(name="quick")
        async def quick(ctx: WorkflowContext) -> str:
            return await greet(ctx)

        @workflow(name="waiting")
        async def waiting(ctx: WorkflowContext) -> str:
            ctx.set("stage", "begun")
            return (await wait_event(ctx, "paid")).id

        @workflow(name="failing")
        async def failing(ctx: WorkflowContext) -> None:
            raise LookupError("sold out")

        self.app = app
        self.quick, self.waiting, self.failing = quick, waiting, failing

    async def open(self) -> None:
        await self.app.initialize()
        for id, flow, status in (
            ("waits", self.waiting, RunStatus.WAITING_FOR_EVENT),
            ("done", self.quick, RunStatus.COMPLETED),
            ("failed", self.failing, RunStatus.FAILED),
            ("old", self.quick, RunStatus.COMPLETED),
        ):
            await flow.options(id=id).on(self.app.client).start()
            await until_status(self.app, id, status)
        await self.app.send_event("stored", "/shop", {}, id="stored")

    @property
    def handle(self) -> WorkflowHandle[Any]:
        return self.app.handle("waits")


Use = Callable[[Shop], Awaitable[Any]]

CALLS: dict[str, Use] = {
    "EddaApp.start": lambda shop: shop.app.start(shop.quick),
    "EddaApp.run": lambda shop: shop.app.run(shop.quick),
    "EddaApp.cancel": lambda shop: shop.app.cancel("waits", "enough"),
    "EddaApp.find_instances": lambda shop: shop.app.find_instances(),
    "EddaApp.send_event": lambda shop: shop.app.send_event("shipped", "/shop", {}, id="from the app"),
    "EddaApp.publish": lambda shop: shop.app.publish("news", {}),
    "EddaApp.handle_cloudevent": lambda shop: shop.app.handle_cloudevent(
        make(id="handled", type="shipped", source="/shop")
    ),
    "EddaApp.receive": lambda shop: shop.app.receive([make(id="received", type="shipped", source="/shop")]),
    "EddaApp.ping": lambda shop: shop.app.ping(),
    "Workflow.start": lambda shop: shop.quick.start(),
    "Workflow.run": lambda shop: shop.quick.run(),
    "BoundWorkflow.start": lambda shop: shop.quick.options(id="chosen").start(),
    "BoundWorkflow.run": lambda shop: shop.quick.options(delay=0.1).run(),
    "WorkflowHandle.status": lambda shop: shop.handle.status(),
    "WorkflowHandle.result": lambda shop: shop.handle.result(timeout=BOUND),
    "WorkflowHandle.cancel": lambda shop: shop.handle.cancel(),
    "WorkflowHandle.retry": lambda shop: shop.app.handle("failed").retry(),
    "WorkflowHandle.resume": lambda shop: shop.handle.resume(),
    "WorkflowHandle.history": lambda shop: shop.handle.history(),
    "WorkflowHandle.get": lambda shop: shop.handle.get("stage"),
    "WorkflowHandle.wait": lambda shop: shop.handle.wait("never", timeout=BOUND),
    "edda.send_event": lambda shop: edda.send_event("shipped", "/shop", {}, id="from anywhere"),
    "edda.publish": lambda shop: edda.publish(shop.app, "news", {}),
    "edda.send_to": lambda shop: edda.send_to(shop.app, "waits", {}, "news"),
    "LocalController.list_runs": lambda shop: shop.app.control.list_runs(RunSearch()),
    "LocalController.count_runs": lambda shop: shop.app.control.count_runs(RunSearch()),
    "LocalController.get_run": lambda shop: shop.app.control.get_run("waits"),
    "LocalController.get_history": lambda shop: shop.app.control.get_history("waits", HistorySearch()),
    "LocalController.get_run_and_timeline": lambda shop: shop.app.control.get_run_and_timeline("waits"),
    "LocalController.get_timeline": lambda shop: shop.app.control.get_timeline("waits"),
    "LocalController.export_run": lambda shop: shop.app.control.export_run("waits"),
    "LocalController.start_run": lambda shop: shop.app.control.start_run(StartRequest("quick")),
    "LocalController.cancel_run": lambda shop: shop.app.control.cancel_run("waits"),
    "LocalController.retry_run": lambda shop: shop.app.control.retry_run("failed", RetryRequest()),
    "LocalController.resume_run": lambda shop: shop.app.control.resume_run("waits"),
    "LocalController.delete_run": lambda shop: shop.app.control.delete_run("old"),
    "LocalController.act_on_runs": lambda shop: shop.app.control.act_on_runs(BulkRequest("cancel", ids=("waits",))),
    "LocalController.list_events": lambda shop: shop.app.control.list_events(EventSearch()),
    "LocalController.get_event": lambda shop: shop.app.control.get_event(1),
    "LocalController.send_event": lambda shop: shop.app.control.send_event(EventRequest("shipped", id="by control")),
    "LocalController.resend_event": lambda shop: shop.app.control.resend_event(1),
    "LocalController.list_waits": lambda shop: shop.app.control.list_waits(None, None, 10),
    "LocalController.publish_message": lambda shop: shop.app.control.publish_message(MessageRequest("news")),
    "LocalController.list_channels": lambda shop: shop.app.control.list_channels(),
    "LocalController.list_outbox": lambda shop: shop.app.control.list_outbox(None, None, 10),
    "LocalController.retry_outbox": lambda shop: shop.app.control.retry_outbox(OutboxRequest(every=True)),
    "LocalController.drop_outbox": lambda shop: shop.app.control.drop_outbox(OutboxRequest(every=True)),
    "LocalController.list_workers": lambda shop: shop.app.control.list_workers(),
    "LocalController.list_definitions": lambda shop: shop.app.control.list_definitions(),
    "LocalController.get_definition": lambda shop: shop.app.control.get_definition("quick"),
    "LocalController.get_stats": lambda shop: shop.app.control.get_stats(),
    "LocalController.list_audits": lambda shop: shop.app.control.list_audits(None, 10),
}

OTHERWISE = {
    "EddaApp.initialize": "has tests of its own here",
    "EddaApp.shutdown": "has a test of its own here",
    "EddaApp.migrate": "has a test of its own here; a migration takes as long as it takes",
    "OutboxRelayer.start": "has a test of its own here",
    "OutboxRelayer.stop": "has a test of its own here",
    "OutboxRelayer.run": "goes on until it is cancelled",
    **{
        f"edda.{verb}": "is a command of a workflow, whose run waits for the database"
        for verb in (
            "receive",
            "send_event_transactional",
            "sleep",
            "sleep_until",
            "subscribe",
            "unsubscribe",
            "wait_any",
            "wait_event",
            "wait_timer",
            "wait_until",
        )
    },
}
READS_ONLY = re.compile(r"\.(status|result|history|get|wait|ping|find_instances|list_|count_|get_|export_)")


def is_awaited(member: Any) -> bool:
    if inspect.iscoroutinefunction(member):
        return True
    return inspect.isfunction(member) and str(member.__annotations__.get("return", "")).startswith("Coroutine")


def public_calls() -> Iterator[str]:
    for kind in (EddaApp, OutboxRelayer, Workflow, BoundWorkflow, WorkflowHandle, LocalController):
        for name, member in inspect.getmembers(kind):
            if not name.startswith("_") and is_awaited(member):
                yield f"{kind.__name__}.{name}"
    for name in edda.__all__:
        if is_awaited(getattr(edda, name)):
            yield f"edda.{name}"


def test_every_public_call_that_is_awaited_has_a_row() -> None:
    assert sorted(public_calls()) == sorted({*CALLS, *OTHERWISE})
    operations = {name for name, _ in inspect.getmembers(Controller, inspect.iscoroutinefunction)}
    assert operations <= {name.partition(".")[2] for name in CALLS if name.startswith("LocalController.")}


@pytest.fixture(params=("postgres", "mysql"))
async def proxy(request: pytest.FixtureRequest, make_database: MakeDatabase) -> AsyncIterator[DatabaseProxy]:
    async with DatabaseProxy(url_of(make_database(request.param))) as proxy:
        yield proxy


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Shop]:
    shop = Shop(EddaApp("shop", url, settings=SETTINGS))
    try:
        await shop.open()
        yield shop
    finally:
        await shop.app.shutdown(grace=0.0)


async def outcome_of(use: Use, shop: Shop) -> tuple[Any, float]:
    """What it returned or raised, and after how long."""
    begun = time.monotonic()
    try:
        found = await use(shop)
    except Exception as error:
        found = error
    return found, time.monotonic() - begun


async def use_all(shop: Shop) -> dict[str, Any]:
    """All at once, each of them in time."""
    outcomes = await asyncio.gather(*(outcome_of(use, shop) for use in CALLS.values()))
    late = {name: seconds for name, (_, seconds) in zip(CALLS, outcomes, strict=True) if seconds > BOUND + SLACK}
    assert not late
    return {name: found for name, (found, _) in zip(CALLS, outcomes, strict=True)}


def check_errors(found: dict[str, Any]) -> None:
    for name, error in found.items():
        if name in ("WorkflowHandle.result", "WorkflowHandle.wait"):
            assert isinstance(error, TimeoutError), f"{name}: {error!r}"
        else:
            assert isinstance(error, StorageUnavailableError), f"{name}: {error!r}"
        if READS_ONLY.search(name):
            assert not isinstance(error, OutcomeUnknownError), f"{name} changes nothing: {error!r}"


STARTED = re.compile(r"as run '([^']+)'")
EVENTS = {
    "EddaApp.send_event": "from the app",
    "EddaApp.handle_cloudevent": "handled",
    "EddaApp.receive": "received",
    "edda.send_event": "from anywhere",
    "LocalController.send_event": "by control",
}


async def check_truth(shop: Shop, found: dict[str, Any]) -> None:
    """What an error denies did not happen; what it leaves open is there once, or not at all."""
    runs = await all_runs(shop)
    events = [event.id for event in (await shop.app.control.list_events(EventSearch(limit=200))).items]
    for name, error in found.items():
        most = 0 if is_denied(error) else 1
        if isinstance(error, StorageUnavailableError) and (known := STARTED.search(str(error))):
            assert runs.count(known[1]) <= most, f"{name}: {error}"
        if name in EVENTS:
            assert events.count(EVENTS[name]) <= most, f"{name}: {error}"


def is_denied(found: Any) -> bool:
    return isinstance(found, StorageUnavailableError) and not isinstance(found, OutcomeUnknownError)


async def all_runs(shop: Shop) -> list[str]:
    return [run["instance_id"] for run in (await shop.app.find_instances(limit=200))["instances"]]


async def check_works_again(shop: Shop) -> None:
    """In the same process, without anybody's help."""

    async def works() -> bool:
        try:
            id = await shop.app.start(shop.quick)
            await shop.app.send_event("shipped", "/shop", {}, id=f"after {id}")
            return bool(await shop.app.handle(id).result(timeout=10) == "hello")
        except (StorageUnavailableError, TimeoutError):
            return False

    await until(works, "a run is started, and ends", within=90)


async def test_calls_end_in_time_while_the_server_is_silent(proxy: DatabaseProxy) -> None:
    """A server that was stopped goes on later with what it was sent: only the error can say that nobody knows."""
    async with opened(proxy.url) as shop:
        proxy.silence()
        found = await use_all(shop)
        check_errors(found)
        assert isinstance(found["EddaApp.send_event"], OutcomeUnknownError)
        await proxy.restore()
        await check_works_again(shop)
        await check_truth(shop, found)


async def test_calls_end_in_time_while_connections_are_refused(proxy: DatabaseProxy) -> None:
    async with opened(proxy.url) as shop:
        await proxy.refuse()
        found = await use_all(shop)
        check_errors(found)
        await proxy.restore()
        await check_works_again(shop)
        await check_truth(shop, found)


async def test_calls_get_over_connections_that_were_cut(proxy: DatabaseProxy) -> None:
    """Each is sent again. The first cut hits those that stand idle, the second those that are used."""
    async with opened(proxy.url) as shop:
        proxy.cut()
        for name in ("EddaApp.start", "EddaApp.send_event", "WorkflowHandle.status", "EddaApp.publish"):
            found, seconds = await outcome_of(CALLS[name], shop)
            assert not isinstance(found, Exception), f"{name}: {found!r}"
            assert seconds < BOUND + SLACK
        using = asyncio.create_task(use_all(shop))
        await asyncio.sleep(0)
        proxy.cut()
        await check_truth(shop, await using)
        await check_works_again(shop)


async def test_an_unknown_start_can_be_repeated_under_the_id_that_the_error_names(proxy: DatabaseProxy) -> None:
    async with opened(proxy.url) as shop:
        proxy.silence()
        with pytest.raises(OutcomeUnknownError) as caught:
            await shop.app.start(shop.quick)
        known = STARTED.search(str(caught.value))
        assert known is not None
        await proxy.restore()
        starter = shop.quick.options(id=known[1])

        async def started() -> bool:
            try:
                return await shop.app.start(starter) == known[1]
            except StorageUnavailableError:
                return False

        await until(started, "it is started", within=90)
        assert await shop.app.handle(known[1]).result(timeout=60) == "hello"
        assert (await all_runs(shop)).count(known[1]) == 1


async def test_a_start_that_was_not_sent_is_not_sent_later(proxy: DatabaseProxy) -> None:
    """While a batch has no answer the next starts wait in memory: an error that denies them must be true for ever."""
    async with opened(proxy.url) as shop:
        proxy.silence()
        found = await asyncio.gather(
            *(shop.app.start(shop.quick) for _ in range(2)),
            wait_then(lambda: shop.app.start(shop.quick), BOUND / 2),
            return_exceptions=True,
        )
        await proxy.restore()
        await check_works_again(shop)
        for error in found:
            assert isinstance(error, StorageUnavailableError)
        assert type(found[-1]) is StorageUnavailableError, "it came when a batch was under way"
        known = STARTED.search(str(found[-1]))
        assert known is not None
        assert known[1] not in await all_runs(shop)


async def wait_then(call: Callable[[], Awaitable[Any]], seconds: float) -> Any:
    await asyncio.sleep(seconds)
    return await call()


@pytest.mark.parametrize("how", ["silent", "refused"])
async def test_initialize_and_migrate_end_in_time(proxy: DatabaseProxy, how: str) -> None:
    if how == "silent":
        proxy.silence()
    else:
        await proxy.refuse()
    for begin in (
        lambda: EddaApp("shop", proxy.url, settings=SETTINGS).initialize(),
        lambda: EddaApp("shop", proxy.url, settings=SETTINGS).migrate(),
        lambda: OutboxRelayer(proxy.url, "http://127.0.0.1:9/").start(),
    ):
        begun = time.monotonic()
        with pytest.raises(StorageUnavailableError):
            await begin()
        assert time.monotonic() - begun < Settings().call_timeout + SLACK


async def test_an_app_that_could_not_start_starts_when_the_database_is_there(proxy: DatabaseProxy) -> None:
    proxy.silence()
    app = EddaApp("shop", proxy.url, settings=SETTINGS)
    with pytest.raises(StorageUnavailableError, match="opening the database"):
        await app.initialize()
    await proxy.restore()
    shop = Shop(app)
    await shop.open()
    await check_works_again(shop)
    await app.shutdown(grace=0.0)


@pytest.mark.parametrize("how", ["silent", "refused"])
async def test_shutdown_ends_in_time(proxy: DatabaseProxy, how: str) -> None:
    gate = asyncio.Event()

    @activity
    async def stay(ctx: WorkflowContext) -> None:
        await gate.wait()

    @workflow
    async def long(ctx: WorkflowContext) -> None:
        await stay(ctx)

    app = EddaApp("shop", proxy.url, settings=SETTINGS)
    relayer = OutboxRelayer(proxy.url, "http://127.0.0.1:9/")
    await app.initialize()
    await relayer.start()
    await app.start(long)
    if how == "silent":
        proxy.silence()
    else:
        await proxy.refuse()
    begun = time.monotonic()
    await asyncio.gather(app.shutdown(grace=0.1), relayer.stop(grace=0.1))
    assert time.monotonic() - begun < 25.0


# SQLite: there is no server, but another process may hold the file.


def hold_lock(path: str, locked: Any, release: Any) -> None:
    """As a process that was stopped in the middle of a transaction."""
    with open(path, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        locked.set()
        release.wait(120)


@contextmanager
def file_held(path: Path) -> Iterator[Callable[[], None]]:
    context = multiprocessing.get_context("spawn")
    locked, release = context.Event(), context.Event()
    holder = context.Process(target=hold_lock, args=(str(path) + ".lock", locked, release), daemon=True)
    holder.start()
    try:
        assert locked.wait(60)
        yield release.set
    finally:
        release.set()
        holder.join(60)


async def test_calls_end_in_time_while_another_process_holds_the_file(tmp_path: Path) -> None:
    """Handles, which only read, are answered."""
    path = tmp_path / "edda.db"
    async with opened(f"sqlite:///{path}") as shop:
        with file_held(path) as release:
            found = await use_all(shop)
            for name, error in found.items():
                if name in ("WorkflowHandle.result", "WorkflowHandle.wait"):
                    assert isinstance(error, TimeoutError)
                elif READS_ONLY.search(name) and not name.startswith("LocalController."):
                    assert not isinstance(error, Exception), f"{name}: {error!r}"
                elif isinstance(error, Exception):
                    assert isinstance(error, StorageUnavailableError), f"{name}: {error!r}"
            release()
        await check_works_again(shop)
        await check_truth(shop, found)


async def test_initialize_and_shutdown_end_in_time_while_another_process_holds_the_file(tmp_path: Path) -> None:
    path = tmp_path / "edda.db"
    app = EddaApp("shop", f"sqlite:///{path}", settings=SETTINGS)
    await app.initialize()
    with file_held(path) as release:
        begun = time.monotonic()
        await app.shutdown(grace=0.0)
        assert time.monotonic() - begun < 3 * BOUND + SLACK
        begun = time.monotonic()
        with pytest.raises(StorageUnavailableError, match="opening the database"):
            await app.initialize()
        assert time.monotonic() - begun < BOUND + SLACK
        release()
    shop = Shop(app)
    await shop.open()
    await check_works_again(shop)
    await app.shutdown(grace=0.0)
