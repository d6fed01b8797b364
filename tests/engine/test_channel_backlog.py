"""A backlog is read out of the log in pages: each message once and in order, whatever else the run waits for."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pytest

from edda import (
    EddaApp,
    MessageTimeoutError,
    WorkflowContext,
    receive,
    send_to,
    subscribe,
    unsubscribe,
    wait_event,
    workflow,
)
from edda.core.model import EntryKind
from edda.engine.run import waits
from edda.engine.worker import worker

from .conftest import RESTLESS, MakeApp
from .events import result_of, send, start_waiting
from .histories import entries_of
from .messages import Held, is_timeout, kill, publish_all

COUNT = 20


async def paged(app: EddaApp, run_id: str) -> int:
    """How many messages no letter brought."""
    return sum(entry.inbox_no is None for entry in await entries_of(app, run_id, EntryKind.MESSAGE))


async def begin_with_backlog(app: EddaApp, listen: Any, *args: Any, count: int = COUNT) -> str:
    """It is subscribed and waits for its event while messages are published."""
    run_id = await start_waiting(app, listen, *args)
    await publish_all(app, "news", *range(count))
    await send(app, "begin")
    return run_id


def hear_backlog() -> Any:
    @workflow
    async def hear_backlog(ctx: WorkflowContext, count: int) -> list[Any]:
        await subscribe(ctx, "news")
        await wait_event(ctx, "begin")
        return [(await receive(ctx, "news")).data for _ in range(count)]

    return hear_backlog


async def test_a_backlog_is_read_in_order_and_few_of_its_messages_are_letters(app: EddaApp) -> None:
    run_id = await begin_with_backlog(app, hear_backlog(), COUNT)
    assert await result_of(app, run_id) == list(range(COUNT))
    assert await paged(app, run_id) >= COUNT - 2


async def test_a_backlog_of_many_pages_is_read_to_its_end(app: EddaApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PAGE_SIZE", 3)
    run_id = await begin_with_backlog(app, hear_backlog(), COUNT)
    assert await result_of(app, run_id) == list(range(COUNT))


async def test_behind_a_backlog_the_run_waits_again_and_hears_what_comes(app: EddaApp) -> None:
    run_id = await begin_with_backlog(app, hear_backlog(), COUNT + 5)
    await publish_all(app, "news", *range(COUNT, COUNT + 5))
    assert await result_of(app, run_id) == list(range(COUNT + 5))


async def test_direct_messages_are_read_in_pages_too(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await wait_event(ctx, "begin")
        return [(await receive(ctx, "__direct__")).data for _ in range(COUNT)]

    run_id, other = [await start_waiting(app, listen) for _ in range(2)]
    for number in range(COUNT):
        await send_to(app, run_id, number)
        await send_to(app, other, -number)
    await send(app, "begin")
    assert await result_of(app, run_id) == list(range(COUNT))
    assert await result_of(app, other) == [-number for number in range(COUNT)]
    assert await paged(app, run_id) >= COUNT - 2


async def test_branches_share_a_backlog_without_getting_a_message_twice(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[list[Any]]:
        await subscribe(ctx, "news")
        await wait_event(ctx, "begin")

        async def branch() -> list[Any]:
            return [(await receive(ctx, "news")).data for _ in range(COUNT // 4)]

        return list(await asyncio.gather(*(branch() for _ in range(4))))

    run_id = await begin_with_backlog(app, listen)
    heard = await result_of(app, run_id)
    assert sorted(chain.from_iterable(heard)) == list(range(COUNT))
    assert all(branch == sorted(branch) for branch in heard)


async def test_a_branch_that_gives_up_leaves_its_message_to_the_others(app: EddaApp) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "news")
        await wait_event(ctx, "begin")
        heard: list[Any] = []
        while len(heard) < COUNT:
            both = [asyncio.ensure_future(receive(ctx, "news")) for _ in range(2)]
            done, pending = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            heard += [task.result().data for task in both if task in done]
        return heard

    run_id = await begin_with_backlog(app, listen, count=COUNT + 1)
    heard = await result_of(app, run_id)
    assert heard == list(range(len(heard)))


async def test_a_letter_for_a_wait_that_is_over_is_not_passed_over_nor_doubled(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait may have brought a message that nobody has read yet: nothing is read past it."""

    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "news")
        await wait_event(ctx, "begin")
        heard = [(await receive(ctx, "news")).data for _ in range(COUNT)]
        with pytest.raises(MessageTimeoutError):
            await receive(ctx, "news", timeout_seconds=0.05)
        return heard + [(await receive(ctx, "news")).data for _ in range(COUNT)]

    held = Held(app, monkeypatch, is_timeout)
    run_id = await begin_with_backlog(app, listen)
    await held.reached()
    await publish_all(app, "news", *range(COUNT, 2 * COUNT))
    held.let_go()
    assert await result_of(app, run_id) == list(range(2 * COUNT))


@pytest.mark.parametrize("carried", [waits.MAX_CARRIED_CURSORS, 0])
async def test_the_next_generation_reads_on_where_the_last_one_was(
    app: EddaApp, monkeypatch: pytest.MonkeyPatch, carried: int
) -> None:
    monkeypatch.setattr(waits, "MAX_CARRIED_CURSORS", carried)

    @workflow
    async def listen(ctx: WorkflowContext, heard: list[Any]) -> list[Any]:
        await subscribe(ctx, "news", "direct")
        if not heard:
            await wait_event(ctx, "begin")
        heard = heard + [(await receive(ctx, "news")).data for _ in range(COUNT // 4)]
        if len(heard) == COUNT // 2:  # its floor is needed though no subscription carries it
            await unsubscribe(ctx, "news")
        if len(heard) < COUNT:
            await ctx.recur(heard)
        return heard

    run_id = await start_waiting(app, listen, [])
    for number in range(COUNT):
        await send_to(app, run_id, number, "news")
    await send(app, "begin")
    assert await result_of(app, run_id) == list(range(COUNT))


async def test_a_process_that_dies_in_the_middle_of_a_page_costs_no_message(make_app: MakeApp) -> None:
    listen = hear_backlog()
    witness = await make_app()
    first = await make_app()
    run_id = await begin_with_backlog(first, listen, 2 * COUNT)
    await kill(first, witness)
    await publish_all(witness, "news", *range(COUNT, 2 * COUNT))
    assert await result_of(witness, run_id) == list(range(2 * COUNT))


async def test_a_run_that_leaves_memory_between_two_pages_reads_on(make_app: MakeApp) -> None:
    app = await make_app(settings=RESTLESS)

    @workflow
    async def listen(ctx: WorkflowContext) -> list[Any]:
        await subscribe(ctx, "news")
        heard = []
        for _ in range(3):
            await wait_event(ctx, "begin")
            heard += [(await receive(ctx, "news")).data for _ in range(5)]
        return heard

    run_id = await begin_with_backlog(app, listen, count=15)
    await send(app, "begin")
    await send(app, "begin")
    assert await result_of(app, run_id) == list(range(15))
