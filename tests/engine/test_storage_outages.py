"""No loop without a brake: one operation of the storage fails for some seconds, then works again.

Every operation of the storage's ports has its turn, with each error that a storage may raise and with one that it may
not. Meanwhile the worker's calls and log lines are counted: retries pause longer each time, and each loop logs its
failure once. Afterwards every run ends, whatever the failing operation was.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from edda import (
    EddaApp,
    RunStatus,
    WorkflowContext,
    activity,
    publish,
    receive,
    send_event_transactional,
    sleep,
    subscribe,
    wait_event,
    workflow,
)
from edda.errors import EddaError, StorageConflictError, StorageUnavailableError
from edda.storage import ports
from edda.storage.ports import Storage
from tests.conftest import InMemory
from tests.outbox.fakes import ListSink

from .conditions import until
from .conftest import MORTAL, MakeApp


class Defect(Exception):
    """An error that no part of the engine expects."""


WINDOW = 0.6
LEASE_WINDOW = 1.5
"""For the operations by which a worker keeps its lease and its runs: the lease passes meanwhile."""
MAX_CALLS = 30
"""Of the failing operation in the window by all loops together. A pause that grows from 10 ms to 1 s is 9 calls of one
loop in 1.5 s; a loop without a pause makes thousands."""
MAX_LINES = 80
"""Of the whole app. A storage that fails with an error it must not raise is reported once for each run that is driven
there and then, and again at each attempt, whose pauses grow; a loop without a pause logs thousands."""
ERRORS: tuple[Callable[[], Exception], ...] = (
    lambda: StorageUnavailableError("the database does not answer"),
    lambda: StorageConflictError("rolled back"),
    lambda: Defect("not an error that a storage may raise"),
)
NOT_OF_A_WORKER = (ports.Queries, ports.Admin)
"""Queries and commands of people, which are answered by an error at once."""
LIFE = {"open", "close", "migrate", "pending_migrations"}
LEASE_OPERATIONS = {*vars(ports.Workers), *vars(ports.Journal)}


def operations() -> list[str]:
    """Of every port that a worker uses, found in the protocols: a new one is tested without being listed here."""
    names = {
        name
        for port in Storage.__mro__
        if port.__module__ == ports.__name__ and port not in NOT_OF_A_WORKER
        for name, member in vars(port).items()
        if inspect.iscoroutinefunction(member)
    }
    return sorted(names - LIFE)


class Outage:
    """Makes one operation of a storage fail, and counts how often it is called meanwhile."""

    def __init__(self, storage: Storage, operation: str, error: Callable[[], Exception]) -> None:
        self.calls = 0
        self._storage = storage
        self._operation = operation
        self._error = error
        self._is_over = False

    def begin(self) -> None:
        work = getattr(self._storage, self._operation)

        async def fail(*args: Any, **options: Any) -> Any:
            if self._is_over:  # of a retry that holds on to the method it was given
                return await work(*args, **options)
            self.calls += 1
            raise self._error()

        setattr(self._storage, self._operation, fail)

    def end(self) -> None:
        self._is_over = True
        delattr(self._storage, self._operation)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("edda")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def define() -> list[Any]:
    """Workflows that use every part of the storage."""

    @activity
    async def work(ctx: WorkflowContext) -> str:
        return "worked"

    @activity
    async def tell(ctx: WorkflowContext) -> None:
        await send_event_transactional(ctx, "told", "/tests", {})
        await publish(ctx, "news", "hello")

    @workflow
    async def child(ctx: WorkflowContext) -> str:
        return await work(ctx)

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        await work(ctx)
        await tell(ctx)
        await sleep(ctx, 0.2)
        await child.run()
        await wait_event(ctx, "paid", match={"run": ctx.instance_id})
        return "done"

    @workflow
    async def listener(ctx: WorkflowContext) -> str:
        await subscribe(ctx, "topic")
        await ctx.step("ready", lambda: "ready")
        await receive(ctx, "topic")
        return "done"

    @workflow
    async def page(ctx: WorkflowContext, number: int = 0) -> str:
        await work(ctx)
        await sleep(ctx, 0.05)
        if number < 2:
            await ctx.recur(number + 1)
        return "done"

    return [order, listener, page]


async def start_all(app: EddaApp, flows: list[Any], prefix: str) -> list[str]:
    started = []
    for flow in flows:
        for options in ({"id": f"{prefix}-{flow.name}"}, {}):
            with suppress(EddaError, Defect):
                started.append(await app.start(flow.options(**options)))
    return started


async def feed(app: EddaApp, runs: list[str]) -> None:
    for run_id in runs:
        with suppress(EddaError, Defect):
            await app.send_event("paid", "/tests", {"run": run_id})
    with suppress(EddaError, Defect):
        await publish(app, "topic", "hello")


@pytest.mark.parametrize("error", ERRORS, ids=["unavailable", "conflict", "unexpected"])
@pytest.mark.parametrize("operation", operations())
async def test_an_operation_that_fails_for_a_while_is_tried_with_pauses_and_then_everything_goes_on(
    operation: str, error: Callable[[], Exception], make_app_on: MakeApp, lines: Lines
) -> None:
    flows = define()
    app = await make_app_on(on=InMemory(), settings=MORTAL, sink=ListSink(), outbox_enabled=True)
    before = await start_all(app, flows, "before")
    outage = Outage(app.engine.storage, operation, error)
    outage.begin()
    trying = asyncio.create_task(busy(app, flows, before))
    window = LEASE_WINDOW if operation in LEASE_OPERATIONS else WINDOW
    await asyncio.sleep(window)
    calls, logged = outage.calls, Counter(lines.texts)
    outage.end()
    started = await trying
    await until(lambda: app.engine.worker is not None, "there is a worker again")
    runs = [*before, *started, *await start_all(app, flows, "after")]
    assert calls <= MAX_CALLS + len(runs), f"{calls} calls in {window} s"
    assert sum(logged.values()) <= MAX_LINES, logged.most_common(5)
    for run_id in runs:
        await until_ended(app, run_id)


async def busy(app: EddaApp, flows: list[Any], before: list[str]) -> list[str]:
    started = await start_all(app, flows, "during")
    await feed(app, before)
    return started


async def until_ended(app: EddaApp, run_id: str) -> None:
    async def is_completed() -> bool:
        await feed(app, [run_id])
        return await app.handle(run_id).status() is RunStatus.COMPLETED

    await until(is_completed, f"{run_id} completes")
