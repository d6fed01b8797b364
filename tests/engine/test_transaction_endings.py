"""However an attempt ends, its rows are there if and only if its step is recorded: retries, time-outs, cancels, kills,
lost leases, lost answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from edda import (
    EddaApp,
    RetryExhaustedError,
    RetryPolicy,
    WorkflowCancelledError,
    WorkflowContext,
    activity,
    compensation,
    on_failure,
    workflow,
)
from edda.core.model import EntryKind, RunId, StepCommit
from edda.engine.run.effects import StepEffects
from edda.errors import PayloadError, StorageUnavailableError
from edda.storage.shared import step_commit as joints
from edda.storage.shared.step_commit import StepCommitWrite
from edda.testing import CrashMode, SimulatedCrash
from tests.conftest import Database, MakeDatabase

from .conditions import until
from .conftest import MORTAL, RESTLESS, MakeApp, url_of
from .events import result_of
from .histories import entries_of, kinds_in, undos_of, until_recorded
from .messages import kill
from .orders import SQL_KINDS, WAYS, Order, Orders, driver_url, open_orders

ONCE = RetryPolicy(max_attempts=1)
AT_ONCE = RetryPolicy(initial_interval=0.0, max_attempts=3)
SHORT = 2.0
"""Seconds: enough for a busy machine, and over soon."""

Write = Callable[[WorkflowContext, str], Awaitable[None]]


@pytest.fixture(params=SQL_KINDS)
def database(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Database:
    return make_database(request.param)


only_on_servers = pytest.mark.parametrize("database", SQL_KINDS[1:], indirect=True)
only_on_files = pytest.mark.parametrize("database", SQL_KINDS[:1], indirect=True)


@pytest.fixture
async def orders(database: Database) -> AsyncIterator[Orders]:
    async with open_orders(database) as orders:
        yield orders


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    way: str = request.param
    return way


@pytest.fixture
def write(way: str, orders: Orders) -> Write:
    return lambda ctx, item: orders.write(way, ctx, item)


def of_one_step(body: Callable[[WorkflowContext], Awaitable[Any]], **options: Any) -> Any:
    """A workflow of one activity."""

    @activity(name="step", **options)
    async def step(ctx: WorkflowContext) -> Any:
        return await body(ctx)

    @workflow(name="one_step")
    async def one_step(ctx: WorkflowContext) -> Any:
        return await step(ctx)

    return one_step


# Attempts that fail


async def test_an_attempt_that_fails_leaves_nothing(app: EddaApp, orders: Orders, write: Write) -> None:
    async def body(ctx: WorkflowContext) -> int:
        await write(ctx, f"lute {ctx.attempt}")
        if ctx.attempt < 3:
            raise ConnectionError("no answer from the luthier")
        return ctx.attempt

    run_id = await app.start(of_one_step(body, retry_policy=AT_ONCE))
    assert await result_of(app, run_id) == 3
    assert await orders.items() == ["lute 3"]
    assert await kinds_in(app, run_id) == [EntryKind.RETRY, EntryKind.RETRY, EntryKind.STEP]


async def test_a_step_that_fails_for_good_leaves_nothing(app: EddaApp, orders: Orders, write: Write) -> None:
    async def body(ctx: WorkflowContext) -> None:
        await write(ctx, f"lute {ctx.attempt}")
        raise ConnectionError("no answer from the luthier")

    with pytest.raises(RetryExhaustedError):
        await app.run(of_one_step(body, retry_policy=AT_ONCE))
    assert await orders.items() == []


async def test_a_result_that_cannot_be_stored_fails_the_step_at_once_and_leaves_nothing(
    app: EddaApp, orders: Orders, write: Write
) -> None:
    attempts: list[int] = []

    async def body(ctx: WorkflowContext) -> object:
        attempts.append(ctx.attempt)
        await write(ctx, "lute")
        return object()

    with pytest.raises(PayloadError, match="the result of step:1 cannot be stored"):
        await app.run(of_one_step(body, retry_policy=AT_ONCE))
    assert attempts == [1]
    assert await orders.items() == []


async def test_what_the_database_refuses_at_the_commit_fails_the_attempt(app: EddaApp, orders: Orders) -> None:
    """Here the last flush finds it, when the activity has returned already."""

    async def body(ctx: WorkflowContext) -> int:
        items = ["lute", "lute"] if ctx.attempt == 1 else ["lute", "harp"]
        ctx.session.add_all([Order(item=item) for item in items])
        return ctx.attempt

    run_id = await app.start(of_one_step(body, retry_policy=AT_ONCE))
    assert await result_of(app, run_id) == 2
    assert await orders.items() == ["harp", "lute"]


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
async def test_a_transaction_that_a_failed_statement_has_spoilt_is_not_taken_for_committed(
    app: EddaApp, orders: Orders
) -> None:
    """PostgreSQL goes on as if nothing were, and answers COMMIT with ROLLBACK."""

    async def body(ctx: WorkflowContext) -> int:
        async with ctx.transaction() as connection:
            await orders.insert(connection, "lute")
            if ctx.attempt == 1:
                with pytest.raises(Exception, match="does not exist"):
                    await connection.execute("SELECT * FROM nowhere")
        return ctx.attempt

    assert await app.run(of_one_step(body, retry_policy=AT_ONCE)) == 2
    assert await orders.items() == ["lute"]


# Attempts that take too long


async def test_an_attempt_that_takes_too_long_is_rolled_back(app: EddaApp, orders: Orders, write: Write) -> None:
    async def body(ctx: WorkflowContext) -> int:
        if ctx.attempt == 1:
            await write(ctx, "lute")
            await asyncio.Event().wait()
        await write(ctx, "lute")
        return ctx.attempt

    assert await app.run(of_one_step(body, retry_policy=AT_ONCE, timeout=SHORT)) == 2
    assert await orders.items() == ["lute"]


SLOW = {
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 15000000) SELECT max(i) FROM n",
    "postgres": "SELECT pg_sleep(5)",
    "mysql": "SELECT sleep(5)",
}
STATEMENT_TIMEOUT = 1.0
"""Seconds: less than these statements take, also on a fast machine."""


@pytest.mark.timed
async def test_a_statement_that_takes_too_long_is_rolled_back(app: EddaApp, orders: Orders, way: str) -> None:
    async def linger(ctx: WorkflowContext) -> None:
        if way == "session":
            await ctx.session.execute(text(SLOW[orders.kind]))
            return
        async with ctx.transaction() as connection:
            if orders.kind == "mysql":
                async with connection.cursor() as cursor:
                    await cursor.execute(SLOW[orders.kind])
            else:
                await connection.fetch(SLOW[orders.kind])

    async def body(ctx: WorkflowContext) -> int:
        await orders.write(way, ctx, f"lute {ctx.attempt}")
        if ctx.attempt == 1:
            await linger(ctx)
        return ctx.attempt

    assert await app.run(of_one_step(body, retry_policy=AT_ONCE, timeout=STATEMENT_TIMEOUT)) == 2
    assert await orders.items() == ["lute 2"]


@only_on_files
@pytest.mark.parametrize("owner", ["own engine", "engine of the user"])
async def test_a_cancelled_statement_frees_the_file_though_its_error_is_kept(
    database: Database, make_app: MakeApp, orders: Orders, owner: str
) -> None:
    """The traceback refers to the cursor, and SQLite keeps the transaction of a connection with an open cursor."""
    engine = create_async_engine(driver_url(database)) if owner == "engine of the user" else None
    app = await make_app(engine=engine)
    kept: list[BaseException] = []

    async def body(ctx: WorkflowContext) -> int:
        await orders.write("session", ctx, f"lute {ctx.attempt}")
        if ctx.attempt == 1:
            try:
                await ctx.session.execute(text(SLOW["sqlite"]))
            except BaseException as error:
                kept.append(error)
                raise
        return ctx.attempt

    async with asyncio.timeout(15.0):  # SQLite's own time-out for locks is longer
        assert await app.run(of_one_step(body, retry_policy=AT_ONCE, timeout=STATEMENT_TIMEOUT)) == 2
    assert [type(error) for error in kept] == [asyncio.CancelledError]
    assert await orders.items() == ["lute 2"]
    if engine is not None:
        await engine.dispose()


async def test_a_body_that_goes_on_after_it_was_given_up_commits_nothing(
    app: EddaApp, orders: Orders, write: Write
) -> None:
    given_up: list[int] = []

    async def body(ctx: WorkflowContext) -> int:
        await write(ctx, f"lute {ctx.attempt}")
        if ctx.attempt == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                given_up.append(ctx.attempt)
        return ctx.attempt

    assert await app.run(of_one_step(body, retry_policy=AT_ONCE, timeout=SHORT)) == 2
    assert given_up == [1]
    assert await orders.items() == ["lute 2"]


async def test_an_attempt_that_waits_in_vain_for_its_turn_is_given_up(
    make_app: MakeApp, database: Database, orders: Orders, way: str
) -> None:
    """For the file, or for the connections that the others have."""
    engine = create_async_engine(driver_url(database), pool_size=1, max_overflow=0)
    app = await make_app(engine=engine)
    rivals = ["harp", "viol"] if way == "transaction" and orders.kind != "sqlite" else ["harp"]
    holding: list[str] = []
    given_up = asyncio.Event()

    @activity
    async def hold(ctx: WorkflowContext, item: str) -> None:
        await orders.write(way, ctx, item)
        holding.append(item)
        await given_up.wait()

    @activity(timeout=SHORT, retry_policy=RetryPolicy(initial_interval=0.0, max_attempts=None))
    async def wait(ctx: WorkflowContext) -> int:
        await until(lambda: len(holding) == len(rivals), "the others have it")
        try:
            await orders.write(way, ctx, "lute")
        except asyncio.CancelledError:
            given_up.set()
            raise
        return ctx.attempt

    @workflow
    async def shop(ctx: WorkflowContext) -> int:
        holds = [asyncio.create_task(hold(ctx, item)) for item in rivals]
        attempts = await wait(ctx)
        await asyncio.gather(*holds)
        return attempts

    assert await app.run(shop) > 1
    assert await orders.items() == sorted([*rivals, "lute"])
    await app.shutdown()
    await engine.dispose()


# Cancels


async def test_a_step_that_its_workflow_gives_up_is_rolled_back(app: EddaApp, orders: Orders, write: Write) -> None:
    @activity
    async def place(ctx: WorkflowContext) -> None:
        await write(ctx, "lute")
        await asyncio.Event().wait()

    @activity
    async def note(ctx: WorkflowContext) -> None:
        await write(ctx, "gave up")

    @workflow
    async def shop(ctx: WorkflowContext) -> str:
        try:
            async with asyncio.timeout(SHORT):
                await place(ctx)
        except TimeoutError:
            await note(ctx)
        return "done"

    assert await app.run(shop) == "done"
    assert await orders.items() == ["gave up"]


@only_on_servers
async def test_a_step_of_a_run_that_is_cancelled_is_rolled_back(app: EddaApp, orders: Orders, write: Write) -> None:
    begun = asyncio.Event()

    async def body(ctx: WorkflowContext) -> None:
        await write(ctx, "lute")
        begun.set()
        await asyncio.Event().wait()

    run_id = await app.start(of_one_step(body))
    await begun.wait()
    await app.cancel(run_id)
    with pytest.raises(WorkflowCancelledError):
        await result_of(app, run_id)
    assert await orders.items() == []


@only_on_files
async def test_on_sqlite_a_cancel_comes_after_the_transaction(app: EddaApp, orders: Orders, write: Write) -> None:
    """It has to be written too, and there is one writer at a time."""
    begun, go = asyncio.Event(), asyncio.Event()

    @activity
    async def place(ctx: WorkflowContext, item: str) -> None:
        await write(ctx, item)
        begun.set()
        await go.wait()

    @workflow
    async def shop(ctx: WorkflowContext) -> None:
        await place(ctx, "lute")
        await asyncio.sleep(3600)

    run_id = await app.start(shop)
    await begun.wait()
    cancelling = asyncio.create_task(app.cancel(run_id))
    await asyncio.sleep(0.1)
    assert not cancelling.done()
    go.set()
    await cancelling
    with pytest.raises(WorkflowCancelledError):
        await result_of(app, run_id)
    assert await orders.items() == ["lute"]
    # The worker may read the cancel before the answer to its commit.
    recorded = [entry for kind in (EntryKind.STEP, EntryKind.LATE) for entry in await entries_of(app, run_id, kind)]
    assert [entry.ok for entry in recorded] == [True]


@pytest.fixture
def slow_commit(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Set when a step's commit begins, and to be set for it to go on."""
    begun, go, commit = asyncio.Event(), asyncio.Event(), StepEffects.commit

    async def slowly(work: StepEffects, value: bytes) -> None:
        begun.set()
        await go.wait()
        await commit(work, value)

    monkeypatch.setattr(StepEffects, "commit", slowly)
    return begun, go


