"""SQLAlchemy's sessions on Edda's database. Imported only when somebody uses one.

A session takes its connection at the first statement, so an activity that looks at `ctx.session` and writes nothing
costs nothing. On SQLite its transaction begins with the file's turn and BEGIN IMMEDIATE: the journal waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

from sqlalchemy import Connection, CursorResult, Engine, event, text
from sqlalchemy.engine import URL, ExceptionContext
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, AsyncSessionTransaction, create_async_engine
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.pool import AsyncAdaptedQueuePool, ConnectionPoolEntry
from sqlalchemy.util import await_only

from edda.errors import ConfigurationError, NotConnectedError, NotInWorkflowError, StorageUnavailableError
from edda.storage.shared.session_target import SessionTarget

from .ports import Dialect, StatementProbe, Transactions, WriteLock

_WAITING = "edda_waiting"

# SQLAlchemy tells of every connection that was cut, with a traceback and under the name of our class, since 2.1 as one
# of its own. It is replaced.
for _place in (__name__, "sqlalchemy.pool.impl"):
    logging.getLogger(f"{_place}._WaitingPool").setLevel(logging.CRITICAL)

_READ_ONLY = "25006"
"""PostgreSQL refused to write: the server was demoted, or is read-only by its configuration."""
_LOOK_EVERY = 1.0
"""Seconds between two looks of who waits for a connection."""
_BUSY_TIMEOUT = 30
"""Seconds that SQLite waits for a foreign writer."""


def dialect_of(name: str) -> Dialect:
    return cast(Dialect, {"mariadb": "mysql", "postgres": "postgresql"}.get(name, name))


class SavepointLog(Protocol):
    """What a step has sent: of what it sent in a savepoint that is rolled back nothing counts."""

    @property
    def holder(self) -> str:
        """What the log calls the step."""
        ...

    def savepoint(self) -> Any: ...

    def rollback_to(self, mark: Any) -> None: ...


# Inside


class _StepSession(Session):
    """What `ctx.session` stands on, and code in `run_sync` is given."""

    def __init__(
        self,
        bind: Engine,
        joints: Transactions,
        ledger: SavepointLog,
        check: Callable[[Connection], None],
        **options: Any,
    ) -> None:
        self.joints = joints
        self.check = check
        """Refuses a connection that the step's statements must not go over."""
        self.ledger = ledger
        self.marks: dict[SessionTransaction, Any] = {}
        """How much the step had sent when each of its transactions began."""
        self.turn: WriteLock | None = None
        self.root: Connection | None = None
        """What its transaction runs on, as long as there is one."""
        self.may_commit = False
        super().__init__(bind, **options)


@event.listens_for(_StepSession, "after_transaction_create")
def _savepoint(session: _StepSession, transaction: SessionTransaction) -> None:
    session.marks[transaction] = session.ledger.savepoint()


@event.listens_for(_StepSession, "after_soft_rollback")
def _rollback_to_savepoint(session: _StepSession, transaction: SessionTransaction) -> None:
    session.ledger.rollback_to(session.marks[transaction])


@event.listens_for(_StepSession, "after_begin")
def _begun(session: _StepSession, transaction: SessionTransaction, connection: Connection) -> None:
    if not transaction.nested:
        if connection.engine is session.bind:  # a statement may be for another database of the user's
            session.check(connection)
            session.root = connection
        if connection.dialect.name == "sqlite":
            _acquire_write_lock(session, connection)


def _acquire_write_lock(session: _StepSession, connection: Connection) -> None:
    """Runs between the session and its driver, where something can be awaited though this is no coroutine."""
    if session.turn is not None:  # of a transaction whose end was cancelled
        await_only(session.turn.end())
    session.turn = await_only(session.joints.acquire_write_lock(session.ledger.holder))
    driver: Any = connection.connection.driver_connection
    if not driver.in_transaction:  # the user's engine may have its own way to begin
        connection.exec_driver_sql("BEGIN IMMEDIATE")


@event.listens_for(_StepSession, "after_transaction_end")
def _release_write_lock(session: _StepSession, transaction: SessionTransaction) -> None:
    """However it ended: by commit, rollback, `reset()` or a lost connection."""
    if transaction.parent is None:
        session.root = None
        if session.turn is not None:
            turn, session.turn = session.turn, None
            await_only(turn.end())


