"""A run that waits and is resumed is replayed with the code of today, and then waits for what that code asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from edda import (
    EddaApp,
    RetryPolicy,
    RunStatus,
    WorkflowContext,
    activity,
    publish,
    receive,
    send_to,
    sleep,
    subscribe,
    wait_event,
    workflow,
)
from edda.control.views import BulkRequest, RunSearch
from edda.core.codec import Codec
from edda.core.model import Entry, EntryKind, RunId, RunRecord, Wait
from edda.core.states import WAITING
from edda.errors import ActionRefusedError, InstanceNotFoundError
from edda.workflow.workflow import Workflow

from .conditions import until, until_out_of_memory, until_status
from .conftest import MakeApp

HOUR = 3600.0
RUN = "run-1"
State = tuple[RunRecord, tuple[Wait, ...], tuple[Entry, ...]]


async def state_of(app: EddaApp, run_id: str = RUN) -> State:
    storage = app.engine.storage
    record = await app.client.read_run(run_id)
    return record, await storage.waits(RunId(run_id)), await app.handle(run_id).history()


async def until_waits(app: EddaApp, described: str) -> None:
    """It has left memory, and its record says what it waits for."""

    async def waits() -> bool:
        record = await app.client.read_run(RUN)
        return record.owner is None and described in f"{record.status.value} {record.reason}"

    await until(waits, f"{RUN} waits: {described}")


def received(history: tuple[Entry, ...]) -> list[EntryKind]:
    return [entry.kind for entry in history if entry.kind in (EntryKind.EVENT, EntryKind.MESSAGE)]


async def gom(app: EddaApp, number: int = 1) -> None:
    await app.send_event("gom", "/tests", {"id": number})


# After a roll-back


async def right_event(ctx: WorkflowContext) -> Any:
    return (await wait_event(ctx, "gom", match={"id": 1})).data["id"]


async def right_event_of_any_kind(ctx: WorkflowContext) -> Any:
    return (await wait_event(ctx, "gom")).data["id"]


async def right_event_with_a_name(ctx: WorkflowContext) -> Any:
    return (await wait_event(ctx, "gom", event_id="payment")).data["id"]


async def other_type(ctx: WorkflowContext) -> Any:
    return (await wait_event(ctx, "gom2")).data["id"]


async def other_type_with_a_name(ctx: WorkflowContext) -> Any:
    return (await wait_event(ctx, "gom2", event_id="payment")).data["id"]


async def other_match(ctx: WorkflowContext) -> Any:
    return (await wait_event(ctx, "gom", match={"id": 2})).data["id"]


async def sleeping(ctx: WorkflowContext) -> Any:
    await sleep(ctx, HOUR)


Code = Callable[[WorkflowContext], Awaitable[Any]]
ROLL_BACKS = [
    pytest.param(right_event_of_any_kind, other_type, "gom2", id="another type"),
    pytest.param(right_event_of_any_kind, sleeping, "waiting_for_timer", id="a sleep"),
    pytest.param(right_event, other_match, "2", id="another match"),
    pytest.param(right_event_with_a_name, other_type_with_a_name, "gom2", id="another type under the same name"),
]


def as_workflow(code: Code) -> Workflow[Any, Any]:
    @workflow(name="order")
    async def order(ctx: WorkflowContext) -> Any:
        return await code(ctx)

    return order


class Deployments:
    """One release after another, each by a process of its own."""

    def __init__(self, make_app: MakeApp) -> None:
        self._make_app = make_app
        self._app: EddaApp | None = None

    async def deploy(self, code: Code) -> EddaApp:
        if self._app is not None:
            await self._app.shutdown()
        self._app = await self._make_app(workflows=[as_workflow(code)])
        return self._app

    async def start_and_replace(self, right: Code, wrong: Code) -> EddaApp:
        app = await self.deploy(right)
        await app.start(as_workflow(right).options(id=RUN))
        await until_status(app, RUN, RunStatus.WAITING_FOR_EVENT)
        return await self.deploy(wrong)


@pytest.fixture
def releases(make_app: MakeApp) -> Deployments:
    return Deployments(make_app)


@pytest.mark.parametrize(("right", "wrong", "described"), ROLL_BACKS)
async def test_an_event_that_came_to_wrong_code_is_received_after_the_roll_back(
    releases: Deployments, right: Code, wrong: Code, described: str
) -> None:
    app = await releases.start_and_replace(right, wrong)
    await gom(app)
    await until_waits(app, described)
    app = await releases.deploy(right)
    await app.handle(RUN).resume()
    assert await app.handle(RUN).result(30.0) == 1
    _, waits, history = await state_of(app)
    assert waits == ()
    assert received(history) == [EntryKind.EVENT]


@pytest.mark.parametrize(("right", "wrong", "described"), ROLL_BACKS)
async def test_the_wait_of_wrong_code_is_replaced_after_the_roll_back(
    releases: Deployments, right: Code, wrong: Code, described: str
) -> None:
    app = await releases.start_and_replace(right, wrong)
    before = await state_of(app)
    await app.handle(RUN).resume()
    await until_waits(app, described)
    app = await releases.deploy(right)
    await app.handle(RUN).resume()
    await until_waits(app, "waiting_for_event gom")
    await until_out_of_memory(app)
    assert await state_of(app) == before
    await app.send_event("gom2", "/tests", {"id": 7})
    await gom(app)
    assert await app.handle(RUN).result(30.0) == 1


async def test_what_comes_to_the_wait_of_wrong_code_is_not_given_to_the_right_code(releases: Deployments) -> None:
    """Both waits have the same id, for the match is no part of it."""
    app = await releases.start_and_replace(right_event, other_match)
    await app.handle(RUN).resume()
    await until_waits(app, "2")
    app = await releases.deploy(right_event)
    await gom(app, 2)
    await until_waits(app, "1")
    _, _, history = await state_of(app)
    assert received(history) == []
    await gom(app, 1)
    assert await app.handle(RUN).result(30.0) == 1


class MissingKey:
    """What has this word in it was encrypted with a key that is lost."""

    def seal(self, data: bytes) -> bytes:
        return data

    def open(self, data: bytes) -> bytes:
        if b"secret" in data:
            raise KeyError("no such key")
        return data


async def test_an_event_that_cannot_be_read_parks_the_run(make_app: MakeApp) -> None:
    app = await make_app(workflows=[order := as_workflow(right_event_of_any_kind)])
    await app.start(order.options(id=RUN))
    await until_status(app, RUN, RunStatus.WAITING_FOR_EVENT)
    await app.shutdown()
    app = await make_app(workflows=[order], codec=Codec(transform=MissingKey()))
    await app.send_event("gom", "/tests", {"id": "secret"})
    await until_status(app, RUN, RunStatus.PARKED)
    await app.shutdown()
    app = await make_app(workflows=[order])
    assert await app.handle(RUN).result(30.0) == "secret"


# With unchanged code


@activity(retry_policy=RetryPolicy(initial_interval=HOUR, max_interval=HOUR, max_attempts=2, max_duration=None))
async def fail(ctx: WorkflowContext) -> None:
    raise ConnectionError("no answer")


@workflow(name="resumed_child")
async def child(ctx: WorkflowContext) -> str:
    await wait_event(ctx, "child ends")
    return "child"


async def timed_event(ctx: WorkflowContext) -> Any:
    return (await wait_event(ctx, "gom", timeout_seconds=HOUR)).data["id"]


async def event_from_now_on(ctx: WorkflowContext) -> Any:
    return (await wait_event(ctx, "gom", since="now")).data["id"]


async def long_sleep(ctx: WorkflowContext) -> str:
    await sleep(ctx, HOUR)
    return "slept"


def reader(mode: Any) -> Code:
    async def read(ctx: WorkflowContext) -> Any:
        await subscribe(ctx, "news", mode)
        return (await receive(ctx, "news", timeout_seconds=HOUR)).data

    return read


async def run_child(ctx: WorkflowContext) -> str:
    return await child.run()


async def try_again(ctx: WorkflowContext) -> None:
    await fail(ctx)


async def two_events(ctx: WorkflowContext) -> int:
    some = await asyncio.gather(wait_event(ctx, "gom", timeout_seconds=HOUR), wait_event(ctx, "gom", match={"id": 1}))
    return len({event.id for event in some})


async def send_news(app: EddaApp) -> None:
    await publish(app, "news", 1)


async def write_to_run(app: EddaApp) -> None:
    await send_to(app, RUN, 1, "news")


async def end_child(app: EddaApp) -> None:
    await app.send_event("child ends", "/tests")


async def twice_gom(app: EddaApp) -> None:
    await gom(app)
    await gom(app)


Give = Callable[[EddaApp], Awaitable[None]]
UNCHANGED = [
    pytest.param(timed_event, gom, 1, id="event"),
    pytest.param(event_from_now_on, gom, 1, id="event since now"),
    pytest.param(two_events, twice_gom, 2, id="two events"),
    pytest.param(long_sleep, None, None, id="timer"),
    pytest.param(reader("broadcast"), send_news, 1, id="broadcast message"),
    pytest.param(reader("competing"), send_news, 1, id="competing message"),
    pytest.param(reader("direct"), write_to_run, 1, id="direct message"),
    pytest.param(run_child, end_child, "child", id="child"),
    pytest.param(try_again, None, None, id="retry"),
]


class Counted:
    """A workflow whose replays are counted."""

    def __init__(self, code: Code) -> None:
        self.calls = 0

        @workflow(name="order")
        async def order(ctx: WorkflowContext) -> Any:
            self.calls += 1
            return await code(ctx)

        self.workflow = order

    async def start(self, make_app: MakeApp) -> EddaApp:
        app = await make_app(workflows=[self.workflow, child])
        await app.start(self.workflow.options(id=RUN))
        await self.until_waiting(app)
        return app

    async def until_waiting(self, app: EddaApp) -> None:
        async def waits() -> bool:
            record = await app.client.read_run(RUN)
            return record.status in WAITING and record.owner is None

        await until(waits, f"{RUN} waits")
        await until_out_of_memory(app)


@pytest.mark.parametrize(("code", "give", "result"), UNCHANGED)
async def test_a_run_with_unchanged_code_goes_back_to_the_same_wait(
    make_app: MakeApp, code: Code, give: Give | None, result: object
) -> None:
    order = Counted(code)
    app = await order.start(make_app)
    before = await state_of(app)
    for _ in range(3):
        calls = order.calls
        await app.handle(RUN).resume()
        await until(lambda: order.calls > calls, "it was replayed")  # noqa: B023 (called within the round)
        await order.until_waiting(app)
        assert await state_of(app) == before
    if give is not None:
        await give(app)
        assert await app.handle(RUN).result(30.0) == result


@pytest.mark.parametrize(("code", "give", "result"), [one for one in UNCHANGED if one.values[1] is not None])
async def test_what_arrives_while_a_run_is_resumed_is_received_once(
    make_app: MakeApp, code: Code, give: Give, result: object
) -> None:
    async def resume() -> None:
        for _ in range(5):
            try:
                await app.handle(RUN).resume()
            except ActionRefusedError:
                await asyncio.sleep(0)

    app = await Counted(code).start(make_app)
    await asyncio.gather(resume(), give(app), resume())
    assert await app.handle(RUN).result(30.0) == result
    _, waits, history = await state_of(app)
    assert waits == ()
    events = [entry.event for entry in history if entry.event is not None and entry.kind is not EntryKind.LATE_EVENT]
    assert len(events) == len(set(events))


async def test_a_stream_of_events_is_read_in_order_while_the_run_is_resumed(make_app: MakeApp) -> None:
    async def read(ctx: WorkflowContext) -> list[int]:
        return [(await wait_event(ctx, "gom")).data["id"] for _ in range(30)]

    async def send() -> None:
        for number in range(30):
            await gom(app, number)

    async def resume() -> None:
        while not sending.done():
            try:
                await app.handle(RUN).resume()
            except ActionRefusedError:
                await asyncio.sleep(0.001)

    app = await Counted(read).start(make_app)
    sending = asyncio.ensure_future(send())
    await resume()
    await sending
    assert await app.handle(RUN).result(30.0) == list(range(30))


# What is refused


async def test_only_a_run_that_is_suspended_is_resumed(make_app: MakeApp) -> None:
    async def nothing(ctx: WorkflowContext) -> None:
        return

    app = await make_app(workflows=[order := as_workflow(nothing)])
    await app.start(order.options(id=RUN))
    await until_status(app, RUN, RunStatus.COMPLETED)
    await app.start(order.options(id="delayed", delay=HOUR))
    with pytest.raises(ActionRefusedError, match="run run-1 has ended as completed"):
        await app.handle(RUN).resume()
    with pytest.raises(ActionRefusedError, match="run delayed is running"):
        await app.handle("delayed").resume()
    with pytest.raises(InstanceNotFoundError):
        await app.handle("nobody").resume()


async def test_all_waiting_runs_of_a_workflow_are_resumed_at_once(make_app: MakeApp) -> None:
    order = Counted(right_event)
    app = await order.start(make_app)
    await app.start(order.workflow.options(id="run-2"))
    await app.start(child.options(id="other"))
    await until_status(app, "run-2", RunStatus.WAITING_FOR_EVENT)
    await until_out_of_memory(app)
    calls = order.calls
    done = await app.control.act_on_runs(BulkRequest("resume", search=RunSearch(workflow="order")))
    assert (done.done, done.count) == (True, 2)
    await until(lambda: order.calls == calls + 2, "both were replayed")
    await order.until_waiting(app)
    detail = await app.control.get_run(RUN)
    assert detail.may == ("cancel", "resume")
