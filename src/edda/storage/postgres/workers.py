"""Who is alive, and what becomes of the runs of those who are not."""

from __future__ import annotations

from edda.core.model import SUSPECT_DEATHS, SUSPECT_GROUPS, RunId, Takeover, WorkerId, WorkerInfo, WorkerStatus
from edda.storage.ports import AT_ONCE, RECLAIM

from .clock import with_now
from .pool import ConnectionFactory, Pool
from .session import Session

BEAT_TIMEOUT = 4.0
"""Seconds; a beat without an answer by then is tried again on a new connection."""

# One statement, one commit: no row of `edda_sched` may ever name a worker whose fence is not there yet.
REGISTER = with_now("""
WITH fence AS (INSERT INTO edda_fence (worker, batch_no, moves) VALUES ($1, 0, 0)),
     claims AS (INSERT INTO edda_claim (worker, n) VALUES ($1, 0)),
     clock AS MATERIALIZED (SELECT {now} AS now)
INSERT INTO edda_worker (id, service, host, pid, started_at, expires_at)
SELECT $1, $2, $3, $4, now, now + $5 FROM clock RETURNING started_at""")

BEAT = with_now("""
WITH clock AS MATERIALIZED (SELECT {now} AS now)
UPDATE edda_worker SET expires_at = now + $2 FROM clock WHERE id = $1 RETURNING now""")

ROSTER = with_now("SELECT id, service, host, pid, expires_at < {now} FROM edda_worker")

FIND_LAPSED = with_now("""
SELECT id FROM edda_worker WHERE expires_at < (SELECT {now}) AND id <> $1
 ORDER BY expires_at LIMIT 1 FOR UPDATE SKIP LOCKED""")

# Waits for the batch or the claim in flight; whatever follows must be another statement, to see what that wrote.
DELETE_FENCE = """
WITH fence AS (DELETE FROM edda_fence WHERE worker = $1 RETURNING worker)
DELETE FROM edda_claim c USING fence WHERE c.worker = fence.worker"""
DELETE_WORKER = "DELETE FROM edda_worker WHERE id = $1"

# `found` has no order, or the planner walks the whole primary key in search of it; `locked` has everybody's order.
# More than 5,000 would be a long transaction; `free_orphans` finds the rest.
FREE = with_now("""
WITH found AS MATERIALIZED (SELECT run_id FROM edda_sched WHERE owner = $1 LIMIT 5000),
     locked AS MATERIALIZED (
         SELECT s.run_id FROM found JOIN edda_sched s USING (run_id)
          WHERE s.owner = $1 ORDER BY s.run_id FOR UPDATE OF s)
UPDATE edda_sched s SET owner = NULL, ready_at = {now}, status = 'running', alone = false
  FROM locked WHERE s.run_id = locked.run_id""")
