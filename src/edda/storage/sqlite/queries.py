"""Read-only queries for the page and the CLI: events and their receivers, waits, definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from edda.core.model import RunId, RunRecord, StoredEvent
from edda.core.queries import (
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
from edda.core.states import RunStatus

from . import search, stats
from .connection import Connection
from .events import STORED, row_to_event
from .locks import WorkerLockFile
from .waits import row_to_wait

FEW = 10_000
"""So many events are looked at one by one."""
_LAST = 2**63 - 1

_GENERATIONS = """
SELECT r.gen, r.created_at, (SELECT count(*) FROM edda_hist h WHERE h.run_id = r.id AND h.gen = r.gen)
  FROM edda_run r WHERE r.id = ? ORDER BY r.gen"""

_FITS = """
   AND seq < :before
   AND received_at >= :received_from AND received_at < :received_to
   AND (substr(type, 1, 8) = 'channel/') = :messages
   AND (:type IS NULL OR type = :type)
   AND (:source IS NULL OR source = :source)
   AND (:text IS NULL OR instr(lower(type), lower(:text)) OR instr(lower(source), lower(:text))
                      OR instr(lower(id), lower(:text)))
 ORDER BY seq DESC LIMIT :limit"""
_BY_NUMBER = f"{STORED} NOT INDEXED WHERE seq < :before {_FITS}"
_BY_TYPE = f"{STORED} INDEXED BY edda_event_by_type WHERE type = :type {_FITS}"
_BY_TIME = f"{STORED} INDEXED BY edda_event_received WHERE received_at >= :received_from {_FITS}"
_BY_ID = f"{STORED} INDEXED BY edda_event_once WHERE source = :source AND id = :id {_FITS}"
# The index is gone through, not the bodies.
_BY_ID_ALONE = f"{STORED} INDEXED BY edda_event_once WHERE id = :id {_FITS}"
_WITHIN = """
SELECT count(*) FROM (
SELECT 1 FROM edda_event INDEXED BY edda_event_received
 WHERE received_at >= :received_from AND received_at < :received_to LIMIT :few)"""
_EVENT = f"{STORED} WHERE seq = ?"

_CONSUMERS = """
SELECT d.run_id, (SELECT r.workflow FROM edda_run r WHERE r.id = d.run_id LIMIT 1), d.step, d.at
  FROM edda_delivery d INDEXED BY edda_delivery_once WHERE d.event = ? ORDER BY d.at, d.run_id LIMIT ?"""
_STANDING = """
SELECT w.run_id, s.workflow, w.step, w.key, w.own_key, w.type, w.match, w.due, w.once
  FROM edda_wait w NOT INDEXED CROSS JOIN edda_sched s ON s.run_id = w.run_id
 WHERE (w.run_id, w.step) > (?1, ?2) AND (?3 IS NULL OR w.type = ?3) ORDER BY w.run_id, w.step LIMIT ?4"""

_FORMS = "SELECT workflow, type, schema FROM edda_form WHERE workflow = ? ORDER BY type"
_DEFINITIONS = "SELECT workflow, service, details, seen_at FROM edda_definition ORDER BY workflow"


def generations(db: Connection, run_id: RunId) -> tuple[Generation, ...]:
    return tuple(Generation(*row) for row in db.rows(_GENERATIONS, (run_id,)))


def find_events(db: Connection, query: EventQuery) -> tuple[StoredEvent, ...]:
    values = {
        "type": query.type,
        "source": query.source,
        "id": query.id,
        "text": query.text,
        "received_from": query.received_from or 0,
        "received_to": _LAST if query.received_to is None else query.received_to,
        "messages": query.messages,
        "before": _LAST if query.before is None else query.before,
        "limit": query.limit,
    }
    return tuple(map(row_to_event, db.rows(_choose(db, query, values), values)))


def _choose(db: Connection, query: EventQuery, values: dict[str, Any]) -> str:
    """The index that leaves the fewest rows."""
    if query.id is not None:
        return _BY_ID_ALONE if query.source is None else _BY_ID
    if (query.received_from, query.received_to) != (None, None):
        ((within,),) = db.rows(_WITHIN, values | {"few": FEW})
        if within < FEW:
            return _BY_TIME
    return _BY_NUMBER if query.type is None else _BY_TYPE


def event(db: Connection, seq: int) -> StoredEvent | None:
    row = db.row(_EVENT, (seq,))
    return row_to_event(row) if row else None


def consumers(db: Connection, seq: int, limit: int) -> tuple[EventReceiver, ...]:
    return tuple(EventReceiver(*row) for row in db.rows(_CONSUMERS, (seq, limit)))


def standing(db: Connection, type: str | None, after: tuple[str, str] | None, limit: int) -> tuple[WaitRow, ...]:
    rows = db.rows(_STANDING, (*(after or ("", "")), type, limit))
    return tuple(WaitRow(run_id, workflow, row_to_wait(wait)) for run_id, workflow, *wait in rows)


def forms(db: Connection, workflow: str) -> tuple[EventSchema, ...]:
    return tuple(EventSchema(*row) for row in db.rows(_FORMS, (workflow,)))


def definitions(db: Connection) -> tuple[Definition, ...]:
    return tuple(Definition(*row) for row in db.rows(_DEFINITIONS))


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
        return await self._query(lambda db: generations(db, run_id))

    async def find_events(self, query: EventQuery) -> tuple[StoredEvent, ...]:
        return await self._query(lambda db: find_events(db, query))

    async def event(self, seq: int) -> StoredEvent | None:
        return await self._query(lambda db: event(db, seq))

    async def consumers(self, seq: int, limit: int) -> tuple[EventReceiver, ...]:
        return await self._query(lambda db: consumers(db, seq, limit))

    async def list_waits(self, type: str | None, after: tuple[str, str] | None, limit: int) -> tuple[WaitRow, ...]:
        return await self._query(lambda db: standing(db, type, after, limit))

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        return await self._query(lambda db: stats.crew(db, self._presence, self._now()))

    async def backlog(self) -> Backlog:
        return await self._query(lambda db: stats.backlog(db, self._now()))

    async def throughput(self, since: int, width: int, count: int) -> tuple[TimeBucket, ...]:
        return await self._query(lambda db: stats.buckets(db, since, width, count))

    async def latency(self, since: int, most: int) -> Latency:
        return await self._query(lambda db: stats.latency(db, since, most))

    async def event_schemas(self, workflow: str) -> tuple[EventSchema, ...]:
        return await self._query(lambda db: forms(db, workflow))

    async def definitions(self) -> tuple[Definition, ...]:
        return await self._query(definitions)