async def test_a_commit_that_goes_through_though_its_step_was_given_up_is_recorded_late(
    app: EddaApp, orders: Orders, write: Write, slow_commit: tuple[asyncio.Event, asyncio.Event]
) -> None:
    begun, go = slow_commit

    @activity
    async def place(ctx: WorkflowContext) -> str:
        await write(ctx, "lute")
        return "ordered"

    @activity
    async def watch(ctx: WorkflowContext) -> None:
        await begun.wait()

    @workflow
    async def shop(ctx: WorkflowContext) -> None:
        placing = asyncio.create_task(place(ctx))
        await watch(ctx)
        placing.cancel()
        go.set()

    run_id = await app.start(shop)
    await result_of(app, run_id)
    assert await orders.items() == ["lute"]
    (entry,) = await entries_of(app, run_id, EntryKind.LATE)
    assert (entry.name, entry.ok, app.engine.codec.decode(entry.value)) == ("place", True, "ordered")
    assert await app.engine.storage.find_step_commit(RunId(run_id), 0, "place:1") is None


@only_on_servers
async def test_a_cancel_during_the_commit_comes_too_late_for_the_step(
    app: EddaApp, orders: Orders, write: Write, slow_commit: tuple[asyncio.Event, asyncio.Event]
) -> None:
    begun, go = slow_commit

    async def body(ctx: WorkflowContext) -> str:
        await write(ctx, "lute")
        return "ordered"

    run_id = await app.start(of_one_step(body))
    await begun.wait()
    await app.cancel(run_id)
    await until_recorded(app, run_id, EntryKind.CANCEL)
    go.set()
    with pytest.raises(WorkflowCancelledError):
        await result_of(app, run_id)
    assert await orders.items() == ["lute"]
    (entry,) = await entries_of(app, run_id, EntryKind.LATE)
    assert (entry.name, entry.ok) == ("step", True)


