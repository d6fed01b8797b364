"""SQLAlchemy's sessions on Edda's database. Imported only when a session is used.

A session takes its connection at the first statement, so an activity that reads `ctx.session` and runs no statement
costs nothing. On SQLite its transaction holds the file's write lock from BEGIN IMMEDIATE on: the journal waits for it.
"""

from __future__ import annotations

import logging
from asyncio import CancelledError, shield
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

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

T = TypeVar("T")

_CALLBACKS = "edda_on_commit"

# SQLAlchemy logs every connection that was cut, with a traceback, under the name of this pool class; since 2.1 in its
# own module. The pool replaces the connection, so the lines say nothing new.
for _module in (__name__, "sqlalchemy.pool.impl"):
    logging.getLogger(f"{_module}._WaitingPool").setLevel(logging.CRITICAL)

_READ_ONLY = "25006"
"""PostgreSQL refused to write: the server was demoted, or is read-only by its configuration."""
_POOL_CHECK_SECONDS = 1.0
"""How often a task that waits for a connection of the pool checks for one."""
_BUSY_TIMEOUT = 30
"""Seconds that SQLite waits for a writer that is not Edda."""


def dialect_of(name: str) -> Dialect:
    return cast(Dialect, {"mariadb": "mysql", "postgres": "postgresql"}.get(name, name))


class SavepointLog(Protocol):
    """The events that a step has sent; a rollback to a savepoint drops those sent since."""

    @property
    def holder(self) -> str:
        """The name of the step in log lines."""
        ...

    def savepoint(self) -> Any: ...

    def rollback_to(self, mark: Any) -> None: ...


class _StepSession(Session):
    """The synchronous session of `ctx.session`; `run_sync` passes it to its function."""

    def __init__(
        self,
        bind: Engine,
        transactions: Transactions,
        sent: SavepointLog,
        check: Callable[[Connection], None],
        **options: Any,
    ) -> None:
        self.transactions = transactions
        self.check = check
        """Raises for a connection that the step's statements must not use."""
        self.sent = sent
        self.savepoints: dict[SessionTransaction, Any] = {}
        """How much the step had sent when each of its transactions began."""
        self.write_lock: WriteLock | None = None
        self.root: Connection | None = None
        """The connection of its transaction, while there is one."""
        self.may_commit = False
        super().__init__(bind, **options)


@event.listens_for(_StepSession, "after_transaction_create")
def _savepoint(session: _StepSession, transaction: SessionTransaction) -> None:
    session.savepoints[transaction] = session.sent.savepoint()


@event.listens_for(_StepSession, "after_soft_rollback")
def _rollback_to_savepoint(session: _StepSession, transaction: SessionTransaction) -> None:
    session.sent.rollback_to(session.savepoints[transaction])


@event.listens_for(_StepSession, "after_begin")
def _begun(session: _StepSession, transaction: SessionTransaction, connection: Connection) -> None:
    if not transaction.nested:
        if connection.engine is session.bind:  # the statement may be for another database of the user
            session.check(connection)
            session.root = connection
        if connection.dialect.name == "sqlite":
            # SQLAlchemy is between the session and its driver: there `await_only` works though this is no coroutine.
            if session.write_lock is not None:  # of a transaction whose end was cancelled
                await_only(session.write_lock.end())
            session.write_lock = await_only(session.transactions.acquire_write_lock(session.sent.holder))
            driver: Any = connection.connection.driver_connection
            if not driver.in_transaction:  # the user's engine may have sent its own BEGIN
                connection.exec_driver_sql("BEGIN IMMEDIATE")


@event.listens_for(_StepSession, "after_transaction_end")
def _release_write_lock(session: _StepSession, transaction: SessionTransaction) -> None:
    """After a commit, a rollback, `reset()` or a lost connection."""
    if transaction.parent is None:
        session.root = None
        if session.write_lock is not None:
            lock, session.write_lock = session.write_lock, None
            await_only(lock.end())


