"""The whole in figures: who works, what is left to do, how much was done and how quickly."""

from __future__ import annotations

from edda.core.model import WorkerId, WorkerInfo
from edda.core.queries import MAX_COUNT, Backlog, Latency, TimeBucket, WorkerRecord
from edda.storage.shared.stats import measure

from .connection import Connection
from .locks import WorkerLockFile

_CREW = """
SELECT w.id, w.service, w.host, w.pid, w.started_at, w.expires_at,
       (SELECT count(*) FROM edda_sched s INDEXED BY edda_sched_owner WHERE s.owner = w.id)
  FROM edda_worker w ORDER BY w.started_at DESC, w.id"""

# What is ready at once has no moment of its own: that of its mail counts, or else its beginning.
_READY = """
SELECT count(*), min(since) FROM (
SELECT coalesce(nullif(s.ready_at, 0),
                (SELECT d.at FROM edda_delivery d WHERE d.run_id = s.run_id AND d.n = s.absorbed + 1),
                (SELECT r.created_at FROM edda_run r WHERE r.id = s.run_id AND r.gen = s.gen)) AS since
  FROM edda_sched s INDEXED BY edda_sched_ready WHERE s.owner IS NULL AND s.ready_at <= ? LIMIT ?)"""
_WAITING = """
SELECT count(*), min(r.created_at)
  FROM edda_sched s CROSS JOIN edda_run r ON r.id = s.run_id AND r.gen = s.gen
 WHERE s.status IN ('waiting_for_event', 'waiting_for_timer', 'waiting_for_message', 'waiting_for_child')
   AND NOT s.undoing AND (s.ready_at IS NULL OR s.ready_at > ? OR s.owner IS NOT NULL)"""
_PARKED = """
SELECT count(*) FROM edda_sched INDEXED BY edda_sched_parked
 WHERE status = 'parked' AND (ready_at IS NULL OR ready_at > ? OR owner IS NOT NULL)"""
_PENDING = """
SELECT count(*) FROM (SELECT 1 FROM edda_outbox INDEXED BY edda_outbox_pending WHERE state = 'pending' LIMIT ?)"""
_DEAD = """
SELECT count(*) FROM (SELECT 1 FROM edda_outbox INDEXED BY edda_outbox_dead WHERE state = 'dead' LIMIT ?)"""
_OLDEST_OUTGOING = """
SELECT created_at FROM edda_outbox INDEXED BY edda_outbox_pending WHERE state = 'pending' ORDER BY seq LIMIT 1"""
_DISPATCHES = "SELECT count(*) FROM (SELECT 1 FROM edda_dispatch LIMIT ?)"

# Those that were started are the generations that began, without those that followed another one.
_BUCKET = """
SELECT ?1,
       (SELECT count(*) FROM edda_run INDEXED BY edda_run_created WHERE created_at >= ?1 AND created_at < ?2)
     - (SELECT count(*) FROM edda_run INDEXED BY edda_run_followed
         WHERE gen > 0 AND created_at >= ?1 AND created_at < ?2),
       count(*) FILTER (WHERE status = 'completed'),
       count(*) FILTER (WHERE status = 'failed'),
       count(*) FILTER (WHERE status = 'cancelled')
  FROM edda_result INDEXED BY edda_result_ended WHERE ended_at >= ?1 AND ended_at < ?2"""
_DURATIONS = """
SELECT x.ended_at - r.created_at
  FROM edda_result x INDEXED BY edda_result_ended CROSS JOIN edda_run r ON r.id = x.run_id AND r.gen = x.gen
 WHERE x.ended_at >= ? ORDER BY x.ended_at DESC LIMIT ?"""


def crew(db: Connection, presence: WorkerLockFile, now: int) -> tuple[WorkerRecord, ...]:
    return tuple(_worker(*row, presence=presence, now=now) for row in db.rows(_CREW))


def _worker(
    id: WorkerId,
    service: str,
    host: str,
    pid: int,
    started_at: int,
    expires_at: int,
    runs: int,
    *,
    presence: WorkerLockFile,
    now: int,
) -> WorkerRecord:
    """Its row knows the lease only if there is no file."""
    is_lapsed = presence.lease_is_over(id, expires_at, now)
    info = WorkerInfo(id, service, host, pid)
    return WorkerRecord(info, started_at, presence.lease_end(id, expires_at), is_lapsed, runs)


def backlog(db: Connection, now: int) -> Backlog:
    ((ready, oldest_ready),) = db.rows(_READY, (now, MAX_COUNT))
    ((waiting, oldest_wait),) = db.rows(_WAITING, (now,))
    outgoing = db.row(_OLDEST_OUTGOING)
    return Backlog(
        ready,
        oldest_ready,
        min(waiting, MAX_COUNT),
        oldest_wait,
        parked=min(_number(db, _PARKED, now), MAX_COUNT),
        outbox_pending=_number(db, _PENDING, MAX_COUNT),
        outbox_dead=_number(db, _DEAD, MAX_COUNT),
        oldest_outgoing=outgoing[0] if outgoing else None,
        dispatches=_number(db, _DISPATCHES, MAX_COUNT),
    )


def _number(db: Connection, sql: str, *values: int) -> int:
    return int(db.rows(sql, values)[0][0])


def buckets(db: Connection, since: int, width: int, count: int) -> tuple[TimeBucket, ...]:
    stretches = ((since + n * width, since + (n + 1) * width) for n in range(count))
    return tuple(TimeBucket(*db.rows(_BUCKET, stretch)[0]) for stretch in stretches)


def latency(db: Connection, since: int, most: int) -> Latency:
    return measure(duration for (duration,) in db.rows(_DURATIONS, (since, most)))