async def test_a_time_limit_does_not_count_while_it_commits(
    app: EddaApp, orders: Orders, write: Write, slow_commit: tuple[asyncio.Event, asyncio.Event]
) -> None:
    begun, go = slow_commit

    async def body(ctx: WorkflowContext) -> int:
        await write(ctx, "lute")
        return ctx.attempt

    run_id = await app.start(of_one_step(body, retry_policy=AT_ONCE, timeout=3))
    await begun.wait()
    await asyncio.sleep(3.1)
    go.set()
    assert await result_of(app, run_id) == 1
    assert await orders.items() == ["lute"]


# Lost leases


async def test_a_worker_that_has_lost_a_run_commits_nothing_for_it(
    make_app: MakeApp, database: Database, orders: Orders, write: Write
) -> None:
    """It does not know yet: the run is taken from it in the middle of the step."""
    app = await make_app()
    bodies: list[str] = []

    async def body(ctx: WorkflowContext) -> int:
        bodies.append(ctx.instance_id)
        if len(bodies) == 1:
            await app.engine.storage.release_run(RunId(ctx.instance_id))
        await write(ctx, "lute")
        return len(bodies)

    run_id = await app.start(of_one_step(body))
    assert await result_of(app, run_id) == 2
    assert await orders.items() == ["lute"]


