"""One connection: asyncpg's classes with Edda's additions, and the session that maps errors."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import asyncpg
from asyncpg.transaction import Transaction

from edda.errors import StorageConflictError, StorageRejectedError, StorageUnavailableError
from edda.storage.ports import StatementProbe
from edda.storage.shared.pool import PooledSession

from . import faults

CONNECT_GRACE = 1.0
"""Seconds that a reachable server needs at most."""


async def connect(url: str, **options: Any) -> Any:
    """Connect in a task of its own. If the caller is cancelled just when the server answers, asyncpg leaves a future
    whose error is never retrieved, and asyncio logs it later; so the task goes on for a while and closes the
    connection.
    """
    connecting = asyncio.create_task(asyncpg.connect(url, **options), name="edda-connect")
    try:
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_close_result)
        asyncio.get_running_loop().call_later(CONNECT_GRACE, connecting.cancel)
        raise


def _close_result(connecting: asyncio.Task[Any]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().terminate()


T = TypeVar("T")

if TYPE_CHECKING:
    _Connection = asyncpg.Connection[asyncpg.Record]
else:
    _Connection = asyncpg.Connection


class PostgresConnection(_Connection):
    """Names its prepared statements so that no other client has one of the same name.

    asyncpg counts them per process (`__asyncpg_stmt_1__`). Behind a pooler that was not recognised, the server
    connection may have a statement of that name, prepared by another client, and would execute it. A name that no other
    client has is refused by the server instead.
    """

    # An attribute, because asyncpg makes `isinstance` true for every subclass of its connection.
    is_pooled = False
    is_read_only = False
    """Whether the server refused a write of the user: another host may be the primary now, so it is not used again."""
    session_settings = ""
    """The SET statement for settings that were no start-up parameters: a reset removes them."""
    _token = ""
    _named = 0

    def _get_unique_id(self, prefix: str) -> str:
        """Overrides asyncpg's method, which names statements, portals and savepoints."""
        self._token = self._token or secrets.token_hex(8)
        self._named += 1
        return f"edda_{prefix}_{self._token}_{self._named:x}"


