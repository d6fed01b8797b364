"""Messages between runs, and from outside: what is published is received, as it was sent, once and in order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel, Field

from edda import (
    ChannelError,
    ChannelMessage,
    EddaApp,
    EventValidationError,
    First,
    MessageTimeoutError,
    RetryPolicy,
    RunStatus,
    TerminalError,
    WorkflowContext,
    activity,
    publish,
    receive,
    send_to,
    sleep,
    subscribe,
    unsubscribe,
    wait_any,
    wait_event,
    workflow,
)
from edda.core.codec import Codec
from edda.core.model import EntryKind
from edda.errors import NotInWorkflowError, PayloadError, PayloadTooLargeError
from edda.testing import VirtualApp
from edda.workflow.workflow import registry

from .conditions import reason_of, until_status
from .conftest import RESTLESS, MakeApp
from .events import registered, result_of, send, until_waiting_for
from .histories import entries_of, kinds_in
from .messages import (
    LISTENERS,
    Held,
    hear,
    hear_one,
    is_timeout,
    logged,
    publish_all,
    run,
    start_receiving,
    until_logged,
)

SHORT = 0.05
AT_ONCE = RetryPolicy(initial_interval=0.0, max_attempts=3)


@pytest.fixture(autouse=True)
def listeners(empty_registry: None) -> None:
    for one in LISTENERS:
        registry.add(one)


# What arrives


async def test_a_message_arrives_with_its_id_its_metadata_and_its_time(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "news")
        message = await receive(ctx, "news")
        await sleep(ctx, 0.01)
        assert isinstance(message, ChannelMessage)
        return [message.id, message.channel, message.data, message.metadata, message.published_at]

    run_id = await start_receiving(app, listen)
    before = datetime.now(UTC)
    message_id = await publish(app, "news", {"text": "hello"}, {"trace": "a", "priority": 1})
    got = await result_of(app, run_id)
    assert got[:4] == [message_id, "news", {"text": "hello"}, {"trace": "a", "priority": 1}]
    assert abs(got[4] - before) < timedelta(minutes=1)


DATA = [
    {"a": [1, {"b": None}]},
    [1, "two", [3]],
    "text",
    "",
    b"\xff\x00\x80",
    b"",
    None,
    0,
    1.5,
    True,
    2**70,
    datetime(2030, 1, 1, tzinfo=UTC),
    {1: "one", (2, 3): "two"},
]


async def test_data_of_any_kind_arrives_as_it_was_sent(app: EddaApp) -> None:
    run_id = await start_receiving(app, hear, "news", len(DATA))
    await publish_all(app, "news", *DATA)
    assert await result_of(app, run_id) == DATA


async def test_data_of_any_kind_can_be_published_by_a_workflow(app: EddaApp) -> None:
    @workflow
    async def tell(ctx: WorkflowContext) -> None:
        for one in DATA:
            await publish(ctx, "news", one)

    run_id = await start_receiving(app, hear, "news", len(DATA))
    await run(app, tell)
    assert await result_of(app, run_id) == DATA


class Colour(Enum):
    RED = "red"


class Payment(BaseModel):
    order_id: str = Field(alias="orderId")
    amount: float
    due: date
    colour: Colour = Colour.RED


@dataclass
class Point:
    x: int
    y: int


async def test_a_model_arrives_as_the_model_that_is_asked_for(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "payments")
        await subscribe(ctx, "points")
        payment = await receive(ctx, "payments", model=Payment)
        point = await receive(ctx, "points", model=Point)
        assert isinstance(payment.data, Payment)
        assert isinstance(point.data, Point)
        return [payment.data.order_id, payment.data.due, payment.data.colour is Colour.RED, point.data.x]

    for payment, point in [
        (Payment(orderId="A-17", amount=9.99, due=date(2030, 1, 2)), Point(3, 4)),
        ({"orderId": "A-17", "amount": 9.99, "due": "2030-01-02", "colour": "red"}, {"x": 3, "y": 4}),
    ]:
        run_id = await start_receiving(app, listen)
        await publish(app, "payments", payment)
        await publish(app, "points", point)
        assert await result_of(app, run_id) == ["A-17", date(2030, 1, 2), True, 3]


async def test_data_that_does_not_fit_the_model_raises_with_every_field_and_the_next_one_follows(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[str]:
        await subscribe(ctx, "payments")
        with pytest.raises(EventValidationError) as complaint:
            await receive(ctx, "payments", model=Payment, message_id="first", on_invalid="raise")
        return [str(complaint.value), (await receive(ctx, "payments", model=Payment)).data.order_id]

    run_id = await start_receiving(app, listen)
    message_id = await publish(app, "payments", {"orderId": 7, "due": "soon"})
    await publish(app, "payments", Payment(orderId="A-17", amount=1, due=date(2030, 1, 2)))
    complaint, order_id = await result_of(app, run_id)
    lines = complaint.splitlines()
    assert lines[0] == f"message {message_id!r} on payments does not fit Payment:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["orderId", "amount", "due"]
    assert order_id == "A-17"


@pytest.mark.parametrize("channel", ["a", "A", "news/today", "a:1", "ünïcode 🎺", " ", "x" * 200, "__direct__"])
async def test_any_name_of_a_channel_is_its_own(app: EddaApp, channel: str) -> None:
    run_id = await start_receiving(app, hear, channel, 2)
    for other in (channel.swapcase() + "!", channel + " ", channel[:-1] + "-"):
        if len(other) <= 200:
            await publish(app, other, "for another")
    await publish_all(app, channel, 1, 2)
    assert await result_of(app, run_id) == [1, 2]


async def test_a_message_is_encrypted_like_everything_else(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mirror:
        def seal(self, data: bytes) -> bytes:
            return data[::-1]

        def open(self, data: bytes) -> bytes:
            return data[::-1]

    @workflow
    async def relay(ctx: WorkflowContext) -> None:
        await subscribe(ctx, "in", "competing")
        with pytest.raises(MessageTimeoutError):
            await receive(ctx, "in", SHORT)
        await publish(ctx, "out", (await receive(ctx, "in")).data)

    app = await make_app(codec=Codec(transform=Mirror()))
    out = await start_receiving(app, hear_one, "out")
    held = Held(app, monkeypatch, is_timeout)
    await app.start(relay)
    await held.reached()
    await publish(app, "in", "secret")
    held.let_go()
    assert await result_of(app, out) == "secret"
    stored = await app.engine.storage.events_of_type("channel/in", 0, 1 << 60, 10)
    assert len(stored) == 2, "as it was published, and as it was offered again"
    assert not any(b"secret" in one.event.body for one in stored)


# When it arrives


async def test_messages_wait_for_a_receiver_that_is_busy(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "news")
        await wait_event(ctx, "go")
        return [(await receive(ctx, "news")).data for _ in range(3)]

    run_id = await app.start(listen)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await publish_all(app, "news", 1, 2, 3)
    await send(app, "go")
    assert await result_of(app, run_id) == [1, 2, 3]


async def test_messages_arrive_in_the_order_of_their_publishing(app: EddaApp) -> None:
    run_id = await start_receiving(app, hear, "news", 30)
    await publish_all(app, "news", *range(30))
    assert await result_of(app, run_id) == list(range(30))


async def test_what_is_published_is_stored_when_publish_returns(make_app: MakeApp) -> None:
    """Whoever publishes may die at once."""
    app = await make_app()
    run_id = await start_receiving(app, hear, "news", 5)
    for number in range(5):
        door = await make_app(worker=False)
        await publish(door, "news", number)
        door.kill()
    assert await result_of(app, run_id) == list(range(5))


async def test_a_message_of_another_process_is_received_without_looking_for_it(make_app: MakeApp) -> None:
    app = await make_app(settings=replace(RESTLESS, poll=60.0))
    door = await make_app(worker=False)
    run_id = await app.start(hear, "news", 8)
    for number in range(8):
        await until_waiting_for(app, run_id, f"news:{number + 1}")
        await publish(door, "news", number)
    assert await result_of(app, run_id) == list(range(8))


async def test_a_run_that_waits_for_a_message_says_so(app: EddaApp) -> None:
    run_id = await start_receiving(app, hear_one, "news")
    assert await reason_of(app, run_id) == "a message on news (broadcast)"
    found = await app.find_instances(status="waiting_for_message")
    assert [one["instance_id"] for one in found["instances"]] == [run_id]


async def test_a_received_message_is_an_entry_of_the_history(app: EddaApp) -> None:
    run_id = await start_receiving(app, hear_one, "news")
    await publish(app, "news", 7)
    await result_of(app, run_id)
    assert await kinds_in(app, run_id) == [EntryKind.STEP, EntryKind.MESSAGE]
    (entry,) = await entries_of(app, run_id, EntryKind.MESSAGE)
    assert (entry.step, entry.name, entry.ok) == ("news:1", "news", True)


# Not for ever


async def test_a_receive_that_takes_too_long_raises_a_timeout_error_and_the_workflow_goes_on(app: EddaApp) -> None:
    live: list[str] = []

    @workflow
    async def listen(ctx: WorkflowContext) -> str:
        await subscribe(ctx, "news")
        try:
            await receive(ctx, "news", timedelta(seconds=SHORT))
        except TimeoutError as error:
            live.append(f"{type(error).__name__}: {error}")
        await sleep(ctx, 0.01)
        return live[-1]

    assert await run(app, listen) == "MessageTimeoutError: no message came on news within 0.05 seconds"
    assert len(live) >= 2, "it was replayed"
    assert len(set(live)) == 1


async def test_a_timeout_that_nobody_catches_fails_the_run_with_its_own_error(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> None:
        await subscribe(ctx, "news", "competing")
        await receive(ctx, "news", SHORT)

    with pytest.raises(MessageTimeoutError, match=r"^no message came on news within 0\.05 seconds"):
        await run(app, listen)


@pytest.mark.parametrize("mode", ["broadcast", "competing", "direct"])
async def test_a_message_that_is_there_is_received_even_in_no_time(app: EddaApp, mode: Any) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> Any:
        await subscribe(ctx, "news", mode)
        await wait_event(ctx, "go")
        there = (await receive(ctx, "news", timeout_seconds=0)).data
        with pytest.raises(MessageTimeoutError, match=r"^no message came on news$"):
            await receive(ctx, "news", timeout_seconds=0)
        return there

    run_id = await app.start(listen)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await publish(app, "news", 7, target_instance_id=run_id if mode == "direct" else None)
    await send(app, "go")
    assert await result_of(app, run_id) == 7


@pytest.mark.parametrize("mode", ["broadcast", "competing", "direct"])
async def test_a_message_that_comes_after_the_timeout_is_for_the_next_receive(app: EddaApp, mode: Any) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> Any:
        await subscribe(ctx, "news", mode)
        with pytest.raises(MessageTimeoutError):
            await receive(ctx, "news", SHORT)
        await wait_event(ctx, "go")
        return (await receive(ctx, "news")).data

    run_id = await app.start(listen)
    await until_waiting_for(app, run_id, "go:1")
    await publish(app, "news", 7, target_instance_id=run_id if mode == "direct" else None)
    await send(app, "go")
    assert await result_of(app, run_id) == 7


async def test_a_month_without_a_message_is_over_at_its_moment(edda_app: VirtualApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> float:
        begun = ctx.now()
        await subscribe(ctx, "news")
        for _ in range(3):
            with pytest.raises(MessageTimeoutError):
                await receive(ctx, "news", timedelta(days=10))
        return (ctx.now() - begun).total_seconds()

    assert await edda_app.run(listen) == pytest.approx(30 * 86_400, abs=1)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", True])
async def test_a_timeout_that_is_no_time_is_refused(app: EddaApp, timeout: Any) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> None:
        await subscribe(ctx, "news")
        await receive(ctx, "news", timeout)

    with pytest.raises(ValueError, match=r"receive\(timeout_seconds=\): expected a number of seconds"):
        await run(app, listen)


# Branches


@pytest.mark.parametrize("mode", ["broadcast", "competing", "direct"])
async def test_two_branches_that_receive_at_once_get_different_messages(app: EddaApp, mode: Any) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "news", mode)
        both = await asyncio.gather(receive(ctx, "news"), receive(ctx, "news"))
        return [*sorted(message.data for message in both), (await receive(ctx, "news")).data]

    run_id = await start_receiving(app, listen)
    for number in range(3):
        await publish(app, "news", number, target_instance_id=run_id if mode == "direct" else None)
    assert await result_of(app, run_id) == [0, 1, 2]


@pytest.mark.parametrize("mode", ["broadcast", "competing", "direct"])
async def test_a_receive_races_with_a_timer_either_way(app: EddaApp, mode: Any) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "news", mode)
        lost: First[Any] = await wait_any(ctx, message=receive(ctx, "news"), late=sleep(ctx, SHORT))
        await wait_event(ctx, "go")
        won: First[Any] = await wait_any(ctx, message=receive(ctx, "news"), late=sleep(ctx, 3600))
        return [lost.name, won.name, won.value.data]

    run_id = await app.start(listen)
    await until_waiting_for(app, run_id, "go:1")
    await publish(app, "news", 7, target_instance_id=run_id if mode == "direct" else None)
    await send(app, "go")
    assert await result_of(app, run_id) == ["late", "message", 7]


async def test_a_loop_over_races_of_channels_misses_nothing(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> dict[str, list[int]]:
        got: dict[str, list[int]] = {"a": [], "b": []}
        await subscribe(ctx, "a")
        await subscribe(ctx, "b", "competing")
        for _ in range(20):
            first: First[Any] = await wait_any(ctx, a=receive(ctx, "a"), b=receive(ctx, "b"))
            got[str(first.name)].append(first.value.data)
        return got

    run_id = await start_receiving(app, listen)
    await asyncio.gather(*(publish(app, name, number) for number in range(10) for name in "ab"))
    got = await result_of(app, run_id)
    assert got["a"] == list(range(10))
    assert sorted(got["b"]) == list(range(10)), "what a loser had taken went back, to the end of the line"


async def test_a_branch_that_subscribes_later_does_not_begin_the_subscription_of_the_first_anew(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look where the channel stands; a message comes between the two looks."""
    last_event, looks = app.client.last_event, 0

    async def look_slowly() -> int:
        nonlocal looks
        looks += 1
        if looks == 2:
            await until_logged(app, "news", 1)
        return await last_event()

    @workflow
    async def listen(ctx: WorkflowContext) -> Any:
        async def speak() -> None:
            await subscribe(ctx, "news")
            await publish(ctx, "news", "between")

        await asyncio.gather(speak(), subscribe(ctx, "news"))
        return (await receive(ctx, "news", 20)).data

    monkeypatch.setattr(app.client, "last_event", look_slowly)
    assert await run(app, listen) == "between"
    assert looks == 2