async def test_only_one_of_two_workers_commits(make_app: MakeApp, orders: Orders, write: Write) -> None:
    """The first one is declared dead while it works, and goes on all the same."""
    bodies = 0
    begun, go = asyncio.Event(), asyncio.Event()

    async def body(ctx: WorkflowContext) -> int:
        nonlocal bodies
        bodies += 1
        me = bodies
        if me == 1:
            begun.set()
            await go.wait()
        await write(ctx, f"by {me}")
        return me

    one_step = of_one_step(body)
    first = await make_app()
    run_id = await first.start(one_step)
    await begun.wait()
    second = await make_app()
    assert first.engine.worker is not None
    await second.engine.storage.remove_worker(first.engine.worker.info.id)
    assert await result_of(second, run_id) == 2
    go.set()
    await first.shutdown()
    assert await orders.items() == ["by 2"]


# Kills


async def test_a_step_that_is_killed_with_its_process_is_done_again(
    make_app: MakeApp, orders: Orders, write: Write
) -> None:
    begun = asyncio.Event()
    bodies: list[int] = []

    async def body(ctx: WorkflowContext) -> int:
        bodies.append(ctx.attempt)
        await write(ctx, f"lute {len(bodies)}")
        if len(bodies) == 1:
            begun.set()
            await asyncio.Event().wait()
        return len(bodies)

    one_step = of_one_step(body)
    first = await make_app(settings=MORTAL)
    run_id = await first.start(one_step)
    await begun.wait()
    first.kill()
    second = await make_app(settings=MORTAL)
    assert await result_of(second, run_id) == 2
    assert await orders.items() == ["lute 2"]


