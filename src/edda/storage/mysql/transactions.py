"""Transactions that the user's code and Edda share, on connections of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edda.core.model import RunId, StepCommit
from edda.errors import StorageError, StorageUnavailableError
from edda.storage.ports import Dialect

from .parameters import pyformat
from .pool import Pool
from .rows import done
from .session import BEGIN, COMMIT, Session

DONE = b"SELECT step, attempt, value, at FROM edda_done WHERE run_id = %b AND gen = %b AND step = %b"

# The user's code finds the server's own settings, but READ COMMITTED and never data that was cut to fit. It may rest
# longer between two statements than Edda does, though not for ever: it may hold locks.
SETUP = b"""SET NAMES utf8mb4; SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;
    SET SESSION autocommit = 1, sql_mode = CONCAT_WS(',', NULLIF(@@sql_mode, ''), 'STRICT_ALL_TABLES')
    /*M! , idle_transaction_timeout = 60 */ /*!80000 , wait_timeout = 60 */;
    SELECT VERSION(), @@max_allowed_packet"""


class MySQLJoints:
    _joints: Pool
    """Not the journal's, nor that of anybody who waits for an answer."""
    _pool: Pool

    @property
    def is_certified(self) -> bool:
        return self._joints.is_certified

    async def begin(self, holder: str = "") -> MySQLJoint:
        session = await self._joints.acquire()
        try:
            await session.run(BEGIN)
        except BaseException:
            self._joints.release(session)
            raise
        return MySQLJoint(self._joints, session)

    async def acquire_write_lock(self, holder: str = "") -> MySQLTurn:
        return MySQLTurn()

    async def find_step_commit(self, run_id: RunId, gen: int, step: str) -> StepCommit | None:
        rows = (await self._pool.run(DONE, run_id, gen, step)).rows
        return done(rows[0]) if rows else None


class MySQLJoint:
    """`connection` is asyncmy's own. Whoever commits or rolls back on that one takes it from Edda."""

    dialect: Dialect = "mysql"

    def __init__(self, pool: Pool, session: Session) -> None:
        self._pool = pool
        self._session = session
        self._has_ended = False
        self.is_certified = session.node is not None
        self.connection: Any = session.connection

    @property
    def is_lost(self) -> bool:
        return not self._has_ended and not self._session.alive

    @property
    def has_begun(self) -> bool:
        return True

    async def execute(self, sql: str, values: Mapping[str, Any]) -> int:
        return (await self._session.execute(sql, pyformat(sql), values)).affected

    async def fetch(self, sql: str, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        return (await self._session.execute(sql, pyformat(sql), values)).rows

    async def commit(self) -> None:
        if self._has_ended:
            raise StorageUnavailableError("the transaction has ended")
        try:
            await self._session.run(COMMIT)
        except StorageUnavailableError:
            raise
        except StorageError as error:  # a clear answer: it is rolled back
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


class MySQLTurn:
    """Whoever writes elsewhere is in nobody's way."""

    async def end(self) -> None:
        return
