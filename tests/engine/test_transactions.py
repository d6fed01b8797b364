"""What an activity writes through `ctx.session` or `ctx.transaction()`, and what it does through Edda meanwhile, is one
commit with the step's record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.exc import IntegrityError, InvalidRequestError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from edda import (
    EddaApp,
    Happened,
    RetryExhaustedError,
    RetryPolicy,
    TerminalError,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    publish,
    receive,
    send_event,
    send_event_transactional,
    workflow,
)
from edda.core.model import RunId
from edda.engine.run import effects
from edda.errors import AppError, InstanceNotFoundError, NotInWorkflowError
from edda.storage.ports import Storage
from tests.conftest import Database, MakeDatabase
from tests.storage.probes import Listener

from .conditions import until
from .conftest import RESTLESS, MakeApp, url_of
from .events import SOURCE, result_of, stored
from .messages import logged, until_logged
from .orders import SQL_KINDS, WAYS, Order, Orders, driver_url, open_orders

ONCE = RetryPolicy(max_attempts=1)
AT_ONCE = RetryPolicy(initial_interval=0.0, max_attempts=3)

Write = Callable[[WorkflowContext, str], Awaitable[None]]


class NotTodayError(Exception):
    pass


@pytest.fixture(params=SQL_KINDS)
def database(request: pytest.FixtureRequest, make_database: Callable[[str], Database]) -> Database:
    return make_database(request.param)


@pytest.fixture
async def orders(database: Database) -> AsyncIterator[Orders]:
    async with open_orders(database) as orders:
        yield orders


@pytest.fixture(params=WAYS)
def write(request: pytest.FixtureRequest, orders: Orders) -> Write:
    return lambda ctx, item: orders.write(request.param, ctx, item)


async def run_step(app: EddaApp, body: Callable[[WorkflowContext], Awaitable[Any]], policy: RetryPolicy = ONCE) -> Any:
    """A workflow of one step; its result, or its error raised."""

    @activity(name="step", retry_policy=policy)
    async def step(ctx: WorkflowContext) -> Any:
        return await body(ctx)

    @workflow(name="one_step")
    async def one_step(ctx: WorkflowContext) -> Any:
        return await step(ctx)

    return await result_of(app, await app.start(one_step))


async def leftovers(storage: Storage, run_id: str, *steps: str) -> list[str]:
    """Records of steps that are not in the history yet."""
    return [step for step in steps if await storage.find_step_commit(RunId(run_id), 0, step)]


# One commit


async def test_what_an_activity_writes_is_there_and_its_record_is_cleared_away(
    app: EddaApp, orders: Orders, write: Write
) -> None:
    @activity
    async def place(ctx: WorkflowContext, item: str) -> str:
        await write(ctx, item)
        return f"{item} ordered"

    @workflow
    async def shop(ctx: WorkflowContext) -> list[str]:
        return [await place(ctx, "lute"), await place(ctx, "harp")]

    run_id = await app.start(shop)
    assert await result_of(app, run_id) == ["lute ordered", "harp ordered"]
    assert await orders.items() == ["harp", "lute"]
    assert [(entry.step, entry.ok, entry.attempt) for entry in await app.handle(run_id).history()] == [
        ("place:1", True, 1),
        ("place:2", True, 1),
    ]
    assert await leftovers(app.engine.storage, run_id, "place:1", "place:2") == []


async def test_nothing_is_committed_before_the_activity_returns(app: EddaApp, orders: Orders, write: Write) -> None:
    async def body(ctx: WorkflowContext) -> list[str]:
        await write(ctx, "lute")
        return await orders.items()

    assert await run_step(app, body) == []
    assert await orders.items() == ["lute"]


async def test_objects_statements_and_queries_share_one_session(app: EddaApp, orders: Orders) -> None:
    async def body(ctx: WorkflowContext) -> list[str]:
        session = ctx.session
        assert ctx.session is session
        harp = Order(item="harp")
        session.add(harp)
        await session.execute(insert(Order).values(item="lute"))
        await session.execute(text("INSERT INTO edda_test_order (item) VALUES (:item)"), {"item": "flute"})
        harp.item = "big harp"
        return sorted(await session.scalars(select(Order.item)))

    assert await run_step(app, body) == ["big harp", "flute", "lute"] == await orders.items()


async def test_what_is_still_pending_is_flushed_at_the_end(app: EddaApp, orders: Orders) -> None:
    async def body(ctx: WorkflowContext) -> None:
        ctx.session.add(Order(item="lute"))

    await run_step(app, body)
    assert await orders.items() == ["lute"]


async def test_who_only_looks_at_the_session_opens_no_transaction(make_app: MakeApp, database: Database) -> None:
    probe = Listener()
    app = await make_app(probe=probe)

    async def body(ctx: WorkflowContext) -> bool:
        return ctx.session.in_transaction()

    assert await run_step(app, body) is False
    assert probe.heard == []


async def test_a_step_that_only_read_is_recorded_as_well(app: EddaApp, orders: Orders) -> None:
    async def body(ctx: WorkflowContext) -> list[str]:
        return list(await ctx.session.scalars(select(Order.item)))

    assert await run_step(app, body) == []


async def test_many_steps_at_once_wait_for_a_connection_and_for_each_other(
    make_app: MakeApp, orders: Orders, write: Write
) -> None:
    app = await make_app(pool_size=2)

    @activity
    async def place(ctx: WorkflowContext, item: str) -> None:
        await write(ctx, item)
        await asyncio.sleep(0.01)

    @workflow
    async def shop(ctx: WorkflowContext) -> None:
        await asyncio.gather(*(place(ctx, f"item {n:02}") for n in range(20)))

    await result_of(app, await app.start(shop))
    assert await orders.items() == [f"item {n:02}" for n in range(20)]


async def test_progress_can_be_told_in_an_open_transaction(app: EddaApp, orders: Orders, write: Write) -> None:
    async def body(ctx: WorkflowContext) -> str:
        await write(ctx, "lute")
        ctx.heartbeat("half way")
        return str(await app.handle(ctx.instance_id).status())

    assert await run_step(app, body) == "running"
    assert await orders.items() == ["lute"]


async def test_an_undo_writes_in_a_transaction_too(app: EddaApp, orders: Orders, write: Write) -> None:
    @compensation
    async def call_off(ctx: WorkflowContext, item: str) -> None:
        await write(ctx, f"no {item}")

    @activity
    @on_failure(call_off)
    async def place(ctx: WorkflowContext, item: str) -> None:
        await write(ctx, item)

    @activity(retry_policy=ONCE)
    async def ship(ctx: WorkflowContext) -> None:
        await write(ctx, "shipped")
        raise TerminalError("no courier")

    @workflow
    async def shop(ctx: WorkflowContext) -> None:
        await place(ctx, "lute")
        await ship(ctx)

    with pytest.raises(TerminalError, match="no courier"):
        await result_of(app, await app.start(shop))
    assert await orders.items() == ["lute", "no lute"]


async def test_who_is_asked_whether_it_happened_can_look_in_the_same_transaction(app: EddaApp, orders: Orders) -> None:
    async def look(ctx: WorkflowContext, item: str) -> Happened[str] | None:
        found = await ctx.session.scalar(select(Order.item).where(Order.item == item))
        return None if found is None else Happened("it was there")

    @activity(reconcile=look, retry_policy=AT_ONCE)
    async def place(ctx: WorkflowContext, item: str) -> str:
        if ctx.attempt == 1:
            if item == "harp":  # some other way, and the answer is lost
                async with orders.session as session:
                    session.add(Order(item=item))
                    await session.commit()
            raise ConnectionError("no answer")
        ctx.session.add(Order(item=item))
        return "placed now"

    @workflow
    async def shop(ctx: WorkflowContext) -> list[str]:
        return [await place(ctx, item) for item in ("harp", "lute")]

    assert await app.run(shop) == ["it was there", "placed now"]
    assert await orders.items() == ["harp", "lute"]


# ctx.transaction(): blocks


async def test_a_nested_block_that_raises_is_rolled_back_alone(app: EddaApp, orders: Orders) -> None:
    async def body(ctx: WorkflowContext) -> None:
        async with ctx.transaction() as outer:
            await orders.insert(outer, "lute")
            with suppress(NotTodayError):
                async with ctx.transaction() as inner:
                    await orders.insert(inner, "harp")
                    raise NotTodayError
            async with ctx.transaction() as inner:
                await orders.insert(inner, "flute")

    await run_step(app, body)
    assert await orders.items() == ["flute", "lute"]


async def test_a_statement_that_fails_spoils_only_its_block(app: EddaApp, orders: Orders) -> None:
    async def body(ctx: WorkflowContext) -> None:
        async with ctx.transaction() as outer:
            await orders.insert(outer, "lute")
            with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
                async with ctx.transaction() as inner:
                    await orders.insert(inner, "lute")
            await orders.insert(outer, "harp")

    await run_step(app, body)
    assert await orders.items() == ["harp", "lute"]


async def test_blocks_one_after_another_are_one_commit(app: EddaApp, orders: Orders) -> None:
    async def body(ctx: WorkflowContext) -> list[str]:
        for item in ("lute", "harp"):
            async with ctx.transaction() as connection:
                await orders.insert(connection, item)
        with suppress(NotTodayError):
            async with ctx.transaction() as connection:
                await orders.insert(connection, "flute")
                raise NotTodayError
        return await orders.items()

    assert await run_step(app, body) == []
    assert await orders.items() == ["harp", "lute"]


async def test_after_a_first_block_that_raised_there_can_be_another(app: EddaApp, orders: Orders) -> None:
    async def body(ctx: WorkflowContext) -> None:
        with suppress(NotTodayError):
            async with ctx.transaction() as connection:
                await orders.insert(connection, "harp")
                raise NotTodayError
        async with ctx.transaction() as connection:
            await orders.insert(connection, "lute")

    await run_step(app, body)
    assert await orders.items() == ["lute"]


# ctx.session: whose it is


async def commit(ctx: WorkflowContext) -> None:
    await ctx.session.commit()


async def commit_inside(ctx: WorkflowContext) -> None:
    await ctx.session.run_sync(Session.commit)


async def commit_its_transaction(ctx: WorkflowContext) -> None:
    transaction = ctx.session.get_transaction()
    assert transaction is not None
    await transaction.commit()


@pytest.mark.parametrize("attempt", [commit, commit_inside, commit_its_transaction])
async def test_a_commit_is_refused_and_the_session_goes_on(app: EddaApp, orders: Orders, attempt: Any) -> None:
    async def body(ctx: WorkflowContext) -> list[str]:
        ctx.session.add(Order(item="lute"))
        with pytest.raises(NotInWorkflowError, match="Edda commits the session together with the step's record"):
            await attempt(ctx)
        ctx.session.add(Order(item="harp"))
        await ctx.session.flush()
        return await orders.items()

    assert await run_step(app, body) == []
    assert await orders.items() == ["harp", "lute"]


async def test_begin_is_a_savepoint(app: EddaApp, orders: Orders) -> None:
    async def body(ctx: WorkflowContext) -> None:
        async with ctx.session.begin():
            ctx.session.add(Order(item="lute"))
        with suppress(NotTodayError):
            async with ctx.session.begin():
                ctx.session.add(Order(item="harp"))
                await ctx.session.flush()
                raise NotTodayError
        async with ctx.session.begin(), ctx.session.begin_nested():
            ctx.session.add(Order(item="flute"))
        assert await orders.items() == []

    await run_step(app, body)
    assert await orders.items() == ["flute", "lute"]


async def test_leaving_or_closing_the_session_loses_nothing(app: EddaApp, orders: Orders) -> None:
    async def body(ctx: WorkflowContext) -> None:
        async with ctx.session as session:
            session.add(Order(item="lute"))
            await session.flush()
            session.add(Order(item="harp"))
        await ctx.session.close()
        await ctx.session.aclose()
        assert sorted(await ctx.session.scalars(select(Order.item))) == ["harp", "lute"]

    await run_step(app, body)
    assert await orders.items() == ["harp", "lute"]


@pytest.mark.parametrize("method", ["rollback", "reset"])
async def test_what_comes_after_a_rollback_counts(app: EddaApp, orders: Orders, method: str) -> None:
    async def body(ctx: WorkflowContext) -> None:
        ctx.session.add(Order(item="harp"))
        await ctx.session.flush()
        await getattr(ctx.session, method)()
        ctx.session.add(Order(item="lute"))

    await run_step(app, body)
    assert await orders.items() == ["lute"]


async def test_a_step_that_ends_with_a_rollback_is_recorded_without_its_rows(app: EddaApp, orders: Orders) -> None:
    async def body(ctx: WorkflowContext) -> str:
        ctx.session.add(Order(item="harp"))
        await ctx.session.flush()
        await ctx.session.rollback()
        return "thought better of it"

    assert await run_step(app, body) == "thought better of it"
    assert await orders.items() == []


async def test_after_a_failed_flush_and_a_rollback_it_goes_on(app: EddaApp, orders: Orders) -> None:
    async def body(ctx: WorkflowContext) -> None:
        ctx.session.add_all([Order(item="harp"), Order(item="harp")])
        with pytest.raises(IntegrityError):
            await ctx.session.flush()
        await ctx.session.rollback()
        ctx.session.add(Order(item="lute"))

    await run_step(app, body)
    assert await orders.items() == ["lute"]


async def test_a_failed_flush_in_a_savepoint_leaves_the_rest(app: EddaApp, orders: Orders) -> None:
    async def body(ctx: WorkflowContext) -> None:
        ctx.session.add(Order(item="lute"))
        await ctx.session.flush()
        with pytest.raises(IntegrityError):
            async with ctx.session.begin_nested():
                ctx.session.add(Order(item="lute"))
        ctx.session.add(Order(item="harp"))

    await run_step(app, body)
    assert await orders.items() == ["harp", "lute"]


async def test_a_failed_flush_that_nobody_mends_fails_the_step_and_stops_nobody_else(
    app: EddaApp, orders: Orders, write: Write
) -> None:
    async def clumsy(ctx: WorkflowContext) -> None:
        ctx.session.add_all([Order(item="harp"), Order(item="harp")])
        await ctx.session.flush()

    async def careful(ctx: WorkflowContext) -> None:
        await write(ctx, "lute")

    with pytest.raises(RetryExhaustedError, match="IntegrityError"):
        await run_step(app, clumsy)
    await run_step(app, careful)
    assert await orders.items() == ["lute"]


async def test_the_session_cannot_be_used_when_the_step_is_over(app: EddaApp, orders: Orders) -> None:
    kept: list[WorkflowContext] = []

    async def body(ctx: WorkflowContext) -> None:
        kept.append(ctx)
        ctx.session.add(Order(item="lute"))
        session.append(ctx.session)

    session: list[Any] = []
    await run_step(app, body)
    with pytest.raises(InvalidRequestError, match="permanently closed"):
        await session[0].execute(select(Order.item))
    with pytest.raises(NotInWorkflowError, match=r"ctx.session was used after step:1 was over"):
        _ = kept[0].session
    with pytest.raises(NotInWorkflowError, match=r"ctx.transaction\(\) was used after step:1 was over"):
        kept[0].transaction()
    await run_step(app, lambda ctx: orders.write("session", ctx, "harp"))
    assert await orders.items() == ["harp", "lute"]


# Wrong places


async def test_a_sync_activity_has_no_transaction(app: EddaApp) -> None:
    @activity(retry_policy=AT_ONCE)
    def look(ctx: WorkflowContext) -> Any:
        return ctx.session

    @activity(retry_policy=AT_ONCE)
    def begin(ctx: WorkflowContext) -> Any:
        return ctx.transaction()

    @workflow
    async def shop(ctx: WorkflowContext) -> list[str]:
        said = []
        for step in (look, begin):
            try:
                await step(ctx)
            except NotInWorkflowError as error:
                said.append(str(error))
        return said

    run_id = await app.start(shop)
    assert await result_of(app, run_id) == [
        "ctx.session needs an `async def` activity: look:1 runs in a thread",
        "ctx.transaction() needs an `async def` activity: begin:1 runs in a thread",
    ]
    assert [entry.attempt for entry in await app.handle(run_id).history()] == [1, 1]


async def test_a_workflow_s_own_code_has_no_transaction(app: EddaApp) -> None:
    @workflow
    async def shop(ctx: WorkflowContext) -> list[str]:
        said = []
        for look in (lambda: ctx.session, lambda: ctx.transaction()):
            try:
                look()
            except NotInWorkflowError as error:
                said.append(str(error))
        return said

    assert await result_of(app, await app.start(shop)) == [
        "ctx.session is available in an activity only",
        "ctx.transaction() is available in an activity only",
    ]


async def test_a_step_uses_one_of_the_two_ways(app: EddaApp, orders: Orders) -> None:
    async def session_first(ctx: WorkflowContext) -> None:
        ctx.session.add(Order(item="lute"))
        with pytest.raises(NotInWorkflowError, match=r"step:1 uses ctx.session already: use its begin_nested\(\)"):
            ctx.transaction()

    async def transaction_first(ctx: WorkflowContext) -> None:
        async with ctx.transaction() as connection:
            await orders.insert(connection, "harp")
        with pytest.raises(NotInWorkflowError, match=r"step:1 uses ctx.transaction\(\) already: use one of the two"):
            _ = ctx.session

    await run_step(app, session_first)
    await run_step(app, transaction_first)
    assert await orders.items() == ["harp", "lute"]


# Through Edda


@workflow
async def follow_up(ctx: WorkflowContext, item: str) -> str:
    return f"followed {item}"


async def do_everything(ctx: WorkflowContext, item: str) -> str:
    """All that an activity can do through Edda; the id of the run it starts."""
    await publish(ctx, "orders", item)
    await send_event("order.placed", SOURCE, {"item": item})
    await send_event_transactional(ctx, "order.told", SOURCE, {"item": item})
    return await follow_up.options(id=f"follow-{item}").start(item)


async def sent(app: EddaApp) -> list[str]:
    return [one.event.type for one in await app.engine.storage.find_outbox()]


async def exists(app: EddaApp, run_id: str) -> bool:
    try:
        await app.handle(run_id).status()
    except InstanceNotFoundError:
        return False
    return True


async def test_what_is_done_through_edda_is_part_of_the_commit(make_app: MakeApp, orders: Orders, write: Write) -> None:
    app = await make_app(settings=RESTLESS, workflows=None)
    seen: list[Any] = []

    async def body(ctx: WorkflowContext) -> str:
        await write(ctx, f"lute {ctx.attempt}")
        run_id = await do_everything(ctx, f"lute-{ctx.attempt}")
        seen.append([await exists(app, run_id), await logged(app, "orders"), await stored(app, "order.placed")])
        if ctx.attempt == 1:
            raise ValueError("not this time")
        return run_id

    workflow_of_this_test(follow_up)
    run_id = await run_step(app, body, AT_ONCE)
    assert await result_of(app, run_id) == "followed lute-2"
    await until_logged(app, "orders", 1)
    assert await logged(app, "orders") == ["lute-2"]
    await until_stored(app, "order.placed", 1)
    assert await sent(app) == ["order.told"]
    assert not await exists(app, "follow-lute-1")
    assert await orders.items() == ["lute 2"]
    assert seen == [[False, [], []]] * 2


def workflow_of_this_test(known: Any) -> None:
    """Each test begins with an empty registry."""
    from edda.workflow.workflow import registry

    registry.add(known)


async def until_stored(app: EddaApp, event_type: str, count: int) -> None:
    async def are_stored() -> bool:
        return len(await stored(app, event_type)) == count

    await until(are_stored, f"{count} events {event_type} are in the log")


async def test_what_was_done_in_a_block_that_is_rolled_back_is_not_done(app: EddaApp, orders: Orders) -> None:
    workflow_of_this_test(follow_up)

    async def body(ctx: WorkflowContext) -> None:
        async with ctx.transaction() as outer:
            await orders.insert(outer, "lute")
            await do_everything(ctx, "lute")
            with suppress(NotTodayError):
                async with ctx.transaction() as inner:
                    await orders.insert(inner, "harp")
                    await do_everything(ctx, "harp")
                    raise NotTodayError

    await run_step(app, body)
    await only_the_lute_was_ordered(app, orders)


async def test_what_was_done_in_a_savepoint_that_is_rolled_back_is_not_done(app: EddaApp, orders: Orders) -> None:
    workflow_of_this_test(follow_up)

    async def body(ctx: WorkflowContext) -> None:
        ctx.session.add(Order(item="lute"))
        await do_everything(ctx, "lute")
        with suppress(NotTodayError):
            async with ctx.session.begin_nested():
                ctx.session.add(Order(item="harp"))
                await do_everything(ctx, "harp")
                raise NotTodayError

    await run_step(app, body)
    await only_the_lute_was_ordered(app, orders)


async def test_what_was_done_before_a_rollback_is_not_done(app: EddaApp, orders: Orders) -> None:
    workflow_of_this_test(follow_up)

    async def body(ctx: WorkflowContext) -> None:
        ctx.session.add(Order(item="harp"))
        await do_everything(ctx, "harp")
        await ctx.session.rollback()
        ctx.session.add(Order(item="lute"))
        await do_everything(ctx, "lute")

    await run_step(app, body)
    await only_the_lute_was_ordered(app, orders)


async def only_the_lute_was_ordered(app: EddaApp, orders: Orders) -> None:
    assert await orders.items() == ["lute"]
    await until_logged(app, "orders", 1)
    assert await logged(app, "orders") == ["lute"]
    await until_stored(app, "order.placed", 1)
    assert await sent(app) == ["order.told"]
    assert await result_of(app, "follow-lute") == "followed lute"
    assert not await exists(app, "follow-harp")


async def test_a_run_cannot_be_waited_for_in_a_transaction(app: EddaApp, orders: Orders, write: Write) -> None:
    workflow_of_this_test(follow_up)

    async def body(ctx: WorkflowContext) -> None:
        await write(ctx, "lute")
        for run in (follow_up.run, lambda item: app.run(follow_up, item)):
            with pytest.raises(NotInWorkflowError, match=r"follow_up.run\(\) in an activity with an open transaction"):
                await run("lute")

    await run_step(app, body)
    assert await orders.items() == ["lute"]


async def test_what_would_wait_for_the_transaction_itself_is_refused(
    app: EddaApp, orders: Orders, write: Write
) -> None:
    """On SQLite each of them would wait for this very transaction, which waits for them."""

    async def body(ctx: WorkflowContext) -> list[str]:
        await write(ctx, "lute")
        said = []
        me = app.handle(ctx.instance_id)
        for wait in (me.cancel, me.result, lambda: me.wait("key"), lambda: app.cancel(ctx.instance_id)):
            with pytest.raises(NotInWorkflowError, match="step:1 has an open transaction, which is no place") as error:
                await wait()
            said.append(str(error.value).partition("no place ")[2])
        return said

    where = ": do it before, or in another step"
    assert await run_step(app, body) == [
        f"to cancel a run{where}",
        f"to wait for another run{where}",
        f"to wait for what another run says{where}",
        f"to cancel a run{where}",
    ]
    assert await orders.items() == ["lute"]


async def test_a_message_that_was_received_in_a_block_that_is_rolled_back_is_offered_again(
    app: EddaApp, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effects, "MESSAGE_LEASE", 50_000)
    got: list[str] = []

    async def drop(ctx: WorkflowContext) -> None:
        with suppress(NotTodayError):
            async with ctx.transaction() as connection:
                await orders.insert(connection, "harp")
                got.append((await receive(ctx, "jobs")).data)
                raise NotTodayError
        async with ctx.transaction() as connection:
            await orders.insert(connection, "lute")

    async def keep(ctx: WorkflowContext) -> None:
        got.append((await receive(ctx, "jobs", timeout_seconds=20)).data)

    await app.publish("jobs", "tune the lute")
    await run_step(app, drop)
    assert await orders.items() == ["lute"]
    await run_step(app, keep)
    assert got == ["tune the lute"] * 2


# Databases that have none


async def test_in_memory_there_is_no_transaction(make_app_on: MakeApp, make_database: Any) -> None:
    app = await make_app_on(on=make_database("memory"))

    async def look(ctx: WorkflowContext) -> None:
        _ = ctx.session

    async def begin(ctx: WorkflowContext) -> None:
        async with ctx.transaction():
            pass

    with pytest.raises(AppError, match=r"ctx\.session needs a database: memory:// has none"):
        await run_step(app, look)
    with pytest.raises(Exception, match=r"ctx.transaction\(\) needs a database: memory:// has none"):
        await run_step(app, begin)


async def test_a_sqlite_database_in_memory_has_no_session() -> None:
    async def look(ctx: WorkflowContext) -> None:
        _ = ctx.session

    async with EddaApp("test", "sqlite:///:memory:") as app:
        with pytest.raises(
            AppError, match=r"ctx\.session needs a file: no other connection can see a database in memory"
        ):
            await run_step(app, look)


OPTIONS = {"sqlite": "", "postgres": "?sslmode=prefer", "mysql": "?ssl=false"}


async def test_the_session_understands_what_the_storage_understands(database: Database, orders: Orders) -> None:
    """SQLAlchemy has names of its own for what stands in a URL."""
    async with EddaApp("test", url_of(database) + OPTIONS[database.kind]) as app:
        await run_step(app, lambda ctx: orders.write("session", ctx, "lute"))
    assert await orders.items() == ["lute"]


@pytest.mark.databases("postgres")
async def test_a_statement_for_another_database_leaves_the_record_where_it_belongs(
    make_database: MakeDatabase, make_app_on: MakeApp
) -> None:
    """On PostgreSQL the record goes past SQLAlchemy, to the connection that its transaction runs on."""
    own, other = make_database("postgres"), make_database("postgres")
    elsewhere = create_async_engine(driver_url(other))
    app = await make_app_on(on=own)

    async def body(ctx: WorkflowContext) -> None:
        await ctx.session.execute(text("SELECT 1"))
        await ctx.session.execute(text("SELECT 1"), bind_arguments={"bind": elsewhere.sync_engine})

    await run_step(app, body)
    await elsewhere.dispose()
