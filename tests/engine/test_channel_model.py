"""Whatever is published, received, given up, cancelled or crashed, in any order: who should get a message gets it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from edda import (
    ChannelMessage,
    MessageTimeoutError,
    WorkflowContext,
    activity,
    publish,
    receive,
    send_to,
    sleep,
    subscribe,
    wait_any,
    workflow,
)
from edda.core.channels import ChannelMode, unpack_message
from edda.core.model import EntryKind, RunId
from edda.engine.settings import Settings
from edda.storage.memory.storage import MemoryDatabase, MemoryStorage
from edda.testing import VirtualApp

CHANNEL = "news"
LINGERING = Settings(linger=5.0, call_timeout=30.0)
"""Some runs wait in memory, some in the database."""


class Act(StrEnum):
    ONE = "one"
    BOTH = "both"
    """Two receives at the same time."""
    ANY = "any"
    """Two receives, of which the first counts: what the other one got goes back."""
    RACE = "race"
    """A receive against a timer."""
    NAP = "nap"
    RECUR = "recur"


modes = st.sampled_from(ChannelMode)
acts = st.tuples(
    st.sampled_from([*Act, Act.ONE, Act.ANY, Act.RECUR]),
    st.sampled_from([None, None, 0, 2, 60]),
)
plans = st.lists(acts, min_size=4, max_size=10)
numbers = st.integers(0, 5)


@workflow(name="model_receiver")
async def listen(ctx: WorkflowContext, mode: Any, plan: list[tuple[Act, int | None]]) -> None:
    await subscribe(ctx, CHANNEL, mode)
    for place, (act, seconds) in enumerate(plan):
        if act == Act.RECUR:
            await ctx.recur(mode, plan[place + 1 :])
        with suppress(MessageTimeoutError):
            await _carry_out(ctx, act, seconds)


async def _carry_out(ctx: WorkflowContext, act: Act, seconds: int | None) -> None:
    def hear() -> Coroutine[Any, Any, ChannelMessage[Any]]:
        return receive(ctx, CHANNEL, seconds)

    match act:
        case Act.ONE:
            await hear()
        case Act.BOTH:
            await asyncio.gather(hear(), hear(), return_exceptions=True)
        case Act.ANY:
            await wait_any(ctx, hear(), hear())
        case Act.RACE:
            await wait_any(ctx, receive(ctx, CHANNEL), sleep(ctx, seconds or 1))
        case Act.NAP:
            await sleep(ctx, seconds or 1)


@workflow(name="model_publisher")
async def talk(ctx: WorkflowContext, first: int, count: int) -> None:
    for number in range(first, first + count):
        await (publish(ctx, CHANNEL, number) if number % 2 else tell(ctx, number))


@activity(name="model_tell")
async def tell(ctx: WorkflowContext, number: int) -> None:
    await publish(ctx, CHANNEL, number)


@workflow(name="model_rest")
async def take_rest(ctx: WorkflowContext) -> None:
    """What is there, without waiting for more."""
    await subscribe(ctx, CHANNEL, "competing")
    with suppress(MessageTimeoutError):
        while True:
            await receive(ctx, CHANNEL, 0)


@dataclass
class Receiver:
    run_id: str
    mode: ChannelMode
    is_in_order: bool
    """Two receives at once may be given messages in any order, once one of them gave up."""
    meant: list[int] = field(default_factory=list)
    """Published while it was there, in order."""


class Comparison(RuleBasedStateMachine):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.url = url
        self.memory = MemoryDatabase(lambda: self.app.clock.now())
        self.app = self.new_app()
        self.receivers: list[Receiver] = []
        self.published: list[int] = []
        self.count = 0

    def new_app(self, **options: Any) -> VirtualApp:
        if self.url == "memory://":
            options["storage"] = MemoryStorage(database=self.memory)
        known = [listen, talk, take_rest]
        return VirtualApp(db_url=self.url, auto_skip=False, workflows=known, settings=LINGERING, **options)

    def teardown(self) -> None:
        try:
            self.receive_the_rest()
        finally:
            self.runner.run(self.app.shutdown())
            self.runner.close()

    # What happens

    @initialize(some=st.lists(st.tuples(modes, plans), min_size=4, max_size=6))
    def open(self, some: list[tuple[ChannelMode, list[tuple[Act, int | None]]]]) -> None:
        self.runner.run(self.app.initialize())
        for mode, plan in some:
            self.start(mode, plan, crash=False)

    @rule(mode=modes, plan=plans, crash=st.booleans())
    def start(self, mode: ChannelMode, plan: list[tuple[Act, int | None]], crash: bool) -> None:
        run_id = f"run-{len(self.receivers)}"
        is_in_order = not any(act in (Act.BOTH, Act.ANY) for act, _ in plan)
        self.do(lambda: self.app.start(listen.options(id=run_id), mode, plan), crash)
        self.receivers.append(Receiver(run_id, mode, is_in_order))
        self.do(self.nothing, crash=False)

    @rule(crash=st.booleans())
    def publish_one(self, crash: bool) -> None:
        (number,) = self.new_numbers(1)
        self.do(lambda: publish(self.app, CHANNEL, number), crash)

    @rule(count=st.integers(2, 8))
    def publish_several_at_once(self, count: int) -> None:
        numbers = self.new_numbers(count)

        async def publish_all() -> None:
            await asyncio.gather(*(publish(self.app, CHANNEL, number) for number in numbers))

        self.do(publish_all, crash=False)

    @rule(count=st.integers(1, 4), crash=st.booleans())
    def publish_in_a_run(self, count: int, crash: bool) -> None:
        numbers = self.new_numbers(count)
        self.do(lambda: self.app.start(talk, numbers[0], count), crash)

    @precondition(lambda self: self.receivers)
    @rule(which=numbers, crash=st.booleans())
    def write_to_one(self, which: int, crash: bool) -> None:
        receiver = self.receivers[which % len(self.receivers)]
        self.count += 1
        number = self.count

        async def write() -> None:
            if await send_to(self.app, receiver.run_id, number, CHANNEL) and receiver.mode is ChannelMode.DIRECT:
                receiver.meant.append(number)

        self.do(write, crash)

    @precondition(lambda self: self.receivers)
    @rule(which=numbers, crash=st.booleans())
    def cancel(self, which: int, crash: bool) -> None:
        receiver = self.receivers[which % len(self.receivers)]
        self.do(lambda: self.app.cancel(receiver.run_id), crash)

    @precondition(lambda self: self.receivers)
    @rule(which=numbers)
    def publish_while_one_is_cancelled(self, which: int) -> None:
        receiver = self.receivers[which % len(self.receivers)]
        (number,) = self.new_numbers(1)

        async def both() -> None:
            await asyncio.gather(self.app.cancel(receiver.run_id), publish(self.app, CHANNEL, number))

        self.do(both, crash=False)

    @rule(seconds=st.sampled_from([1, 2, 90]))
    def let_time_pass(self, seconds: int) -> None:
        self.do(lambda: self.app.advance(seconds), crash=False)

    @rule(seconds=st.sampled_from([1, 2, 60]))
    def publish_while_time_passes(self, seconds: int) -> None:
        (number,) = self.new_numbers(1)

        async def both() -> None:
            await asyncio.gather(self.app.advance(seconds), publish(self.app, CHANNEL, number))

        self.do(both, crash=False)

    @rule(away=st.sampled_from([0, 3, 70]))
    def stay_away(self, away: int) -> None:
        """Messages come while nobody is there; then time passes."""
        (number,) = self.new_numbers(1)
        self.do(lambda: publish(self.app, CHANNEL, number), crash=True, away=away)

    @rule()
    def receive_the_rest(self) -> None:
        """Then every message has had its one receiver."""
        run_id = f"rest-{uuid4()}"
        self.receivers.append(Receiver(run_id, ChannelMode.COMPETING, is_in_order=False))
        self.do(lambda: self.app.start(take_rest.options(id=run_id)), crash=False)
        assert sorted(self.runner.run(self.taken())) == self.published

    def new_numbers(self, count: int) -> list[int]:
        numbers = [self.count + 1 + more for more in range(count)]
        self.count += count
        self.published += numbers
        for receiver in self.receivers:
            if receiver.mode is not ChannelMode.DIRECT:
                receiver.meant += numbers
        return numbers

    async def nothing(self) -> None: ...

    def do(self, deed: Callable[[], Awaitable[Any]], crash: bool, away: int = 0) -> None:
        async def do_and_settle() -> None:
            await deed()
            if crash:
                await self.go_on_in_a_new_app(away)
            await self.app.settle()
            await self.compare()

        self.runner.run(do_and_settle())

    async def go_on_in_a_new_app(self, away: int) -> None:
        worker, now = self.app.engine.worker, self.app.now()
        assert worker is not None
        self.app.kill()
        self.app = self.new_app(start=now + timedelta(seconds=away))
        await self.app.initialize()
        await self.app.engine.storage.remove_worker(worker.info.id)  # as whoever sees that the process is gone does
        assert self.app.engine.worker is not None
        self.app.engine.worker.wake()

    # What must be so

    async def compare(self) -> None:
        for receiver in self.receivers:
            if receiver.mode is not ChannelMode.COMPETING:
                await self.check_own(receiver)
        taken = await self.taken()
        assert len(taken) == len(set(taken)), f"twice: {taken}"
        assert set(taken) <= set(self.published)
        if await self.somebody_competes():
            assert sorted(taken) == self.published, "one who competes waits while there is a message"

    async def check_own(self, receiver: Receiver) -> None:
        got, meant = await self.received(receiver.run_id), receiver.meant
        if receiver.is_in_order:
            assert got == meant[: len(got)], f"{receiver.run_id} has {got}"
        else:
            assert len(got) == len(set(got))
            assert set(got) <= set(meant), f"{receiver.run_id} has {got}"
        if await self.is_receiving(receiver.run_id):
            assert sorted(got) == meant, f"{receiver.run_id} waits, and has only {got}"

    async def taken(self) -> list[int]:
        """By all who compete."""
        competing = [one.run_id for one in self.receivers if one.mode is ChannelMode.COMPETING]
        return [number for run_id in competing for number in await self.received(run_id)]

    async def somebody_competes(self) -> bool:
        competing = [one.run_id for one in self.receivers if one.mode is ChannelMode.COMPETING]
        return any([await self.is_receiving(run_id) for run_id in competing])

    async def is_receiving(self, run_id: str) -> bool:
        return bool(await self.app.engine.storage.waits(RunId(run_id)))

    async def received(self, run_id: str) -> list[int]:
        storage, codec = self.app.engine.storage, self.app.engine.codec
        last = await self.app.client.read_run(run_id)
        entries = [
            entry
            for generation in range(last.generation + 1)
            for entry in await storage.history(RunId(run_id), generation)
        ]
        messages = [entry.value for entry in entries if entry.kind is EntryKind.MESSAGE and entry.ok]
        return [unpack_message(codec, value).data for value in messages]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_every_message_finds_who_it_is_for(kind: str, tmp_path: Path) -> None:
    class OnThisDatabase(Comparison):
        def __init__(self) -> None:
            super().__init__("memory://" if kind == "memory" else f"sqlite:///{tmp_path}/{uuid4()}.db")

    run_state_machine_as_test(OnThisDatabase)