async def test_a_process_that_is_killed_while_it_commits_leaves_nothing_behind(
    make_app: MakeApp, orders: Orders, write: Write, slow_commit: tuple[asyncio.Event, asyncio.Event]
) -> None:
    begun, go = slow_commit
    bodies = 0

    async def body(ctx: WorkflowContext) -> int:
        nonlocal bodies
        bodies += 1
        await write(ctx, f"lute {bodies}")
        return bodies

    one_step = of_one_step(body)
    before = asyncio.all_tasks()
    first, second = await make_app(), await make_app(worker=False)
    run_id = await first.start(one_step)
    await begun.wait()
    await kill(first, second)
    go.set()
    await second.shutdown()
    await until(lambda: asyncio.all_tasks() <= before, "nothing of it runs any more")
    assert await orders.items() in ([], ["lute 1"])  # before the third app, whose worker runs the step again
    third = await make_app()
    expected = await result_of(third, run_id)
    assert await orders.items() == [f"lute {expected}"]


class Strike:
    """At a step's record or the commit of it: the process dies before or after, or lives on without the answer."""

    def __init__(self, what: str, how: CrashMode) -> None:
        self._what = what
        self._how = how
        self._is_near = False
        self._task: asyncio.Task[Any] | None = None
        """The one that wrote the record: a claim or a batch beside it sends a COMMIT of its own."""
        self._loop = asyncio.get_running_loop()
        self.struck = asyncio.Event()
        self.has_struck = self.is_dead = False

    def before(self, statement: str) -> None:
        self._refuse_if_dead()
        if not self._is_near and "INSERT INTO edda_step_commit" in statement:
            self._is_near, self._task = True, _current_task()
        if self._how is CrashMode.BEFORE and self._is_here(statement):
            self._strike()

    def after(self, statement: str) -> None:
        self._refuse_if_dead()
        if self._how is not CrashMode.BEFORE and self._is_here(statement):
            self._strike()

    def _is_here(self, statement: str) -> bool:
        wanted = "edda_step_commit" if self._what == "record" else "COMMIT"
        is_ours = self._is_near and _current_task() is self._task
        return is_ours and not self.has_struck and wanted in statement

    def _strike(self) -> None:
        self.has_struck = True
        self._loop.call_soon_threadsafe(self.struck.set)
        self.is_dead = self._how is not CrashMode.UNKNOWN
        self._refuse_if_dead()
        raise StorageUnavailableError("the answer was lost")

    def _refuse_if_dead(self) -> None:
        if self.is_dead:
            raise SimulatedCrash


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # SQLite's writer thread, where one transaction is open at a time
        return None


