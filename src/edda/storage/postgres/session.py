"""One connection, and what its errors mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import asyncpg
from asyncpg.transaction import Transaction

from edda.errors import (
    EddaError,
    StorageConflictError,
    StorageRejectedError,
    StorageUnavailableError,
)
from edda.storage.ports import StatementProbe

from . import faults
from .connection import Connection

T = TypeVar("T")
Listener = Callable[[], object]

# Said every time: the fence is re-read after a wait only at this level, and the server's default may be another.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
COMMIT = "COMMIT"
ROLLBACK = "ROLLBACK"
RESET = "RESET ALL"

_FOREIGN = frozenset({"26000", "42P05"})
"""A prepared statement that is not there, or one of the same name that is."""


class Session:
    """Sends statements over one connection object. In doubt it drops the connection and never goes on with it."""

    def __init__(
        self,
        connection: Connection,
        probe: StatementProbe | None,
        on_foreign: Callable[[object], None] = lambda error: None,
    ) -> None:
        """`on_foreign` is told of a prepared statement that another client must have replaced."""
        self._connection = connection
        self._probe = probe
        self._on_foreign = on_foreign
        self._loop = asyncio.get_running_loop()

    @property
    def connection(self) -> Any:
        return self._connection

    @property
    def is_open(self) -> bool:
        return not self._connection.is_closed()

    @property
    def is_demoted(self) -> bool:
        """Whether the server refused a write: a new connection may find the primary on another host."""
        return self._connection.is_read_only

    @property
    def version(self) -> tuple[int, int]:
        version = self._connection.get_server_version()
        return version.major, version.minor

    async def fetch(self, statement: str, *values: object) -> list[asyncpg.Record]:
        return await self._send(statement, self._connection.fetch, statement, *values)

    async def execute(self, statement: str, *values: object) -> int:
        """How many rows it touched."""
        return affected_rows(await self._send(statement, self._connection.execute, statement, *values))

    async def listen(self, channel: str, listener: Listener) -> None:
        """Call `listener` for what others send to the channel, not for what this connection sends, and at its end."""

        def hear(_connection: object, pid: int, _channel: str, _payload: object) -> None:
            if pid != me:
                listener()

        def end(_connection: object) -> None:
            listener()

        me = self._connection.get_server_pid()
        # Who has lost its ears has to look; it would learn of it only when it next asks.
        self._connection.add_termination_listener(end)
        await self._send(f"LISTEN {channel}", self._connection.add_listener, channel, hear)

    @asynccontextmanager
    async def transaction(self, opening: str = BEGIN) -> AsyncIterator[None]:
        """`opening` begins it, and may go on to take locks in the same message."""
        try:
            await self.execute(opening)
            yield
        except (StorageConflictError, StorageRejectedError):
            await self.execute(ROLLBACK)
            raise
        except BaseException:  # whatever left the block, even a cancel: the open transaction must not outlive it
            self.close_now()
            raise
        await self.execute(COMMIT)

    async def begin(self) -> Transaction:
        """A transaction for somebody else's code, who finds the connection as if it were new."""
        if not self._connection.is_pooled:  # there the server connection is another every time
            await self._send(RESET, self._connection.reset)
        transaction = self._connection.transaction(isolation="read_committed")
        await self._send(BEGIN, transaction.start)
        return transaction

    async def run_user_statement(self, statement: str, call: Callable[..., Awaitable[T]], *values: object) -> T:
        """As `_send`, for somebody else's code: errors stay what the driver made them.

        One that is cancelled the driver cancels on the server too, before anything else goes over the connection.
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
        """The one place where anything goes to the database."""
        try:
            if self._probe is None:
                return await call(*values)
            self._probe.before(statement)
            answer = await call(*values)
            self._probe.after(statement)
            return answer
        except asyncpg.PostgresError as error:
            raise self._map_error(error) from error
        except StorageUnavailableError:  # a probe cut the connection
            self.close_now()
            raise
        except Exception as error:  # a broken connection shows in many ways, AttributeError among them
            self.close_now()
            raise StorageUnavailableError(f"no answer from PostgreSQL: {error!r}") from error
        except BaseException:  # cancelled in the middle: the protocol's state is unknown
            self.close_now()
            raise

    def _map_error(self, error: asyncpg.PostgresError) -> EddaError:
        meaning = faults.translate(error)
        if isinstance(meaning, StorageUnavailableError):
            self.close_now()
            if error.sqlstate in _FOREIGN:
                self._on_foreign(error)
        return meaning

    async def close(self) -> None:
        try:
            await self._connection.close(timeout=2)
        except Exception:  # it goes away either way
            self.close_now()

    def close_now(self) -> None:
        """End without goodbye; the server rolls back what was open."""
        self._connection.terminate()

    def kill(self) -> None:
        """`drop`, from any thread."""
        if self._loop.is_closed():
            return
        if self._loop.is_running() and self._loop is not _running_loop():
            self._loop.call_soon_threadsafe(self.close_now)
        else:
            self.close_now()


def affected_rows(status: str) -> int:
    """How many rows, by the server's answer to a command."""
    count = status.rpartition(" ")[2]
    return int(count) if count.isdecimal() else 0


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