# The same, with one more death each, as `Crashes.after_death` says, and those who are suspects then in the groups of
# `suspect_groups`. One time for all: a group is known by it.
FREE_FROM_DEAD = (
    with_now("""
WITH found AS MATERIALIZED (SELECT run_id FROM edda_sched WHERE owner = $1 LIMIT 5000),
     locked AS MATERIALIZED (
         SELECT s.run_id, s.gen, s.deaths, s.deaths_alone, s.died_seq, s.alone
           FROM found JOIN edda_sched s USING (run_id)
          WHERE s.owner = $1 ORDER BY s.run_id FOR UPDATE OF s),
     died AS MATERIALIZED (
         SELECT run_id, deaths + 1 AS deaths, deaths_alone + alone::int AS deaths_alone,
                CASE WHEN deaths > 0 THEN died_seq ELSE coalesce(last.seq, 0) END AS seq
           FROM locked LEFT JOIN LATERAL (
                SELECT h.seq FROM edda_hist h
                 WHERE h.run_id = locked.run_id AND h.gen = locked.gen
                 ORDER BY h.seq DESC LIMIT 1) last ON true),
     divided AS (
         SELECT run_id, deaths, deaths_alone,
                (row_number() OVER level - 1 + deaths) % count(*) OVER whole * {groups} / count(*) OVER whole AS part
           FROM died WHERE deaths >= {suspect}
         WINDOW whole AS (PARTITION BY deaths_alone, deaths), level AS (whole ORDER BY run_id)),
     suspects AS (
         SELECT run_id, dense_rank() OVER (ORDER BY deaths_alone DESC, deaths, part) - 1 AS place FROM divided),
     clock AS MATERIALIZED (SELECT {now} AS now)
UPDATE edda_sched s
   SET owner = NULL, status = 'running', alone = false, deaths = d.deaths, deaths_alone = d.deaths_alone,
       died_seq = d.seq, ready_at = CASE WHEN d.deaths < {suspect} THEN clock.now END,
       suspect_at = clock.now - suspects.place
  FROM clock CROSS JOIN died d LEFT JOIN suspects USING (run_id) WHERE s.run_id = d.run_id""")
    .replace("{suspect}", str(SUSPECT_DEATHS))
    .replace("{groups}", str(SUSPECT_GROUPS))
)
KEEP_COMPANY = "UPDATE edda_sched SET alone = false WHERE owner = $1 AND alone"
CLEAR_DEATHS = """
UPDATE edda_sched SET deaths = 0, deaths_alone = 0, died_seq = NULL, alone = false
 WHERE run_id = $1 AND epoch = $2 AND owner IS NOT NULL"""

# Steps from owner to owner in the index instead of reading the rows of all of them.
FIND_ORPHANS = """
WITH RECURSIVE owners (id) AS (
    (SELECT owner FROM edda_sched WHERE owner IS NOT NULL ORDER BY owner LIMIT 1)
    UNION ALL
    SELECT (SELECT owner FROM edda_sched WHERE owner > owners.id ORDER BY owner LIMIT 1)
      FROM owners WHERE owners.id IS NOT NULL)
SELECT id FROM owners WHERE id IS NOT NULL AND NOT EXISTS (SELECT FROM edda_fence WHERE worker = owners.id)"""

IS_AHEAD = with_now("SELECT max(created_at) > {now} FROM edda_run")
CAP_LEASES = with_now("UPDATE edda_worker SET expires_at = {now} + $1 WHERE expires_at > {now} + $1")
# Unowned and `running` is a run that was ready when its row was written: only a start with a delay is due later.
MEND_READY = with_now("""
WITH late AS MATERIALIZED (
    SELECT s.run_id FROM edda_sched s
     WHERE s.owner IS NULL AND s.status = 'running' AND s.ready_at > (SELECT {now})
       AND (s.epoch > 0 OR s.ready_at <= $1 + (
            SELECT r.created_at FROM edda_run r WHERE r.id = s.run_id AND r.gen = s.gen))
     ORDER BY s.run_id LIMIT 5000 FOR UPDATE OF s SKIP LOCKED)
UPDATE edda_sched s SET ready_at = 0 FROM late WHERE s.run_id = late.run_id""")
MEND_OUTBOX = with_now("""
UPDATE edda_outbox SET due = {now} + $1 WHERE seq IN (
    SELECT seq FROM edda_outbox WHERE state = 'pending' AND due > {now} + $1 ORDER BY seq FOR UPDATE SKIP LOCKED)""")
MEND_DISPATCHES = with_now("""
UPDATE edda_dispatch SET due = {now} + $1 WHERE seq IN (
    SELECT seq FROM edda_dispatch WHERE due > {now} + $1 ORDER BY seq FOR UPDATE SKIP LOCKED)""")