@pytest.mark.parametrize("mode", ["broadcast", "competing"])
async def test_a_named_receive_does_not_take_what_comes_late_for_another_of_that_name(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[str]:
        await subscribe(ctx, "a", mode)
        await subscribe(ctx, "b", mode)
        with pytest.raises(MessageTimeoutError):
            await receive(ctx, "a", SHORT, "answer")
        answer = await receive(ctx, "b", message_id="answer")
        return [answer.channel, (await receive(ctx, "a", message_id="answer")).channel]

    held = Held(app, monkeypatch, is_timeout)
    run_id = await app.start(listen)
    await held.reached()
    await publish(app, "a", 1)
    held.let_go()
    await until_waiting_for(app, run_id, "answer")
    await publish(app, "b", 1)
    assert await result_of(app, run_id) == ["b", "a"]


# Publishing


async def test_a_workflow_publishes_once_however_often_it_is_replayed(app: EddaApp) -> None:
    ids: list[str] = []

    @workflow
    async def tell(ctx: WorkflowContext) -> None:
        ids.append(await publish(ctx, "news", "hello", {"by": "me"}))
        for _ in range(3):
            await sleep(ctx, 0.01)

    run_id = await start_receiving(app, hear, "news", 2)
    await run(app, tell)
    assert len(ids) >= 3, "it was replayed"
    assert len(set(ids)) == 1
    await publish(app, "news", "end")
    assert await result_of(app, run_id) == ["hello", "end"]


async def test_what_an_activity_publishes_goes_out_with_its_outcome(app: EddaApp) -> None:
    """Not while it runs, not if it fails, and once if a later attempt succeeds."""
    attempts: list[list[Any]] = []

    @activity(retry_policy=AT_ONCE)
    async def tell(ctx: WorkflowContext) -> str:
        message_id = await publish(ctx, "news", ctx.attempt)
        await publish(ctx, "news", "and more")
        attempts.append(await logged(app, "news"))
        if ctx.attempt < 3:
            raise ValueError("not yet")
        return message_id

    @workflow
    async def talk(ctx: WorkflowContext) -> str:
        return await tell(ctx)

    message_id = await run(app, talk)
    assert attempts == [[], [], []]
    await until_logged(app, "news", 2)
    assert await logged(app, "news") == [3, "and more"]
    stored = await app.engine.storage.find_event("", message_id)
    assert stored is not None


async def test_an_activity_that_fails_for_good_has_published_nothing(app: EddaApp) -> None:
    @activity
    async def tell(ctx: WorkflowContext) -> None:
        await publish(ctx, "news", "never")
        raise TerminalError("no")

    @activity
    async def tell_all(ctx: WorkflowContext) -> None:
        await publish(ctx, "news", "always")

    @workflow
    async def talk(ctx: WorkflowContext) -> None:
        with pytest.raises(TerminalError):
            await tell(ctx)
        await tell_all(ctx)

    await run(app, talk)
    await until_logged(app, "news", 1)
    assert await logged(app, "news") == ["always"]


async def test_a_run_receives_what_it_publishes_itself(app: EddaApp) -> None:
    @workflow
    async def echo(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "news")
        for number in range(3):
            await publish(ctx, "news", number)
        return [(await receive(ctx, "news")).data for _ in range(3)]

    assert await run(app, echo) == [0, 1, 2]


async def test_two_runs_talk_to_each_other(app: EddaApp) -> None:
    @workflow
    async def ping(ctx: WorkflowContext) -> list[int]:
        await subscribe(ctx, "pong")
        heard = []
        for number in range(10):
            await publish(ctx, "ping", number)
            heard.append((await receive(ctx, "pong")).data)
        return heard

    @workflow
    async def pong(ctx: WorkflowContext) -> None:
        await subscribe(ctx, "ping")
        for _ in range(10):
            await publish(ctx, "pong", -(await receive(ctx, "ping")).data)

    other = await start_receiving(app, pong)
    assert await run(app, ping) == [-number for number in range(10)]
    await result_of(app, other)


async def test_the_last_words_of_a_run_are_published(app: EddaApp) -> None:
    """Also if the app that ran it is shut down right behind it."""

    @workflow
    async def tell(ctx: WorkflowContext) -> None:
        await publish(ctx, "news", "goodbye")

    run_id = await start_receiving(app, hear_one, "news")
    await run(app, tell)
    assert await result_of(app, run_id) == "goodbye"


async def test_messages_that_are_too_large_all_together_arrive_all_the_same(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty megabytes are more than some servers take at once."""

    @workflow
    async def tell(ctx: WorkflowContext) -> None:
        for number in range(20):
            await publish(ctx, "news", [number, "x" * 1_500_000])

    forward, may_forward = app.engine.staging.move_batch, asyncio.Event()

    async def forward_later() -> bool:
        await may_forward.wait()
        return await forward()

    monkeypatch.setattr(app.engine.staging, "move_batch", forward_later)
    await run(app, tell)
    may_forward.set()
    await until_logged(app, "news", 20)
    assert [number for number, _ in await logged(app, "news")] == list(range(20))


async def test_a_message_that_is_too_large_is_refused_before_anything_is_stored(app: EddaApp) -> None:
    with pytest.raises(PayloadTooLargeError, match=r"its largest part is \$\[\d\] with 3,000,002 bytes"):
        await publish(app, "news", "x" * 3_000_000)
    assert await logged(app, "news") == []


async def test_data_that_cannot_be_stored_is_refused_where_it_is_published(app: EddaApp) -> None:
    @workflow
    async def tell(ctx: WorkflowContext) -> str:
        with pytest.raises(PayloadError) as refused:
            await publish(ctx, "news", object())
        return str(refused.value)

    assert "object" in await run(app, tell)
    with pytest.raises(PayloadError):
        await publish(app, "news", {"a": object()})


# Writing to one run


async def test_send_to_reaches_the_run_and_nobody_else(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "orders", "direct")
        first = await receive(ctx, "__direct__")
        second = await receive(ctx, "orders")
        return [first.data, second.data, second.metadata]

    a, b = [await start_receiving(app, listen) for _ in range(2)]
    for run_id in (b, a):
        assert await send_to(app, run_id, f"for {run_id}") is True
        assert await send_to(app, run_id, "and this", "orders", {"n": 1}) is True
    for run_id in (a, b):
        assert await result_of(app, run_id) == [f"for {run_id}", "and this", {"n": 1}]


async def test_send_to_says_whether_there_is_somebody_to_receive(app: EddaApp) -> None:
    @workflow
    async def write(ctx: WorkflowContext, addresses: list[str]) -> list[bool]:
        sent = [await send_to(ctx, address, "hello") for address in addresses]
        await sleep(ctx, 0.01)
        return [*sent, *await write_again(ctx, addresses)]

    @activity
    async def write_again(ctx: WorkflowContext, addresses: list[str]) -> list[bool]:
        return [await send_to(ctx, address, "hello again") for address in addresses]

    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        return [(await receive(ctx, "__direct__")).data for _ in range(3)]

    @workflow
    async def nothing(ctx: WorkflowContext) -> None: ...

    ended = await app.start(nothing)
    await result_of(app, ended)
    run_id = await start_receiving(app, listen)
    assert [await send_to(app, address, 1) for address in (run_id, ended, "unknown")] == [True, False, False]
    assert await run(app, write, [run_id, ended, "unknown"]) == [True, False, False] * 2
    assert await result_of(app, run_id) == [1, "hello", "hello again"]


async def test_a_child_answers_the_run_that_started_it(app: EddaApp) -> None:
    @workflow
    async def child(ctx: WorkflowContext, parent: str) -> None:
        await send_to(ctx, parent, f"from {ctx.instance_id}")

    @workflow
    async def parent(ctx: WorkflowContext) -> bool:
        started = await child.start(ctx.instance_id)
        return (await receive(ctx, "__direct__", model=str)).data == f"from {started}"

    assert await run(app, parent) is True


# What is not allowed


async def test_receive_without_a_subscription_is_refused(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[str]:
        complaints = []
        for _ in range(2):
            with pytest.raises(ChannelError) as refused:
                await receive(ctx, "news")
            complaints.append(str(refused.value))
            await subscribe(ctx, "news")
            await unsubscribe(ctx, "news")
            await unsubscribe(ctx, "news")
        return complaints

    complaint = "receive('news'): this run is not subscribed; call subscribe(ctx, 'news') first"
    assert await run(app, listen) == [complaint] * 2


async def test_a_second_mode_at_the_same_time_is_refused(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> str:
        await subscribe(ctx, "news", "competing")
        await subscribe(ctx, "news", "competing")
        with pytest.raises(ChannelError) as refused:
            await subscribe(ctx, "news", "broadcast")
        await unsubscribe(ctx, "news")
        await subscribe(ctx, "news")
        return str(refused.value)

    complaint = "subscribe('news', 'broadcast'): this run is subscribed as 'competing'; unsubscribe first"
    assert await run(app, listen) == complaint


@pytest.mark.parametrize("channel", ["", "x" * 201, 7, None, "a\x00b", "half \ud800"])
async def test_a_channel_without_a_proper_name_is_refused(app: EddaApp, channel: Any) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[str]:
        complaints = []
        for call in (
            lambda: subscribe(ctx, channel),
            lambda: unsubscribe(ctx, channel),
            lambda: receive(ctx, channel),
            lambda: publish(ctx, channel, 1),
            lambda: send_to(ctx, "somebody", 1, channel),
        ):
            with pytest.raises(ValueError, match=r"^channel ") as refused:
                await call()
            complaints.append(ascii(str(refused.value)))
        return complaints

    complaints = await run(app, listen)
    assert complaints == [ascii(f"channel {channel!r}: expected a text of 1 to 200 characters")] * 5
    with pytest.raises(ValueError, match=r"^channel "):
        await publish(app, channel, 1)


async def test_an_unknown_mode_is_refused(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> None:
        mode: Any = "loud"
        await subscribe(ctx, "news", mode)

    with pytest.raises(ValueError, match=r"^mode 'loud': expected one of broadcast, competing, direct"):
        await run(app, listen)


async def test_what_belongs_into_a_workflow_is_refused_in_an_activity(app: EddaApp) -> None:
    @activity
    async def try_all(ctx: WorkflowContext) -> list[str]:
        complaints = []
        for verb in (subscribe, unsubscribe):
            with pytest.raises(NotInWorkflowError) as refused:
                await verb(ctx, "news")
            complaints.append(str(refused.value))
        return complaints

    @workflow
    async def talk(ctx: WorkflowContext) -> list[str]:
        return await try_all(ctx)

    assert await run(app, talk) == [
        "subscribe() works in the code of a workflow only, not in an activity",
        "unsubscribe() works in the code of a workflow only, not in an activity",
    ]


async def test_publishing_through_an_app_in_the_body_of_a_workflow_is_refused(app: EddaApp) -> None:
    """It would happen again at every replay."""

    @workflow
    async def talk(ctx: WorkflowContext) -> list[str]:
        complaints = []
        for call in (lambda: publish(app, "news", 1), lambda: send_to(app, ctx.instance_id, 1)):
            with pytest.raises(NotInWorkflowError) as refused:
                await call()
            complaints.append(str(refused.value))
        return complaints

    assert await run(app, talk) == [
        "publish() through an app in the code of a workflow would be repeated by every replay: pass ctx instead",
        "send_to() through an app in the code of a workflow would be repeated by every replay: pass ctx instead",
    ]
    assert await logged(app, "news") == []


async def test_publishing_through_something_that_is_no_app_is_refused() -> None:
    wrong: Any
    for wrong in ("news", None, 7):
        with pytest.raises(TypeError, match=r"^publish\(\): expected the context of a workflow or an app, got "):
            await publish(wrong, "news", 1)
        with pytest.raises(TypeError, match=r"^send_to\(\): expected the context of a workflow or an app, got "):
            await send_to(wrong, "somebody", 1)


async def test_a_session_inside_a_workflow_is_refused(app: EddaApp) -> None:
    @workflow
    async def talk(ctx: WorkflowContext) -> None:
        await publish(ctx, "news", 1, session=object())

    with pytest.raises(ValueError, match=r"^publish\(session=\.\.\.\) is for code outside workflows"):
        await run(app, talk)


# Its neighbours


async def test_an_event_whose_type_looks_like_a_channel_is_no_message(app: EddaApp) -> None:
    """Neither stands in the other's way, whoever comes first."""

    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "news")
        event = await wait_event(ctx, "channel/news", match={"n": 1})
        return [event.data, (await receive(ctx, "news")).data]

    for _ in range(2):
        run_id = await app.start(listen)
        await until_waiting_for(app, run_id, "channel.news:1")
        async with asyncio.timeout(20):
            await publish(app, "news", {"n": 1})
            await send(app, "channel/news", {"n": 1})
        assert await result_of(app, run_id) == [{"n": 1}, {"n": 1}]


async def test_a_run_that_is_over_leaves_nothing_behind(app: EddaApp) -> None:
    run_id = await start_receiving(app, hear, "news", 2)
    assert await registered(app, run_id) == ["news:1"]
    await publish_all(app, "news", 1, 2, 3)
    await result_of(app, run_id)
    assert await registered(app, run_id) == []
