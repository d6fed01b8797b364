"""Read-only queries for people, on connections of their own: read-only, and with a time limit on the server."""

from __future__ import annotations

from collections.abc import Iterable

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
from edda.storage.shared.rows import to_run_id, to_stored_event, to_wait, to_worker_id
from edda.storage.shared.stats import measure

from .connection import SETUP, MySQLPool, Row
from .search import SCAN_LIMIT, MySQLSearch, escape_like
from .statement import NOW, Statement, bind, int_or_null, quote_text

# The SQL comments are executed, as in `connection.SETUP`: seconds for MariaDB, milliseconds for MySQL.
QUERY_SETUP = (
    b"SET SESSION TRANSACTION READ ONLY; "
    b"SET SESSION /*M! max_statement_time = 5, */ /*!80000 max_execution_time = 5000, */ autocommit = 1; " + SETUP
)

_EVENTS = b"SELECT seq, received_at, source, id, type, target, body FROM edda_event WHERE "
# Types that begin with `channel/`; `channel0` is the next string after all of them.
_OF_CHANNELS = b"type >= 'channel/' AND type < 'channel0'"
_OF_OTHERS = b"NOT (type >= 'channel/' AND type < 'channel0')"
_LIKE = b"LOWER(CONVERT(CONCAT_WS(CHAR(10), type, source, id) USING utf8mb4)) COLLATE utf8mb4_bin LIKE %b ESCAPE '|'"
_ORDER = b" ORDER BY seq DESC LIMIT %b"
EVENT = _EVENTS + b"seq = %b"

RECEIVERS = b"""SELECT d.run_id,
    (SELECT r.workflow FROM edda_run r WHERE r.id = d.run_id ORDER BY r.generation DESC LIMIT 1), d.step, d.at
    FROM edda_inbox d FORCE INDEX (edda_inbox_event) WHERE d.event = %b ORDER BY d.at, d.run_id LIMIT %b"""

_LIST_WAITS = b"""SELECT w.run_id, s.workflow, w.step, w.`key`, w.target_key, w.type, w.`match`, w.due, w.exclusive
    FROM edda_wait w FORCE INDEX (PRIMARY) STRAIGHT_JOIN edda_open_run s ON s.run_id = w.run_id WHERE TRUE"""
_OF_TYPE = b" AND w.type = %b"
# Not as a comparison of two pairs, for which the server uses no index.
_AFTER = b" AND w.run_id >= %b AND (w.run_id > %b OR w.step > %b)"
_IN_ORDER = b" ORDER BY w.run_id, w.step LIMIT %b"

LIST_WORKERS = (
    b"SELECT w.id, w.service, w.host, w.pid, w.started_at, w.expires_at, w.expires_at < " + NOW + b","
    b" (SELECT COUNT(*) FROM edda_open_run s WHERE s.owner = w.id) FROM edda_worker w ORDER BY w.started_at DESC, w.id"
)
EVENT_SCHEMAS = b"SELECT workflow, type, `schema` FROM edda_event_schema WHERE workflow = %b ORDER BY type"
DEFINITIONS = b"SELECT workflow, service, details, seen_at FROM edda_definition ORDER BY workflow"

NAMES = b"SELECT DISTINCT workflow FROM edda_open_run"
# One workflow name at a time: the server uses a range only for literals of both columns. A run with an owner is never
# ready.
_DUE = (
    b"(SELECT run_id, generation, inbox_read, ready_at FROM edda_open_run FORCE INDEX (edda_open_run_ready)"
    b" WHERE workflow = %b AND ready_at <= " + NOW + b" LIMIT %b)"
)
# ready_at = 0 means ready at once; such a run waits since its first unread inbox item, or since it was created.
READY = b"""SELECT COUNT(*), MIN(o.since) FROM (SELECT COALESCE(NULLIF(s.ready_at, 0),
    (SELECT d.at FROM edda_inbox d WHERE d.run_id = s.run_id AND d.inbox_no = s.inbox_read + 1),
    (SELECT r.created_at FROM edda_run r WHERE r.id = s.run_id AND r.generation = s.generation)) AS since
        FROM (%b) s LIMIT %b) o"""
