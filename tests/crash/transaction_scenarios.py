"""Steps with transactions, runs that talk, events on their way out; and rows of the user's own that tell the truth."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct
from sqlalchemy import String, delete, select
from sqlalchemy.event import listen
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from edda import (
    EddaApp,
    MessageTimeoutError,
    RetryPolicy,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    publish,
    receive,
    send_event_transactional,
    send_to,
    subscribe,
    workflow,
)
from edda.cloudevents import json_format
from edda.cloudevents.event import CloudEvent
from edda.core.channels import DIRECT, event_type, unpack_message
from edda.core.model import EntryKind, RunId
from edda.errors import WorkflowCancelledError
from edda.storage.ports import Storage
from edda.testing import CrashPoints
from edda.workflow.workflow import Workflow

from .scenarios import TICK, Scenario

quick = RetryPolicy(initial_interval=TICK / 4, max_attempts=8, jitter=0)
patient = RetryPolicy(initial_interval=TICK, max_interval=TICK, max_attempts=500, jitter=0)
PATIENCE = 10.0
"""Seconds that an activity waits for a message, which may come back to it only when a lease is over."""
SOURCE = "/crash"
FOR_EVER = 1 << 62
CHANNEL = "news"
"""The same for all, and so are the statements that ask for its messages; by its end each family has received them."""


# The user's own table


class Base(DeclarativeBase):
    pass


class Row(Base):
    __tablename__ = "edda_test_row"  # emptied together with Edda's own tables

    id: Mapped[int] = mapped_column(primary_key=True)
    place: Mapped[str] = mapped_column(String(200))
    """What wrote it: a step, by its idempotency key."""


async def insert(connection: Any, place: str) -> None:
    """Through what `ctx.transaction()` gives, which is each driver's own."""
    statement = f"INSERT INTO edda_test_row (place) VALUES ('{place}')"
    if type(connection).__module__.startswith("asyncmy"):
        async with connection.cursor() as cursor:
            await cursor.execute(statement)
    else:
        await connection.execute(statement)


# Around a play


class Memory:
    """What bodies and sinks have seen, by family: a run and those that belong to it."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        """Of the bodies that write rows, by idempotency key."""
        self.reached: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Where a run is subscribed, or publishes; by run."""
        self.arrived: defaultdict[str, list[int]] = defaultdict(list)
        """Numbers of the events that the sink was given."""


memory = Memory()


def call(ctx: WorkflowContext) -> str:
    """The place of the one row that a body writes."""
    memory.calls[ctx.idempotency_key] += 1
    return ctx.idempotency_key


class RecordingSink:
    async def send(self, event: CloudEvent) -> None:
        memory.arrived[event.source.removeprefix(f"{SOURCE}/")].append(json_format.value_of(event)["n"])

    async def close(self) -> None:
        return


class Stage:
    """What a client of one family has at hand besides the app."""

    def __init__(self, family: str, engine: AsyncEngine, probe: CrashPoints | None) -> None:
        self.family = family
        self.engine = engine
        self.probe = probe

    def session(self) -> AsyncSession:
        """Of somebody who is no step. Every statement is a point where the process can die."""
        if self.probe is None:
            return AsyncSession(self.engine)
        probe, view = self.probe, self.engine.execution_options(crash=True)
        listen(view.sync_engine, "before_cursor_execute", lambda *args: probe.before(args[2]))
        listen(view.sync_engine, "after_cursor_execute", lambda *args: probe.after(args[2]))
        return AsyncSession(view)

    async def commit(self, session: AsyncSession) -> None:
        if self.probe is not None:
            self.probe.before("COMMIT of the handler")
        await session.commit()
        if self.probe is not None:
            self.probe.after("COMMIT of the handler")


class Remains(Struct, frozen=True):
    """What a family has left, as an outsider sees it."""

    family: str
    storage: Storage
    engine: AsyncEngine

    async def places(self) -> list[str]:
        """Of the rows that it has written."""
        async with self.engine.connect() as connection:
            places = await connection.scalars(select(Row.place).order_by(Row.place))
            own = (f"{self.family}/", f"{self.family}-")
            return [place for place in places if place == self.family or place.startswith(own)]

    async def is_done(self, place: str) -> bool:
        """Recorded by its own transaction, or by then in the history."""
        id, generation, step = place.split("/", 2)
        if await self.storage.find_step_commit(RunId(id), int(generation), step) is not None:
            return True
        return any(
            entry.step == step and entry.ok and entry.kind in {EntryKind.STEP, EntryKind.LATE}
            for entry in await self.storage.history(RunId(id), int(generation))
        )

    async def is_dispatched(self) -> bool:
        return any(self.names_it(one.body) for one in await self.storage.staged_events(10_000))

    def names_it(self, body: bytes) -> bool:
        return f'"{self.family}"'.encode() in body


