"""Transactions that the user's code and Edda share, on connections of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edda.core.model import RunId, StepCommit
from edda.errors import StorageError, StorageUnavailableError
from edda.storage.ports import Dialect
from edda.storage.shared.named_parameters import to_pyformat
from edda.storage.shared.rows import to_step_commit
from edda.storage.shared.step_commit import NoWriteLock

from .connection import BEGIN, COMMIT, MySQLPool, MySQLSession

STEP_COMMIT = (
    b"SELECT step, attempt, value, at FROM edda_step_commit WHERE run_id = %b AND generation = %b AND step = %b"
)

# The server's own settings, except: READ COMMITTED; a value that is too long is refused instead of cut; and the server
# ends a transaction that is idle for a minute, because it may hold locks.
TRANSACTION_SETUP = b"""SET NAMES utf8mb4; SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;
    SET SESSION autocommit = 1, sql_mode = CONCAT_WS(',', NULLIF(@@sql_mode, ''), 'STRICT_ALL_TABLES')
    /*M! , idle_transaction_timeout = 60 */ /*!80000 , wait_timeout = 60 */;
    SELECT VERSION(), @@max_allowed_packet"""


class MySQLTransactions:
    _shared: MySQLPool
    """Apart from the journal's connection and from `_pool`: a user's transaction may take long."""
    _pool: MySQLPool

    @property
    def is_certified(self) -> bool:
        return self._shared.is_certified

    async def begin(self, holder: str = "") -> MySQLTransaction:
        session = await self._shared.acquire()
        try:
            await session.run(BEGIN)
        except BaseException:
            self._shared.release(session)
            raise
        return MySQLTransaction(self._shared, session)

    async def acquire_write_lock(self, holder: str = "") -> NoWriteLock:
        return NoWriteLock()

    async def find_step_commit(self, run_id: RunId, generation: int, step: str) -> StepCommit | None:
        rows = (await self._pool.run(STEP_COMMIT, run_id, generation, step)).rows
        return to_step_commit(rows[0]) if rows else None


class MySQLTransaction:
    """`connection` is asyncmy's own. User code that commits or rolls back on it ends the transaction without Edda."""

    dialect: Dialect = "mysql"

    def __init__(self, pool: MySQLPool, session: MySQLSession) -> None:
        self._pool = pool
        self._session = session
        self._has_ended = False
        self.is_certified = session.node is not None
        self.connection: Any = session.connection

    @property
    def is_lost(self) -> bool:
        return not self._has_ended and not self._session.is_usable

    @property
    def has_begun(self) -> bool:
        return True

    async def execute(self, sql: str, values: Mapping[str, Any]) -> int:
        return (await self._session.execute(sql, to_pyformat(sql), values)).affected

    async def fetch(self, sql: str, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        return (await self._session.execute(sql, to_pyformat(sql), values)).rows

    async def commit(self) -> None:
        if self._has_ended:
            raise StorageUnavailableError("the transaction has ended")
        try:
            await self._session.run(COMMIT)
        except StorageUnavailableError:
            raise
        except StorageError as error:  # the server answered, and has rolled back
            raise error.__cause__ or error from None
        finally:
            self._end()

    async def rollback(self) -> None:
        if not self._has_ended:
            try:
                await self._session.rollback()
            finally:
                self._end()

    def _end(self) -> None:
        self._has_ended = True
        if not self._session.is_idle:
            self._session.close_now()
        self._pool.release(self._session)