@event.listens_for(_StepSession, "before_commit")
def _refuse_commit(session: _StepSession) -> None:
    if not session.may_commit and not session.in_nested_transaction():
        raise NotInWorkflowError(
            "ctx.session.commit(): Edda commits the session together with the step's record when the activity returns; "
            "use flush() to send what is pending, or begin_nested() for a savepoint"
        )


class StepSession(AsyncSession):
    """A session that Edda commits, together with the step commit."""

    sync_session_class = _StepSession
    sync_session: _StepSession

    def begin(self) -> AsyncSessionTransaction:
        """A savepoint: so `async with session.begin():` works inside the step's transaction."""
        return self.begin_nested()

    async def close(self) -> None:
        """Does nothing: `async with ctx.session as session:` must not roll back what was written."""

    async def flush_pending(self) -> None:
        """`flush()`, but only if there is something to flush: SQLAlchemy would switch to a greenlet to find out."""
        session = self.sync_session
        if session.new or session.dirty or session.deleted:
            await self.flush()

    async def end(self) -> None:
        """Close for good: later use raises an error, and cannot open a transaction that would stay open."""
        try:
            if self.in_transaction():
                await super().close()
            else:  # without a transaction closing awaits nothing
                self.sync_session.close()
        finally:
            self.sync_session.savepoints.clear()  # breaks the reference cycle with the session
            if self.sync_session.write_lock is not None:
                await self.sync_session.write_lock.end()