OWNER = "SELECT owner FROM edda_sched WHERE run_id = $1 AND owner IS NOT NULL"
# Not only the update below: the full lock also waits for a step that holds the key in a user's transaction.
LOCK_FENCE = "SELECT 1 FROM edda_fence WHERE worker = $1 FOR UPDATE"
BUMP_MOVES = "UPDATE edda_fence SET moves = moves + 1 WHERE worker = $1"
# As FREE, for a worker whose event loop is blocked by the run that it keeps.
HAND_OVER = with_now("""
WITH found AS MATERIALIZED (SELECT run_id FROM edda_sched WHERE owner = $1 LIMIT 5000),
     locked AS MATERIALIZED (
         SELECT s.run_id FROM found JOIN edda_sched s USING (run_id)
          WHERE s.owner = $1 AND s.run_id <> $2 ORDER BY s.run_id FOR UPDATE OF s)
UPDATE edda_sched s SET owner = NULL, ready_at = {now}, status = 'running', alone = false
  FROM locked WHERE s.run_id = locked.run_id""")
DISOWN = with_now(
    "UPDATE edda_sched SET owner = NULL, ready_at = {now}, alone = false WHERE run_id = $1 AND owner = $2"
)


class PostgresWorkers:
    _address: ConnectionFactory
    _pool: Pool
    _pulses: list[Pool]

    async def register(self, worker: WorkerInfo, lease: int) -> int:
        async with self._pool.session() as session:
            rows = await session.fetch(REGISTER, worker.id, worker.service, worker.host, worker.pid, lease)
        now: int = rows[0][0]
        return now

    async def remove_worker(self, worker: WorkerId, died: bool = False) -> None:
        async with self._pool.session() as session, session.transaction():
            await session.execute(DELETE_WORKER, worker)
            await session.execute(DELETE_FENCE, worker)
            await session.execute(FREE_FROM_DEAD if died else FREE, worker)

    async def registered_workers(self) -> tuple[WorkerStatus, ...]:
        async with self._pool.session() as session:
            rows = await session.fetch(ROSTER)
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
            await session.execute(BUMP_MOVES, owner)
            return await session.execute(DISOWN, run_id, owner) == 1

    async def is_ahead(self) -> bool:
        async with self._pool.session() as session:
            return bool((await session.fetch(IS_AHEAD))[0][0])

    async def mend_times(self, lease: int) -> int:
        async with self._pool.session() as session:
            await session.execute(CAP_LEASES, lease)
            await session.execute(MEND_OUTBOX, RECLAIM)
            await session.execute(MEND_DISPATCHES, RECLAIM)
            mended = 0
            while moved := await session.execute(MEND_READY, AT_ONCE):
                mended += moved
            return mended

    async def keep_company(self, worker: WorkerId) -> None:
        async with self._pool.session() as session:
            await session.execute(KEEP_COMPANY, worker)

    async def clear_deaths(self, run_id: RunId, epoch: int) -> None:
        async with self._pool.session() as session:
            await session.execute(CLEAR_DEATHS, run_id, epoch)

    async def open_heartbeat(self) -> PostgresPulse:
        line = Pool(self._address, size=1, answer_within=BEAT_TIMEOUT)
        self._pulses.append(line)
        return PostgresPulse(line, self._pulses)


class PostgresPulse:
    def __init__(self, line: Pool, pulses: list[Pool]) -> None:
        self._line = line
        self._pulses = pulses

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        async with self._line.session() as session:
            rows = await session.fetch(BEAT, worker, lease)
        return rows[0][0] if rows else None

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        async with self._line.session() as session, session.transaction():
            await session.fetch(LOCK_FENCE, worker)
            await session.execute(BUMP_MOVES, worker)
            return await session.execute(HAND_OVER, worker, keep or "")

    async def close(self) -> None:
        if self._line in self._pulses:
            self._pulses.remove(self._line)
        await self._line.close()


async def _free_all(session: Session, worker: WorkerId) -> int:
    freed = 0
    while moved := await session.execute(FREE_FROM_DEAD, worker):
        freed += moved
    return freed
