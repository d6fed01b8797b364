"""Broadcast, competing, direct: who gets a message, and who gets it if they do not take it after all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from edda import (
    EddaApp,
    First,
    MessageTimeoutError,
    RetryPolicy,
    RunStatus,
    TerminalError,
    WorkflowCancelledError,
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
from edda.core.model import BatchResult, EntryKind, Fence, RunWrite
from edda.errors import NotInWorkflowError, StorageRejectedError
from edda.workflow.workflow import registry

from .conditions import until_status
from .conftest import RESTLESS, MakeApp
from .events import registered, result_of, send, until_waiting_for
from .histories import entries_of, generation_of, kinds_in
from .messages import (
    LISTENERS,
    Held,
    hear,
    hear_one,
    is_end,
    is_recur,
    is_timeout,
    publish_all,
    run,
    start_receiving,
)

SHORT = 0.05
IN_MEMORY = replace(RESTLESS, linger=5.0)


@workflow
async def take_one(ctx: WorkflowContext, channel: str = "jobs") -> Any:
    await subscribe(ctx, channel, "competing")
    return (await receive(ctx, channel)).data


@workflow
async def take(ctx: WorkflowContext, count: int, channel: str = "jobs") -> list[Any]:
    await subscribe(ctx, channel, "competing")
    return [(await receive(ctx, channel)).data for _ in range(count)]


@workflow
async def take_rest(ctx: WorkflowContext, channel: str) -> list[Any]:
    """What is there, without waiting for more."""
    await subscribe(ctx, channel, "competing")
    taken = []
    while True:
        try:
            taken.append((await receive(ctx, channel, 0)).data)
        except MessageTimeoutError:
            return taken


@pytest.fixture(autouse=True)
def listeners(empty_registry: None) -> None:
    for one in (*LISTENERS, take_one, take, take_rest):
        registry.add(one)


# Broadcast


async def test_every_subscriber_gets_every_message_in_order(app: EddaApp) -> None:
    run_ids = await asyncio.gather(*(start_receiving(app, hear, "news", 10) for _ in range(5)))
    await publish_all(app, "news", *range(10))
    for run_id in run_ids:
        assert await result_of(app, run_id) == list(range(10))


async def test_a_subscriber_gets_what_is_published_from_its_subscription_on(app: EddaApp) -> None:
    await publish(app, "news", "before")
    run_id = await start_receiving(app, hear, "news", 2)
    await publish_all(app, "news", "first", "second")
    assert await result_of(app, run_id) == ["first", "second"]


async def test_a_subscription_begins_where_subscribe_returns_not_where_receive_is_called(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await wait_event(ctx, "subscribe")
        await subscribe(ctx, "news")
        await wait_event(ctx, "receive")
        return [(await receive(ctx, "news")).data for _ in range(2)]

    run_id = await app.start(listen)
    await until_waiting_for(app, run_id, "subscribe:1")
    await publish(app, "news", 1)
    await send(app, "subscribe")
    await until_waiting_for(app, run_id, "receive:1")
    await publish_all(app, "news", 2, 3)
    await send(app, "receive")
    assert await result_of(app, run_id) == [2, 3]


async def test_subscribing_again_changes_nothing(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        got = []
        for _ in range(3):
            await subscribe(ctx, "news")
            await wait_event(ctx, "go")
            got.append((await receive(ctx, "news")).data)
        return got

    run_id = await app.start(listen)
    await until_waiting_for(app, run_id, "go:1")
    await publish_all(app, "news", 1, 2, 3)
    for _ in range(3):
        await send(app, "go")
    assert await result_of(app, run_id) == [1, 2, 3]
    steps = await entries_of(app, run_id, EntryKind.STEP)
    assert [entry.step for entry in steps] == ["subscribe:1"]


async def test_who_subscribes_anew_does_not_get_what_was_published_meanwhile(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "news")
        first = await receive(ctx, "news")
        await unsubscribe(ctx, "news")
        await wait_event(ctx, "go")
        await subscribe(ctx, "news")
        await wait_event(ctx, "go")
        return [first.data, (await receive(ctx, "news")).data]

    run_id = await start_receiving(app, listen)
    await publish(app, "news", 1)
    await until_waiting_for(app, run_id, "go:1")
    await publish(app, "news", "missed")
    await send(app, "go")
    await until_waiting_for(app, run_id, "go:2")
    await publish(app, "news", 2)
    await send(app, "go")
    assert await result_of(app, run_id) == [1, 2]


async def test_a_message_that_comes_with_a_timeout_keeps_its_place_for_the_next_receive(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "news")
        with pytest.raises(MessageTimeoutError):
            await receive(ctx, "news", SHORT)
        await wait_event(ctx, "go")
        return [(await receive(ctx, "news")).data for _ in range(3)]

    held = Held(app, monkeypatch, is_timeout)
    run_id = await app.start(listen)
    await held.reached()
    await publish_all(app, "news", 0, 1, 2)
    held.let_go()
    await send(app, "go")
    assert await result_of(app, run_id) == [0, 1, 2]
    assert EntryKind.LATE_EVENT in await kinds_in(app, run_id)


# Competing


async def test_every_message_goes_to_one_of_those_who_compete(app: EddaApp) -> None:
    run_ids = await asyncio.gather(*(start_receiving(app, take, 5) for _ in range(4)))
    await asyncio.gather(*(publish(app, "jobs", number) for number in range(20)))
    taken = [await result_of(app, run_id) for run_id in run_ids]
    assert sorted(number for some in taken for number in some) == list(range(20))


async def test_messages_wait_for_the_first_who_competes(app: EddaApp) -> None:
    """Also from before anybody was started."""
    await publish_all(app, "jobs", *range(6))
    taken = [await run(app, take, 2) for _ in range(3)]
    assert taken == [[0, 1], [2, 3], [4, 5]]


async def test_one_who_competes_alone_takes_in_order(app: EddaApp) -> None:
    run_id = await start_receiving(app, take, 20)
    await publish_all(app, "jobs", *range(20))
    assert await result_of(app, run_id) == list(range(20))


async def test_a_message_that_comes_with_a_timeout_goes_to_another_who_competes(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def impatient(ctx: WorkflowContext) -> None:
        await subscribe(ctx, "jobs", "competing")
        with pytest.raises(MessageTimeoutError):
            await receive(ctx, "jobs", SHORT)
        await wait_event(ctx, "never")

    held = Held(app, monkeypatch, is_timeout)
    loser = await app.start(impatient)
    await held.reached()
    message_id = await publish(app, "jobs", "work")
    held.let_go()

    @workflow
    async def patient(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "jobs", "competing")
        message = await receive(ctx, "jobs")
        return [message.data, message.id]

    assert await run(app, patient) == ["work", message_id]
    await until_waiting_for(app, loser, "never:1")
    assert EntryKind.LATE_EVENT in await kinds_in(app, loser)


async def test_a_message_that_goes_back_is_no_second_message_for_those_who_get_every_one(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    @workflow
    async def impatient(ctx: WorkflowContext) -> Any:
        await subscribe(ctx, "jobs", "competing")
        with pytest.raises(MessageTimeoutError):
            await receive(ctx, "jobs", SHORT)
        return (await receive(ctx, "jobs")).data

    observer = await start_receiving(app, hear, "jobs", 2)
    held = Held(app, monkeypatch, is_timeout)
    run_id = await app.start(impatient)
    await held.reached()
    await publish(app, "jobs", "work")
    held.let_go()
    assert await result_of(app, run_id) == "work"
    await publish(app, "jobs", "more")
    assert await result_of(app, observer) == ["work", "more"]


async def test_the_message_of_a_run_that_is_cancelled_goes_to_another(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(app, monkeypatch, is_end)
    doomed = await start_receiving(app, take_one)
    await app.cancel(doomed)
    await held.reached()
    await publish(app, "jobs", "work")
    held.let_go()
    with pytest.raises(WorkflowCancelledError):
        await result_of(app, doomed)
    assert await run(app, take_one) == "work"


async def test_the_message_of_a_run_that_ends_otherwise_goes_to_another(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with a receive of its own under way; the message comes while that is being written."""

    @workflow
    async def hasty(ctx: WorkflowContext) -> str:
        await subscribe(ctx, "jobs", "competing")
        first: First[Any] = await wait_any(ctx, job=receive(ctx, "jobs"), go=wait_event(ctx, "go"))
        return str(first.name)

    held = Held(app, monkeypatch, is_end)
    doomed = await start_receiving(app, hasty)
    await until_waiting_for(app, doomed, "go:1", "jobs:1")
    await send(app, "go")
    await held.reached()
    await publish(app, "jobs", "work")
    held.let_go()
    assert await result_of(app, doomed) == "go"
    assert await run(app, take_one) == "work"