READY_TOKEN = b"SELECT COUNT(*), SUM(o.ready_at) FROM (SELECT s.ready_at FROM (%b) s LIMIT %b) o"
_WAITING = (
    b"s.owner IS NULL AND s.status LIKE 'waiting%%' AND NOT s.compensating AND (s.ready_at IS NULL OR s.ready_at > "
    + NOW
    + b")"
)
WAITING = b"SELECT COUNT(*) FROM (SELECT 1 FROM edda_open_run s WHERE " + _WAITING + b" LIMIT %b) o"
# The run that has waited longest is mostly among the oldest runs; only if it is not, OLDEST reads all waiting runs.
OLDEST_OF_FEW = (
    b"SELECT c.created_at FROM (SELECT id, generation, created_at FROM edda_run FORCE INDEX (edda_run_created)"
    b" ORDER BY created_at, id LIMIT %b) c STRAIGHT_JOIN edda_open_run s"
    b" ON s.run_id = c.id AND s.generation = c.generation"
    b" WHERE " + _WAITING + b" ORDER BY c.created_at LIMIT 1"
)
OLDEST = (
    b"SELECT MIN(r.created_at) FROM edda_open_run s STRAIGHT_JOIN edda_run r FORCE INDEX (PRIMARY)"
    b" ON r.id = s.run_id AND r.generation = s.generation WHERE " + _WAITING
)
PARKED = (
    b"SELECT COUNT(*) FROM edda_open_run FORCE INDEX (edda_open_run_parked)"
    b" WHERE parked IS NOT NULL AND (ready_at IS NULL OR ready_at > " + NOW + b")"
)
COUNT_OUTBOX = b"""SELECT COUNT(*) FROM (
    SELECT 1 FROM edda_outbox FORCE INDEX (edda_outbox_state) WHERE state = %b LIMIT %b) o"""
OLDEST_OUTBOX = b"""SELECT created_at FROM edda_outbox FORCE INDEX (edda_outbox_state)
    WHERE state = 'pending' ORDER BY seq LIMIT 1"""
COUNT_STAGED = b"SELECT COUNT(*) FROM (SELECT 1 FROM edda_staged_event LIMIT %b) o"

STARTED = b"""SELECT (created_at - %b) DIV %b AS place, COUNT(*) FROM edda_run FORCE INDEX (edda_run_created)
    WHERE created_at >= %b AND created_at < %b AND generation = 0 GROUP BY place"""
ENDED = b"""SELECT (ended_at - %b) DIV %b AS place,
    SUM(status = 'completed'), SUM(status = 'failed'), SUM(status = 'cancelled')
    FROM edda_result FORCE INDEX (edda_result_ended) WHERE ended_at >= %b AND ended_at < %b GROUP BY place"""
DURATIONS = b"""SELECT e.ended_at - r.created_at FROM (
    SELECT run_id, generation, ended_at FROM edda_result FORCE INDEX (edda_result_ended)
     WHERE ended_at >= %b ORDER BY ended_at DESC LIMIT %b) e
    STRAIGHT_JOIN edda_run r ON r.id = e.run_id AND r.generation = e.generation"""

# Rows that change with every change that people can see. Each batch of a worker changes its fence row; each claim
# changes the epochs of the owned runs; other writers insert runs, inbox items, events and audit rows, or make runs
# ready. Each statement reads the end of an index, and at most a thousand ready runs. Definitions and schemas are few
# rows.
CHANGE_TOKEN_PARTS = (
    b"SELECT worker, batch_no, ownership_version FROM edda_fence ORDER BY worker",
    b"SELECT COUNT(*), SUM(epoch) FROM edda_open_run FORCE INDEX (edda_open_run_owner) WHERE owner IS NOT NULL",
    b"""SELECT created_at, id, generation FROM edda_run FORCE INDEX (edda_run_created)
    ORDER BY created_at DESC, id DESC LIMIT 1""",
    b"SELECT ended_at, run_id FROM edda_result FORCE INDEX (edda_result_ended) ORDER BY ended_at DESC LIMIT 1",
    b"SELECT MAX(at) FROM edda_inbox",
    b"SELECT MAX(seq) FROM edda_event",
    b"SELECT MAX(seq) FROM edda_outbox",
    b"SELECT MIN(due) FROM edda_outbox FORCE INDEX (edda_outbox_due) WHERE state = 'pending'",
    b"SELECT MAX(seq) FROM edda_outbox FORCE INDEX (edda_outbox_state) WHERE state = 'dead'",
    b"SELECT MAX(ended_at) FROM edda_outbox FORCE INDEX (edda_outbox_ended) WHERE state = 'sent'",
    b"SELECT MIN(seq), MAX(seq) FROM edda_staged_event",
    b"SELECT MAX(seq) FROM edda_audit",
    b"SELECT COUNT(*), SUM(CRC32(CONCAT(seen_at, details))) FROM edda_definition",
    b"SELECT COUNT(*), SUM(CRC32(`schema`)) FROM edda_event_schema",
)

MAX_READY_IN_TOKEN = 1_000


