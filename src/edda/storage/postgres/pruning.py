"""Pruning: deleting old rows, a few at a time, while workers go on.

One statement finds and locks the old rows, another deletes them. The second is planned for the few rows it gets, and
its snapshot includes what was committed until the rows were locked.
"""

from __future__ import annotations

from edda.core.model import MICROSECONDS

from .pool import PostgresPool

GRACE = 3600 * MICROSECONDS
"""Between deleting an event's keys and the event: a process that found the event by a key has read it by then."""

# From the oldest key on: events before it have no keys left, and are not read again every time.
OLD_KEYS = """
SELECT e.seq FROM edda_event e
 WHERE e.seq >= (SELECT seq FROM edda_event_key ORDER BY seq LIMIT 1)
   AND e.seq <= (SELECT seq FROM edda_event WHERE received_at < $1 ORDER BY received_at DESC, seq DESC LIMIT 1)
   AND e.received_at < $1 AND EXISTS (SELECT FROM edda_event_key k WHERE k.seq = e.seq OFFSET 0)
 ORDER BY e.seq LIMIT $2 FOR UPDATE SKIP LOCKED"""
DELETE_KEYS = "DELETE FROM edda_event_key k USING unnest($1::bigint[]) old WHERE k.seq = old"

# Events before the oldest key have none left.
OLD_EVENTS = """
SELECT e.seq FROM edda_event e
 WHERE e.received_at < $1 AND e.seq < (SELECT seq FROM edda_event ORDER BY seq DESC LIMIT 1)
   AND e.seq < coalesce((SELECT seq FROM edda_event_key ORDER BY seq LIMIT 1), 9223372036854775807)
   AND NOT EXISTS (
       SELECT FROM edda_inbox d JOIN edda_open_run s USING (run_id)
        WHERE d.event = e.seq AND d.inbox_no > s.inbox_read OFFSET 0)
 ORDER BY e.received_at, e.seq LIMIT $2 FOR UPDATE SKIP LOCKED"""
DELETE_EVENTS = """
DELETE FROM edda_event e USING unnest($1::bigint[]) old
 WHERE e.seq = old AND NOT EXISTS (SELECT FROM edda_event_key k WHERE k.seq = e.seq OFFSET 0)"""

# As long as the event exists, its item in an open run's inbox keeps the run from receiving it twice.
OLD_INBOX_ITEMS = """
SELECT d.run_id, d.inbox_no FROM edda_inbox d
 WHERE d.at < $1 AND (
       NOT EXISTS (SELECT FROM edda_open_run s WHERE s.run_id = d.run_id OFFSET 0)
       OR (EXISTS (SELECT FROM edda_open_run s WHERE s.run_id = d.run_id AND d.inbox_no <= s.inbox_read OFFSET 0)
           AND NOT EXISTS (SELECT FROM edda_event e WHERE e.seq = d.event OFFSET 0)))
 ORDER BY d.at LIMIT $2 FOR UPDATE SKIP LOCKED"""
DELETE_INBOX_ITEMS = """
DELETE FROM edda_inbox d USING unnest($1::text[], $2::int[]) old (run_id, inbox_no)
 WHERE d.run_id = old.run_id AND d.inbox_no = old.inbox_no"""

OLD_RUNS = """
SELECT r.run_id FROM edda_result r
 WHERE r.ended_at < $1 AND NOT EXISTS (SELECT FROM edda_open_run s WHERE s.run_id = r.run_id OFFSET 0)
 ORDER BY r.ended_at LIMIT $2 FOR UPDATE SKIP LOCKED"""
DELETE_RUNS = """
WITH history AS (DELETE FROM edda_history h USING unnest($1::text[]) old WHERE h.run_id = old),
     inbox AS (DELETE FROM edda_inbox d USING unnest($1::text[]) old WHERE d.run_id = old),
     watchers AS (DELETE FROM edda_watcher w USING unnest($1::text[]) old WHERE w.run_id = old),
     run_values AS (DELETE FROM edda_run_value v USING unnest($1::text[]) old WHERE v.run_id = old),
     step_commits AS (DELETE FROM edda_step_commit d USING unnest($1::text[]) old WHERE d.run_id = old),
     run AS (DELETE FROM edda_run r USING unnest($1::text[]) old WHERE r.id = old)
DELETE FROM edda_result r USING unnest($1::text[]) old WHERE r.run_id = old"""

# Of open runs only: DELETE_RUNS deletes the generations of ended runs.
OLD_GENERATIONS = """
SELECT r.id, r.generation FROM edda_run next JOIN edda_run r ON r.id = next.id AND r.generation = next.generation - 1
 WHERE next.generation > 0 AND next.created_at < $1
   AND EXISTS (SELECT FROM edda_open_run s WHERE s.run_id = r.id OFFSET 0)
 ORDER BY next.created_at, next.id LIMIT $2 FOR UPDATE OF r SKIP LOCKED"""
DELETE_GENERATIONS = """
WITH history AS (
    DELETE FROM edda_history h USING unnest($1::text[], $2::int[]) old (id, generation)
     WHERE h.run_id = old.id AND h.generation = old.generation),
step_commits AS (
    DELETE FROM edda_step_commit d USING unnest($1::text[], $2::int[]) old (id, generation)
     WHERE d.run_id = old.id AND d.generation = old.generation)
DELETE FROM edda_run r USING unnest($1::text[], $2::int[]) old (id, generation) WHERE r.id = old.id
    AND r.generation = old.generation"""

OLD_OUTBOX = """
SELECT seq FROM edda_outbox WHERE state = 'sent' AND ended_at < $1
 ORDER BY ended_at LIMIT $2 FOR UPDATE SKIP LOCKED"""
DELETE_OUTBOX = "DELETE FROM edda_outbox o USING unnest($1::bigint[]) old WHERE o.seq = old"


class PostgresPruning:
    _pool: PostgresPool

    async def prune_events(self, before: int, limit: int) -> int:
        without_keys = await self._prune(OLD_KEYS, DELETE_KEYS, before, limit)
        return without_keys + await self._prune(OLD_EVENTS, DELETE_EVENTS, before - GRACE, limit)

    async def prune_inbox(self, before: int, limit: int) -> int:
        return await self._prune(OLD_INBOX_ITEMS, DELETE_INBOX_ITEMS, before, limit)

    async def prune_runs(self, before: int, limit: int) -> int:
        ended = await self._prune(OLD_RUNS, DELETE_RUNS, before, limit)
        if ended == limit:
            return ended
        return ended + await self._prune(OLD_GENERATIONS, DELETE_GENERATIONS, before, limit - ended)

    async def prune_outbox(self, before: int, limit: int) -> int:
        return await self._prune(OLD_OUTBOX, DELETE_OUTBOX, before, limit)

    async def _prune(self, find: str, delete: str, before: int, limit: int) -> int:
        async with self._pool.session() as session, session.transaction():
            old = await session.fetch(find, before, limit)
            if old:
                await session.execute(delete, *zip(*old, strict=True))
        return len(old)