@event.listens_for(_StepSession, "before_commit")
def _refuse_commit(session: _StepSession) -> None:
    if not session.may_commit and not session.in_nested_transaction():
        raise NotInWorkflowError(
            "ctx.session.commit(): Edda commits the session together with the step's record when the activity returns; "
            "use flush() to send what is pending, or begin_nested() for a savepoint"
        )


class StepSession(AsyncSession):
    """A session that Edda ends, together with the step's record."""

    sync_session_class = _StepSession
    sync_session: _StepSession

    def begin(self) -> AsyncSessionTransaction:
        """As people write it: `async with session.begin():`. Here it is a savepoint."""
        return self.begin_nested()

    async def close(self) -> None:
        """Nothing: `async with ctx.session as session:` must not lose what was written."""

    async def flush_pending(self) -> None:
        """As `flush()`, but at no cost if there is nothing: SQLAlchemy would look for it on another stack."""
        session = self.sync_session
        if session.new or session.dirty or session.deleted:
            await self.flush()

    async def end(self) -> None:
        """For good: whoever still has it meets an error, and opens no transaction that nobody ends."""
        try:
            if self.in_transaction():
                await super().close()
            else:  # nothing is left that has to be awaited
                self.sync_session.close()
        finally:
            self.sync_session.marks.clear()  # they know the session, and it knows them
            if self.sync_session.turn is not None:
                await self.sync_session.turn.end()


