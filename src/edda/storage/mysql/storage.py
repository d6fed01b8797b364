"""All that the engine asks of a database, on MariaDB and MySQL."""

from __future__ import annotations

import re

import asyncmy
from asyncmy.constants.CLIENT import FOUND_ROWS

from edda.errors import StorageError
from edda.storage.ports import StatementProbe
from edda.storage.shared.session_target import SessionTarget

from . import migrations, pool, queries, transactions
from .admin import MySQLSteering
from .claims import MySQLQueue
from .clock import READ_CLOCK
from .events import MySQLEvents
from .journal import MySQLJournal
from .notifications import MySQLNews
from .outbox import MySQLOutbox
from .pool import ConnectionFactory, Pool, arguments
from .pruning import MySQLPruning
from .queries import MySQLSurvey
from .runs import MySQLFacts, MySQLRuns
from .session import JOURNAL_SETUP
from .staged_events import MySQLDispatches
from .transactions import MySQLJoints
from .workers import MySQLWorkers

OLDEST_MARIADB = (10, 6)
OLDEST_MYSQL = (8, 0)

# As the connections of `ctx.transaction()`: no locks for ever, and never data that was cut to fit.
SESSION_SETUP = """SET SESSION sql_mode = CONCAT_WS(',', NULLIF(@@sql_mode, ''), 'STRICT_ALL_TABLES')
    /*M! , idle_transaction_timeout = 60 */ /*!80000 , wait_timeout = 60 */"""


class MySQLStorage(
    MySQLJournal,
    MySQLWorkers,
    MySQLQueue,
    MySQLRuns,
    MySQLEvents,
    MySQLDispatches,
    MySQLOutbox,
    MySQLFacts,
    MySQLJoints,
    MySQLPruning,
    MySQLSurvey,
    MySQLSteering,
):
    """`url` is mysql://user:password@host/database, with ?ssl=true, ?ssl_ca=file or ?unix_socket=file if need be."""

    def __init__(self, url: str, *, pool_size: int = 5, probe: StatementProbe | None = None) -> None:
        self.url = url
        self._address = ConnectionFactory(url, probe)
        self._pool_size = pool_size
        self._gather()

    def _gather(self) -> None:
        self._journal = Pool(self._address, 1, JOURNAL_SETUP, pool.JOURNAL_PATIENCE)
        self._pool = Pool(self._address, self._pool_size)
        self._joints = Pool(self._address, self._pool_size, transactions.SETUP)
        self._survey = Pool(self._address, self._pool_size, queries.SETUP)
        self._news = MySQLNews()

    def session_target(self) -> SessionTarget:
        # What SQLAlchemy counts are rows that were found, whether they changed or not.
        ours = {"autocommit": False, "init_command": SESSION_SETUP, "client_flag": FOUND_ROWS}
        options = {**arguments(self.url), **ours}
        return SessionTarget("mysql", connect=lambda: asyncmy.connect(**options))

    async def open(self) -> None:
        self._gather()  # of this loop: the storage may have been open on another before
        self._address.open()
        try:
            async with self._journal.session() as session:
                _check_version(session.version)
        except BaseException:
            self.kill()
            raise

    async def close(self) -> None:
        await self._journal.close()
        await self._pool.close()
        await self._joints.close()
        await self._survey.close()
        self.kill()

    def kill(self) -> None:
        self._address.kill()

    async def notify(self) -> None:
        await self._news.notify()

    async def wait_for_notification(self, timeout: float) -> None:
        await self._news.wait_for_notification(timeout)

    async def migrate(self) -> tuple[str, ...]:
        return await migrations.migrate(self._address)

    async def pending_migrations(self) -> tuple[str, ...]:
        return await migrations.pending(self._pool)

    async def now(self) -> int:
        return int((await self._pool.run(READ_CLOCK)).rows[0][0])


def _check_version(version: str) -> None:
    oldest = OLDEST_MARIADB if "MariaDB" in version else OLDEST_MYSQL
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found or (int(found[1]), int(found[2])) < oldest:
        raise StorageError(f"Edda needs MariaDB 10.6, MySQL 8.0, or newer; this server is {version}")
