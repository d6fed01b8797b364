"""Read-only queries of the viewer and the CLI: events and their receivers, waits, definitions, figures of the whole."""

from __future__ import annotations

from typing import Any

from edda.core.model import RunId, StoredEvent, WorkerInfo
from edda.core.queries import (
    MAX_COUNT,
    Backlog,
    Definition,
    EventQuery,
    EventReceiver,
    EventSchema,
    Generation,
    Latency,
    TimeBucket,
    WaitRow,
    WorkerRecord,
)
from edda.storage.shared.rows import to_stored_event, to_wait
from edda.storage.shared.stats import measure

from .connection import Connection
from .events import STORED_EVENT
from .locks import WorkerLockFiles
from .runs import MAX_INTEGER
from .threads import Part, query

SCAN_LIMIT = 10_000
"""A time range with fewer events is read by the index on time; a larger one by number."""

_GENERATIONS = """
SELECT r.generation, r.created_at, (SELECT count(*) FROM edda_history h WHERE h.run_id = r.id
    AND h.generation = r.generation)
  FROM edda_run r WHERE r.id = ? ORDER BY r.generation"""

_FITS = """
   AND seq < :before
   AND received_at >= :received_from AND received_at < :received_to
   AND (substr(type, 1, 8) = 'channel/') = :messages
   AND (:type IS NULL OR type = :type)
   AND (:source IS NULL OR source = :source)
   AND (:text IS NULL OR instr(lower(type), lower(:text)) OR instr(lower(source), lower(:text))
                      OR instr(lower(id), lower(:text)))
 ORDER BY seq DESC LIMIT :limit"""
_BY_NUMBER = f"{STORED_EVENT} NOT INDEXED WHERE seq < :before {_FITS}"
_BY_TYPE = f"{STORED_EVENT} INDEXED BY edda_event_by_type WHERE type = :type {_FITS}"
_BY_TIME = f"{STORED_EVENT} INDEXED BY edda_event_received WHERE received_at >= :received_from {_FITS}"
_BY_ID = f"{STORED_EVENT} INDEXED BY edda_event_identity WHERE source = :source AND id = :id {_FITS}"
# Scans the index, whose rows have no bodies.
_BY_ID_ALONE = f"{STORED_EVENT} INDEXED BY edda_event_identity WHERE id = :id {_FITS}"
_COUNT_IN_TIME = """
SELECT count(*) FROM (
SELECT 1 FROM edda_event INDEXED BY edda_event_received
 WHERE received_at >= :received_from AND received_at < :received_to LIMIT :scan_limit)"""
_EVENT = f"{STORED_EVENT} WHERE seq = ?"

_RECEIVERS = """
SELECT d.run_id, (SELECT r.workflow FROM edda_run r WHERE r.id = d.run_id LIMIT 1), d.step, d.at
  FROM edda_inbox d INDEXED BY edda_inbox_event WHERE d.event = ? ORDER BY d.at, d.run_id LIMIT ?"""
_WAITS = """
SELECT w.run_id, s.workflow, w.step, w.key, w.target_key, w.type, w.match, w.due, w.exclusive
  FROM edda_wait w NOT INDEXED CROSS JOIN edda_open_run s ON s.run_id = w.run_id
 WHERE (w.run_id, w.step) > (?1, ?2) AND (?3 IS NULL OR w.type = ?3) ORDER BY w.run_id, w.step LIMIT ?4"""

_SCHEMAS = "SELECT workflow, type, schema FROM edda_event_schema WHERE workflow = ? ORDER BY type"
_DEFINITIONS = "SELECT workflow, service, details, seen_at FROM edda_definition ORDER BY workflow"

_WORKERS = """
SELECT w.id, w.service, w.host, w.pid, w.started_at, w.expires_at,
       (SELECT count(*) FROM edda_open_run s INDEXED BY edda_open_run_owner WHERE s.owner = w.id)
  FROM edda_worker w ORDER BY w.started_at DESC, w.id"""

# A run that is ready at once has no time of its own: that of its first unread inbox item counts, or else its creation.
_READY = """
SELECT count(*), min(since) FROM (
SELECT coalesce(nullif(s.ready_at, 0),
                (SELECT d.at FROM edda_inbox d WHERE d.run_id = s.run_id AND d.inbox_no = s.inbox_read + 1),
                (SELECT r.created_at FROM edda_run r WHERE r.id = s.run_id AND r.generation = s.generation)) AS since
  FROM edda_open_run s INDEXED BY edda_open_run_ready WHERE s.owner IS NULL AND s.ready_at <= ? LIMIT ?)"""
_WAITING = """
SELECT count(*), min(r.created_at)
  FROM edda_open_run s CROSS JOIN edda_run r ON r.id = s.run_id AND r.generation = s.generation
 WHERE s.status IN ('waiting_for_event', 'waiting_for_timer', 'waiting_for_message', 'waiting_for_child')
   AND NOT s.compensating AND (s.ready_at IS NULL OR s.ready_at > ? OR s.owner IS NOT NULL)"""
_PARKED = """
SELECT count(*) FROM edda_open_run INDEXED BY edda_open_run_parked
 WHERE status = 'parked' AND (ready_at IS NULL OR ready_at > ? OR owner IS NOT NULL)"""
_PENDING = """
SELECT count(*) FROM (SELECT 1 FROM edda_outbox INDEXED BY edda_outbox_pending WHERE state = 'pending' LIMIT ?)"""
_DEAD = """
SELECT count(*) FROM (SELECT 1 FROM edda_outbox INDEXED BY edda_outbox_dead WHERE state = 'dead' LIMIT ?)"""
_OLDEST_OUTBOX = """
SELECT created_at FROM edda_outbox INDEXED BY edda_outbox_pending WHERE state = 'pending' ORDER BY seq LIMIT 1"""
_STAGED = "SELECT count(*) FROM (SELECT 1 FROM edda_staged_event LIMIT ?)"