class MySQLQueries(MySQLSearch):
    _queries: MySQLPool

    async def find_events(self, query: EventQuery) -> tuple[StoredEvent, ...]:
        (found,) = await self._queries.send(event_page(query))
        return tuple(map(to_stored_event, found.rows))

    async def event(self, seq: int) -> StoredEvent | None:
        rows = (await self._queries.run(EVENT, seq)).rows
        return to_stored_event(rows[0]) if rows else None

    async def consumers(self, seq: int, limit: int) -> tuple[EventReceiver, ...]:
        rows = (await self._queries.run(RECEIVERS, seq, limit)).rows
        return tuple(
            EventReceiver(to_run_id(run), (workflow or b"").decode(), step, at) for run, workflow, step, at in rows
        )

    async def list_waits(self, type: str | None, after: tuple[str, str] | None, limit: int) -> tuple[WaitRow, ...]:
        (found,) = await self._queries.send(waits_page(type, after, limit))
        return tuple(WaitRow(to_run_id(row[0]), row[1].decode(), to_wait(row[2:])) for row in found.rows)

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        rows = (await self._queries.run(LIST_WORKERS)).rows
        return tuple(
            WorkerRecord(WorkerInfo(to_worker_id(id), service, host, pid), started_at, expires_at, bool(lapsed), runs)
            for id, service, host, pid, started_at, expires_at, lapsed, runs in rows
        )

    async def event_schemas(self, workflow: str) -> tuple[EventSchema, ...]:
        rows = (await self._queries.run(EVENT_SCHEMAS, workflow)).rows
        return tuple(EventSchema(name.decode(), type.decode(), schema) for name, type, schema in rows)

    async def definitions(self) -> tuple[Definition, ...]:
        rows = (await self._queries.run(DEFINITIONS)).rows
        return tuple(Definition(name.decode(), *rest) for name, *rest in rows)

    async def backlog(self) -> Backlog:
        async with self._queries.session() as session:
            names = (await session.run(NAMES)).rows
            ready, waiting, oldest, parked, pending, dead, first, staged = await session.send(
                due(READY, names, MAX_COUNT),
                bind(WAITING, MAX_COUNT),
                bind(OLDEST_OF_FEW, SCAN_LIMIT),
                bind(PARKED),
                bind(COUNT_OUTBOX, "pending", MAX_COUNT),
                bind(COUNT_OUTBOX, "dead", MAX_COUNT),
                bind(OLDEST_OUTBOX),
                bind(COUNT_STAGED, MAX_COUNT),
            )
            since = oldest.rows or (await session.run(OLDEST)).rows
        return Backlog(
            ready=ready.rows[0][0],
            oldest_ready=ready.rows[0][1],
            waiting=waiting.rows[0][0],
            oldest_wait=since[0][0],
            parked=parked.rows[0][0],
            outbox_pending=pending.rows[0][0],
            outbox_dead=dead.rows[0][0],
            oldest_outbox=first.rows[0][0] if first.rows else None,
            staged_events=staged.rows[0][0],
        )

    async def throughput(self, since: int, width: int, count: int) -> tuple[TimeBucket, ...]:
        span = (since, width, since, since + width * count)
        begun, over = await self._queries.send(bind(STARTED, *span), bind(ENDED, *span))
        started = {row[0]: row[1] for row in begun.rows}
        ended = {place: tuple(map(int, counts)) for place, *counts in over.rows}
        return tuple(TimeBucket(since + i * width, started.get(i, 0), *ended.get(i, ())) for i in range(count))

    async def latency(self, since: int, limit: int) -> Latency:
        return measure(row[0] for row in (await self._queries.run(DURATIONS, since, limit)).rows)

    async def change_token(self) -> str:
        async with self._queries.session() as session:
            names = (await session.run(NAMES)).rows
            replies = await session.send(due(READY_TOKEN, names, MAX_READY_IN_TOKEN), *map(bind, CHANGE_TOKEN_PARTS))
        return " ".join(_word(value) for reply in replies for row in reply.rows for value in (*row, ";"))


def event_page(query: EventQuery) -> Statement:
    conditions = [_OF_CHANNELS if query.messages else _OF_OTHERS]
    named = {b"type": query.type, b"source": query.source, b"id": query.id}
    conditions += [b"%b = %b" % (column, quote_text(value)) for column, value in named.items() if value is not None]
    if query.text:
        conditions.append(_LIKE % quote_text(f"%{escape_like(query.text)}%"))
    bounds = {b"received_at >= ": query.received_from, b"received_at < ": query.received_to, b"seq < ": query.before}
    conditions += [bound + int_or_null(value) for bound, value in bounds.items() if value is not None]
    return Statement("find_events", _EVENTS + b" AND ".join(conditions) + _ORDER % int_or_null(query.limit))


def waits_page(type: str | None, after: tuple[str, str] | None, limit: int) -> Statement:
    body = _LIST_WAITS if type is None else _LIST_WAITS + _OF_TYPE % quote_text(type)
    if after is not None:
        run, step = map(quote_text, after)
        body += _AFTER % (run, run, step)
    return Statement("list_waits", body + _IN_ORDER % int_or_null(limit))


def due(template: bytes, names: Iterable[Row], limit: int) -> Statement:
    """The ready runs of these workflows; there may be no names."""
    parts = [_DUE % (quote_text(name.decode()), int_or_null(limit)) for (name,) in names] or [
        _DUE % (quote_text(""), int_or_null(0))
    ]
    return Statement(template.decode(), template % (b" UNION ALL ".join(parts), int_or_null(limit)))


def _word(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
