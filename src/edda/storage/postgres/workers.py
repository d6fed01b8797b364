"""Registered workers, their leases, and the take-over of a dead worker's runs."""

from __future__ import annotations

from edda.core.model import SUSPECT_DEATHS, SUSPECT_GROUPS, RunId, Takeover, WorkerId, WorkerInfo, WorkerStatus
from edda.storage.ports import AT_ONCE, RECLAIM

from .connection import PostgresSession, with_now
from .pool import PostgresConnectionFactory, PostgresPool

BEAT_TIMEOUT = 4.0
"""Seconds; a heartbeat without an answer by then is sent again on a new connection."""

# One commit: no row of `edda_open_run` may name a worker whose fence row does not exist yet.
REGISTER = with_now("""
WITH fence AS (INSERT INTO edda_fence (worker, batch_no, ownership_version) VALUES ($1, 0, 0)),
     claims AS (INSERT INTO edda_claim (worker, claims) VALUES ($1, 0)),
     clock AS MATERIALIZED (SELECT {now} AS now)
INSERT INTO edda_worker (id, service, host, pid, started_at, expires_at)
SELECT $1, $2, $3, $4, now, now + $5 FROM clock RETURNING started_at""")

BEAT = with_now("""
WITH clock AS MATERIALIZED (SELECT {now} AS now)
UPDATE edda_worker SET expires_at = now + $2 FROM clock WHERE id = $1 RETURNING now""")

REGISTERED_WORKERS = with_now("SELECT id, service, host, pid, expires_at < {now} FROM edda_worker")

FIND_LAPSED = with_now("""
SELECT id FROM edda_worker WHERE expires_at < (SELECT {now}) AND id <> $1
 ORDER BY expires_at LIMIT 1 FOR UPDATE SKIP LOCKED""")

# Waits for the batch or the claim in flight. Later steps are statements of their own, so that they see what it wrote.
DELETE_FENCE = """
WITH fence AS (DELETE FROM edda_fence WHERE worker = $1 RETURNING worker)
DELETE FROM edda_claim c USING fence WHERE c.worker = fence.worker"""
DELETE_WORKER = "DELETE FROM edda_worker WHERE id = $1"

# `owned` has no ORDER BY: with one, the planner would scan the whole primary key. `locked` locks in the order of
# run_id, as every statement does. The limit keeps the transaction short; `free_orphans` frees the rest.
FREE = with_now("""
WITH owned AS MATERIALIZED (SELECT run_id FROM edda_open_run WHERE owner = $1 LIMIT 5000),
     locked AS MATERIALIZED (
         SELECT s.run_id FROM owned JOIN edda_open_run s USING (run_id)
          WHERE s.owner = $1 ORDER BY s.run_id FOR UPDATE OF s)
UPDATE edda_open_run s SET owner = NULL, ready_at = {now}, status = 'running', alone = false
  FROM locked WHERE s.run_id = locked.run_id""")
# As FREE, and each run gets one more death, as `Crashes.after_death` does. The runs that are then suspects are divided
# as by `suspect_groups`; the runs of a group share one suspect_at, so the clock is read once.
FREE_FROM_DEAD = (
    with_now("""
WITH owned AS MATERIALIZED (SELECT run_id FROM edda_open_run WHERE owner = $1 LIMIT 5000),
     locked AS MATERIALIZED (
         SELECT s.run_id, s.generation, s.deaths, s.deaths_alone, s.died_seq, s.alone
           FROM owned JOIN edda_open_run s USING (run_id)
          WHERE s.owner = $1 ORDER BY s.run_id FOR UPDATE OF s),
     died AS MATERIALIZED (
         SELECT run_id, deaths + 1 AS deaths, deaths_alone + alone::int AS deaths_alone,
                CASE WHEN deaths > 0 THEN died_seq ELSE coalesce(last.seq, 0) END AS seq
           FROM locked LEFT JOIN LATERAL (
                SELECT h.seq FROM edda_history h
                 WHERE h.run_id = locked.run_id AND h.generation = locked.generation
                 ORDER BY h.seq DESC LIMIT 1) last ON true),
     divided AS (
         SELECT run_id, deaths, deaths_alone,
                (row_number() OVER level - 1 + deaths) % count(*) OVER whole * {groups} / count(*) OVER whole AS part
           FROM died WHERE deaths >= {suspect}
         WINDOW whole AS (PARTITION BY deaths_alone, deaths), level AS (whole ORDER BY run_id)),
     suspects AS (
         SELECT run_id, dense_rank() OVER (ORDER BY deaths_alone DESC, deaths, part) - 1 AS place FROM divided),
     clock AS MATERIALIZED (SELECT {now} AS now)
UPDATE edda_open_run s
   SET owner = NULL, status = 'running', alone = false, deaths = d.deaths, deaths_alone = d.deaths_alone,
       died_seq = d.seq, ready_at = CASE WHEN d.deaths < {suspect} THEN clock.now END,
       suspect_at = clock.now - suspects.place
  FROM clock CROSS JOIN died d LEFT JOIN suspects USING (run_id) WHERE s.run_id = d.run_id""")
    .replace("{suspect}", str(SUSPECT_DEATHS))
    .replace("{groups}", str(SUSPECT_GROUPS))
)
KEEP_COMPANY = "UPDATE edda_open_run SET alone = false WHERE owner = $1 AND alone"
CLEAR_DEATHS = """
UPDATE edda_open_run SET deaths = 0, deaths_alone = 0, died_seq = NULL, alone = false
 WHERE run_id = $1 AND epoch = $2 AND owner IS NOT NULL"""