@asynccontextmanager
async def app_struck_by(database: Database, strike: Strike) -> AsyncIterator[EddaApp]:
    app = EddaApp("test", url_of(database), storage=database.storage(strike), probe=strike, settings=RESTLESS)
    await app.initialize()
    try:
        yield app
    finally:
        await app.shutdown(grace=0.0)


@pytest.mark.parametrize("how", [CrashMode.BEFORE, CrashMode.AFTER])
@pytest.mark.parametrize("what", ["record", "commit"])
async def test_rows_and_record_are_there_together_wherever_the_process_dies(
    make_app: MakeApp, database: Database, orders: Orders, write: Write, how: CrashMode, what: str
) -> None:
    bodies = 0

    async def body(ctx: WorkflowContext) -> int:
        nonlocal bodies
        bodies += 1
        await write(ctx, f"lute {bodies}")
        return bodies

    strike = Strike(what, how)
    async with app_struck_by(database, strike) as first:
        run_id = await first.start(of_one_step(body))
        await strike.struck.wait()
        second = await make_app()
        await kill(first, second)
    expected = 1 if (what, how) == ("commit", CrashMode.AFTER) else 2
    assert await result_of(second, run_id) == expected
    assert await orders.items() == [f"lute {expected}"]
    assert await second.engine.storage.find_step_commit(RunId(run_id), 0, "step:1") is None


async def test_what_a_killed_process_committed_is_undone_if_the_run_was_cancelled(
    make_app: MakeApp, database: Database, orders: Orders, write: Write
) -> None:
    """Nobody but the database knows that it happened."""

    @compensation
    async def call_off(ctx: WorkflowContext, item: str, result: str) -> None:
        await write(ctx, f"no {item}, {result}")

    @activity
    @on_failure(call_off)
    async def place(ctx: WorkflowContext, item: str) -> str:
        await write(ctx, item)
        return "no. 7"

    @workflow
    async def shop(ctx: WorkflowContext) -> None:
        await place(ctx, "lute")
        await asyncio.sleep(3600)

    strike = Strike("commit", CrashMode.AFTER)
    async with app_struck_by(database, strike) as first:
        run_id = await first.start(shop)
        await strike.struck.wait()
        watcher = await make_app(worker=False)
        await watcher.cancel(run_id)
        await kill(first, watcher)
    second = await make_app()
    with pytest.raises(WorkflowCancelledError):
        await result_of(second, run_id)
    assert await orders.items() == ["lute", "no lute, no. 7"]
    assert await undos_of(second, run_id) == ["undo:1/call_off"]


