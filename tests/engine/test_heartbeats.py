"""Heartbeats: an attempt that falls silent is given up, and the next one goes on where it stood."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from edda import (
    EddaApp,
    HeartbeatTimeoutError,
    RetryExhaustedError,
    RetryPolicy,
    WorkflowContext,
    activity,
    sleep,
    workflow,
)
from edda.core.model import EntryKind
from edda.engine.run import attempt
from edda.engine.run.attempt import ActivityHeartbeat
from edda.errors import NotInWorkflowError, PayloadError
from edda.testing.app import VirtualAlarm

from .conditions import until
from .conftest import MORTAL, MakeApp

on_two_databases = pytest.mark.parametrize("database", ["memory", "sqlite"], indirect=True)

AT_ONCE = RetryPolicy(initial_interval=0.0, max_attempts=3)


async def recorded(app: EddaApp, run_id: str) -> list[Any]:
    """The details in the history of a run."""
    entries = await app.handle(run_id).history()
    return [app.engine.codec.decode(entry.value) for entry in entries if entry.kind is EntryKind.HEARTBEAT]


@on_two_databases
async def test_an_attempt_that_falls_silent_is_given_up(app: EddaApp) -> None:
    @activity(heartbeat_timeout=0.05, retry_policy=RetryPolicy(max_attempts=1))
    async def silent(ctx: WorkflowContext) -> None:
        await asyncio.Event().wait()

    @workflow
    async def order(ctx: WorkflowContext) -> None:
        await silent(ctx)

    with pytest.raises(RetryExhaustedError) as caught:
        await app.run(order)
    cause = caught.value.__cause__
    assert isinstance(cause, HeartbeatTimeoutError)
    assert str(cause) == "silent:1, attempt 1, gave no heartbeat for 0.05 seconds"


@on_two_databases
async def test_an_attempt_that_beats_goes_on(app: EddaApp) -> None:
    timeout = 2.0  # a loaded machine may hold a thread back for most of a second

    @activity(heartbeat_timeout=timeout)
    async def lively(ctx: WorkflowContext) -> int:
        for _ in range(12):
            await asyncio.sleep(timeout / 10)
            ctx.heartbeat()
        return ctx.attempt

    @activity(heartbeat_timeout=timeout)
    def lively_thread(ctx: WorkflowContext) -> int:
        tick = threading.Event()
        for _ in range(12):
            tick.wait(timeout / 10)
            ctx.heartbeat()
        return ctx.attempt

    @workflow
    async def order(ctx: WorkflowContext) -> list[int]:
        return list(await asyncio.gather(lively(ctx), lively_thread(ctx)))

    run_id = await app.start(order)
    assert await app.handle(run_id).result(timeout=20) == [1, 1]
    assert await recorded(app, run_id) == [], "beats without details leave no entries"


@on_two_databases
@pytest.mark.parametrize("in_thread", [False, True])
async def test_the_next_attempt_goes_on_where_the_last_one_stood(app: EddaApp, in_thread: bool) -> None:
    seen: list[Any] = []

    def copy(ctx: WorkflowContext) -> int:
        page: int = ctx.heartbeat_details or 0
        seen.append(page)
        for _ in range(3):
            page += 1
            ctx.heartbeat(page)
        if page < 9:
            raise ConnectionError("again")
        return page

    async def copy_on_the_loop(ctx: WorkflowContext) -> int:
        return copy(ctx)

    body: Any = copy if in_thread else copy_on_the_loop

    @workflow
    async def order(ctx: WorkflowContext) -> int:
        pages: int = await activity(name="copy", retry_policy=AT_ONCE)(body)(ctx)
        return pages

    assert await app.run(order) == 9
    assert seen == [0, 3, 6]


@on_two_databases
async def test_what_a_silent_attempt_said_last_is_kept(app: EddaApp) -> None:
    @activity(heartbeat_timeout=0.1, retry_policy=AT_ONCE)
    async def silent(ctx: WorkflowContext) -> Any:
        if ctx.attempt == 1:
            for page in range(5):
                ctx.heartbeat({"page": page})
                await asyncio.sleep(0)
            await asyncio.Event().wait()
        return ctx.heartbeat_details

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return await silent(ctx)

    assert await app.run(order) == {"page": 4}


@on_two_databases
async def test_details_survive_a_crash(make_app: MakeApp) -> None:
    seen: list[Any] = []

    @activity
    async def copy(ctx: WorkflowContext) -> Any:
        seen.append((ctx.attempt, ctx.heartbeat_details))
        if len(seen) == 1:
            ctx.heartbeat("page 3")
            await asyncio.Event().wait()  # here the process dies
        return ctx.heartbeat_details

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return await copy(ctx)

    doomed = await make_app(settings=MORTAL)
    run_id = await doomed.start(order)

    async def is_recorded() -> bool:
        return await recorded(doomed, run_id) == ["page 3"]

    await until(is_recorded, "the details are recorded")
    doomed.kill()
    app = await make_app(settings=MORTAL)
    assert await app.handle(run_id).result(timeout=30) == "page 3"
    assert seen == [(1, None), (1, "page 3")]


@on_two_databases
async def test_the_newest_details_are_recorded_when_the_run_is_handed_back(make_app: MakeApp) -> None:
    beaten = asyncio.Event()

    @activity
    async def copy(ctx: WorkflowContext) -> Any:
        if ctx.heartbeat_details is None:
            for page in range(100):
                ctx.heartbeat(page)
                await asyncio.sleep(0)
            beaten.set()
            await asyncio.Event().wait()
        return ctx.heartbeat_details

    @workflow
    async def order(ctx: WorkflowContext) -> Any:
        return await copy(ctx)

    first = await make_app()
    run_id = await first.start(order)
    await beaten.wait()
    await first.shutdown(grace=0.0)
    second = await make_app()
    assert await second.handle(run_id).result(timeout=20) == 99
    assert len(await recorded(second, run_id)) == 2, "the first at once, the others are too soon after it"


@on_two_databases
async def test_details_that_cannot_be_stored_are_refused_where_they_are_given(app: EddaApp) -> None:
    @activity
    async def beat(ctx: WorkflowContext) -> str:
        with pytest.raises(PayloadError):
            ctx.heartbeat(object())
        return "went on"

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        return await beat(ctx)

    assert await app.run(order) == "went on"


@on_two_databases
async def test_heartbeats_belong_into_activities(app: EddaApp) -> None:
    uses: list[Callable[[WorkflowContext], Any]] = [
        lambda ctx: ctx.heartbeat(),
        lambda ctx: ctx.heartbeat_details,
        lambda ctx: ctx.is_cancelled,
    ]

    @workflow
    async def order(ctx: WorkflowContext) -> str:
        for use in uses:
            with pytest.raises(NotInWorkflowError, match="in an activity only"):
                use(ctx)
        await sleep(ctx, 0)
        return "refused"

    assert await app.run(order) == "refused"


class Time:
    """A clock and a loop of which only the timers are real."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, int, VirtualAlarm]] = []

    def monotonic(self) -> float:
        return self.now

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        callback()

    def call_later(self, delay: float, callback: Callable[[], None]) -> VirtualAlarm:
        alarm = VirtualAlarm(callback)
        heapq.heappush(self.timers, (self.now + delay, len(self.timers), alarm))
        return alarm

    def advance(self, seconds: float) -> None:
        self.now += seconds
        while self.timers and self.timers[0][0] <= self.now:
            callback = heapq.heappop(self.timers)[2].callback
            if callback is not None:
                callback()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(attempt, "time", clock)
    return clock