# Steps from owner to owner in the index, instead of reading the rows of all owned runs.
FIND_ORPHANS = """
WITH RECURSIVE owners (id) AS (
    (SELECT owner FROM edda_open_run WHERE owner IS NOT NULL ORDER BY owner LIMIT 1)
    UNION ALL
    SELECT (SELECT owner FROM edda_open_run WHERE owner > owners.id ORDER BY owner LIMIT 1)
      FROM owners WHERE owners.id IS NOT NULL)
SELECT id FROM owners WHERE id IS NOT NULL AND NOT EXISTS (SELECT FROM edda_fence WHERE worker = owners.id)"""

IS_AHEAD = with_now("SELECT max(created_at) > {now} FROM edda_run")
CAP_LEASES = with_now("UPDATE edda_worker SET expires_at = {now} + $1 WHERE expires_at > {now} + $1")
# An unowned run in status `running` was ready when its row was written; only a start with a delay is due later.
MEND_READY = with_now("""
WITH late AS MATERIALIZED (
    SELECT s.run_id FROM edda_open_run s
     WHERE s.owner IS NULL AND s.status = 'running' AND s.ready_at > (SELECT {now})
       AND (s.epoch > 0 OR s.ready_at <= $1 + (
            SELECT r.created_at FROM edda_run r WHERE r.id = s.run_id AND r.generation = s.generation))
     ORDER BY s.run_id LIMIT 5000 FOR UPDATE OF s SKIP LOCKED)
UPDATE edda_open_run s SET ready_at = 0 FROM late WHERE s.run_id = late.run_id""")
MEND_OUTBOX = with_now("""
UPDATE edda_outbox SET due = {now} + $1 WHERE seq IN (
    SELECT seq FROM edda_outbox WHERE state = 'pending' AND due > {now} + $1 ORDER BY seq FOR UPDATE SKIP LOCKED)""")
MEND_STAGED_EVENTS = with_now("""
UPDATE edda_staged_event SET due = {now} + $1 WHERE seq IN (
    SELECT seq FROM edda_staged_event WHERE due > {now} + $1 ORDER BY seq FOR UPDATE SKIP LOCKED)""")

OWNER = "SELECT owner FROM edda_open_run WHERE run_id = $1 AND owner IS NOT NULL"
# FOR UPDATE, and not only the UPDATE below: it also waits for a user's transaction that holds FOR KEY SHARE.
LOCK_FENCE = "SELECT 1 FROM edda_fence WHERE worker = $1 FOR UPDATE"
BUMP_OWNERSHIP = "UPDATE edda_fence SET ownership_version = ownership_version + 1 WHERE worker = $1"
# As FREE, for a worker whose event loop is blocked by the one run that it keeps.
HAND_OVER = with_now("""
WITH owned AS MATERIALIZED (SELECT run_id FROM edda_open_run WHERE owner = $1 LIMIT 5000),
     locked AS MATERIALIZED (
         SELECT s.run_id FROM owned JOIN edda_open_run s USING (run_id)
          WHERE s.owner = $1 AND s.run_id <> $2 ORDER BY s.run_id FOR UPDATE OF s)
UPDATE edda_open_run s SET owner = NULL, ready_at = {now}, status = 'running', alone = false
  FROM locked WHERE s.run_id = locked.run_id""")
