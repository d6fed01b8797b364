"""Whatever is sent, asked for, waited out, cancelled or crashed, in any order: every run gets what the model says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from edda import (
    EventTimeoutError,
    ReceivedEvent,
    RunStatus,
    WorkflowCancelledError,
    WorkflowContext,
    sleep,
    wait_any,
    wait_event,
    workflow,
)
from edda.cloudevents import json_format
from edda.core.model import Entry, EntryKind, RunId
from edda.engine.worker.worker import Worker
from edda.storage.memory.storage import MemoryDatabase, MemoryStorage
from edda.testing import VirtualApp
from edda.workflow.children import ChildStarted
from edda.workflow.context import as_microseconds

from .event_model import Ask, AskKind, Event, Outcome, OutcomeKind, Story, World, child_id

RUNS = [f"run-{number}" for number in range(6)]
EVENTS = [f"event-{number}" for number in range(50)]

TOLD = {EntryKind.EVENT, EntryKind.RECUR, EntryKind.CHILD}

types = st.sampled_from(["paid", "paid", "paid", "shipped"])
matches = st.sampled_from([{}, {"k": 1}, {"k": 1}, {"k": 2}, {"k": 1, "g": "x"}])
asks = st.builds(
    Ask,
    kind=st.sampled_from([*AskKind, AskKind.ONE, AskKind.RECUR]),
    type=types,
    matches=st.tuples(matches, matches),
    seconds=st.sampled_from([None, None, 2, 60]),
)
plans = st.lists(asks, min_size=3, max_size=8)
events = st.builds(
    Event,
    id=st.sampled_from(EVENTS),
    type=types,
    data=st.fixed_dictionaries({"k": st.sampled_from([1, 2])}, optional={"g": st.sampled_from(["x", "y"])}),
    target=st.none() | st.none() | st.sampled_from(RUNS),
)


@workflow(name="model_listener")
async def listen(ctx: WorkflowContext, asks: list[dict[str, Any]], first: int = 0) -> None:
    """`first` is the place of the first one that this generation asks for."""
    for place, ask in enumerate(asks, first):
        if ask["kind"] == AskKind.RECUR:
            await ctx.recur(asks[place - first + 1 :], place + 1)
        elif ask["kind"] == AskKind.CHILD:
            await _await_child(ctx, place, ask)
        else:
            await _carry_out(ctx, place, ask["kind"], ask["type"], ask["matches"], ask["seconds"])


@workflow(name="model_child")
async def listen_once(ctx: WorkflowContext, ask: dict[str, Any]) -> None:
    await _carry_out(ctx, 0, AskKind.ONE, ask["type"], ask["matches"], ask["seconds"])


async def _await_child(ctx: WorkflowContext, place: int, ask: dict[str, Any]) -> None:
    """One with a chosen id tells its watchers, any other tells its parent."""
    child = listen_once.options(id=f"{ctx.instance_id}-{place}") if place % 2 else listen_once
    with suppress(WorkflowCancelledError):
        await child.run(ask)


async def _carry_out(
    ctx: WorkflowContext, place: int, kind: str, event_type: str, matches: list[dict[str, Any]], seconds: int | None
) -> None:
    def hear(number: int) -> Coroutine[Any, Any, ReceivedEvent[Any]]:
        timeout = None if seconds is None else seconds + number
        return wait_event(ctx, event_type, timeout, event_id=f"{place:02}-{number}", match=matches[number])

    try:
        match kind:
            case AskKind.NAP:
                await sleep(ctx, seconds or 1)
            case AskKind.ONE:
                await hear(0)
            case AskKind.BOTH:
                await asyncio.gather(hear(0), hear(1), return_exceptions=True)
            case AskKind.ANY:
                await wait_any(ctx, hear(0), hear(1))
    except EventTimeoutError:
        return


class Comparison(RuleBasedStateMachine):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.url = url
        self.memory = MemoryDatabase(lambda: self.app.clock.now())
        self.app = self.new_app()
        self.model = World()
        self.ids: dict[str, str] = {}
        """Of the runs that the model knows."""

    def new_app(self, **options: Any) -> VirtualApp:
        if self.url == "memory://":
            options["storage"] = MemoryStorage(database=self.memory)
        return VirtualApp(db_url=self.url, auto_skip=False, workflows=[listen, listen_once], **options)

    @initialize(plans=st.lists(plans, min_size=3, max_size=3))
    def open(self, plans: list[list[Ask]]) -> None:
        self.runner.run(self.app.initialize())
        for id, asks in zip(RUNS, plans, strict=False):
            self.start(id, asks, crash=False)

    def teardown(self) -> None:
        self.runner.run(self.app.shutdown())
        self.runner.close()

    @rule(id=st.sampled_from(RUNS), asks=plans, crash=st.booleans())
    def start(self, id: str, asks: list[Ask], crash: bool) -> None:
        if id in self.model.runs:
            return
        plain = [{"kind": a.kind, "type": a.type, "matches": list(a.matches), "seconds": a.seconds} for a in asks]
        self.ids[id] = id
        self.model.start(id, tuple(asks), self.app.clock.now())
        self.do(lambda: self.app.start(listen.options(id=id), plain), crash)

    @rule(event=events, crash=st.booleans())
    def send(self, event: Event, crash: bool) -> None:
        self.model.send(event)
        self.do(lambda: self.send_to_app(event), crash)

    @rule(some=st.lists(events, min_size=2, max_size=8))
    def send_at_once(self, some: list[Event]) -> None:
        """They share a commit, in this order."""

        async def send_all() -> None:
            await asyncio.gather(*map(self.send_to_app, some))

        for event in some:
            self.model.send(event)
        self.do(send_all, crash=False)

    async def send_to_app(self, event: Event) -> None:
        await self.app.send_event(event.type, "/model", event.data, id=event.id, target_instance_id=event.target)

    @rule(id=st.sampled_from(RUNS), of_child=st.booleans(), crash=st.booleans())
    def cancel(self, id: str, of_child: bool, crash: bool) -> None:
        run = self.model.runs.get(id)
        if of_child and run is not None:
            run = run.child
        if run is None:
            return
        id = self.ids[run.id]
        run.cancel()
        self.do(lambda: self.app.cancel(id), crash)

    @precondition(lambda self: self.model.runs)
    @rule(seconds=st.sampled_from([1, 2, 5, 90]))
    def let_time_pass(self, seconds: int) -> None:
        self.do(lambda: self.app.advance(seconds), crash=False)

    @rule(event=events, away=st.sampled_from([0, 3, 70]))
    def send_and_stay_away(self, event: Event, away: int) -> None:
        """Time passes while nobody is there."""
        self.model.send(event)
        self.do(lambda: self.send_to_app(event), crash=True, away=away)

    def do(self, deed: Callable[[], Awaitable[Any]], crash: bool, away: int = 0) -> None:
        """Crashed or not: when nothing moves any more, all is as the model says."""

        async def do_and_settle() -> None:
            await deed()
            if crash:
                await self.go_on_in_a_new_app(away)
            await self.app.settle()
            await self.compare()

        self.runner.run(do_and_settle())

    async def go_on_in_a_new_app(self, away: int) -> None:
        dead, now = self.worker.info.id, self.app.now()
        self.app.kill()
        self.app = self.new_app(start=now + timedelta(seconds=away))
        self.model.absences.append((as_microseconds(now), self.app.clock.now()))
        await self.app.initialize()
        await self.app.engine.storage.remove_worker(dead)  # as whoever sees that the process is gone does
        self.worker.wake()

    @property
    def worker(self) -> Worker:
        worker = self.app.engine.worker
        assert worker is not None
        return worker

    async def compare(self) -> None:
        for id in RUNS:
            if id in self.model.runs:
                await self.read(id)
        for id, run in tuple(self.model.runs.items()):
            run.follow(self.app.clock.now())
            record = await self.app.client.read_run(self.ids[id])
            expected = RunStatus.CANCELLED if run.is_cancelled else RunStatus.COMPLETED
            assert record.status is expected if run.is_over else record.ended_at is None, f"{id} is {record.status}"

    async def read(self, id: str) -> None:
        """Its story, and those of its children, in the order of their births."""
        storage, run_id = self.app.engine.storage, RunId(self.ids[id])
        last = await self.app.client.read_run(run_id)
        entries = [
            entry for generation in range(last.generation + 1) for entry in await storage.history(run_id, generation)
        ]
        outcomes = tuple(self.outcome(entry) for entry in entries if entry.kind in TOLD)
        self.model.stories[id] = Story(last.created_at, outcomes)
        births = [entry for entry in entries if entry.kind is EntryKind.START]
        for number, entry in enumerate(births):
            child = child_id(id, number)
            self.ids[child] = self.app.engine.codec.decode(entry.value, ChildStarted).run_id
            await self.read(child)

    def outcome(self, entry: Entry) -> Outcome:
        kind = OutcomeKind(entry.kind)
        if kind is not OutcomeKind.EVENT or not entry.ok:
            return Outcome(kind, entry.at, entry.step, ok=entry.ok)
        event = json_format.parse_stored(self.app.engine.codec.decrypt(entry.value))
        return Outcome(kind, entry.at, entry.step, event.id)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_every_run_gets_what_the_model_says(kind: str, tmp_path: Path) -> None:
    class OnThisDatabase(Comparison):
        def __init__(self) -> None:
            super().__init__("memory://" if kind == "memory" else f"sqlite:///{tmp_path}/{uuid4()}.db")

    run_state_machine_as_test(OnThisDatabase)