def test_ten_hours_of_details_leave_some_two_hundred_entries(clock: Time) -> None:
    kept: list[tuple[float, bytes]] = []
    loop: Any = clock
    body = ActivityHeartbeat(loop, None, lambda details: kept.append((clock.now - 1000, details)))
    body.start()
    for second in range(36_000):
        for _ in range(2):
            body.heartbeat(str(second).encode())
            clock.advance(0.5)
    assert 150 <= len(kept) <= 220
    for (earlier, _), (later, _) in pairwise(kept):
        assert later - earlier >= max(1.0, 0.05 * earlier)
    assert kept[0] == (0.0, b"0")
    moment, newest = kept[-1]
    assert abs(float(newest) - moment) <= 1, "it is the newest that is recorded, not one that waited"


def test_the_last_details_are_recorded_though_nothing_follows(clock: Time) -> None:
    kept: list[bytes] = []
    loop: Any = clock
    body = ActivityHeartbeat(loop, None, kept.append)
    body.start()
    body.heartbeat(b"1")
    body.heartbeat(b"2")
    body.heartbeat(b"3")
    assert kept == [b"1"]
    clock.advance(1.0)
    assert kept == [b"1", b"3"]


def test_nobody_listens_to_an_attempt_that_was_given_up(clock: Time) -> None:
    kept: list[bytes] = []
    loop: Any = clock
    body = ActivityHeartbeat(loop, None, kept.append)
    body.start()
    body.heartbeat(b"1")
    body.heartbeat(b"2")
    body.cancel()
    clock.advance(10.0)
    with pytest.raises(asyncio.CancelledError):
        body.heartbeat(b"3")
    assert kept == [b"1"]
