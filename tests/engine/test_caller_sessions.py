"""Runs, events and messages in a session of somebody's own, such as a web handler's: they exist if its rows do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, HTTPException, Request
from httpx2 import ASGITransport, AsyncClient
from sqlalchemy import event, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from edda import EddaApp, RunStatus, WorkflowContext, activity, publish, receive, subscribe, workflow
from edda.cloudevents import json_format
from edda.engine.settings import Settings
from edda.errors import InstanceConflictError, InstanceNotFoundError
from edda.workflow.workflow import registry
from tests.conftest import Database, MakeDatabase

from .conditions import reason_of, until, until_status
from .conftest import MakeApp
from .events import SOURCE, result_of, stored
from .messages import logged, until_logged
from .orders import SQL_KINDS, Order, Orders, driver_url, open_orders

DEAF = Settings(linger=0.0, poll=60.0, sweep=60.0, takeover_grace=0.0)
"""Who is not told of something finds it after a minute only."""


@pytest.fixture(params=SQL_KINDS)
def database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    return make_database(request.param)


only_on_files = pytest.mark.parametrize("database", SQL_KINDS[:1], indirect=True)
only_on_servers = pytest.mark.parametrize("database", SQL_KINDS[1:], indirect=True)


@pytest.fixture
async def orders(database: Database) -> AsyncIterator[Orders]:
    async with open_orders(database) as orders:
        yield orders


@pytest.fixture
async def app(make_app: MakeApp, empty_registry: None) -> EddaApp:
    registry.add(ship)
    return await make_app(settings=DEAF)


class NotTodayError(Exception):
    pass


@workflow
async def ship(ctx: WorkflowContext, item: str) -> str:
    return f"{item} shipped"


async def exists(app: EddaApp, run_id: str) -> bool:
    try:
        await app.handle(run_id).status()
    except InstanceNotFoundError:
        return False
    return True


async def do_everything(app: EddaApp, session: AsyncSession, item: str) -> str:
    """All that can be done in a session; the id of the run."""
    session.add(Order(item=item))
    await app.send_event("order.placed", SOURCE, {"item": item}, session=session)
    await app.publish("orders", item, session=session)
    await publish(app, "orders", f"{item} again", session=session)
    return await app.start(ship.options(id=f"ship-{item}", session=session), item)


async def everything_was_done(app: EddaApp, orders: Orders, *items: str) -> None:
    """For these, and for no other."""
    for item in items:
        assert await result_of(app, f"ship-{item}") == f"{item} shipped"
    await until_logged(app, "orders", 2 * len(items))
    assert await logged(app, "orders") == [f"{item}{again}" for item in items for again in ("", " again")]

    async def are_stored() -> bool:
        return len(await stored(app, "order.placed")) == len(items)

    await until(are_stored, f"{len(items)} events are in the log")
    events = await stored(app, "order.placed")
    assert [json_format.value_of(one) for one in events] == [{"item": item} for item in items]
    assert await orders.items() == sorted(items)


# If and only if


async def test_what_is_committed_happens_at_once(app: EddaApp, orders: Orders) -> None:
    async with orders.session as session:
        run_id = await do_everything(app, session, "lute")
        assert not await exists(app, run_id)
        assert [await logged(app, "orders"), await stored(app, "order.placed")] == [[], []]
        await session.commit()
    await everything_was_done(app, orders, "lute")


async def test_what_is_rolled_back_never_happens(app: EddaApp, orders: Orders) -> None:
    async with orders.session as session:
        await do_everything(app, session, "harp")
        await session.rollback()
        await do_everything(app, session, "lute")
        await session.commit()
    async with orders.session as session:
        await do_everything(app, session, "flute")  # and never committed
    with suppress(NotTodayError):
        async with orders.session as session, session.begin():
            await do_everything(app, session, "drum")
            raise NotTodayError
    async with orders.session as session, session.begin():
        await do_everything(app, session, "fiddle")
    await everything_was_done(app, orders, "lute", "fiddle")
    for item in ("harp", "flute", "drum"):
        assert not await exists(app, f"ship-{item}")


async def test_what_is_done_in_a_savepoint_happens_at_once_when_all_is_committed(app: EddaApp, orders: Orders) -> None:
    """The end of a savepoint commits nothing: who is told then finds nothing, and must be told again."""
    async with orders.session as session:
        await do_everything(app, session, "lute")  # on SQLite a savepoint that comes first is a transaction of its own
        async with session.begin_nested():
            await do_everything(app, session, "harp")
        await asyncio.sleep(0.2)
        assert not await exists(app, "ship-harp")
        await session.commit()
    await everything_was_done(app, orders, "lute", "harp")


async def test_what_is_done_in_a_savepoint_that_is_rolled_back_never_happens(app: EddaApp, orders: Orders) -> None:
    async with orders.session as session:
        await do_everything(app, session, "lute")
        with suppress(NotTodayError):
            async with session.begin_nested():
                await do_everything(app, session, "harp")
                raise NotTodayError
        await session.commit()
    await everything_was_done(app, orders, "lute")
    assert not await exists(app, "ship-harp")


async def test_a_session_is_good_for_many_commits(app: EddaApp, orders: Orders) -> None:
    async with orders.session as session:
        for item in ("lute", "harp", "flute"):
            await do_everything(app, session, item)
            await session.commit()
            assert await result_of(app, f"ship-{item}") == f"{item} shipped"
    await everything_was_done(app, orders, "lute", "harp", "flute")


async def test_a_session_on_a_connection_of_the_caller_s_will_do(app: EddaApp, orders: Orders) -> None:
    async with orders.engine.connect() as connection, AsyncSession(connection) as session:
        await do_everything(app, session, "lute")
        await session.commit()
    await everything_was_done(app, orders, "lute")


async def test_who_only_takes_orders_leaves_the_work_to_others(make_app: MakeApp, orders: Orders) -> None:
    registry.add(ship)
    front = await make_app(worker=False, service_name="front")
    await make_app(service_name="back")
    async with orders.session as session:
        run_id = await do_everything(front, session, "lute")
        await session.commit()
    assert await result_of(front, run_id) == "lute shipped"
    await everything_was_done(front, orders, "lute")


async def test_what_was_committed_happens_though_the_process_dies(make_app: MakeApp, orders: Orders) -> None:
    registry.add(ship)
    second = await make_app(worker=False)
    first = await make_app(settings=DEAF, worker=False)
    async with orders.session as session:
        await do_everything(first, session, "lute")
        first.kill()
        await session.commit()
    await second.shutdown()
    await everything_was_done(await make_app(), orders, "lute")


async def test_a_run_that_waits_gets_the_message(app: EddaApp, orders: Orders) -> None:
    @workflow
    async def listen(ctx: WorkflowContext) -> Any:
        await subscribe(ctx, "orders")
        return (await receive(ctx, "orders")).data

    run_id = await app.start(listen)

    async def waits() -> bool:
        return await app.handle(run_id).status() is RunStatus.WAITING_FOR_MESSAGE

    await until(waits, "it waits")
    async with orders.session as session:
        session.add(Order(item="lute"))
        await app.publish("orders", {"item": "lute"}, session=session)
        await session.commit()
    assert await result_of(app, run_id) == {"item": "lute"}


# Ids


async def test_without_an_id_each_start_is_a_run_of_its_own(app: EddaApp, orders: Orders) -> None:
    async with orders.session as session:
        ids = {await ship.options(session=session).start("lute") for _ in range(3)}
        await session.commit()
    assert len(ids) == 3
    assert [await result_of(app, run_id) for run_id in ids] == ["lute shipped"] * 3


async def test_the_same_id_is_the_same_run(app: EddaApp, orders: Orders) -> None:
    started = ship.options(id="ship-1")
    async with orders.session as session:
        for _ in range(2):  # in one transaction
            assert await ship.options(id="ship-1", session=session).start("lute") == "ship-1"
        await session.commit()
    assert await result_of(app, "ship-1") == "lute shipped"
    async with orders.session as session:  # in another one, when it has ended
        session.add(Order(item="lute"))
        assert await ship.options(id="ship-1", session=session).start("lute") == "ship-1"
        await session.commit()
    assert await app.start(started, "lute") == "ship-1"
    assert await orders.items() == ["lute"]
    assert len((await app.find_instances())["instances"]) == 1


@pytest.mark.parametrize("place", ["before", "in the same transaction"])
async def test_the_same_id_with_other_arguments_is_refused_and_the_transaction_goes_on(
    app: EddaApp, orders: Orders, place: str
) -> None:
    async with orders.session as session:
        if place == "before":
            await app.start(ship.options(id="ship-1"), "harp")
        else:
            await ship.options(id="ship-1", session=session).start("harp")
        session.add(Order(item="lute"))
        with pytest.raises(InstanceConflictError, match="'ship-1' belongs to a run of other arguments"):
            await ship.options(id="ship-1", session=session).start("lute")
        session.add(Order(item="flute"))
        await ship.options(id="ship-2", session=session).start("flute")
        await session.commit()
    assert await orders.items() == ["flute", "lute"]
    assert await result_of(app, "ship-1") == "harp shipped"
    assert await result_of(app, "ship-2") == "flute shipped"


@only_on_servers
async def test_of_two_handlers_with_the_same_id_one_starts_the_run(app: EddaApp, orders: Orders) -> None:
    """The second waits for the first, whose run it cannot see when it begins."""

    async def handle(item: str) -> str:
        async with orders.session as session:
            await session.scalars(select(Order.item))
            await asyncio.sleep(0.05)
            session.add(Order(item=item))
            run_id = await ship.options(id="ship-1", session=session).start("lute")
            await asyncio.sleep(0.05)
            await session.commit()
            return run_id

    assert set(await asyncio.gather(*(handle(f"lute {n}") for n in range(4)))) == {"ship-1"}
    assert await result_of(app, "ship-1") == "lute shipped"
    assert len(await orders.items()) == 4
    assert len((await app.find_instances())["instances"]) == 1


async def test_delay_and_deadline_go_with_the_session(app: EddaApp, orders: Orders) -> None:
    @workflow
    async def dawdle(ctx: WorkflowContext) -> None:
        await asyncio.sleep(3600)

    async with orders.session as session:
        late = await ship.options(session=session, delay=3600).start("lute")
        short = await dawdle.options(session=session, timeout=0.5).start()
        await session.commit()
    with pytest.raises(TimeoutError):
        await result_of(app, short)
    assert await app.handle(late).status() is RunStatus.RUNNING
    assert await app.handle(late).history() == ()


# Wrong uses


async def test_what_is_no_session_is_refused(app: EddaApp, orders: Orders) -> None:
    sync: Any = Session()
    with pytest.raises(TypeError, match="session: expected an AsyncSession of SQLAlchemy, got Session"):
        await ship.options(session=sync).start("lute")
    nothing: Any = "no session"
    with pytest.raises(TypeError, match="got str"):
        await app.send_event("order.placed", SOURCE, session=nothing)


async def test_a_run_that_is_not_committed_cannot_be_waited_for(app: EddaApp, orders: Orders) -> None:
    async with orders.session as session:
        with pytest.raises(ValueError, match=r"ship.options\(session=...\) with run\(\), which would wait for a run"):
            await ship.options(session=session).run("lute")


async def test_a_workflow_s_own_code_has_no_session_to_give(app: EddaApp, orders: Orders) -> None:
    async with orders.session as session:

        @workflow
        async def shop(ctx: WorkflowContext) -> list[str]:
            said = []
            try:
                await ship.options(session=session).start("lute")
            except ValueError as error:
                said.append(str(error))
            try:
                await publish(ctx, "orders", "lute", session=session)
            except ValueError as error:
                said.append(str(error))
            return said

        assert await app.run(shop) == [
            "ship.options(session=...) in a workflow's own code",
            "publish(session=...) is for code outside workflows: inside, the message commits with its step",
        ]


async def test_in_an_activity_the_step_s_own_session_can_be_given(app: EddaApp, orders: Orders) -> None:
    @activity
    async def place(ctx: WorkflowContext, item: str) -> str:
        return await do_everything(app, ctx.session, item)

    @workflow
    async def shop(ctx: WorkflowContext) -> str:
        return await place(ctx, "lute")

    assert await app.run(shop) == "ship-lute"
    await everything_was_done(app, orders, "lute")


# EddaApp(engine=...)


async def test_an_app_on_the_user_s_engine_uses_it_and_leaves_it_open(database: Database, orders: Orders) -> None:
    @activity
    async def place(ctx: WorkflowContext, item: str) -> bool:
        ctx.session.add(Order(item=item))
        return ctx.session.bind is engine

    @workflow
    async def shop(ctx: WorkflowContext) -> bool:
        return await place(ctx, "lute")

    engine = create_async_engine(driver_url(database))
    async with EddaApp("test", engine=engine) as app:
        assert await app.run(shop)
    async with AsyncSession(engine) as session:
        assert list(await session.scalars(select(Order.item))) == ["lute"]
    await engine.dispose()


@only_on_files
async def test_on_sqlite_the_user_s_other_sessions_are_left_as_they_are(database: Database, orders: Orders) -> None:
    """Who only reads takes no lock, and waits for nobody."""
    begun, go = asyncio.Event(), asyncio.Event()

    @activity
    async def place(ctx: WorkflowContext, item: str) -> None:
        ctx.session.add(Order(item=item))
        await ctx.session.flush()
        begun.set()
        await go.wait()

    @workflow
    async def shop(ctx: WorkflowContext) -> None:
        await place(ctx, "lute")

    engine = create_async_engine(driver_url(database))
    said: list[str] = []
    event.listen(engine.sync_engine, "before_cursor_execute", lambda *args: said.append(args[2]))
    async with EddaApp("test", engine=engine) as app:
        run_id = await app.start(shop)
        await begun.wait()
        said.clear()
        async with AsyncSession(engine) as one, AsyncSession(engine) as other:
            for session in (one, other):
                assert list(await session.scalars(select(Order.item))) == []
                raw = (await (await session.connection()).get_raw_connection()).driver_connection
                assert raw is not None
                assert not raw.in_transaction
        assert [statement for statement in said if "BEGIN" in statement] == []
        go.set()
        await result_of(app, run_id)
    await engine.dispose()
    assert await orders.items() == ["lute"]


@only_on_files
async def test_on_sqlite_an_engine_may_have_its_own_way_to_begin(database: Database, orders: Orders) -> None:
    """SQLAlchemy's documentation tells people to say BEGIN themselves."""

    @activity
    async def place(ctx: WorkflowContext, item: str) -> None:
        ctx.session.add(Order(item=item))

    @workflow
    async def shop(ctx: WorkflowContext) -> None:
        await asyncio.gather(*(place(ctx, item) for item in ("lute", "harp", "flute")))

    engine = create_async_engine(driver_url(database))
    event.listen(engine.sync_engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine.sync_engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    async with EddaApp("test", engine=engine) as app:
        await app.run(shop)
    await engine.dispose()
    assert await orders.items() == ["flute", "harp", "lute"]


@only_on_servers
async def test_an_engine_that_commits_by_itself_is_refused(database: Database) -> None:
    @activity
    async def place(ctx: WorkflowContext) -> None:
        await ctx.session.execute(text("SELECT 1"))

    @workflow
    async def shop(ctx: WorkflowContext) -> None:
        await place(ctx)

    engine = create_async_engine(driver_url(database), isolation_level="AUTOCOMMIT")
    async with EddaApp("test", engine=engine) as app:
        run_id = await app.start(shop)
        await until_status(app, run_id, RunStatus.PARKED)
        assert "the engine given to EddaApp has isolation_level='AUTOCOMMIT'" in await reason_of(app, run_id)
    await engine.dispose()


# A web application


async def open_session(request: Request) -> AsyncIterator[AsyncSession]:
    async with request.app.state.orders.session as session:
        yield session


OwnSession = Annotated[AsyncSession, Depends(open_session)]


def shop_of(app: EddaApp, orders: Orders) -> FastAPI:
    web = FastAPI(lifespan=app.lifespan)
    web.state.orders = orders

    @web.post("/orders/{item}")
    async def place(item: str, session: OwnSession) -> dict[str, str]:
        run_id = await do_everything(app, session, item)
        if item == "harp":
            raise HTTPException(409, "no harps")
        if item == "drum":
            raise RuntimeError("the shop is on fire")
        await session.commit()
        return {"run": run_id}

    @web.post("/all/{item}")
    async def place_in_a_block(item: str) -> dict[str, str]:
        async with orders.session as session, session.begin():
            return {"run": await do_everything(app, session, item)}

    return web


async def test_a_handler_s_run_and_event_exist_if_its_rows_do(app: EddaApp, orders: Orders) -> None:
    transport = ASGITransport(shop_of(app, orders), raise_app_exceptions=False)
    async with AsyncClient(transport=transport, base_url="http://shop") as client:
        paths = ["orders/lute", "orders/harp", "orders/drum", "all/flute"]
        answers = [await client.post(f"/{path}") for path in paths]
    assert [answer.status_code for answer in answers] == [200, 409, 500, 200]
    assert [answers[0].json(), answers[3].json()] == [{"run": "ship-lute"}, {"run": "ship-flute"}]
    await everything_was_done(app, orders, "lute", "flute")
    assert not await exists(app, "ship-harp")
    assert not await exists(app, "ship-drum")


async def test_many_handlers_at_once_start_each_their_run(app: EddaApp, orders: Orders) -> None:
    """On SQLite too, where they take turns with the journal."""
    items = [f"lute {n:02}" for n in range(12)]
    transport = ASGITransport(shop_of(app, orders))
    async with AsyncClient(transport=transport, base_url="http://shop") as client:
        answers = await asyncio.gather(*(client.post(f"/orders/{item}") for item in items))
    assert [answer.status_code for answer in answers] == [200] * len(items)
    assert [await result_of(app, f"ship-{item}") for item in items] == [f"{item} shipped" for item in items]
    assert await orders.items() == items
    assert len((await app.find_instances())["instances"]) == len(items)
