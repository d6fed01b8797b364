"""The storage on MariaDB and MySQL: its pools of connections, and migrations."""

from __future__ import annotations

import asyncio
import re

import asyncmy
from asyncmy.constants.CLIENT import FOUND_ROWS

from edda.errors import StorageConflictError, StorageError
from edda.storage.ports import StatementProbe
from edda.storage.shared.migrations import missing
from edda.storage.shared.polling import PollingNotifications
from edda.storage.shared.session_target import SessionTarget

from .admin import MySQLAdmin
from .claims import MySQLClaims
from .connection import JOURNAL_SETUP, JOURNAL_TIMEOUT, MySQLConnectionFactory, MySQLPool, arguments
from .events import MySQLEvents
from .journal import MySQLJournal
from .outbox import MySQLOutbox
from .pruning import MySQLPruning
from .queries import QUERY_SETUP, MySQLQueries
from .runs import MySQLRuns
from .statement import NOW, READ_CLOCK, Statement
from .transactions import TRANSACTION_SETUP, MySQLTransactions
from .workers import MySQLWorkers

OLDEST_MARIADB = (10, 6)
OLDEST_MYSQL = (8, 0)

# The same settings as on the connections of `ctx.transaction()`: the server ends a transaction that is idle for a
# minute, and refuses a value that is too long instead of cutting it.
SESSION_SETUP = """SET SESSION sql_mode = CONCAT_WS(',', NULLIF(@@sql_mode, ''), 'STRICT_ALL_TABLES')
    /*M! , idle_transaction_timeout = 60 */ /*!80000 , wait_timeout = 60 */"""


class MySQLStorage(
    MySQLJournal,
    MySQLWorkers,
    MySQLClaims,
    MySQLRuns,
    MySQLEvents,
    MySQLOutbox,
    MySQLTransactions,
    MySQLPruning,
    MySQLQueries,
    MySQLAdmin,
):
    """`url` is mysql://user:password@host/database, with ?ssl=true, ?ssl_ca=file or ?unix_socket=file if need be."""

    def __init__(self, url: str, *, pool_size: int = 5, probe: StatementProbe | None = None) -> None:
        self.url = url
        self._factory = MySQLConnectionFactory(url, probe)
        self._journal = MySQLPool(self._factory, 1, JOURNAL_SETUP, JOURNAL_TIMEOUT)
        self._pool = MySQLPool(self._factory, pool_size)
        self._shared = MySQLPool(self._factory, pool_size, TRANSACTION_SETUP)
        self._queries = MySQLPool(self._factory, pool_size, QUERY_SETUP)
        self._pools = (self._journal, self._pool, self._shared, self._queries)
        self._notifications = PollingNotifications()

    def session_target(self) -> SessionTarget:
        # FOUND_ROWS: SQLAlchemy expects the count of the rows that matched, changed or not.
        ours = {"autocommit": False, "init_command": SESSION_SETUP, "client_flag": FOUND_ROWS}
        options = {**arguments(self.url), **ours}
        return SessionTarget("mysql", connect=lambda: asyncmy.connect(**options))

    async def open(self) -> None:
        for pool in self._pools:
            pool.open()
        # For this event loop: the storage may have been open on another one before.
        self._notifications = PollingNotifications()
        self._factory.open()
        try:
            async with self._journal.session() as session:
                _check_version(session.version)
        except BaseException:
            self.kill()
            raise

    async def close(self) -> None:
        for pool in self._pools:
            await pool.close()
        self._factory.kill()

    def kill(self) -> None:
        for pool in self._pools:
            pool.kill()
        self._factory.kill()

    async def notify(self) -> None:
        await self._notifications.notify()

    async def wait_for_notification(self, timeout: float) -> None:
        await self._notifications.wait_for_notification(timeout)

    async def migrate(self) -> tuple[str, ...]:
        """GET_LOCK locks on one server only. On a cluster another process may apply the same migration on another node
        between this one's SELECT and its DDL, which then fails; the next attempt finds the migration applied."""
        for _ in range(_ATTEMPTS):
            try:
                return await _migrate(self._factory)
            except StorageError:
                if not self._factory.is_certified:
                    raise
                await asyncio.sleep(_PAUSE)
        return await _migrate(self._factory)

    async def pending_migrations(self) -> tuple[str, ...]:
        async with self._pool.session() as session:
            exists = (await session.run(EXISTS)).rows
            applied: dict[str, str] = dict((await session.run(APPLIED)).rows) if exists else {}
        return tuple(migration.name for migration in missing(DIALECT, applied))

    async def now(self) -> int:
        return int((await self._pool.run(READ_CLOCK)).rows[0][0])


def _check_version(version: str) -> None:
    oldest = OLDEST_MARIADB if "MariaDB" in version else OLDEST_MYSQL
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or (int(found[1]), int(found[2])) < oldest:
        raise StorageError(f"Edda needs MariaDB 10.6, MySQL 8.0, or newer; this server is {version}")


DIALECT = "mysql"
_ATTEMPTS = 20
_PAUSE = 0.2

# Lock names belong to the whole server, and have 64 characters at most.
LOCK = b"SELECT GET_LOCK(CONCAT('edda_', MD5(DATABASE())), 3600)"
CREATE = b"""CREATE TABLE IF NOT EXISTS edda_migration (
    name VARCHAR(255) NOT NULL PRIMARY KEY, checksum CHAR(64) NOT NULL, applied_at BIGINT NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET ascii COLLATE ascii_bin"""
EXISTS = b"""SELECT 1 FROM information_schema.tables
    WHERE table_schema = DATABASE() AND table_name = 'edda_migration'"""
APPLIED = b"SELECT name, checksum FROM edda_migration"
RECORD = b"INSERT IGNORE INTO edda_migration (name, checksum, applied_at) VALUES (%b, %b, " + NOW + b")"


async def _migrate(factory: MySQLConnectionFactory) -> tuple[str, ...]:
    # A session of its own without a time-out: the lock, or a change of a large table, may take long.
    session = await factory.connect(timeout=None)
    try:
        if (await session.run(LOCK)).rows[0][0] != 1:
            raise StorageConflictError("another migration has been running for an hour")
        await session.run(CREATE)
        pending = missing(DIALECT, dict((await session.run(APPLIED)).rows))
        for migration in pending:
            for statement in migration.statements():
                await session.send(Statement(statement, statement.encode()))
            await session.run(RECORD, migration.name, migration.checksum)
        return tuple(migration.name for migration in pending)
    finally:
        await session.close()  # which releases the lock
