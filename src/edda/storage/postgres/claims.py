"""Runs that are due, and mail for those in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import asyncpg

from edda.core.model import (
    Claim,
    ClaimedRun,
    Crashes,
    EndWatcher,
    InboxItem,
    RunId,
    WorkerId,
)

from .clock import with_now
from .notifications import PostgresNews
from .pool import Pool
from .rows import delivery_of, done_of, entry_of, watcher_of
from .runs import WATCHERS
from .session import Session

# `fence` first: a worker that was taken over claims nothing, and a takeover waits for this claim. Then the claim is
# counted, in a row of its own: in the fence row it would wait for the batch in flight, and hold up the next. Both are
# asked inside the scan, as a condition, because a join might lock runs ahead of them. Names whose oldest run waits
# longest come first, and rows are locked one by one until there are enough. The limit inside is a number and
# not a parameter: with an unknown limit the planner prefers to sort all that is due.
_CLAIM = with_now("""
WITH fence AS MATERIALIZED (SELECT FROM edda_fence WHERE worker = $1 FOR KEY SHARE),
     counted AS (UPDATE edda_claim SET n = n + 1
                  WHERE worker = $1 AND n >= $4 AND EXISTS (SELECT FROM fence) RETURNING n),
     due AS MATERIALIZED (
         SELECT run.run_id, run.ready_at
           FROM (SELECT name FROM unnest($2::text[]) name CROSS JOIN LATERAL (
                     SELECT ready_at FROM edda_sched
                      WHERE workflow = name AND owner IS NULL AND ready_at <= (SELECT {now})
                      ORDER BY ready_at LIMIT 1) oldest
                  ORDER BY oldest.ready_at) names
          CROSS JOIN LATERAL (
                SELECT run_id, ready_at FROM edda_sched
                 WHERE EXISTS (SELECT FROM counted)
                   AND workflow = name AND owner IS NULL AND ready_at <= (SELECT {now})
                 ORDER BY ready_at LIMIT {limit} FOR UPDATE SKIP LOCKED) run
          LIMIT $3),
     claimed AS (
         UPDATE edda_sched s
            SET owner = $1, epoch = s.epoch + 1, ready_at = NULL, status = 'running', reason = NULL
           FROM due WHERE s.run_id = due.run_id
         RETURNING s.run_id, s.workflow, s.gen, s.epoch, s.absorbed, s.attempts, s.start_seq, s.watchers, s.undoing,
                   s.end_if_parked, s.deaths, s.deaths_alone, s.died_seq, due.ready_at)
SELECT {now} AS now, (SELECT n FROM counted) AS number, claimed.*
  FROM (VALUES (1)) one LEFT JOIN claimed ON true ORDER BY claimed.ready_at""")
CLAIM_FEW = _CLAIM.replace("{limit}", "100")
CLAIM_MANY = _CLAIM.replace("{limit}", "1000")

# The group that is first of those that died last. What is locked is being claimed or told something.
CLAIM_SUSPECTS = with_now("""
WITH fence AS MATERIALIZED (SELECT FROM edda_fence WHERE worker = $1 FOR KEY SHARE),
     counted AS (UPDATE edda_claim SET n = n + 1
                  WHERE worker = $1 AND n >= $5 AND EXISTS (SELECT FROM fence) RETURNING n),
     found AS MATERIALIZED (
         SELECT run_id, suspect_at FROM edda_sched
          WHERE EXISTS (SELECT FROM counted) AND suspect_at IS NOT NULL AND workflow = ANY ($2::text[])
          ORDER BY suspect_at DESC, run_id LIMIT $3 FOR UPDATE SKIP LOCKED),
     chosen AS MATERIALIZED (
         SELECT run_id, $4 AND count(*) OVER () = 1 AS alone, suspect_at FROM found
          WHERE suspect_at = (SELECT max(suspect_at) FROM found)),
     claimed AS (
         UPDATE edda_sched s
            SET owner = $1, epoch = s.epoch + 1, ready_at = NULL, suspect_at = NULL, status = 'running',
                reason = NULL, alone = chosen.alone
           FROM chosen WHERE s.run_id = chosen.run_id
         RETURNING s.run_id, s.workflow, s.gen, s.epoch, s.absorbed, s.attempts, s.start_seq, s.watchers, s.undoing,
                   s.end_if_parked, s.deaths, s.deaths_alone, s.died_seq, chosen.suspect_at)
