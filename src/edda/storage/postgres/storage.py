"""The storage on PostgreSQL: its pools of connections, and migrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from edda.errors import StorageError
from edda.storage.ports import StatementProbe
from edda.storage.shared.migrations import Migration, missing
from edda.storage.shared.session_target import SessionTarget

from .admin import PostgresAdmin
from .claims import PostgresClaims
from .connection import PostgresSession, with_now
from .events import PostgresEvents
from .journal import PostgresJournal
from .outbox import PostgresOutbox
from .pool import (
    JOURNAL_TIMEOUT,
    SETTINGS,
    SHARED_SETTINGS,
    PostgresConnectionFactory,
    PostgresNotifications,
    PostgresPool,
)
from .pruning import PostgresPruning
from .queries import PostgresQueries
from .runs import PostgresRuns
from .target import PostgresTarget
from .transactions import PostgresTransactions
from .workers import PostgresWorkers

OLDEST = 12
NOW = with_now("SELECT {now}")


class PostgresStorage(
    PostgresJournal,
    PostgresWorkers,
    PostgresClaims,
    PostgresRuns,
    PostgresEvents,
    PostgresOutbox,
    PostgresTransactions,
    PostgresPruning,
    PostgresQueries,
    PostgresAdmin,
):
    """`url` is postgresql://user:password@host/database, or several hosts: postgresql://a:5432,b:5432/database.

    A connection pooler in front of the server is recognised; the URL's `pooler` and `statement_cache_size` override
    what the connections find out.
    """

    def __init__(
        self,
        url: str,
        *,
        pool_size: int = 5,
        statement_cache_size: int | None = None,
        probe: StatementProbe | None = None,
    ) -> None:
        self._target = PostgresTarget(url, statement_cache_size)
        self._factory = PostgresConnectionFactory(self._target, probe)
        # A locked row delays the whole batch: after a second the journal sends the runs that wait for it separately.
        self._journal = PostgresPool(replace(self._factory, lock_timeout="1s"), size=1, answer_within=JOURNAL_TIMEOUT)
        self._pool = PostgresPool(self._factory, size=pool_size)
        # A user's statement may take as long as it needs.
        self._shared = PostgresPool(replace(self._factory, is_shared=True), size=pool_size, answer_within=None)
        self._queries = PostgresPool(replace(self._factory, is_query=True), size=pool_size)
        self._notification_pool = PostgresPool(self._factory, size=1)
        # A migration, or the wait for another process's migration, has no time limit.
        self._migration_pool = PostgresPool(self._factory, size=1, answer_within=None)
        own = (self._journal, self._pool, self._shared, self._queries)
        self._pools = (*own, self._notification_pool, self._migration_pool)
        self._heartbeats: list[PostgresPool] = []
        self._notifications = PostgresNotifications(self._notification_pool, self._target)

    @property
    def url(self) -> str:
        return self._target.url

    def session_target(self) -> SessionTarget:
        return SessionTarget(
            "postgresql",
            connect=lambda: self._target.connect(SHARED_SETTINGS, is_shared=True),
            arguments=self._session_arguments,
            is_pooled=lambda: self._target.is_pooled,
        )

    def _session_arguments(self) -> Mapping[str, Any]:
        """SQLAlchemy prepares each statement itself and keeps it for the next transaction unless it is told not to."""
        if self._target.is_pooled or self._target.cache_size == 0:
            return {"prepared_statement_cache_size": 0, "prepared_statement_name_func": lambda: ""}
        return {"prepared_statement_cache_size": self._target.cache_size}

    async def open(self) -> None:
        for pool in self._pools:
            pool.open()
        # For this event loop: the storage may have been open on another one before.
        self._notifications = PostgresNotifications(self._notification_pool, self._target)
        async with self._journal.session() as session:
            version = session.connection.get_server_version().major
            if version < OLDEST:
                raise StorageError(f"Edda needs PostgreSQL {OLDEST} or newer; this server is {version}")
        await self._target.check_pooler(SETTINGS)
        await self._notifications.listen()

    async def close(self) -> None:
        for pool in self._pools:
            await pool.close()
        self.kill()

    def kill(self) -> None:
        # Heartbeats belong to other threads, which close theirs in an orderly way if they still can.
        for pool in (*self._pools, *self._heartbeats):
            pool.kill()
        self._heartbeats.clear()

    async def notify(self) -> None:
        await self._notifications.notify()

    async def wait_for_notification(self, timeout: float) -> None:
        await self._notifications.wait_for_notification(timeout)

    async def migrate(self) -> tuple[str, ...]:
        """All missing migrations in one transaction, under one lock: a second migrator finds none missing."""
        async with self._migration_pool.session() as session:
            async with session.transaction():
                await session.execute(WAIT_LONG)
                await session.fetch(LOCK)
                await session.execute(WAIT_SHORT)
                pending = await _missing(session)
                for migration in pending:
                    await session.execute(CREATE)
                    for statement in migration.statements():
                        await session.execute(statement)
                    await session.execute(RECORD, migration.name, migration.checksum)
            await session.close()  # a process needs this connection once
        return tuple(migration.name for migration in pending)

    async def pending_migrations(self) -> tuple[str, ...]:
        async with self._pool.session() as session:
            return tuple(migration.name for migration in await _missing(session))

    async def now(self) -> int:
        now: int = (await self._pool.fetch(NOW))[0][0]
        return now


DIALECT = "postgres"

# A migrator waits for another migrator without a limit, but for a lock on a table five seconds at most.
WAIT_LONG = "SET LOCAL lock_timeout = 0"
LOCK = "SELECT pg_advisory_xact_lock(4711, hashtext('edda_migration'))"
WAIT_SHORT = "SET LOCAL lock_timeout = '5s'"

CREATE = """
CREATE TABLE IF NOT EXISTS edda_migration (
    name text COLLATE "C" PRIMARY KEY, checksum text NOT NULL, applied_at bigint NOT NULL)"""
EXISTS = "SELECT to_regclass('edda_migration') IS NOT NULL"
APPLIED = "SELECT name, checksum FROM edda_migration"
RECORD = with_now("INSERT INTO edda_migration (name, checksum, applied_at) VALUES ($1, $2, {now})")


async def _missing(session: PostgresSession) -> tuple[Migration, ...]:
    exists = (await session.fetch(EXISTS))[0][0]
    applied = await session.fetch(APPLIED) if exists else []
    return missing(DIALECT, {row["name"]: row["checksum"] for row in applied})