# Started runs: all generations that began, less those that followed another generation.
_BUCKET = """
SELECT ?1,
       (SELECT count(*) FROM edda_run INDEXED BY edda_run_created WHERE created_at >= ?1 AND created_at < ?2)
     - (SELECT count(*) FROM edda_run INDEXED BY edda_run_followed
         WHERE generation > 0 AND created_at >= ?1 AND created_at < ?2),
       count(*) FILTER (WHERE status = 'completed'),
       count(*) FILTER (WHERE status = 'failed'),
       count(*) FILTER (WHERE status = 'cancelled')
  FROM edda_result INDEXED BY edda_result_ended WHERE ended_at >= ?1 AND ended_at < ?2"""
_DURATIONS = """
SELECT x.ended_at - r.created_at
  FROM edda_result x INDEXED BY edda_result_ended CROSS JOIN edda_run r ON r.id = x.run_id
      AND r.generation = x.generation
 WHERE x.ended_at >= ? ORDER BY x.ended_at DESC LIMIT ?"""


class SQLiteQueries(Part):
    _lock_files: WorkerLockFiles

    @query
    def generations(self, db: Connection, run_id: RunId) -> tuple[Generation, ...]:
        return tuple(Generation(*row) for row in db.rows(_GENERATIONS, (run_id,)))

    @query
    def find_events(self, db: Connection, query: EventQuery) -> tuple[StoredEvent, ...]:
        values = {
            "type": query.type,
            "source": query.source,
            "id": query.id,
            "text": query.text,
            "received_from": query.received_from or 0,
            "received_to": MAX_INTEGER if query.received_to is None else query.received_to,
            "messages": query.messages,
            "before": MAX_INTEGER if query.before is None else query.before,
            "limit": query.limit,
        }
        return tuple(map(to_stored_event, db.rows(_choose_index(db, query, values), values)))

    @query
    def event(self, db: Connection, seq: int) -> StoredEvent | None:
        row = db.row(_EVENT, (seq,))
        return to_stored_event(row) if row else None

    @query
    def consumers(self, db: Connection, seq: int, limit: int) -> tuple[EventReceiver, ...]:
        return tuple(EventReceiver(*row) for row in db.rows(_RECEIVERS, (seq, limit)))

    @query
    def list_waits(
        self, db: Connection, type: str | None, after: tuple[str, str] | None, limit: int
    ) -> tuple[WaitRow, ...]:
        rows = db.rows(_WAITS, (*(after or ("", "")), type, limit))
        return tuple(WaitRow(run_id, workflow, to_wait(wait)) for run_id, workflow, *wait in rows)

    @query
    def event_schemas(self, db: Connection, workflow: str) -> tuple[EventSchema, ...]:
        return tuple(EventSchema(*row) for row in db.rows(_SCHEMAS, (workflow,)))

    @query
    def definitions(self, db: Connection) -> tuple[Definition, ...]:
        return tuple(Definition(*row) for row in db.rows(_DEFINITIONS))

    @query
    def list_workers(self, db: Connection) -> tuple[WorkerRecord, ...]:
        """A worker's lease is that of its lock file; `expires_at` in its row counts if there is no file."""
        files, now = self._lock_files, self._now()
        return tuple(
            WorkerRecord(
                WorkerInfo(id, service, host, pid),
                started_at,
                files.lease_end(id, expires_at),
                files.lease_is_over(id, expires_at, now),
                runs,
            )
            for id, service, host, pid, started_at, expires_at, runs in db.rows(_WORKERS)
        )

    @query
    def backlog(self, db: Connection) -> Backlog:
        now = self._now()
        ((ready, oldest_ready),) = db.rows(_READY, (now, MAX_COUNT))
        ((waiting, oldest_wait),) = db.rows(_WAITING, (now,))
        oldest_outbox = db.row(_OLDEST_OUTBOX)
        return Backlog(
            ready,
            oldest_ready,
            min(waiting, MAX_COUNT),
            oldest_wait,
            parked=min(_number(db, _PARKED, now), MAX_COUNT),
            outbox_pending=_number(db, _PENDING, MAX_COUNT),
            outbox_dead=_number(db, _DEAD, MAX_COUNT),
            oldest_outbox=oldest_outbox[0] if oldest_outbox else None,
            staged_events=_number(db, _STAGED, MAX_COUNT),
        )

    @query
    def throughput(self, db: Connection, since: int, width: int, count: int) -> tuple[TimeBucket, ...]:
        buckets = ((since + n * width, since + (n + 1) * width) for n in range(count))
        return tuple(TimeBucket(*db.rows(_BUCKET, bucket)[0]) for bucket in buckets)

    @query
    def latency(self, db: Connection, since: int, limit: int) -> Latency:
        return measure(duration for (duration,) in db.rows(_DURATIONS, (since, limit)))


def _choose_index(db: Connection, query: EventQuery, values: dict[str, Any]) -> str:
    """The statement whose index leaves the fewest rows."""
    if query.id is not None:
        return _BY_ID_ALONE if query.source is None else _BY_ID
    if (query.received_from, query.received_to) != (None, None):
        ((in_time,),) = db.rows(_COUNT_IN_TIME, values | {"scan_limit": SCAN_LIMIT})
        if in_time < SCAN_LIMIT:
            return _BY_TIME
    return _BY_NUMBER if query.type is None else _BY_TYPE


def _number(db: Connection, sql: str, *values: int) -> int:
    return int(db.rows(sql, values)[0][0])