class CallerTransaction:
    """A session of the caller, in which Edda writes too. The caller commits it."""

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
        return False  # the caller's next statement finds out

    @property
    def has_begun(self) -> bool:
        return self.connection.in_transaction()

    async def execute(self, sql: str, values: Mapping[str, Any]) -> int:
        return await self._probed(sql, self._send, sql, values)

    async def _send(self, sql: str, values: Mapping[str, Any]) -> int:
        """Sends it through asyncpg directly where that is safe: SQLAlchemy's work per statement is a third of a step's
        time."""
        driver = await self._asyncpg()
        if driver is None:
            return cast("CursorResult[Any]", await self.connection.execute(text(sql), dict(values))).rowcount
        from .postgres.connection import affected_rows
        from .shared.named_parameters import bind_positional

        statement, arguments = bind_positional(sql, values)
        return affected_rows(await driver.execute(statement, *arguments))

    async def _asyncpg(self) -> Any | None:
        """asyncpg's connection, if the session uses asyncpg and SQLAlchemy has sent its BEGIN."""
        if self.dialect != "postgresql" or self.connection.get_bind().dialect.driver != "asyncpg":
            return None
        root = await self._root()
        # An engine that keeps no prepared statements is behind a pooler; asyncpg itself would prepare this one.
        if root is None or not _keeps_prepared_statements(root):
            return None
        driver: Any = root.connection.driver_connection
        return driver if driver is not None and driver.is_in_transaction() else None

    async def _root(self) -> Connection | None:
        return (await self.connection.connection()).sync_connection

    async def fetch(self, sql: str, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        return (await self._probed(sql, self.connection.execute, text(sql), dict(values))).all()

    async def commit(self) -> None:
        raise NotImplementedError("the caller commits or rolls back its own session")

    async def rollback(self) -> None:
        raise NotImplementedError("the caller commits or rolls back its own session")

    async def _probed(self, statement: str, send: Callable[..., Awaitable[T]], *values: Any) -> T:
        if self._probe is None:
            return await send(*values)
        self._probe.before(statement)
        answer = await send(*values)
        self._probe.after(statement)
        return answer


class StepTransaction(CallerTransaction):
    """The session of a step: a transaction that the user's code and Edda share, and Edda commits or rolls back."""

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
            await self._probed("COMMIT", session.commit)
        except (DBAPIError, OSError) as error:
            if isinstance(error, DBAPIError) and not error.connection_invalidated:
                raise
            raise StorageUnavailableError(f"the connection was lost while committing: {error}") from error
        finally:
            await self._close()

    async def rollback(self) -> None:
        try:
            if self.connection.in_transaction():
                await self._probed("ROLLBACK", self.connection.rollback)
        finally:
            await self._close()

    async def _close(self) -> None:
        with suppress(Exception):  # a lost connection cannot be given back to the pool, and need not be
            await self.connection.end()


class Sessions:
    """Makes the sessions of one app, on the user's engine or on an engine of Edda's."""

    def __init__(
        self,
        target: SessionTarget,
        storage: Transactions,
        *,
        engine: AsyncEngine | None = None,
        pool_size: int = 5,
        probe: StatementProbe | None = None,
    ) -> None:
        if engine is not None and _is_autocommit(engine):
            raise ConfigurationError(
                "ctx.session needs transactions: the engine given to EddaApp has isolation_level='AUTOCOMMIT'"
            )
        self._engine = engine or _open_engine(target, pool_size)
        self._target = target
        self._is_own = engine is None
        self._storage = storage
        self._probe = probe
        self._connections: set[Any] = set()
        self.dialect = dialect_of(self._engine.dialect.name)
        engine_events = self._engine.sync_engine
        if self.dialect == "sqlite" and not event.contains(engine_events, "invalidate", _roll_back_cancelled):
            event.listen(engine_events, "invalidate", _roll_back_cancelled)
        if self._is_own:
            event.listen(self._engine.sync_engine, "connect", lambda opened, _: self._connections.add(opened))
            event.listen(self._engine.sync_engine, "close", lambda closed, _: self._connections.discard(closed))
            event.listen(self._engine.sync_engine, "connect", self._wait_for_cluster)

    def make(self, sent: SavepointLog) -> tuple[StepSession, StepTransaction]:
        session = StepSession(
            self._engine,
            expire_on_commit=False,
            close_resets_only=False,
            transactions=self._storage,
            sent=sent,
            check=self._check_connection,
        )
        return session, StepTransaction(session, self.dialect, self._probe, is_certified=self._storage.is_certified)

    def _wait_for_cluster(self, connection: Any, _: object) -> None:
        """On a cluster a statement waits until its node has applied earlier commits: a step sees what earlier steps
        committed at other nodes."""
        if self.dialect == "mysql" and self._storage.is_certified:
            cursor = connection.cursor()
            cursor.execute("SET SESSION wsrep_sync_wait = 7")
            cursor.close()

    def _check_connection(self, connection: Connection) -> None:
        """Edda's own engine is set up for a connection pooler in front of the server; the user's engine may not be."""
        if not self._is_own and self._target.is_pooled() and _keeps_prepared_statements(connection):
            raise ConfigurationError(
                "ctx.session: a connection pooler is in front of PostgreSQL, and the engine given to EddaApp keeps "
                "prepared statements across transactions: make it with create_async_engine(url, "
                "connect_args={'statement_cache_size': 0, 'prepared_statement_cache_size': 0, "
                "'prepared_statement_name_func': lambda: ''}), or add ?pooler=session to db_url if it pools by session"
            )

    async def close(self) -> None:
        """A step that is still running was abandoned: this worker no longer owns its run, so it could not commit."""
        if self._is_own:
            await self._engine.dispose()
            self.kill()

    def kill(self) -> None:
        """Terminate the connections of Edda's own engine at once, as the death of the process would."""
        for connection in tuple(self._connections):
            with suppress(Exception):  # closed already: drivers raise different errors
                connection.terminate()


def _is_autocommit(engine: AsyncEngine) -> bool:
    """Not on SQLite: there it only means that the driver sends no BEGIN, and this module does."""
    level = engine.sync_engine.get_execution_options().get("isolation_level")
    known = level or getattr(engine.dialect, "_on_connect_isolation_level", None)
    return known == "AUTOCOMMIT" and engine.dialect.name != "sqlite"


def _roll_back_cancelled(connection: Any, record: object, error: BaseException | None) -> None:
    """Called before SQLAlchemy closes a connection, as after a cancelled statement. SQLite does not end the transaction
    of a closed connection while one of its statements is still referenced, and the traceback of the cancelled step
    refers to its cursor: all writers would wait until Python's garbage collector has removed both."""
    if isinstance(error, CancelledError) and hasattr(connection.driver_connection, "interrupt"):  # of aiosqlite
        with suppress(Exception):  # closed already
            await_only(shield(_interrupt(connection.driver_connection)))


async def _interrupt(driver: Any) -> None:
    await driver.interrupt()
    await driver.rollback()


def _keeps_prepared_statements(connection: Connection) -> bool:
    """Asks the adapter to asyncpg, the only driver that prepares statements by itself."""
    adapter = connection.connection.dbapi_connection
    return getattr(adapter, "_prepared_statement_cache", None) is not None


class _WaitingPool(AsyncAdaptedQueuePool):
    """A task that finds no free connection waits for one, without a time-out."""

    __module__ = AsyncAdaptedQueuePool.__module__  # names the pool's logger: its lines are SQLAlchemy's

    def _do_get(self) -> ConnectionPoolEntry:
        while True:
            try:
                return super()._do_get()
            except PoolTimeoutError:  # waits in short pieces: a waiting task is not woken when a connection failed
                continue


def _open_engine(target: SessionTarget, size: int) -> AsyncEngine:
    """An engine whose connections the storage opens, with the storage's settings."""
    pool: dict[str, Any] = {
        "poolclass": _WaitingPool,
        # A step holds its connection while its code runs: with more connections more steps share the server's commits.
        "pool_size": 3 * size,
        "max_overflow": 0,
        "pool_timeout": _POOL_CHECK_SECONDS,
    }
    if target.dialect == "sqlite":
        pool["pool_size"] = 1  # one session has the write lock at a time, also to read: see BEGIN IMMEDIATE above
        path = URL.create("sqlite+aiosqlite", database=target.path)
        return create_async_engine(path, connect_args={"timeout": _BUSY_TIMEOUT}, **pool)
    if target.dialect == "mysql":
        pool["pool_pre_ping"] = True
    driver = {"postgresql": "postgresql+asyncpg://", "mysql": "mysql+asyncmy://"}[target.dialect]

    async def connect() -> Any:
        assert target.connect is not None
        try:
            return await target.connect()
        except Exception as error:  # refused, unreachable, wrong password, no connection left: no error of the step
            raise NotConnectedError(f"ctx.session cannot connect to the database: {error!r}") from error

    def create() -> Any:  # in place of `async_creator`, which passes no arguments to the adapter
        dbapi: Any = engine.dialect.dbapi
        return dbapi.connect(async_creator_fn=connect, **target.arguments())

    engine = create_async_engine(driver, creator=create, isolation_level="READ COMMITTED", **pool)
    if target.dialect == "postgresql":
        event.listen(engine.sync_engine, "checkout", _refuse_unusable)
        event.listen(engine.sync_engine, "handle_error", _note_read_only)
    return engine


def _refuse_unusable(connection: Any, record: object, proxy: object) -> None:
    """asyncpg knows when the server has closed the connection. A ping would cost three round trips per step."""
    driver = connection.driver_connection
    if driver.is_closed() or driver.is_read_only:
        raise DisconnectionError("the server has closed the connection, or is not the primary any more")


def _note_read_only(context: ExceptionContext) -> None:
    """Marks the connection after an error of SQLAlchemy's own statements, which bypass the connection's methods."""
    if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY and context.connection is not None:
        driver: Any = context.connection.connection.driver_connection
        driver.is_read_only = True


def caller_transaction(session: AsyncSession) -> CallerTransaction:
    """For a session from outside of a workflow, such as a web handler's."""
    if not isinstance(session, AsyncSession):
        raise TypeError(f"session: expected an AsyncSession of SQLAlchemy, got {type(session).__name__}")
    return CallerTransaction(session, dialect_of(session.get_bind().dialect.name))


def on_commit(session: AsyncSession, call: Callable[[], object]) -> None:
    """Call once, when the session's transaction is committed; the end of a savepoint does not count."""
    inner = session.sync_session
    if _CALLBACKS not in inner.info:
        inner.info[_CALLBACKS] = set()
        event.listen(inner, "after_commit", _run_callbacks)
    inner.info[_CALLBACKS].add(call)


def _run_callbacks(session: Session) -> None:
    if not session.in_nested_transaction():
        callbacks, session.info[_CALLBACKS] = session.info[_CALLBACKS], set()
        for call in callbacks:
            call()