async def test_the_message_of_a_run_whose_record_is_refused_goes_to_another(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run fails; the message comes while that is being written, and does not set it going again."""

    @activity
    async def work(ctx: WorkflowContext) -> None: ...

    @workflow
    async def odd(ctx: WorkflowContext) -> None:
        await subscribe(ctx, "jobs", "competing")
        job = asyncio.create_task(receive(ctx, "jobs"))
        await wait_event(ctx, "go")
        await work.with_id("no database stores a \0")(ctx)
        await job

    held = Held(app, monkeypatch, is_end)
    doomed = await app.start(odd)
    await until_waiting_for(app, doomed, "go:1", "jobs:1")
    await send(app, "go")
    await held.reached()
    await publish(app, "jobs", "work")
    held.let_go()
    with pytest.raises(StorageRejectedError):
        await result_of(app, doomed)
    assert EntryKind.MESSAGE not in await kinds_in(app, doomed)
    assert await run(app, take_one) == "work"


async def test_messages_that_go_back_and_forth_are_neither_lost_nor_doubled(app: EddaApp) -> None:
    """Many who lose patience at every moment, and a few who have it."""

    @workflow
    async def impatient(ctx: WorkflowContext) -> list[Any]:
        taken: list[Any] = []
        await subscribe(ctx, "jobs", "competing")
        for _ in range(10):
            first: First[Any] = await wait_any(ctx, job=receive(ctx, "jobs"), late=sleep(ctx, 0.02))
            if first.name == "job":
                taken.append(first.value.data)
        return taken

    run_ids = [await app.start(impatient) for _ in range(6)]
    for number in range(40):
        await publish(app, "jobs", number)
        await asyncio.sleep(0.005)
    taken = [number for run_id in run_ids for number in await result_of(app, run_id)]
    left = 40 - len(taken)
    assert sorted([*taken, *await run(app, take, left)]) == list(range(40))


async def test_messages_that_went_back_are_forgotten(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that lives for ever does not carry them from generation to generation."""
    app = await make_app()

    @workflow
    async def impatient(ctx: WorkflowContext, number: int = 0) -> Any:
        await subscribe(ctx, "jobs", "competing")
        if number == 0:
            with pytest.raises(MessageTimeoutError):
                await receive(ctx, "jobs", SHORT)
        await sleep(ctx, 0.01)
        if number < 3:
            await ctx.recur(number + 1)
        return (await receive(ctx, "jobs")).data

    held = Held(app, monkeypatch, is_timeout)
    run_id = await app.start(impatient)
    await held.reached()
    await publish(app, "jobs", "work")
    held.let_go()
    assert await result_of(app, run_id) == "work"
    (stray,) = [entry for entry in await app.handle(run_id).history(0) if entry.kind is EntryKind.LATE_EVENT]
    (begun,) = await entries_of(app, run_id, EntryKind.RECUR)
    assert stray.step == "jobs:1"
    assert app.engine.codec.decode(begun.value)[1] == []


async def test_runs_of_several_processes_compete(make_app: MakeApp) -> None:
    apps = [await make_app() for _ in range(3)]
    door = await make_app(worker=False)

    @workflow
    async def tell(ctx: WorkflowContext, first: int) -> None:
        for number in range(first, first + 10):
            await publish(ctx, "jobs", number)

    run_ids = [await app.start(take, 5) for app in apps for _ in range(4)]
    telling = [app.start(tell, 10 * place) for place, app in enumerate(apps)]
    await asyncio.gather(*telling, publish_all(door, "jobs", *range(30, 60)))
    taken = [number for run_id in run_ids for number in await result_of(door, run_id)]
    assert sorted(taken) == list(range(60))


async def test_two_branches_of_one_run_compete_with_each_other(app: EddaApp) -> None:
    @workflow
    async def share(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "jobs", "competing")

        async def work() -> list[Any]:
            return [(await receive(ctx, "jobs")).data for _ in range(10)]

        both = await asyncio.gather(work(), work())
        return sorted(number for some in both for number in some)

    run_id = await app.start(share)
    await publish_all(app, "jobs", *range(20))
    assert await result_of(app, run_id) == list(range(20))


async def test_those_who_compete_and_those_who_get_everything_do_not_disturb_each_other(app: EddaApp) -> None:
    every = [await start_receiving(app, hear, "jobs", 6) for _ in range(2)]
    some = [await start_receiving(app, take, 3) for _ in range(2)]
    await publish_all(app, "jobs", *range(6))
    for run_id in every:
        assert await result_of(app, run_id) == list(range(6))
    assert sorted([number for run_id in some for number in await result_of(app, run_id)]) == list(range(6))


async def test_a_run_can_change_from_getting_everything_to_competing(app: EddaApp) -> None:
    """What it had as a subscriber is not taken away from the others: it may come again, as somebody's job."""

    @workflow
    async def change(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "jobs")
        heard = (await receive(ctx, "jobs")).data
        await unsubscribe(ctx, "jobs")
        await subscribe(ctx, "jobs", "competing")
        return [heard, (await receive(ctx, "jobs")).data]

    run_id = await start_receiving(app, change)
    await publish_all(app, "jobs", 1, 2)
    assert await result_of(app, run_id) == [1, 2]
    assert await run(app, take_one) == 1


# In an activity


on_a_database = pytest.mark.parametrize("database", ["sqlite", "postgres", "mysql"], indirect=True)
"""An activity takes a message in its own transaction."""


@on_a_database
async def test_an_activity_takes_a_message_and_it_is_gone(app: EddaApp) -> None:
    @activity
    async def work(ctx: WorkflowContext) -> Any:
        message = await receive(ctx, "jobs")
        await publish(ctx, "done", message.data)
        return message.data

    @workflow
    async def job(ctx: WorkflowContext) -> Any:
        return await work(ctx)

    done = await start_receiving(app, hear, "done", 3)
    await publish_all(app, "jobs", 1, 2, 3)
    assert sorted([await run(app, job) for _ in range(3)]) == [1, 2, 3]
    assert sorted(await result_of(app, done)) == [1, 2, 3]
    assert await run(app, take_rest, "jobs") == []


@on_a_database
async def test_activities_at_the_same_time_take_different_messages(app: EddaApp) -> None:
    @activity
    async def work(ctx: WorkflowContext) -> Any:
        return (await receive(ctx, "jobs", 20)).data

    @workflow
    async def job(ctx: WorkflowContext) -> list[Any]:
        return sorted(await asyncio.gather(*(work(ctx) for _ in range(5))))

    run_id = await app.start(job)
    await publish_all(app, "jobs", *range(5))
    assert await result_of(app, run_id) == list(range(5))


@on_a_database
async def test_the_message_of_an_activity_that_fails_goes_to_another_at_once(app: EddaApp) -> None:
    @activity
    async def work(ctx: WorkflowContext) -> None:
        assert (await receive(ctx, "jobs")).data == "work"
        raise TerminalError("no")

    @workflow
    async def job(ctx: WorkflowContext) -> None:
        await work(ctx)

    await publish(app, "jobs", "work")
    with pytest.raises(TerminalError):
        await run(app, job)
    assert await app.handle(await app.start(take_one)).result(timeout=20) == "work"


@on_a_database
async def test_a_message_that_was_taken_in_a_block_that_is_rolled_back_goes_to_another_at_once(app: EddaApp) -> None:
    @activity
    async def work(ctx: WorkflowContext) -> list[Any]:
        async with ctx.transaction():
            kept = (await receive(ctx, "jobs")).data
            with pytest.raises(ValueError, match="no"):
                await give_up(ctx)
        return [kept]

    async def give_up(ctx: WorkflowContext) -> None:
        async with ctx.transaction():
            assert (await receive(ctx, "jobs")).data == 2
            raise ValueError("no")

    @workflow
    async def job(ctx: WorkflowContext) -> list[Any]:
        return await work(ctx)

    await publish_all(app, "jobs", 1, 2)
    assert await run(app, job) == [1]
    assert await run(app, take_one) == 2
    assert await run(app, take_rest, "jobs") == []


@on_a_database
async def test_an_activity_waits_for_a_message_as_long_as_it_says(app: EddaApp) -> None:
    @activity(retry_policy=RetryPolicy(max_attempts=1))
    async def work(ctx: WorkflowContext, patience: float | None) -> str:
        try:
            return str((await receive(ctx, "jobs", patience)).data)
        except MessageTimeoutError as error:
            return str(error)

    @workflow
    async def job(ctx: WorkflowContext, patience: float | None = None) -> str:
        return await work(ctx, patience)

    assert await run(app, job) == "no message came on jobs"
    assert await run(app, job, 0.2) == "no message came on jobs within 0.2 seconds"
    run_id = await app.start(job, 20)
    await publish(app, "jobs", "work")
    assert await result_of(app, run_id) == "work"


@on_a_database
async def test_a_sync_activity_cannot_receive(app: EddaApp) -> None:
    @activity
    def work(ctx: WorkflowContext) -> str:
        with pytest.raises(NotInWorkflowError) as refused:
            asyncio.run(receive(ctx, "jobs"))
        return str(refused.value)

    @workflow
    async def job(ctx: WorkflowContext) -> str:
        return await work(ctx)

    await publish(app, "jobs", "work")
    assert await run(app, job) == "receive() needs an `async def` activity: work:1 runs in a thread"
    assert await run(app, take_one) == "work"


# Direct


async def test_a_message_to_one_run_waits_until_it_receives(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await wait_event(ctx, "go")
        await subscribe(ctx, "mine", "direct")
        return [(await receive(ctx, "mine")).data, (await receive(ctx, "__direct__")).data]

    run_id = await app.start(listen)
    await until_status(app, run_id, RunStatus.WAITING_FOR_EVENT)
    await send_to(app, run_id, 1, "mine")
    await send_to(app, run_id, 2)
    await send(app, "go")
    assert await result_of(app, run_id) == [1, 2]


async def test_a_message_to_one_run_is_for_nobody_else_on_the_channel(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> Any:
        await subscribe(ctx, "news", "direct")
        return (await receive(ctx, "news")).data

    everybody, one, mine = [
        await start_receiving(app, hear_one, "news"),
        await start_receiving(app, take_one, "news"),
        await start_receiving(app, listen),
    ]
    await publish(app, "news", "for one", target_instance_id=mine)
    assert await result_of(app, mine) == "for one"
    await publish(app, "news", "for all")
    assert await result_of(app, everybody) == "for all"
    assert await result_of(app, one) == "for all"


# Beginning anew


@pytest.mark.parametrize("mode", ["broadcast", "competing", "direct"])
async def test_a_subscription_goes_over_to_the_next_generation(app: EddaApp, mode: Any) -> None:
    @workflow
    async def listen(ctx: WorkflowContext, got: list[Any]) -> list[Any]:
        if not got:
            await subscribe(ctx, "news", mode)
        got.append((await receive(ctx, "news")).data)
        if len(got) < 10:
            await ctx.recur(got)
        return got

    run_id = await start_receiving(app, listen, [])
    for number in range(10):
        await publish(app, "news", number, target_instance_id=run_id if mode == "direct" else None)
    assert await result_of(app, run_id) == list(range(10))
    assert await generation_of(app, run_id) == 9


@pytest.mark.parametrize("mode", ["broadcast", "competing", "direct"])
async def test_subscribing_anew_in_every_generation_misses_nothing(app: EddaApp, mode: Any) -> None:
    @workflow
    async def listen(ctx: WorkflowContext, got: list[Any]) -> list[Any]:
        await subscribe(ctx, "news", mode)
        got.append((await receive(ctx, "news")).data)
        await sleep(ctx, 0.01)
        if len(got) < 5:
            await ctx.recur(got)
        return got

    run_id = await start_receiving(app, listen, [])
    for number in range(5):
        await publish(app, "news", number, target_instance_id=run_id if mode == "direct" else None)
    assert await result_of(app, run_id) == list(range(5))


@pytest.mark.parametrize("mode", ["broadcast", "competing", "direct"])
async def test_a_message_for_a_branch_that_beginning_anew_gave_up_is_not_lost(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """It comes while the next generation is being written."""

    @workflow
    async def listen(ctx: WorkflowContext, again: bool = False) -> list[Any]:
        if not again:
            await subscribe(ctx, "news", mode)
            await wait_any(ctx, news=receive(ctx, "news"), late=sleep(ctx, SHORT))
            await ctx.recur(True)
        return [(await receive(ctx, "news")).data for _ in range(2)]

    held = Held(app, monkeypatch, is_recur)
    run_id = await app.start(listen)
    await held.reached()
    for number in range(2):
        await publish(app, "news", number, target_instance_id=run_id if mode == "direct" else None)
    held.let_go()
    got = await result_of(app, run_id)
    assert sorted(got) == [0, 1]
    assert mode == "competing" or got == [0, 1]


async def test_an_end_of_a_subscription_goes_over_to_the_next_generation_too(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext, again: bool = False) -> str:
        if not again:
            await subscribe(ctx, "news")
            await unsubscribe(ctx, "news")
            await ctx.recur(True)
        await receive(ctx, "news")
        return "received"

    with pytest.raises(Exception, match="is not subscribed"):
        await run(app, listen)


# Afterwards


async def test_no_mode_is_left_when_a_run_ends(app: EddaApp) -> None:
    for _ in range(2):
        first = await start_receiving(app, hear_one, "news")
        await publish(app, "news", 1)
        assert await result_of(app, first) == 1
        second = await app.start(take_one, "news")
        assert await result_of(app, second) == 1, "nobody had competed for it"
        for run_id in (first, second):
            assert await registered(app, run_id) == []


# Many


class Counted:
    """How many batches reach the database."""

    def __init__(self, app: EddaApp, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches = 0
        self._write = app.engine.storage.write
        monkeypatch.setattr(app.engine.storage, "write", self.write)

    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        self.batches += 1
        return await self._write(fence, batch, token)


@pytest.mark.parametrize("mode", ["broadcast", "competing"])
@pytest.mark.parametrize(("database", "many"), [("sqlite", 10_000), ("memory", 2_000)], indirect=["database"])
async def test_ten_thousand_messages_are_received_in_order(
    make_app: MakeApp, mode: Any, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one batch for each, and never a second look at those that were received."""

    @workflow
    async def drain(ctx: WorkflowContext, expected: int = 0) -> int:
        if expected == 0:
            await subscribe(ctx, "news", mode)
            await wait_event(ctx, "go")
        for _ in range(500):
            message = await receive(ctx, "news")
            assert message.data == expected
            expected += 1
        if expected < many:
            await ctx.recur(expected)
        return expected

    app = await make_app(settings=IN_MEMORY)
    run_id = await app.start(drain)
    await until_waiting_for(app, run_id, "go:1")
    for start in range(0, many, 500):
        await asyncio.gather(*(publish(app, "news", number) for number in range(start, start + 500)))
    counted = Counted(app, monkeypatch)
    await send(app, "go")
    assert await app.handle(run_id).result(timeout=110) == many
    assert counted.batches < 1.2 * many
