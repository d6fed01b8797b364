"""Transactions that the user's code and Edda share, on connections of their own: the journal never waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg
from asyncpg.transaction import Transaction

from edda.core.model import RunId, StepCommit
from edda.errors import StorageUnavailableError
from edda.storage.ports import Dialect

from .parameters import bind
from .pool import Pool
from .rows import done_of
from .session import COMMIT, ROLLBACK, Session, affected_rows

DONE = "SELECT step, attempt, value, at FROM edda_done WHERE run_id = $1 AND gen = $2 AND step = $3"

ROLLBACK_TIMEOUT = 10.0
"""Seconds; it may first have to wait until the server has given up a statement that was cancelled."""

_UNKNOWN = frozenset({"08", "57", "58", "XX"})
"""Classes of errors after which nobody can say: of the connection, the operator, the machine, the server itself."""


class PostgresJoints:
    _pool: Pool
    _shared: Pool

    async def begin(self, holder: str = "") -> PostgresJoint:
        session = await self._shared.acquire()
        try:
            return PostgresJoint(self._shared, session, await session.begin())
        except BaseException:  # whatever it was, even a cancel: there may be a transaction
            session.close_now()
            self._shared.release(session)
            raise

    @property
    def is_certified(self) -> bool:
        return False

    async def acquire_write_lock(self, holder: str = "") -> NoWriteLock:
        return NoWriteLock()

    async def find_step_commit(self, run_id: RunId, gen: int, step: str) -> StepCommit | None:
        async with self._pool.session() as session:
            rows = await session.fetch(DONE, run_id, gen, step)
        return done_of(rows[0]) if rows else None


class NoWriteLock:
    """Everybody may write at any time."""

    async def end(self) -> None:
        pass


class PostgresJoint:
    """`connection` is asyncpg's own; on it `connection.transaction()` makes a savepoint."""

    dialect: Dialect = "postgresql"
    is_certified = False

    def __init__(self, pool: Pool, session: Session, transaction: Transaction) -> None:
        self.connection = session.connection
        self._pool = pool
        self._session = session
        self._transaction = transaction
        self._is_open = True

    @property
    def is_lost(self) -> bool:
        return self._is_open and not self._session.is_open

    @property
    def has_begun(self) -> bool:
        return True

    async def execute(self, sql: str, values: Mapping[str, Any]) -> int:
        statement, arguments = bind(sql, values)
        self._check()
        return affected_rows(
            await self._session.run_user_statement(statement, self.connection.execute, statement, *arguments)
        )

    async def fetch(self, sql: str, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        statement, arguments = bind(sql, values)
        self._check()
        return await self._session.run_user_statement(statement, self.connection.fetch, statement, *arguments)

    async def commit(self) -> None:
        try:
            self._check()
            await self._session.run_user_statement(COMMIT, self._transaction.commit)
            status = self.connection.last_status
        except Exception as error:
            if _is_certain(error):
                raise
            self._session.close_now()
            raise StorageUnavailableError(f"nobody knows what became of the commit: {error!r}") from error
        except BaseException:  # cancelled in the middle
            self._session.close_now()
            raise
        finally:
            self._leave()
        if status == ROLLBACK:  # all that the server says of it
            raise asyncpg.InFailedSQLTransactionError("rolled back: a statement had failed before the commit")

    async def rollback(self) -> None:
        if not self._is_open:
            return
        try:
            async with asyncio.timeout(ROLLBACK_TIMEOUT):
                await self._session.run_user_statement(ROLLBACK, self._transaction.rollback)
        except Exception:  # without its connection it is rolled back as well
            self._session.close_now()
        except BaseException:
            self._session.close_now()
            raise
        finally:
            self._leave()

    def _check(self) -> None:
        """What Edda adds goes in with the rest or not at all."""
        if not self._is_open or (self._session.is_open and not self.connection.is_in_transaction()):
            raise asyncpg.NoActiveSQLTransactionError("the transaction has been ended already")

    def _leave(self) -> None:
        if self._is_open:
            self._is_open = False
            if self._session.is_open and self.connection.is_in_transaction():
                self._session.close_now()
            self._pool.release(self._session)


def _is_certain(error: Exception) -> bool:
    """The server has answered, and rolled back."""
    return isinstance(error, asyncpg.PostgresError) and (error.sqlstate or "")[:2] not in _UNKNOWN
