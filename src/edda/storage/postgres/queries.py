"""Read-only queries for people, on connections of their own: read-only, and with a time limit on the server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edda.core.model import StoredEvent, WorkerInfo
from edda.core.queries import (
    MAX_COUNT,
    Backlog,
    Definition,
    EventQuery,
    EventReceiver,
    EventSchema,
    Latency,
    TimeBucket,
    WaitRow,
    WorkerRecord,
)
from edda.storage.shared.named_parameters import bind_positional
from edda.storage.shared.rows import to_stored_event, to_wait
from edda.storage.shared.stats import measure

from .connection import with_now
from .pool import PostgresPool
from .search import SCAN_LIMIT, PostgresSearch, escape_like

_EVENTS = """
SELECT seq, received_at, source, id, type, target, body FROM edda_event
 WHERE {kind} {conditions} ORDER BY seq DESC LIMIT :limit"""
# Types that begin with `channel/`; `channel0` is the next string after all of them.
_OF_CHANNELS = "type >= 'channel/' AND type < 'channel0'"
_OF_OTHERS = "NOT (type >= 'channel/' AND type < 'channel0')"
EVENT = "SELECT seq, received_at, source, id, type, target, body FROM edda_event WHERE seq = $1"

RECEIVERS = """
SELECT d.run_id, run.workflow, d.step, d.at FROM edda_inbox d
 CROSS JOIN LATERAL (SELECT workflow FROM edda_run r WHERE r.id = d.run_id ORDER BY r.generation DESC LIMIT 1) run
 WHERE d.event = $1 ORDER BY d.at, d.run_id LIMIT $2"""

LIST_WAITS = """
SELECT w.run_id, s.workflow, w.step, w.key, w.target_key, w.type, w.match, w.due, w.exclusive
  FROM edda_wait w JOIN edda_open_run s USING (run_id)
 WHERE (w.run_id, w.step) > ($2, $3) AND ($1::text IS NULL OR w.type = $1) ORDER BY w.run_id, w.step LIMIT $4"""

LIST_WORKERS = with_now("""
SELECT w.id, w.service, w.host, w.pid, w.started_at, w.expires_at, w.expires_at < {now}, runs.owned
  FROM edda_worker w CROSS JOIN LATERAL (SELECT count(*) AS owned FROM edda_open_run s WHERE s.owner = w.id) runs
 ORDER BY w.started_at DESC, w.id""")

EVENT_SCHEMAS = "SELECT workflow, type, schema FROM edda_event_schema WHERE workflow = $1 ORDER BY type"
DEFINITIONS = "SELECT workflow, service, details, seen_at FROM edda_definition ORDER BY workflow"

# Steps from name to name in the index, instead of reading the rows of all unowned runs.
_NAMES = """
WITH RECURSIVE names (name) AS (
    (SELECT workflow FROM edda_open_run WHERE owner IS NULL ORDER BY workflow LIMIT 1)
    UNION ALL
    SELECT (SELECT workflow FROM edda_open_run WHERE owner IS NULL AND workflow > names.name ORDER BY workflow LIMIT 1)
      FROM names WHERE names.name IS NOT NULL)"""
_DUE = """names CROSS JOIN LATERAL (
           SELECT run_id, generation, inbox_read, ready_at FROM edda_open_run
            WHERE workflow = names.name AND owner IS NULL AND ready_at <= (SELECT {now}) LIMIT {max_count}) due"""

# ready_at = 0 means ready at once; such a run waits since its first unread inbox item, or since it was created. The run
# that has waited longest is mostly among the oldest runs; only if it is not, the query reads all waiting runs.
_BACKLOG = """,
ready AS MATERIALIZED (
    SELECT coalesce(nullif(due.ready_at, 0),
                    (SELECT at FROM edda_inbox d WHERE d.run_id = due.run_id AND d.inbox_no = due.inbox_read + 1),
                    (SELECT created_at FROM edda_run r WHERE r.id = due.run_id
                        AND r.generation = due.generation)) AS since
      FROM {due}
     LIMIT {max_count}),
waiting AS (
    SELECT run_id, generation FROM edda_open_run
     WHERE owner IS NULL AND status LIKE 'waiting%' AND NOT compensating
       AND (ready_at IS NULL OR ready_at > (SELECT {now})))
