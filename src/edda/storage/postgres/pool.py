"""Pools of connections, which reconnect by themselves, and LISTEN/NOTIFY on a pool of its own."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import asyncpg
from msgspec import Struct

from edda.core.redact import show_url
from edda.errors import NotConnectedError, StorageUnavailableError
from edda.storage.ports import StatementProbe
from edda.storage.shared.polling import PollingNotifications
from edda.storage.shared.pool import SessionPool

from .connection import PostgresSession
from .target import PostgresTarget

SETTINGS = {
    "application_name": "edda",
    # A process that is stopped inside a transaction must not hold its locks for ever.
    "idle_in_transaction_session_timeout": "5s",
    "default_transaction_isolation": "read committed",
    # Compiling a plan costs more than any statement here.
    "jit": "off",
    # Every statement looks rows up by key, whatever the values, so one plan is enough; without enable_seqscan = off a
    # plan that was made while the tables were small would read all of their rows.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
}
# For people's queries: limited in time, and in one process, so that they do not slow down the runs. Each is planned for
# its values, but along the indexes and in their order: a page is full long before a sort or hash of all rows would be.
QUERY_SETTINGS = SETTINGS | {
    "plan_cache_mode": "force_custom_plan",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "max_parallel_workers_per_gather": "0",
    # Sorts of collected rows stay in memory.
    "work_mem": "32MB",
    "statement_timeout": "5s",
    "default_transaction_read_only": "on",
}
# A user's statements have the server's own settings; only an idle transaction is ended, because it may hold locks.
SHARED_SETTINGS = {"application_name": "edda", "idle_in_transaction_session_timeout": "60s"}


ANSWER_TIMEOUT = 30.0
"""Seconds without an answer after which a connection counts as lost."""
JOURNAL_TIMEOUT = 10.0
"""The same for the journal, on whose one connection all runs of a worker wait. A batch waits at most a second for a
lock. After a time-out the journal sends the batch again, and finds by the fence's token whether it was committed."""


class PostgresConnectionFactory(Struct, frozen=True):
    """Makes the connections of one pool, with the settings for its use."""

    target: PostgresTarget
    probe: StatementProbe | None
    is_shared: bool = False
    """Whether users' code works on the connections."""
    is_query: bool = False
    """Whether the connections are for people's queries only."""
    lock_timeout: str = "5s"

    async def connect(self, answer_within: float | None) -> PostgresSession:
        try:
            connection = await self.target.connect(
                self._settings, answer_within=answer_within, is_shared=self.is_shared
            )
        except Exception as error:  # refused, unreachable, unknown host, wrong password, starting up
            where, why = show_url(self.target.url), str(error) or type(error).__name__
            raise NotConnectedError(f"cannot connect to PostgreSQL at {where}: {why}") from error
        return PostgresSession(connection, self.probe, self.target.expect_foreign_statements)

    @property
    def _settings(self) -> dict[str, str]:
        if self.is_shared:
            return SHARED_SETTINGS
        return (QUERY_SETTINGS if self.is_query else SETTINGS) | {"lock_timeout": self.lock_timeout}


class PostgresPool(SessionPool[PostgresSession]):
    def __init__(
        self, factory: PostgresConnectionFactory, size: int, answer_within: float | None = ANSWER_TIMEOUT
    ) -> None:
        super().__init__(lambda: factory.connect(answer_within), size)

    async def fetch(self, statement: str, *values: object) -> list[asyncpg.Record]:
        async with self.session() as session:
            return await session.fetch(statement, *values)

    async def execute(self, statement: str, *values: object) -> int:
        """The number of rows that the statement changed."""
        async with self.session() as session:
            return await session.execute(statement, *values)


CHANNEL = "edda_news"
NOTIFY = f"NOTIFY {CHANNEL}"


class PostgresNotifications:
    def __init__(self, pool: PostgresPool, target: PostgresTarget) -> None:
        self._pool = pool
        self._target = target
        self._polling = PollingNotifications()
        self._arrived = asyncio.Event()
        self._listening: PostgresSession | None = None
        self._requested = 0
        self._sent = 0

    async def notify(self) -> None:
        """Never in a transaction: NOTIFY holds a lock of the whole cluster from there to the COMMIT."""
        self._arrived.set()
        await self._polling.notify()
        self._requested += 1
        mine = self._requested
        # Only a hint: a process that misses it finds the work by polling.
        with suppress(StorageUnavailableError):
            async with self._pool.session() as session:
                if self._sent < mine:  # else another task's NOTIFY was sent after this call began
                    requested = self._requested
                    await session.execute(NOTIFY)
                    self._sent = requested

    def expect_more(self) -> None:
        """Work was found just now: where LISTEN is not used, poll again soon."""
        self._polling.expect_more()

    async def wait_for_notification(self, timeout: float) -> None:
        if self._target.is_pooled:
            await self._polling.wait_for_notification(timeout)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                with suppress(StorageUnavailableError):
                    await self.listen()
                await self._arrived.wait()
        self._arrived.clear()

    async def listen(self) -> None:
        async with self._pool.session() as session:
            # LISTEN belongs to one server connection, which a pooler gives to other clients.
            if session is self._listening or self._target.is_pooled:
                return
            await session.listen(CHANNEL, self._arrived.set)
            if self._listening is not None:  # notifications may have been missed since the last connection ended
                self._arrived.set()
            self._listening = session
