"""All that the engine asks of a database, on PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from edda.errors import StorageError
from edda.storage.ports import StatementProbe
from edda.storage.shared.session_target import SessionTarget

from . import migrations, pool
from .admin import PostgresSteering
from .claims import PostgresQueue
from .clock import with_now
from .events import PostgresEvents
from .journal import PostgresJournal
from .notifications import PostgresNews
from .outbox import PostgresOutbox
from .pool import SETTINGS, SHARED_SETTINGS, ConnectionFactory, Pool
from .pruning import PostgresPruning
from .queries import PostgresSurvey
from .runs import PostgresFacts, PostgresRuns
from .staged_events import PostgresDispatches
from .target import Target
from .transactions import PostgresJoints
from .workers import PostgresWorkers

OLDEST = 12
NOW = with_now("SELECT {now}")


class PostgresStorage(
    PostgresJournal,
    PostgresWorkers,
    PostgresQueue,
    PostgresRuns,
    PostgresEvents,
    PostgresDispatches,
    PostgresOutbox,
    PostgresFacts,
    PostgresJoints,
    PostgresPruning,
    PostgresSurvey,
    PostgresSteering,
):
    """`url` is postgresql://user:password@host/database, or several hosts: postgresql://a:5432,b:5432/database.

    A connection pooler in front of the server is recognised; what the URL says in `pooler` and `statement_cache_size`
    is believed instead.
    """

    def __init__(
        self,
        url: str,
        *,
        pool_size: int = 5,
        statement_cache_size: int | None = None,
        probe: StatementProbe | None = None,
    ) -> None:
        self._target = Target(url, statement_cache_size)
        self._address = ConnectionFactory(self._target, probe)
        # A locked row holds up all that is in the batch: what waits for it is soon sent apart from the rest.
        self._journal = Pool(replace(self._address, lock_timeout="1s"), size=1, answer_within=pool.JOURNAL_PATIENCE)
        self._pool = Pool(self._address, size=pool_size)
        # Theirs may take as long as they like.
        self._shared = Pool(replace(self._address, is_shared=True), size=pool_size, answer_within=None)
        self._survey = Pool(replace(self._address, is_survey=True), size=pool_size)
        self._news_line = Pool(self._address, size=1)
        # No limit to how long a migration, or the one ahead of it, may take.
        self._schema_line = Pool(self._address, size=1, answer_within=None)
        self._pulses: list[Pool] = []
        self._news = PostgresNews(self._news_line, self._target)

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
        """SQLAlchemy prepares each statement by itself, and keeps it for the next transaction unless told otherwise."""
        if self._target.is_pooled or self._target.cache_size == 0:
            return {"prepared_statement_cache_size": 0, "prepared_statement_name_func": _unnamed}
        return {"prepared_statement_cache_size": self._target.cache_size}

    @property
    def _lines(self) -> tuple[Pool, ...]:
        return (self._journal, self._pool, self._shared, self._survey, self._news_line, self._schema_line)

    async def open(self) -> None:
        for line in self._lines:
            line.open()
        # Of this loop: the storage may have been open on another before.
        self._news = PostgresNews(self._news_line, self._target)
        async with self._journal.session() as session:
            if session.version[0] < OLDEST:
                raise StorageError(f"Edda needs PostgreSQL {OLDEST} or newer; this server is {session.version[0]}")
        await self._target.check_pooler(SETTINGS)
        await self._news.listen()

    async def close(self) -> None:
        for line in self._lines:
            await line.close()
        self._kill_pulses()

    def kill(self) -> None:
        for line in self._lines:
            line.kill()
        self._kill_pulses()

    def _kill_pulses(self) -> None:
        # They belong to other threads, which close theirs in good order if they can.
        for line in self._pulses:
            line.kill()
        self._pulses.clear()

    async def notify(self) -> None:
        await self._news.notify()

    async def wait_for_notification(self, timeout: float) -> None:
        await self._news.wait_for_notification(timeout)

    async def migrate(self) -> tuple[str, ...]:
        return await migrations.migrate(self._schema_line)

    async def pending_migrations(self) -> tuple[str, ...]:
        return await migrations.pending(self._pool)

    async def now(self) -> int:
        async with self._pool.session() as session:
            now: int = (await session.fetch(NOW))[0][0]
        return now


def _unnamed() -> str:
    return ""
