"""What people look at, on connections of their own: a question that takes too long is given up, and none writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edda.core.model import StoredEvent, WorkerInfo
from edda.core.queries import Definition, EventQuery, EventReceiver, EventSchema, WaitRow, WorkerRecord

from .clock import with_now
from .parameters import bind
from .pool import Pool
from .rows import event_of, wait_of
from .search import PostgresSearch, escape_like
from .stats import PostgresFigures

_EVENTS = """
SELECT seq, received_at, source, id, type, target, body FROM edda_event
 WHERE {kind} {conditions} ORDER BY seq DESC LIMIT :limit"""
# Types that begin with `channel/`, and the next text behind all of them.
_OF_CHANNELS = "type >= 'channel/' AND type < 'channel0'"
_OF_OTHERS = "NOT (type >= 'channel/' AND type < 'channel0')"
EVENT = "SELECT seq, received_at, source, id, type, target, body FROM edda_event WHERE seq = $1"

CONSUMERS = """
SELECT d.run_id, run.workflow, d.step, d.at FROM edda_delivery d
 CROSS JOIN LATERAL (SELECT workflow FROM edda_run r WHERE r.id = d.run_id ORDER BY r.gen DESC LIMIT 1) run
 WHERE d.event = $1 ORDER BY d.at, d.run_id LIMIT $2"""

STANDING = """
SELECT w.run_id, s.workflow, w.step, w.key, w.own_key, w.type, w.match, w.due, w.once
  FROM edda_wait w JOIN edda_sched s USING (run_id)
 WHERE (w.run_id, w.step) > ($2, $3) AND ($1::text IS NULL OR w.type = $1) ORDER BY w.run_id, w.step LIMIT $4"""

CREW = with_now("""
SELECT w.id, w.service, w.host, w.pid, w.started_at, w.expires_at, w.expires_at < {now}, runs.owned
  FROM edda_worker w CROSS JOIN LATERAL (SELECT count(*) AS owned FROM edda_sched s WHERE s.owner = w.id) runs
 ORDER BY w.started_at DESC, w.id""")

FORMS = "SELECT workflow, type, schema FROM edda_form WHERE workflow = $1 ORDER BY type"
DEFINITIONS = "SELECT workflow, service, details, seen_at FROM edda_definition ORDER BY workflow"


class PostgresSurvey(PostgresSearch, PostgresFigures):
    _survey: Pool

    async def find_events(self, query: EventQuery) -> tuple[StoredEvent, ...]:
        statement, arguments = bind(event_page(query), _values(query))
        async with self._survey.session() as session:
            rows = await session.fetch(statement, *arguments)
        return tuple(event_of(row) for row in rows)

    async def event(self, seq: int) -> StoredEvent | None:
        async with self._survey.session() as session:
            rows = await session.fetch(EVENT, seq)
        return event_of(rows[0]) if rows else None

    async def consumers(self, seq: int, limit: int) -> tuple[EventReceiver, ...]:
        async with self._survey.session() as session:
            rows = await session.fetch(CONSUMERS, seq, limit)
        return tuple(EventReceiver(*row) for row in rows)

    async def list_waits(self, type: str | None, after: tuple[str, str] | None, limit: int) -> tuple[WaitRow, ...]:
        async with self._survey.session() as session:
            rows = await session.fetch(STANDING, type, *(after or ("", "")), limit)
        return tuple(WaitRow(row["run_id"], row["workflow"], wait_of(row)) for row in rows)

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        async with self._survey.session() as session:
            rows = await session.fetch(CREW)
        return tuple(WorkerRecord(WorkerInfo(*row[:4]), *row[4:]) for row in map(tuple, rows))

    async def event_schemas(self, workflow: str) -> tuple[EventSchema, ...]:
        async with self._survey.session() as session:
            rows = await session.fetch(FORMS, workflow)
        return tuple(EventSchema(*row) for row in rows)

    async def definitions(self) -> tuple[Definition, ...]:
        async with self._survey.session() as session:
            rows = await session.fetch(DEFINITIONS)
        return tuple(Definition(*row) for row in rows)


def event_page(query: EventQuery) -> str:
    conditions = "".join(f" AND {condition}" for condition in _conditions(query))
    kind = _OF_CHANNELS if query.messages else _OF_OTHERS
    return _EVENTS.replace("{kind}", kind).replace("{conditions}", conditions)


def _conditions(query: EventQuery) -> Iterable[str]:
    given: dict[str, object] = {
        "type = :type": query.type,
        "source = :source": query.source,
        "id = :id": query.id,
        "(type ILIKE :text OR source ILIKE :text OR id ILIKE :text)": query.text or None,
        "received_at >= :since": query.received_from,
        "received_at < :until": query.received_to,
        "seq < :before": query.before,
    }
    return (condition for condition, value in given.items() if value is not None)


def _values(query: EventQuery) -> dict[str, Any]:
    return {
        "type": query.type,
        "source": query.source,
        "id": query.id,
        "text": f"%{escape_like(query.text or '')}%",
        "since": query.received_from,
        "until": query.received_to,
        "before": query.before,
        "limit": query.limit,
    }
