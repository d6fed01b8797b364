"""Removing what is old: few rows at a time, because everybody else waits meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import MICROSECONDS, RunId

from .connection import Connection
from .events import last_event

GRACE = 3600 * MICROSECONDS
"""How long an event is kept after it can no longer be found: whoever has just found it still reads it."""

# By number, not by time: events that have lost their keys already are not looked at again.
_FOUND = """
SELECT k.seq FROM edda_event_key k INDEXED BY edda_event_key_seq CROSS JOIN edda_event e ON e.seq = k.seq
 WHERE k.seq <= ? AND e.received_at < ? GROUP BY k.seq ORDER BY k.seq LIMIT ?"""
_HIDE = "DELETE FROM edda_event_key WHERE seq = ?"
_EVENTS = """
DELETE FROM edda_event WHERE seq IN (
SELECT e.seq FROM edda_event e INDEXED BY edda_event_received
 WHERE e.received_at < ? AND e.seq < (SELECT max(seq) FROM edda_event)
   AND NOT EXISTS (SELECT 1 FROM edda_event_key k WHERE k.seq = e.seq)
   AND NOT EXISTS (SELECT 1 FROM edda_delivery d CROSS JOIN edda_sched s ON s.run_id = d.run_id
                    WHERE d.event = e.seq AND d.n > s.absorbed)
 ORDER BY e.received_at, e.seq LIMIT ?)"""
# A read letter of an open run stays as long as its event: it is what keeps the run from getting it again.
_LETTERS = """
DELETE FROM edda_delivery WHERE rowid IN (
SELECT d.rowid FROM edda_delivery d INDEXED BY edda_delivery_at
  LEFT JOIN edda_sched s ON s.run_id = d.run_id
  LEFT JOIN edda_event e ON e.seq = d.event
 WHERE d.at < ? AND (s.run_id IS NULL OR (d.n <= s.absorbed AND e.seq IS NULL))
 ORDER BY d.at LIMIT ?)"""
_ENDED = """
SELECT x.run_id FROM edda_result x INDEXED BY edda_result_ended
 WHERE x.ended_at < ? AND NOT EXISTS (SELECT 1 FROM edda_sched s WHERE s.run_id = x.run_id)
 ORDER BY x.ended_at LIMIT ?"""
# Generations of open runs. An ended run goes with all of its own.
_FOLLOWED = """
SELECT n.id, n.gen - 1, n.created_at FROM edda_run n INDEXED BY edda_run_followed
 CROSS JOIN edda_run o ON o.id = n.id AND o.gen = n.gen - 1
 CROSS JOIN edda_sched s ON s.run_id = n.id
 WHERE n.gen > 0 AND n.created_at < ? ORDER BY n.created_at, n.id, n.gen LIMIT ?"""
_GENERATION = (
    "DELETE FROM edda_hist WHERE run_id = ? AND gen = ?",
    "DELETE FROM edda_done WHERE run_id = ? AND gen = ?",
    "DELETE FROM edda_run WHERE id = ? AND gen = ?",
)
_RUN = (
    "DELETE FROM edda_hist WHERE run_id = ?",
    "DELETE FROM edda_delivery WHERE run_id = ?",
    "DELETE FROM edda_watcher WHERE run_id = ?",
    "DELETE FROM edda_done WHERE run_id = ?",
    "DELETE FROM edda_fact WHERE run_id = ?",
    "DELETE FROM edda_run WHERE id = ?",
    "DELETE FROM edda_result WHERE run_id = ?",
)
_LAST = 2**63 - 1
_OLDEST_EVENT = "SELECT min(received_at) FROM edda_event"
_OLDEST_LETTER = "SELECT min(at) FROM edda_delivery"
_FIRST_ENDED = "SELECT min(ended_at) FROM edda_result"


def oldest_event(db: Connection) -> int | None:
    return _moment(db, _OLDEST_EVENT)


def oldest_letter(db: Connection) -> int | None:
    return _moment(db, _OLDEST_LETTER)


def first_ended(db: Connection) -> int | None:
    return _moment(db, _FIRST_ENDED)


def first_followed(db: Connection) -> int | None:
    """When the first generation that is still there was followed by the next."""
    row = db.row(_FOLLOWED, (_LAST, 1))
    return row[2] if row else None


def _moment(db: Connection, sql: str) -> int | None:
    moment: int | None = db.rows(sql)[0][0]
    return moment


def hide_events(db: Connection, before: int, limit: int) -> int:
    found = db.rows(_FOUND, (last_event(db, before), before, limit))
    db.run_many(_HIDE, found)
    return len(found)


def prune_events(db: Connection, before: int, limit: int) -> int:
    return db.run(_EVENTS, (before - GRACE, limit))


def prune_letters(db: Connection, before: int, limit: int) -> int:
    return db.run(_LETTERS, (before, limit))


def prune_runs(db: Connection, before: int, limit: int) -> int:
    ended = db.rows(_ENDED, (before, limit))
    remove_runs(db, ended)
    return len(ended) + _prune_generations(db, before, limit - len(ended))


def remove_runs(db: Connection, run_ids: Sequence[tuple[RunId]]) -> None:
    """With everything of theirs."""
    for sql in _RUN:
        db.run_many(sql, run_ids)


def _prune_generations(db: Connection, before: int, limit: int) -> int:
    followed = [(run_id, gen) for run_id, gen, _ in db.rows(_FOLLOWED, (before, limit))]
    for sql in _GENERATION:
        db.run_many(sql, followed)
    return len(followed)
