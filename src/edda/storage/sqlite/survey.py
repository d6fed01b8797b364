"""Whatever people look at, on a connection of its own: no run waits behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from edda.core.model import RunId, RunRecord, StoredEvent
from edda.core.states import RunStatus
from edda.core.survey import (
    Backlog,
    Definition,
    EventQuery,
    EventReceiver,
    EventSchema,
    Generation,
    Latency,
    RunQuery,
    TimeBucket,
    WaitRow,
    WorkerRecord,
)

from . import figures, search, sights
from .connection import Connection
from .lock import WorkerLockFile

T = TypeVar("T")


class SQLiteSurvey:
    """The part of the storage that people look through."""

    _now: Callable[[], int]
    _presence: WorkerLockFile

    async def _query(self, job: Callable[[Connection], T]) -> T:
        raise NotImplementedError

    async def search(self, query: RunQuery) -> tuple[RunRecord, ...]:
        return await self._query(lambda db: search.search(db, query, self._now()))

    async def count(self, query: RunQuery) -> dict[RunStatus, int]:
        return await self._query(lambda db: search.count(db, query, self._now()))

    async def scan_boundary(self, query: RunQuery, reach: int) -> tuple[int, RunId] | None:
        return await self._query(lambda db: search.scan_boundary(db, query, reach))

    async def generations(self, run_id: RunId) -> tuple[Generation, ...]:
        return await self._query(lambda db: sights.generations(db, run_id))

    async def find_events(self, query: EventQuery) -> tuple[StoredEvent, ...]:
        return await self._query(lambda db: sights.find_events(db, query))

    async def event(self, seq: int) -> StoredEvent | None:
        return await self._query(lambda db: sights.event(db, seq))

    async def consumers(self, seq: int, limit: int) -> tuple[EventReceiver, ...]:
        return await self._query(lambda db: sights.consumers(db, seq, limit))

    async def list_waits(self, type: str | None, after: tuple[str, str] | None, limit: int) -> tuple[WaitRow, ...]:
        return await self._query(lambda db: sights.standing(db, type, after, limit))

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        return await self._query(lambda db: figures.crew(db, self._presence, self._now()))

    async def backlog(self) -> Backlog:
        return await self._query(lambda db: figures.backlog(db, self._now()))

    async def throughput(self, since: int, width: int, count: int) -> tuple[TimeBucket, ...]:
        return await self._query(lambda db: figures.buckets(db, since, width, count))

    async def latency(self, since: int, most: int) -> Latency:
        return await self._query(lambda db: figures.latency(db, since, most))

    async def event_schemas(self, workflow: str) -> tuple[EventSchema, ...]:
        return await self._query(lambda db: sights.forms(db, workflow))

    async def definitions(self) -> tuple[Definition, ...]:
        return await self._query(sights.definitions)