SELECT (SELECT count(*) FROM ready),
       (SELECT min(since) FROM ready),
       (SELECT count(*) FROM (SELECT FROM waiting LIMIT {max_count}) w),
       coalesce((SELECT oldest.created_at
                   FROM (SELECT id, generation, created_at FROM edda_run
                          ORDER BY created_at, id LIMIT {scan_limit}) oldest
                   JOIN waiting w ON w.run_id = oldest.id AND w.generation = oldest.generation
                  ORDER BY oldest.created_at LIMIT 1),
                (SELECT min(r.created_at) FROM waiting w JOIN edda_run r ON r.id = w.run_id
                    AND r.generation = w.generation)),
       (SELECT count(*) FROM edda_open_run
         WHERE status = 'parked' AND (ready_at IS NULL OR ready_at > (SELECT {now}))),
       (SELECT count(*) FROM (SELECT FROM edda_outbox WHERE state = 'pending' LIMIT {max_count}) o),
       (SELECT count(*) FROM (SELECT FROM edda_outbox WHERE state = 'dead' LIMIT {max_count}) o),
       (SELECT created_at FROM edda_outbox WHERE state = 'pending' ORDER BY seq LIMIT 1),
       (SELECT count(*) FROM (SELECT FROM edda_staged_event LIMIT {max_count}) d)"""
BACKLOG = with_now((_NAMES + _BACKLOG).replace("{due}", _DUE))
BACKLOG = BACKLOG.replace("{max_count}", str(MAX_COUNT)).replace("{scan_limit}", str(SCAN_LIMIT))

STARTED = """
SELECT (created_at - $1) / $2, count(*) FROM edda_run
 WHERE created_at >= $1 AND created_at < $1 + $2 * $3 AND generation = 0 GROUP BY 1"""
ENDED = """
SELECT (ended_at - $1) / $2, count(*) FILTER (WHERE status = 'completed'),
       count(*) FILTER (WHERE status = 'failed'), count(*) FILTER (WHERE status = 'cancelled')
  FROM edda_result WHERE ended_at >= $1 AND ended_at < $1 + $2 * $3 GROUP BY 1"""

DURATIONS = """
SELECT e.ended_at - r.created_at
  FROM (SELECT run_id, generation, ended_at FROM edda_result WHERE ended_at >= $1 ORDER BY ended_at DESC LIMIT $2) e
  JOIN edda_run r ON r.id = e.run_id AND r.generation = e.generation"""

# A text that changes with every change that people can see. Each batch of a worker changes its fence row; each claim
# changes the epochs of the owned runs; other writers insert runs, inbox items, events and audit rows, or make runs
# ready. Each part reads the end of an index, and at most a thousand ready runs. Definitions and schemas are few rows,
# and xmin is the transaction that wrote a row.
_CHANGES = """
SELECT row(
    (SELECT concat_ws(' ', count(*), sum(ready_at)) FROM (SELECT due.ready_at FROM {due} LIMIT {max_count}) ready),
    (SELECT md5(string_agg(concat_ws(' ', worker, batch_no, ownership_version), ',' ORDER BY worker)) FROM edda_fence),
    (SELECT concat_ws(' ', count(*), sum(epoch)) FROM edda_open_run WHERE owner IS NOT NULL),
    (SELECT concat_ws(' ', created_at, id, generation) FROM edda_run ORDER BY created_at DESC, id DESC LIMIT 1),
    (SELECT concat_ws(' ', ended_at, run_id) FROM edda_result ORDER BY ended_at DESC LIMIT 1),
    (SELECT at FROM edda_inbox ORDER BY at DESC LIMIT 1),
    (SELECT last_value FROM edda_event_seq),
    (SELECT concat_ws(' ', max(seq), min(due)) FROM edda_outbox WHERE state = 'pending'),
    (SELECT max(seq) FROM edda_outbox WHERE state = 'dead'),
    (SELECT max(ended_at) FROM edda_outbox WHERE state = 'sent'),
    (SELECT concat_ws(' ', min(seq), max(seq)) FROM edda_staged_event),
    (SELECT max(seq) FROM edda_audit),
    (SELECT concat_ws(' ', count(*), sum(xmin::text::bigint)) FROM edda_definition),
    (SELECT concat_ws(' ', count(*), sum(xmin::text::bigint)) FROM edda_event_schema))::text"""
CHANGE_TOKEN = with_now((_NAMES + _CHANGES).replace("{due}", _DUE)).replace("{max_count}", "1000")


class PostgresQueries(PostgresSearch):
    _queries: PostgresPool

    async def find_events(self, query: EventQuery) -> tuple[StoredEvent, ...]:
        statement, arguments = bind_positional(event_page(query), _values(query))
        rows = await self._queries.fetch(statement, *arguments)
        return tuple(to_stored_event(row) for row in rows)

    async def event(self, seq: int) -> StoredEvent | None:
        rows = await self._queries.fetch(EVENT, seq)
        return to_stored_event(rows[0]) if rows else None

    async def consumers(self, seq: int, limit: int) -> tuple[EventReceiver, ...]:
        rows = await self._queries.fetch(RECEIVERS, seq, limit)
        return tuple(EventReceiver(*row) for row in rows)

    async def list_waits(self, type: str | None, after: tuple[str, str] | None, limit: int) -> tuple[WaitRow, ...]:
        rows = await self._queries.fetch(LIST_WAITS, type, *(after or ("", "")), limit)
        return tuple(WaitRow(row[0], row[1], to_wait(row[2:])) for row in rows)

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        rows = await self._queries.fetch(LIST_WORKERS)
        return tuple(WorkerRecord(WorkerInfo(*row[:4]), *row[4:]) for row in map(tuple, rows))

    async def event_schemas(self, workflow: str) -> tuple[EventSchema, ...]:
        rows = await self._queries.fetch(EVENT_SCHEMAS, workflow)
        return tuple(EventSchema(*row) for row in rows)

    async def definitions(self) -> tuple[Definition, ...]:
        rows = await self._queries.fetch(DEFINITIONS)
        return tuple(Definition(*row) for row in rows)

    async def backlog(self) -> Backlog:
        return Backlog(*(await self._queries.fetch(BACKLOG))[0])

    async def throughput(self, since: int, width: int, count: int) -> tuple[TimeBucket, ...]:
        async with self._queries.session() as session:
            started = {row[0]: row[1] for row in await session.fetch(STARTED, since, width, count)}
            ended = {place: counts for place, *counts in await session.fetch(ENDED, since, width, count)}
        return tuple(TimeBucket(since + i * width, started.get(i, 0), *ended.get(i, ())) for i in range(count))

    async def latency(self, since: int, limit: int) -> Latency:
        rows = await self._queries.fetch(DURATIONS, since, limit)
        return measure(row[0] for row in rows)

    async def change_token(self) -> str:
        token: str = (await self._queries.fetch(CHANGE_TOKEN))[0][0]
        return token


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