RELEASE_RUN = with_now(
    "UPDATE edda_open_run SET owner = NULL, ready_at = {now}, alone = false WHERE run_id = $1 AND owner = $2"
)


class PostgresWorkers:
    _factory: PostgresConnectionFactory
    _pool: PostgresPool
    _heartbeats: list[PostgresPool]

    async def register(self, worker: WorkerInfo, lease: int) -> int:
        rows = await self._pool.fetch(REGISTER, worker.id, worker.service, worker.host, worker.pid, lease)
        now: int = rows[0][0]
        return now

    async def remove_worker(self, worker: WorkerId, died: bool = False) -> None:
        async with self._pool.session() as session, session.transaction():
            await session.execute(DELETE_WORKER, worker)
            await session.execute(DELETE_FENCE, worker)
            await session.execute(FREE_FROM_DEAD if died else FREE, worker)

    async def registered_workers(self) -> tuple[WorkerStatus, ...]:
        rows = await self._pool.fetch(REGISTERED_WORKERS)
        return tuple(WorkerStatus(WorkerInfo(*info), is_lapsed) for *info, is_lapsed in rows)

    async def take_over(self, me: WorkerId) -> Takeover | None:
        async with self._pool.session() as session, session.transaction():
            lapsed = await session.fetch(FIND_LAPSED, me)
            if not lapsed:
                return None
            worker: WorkerId = lapsed[0][0]
            await session.execute(DELETE_FENCE, worker)
            await session.execute(DELETE_WORKER, worker)
            return Takeover(worker, await session.execute(FREE_FROM_DEAD, worker))

    async def free_orphans(self) -> int:
        async with self._pool.session() as session:
            orphaned = await session.fetch(FIND_ORPHANS)
            return sum([await _free_all(session, row[0]) for row in orphaned])

    async def release_run(self, run_id: RunId) -> bool:
        async with self._pool.session() as session, session.transaction():
            rows = await session.fetch(OWNER, run_id)
            if not rows:
                return False
            owner: WorkerId = rows[0][0]
            await session.fetch(LOCK_FENCE, owner)
            await session.execute(BUMP_OWNERSHIP, owner)
            return await session.execute(RELEASE_RUN, run_id, owner) == 1

    async def is_ahead(self) -> bool:
        return bool((await self._pool.fetch(IS_AHEAD))[0][0])

    async def mend_times(self, lease: int) -> int:
        async with self._pool.session() as session:
            await session.execute(CAP_LEASES, lease)
            await session.execute(MEND_OUTBOX, RECLAIM)
            await session.execute(MEND_STAGED_EVENTS, RECLAIM)
            mended = 0
            while moved := await session.execute(MEND_READY, AT_ONCE):
                mended += moved
            return mended

    async def keep_company(self, worker: WorkerId) -> None:
        await self._pool.execute(KEEP_COMPANY, worker)

    async def clear_deaths(self, run_id: RunId, epoch: int) -> None:
        await self._pool.execute(CLEAR_DEATHS, run_id, epoch)

    async def open_heartbeat(self) -> PostgresHeartbeat:
        pool = PostgresPool(self._factory, size=1, answer_within=BEAT_TIMEOUT)
        self._heartbeats.append(pool)
        return PostgresHeartbeat(pool, self._heartbeats)


class PostgresHeartbeat:
    def __init__(self, pool: PostgresPool, heartbeats: list[PostgresPool]) -> None:
        self._pool = pool
        self._heartbeats = heartbeats

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        rows = await self._pool.fetch(BEAT, worker, lease)
        return rows[0][0] if rows else None

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        async with self._pool.session() as session, session.transaction():
            await session.fetch(LOCK_FENCE, worker)
            await session.execute(BUMP_OWNERSHIP, worker)
            return await session.execute(HAND_OVER, worker, keep or "")

    async def close(self) -> None:
        if self._pool in self._heartbeats:
            self._heartbeats.remove(self._pool)
        await self._pool.close()


async def _free_all(session: PostgresSession, worker: WorkerId) -> int:
    freed = 0
    while moved := await session.execute(FREE_FROM_DEAD, worker):
        freed += moved
    return freed
