"""Deleting old rows: few in each transaction, because every other writer waits meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edda.core.model import MICROSECONDS, RunId

from .connection import Connection
from .events import last_event
from .runs import MAX_INTEGER
from .threads import Part, transaction

GRACE = 3600 * MICROSECONDS
"""How long an event is kept after its keys are deleted: a run that has just found it still reads it."""

# By number, not by time: events whose keys are deleted are not read again.
_WITH_KEYS = """
SELECT k.seq FROM edda_event_key k INDEXED BY edda_event_key_seq CROSS JOIN edda_event e ON e.seq = k.seq
 WHERE k.seq <= ? AND e.received_at < ? GROUP BY k.seq ORDER BY k.seq LIMIT ?"""
_DELETE_KEYS = "DELETE FROM edda_event_key WHERE seq = ?"
_DELETE_EVENTS = """
DELETE FROM edda_event WHERE seq IN (
SELECT e.seq FROM edda_event e INDEXED BY edda_event_received
 WHERE e.received_at < ? AND e.seq < (SELECT max(seq) FROM edda_event)
   AND NOT EXISTS (SELECT 1 FROM edda_event_key k WHERE k.seq = e.seq)
   AND NOT EXISTS (SELECT 1 FROM edda_inbox d CROSS JOIN edda_open_run s ON s.run_id = d.run_id
                    WHERE d.event = e.seq AND d.inbox_no > s.inbox_read)
 ORDER BY e.received_at, e.seq LIMIT ?)"""
# A read item of an open run stays as long as its event: it keeps the run from receiving the event again.
_DELETE_ITEMS = """
DELETE FROM edda_inbox WHERE rowid IN (
SELECT d.rowid FROM edda_inbox d INDEXED BY edda_inbox_at
  LEFT JOIN edda_open_run s ON s.run_id = d.run_id
  LEFT JOIN edda_event e ON e.seq = d.event
 WHERE d.at < ? AND (s.run_id IS NULL OR (d.inbox_no <= s.inbox_read AND e.seq IS NULL))
 ORDER BY d.at LIMIT ?)"""
_ENDED = """
SELECT x.run_id FROM edda_result x INDEXED BY edda_result_ended
 WHERE x.ended_at < ? AND NOT EXISTS (SELECT 1 FROM edda_open_run s WHERE s.run_id = x.run_id)
 ORDER BY x.ended_at LIMIT ?"""
# Old generations of open runs; an ended run is deleted with all its generations.
_OLD_GENERATIONS = """
SELECT n.id, n.generation - 1, n.created_at FROM edda_run n INDEXED BY edda_run_followed
 CROSS JOIN edda_run o ON o.id = n.id AND o.generation = n.generation - 1
 CROSS JOIN edda_open_run s ON s.run_id = n.id
 WHERE n.generation > 0 AND n.created_at < ? ORDER BY n.created_at, n.id, n.generation LIMIT ?"""
_DELETE_GENERATION = (
    "DELETE FROM edda_history WHERE run_id = ? AND generation = ?",
    "DELETE FROM edda_step_commit WHERE run_id = ? AND generation = ?",
    "DELETE FROM edda_run WHERE id = ? AND generation = ?",
)
_DELETE_RUN = (
    "DELETE FROM edda_history WHERE run_id = ?",
    "DELETE FROM edda_inbox WHERE run_id = ?",
    "DELETE FROM edda_watcher WHERE run_id = ?",
    "DELETE FROM edda_step_commit WHERE run_id = ?",
    "DELETE FROM edda_run_value WHERE run_id = ?",
    "DELETE FROM edda_run WHERE id = ?",
    "DELETE FROM edda_result WHERE run_id = ?",
)
_DELETE_OUTBOX = """
DELETE FROM edda_outbox WHERE seq IN (
SELECT seq FROM edda_outbox INDEXED BY edda_outbox_sent
 WHERE state = 'sent' AND ended_at < ? ORDER BY ended_at, seq LIMIT ?)"""

_OLDEST_EVENT = "SELECT min(received_at) FROM edda_event"
_OLDEST_ITEM = "SELECT min(at) FROM edda_inbox"
_OLDEST_RESULT = "SELECT min(ended_at) FROM edda_result"
_OLDEST_SENT = "SELECT min(ended_at) FROM edda_outbox INDEXED BY edda_outbox_sent WHERE state = 'sent'"


class SQLitePruning(Part):
    """Each method reads first, from the cache: a database with nothing to prune starts no transaction."""

    async def prune_events(self, before: int, limit: int) -> int:
        if not await self._has_older(before, _oldest, _OLDEST_EVENT):
            return 0
        return await self._delete_keys(before, limit) + await self._delete_events(before, limit)

    @transaction
    def _delete_keys(self, db: Connection, before: int, limit: int) -> int:
        found = db.rows(_WITH_KEYS, (last_event(db, before), before, limit))
        db.run_many(_DELETE_KEYS, found)
        return len(found)

    @transaction
    def _delete_events(self, db: Connection, before: int, limit: int) -> int:
        return db.run(_DELETE_EVENTS, (before - GRACE, limit))

    async def prune_inbox(self, before: int, limit: int) -> int:
        if not await self._has_older(before, _oldest, _OLDEST_ITEM):
            return 0
        return await self._pool.transact(lambda db: db.run(_DELETE_ITEMS, (before, limit)))

    async def prune_runs(self, before: int, limit: int) -> int:
        if await self._has_older(before, _oldest, _OLDEST_RESULT) or await self._has_older(before, _oldest_generation):
            return await self._prune_runs(before, limit)
        return 0

    @transaction
    def _prune_runs(self, db: Connection, before: int, limit: int) -> int:
        ended = db.rows(_ENDED, (before, limit))
        delete_runs(db, ended)
        generations = [row[:2] for row in db.rows(_OLD_GENERATIONS, (before, limit - len(ended)))]
        for sql in _DELETE_GENERATION:
            db.run_many(sql, generations)
        return len(ended) + len(generations)

    async def prune_outbox(self, before: int, limit: int) -> int:
        if not await self._has_older(before, _oldest, _OLDEST_SENT):
            return 0
        return await self._pool.transact(lambda db: db.run(_DELETE_OUTBOX, (before, limit)))

    async def _has_older(self, before: int, find_oldest: Callable[..., int | None], *args: str) -> bool:
        oldest = await self._pool.cached_read(find_oldest, *args)
        return oldest is not None and oldest < before


def _oldest(db: Connection, sql: str) -> int | None:
    time: int | None = db.rows(sql)[0][0]
    return time


def _oldest_generation(db: Connection) -> int | None:
    """When the oldest old generation that is still stored was followed by the next one."""
    row = db.row(_OLD_GENERATIONS, (MAX_INTEGER, 1))
    return row[2] if row else None


def delete_runs(db: Connection, run_ids: Sequence[tuple[RunId]]) -> None:
    """With all their rows."""
    for sql in _DELETE_RUN:
        db.run_many(sql, run_ids)