SELECT {now} AS now, (SELECT n FROM counted) AS number, claimed.*
  FROM (VALUES (1)) one LEFT JOIN claimed ON true ORDER BY claimed.run_id""")
HAS_SUSPECTS = """
SELECT EXISTS (SELECT FROM edda_sched WHERE suspect_at IS NOT NULL AND workflow = ANY ($1::text[]))"""

# Read after the claim, never within it: its statement sees the newest row of a run but may see older history. All in
# one, so that a wait that is just being met is seen as one or the other.
READ_RUNS = """
SELECT r.id, r.input, r.created_at, r.deadline, r.parent, r.parent_step, r.depth,
       ARRAY(SELECT w.step FROM edda_wait w WHERE w.run_id = r.id ORDER BY w.step) AS waits,
       ARRAY(SELECT w.key FROM edda_wait w WHERE w.run_id = r.id ORDER BY w.step) AS keys,
       ARRAY(SELECT (h.seq, h.kind, h.step, h.name, h.ok, h.at, h.input, h.value, h.attempt, h.n,
                     h.event)::edda_entry_row
               FROM edda_hist h WHERE h.run_id = r.id AND h.gen = r.gen ORDER BY h.seq) AS history,
       ARRAY(SELECT (d.run_id, d.n, d.kind, d.at, d.step, coalesce(e.body, d.value), d.event)::edda_letter_row
               FROM edda_delivery d LEFT JOIN edda_event e ON e.seq = d.event
              WHERE d.run_id = r.id AND d.n > c.absorbed ORDER BY d.n) AS inbox,
       ARRAY(SELECT (d.step, d.attempt, d.value, d.at)::edda_done_row
               FROM edda_done d WHERE d.run_id = r.id AND d.gen = r.gen ORDER BY d.step) AS done
  FROM unnest($1::text[], $2::int[], $3::int[]) c (id, gen, absorbed) JOIN edda_run r USING (id, gen)"""

NEXT_DUE = with_now("""
SELECT min(first.ready_at), {now}
  FROM unnest($1::text[]) name CROSS JOIN LATERAL (
       SELECT ready_at FROM edda_sched
        WHERE workflow = name AND owner IS NULL AND ready_at IS NOT NULL ORDER BY ready_at LIMIT 1) first""")

# What is locked is being claimed or cancelled, so it is ready anyway. The pause is that of `unpark_pause`.
UNPARK = with_now("""
WITH parked AS MATERIALIZED (
    SELECT run_id, greatest({now}, CASE WHEN attempts < 3 THEN 0
                                   ELSE coalesce(parked_at, 0) + (100000 << least(attempts, 8)) END) AS due
      FROM edda_sched
     WHERE status = 'parked' AND owner IS NULL AND ready_at IS NOT NULL AND workflow = ANY ($1::text[])
    FOR UPDATE SKIP LOCKED)