class SharedConnection(PostgresConnection):
    """A connection that the user's code works on."""

    last_status = ""
    """The status of the last command: after a failed statement the server answers COMMIT with ROLLBACK, not an
    error."""

    async def reset(self, *, timeout: float | None = None) -> None:
        await super().reset(timeout=timeout)
        if self.session_settings:
            await self.execute(self.session_settings)

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        self.last_status = await self._call(super().execute, query, *args, timeout=timeout)
        return self.last_status

    async def fetch(self, query: str, *args: Any, **options: Any) -> Any:
        return await self._call(super().fetch, query, *args, **options)

    async def fetchrow(self, query: str, *args: Any, **options: Any) -> Any:
        return await self._call(super().fetchrow, query, *args, **options)

    async def fetchval(self, query: str, *args: Any, **options: Any) -> Any:
        return await self._call(super().fetchval, query, *args, **options)

    async def executemany(self, command: str, args: Any, **options: Any) -> None:
        await self._call(super().executemany, command, args, **options)

    async def _call(self, call: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        try:
            return await call(*args, **options)
        except asyncpg.ReadOnlySQLTransactionError:
            self.is_read_only = True
            raise


class PooledConnection(SharedConnection):
    """A connection behind a transaction-mode pooler: each statement with values runs in one transaction.

    asyncpg sends Parse and Execute in two messages. Outside a transaction the pooler may give each of them to another
    server connection, and the second would execute a statement that another client has prepared there.
    """

    is_pooled = True
    opening = ""
    """The settings of a transaction, sent in the message of its BEGIN."""

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        if not args:  # a simple query: one message, one server connection
            self.last_status = await self._send_simple(query, timeout)
            return self.last_status
        return await super().execute(query, *args, timeout=timeout)

    async def _send_simple(self, query: str, timeout: float | None) -> str:
        if self.opening and query.startswith("BEGIN"):
            begin, _, rest = query.partition(";")
            query = f"{begin}; {self.opening};{rest}"
        return await SharedConnection._call(self, _Connection.execute, self, query, timeout=timeout)

    async def _call(self, call: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        if self.is_in_transaction():
            return await super()._call(call, *args, **options)
        async with self.transaction(isolation="read_committed"):
            return await super()._call(call, *args, **options)


Listener = Callable[[], object]

# In each BEGIN: a statement re-reads the fence row after a wait at this level only, and the server's default may
# differ.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
COMMIT = "COMMIT"
ROLLBACK = "ROLLBACK"
RESET = "RESET ALL"

_FOREIGN = frozenset({"26000", "42P05"})
"""SQLSTATEs: a prepared statement does not exist, or one of the same name does."""


class PostgresSession(PooledSession):
    """Sends statements over one connection. If the connection's state is uncertain, the session closes it."""

    def __init__(
        self,
        connection: PostgresConnection,
        probe: StatementProbe | None,
        on_foreign: Callable[[object], None] = lambda error: None,
    ) -> None:
        """`on_foreign` is called when another client must have replaced a prepared statement."""
        super().__init__()
        self.connection: Any = connection
        self._probe = probe
        self._on_foreign = on_foreign

    @property
    def is_usable(self) -> bool:
        """Not after the server refused a write: a new connection may find the primary on another host."""
        return not (self.connection.is_closed() or self.connection.is_read_only)

    async def fetch(self, statement: str, *values: object) -> list[asyncpg.Record]:
        try:
            if self._probe is None:
                rows: list[asyncpg.Record] = await self.connection.fetch(statement, *values)
                return rows
            return await self.run_user_statement(statement, self.connection.fetch, statement, *values)
        except BaseException as error:
            self._raise_meaning(error)

    async def execute(self, statement: str, *values: object) -> int:
        """The number of rows that the statement changed."""
        return affected_rows(await self._send(statement, self.connection.execute, statement, *values))

    async def listen(self, channel: str, listener: Listener) -> None:
        """Call `listener` for notifications of other connections, and when this connection ends."""

        def on_notification(_connection: object, pid: int, _channel: str, _payload: object) -> None:
            if pid != own_pid:
                listener()

        own_pid = self.connection.get_server_pid()
        # When the LISTEN connection ends, wake the listener at once: it would notice only when it next waits.
        self.connection.add_termination_listener(lambda _connection: listener())
        await self._send(f"LISTEN {channel}", self.connection.add_listener, channel, on_notification)

    @asynccontextmanager
    async def transaction(self, opening: str = BEGIN) -> AsyncIterator[None]:
        """`opening` is the BEGIN, and may take locks in the same message."""
        try:
            await self.execute(opening)
            yield
        except (StorageConflictError, StorageRejectedError):
            await self.execute(ROLLBACK)
            raise
        except BaseException:  # even a cancel: the open transaction must not outlive the block
            self.close_now()
            raise
        await self.execute(COMMIT)

    async def begin(self) -> Transaction:
        """A transaction for the user's code, on a connection that is reset to its initial state."""
        if not self.connection.is_pooled:  # a pooler chooses another server connection each time
            await self._send(RESET, self.connection.reset)
        transaction: Transaction = self.connection.transaction(isolation="read_committed")
        await self._send(BEGIN, transaction.start)
        return transaction

    async def run_user_statement(self, statement: str, call: Callable[..., Awaitable[T]], *values: object) -> T:
        """As `_send`, for the user's code: the driver's errors are raised unchanged.

        If the call is cancelled, the driver cancels the statement on the server before it sends the next one.
        """
        if self._probe is None:
            return await call(*values)
        try:
            self._probe.before(statement)
            answer = await call(*values)
            self._probe.after(statement)
            return answer
        except StorageUnavailableError:  # a probe cut the connection
            self.close_now()
            raise

    async def _send(self, statement: str, call: Callable[..., Awaitable[T]], *values: object) -> T:
        try:
            return await self.run_user_statement(statement, call, *values)
        except BaseException as error:
            self._raise_meaning(error)

    def _raise_meaning(self, error: BaseException) -> NoReturn:
        """Raise the error of a statement of Edda, as the engine understands it."""
        if isinstance(error, asyncpg.PostgresError):
            meaning = faults.translate(error)
            if isinstance(meaning, StorageUnavailableError):
                self.close_now()
                if error.sqlstate in _FOREIGN:
                    self._on_foreign(error)
            raise meaning from error
        self.close_now()  # even after a cancel in the middle: the protocol's state is unknown
        if isinstance(error, Exception) and not isinstance(error, StorageUnavailableError):
            # A broken connection shows in many ways, AttributeError among them.
            raise StorageUnavailableError(f"no answer from PostgreSQL: {error!r}") from error
        raise error

    async def close(self) -> None:
        try:
            await self.connection.close(timeout=2)
        except Exception:  # closed either way
            self.close_now()

    def close_now(self) -> None:
        self.connection.terminate()


def affected_rows(status: str) -> int:
    """The number of rows in a command's status."""
    count = status.rpartition(" ")[2]
    return int(count) if count.isdecimal() else 0


_NOW = "(extract(epoch from clock_timestamp()) * 1000000)::bigint"


def with_now(statement: str) -> str:
    """Replace `{now}` by the database's time in microseconds.

    A comparison that should use an index has `(SELECT {now})`: clock_timestamp() is volatile, and PostgreSQL uses an
    index only for a value that it computes once, before the scan.
    """
    return statement.replace("{now}", _NOW)