Play = Callable[[EddaApp, Stage], Awaitable[Any]]
Look = Callable[[Remains], Awaitable[bool]]


class Talk(Scenario, frozen=True, kw_only=True):
    steps: frozenset[str] = frozenset()
    play: Play
    """What a careful client does, again after every crash; what it returns is expected to be `expected`."""
    others: tuple[Workflow[Any, Any], ...] = ()
    cast: tuple[str, ...] = ("",)
    """The runs, by what follows the family's name in their ids."""
    writes: tuple[str, ...] = ()
    """Steps that write a row each, by what follows the family's name in their keys: there if and only if they are
    done."""
    undone: str | None = None
    """The one whose row is gone as soon as all of `writes` are done."""
    together: tuple[Look, ...] = ()
    """All true or none, at any time."""
    facts: tuple[str, ...] = ()
    sends: bool = False
    """Whether there is an outbox to empty."""


async def begin(app: EddaApp, workflow: Workflow[Any, Any], run_id: str, *args: Any) -> str:
    return await app.start(workflow.options(id=run_id), *args)


async def result_of(app: EddaApp, run_id: str) -> Any:
    return await app.handle(run_id).result()


def play(workflow: Workflow[Any, Any]) -> Play:
    """Start it, and wait for its result."""

    async def start_and_wait(app: EddaApp, stage: Stage) -> Any:
        return await result_of(app, await begin(app, workflow, stage.family, stage.family))

    return start_and_wait


@workflow
async def silent(ctx: WorkflowContext, family: str) -> None:
    await tell_reached(ctx)


# Rows of the user's, and the steps that write them


@activity
async def pay(ctx: WorkflowContext, family: str) -> int:
    async with ctx.transaction() as connection:
        await insert(connection, call(ctx))
    return ctx.attempt


@activity(retry_policy=quick)
async def pay_at_last(ctx: WorkflowContext, family: str) -> str:
    async with ctx.transaction() as connection:
        await insert(connection, call(ctx))
        if ctx.attempt == 1:
            raise ConnectionError("after the insert")
    return "paid"


@workflow
async def paying(ctx: WorkflowContext, family: str) -> str:
    await pay(ctx, family)
    ctx.set("state", "half")
    paid = await pay_at_last(ctx, family)
    ctx.set("state", paid)
    return paid


@compensation
async def revoke(ctx: WorkflowContext, family: str) -> None:
    session = ctx.session
    await session.execute(delete(Row).where(Row.place.startswith(f"{family}/0/pay_for_now")))
    session.add(Row(place=call(ctx)))


@activity
@on_failure(revoke)
async def pay_for_now(ctx: WorkflowContext, family: str) -> None:
    async with ctx.transaction() as connection:
        await insert(connection, call(ctx))


@workflow
async def revoking(ctx: WorkflowContext, family: str) -> None:
    await pay_for_now(ctx, family)
    raise LookupError("no more")


@workflow
async def packing(ctx: WorkflowContext) -> str:
    """Started by a step, and told by the same step what it waits for."""
    await subscribe(ctx, CHANNEL, "competing")
    told: str = (await receive(ctx, CHANNEL)).data["what"]
    return told


@activity
async def order(ctx: WorkflowContext, family: str) -> None:
    ctx.session.add(Row(place=call(ctx)))
    await ctx.session.flush()
    await publish(ctx, CHANNEL, {"what": "pack it", "for": family})
    await packing.options(id=f"{family}-packing").start()
    await send_event_transactional(ctx, "ordered", f"{SOURCE}/{family}", {"n": 1})


@activity
async def note(ctx: WorkflowContext, family: str) -> None:
    ctx.session.add(Row(place=call(ctx)))


@workflow
async def ordering(ctx: WorkflowContext, family: str) -> None:
    await order(ctx, family)
    await note(ctx, family)


async def order_and_pack(app: EddaApp, stage: Stage) -> Any:
    await result_of(app, await begin(app, ordering, stage.family, stage.family))
    return await result_of(app, f"{stage.family}-packing")


async def is_ordered(remains: Remains) -> bool:
    return await remains.is_done(f"{remains.family}/0/order:1")


async def is_packing(remains: Remains) -> bool:
    return await remains.storage.get(RunId(f"{remains.family}-packing")) is not None


async def is_announced(remains: Remains) -> bool:
    if await remains.is_dispatched():
        return True
    logged = await remains.storage.events_of_type(event_type(CHANNEL), 0, FOR_EVER, 10_000)
    return any(remains.names_it(one.event.body) for one in logged)


async def is_on_its_way_out(remains: Remains) -> bool:
    found = [one for one in await remains.storage.find_outbox(limit=10_000) if one.event.run_id == remains.family]
    assert len(found) <= 1, "an event is in the outbox twice"
    return bool(found)


