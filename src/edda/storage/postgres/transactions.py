"""Transactions that the user's code and Edda share. Their connections are in a pool of their own, so that the journal
never waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg
from asyncpg.transaction import Transaction

from edda.core.model import RunId, StepCommit
from edda.errors import StorageUnavailableError
from edda.storage.ports import Dialect
from edda.storage.shared.named_parameters import bind_positional
from edda.storage.shared.rows import to_step_commit
from edda.storage.shared.step_commit import NoWriteLock

from .connection import COMMIT, ROLLBACK, PostgresSession, affected_rows
from .pool import PostgresPool

STEP_COMMIT = (
    "SELECT step, attempt, value, at FROM edda_step_commit WHERE run_id = $1 AND generation = $2 AND step = $3"
)

ROLLBACK_TIMEOUT = 10.0
"""Seconds; the server may first have to give up a statement that was cancelled."""

_UNKNOWN = frozenset({"08", "57", "58", "XX"})
"""Classes of SQLSTATE that leave it open whether the COMMIT took effect: connection, operator intervention, system,
internal error."""


class PostgresTransactions:
    _pool: PostgresPool
    _shared: PostgresPool

    async def begin(self, holder: str = "") -> PostgresTransaction:
        session = await self._shared.acquire()
        try:
            return PostgresTransaction(self._shared, session, await session.begin())
        except BaseException:  # even a cancel: the transaction may have begun
            session.close_now()
            self._shared.release(session)
            raise

    @property
    def is_certified(self) -> bool:
        return False

    async def acquire_write_lock(self, holder: str = "") -> NoWriteLock:
        return NoWriteLock()

    async def find_step_commit(self, run_id: RunId, generation: int, step: str) -> StepCommit | None:
        rows = await self._pool.fetch(STEP_COMMIT, run_id, generation, step)
        return to_step_commit(rows[0]) if rows else None


class PostgresTransaction:
    """`connection` is asyncpg's own; on it `connection.transaction()` makes a savepoint."""

    dialect: Dialect = "postgresql"
    is_certified = False

    def __init__(self, pool: PostgresPool, session: PostgresSession, transaction: Transaction) -> None:
        self.connection = session.connection
        self._pool = pool
        self._session = session
        self._transaction = transaction
        self._is_open = True

    @property
    def is_lost(self) -> bool:
        return self._is_open and self.connection.is_closed()

    @property
    def has_begun(self) -> bool:
        return True

    async def execute(self, sql: str, values: Mapping[str, Any]) -> int:
        statement, arguments = bind_positional(sql, values)
        self._check()
        return affected_rows(
            await self._session.run_user_statement(statement, self.connection.execute, statement, *arguments)
        )

    async def fetch(self, sql: str, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        statement, arguments = bind_positional(sql, values)
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
            raise StorageUnavailableError(f"it is unknown whether the transaction was committed: {error!r}") from error
        except BaseException:  # cancelled in the middle
            self._session.close_now()
            raise
        finally:
            self._release()
        if status == ROLLBACK:  # the server reports a failed transaction by this status alone
            raise asyncpg.InFailedSQLTransactionError("rolled back: a statement had failed before the commit")

    async def rollback(self) -> None:
        if not self._is_open:
            return
        try:
            async with asyncio.timeout(ROLLBACK_TIMEOUT):
                await self._session.run_user_statement(ROLLBACK, self._transaction.rollback)
        except Exception:  # closing the connection rolls back as well
            self._session.close_now()
        except BaseException:
            self._session.close_now()
            raise
        finally:
            self._release()

    def _check(self) -> None:
        """Edda's statements must be in the user's transaction: outside of it they would commit on their own."""
        if not self._is_open or (not self.connection.is_closed() and not self.connection.is_in_transaction()):
            raise asyncpg.NoActiveSQLTransactionError("the transaction has been ended already")

    def _release(self) -> None:
        if self._is_open:
            self._is_open = False
            if not self.connection.is_closed() and self.connection.is_in_transaction():
                self._session.close_now()
            self._pool.release(self._session)


def _is_certain(error: Exception) -> bool:
    """Whether the server answered, and so has rolled back."""
    return isinstance(error, asyncpg.PostgresError) and (error.sqlstate or "")[:2] not in _UNKNOWN
