"""What people look at, on connections of their own: a question that takes too long is given up, and none writes."""

from __future__ import annotations

from edda.core.model import StoredEvent, WorkerInfo
from edda.core.queries import Definition, EventQuery, EventReceiver, EventSchema, WaitRow, WorkerRecord

from . import session
from .clock import NOW
from .pool import Pool
from .rows import run_id, stored_event, wait, worker_id
from .search import MySQLSearch, escape_like
from .statement import Statement, int_or_null, quote_text
from .stats import MySQLFigures

# The comments are code, as in `session.SETUP`: seconds for MariaDB, milliseconds for MySQL.
SETUP = (
    b"SET SESSION TRANSACTION READ ONLY; "
    b"SET SESSION /*M! max_statement_time = 5, */ /*!80000 max_execution_time = 5000, */ autocommit = 1; "
    + session.SETUP
)

_EVENTS = b"SELECT seq, received_at, source, id, type, target, body FROM edda_event WHERE "
# Types that begin with `channel/`, and the next text behind all of them.
_OF_CHANNELS = b"type >= 'channel/' AND type < 'channel0'"
_OF_OTHERS = b"NOT (type >= 'channel/' AND type < 'channel0')"
_LIKE = b"LOWER(CONVERT(CONCAT_WS(CHAR(10), type, source, id) USING utf8mb4)) COLLATE utf8mb4_bin LIKE %b ESCAPE '|'"
_ORDER = b" ORDER BY seq DESC LIMIT %b"
EVENT = _EVENTS + b"seq = %b"

CONSUMERS = b"""SELECT d.run_id,
    (SELECT r.workflow FROM edda_run r WHERE r.id = d.run_id ORDER BY r.gen DESC LIMIT 1), d.step, d.at
    FROM edda_delivery d FORCE INDEX (edda_delivery_once) WHERE d.event = %b ORDER BY d.at, d.run_id LIMIT %b"""

_STANDING = b"""SELECT w.run_id, s.workflow, w.step, w.`key`, w.own_key, w.type, w.`match`, w.due, w.once
    FROM edda_wait w FORCE INDEX (PRIMARY) STRAIGHT_JOIN edda_sched s ON s.run_id = w.run_id WHERE TRUE"""
_OF_TYPE = b" AND w.type = %b"
# Spelled out: the comparison of two pairs does not use the index.
_AFTER = b" AND w.run_id >= %b AND (w.run_id > %b OR w.step > %b)"
_IN_ORDER = b" ORDER BY w.run_id, w.step LIMIT %b"

CREW = (
    b"SELECT w.id, w.service, w.host, w.pid, w.started_at, w.expires_at, w.expires_at < " + NOW + b","
    b" (SELECT COUNT(*) FROM edda_sched s WHERE s.owner = w.id) FROM edda_worker w ORDER BY w.started_at DESC, w.id"
)
FORMS = b"SELECT workflow, type, `schema` FROM edda_form WHERE workflow = %b ORDER BY type"
DEFINITIONS = b"SELECT workflow, service, details, seen_at FROM edda_definition ORDER BY workflow"


class MySQLSurvey(MySQLSearch, MySQLFigures):
    _survey: Pool

    async def find_events(self, query: EventQuery) -> tuple[StoredEvent, ...]:
        (found,) = await self._survey.send(event_page(query))
        return tuple(map(stored_event, found.rows))

    async def event(self, seq: int) -> StoredEvent | None:
        rows = (await self._survey.run(EVENT, seq)).rows
        return stored_event(rows[0]) if rows else None

    async def consumers(self, seq: int, limit: int) -> tuple[EventReceiver, ...]:
        rows = (await self._survey.run(CONSUMERS, seq, limit)).rows
        return tuple(
            EventReceiver(run_id(run), (workflow or b"").decode(), step, at) for run, workflow, step, at in rows
        )

    async def list_waits(self, type: str | None, after: tuple[str, str] | None, limit: int) -> tuple[WaitRow, ...]:
        (found,) = await self._survey.send(standing_page(type, after, limit))
        return tuple(WaitRow(run_id(row[0]), row[1].decode(), wait(row[2:])) for row in found.rows)

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        rows = (await self._survey.run(CREW)).rows
        return tuple(
            WorkerRecord(WorkerInfo(worker_id(id), service, host, pid), started_at, expires_at, bool(lapsed), runs)
            for id, service, host, pid, started_at, expires_at, lapsed, runs in rows
        )

    async def event_schemas(self, workflow: str) -> tuple[EventSchema, ...]:
        rows = (await self._survey.run(FORMS, workflow)).rows
        return tuple(EventSchema(name.decode(), type.decode(), schema) for name, type, schema in rows)

    async def definitions(self) -> tuple[Definition, ...]:
        rows = (await self._survey.run(DEFINITIONS)).rows
        return tuple(Definition(name.decode(), *rest) for name, *rest in rows)


def event_page(query: EventQuery) -> Statement:
    conditions = [_OF_CHANNELS if query.messages else _OF_OTHERS]
    named = {b"type": query.type, b"source": query.source, b"id": query.id}
    conditions += [b"%b = %b" % (column, quote_text(value)) for column, value in named.items() if value is not None]
    if query.text:
        conditions.append(_LIKE % quote_text(f"%{escape_like(query.text)}%"))
    bounds = {b"received_at >= ": query.received_from, b"received_at < ": query.received_to, b"seq < ": query.before}
    conditions += [bound + int_or_null(value) for bound, value in bounds.items() if value is not None]
    return Statement("find_events", _EVENTS + b" AND ".join(conditions) + _ORDER % int_or_null(query.limit))


def standing_page(type: str | None, after: tuple[str, str] | None, limit: int) -> Statement:
    body = _STANDING if type is None else _STANDING + _OF_TYPE % quote_text(type)
    if after is not None:
        run, step = map(quote_text, after)
        body += _AFTER % (run, run, step)
    return Statement("standing", body + _IN_ORDER % int_or_null(limit))