# Messages


@activity
async def tell_reached(ctx: WorkflowContext) -> None:
    memory.reached[ctx.instance_id].set()


@workflow
async def listening(ctx: WorkflowContext) -> list[int]:
    await subscribe(ctx, CHANNEL)
    await tell_reached(ctx)
    return [(await receive(ctx, CHANNEL)).data for _ in range(3)]


@workflow
async def listening_anew(ctx: WorkflowContext, heard: list[int]) -> list[int]:
    await subscribe(ctx, CHANNEL)
    if not heard:
        await tell_reached(ctx)
    heard = [*heard, (await receive(ctx, CHANNEL)).data]
    if len(heard) < 3:
        await ctx.recur(heard)
    return heard


@activity
async def announce(ctx: WorkflowContext, *data: int) -> None:
    memory.reached[ctx.instance_id].set()
    for one in data:
        await publish(ctx, CHANNEL, one)


@workflow
async def announcing(ctx: WorkflowContext, last: int) -> None:
    await publish(ctx, CHANNEL, 1)
    await announce(ctx, *range(2, last + 1))


async def tell_everybody(app: EddaApp, stage: Stage) -> Any:
    family = stage.family
    listeners = [
        await begin(app, listening, f"{family}-a"),
        await begin(app, listening_anew, f"{family}-b", []),
    ]
    for run_id in listeners:
        await memory.reached[run_id].wait()
    await result_of(app, await begin(app, announcing, family, 3))
    return [await result_of(app, run_id) for run_id in listeners]


STOP = 5
"""This number and higher ones end who receives them."""


@workflow
async def sharing(ctx: WorkflowContext) -> list[int]:
    await subscribe(ctx, CHANNEL, "competing")
    taken: list[int] = []
    while not taken or taken[-1] < STOP:
        taken.append((await receive(ctx, CHANNEL)).data)
    return taken


async def share_out(app: EddaApp, stage: Stage) -> Any:
    family = stage.family
    sharers = [await begin(app, sharing, f"{family}-{name}") for name in "ab"]
    await begin(app, announcing, family, STOP + 1)
    return sorted([one for run_id in sharers for one in await result_of(app, run_id)])


@workflow
async def leaving(ctx: WorkflowContext, timeout: float | None) -> None:
    await subscribe(ctx, CHANNEL, "competing")
    try:
        await receive(ctx, CHANNEL, timeout)
    except MessageTimeoutError:
        return


@workflow
async def collecting(ctx: WorkflowContext, count: int) -> list[int]:
    await subscribe(ctx, CHANNEL, "competing")
    return [(await receive(ctx, CHANNEL)).data for _ in range(count)]


async def collect_the_rest(app: EddaApp, stage: Stage) -> Any:
    """Two go away while messages come: what they did not get, and nothing else, is there for the next."""
    family = stage.family
    leavers = [await begin(app, leaving, f"{family}-late", TICK / 2)]
    leavers.append(await begin(app, leaving, f"{family}-cancelled", None))
    telling = await begin(app, announcing, family, 3)
    await memory.reached[telling].wait()
    await app.cancel(leavers[1], "enough")
    for run_id in (*leavers, telling):
        try:
            await result_of(app, run_id)
        except WorkflowCancelledError:
            assert run_id == leavers[1]
    had = [one for run_id in leavers for one in await received_by(app, run_id)]
    rest = await result_of(app, await begin(app, collecting, f"{family}-rest", 3 - len(had)))
    return sorted([*had, *rest])


async def received_by(app: EddaApp, run_id: str) -> list[int]:
    history = await app.client.read_history(run_id)
    letters = [entry.value for entry in history if entry.kind is EntryKind.MESSAGE and entry.ok]
    return [unpack_message(app.engine.codec, value).data for value in letters]


@activity
async def write_to(ctx: WorkflowContext, run_id: str, data: int) -> bool:
    return await send_to(ctx, run_id, data)


@workflow
async def writing(ctx: WorkflowContext, family: str) -> list[bool]:
    run_id = f"{family}-addressed"
    return [await send_to(ctx, run_id, 1), await write_to(ctx, run_id, 2)]


@workflow
async def addressed(ctx: WorkflowContext) -> list[int]:
    return [(await receive(ctx, DIRECT)).data for _ in range(2)]


async def write(app: EddaApp, stage: Stage) -> Any:
    run_id = await begin(app, addressed, f"{stage.family}-addressed")
    sent = await result_of(app, await begin(app, writing, stage.family, stage.family))
    return sent, await result_of(app, run_id)