UPDATE edda_sched s SET ready_at = parked.due FROM parked WHERE s.run_id = parked.run_id AND parked.due < s.ready_at""")

MAIL = """
SELECT d.run_id, d.n, d.kind, d.at, d.step, coalesce(e.body, d.value) AS value, d.event
  FROM edda_sched s
  JOIN edda_delivery d ON d.run_id = s.run_id AND d.n > s.absorbed
  LEFT JOIN edda_event e ON e.seq = d.event
 WHERE s.owner = $1 AND s.owner IS NOT NULL AND s.delivered > s.absorbed ORDER BY d.run_id, d.n"""


class PostgresQueue:
    _pool: Pool
    _news: PostgresNews

    async def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int, seen: int = 0) -> Claim:
        statement = CLAIM_FEW if limit <= 100 else CLAIM_MANY
        return await self._claim(statement, worker, workflows, limit, seen)

    async def claim_suspects(
        self, worker: WorkerId, workflows: Sequence[str], few: int, alone: bool, seen: int = 0
    ) -> Claim:
        return await self._claim(CLAIM_SUSPECTS, worker, workflows, few, alone, seen)

    async def _claim(self, statement: str, *values: object) -> Claim:
        async with self._pool.session() as session:
            rows = await session.fetch(statement, *values)
            claimed = [row for row in rows if row["run_id"] is not None]
            runs = await _load_claimed(session, claimed) if claimed else ()
        if claimed:
            self._news.expect_more()
        return Claim(rows[0]["now"], runs, rows[0]["number"])

    async def has_suspects(self, workflows: Sequence[str]) -> bool:
        async with self._pool.session() as session:
            return bool((await session.fetch(HAS_SUSPECTS, workflows))[0][0])

    async def next_due(self, workflows: Sequence[str]) -> int | None:
        async with self._pool.session() as session:
            ready_at, now = (await session.fetch(NEXT_DUE, workflows))[0]
        return None if ready_at is None else max(0, ready_at - now)

    async def wake_parked(self, workflows: Sequence[str]) -> int:
        async with self._pool.session() as session:
            return await session.execute(UNPARK, workflows)

    async def read_inboxes(self, worker: WorkerId) -> tuple[InboxItem, ...]:
        async with self._pool.session() as session:
            rows = await session.fetch(MAIL, worker)
        if rows:
            self._news.expect_more()
        return tuple(delivery_of(row) for row in rows)


async def _load_claimed(session: Session, claimed: Sequence[asyncpg.Record]) -> tuple[ClaimedRun, ...]:
    columns = [[row[name] for row in claimed] for name in ("run_id", "gen", "absorbed")]
    births = {row["id"]: row for row in await session.fetch(READ_RUNS, *columns)}
    watchers = await _load_watchers(session, [row["run_id"] for row in claimed if row["watchers"]])
    runs = (_to_claimed_run(row, births[row["run_id"]], watchers.get(row["run_id"], ())) for row in claimed)
    return tuple(run for run in runs if not _was_lost(run))


async def _load_watchers(session: Session, watched: Sequence[RunId]) -> Mapping[RunId, Sequence[EndWatcher]]:
    """Few runs are watched, and the others should not pay for it."""
    watchers: defaultdict[RunId, list[EndWatcher]] = defaultdict(list)
    for row in await session.fetch(WATCHERS, watched) if watched else ():
        watchers[row["run_id"]].append(watcher_of(row))
    return watchers


def _to_claimed_run(row: asyncpg.Record, birth: asyncpg.Record, watchers: Sequence[EndWatcher]) -> ClaimedRun:
    entries = tuple(map(entry_of, birth["history"]))
    return ClaimedRun(
        run_id=row["run_id"],
        workflow=row["workflow"],
        gen=row["gen"],
        epoch=row["epoch"],
        input=birth["input"],
        created_at=birth["created_at"],
        deadline=birth["deadline"],
        absorbed=row["absorbed"],
        attempts=row["attempts"],
        entries=entries,
        mail=tuple(map(delivery_of, birth["inbox"])),
        waits=tuple(zip(birth["waits"], birth["keys"], strict=True)),
        start_seq=row["start_seq"],
        parent=birth["parent"],
        parent_step=birth["parent_step"],
        depth=birth["depth"],
        watchers=tuple(watchers),
        done=tuple(map(done_of, birth["done"])),
        undoing=row["undoing"],
        end_if_parked=row["end_if_parked"],
        crashes=Crashes(row["deaths"], row["deaths_alone"], row["died_seq"]),
    )


def _was_lost(run: ClaimedRun) -> bool:
    """History that absorbed more than the claimed row: somebody took the run over between claim and read."""
    return max((entry.n or 0 for entry in run.entries), default=0) > run.absorbed