async def test_who_is_shut_down_lets_a_transaction_finish_or_rolls_it_back(
    make_app: MakeApp, orders: Orders, write: Write
) -> None:
    begun, go, bodies = asyncio.Event(), asyncio.Event(), 0

    async def body(ctx: WorkflowContext) -> int:
        nonlocal bodies
        bodies += 1
        await write(ctx, f"{ctx.instance_id} {bodies}")
        if bodies < 3:
            begun.set()
            await go.wait()
        return bodies

    one_step = of_one_step(body)
    first = await make_app()
    run_id = await first.start(one_step.options(id="lute"))
    await begun.wait()
    leaving = asyncio.create_task(first.shutdown(grace=20))
    go.set()
    await leaving
    assert await orders.items() == ["lute 1"]
    begun.clear()
    go.clear()
    second = await make_app()
    assert await result_of(second, run_id) == 1
    run_id = await second.start(one_step.options(id="harp"))
    await begun.wait()
    await second.shutdown(grace=0.0)
    assert await orders.items() == ["lute 1"]
    third = await make_app()
    assert await result_of(third, run_id) == 3
    assert await orders.items() == ["harp 3", "lute 1"]


# Lost answers


@pytest.mark.parametrize("policy", [ONCE, AT_ONCE])
async def test_a_commit_whose_answer_was_lost_is_known_to_have_gone_through(
    database: Database, orders: Orders, write: Write, policy: RetryPolicy
) -> None:
    bodies = 0

    async def body(ctx: WorkflowContext) -> int:
        nonlocal bodies
        bodies += 1
        await write(ctx, f"lute {bodies}")
        return bodies

    strike = Strike("commit", CrashMode.UNKNOWN)
    async with app_struck_by(database, strike) as app:
        run_id = await app.start(of_one_step(body, retry_policy=policy))
        assert await result_of(app, run_id) == 1
        assert strike.struck.is_set()
        assert await kinds_in(app, run_id) == [EntryKind.STEP]
        assert await app.engine.storage.find_step_commit(RunId(run_id), 0, "step:1") is None
    assert await orders.items() == ["lute 1"]


async def test_a_transaction_that_was_lost_before_the_commit_is_tried_again(
    database: Database, orders: Orders, write: Write
) -> None:
    bodies = 0

    async def body(ctx: WorkflowContext) -> int:
        nonlocal bodies
        bodies += 1
        await write(ctx, f"lute {bodies}")
        return bodies

    strike = Strike("record", CrashMode.UNKNOWN)
    async with app_struck_by(database, strike) as app:
        assert await app.run(of_one_step(body, retry_policy=AT_ONCE)) == 2
        assert strike.struck.is_set()
    assert await orders.items() == ["lute 2"]


async def test_a_commit_that_is_still_on_its_way_is_waited_for(app: EddaApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is lost, and the database is not done yet: who looked at once would find nothing and fail the step."""
    storage, committing = app.engine.storage, []

    async def commit_late(joint: Any) -> None:
        await asyncio.sleep(1)
        await joint.commit()

    async def commit(work: StepEffects, value: bytes) -> None:
        worker = app.engine.worker
        assert worker is not None
        run = work._run
        await work._rollback()
        joint = await storage.begin()
        done = StepCommit(work._step, work._attempt, value, 0)
        await joints.write_step_commit(
            joint, StepCommitWrite(worker.worker_id, run.run_id, run.epoch, run.generation, done)
        )
        committing.append(asyncio.create_task(commit_late(joint)))
        raise StorageUnavailableError("the connection was lost")

    monkeypatch.setattr(StepEffects, "commit", commit)

    async def body(ctx: WorkflowContext) -> str:
        async with ctx.transaction():
            return "ordered"

    run_id = await app.start(of_one_step(body, retry_policy=ONCE))
    assert await result_of(app, run_id) == "ordered"
    assert await kinds_in(app, run_id) == [EntryKind.STEP]
    await asyncio.gather(*committing)