class CallerTransaction:
    """Somebody's session, in which Edda writes too. Who opened it ends it."""

    def __init__(
        self,
        session: AsyncSession,
        dialect: Dialect,
        probe: StatementProbe | None = None,
        *,
        is_certified: bool = False,
    ) -> None:
        self.dialect = dialect
        self.is_certified = is_certified
        self.connection = session
        self._probe = probe

    @property
    def is_lost(self) -> bool:
        return False  # the session is its user's, who finds out

    @property
    def has_begun(self) -> bool:
        return self.connection.in_transaction()

    async def execute(self, sql: str, values: Mapping[str, Any]) -> int:
        self._tell_before(sql)
        count = await self._send(sql, values)
        self._tell_after(sql)
        return count

    async def _send(self, sql: str, values: Mapping[str, Any]) -> int:
        """Past SQLAlchemy where that is safe: a third of a step's time goes into what it does for a statement."""
        driver = await self._asyncpg()
        if driver is None:
            return cast("CursorResult[Any]", await self.connection.execute(text(sql), dict(values))).rowcount
        from .postgres.parameters import bind
        from .postgres.session import affected_rows

        statement, arguments = bind(sql, values)
        return affected_rows(await driver.execute(statement, *arguments))

    async def _asyncpg(self) -> Any | None:
        """The driver's own connection, if it is that driver and SQLAlchemy has sent its BEGIN."""
        if self.dialect != "postgresql" or self.connection.get_bind().dialect.driver != "asyncpg":
            return None
        root = await self._root()
        # An engine that is told to prepare nothing is behind a pooler; asyncpg would, if it were asked directly.
        if root is None or not _keeps_prepared_statements(root):
            return None
        driver: Any = root.connection.driver_connection
        return driver if driver is not None and driver.is_in_transaction() else None

    async def _root(self) -> Connection | None:
        return (await self.connection.connection()).sync_connection

    async def fetch(self, sql: str, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        self._tell_before(sql)
        rows = (await self.connection.execute(text(sql), dict(values))).all()
        self._tell_after(sql)
        return rows

    async def commit(self) -> None:
        raise NotImplementedError("the session belongs to who opened it")

    async def rollback(self) -> None:
        raise NotImplementedError("the session belongs to who opened it")

    def _tell_before(self, statement: str) -> None:
        if self._probe is not None:
            self._probe.before(statement)

    def _tell_after(self, statement: str) -> None:
        if self._probe is not None:
            self._probe.after(statement)


class StepTransaction(CallerTransaction):
    """The session of a step: a transaction that the user's code and Edda share, and Edda ends."""

    connection: StepSession

    @property
    def is_lost(self) -> bool:
        root = self.connection.sync_session.root
        if root is None:
            return False
        if root.closed or root.invalidated:
            return True
        is_closed = getattr(root.connection.driver_connection, "is_closed", None)  # of asyncpg
        return is_closed is not None and bool(is_closed())

    @property
    def has_begun(self) -> bool:
        return self.connection.sync_session.root is not None

    async def _root(self) -> Connection | None:
        return self.connection.sync_session.root

    async def commit(self) -> None:
        session = self.connection
        session.sync_session.may_commit = True
        try:
            self._tell_before("COMMIT")
            await session.commit()
            self._tell_after("COMMIT")
        except DBAPIError as error:
            if error.connection_invalidated:
                raise StorageUnavailableError(f"the connection was lost while committing: {error}") from error
            raise
        except OSError as error:
            raise StorageUnavailableError(f"the connection was lost while committing: {error}") from error
        finally:
            await self._close()

    async def rollback(self) -> None:
        try:
            if self.connection.in_transaction():
                self._tell_before("ROLLBACK")
                await self.connection.rollback()
                self._tell_after("ROLLBACK")
        finally:
            await self._close()

    async def _close(self) -> None:
        with suppress(Exception):  # a connection that is gone cannot be given back, and need not be
            await self.connection.end()


class Sessions:
    """Makes the sessions of one app, on the user's own engine or on one of ours."""

    def __init__(
        self,
        target: SessionTarget,
        storage: Transactions,
        *,
        engine: AsyncEngine | None = None,
        pool_size: int = 5,
        probe: StatementProbe | None = None,
    ) -> None:
        _check(engine)
        self._engine = engine or _open_engine(target, pool_size)
        self._target = target
        self._is_own = engine is None
        self._storage = storage
        self._probe = probe
        self._connections: set[Any] = set()
        self.dialect = dialect_of(self._engine.dialect.name)
        if self._is_own:
            event.listen(self._engine.sync_engine, "connect", lambda made, _: self._connections.add(made))
            event.listen(self._engine.sync_engine, "close", lambda gone, _: self._connections.discard(gone))
            event.listen(self._engine.sync_engine, "connect", self._wait_for_cluster)

    def make(self, ledger: SavepointLog) -> tuple[StepSession, StepTransaction]:
        session = StepSession(
            self._engine,
            expire_on_commit=False,
            close_resets_only=False,
            joints=self._storage,
            ledger=ledger,
            check=self._check_connection,
        )
        return session, StepTransaction(session, self.dialect, self._probe, is_certified=self._storage.is_certified)

    def _wait_for_cluster(self, connection: Any, _: object) -> None:
        """A step that goes on at another node of a cluster sees what the steps before it committed, as elsewhere."""
        if self.dialect == "mysql" and self._storage.is_certified:
            cursor = connection.cursor()
            cursor.execute("SET SESSION wsrep_sync_wait = 7")
            cursor.close()

    def _check_connection(self, connection: Connection) -> None:
        """Ours are made for what is in front of the server; the user's engine may not be."""
        if not self._is_own and self._target.is_pooled() and _keeps_prepared_statements(connection):
            raise ConfigurationError(
                "ctx.session: a connection pooler is in front of PostgreSQL, and the engine given to EddaApp keeps "
                "prepared statements across transactions: make it with create_async_engine(url, "
                "connect_args={'statement_cache_size': 0, 'prepared_statement_cache_size': 0, "
                "'prepared_statement_name_func': lambda: ''}), or add ?pooler=session to db_url if it pools by session"
            )

    async def close(self) -> None:
        """Whoever is still at work has been given up: its run is no longer ours, so it could not commit."""
        if self._is_own:
            await self._engine.dispose()
            self.kill()

    def kill(self) -> None:
        """Drop our own connections at once, as a dying process would."""
        for connection in tuple(self._connections):
            with suppress(Exception):  # closed already, in one of many ways
                connection.terminate()


def _check(engine: AsyncEngine | None) -> None:
    if engine is not None and _commits_by_itself(engine):
        raise ConfigurationError(
            "ctx.session needs transactions: the engine given to EddaApp has isolation_level='AUTOCOMMIT'"
        )


def _commits_by_itself(engine: AsyncEngine) -> bool:
    """On SQLite it only means that somebody else says BEGIN, which we do."""
    level = engine.sync_engine.get_execution_options().get("isolation_level")
    known = level or getattr(engine.dialect, "_on_connect_isolation_level", None)
    return known == "AUTOCOMMIT" and engine.dialect.name != "sqlite"


def _keeps_prepared_statements(connection: Connection) -> bool:
    """Of the adapter to asyncpg, the only driver that prepares statements without being asked."""
    adapter = connection.connection.dbapi_connection
    return getattr(adapter, "_prepared_statement_cache", None) is not None


class _WaitingPool(AsyncAdaptedQueuePool):
    """Whoever finds no free connection waits for one, however long that takes."""

    __module__ = AsyncAdaptedQueuePool.__module__  # the log is named by it: what the pool says is SQLAlchemy's to say

    def _do_get(self) -> ConnectionPoolEntry:
        while True:
            try:
                return super()._do_get()
            except PoolTimeoutError:  # it has to look now and then: nobody is told of a connection that failed
                continue


def _open_engine(target: SessionTarget, size: int) -> AsyncEngine:
    """Connected as the storage is, by the storage's own connections."""
    pool: dict[str, Any] = {
        "poolclass": _WaitingPool,
        # What one step holds while its code runs another cannot use: more of them share the server's commits.
        "pool_size": 3 * size,
        "max_overflow": 0,
        "pool_timeout": _LOOK_EVERY,
    }
    if target.dialect == "sqlite":
        pool["pool_size"] = 1  # one can write at a time, and who reads begins with BEGIN IMMEDIATE too
        path = URL.create("sqlite+aiosqlite", database=target.path)
        return create_async_engine(path, connect_args={"timeout": _BUSY_TIMEOUT}, **pool)
    if target.dialect == "mysql":
        pool["pool_pre_ping"] = True
    driver = {"postgresql": "postgresql+asyncpg://", "mysql": "mysql+asyncmy://"}[target.dialect]

    async def connect() -> Any:
        assert target.connect is not None
        try:
            return await target.connect()
        except Exception as error:  # refused, unreachable, wrong password, no connection left: it is not the step's
            raise NotConnectedError(f"ctx.session cannot connect to the database: {error!r}") from error

    def create() -> Any:  # as `async_creator`, which takes no arguments for the adapter
        dbapi: Any = engine.dialect.dbapi
        return dbapi.connect(async_creator_fn=connect, **target.arguments())

    engine = create_async_engine(driver, creator=create, isolation_level="READ COMMITTED", **pool)
    if target.dialect == "postgresql":
        event.listen(engine.sync_engine, "checkout", _refuse_unusable)
        event.listen(engine.sync_engine, "handle_error", _note_read_only)
    return engine


def _refuse_unusable(connection: Any, record: object, proxy: object) -> None:
    """The driver knows when the server has gone, so nobody has to ask: a ping would be three round trips per step."""
    driver = connection.driver_connection
    if driver.is_closed() or driver.is_read_only:
        raise DisconnectionError("the server has closed the connection, or is not the primary any more")


def _note_read_only(context: ExceptionContext) -> None:
    """A statement of SQLAlchemy's, which prepares and executes past the methods of the connection."""
    if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY and context.connection is not None:
        driver: Any = context.connection.connection.driver_connection
        driver.is_read_only = True


def caller_transaction(session: AsyncSession) -> CallerTransaction:
    """A session from outside of any workflow, such as a web handler's."""
    if not isinstance(session, AsyncSession):
        raise TypeError(f"session: expected an AsyncSession of SQLAlchemy, got {type(session).__name__}")
    return CallerTransaction(session, dialect_of(session.get_bind().dialect.name))


def on_commit(session: AsyncSession, call: Callable[[], object]) -> None:
    """Once, when the session's transaction is committed; a savepoint's end is not that."""
    inner = session.sync_session
    if _WAITING not in inner.info:
        inner.info[_WAITING] = set()
        event.listen(inner, "after_commit", _run_callbacks)
    inner.info[_WAITING].add(call)


def _run_callbacks(session: Session) -> None:
    if not session.in_nested_transaction():
        waiting, session.info[_WAITING] = session.info[_WAITING], set()
        for call in waiting:
            call()