@activity(retry_policy=patient)
async def take(ctx: WorkflowContext) -> int:
    data: int = (await receive(ctx, CHANNEL, PATIENCE)).data
    async with ctx.transaction() as connection:
        await insert(connection, call(ctx))
    return data


@activity(retry_policy=patient)
async def take_inside(ctx: WorkflowContext) -> int:
    async with ctx.transaction() as connection:
        await insert(connection, call(ctx))
        data: int = (await receive(ctx, CHANNEL, PATIENCE)).data
    return data


@workflow
async def taking(ctx: WorkflowContext, family: str) -> list[int]:
    await announce(ctx, 1, 2)
    return sorted([await take(ctx), await take_inside(ctx)])


# Out of the house, and into it


@activity
async def report(ctx: WorkflowContext, family: str, number: int) -> None:
    await send_event_transactional(ctx, "reported", f"{SOURCE}/{family}", {"n": number})


@activity
async def report_and_write(ctx: WorkflowContext, family: str, number: int) -> None:
    async with ctx.transaction() as connection:
        await insert(connection, call(ctx))
    await send_event_transactional(ctx, "reported", f"{SOURCE}/{family}", {"n": number})


@workflow
async def reporting(ctx: WorkflowContext, family: str) -> None:
    await report(ctx, family, 1)
    await report_and_write(ctx, family, 2)
    await send_event_transactional(ctx, "reported", f"{SOURCE}/{family}", {"n": 3})


async def report_all(app: EddaApp, stage: Stage) -> Any:
    family = stage.family
    await result_of(app, await begin(app, reporting, family, family))
    while len(set(memory.arrived[family])) < 3:  # noqa: ASYNC110 - the sink is not told who waits
        await asyncio.sleep(TICK / 4)
    return list(dict.fromkeys(memory.arrived[family]))


@workflow
async def requested(ctx: WorkflowContext) -> str:
    await subscribe(ctx, CHANNEL, "competing")
    told: str = (await receive(ctx, CHANNEL)).data["what"]
    return told


async def request(app: EddaApp, stage: Stage) -> Any:
    if not await has_row(Remains(stage.family, app.engine.storage, stage.engine)):
        await handle_request(app, stage)
    return await result_of(app, stage.family)


async def handle_request(app: EddaApp, stage: Stage) -> None:
    """As a web handler would: a row, a run, an event and a message in one transaction of its own."""
    family = stage.family
    async with stage.session() as session:
        session.add(Row(place=family))
        await app.start(requested.options(id=family, session=session))
        await app.send_event("requested", SOURCE, {"for": family}, id=family, session=session)
        await publish(app, CHANNEL, {"what": "do it", "for": family}, session=session)
        await stage.commit(session)


async def has_row(remains: Remains) -> bool:
    return remains.family in await remains.places()


async def is_requested(remains: Remains) -> bool:
    return await remains.storage.get(RunId(remains.family)) is not None


async def is_known(remains: Remains) -> bool:
    return await remains.is_dispatched() or await remains.storage.find_event(SOURCE, remains.family) is not None


TALK_SCENARIOS = (
    Talk(
        paying,
        "'paid'",
        play=play(paying),
        writes=("/0/pay:1", "/0/pay_at_last:1"),
        facts=("paid",),
    ),
    Talk(
        revoking,
        "LookupError('no more')",
        play=play(revoking),
        writes=("/0/pay_for_now:1", "/0/undo:1/revoke"),
        undone="/0/pay_for_now:1",
    ),
    Talk(
        ordering,
        "'pack it'",
        play=order_and_pack,
        others=(packing,),
        cast=("", "-packing"),
        writes=("/0/order:1", "/0/note:1"),
        together=(is_ordered, is_packing, is_announced, is_on_its_way_out),
    ),
    Talk(
        announcing,
        "[[1, 2, 3], [1, 2, 3]]",
        play=tell_everybody,
        others=(listening, listening_anew),
        cast=("", "-a", "-b"),
    ),
    Talk(sharing, "[1, 2, 3, 4, 5, 6]", play=share_out, others=(announcing,), cast=("", "-a", "-b")),
    Talk(
        leaving,
        "[1, 2, 3]",
        play=collect_the_rest,
        others=(announcing, collecting),
        cast=("", "-late", "-cancelled", "-rest"),
    ),
    Talk(writing, "([True, True], [1, 2])", play=write, others=(addressed,), cast=("", "-addressed")),
    Talk(taking, "[1, 2]", play=play(taking), writes=("/0/take:1", "/0/take_inside:1")),
    Talk(reporting, "[1, 2, 3]", play=report_all, writes=("/0/report_and_write:1",), sends=True),
    Talk(requested, "'do it'", play=request, together=(has_row, is_requested, is_known, is_announced)),
)
PLAIN = Talk(silent, "None", play=play(silent))
"""As little as a run can be."""
