"""Removing what is old, a little at a time, beside everybody's work.

What is old is found and locked by one statement, and removed by another: that one knows how few there are, and sees
what was added until they were locked.
"""

from __future__ import annotations

from edda.core.model import MICROSECONDS

from .pool import Pool

GRACE = 3600 * MICROSECONDS
"""Whoever found an event by a key that is gone now has read it long since."""

# From the oldest key on: events before it have none, and are not looked at again and again.
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
       SELECT FROM edda_delivery d JOIN edda_sched s USING (run_id)
        WHERE d.event = e.seq AND d.n > s.absorbed OFFSET 0)
 ORDER BY e.received_at, e.seq LIMIT $2 FOR UPDATE SKIP LOCKED"""
DELETE_EVENTS = """
DELETE FROM edda_event e USING unnest($1::bigint[]) old
 WHERE e.seq = old AND NOT EXISTS (SELECT FROM edda_event_key k WHERE k.seq = e.seq OFFSET 0)"""

# A letter in an open run's inbox keeps its event from coming twice, as long as there is the event.
OLD_LETTERS = """
SELECT d.run_id, d.n FROM edda_delivery d
 WHERE d.at < $1 AND (
       NOT EXISTS (SELECT FROM edda_sched s WHERE s.run_id = d.run_id OFFSET 0)
       OR (EXISTS (SELECT FROM edda_sched s WHERE s.run_id = d.run_id AND d.n <= s.absorbed OFFSET 0)
           AND NOT EXISTS (SELECT FROM edda_event e WHERE e.seq = d.event OFFSET 0)))
 ORDER BY d.at LIMIT $2 FOR UPDATE SKIP LOCKED"""
DELETE_LETTERS = """
DELETE FROM edda_delivery d USING unnest($1::text[], $2::int[]) old (run_id, n)
 WHERE d.run_id = old.run_id AND d.n = old.n"""

OLD_RUNS = """
SELECT r.run_id FROM edda_result r
 WHERE r.ended_at < $1 AND NOT EXISTS (SELECT FROM edda_sched s WHERE s.run_id = r.run_id OFFSET 0)
 ORDER BY r.ended_at LIMIT $2 FOR UPDATE SKIP LOCKED"""
DELETE_RUNS = """
WITH hist AS (DELETE FROM edda_hist h USING unnest($1::text[]) old WHERE h.run_id = old),
     letters AS (DELETE FROM edda_delivery d USING unnest($1::text[]) old WHERE d.run_id = old),
     watchers AS (DELETE FROM edda_watcher w USING unnest($1::text[]) old WHERE w.run_id = old),
     facts AS (DELETE FROM edda_fact f USING unnest($1::text[]) old WHERE f.run_id = old),
     done AS (DELETE FROM edda_done d USING unnest($1::text[]) old WHERE d.run_id = old),
     run AS (DELETE FROM edda_run r USING unnest($1::text[]) old WHERE r.id = old)
DELETE FROM edda_result r USING unnest($1::text[]) old WHERE r.run_id = old"""

# Those of ended runs go with the run.
OLD_GENERATIONS = """
SELECT r.id, r.gen FROM edda_run next JOIN edda_run r ON r.id = next.id AND r.gen = next.gen - 1
 WHERE next.gen > 0 AND next.created_at < $1
   AND EXISTS (SELECT FROM edda_sched s WHERE s.run_id = r.id OFFSET 0)
 ORDER BY next.created_at, next.id LIMIT $2 FOR UPDATE OF r SKIP LOCKED"""
DELETE_GENERATIONS = """
WITH hist AS (
    DELETE FROM edda_hist h USING unnest($1::text[], $2::int[]) old (id, gen)
     WHERE h.run_id = old.id AND h.gen = old.gen),
done AS (
    DELETE FROM edda_done d USING unnest($1::text[], $2::int[]) old (id, gen)
     WHERE d.run_id = old.id AND d.gen = old.gen)
DELETE FROM edda_run r USING unnest($1::text[], $2::int[]) old (id, gen) WHERE r.id = old.id AND r.gen = old.gen"""

OLD_OUTGOING = """
SELECT seq FROM edda_outbox WHERE state = 'sent' AND ended_at < $1
 ORDER BY ended_at LIMIT $2 FOR UPDATE SKIP LOCKED"""
DELETE_OUTGOING = "DELETE FROM edda_outbox o USING unnest($1::bigint[]) old WHERE o.seq = old"


class PostgresPruning:
    _pool: Pool

    async def prune_events(self, before: int, limit: int) -> int:
        forgotten = await self._prune(OLD_KEYS, DELETE_KEYS, before, limit)
        return forgotten + await self._prune(OLD_EVENTS, DELETE_EVENTS, before - GRACE, limit)

    async def prune_inbox(self, before: int, limit: int) -> int:
        return await self._prune(OLD_LETTERS, DELETE_LETTERS, before, limit)

    async def prune_runs(self, before: int, limit: int) -> int:
        ended = await self._prune(OLD_RUNS, DELETE_RUNS, before, limit)
        if ended == limit:
            return ended
        return ended + await self._prune(OLD_GENERATIONS, DELETE_GENERATIONS, before, limit - ended)

    async def prune_outbox(self, before: int, limit: int) -> int:
        return await self._prune(OLD_OUTGOING, DELETE_OUTGOING, before, limit)

    async def _prune(self, find: str, delete: str, before: int, limit: int) -> int:
        async with self._pool.session() as session, session.transaction():
            old = await session.fetch(find, before, limit)
            if old:
                await session.execute(delete, *zip(*old, strict=True))
        return len(old)
