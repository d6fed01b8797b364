"""asyncpg's connection, with what Edda adds to it."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg

T = TypeVar("T")

if TYPE_CHECKING:
    _Connection = asyncpg.Connection[asyncpg.Record]
else:
    _Connection = asyncpg.Connection


class Connection(_Connection):
    """Names its prepared statements so that no other client has one of the same name.

    asyncpg counts them per process (`__asyncpg_stmt_1__`). Behind a pooler that was not recognised, the server
    connection may have a statement of that name, prepared by another client, and would execute it. A name that no other
    client has is refused by the server instead.
    """

    # Asked for instead of the class: asyncpg makes `isinstance` true for every subclass of its connection.
    is_pooled = False
    is_read_only = False
    """Whether a write of the user's was refused: another host may be the primary now, so it is not used again."""
    standing = ""
    """The settings that hold on it, if they were not start-up parameters: a reset takes them away."""
    _token = ""
    _named = 0

    def _get_unique_id(self, prefix: str) -> str:
        """Overrides asyncpg's: statements, portals and savepoints get their names here."""
        self._token = self._token or secrets.token_hex(8)
        self._named += 1
        return f"edda_{prefix}_{self._token}_{self._named:x}"


class SharedConnection(Connection):
    """One that the user's code works on."""

    last_status = ""
    """What the server said last: after a failed statement COMMIT is answered with ROLLBACK, and is no error."""

    async def reset(self, *, timeout: float | None = None) -> None:
        await super().reset(timeout=timeout)
        if self.standing:
            await self.execute(self.standing)

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
    """One behind a pooler by transaction: each statement with values is prepared and executed in one transaction.

    asyncpg sends Parse and Execute in two messages. Outside a transaction the pooler may give each of them to another
    server connection, and the second would execute the statement that another client has prepared there.
    """

    is_pooled = True
    opening = ""
    """The settings that hold in a transaction. They go into the message of its BEGIN."""

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
