"""Claiming runs that are due, and reading the inboxes of runs in memory."""

from __future__ import annotations

from collections.abc import Sequence

import asyncpg

from edda.core.model import Claim, ClaimedRun, InboxItem, WorkerId
from edda.storage.shared.rows import rows_by_run, to_claimed_run, to_entry, to_inbox_item, to_step_commit, to_watcher

from .connection import PostgresSession, with_now
from .pool import PostgresNotifications, PostgresPool
from .runs import WATCHERS

_OPEN_RUN = (
    "s.run_id, s.workflow, s.generation, s.inbox_read, s.attempts, s.event_cursor, s.compensating, s.end_if_parked,"
    " s.deaths, s.deaths_alone, s.died_seq"
)

# `fence` comes first: a worker that was taken over has no fence row and claims nothing, and a take-over waits for this
# claim. `counted` counts the claim in a row of its own: in the fence row it would wait for the batch in flight and
# delay the next one. Both are conditions inside the scan, because with a join the planner may lock runs before them.
# The workflow names whose oldest run waits longest come first, and rows are locked one by one until there are enough.
# The inner limit is a number and not a parameter: with an unknown limit the planner prefers to sort all due runs.
_CLAIM = with_now("""
WITH fence AS MATERIALIZED (SELECT FROM edda_fence WHERE worker = $1 FOR KEY SHARE),
     counted AS (UPDATE edda_claim SET claims = claims + 1
                  WHERE worker = $1 AND claims >= $4 AND EXISTS (SELECT FROM fence) RETURNING claims),
     due AS MATERIALIZED (
         SELECT run.run_id, run.ready_at
           FROM (SELECT name FROM unnest($2::text[]) name CROSS JOIN LATERAL (
                     SELECT ready_at FROM edda_open_run
                      WHERE workflow = name AND owner IS NULL AND ready_at <= (SELECT {now})
                      ORDER BY ready_at LIMIT 1) oldest
                  ORDER BY oldest.ready_at) names
          CROSS JOIN LATERAL (
                SELECT run_id, ready_at FROM edda_open_run
                 WHERE EXISTS (SELECT FROM counted)
                   AND workflow = name AND owner IS NULL AND ready_at <= (SELECT {now})
                 ORDER BY ready_at LIMIT {limit} FOR UPDATE SKIP LOCKED) run
          LIMIT $3),
     claimed AS (
         UPDATE edda_open_run s
            SET owner = $1, epoch = s.epoch + 1, ready_at = NULL, status = 'running', reason = NULL
           FROM due WHERE s.run_id = due.run_id
         RETURNING {open_run}, s.epoch, s.watchers, due.ready_at)
SELECT {now} AS now, (SELECT claims FROM counted) AS number, claimed.*
  FROM (VALUES (1)) one LEFT JOIN claimed ON true ORDER BY claimed.ready_at""").replace("{open_run}", _OPEN_RUN)
CLAIM_FEW = _CLAIM.replace("{limit}", "100")
CLAIM_MANY = _CLAIM.replace("{limit}", "1000")

# The first group of the runs that died last. A locked row is being claimed or gets an inbox item.
CLAIM_SUSPECTS = with_now("""
WITH fence AS MATERIALIZED (SELECT FROM edda_fence WHERE worker = $1 FOR KEY SHARE),
     counted AS (UPDATE edda_claim SET claims = claims + 1
                  WHERE worker = $1 AND claims >= $5 AND EXISTS (SELECT FROM fence) RETURNING claims),
     candidate AS MATERIALIZED (
         SELECT run_id, suspect_at FROM edda_open_run
          WHERE EXISTS (SELECT FROM counted) AND suspect_at IS NOT NULL AND workflow = ANY ($2::text[])
          ORDER BY suspect_at DESC, run_id LIMIT $3 FOR UPDATE SKIP LOCKED),
     chosen AS MATERIALIZED (
         SELECT run_id, $4 AND count(*) OVER () = 1 AS alone, suspect_at FROM candidate
          WHERE suspect_at = (SELECT max(suspect_at) FROM candidate)),
     claimed AS (
         UPDATE edda_open_run s
            SET owner = $1, epoch = s.epoch + 1, ready_at = NULL, suspect_at = NULL, status = 'running',
                reason = NULL, alone = chosen.alone
           FROM chosen WHERE s.run_id = chosen.run_id
         RETURNING {open_run}, s.epoch, s.watchers, chosen.suspect_at)
SELECT {now} AS now, (SELECT claims FROM counted) AS number, claimed.*
  FROM (VALUES (1)) one LEFT JOIN claimed ON true ORDER BY claimed.run_id""").replace("{open_run}", _OPEN_RUN)
HAS_SUSPECTS = """
SELECT EXISTS (SELECT FROM edda_open_run WHERE suspect_at IS NOT NULL AND workflow = ANY ($1::text[]))"""

# A statement of its own after the claim: the claim's statement locks the newest version of a run's row, but its
# snapshot may hold an older history. One statement for all tables, so that an event that is being delivered is seen
# either as a wait or as an inbox item.
READ_RUNS = """
SELECT r.id, r.input, r.created_at, r.deadline, r.parent, r.parent_step, r.depth,
       ARRAY(SELECT w.step FROM edda_wait w WHERE w.run_id = r.id ORDER BY w.step) AS waits,
       ARRAY(SELECT w.key FROM edda_wait w WHERE w.run_id = r.id ORDER BY w.step) AS keys,
       ARRAY(SELECT (h.seq, h.kind, h.step, h.name, h.ok, h.at, h.input, h.value, h.attempt, h.inbox_no,
                     h.event)::edda_entry_row
               FROM edda_history h WHERE h.run_id = r.id AND h.generation = r.generation ORDER BY h.seq) AS history,
       ARRAY(SELECT (d.run_id, d.inbox_no, d.kind, d.at, d.step, coalesce(e.body, d.value), d.event)::edda_inbox_row
               FROM edda_inbox d LEFT JOIN edda_event e ON e.seq = d.event
              WHERE d.run_id = r.id AND d.inbox_no > c.inbox_read ORDER BY d.inbox_no) AS inbox,
       ARRAY(SELECT (d.step, d.attempt, d.value, d.at)::edda_step_commit_row
               FROM edda_step_commit d
              WHERE d.run_id = r.id AND d.generation = r.generation ORDER BY d.step) AS step_commits
  FROM unnest($1::text[], $2::int[], $3::int[]) c (id, generation, inbox_read) JOIN edda_run r USING (id, generation)"""

NEXT_DUE = with_now("""
SELECT min(first.ready_at), {now}
  FROM unnest($1::text[]) name CROSS JOIN LATERAL (
       SELECT ready_at FROM edda_open_run
        WHERE workflow = name AND owner IS NULL AND ready_at IS NOT NULL ORDER BY ready_at LIMIT 1) first""")

# A locked row is being claimed or cancelled, so its run is ready anyway. The pause is that of `unpark_pause`.
WAKE_PARKED = with_now("""
WITH parked AS MATERIALIZED (
    SELECT run_id, greatest({now}, CASE WHEN attempts < 3 THEN 0
                                   ELSE coalesce(parked_at, 0) + (100000 << least(attempts, 8)) END) AS due
      FROM edda_open_run
     WHERE status = 'parked' AND owner IS NULL AND ready_at IS NOT NULL AND workflow = ANY ($1::text[])
    FOR UPDATE SKIP LOCKED)
UPDATE edda_open_run s SET ready_at = parked.due FROM parked WHERE s.run_id = parked.run_id
    AND parked.due < s.ready_at""")

READ_INBOXES = """
SELECT d.run_id, d.inbox_no, d.kind, d.at, d.step, coalesce(e.body, d.value) AS value, d.event
  FROM edda_open_run s
  JOIN edda_inbox d ON d.run_id = s.run_id AND d.inbox_no > s.inbox_read
  LEFT JOIN edda_event e ON e.seq = d.event
 WHERE s.owner = $1 AND s.owner IS NOT NULL AND s.inbox_count > s.inbox_read ORDER BY d.run_id, d.inbox_no"""


class PostgresClaims:
    _pool: PostgresPool
    _notifications: PostgresNotifications

    async def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int, known_claims: int = 0) -> Claim:
        statement = CLAIM_FEW if limit <= 100 else CLAIM_MANY
        return await self._claim(statement, worker, workflows, limit, known_claims)

    async def claim_suspects(
        self, worker: WorkerId, workflows: Sequence[str], limit: int, alone: bool, known_claims: int = 0
    ) -> Claim:
        return await self._claim(CLAIM_SUSPECTS, worker, workflows, limit, alone, known_claims)

    async def _claim(self, statement: str, *values: object) -> Claim:
        async with self._pool.session() as session:
            rows = await session.fetch(statement, *values)
            claimed = [row for row in rows if row["run_id"] is not None]
            runs = await _load_claimed(session, claimed) if claimed else ()
        if claimed:
            self._notifications.expect_more()
        return Claim(rows[0]["now"], runs, rows[0]["number"])

    async def has_suspects(self, workflows: Sequence[str]) -> bool:
        return bool((await self._pool.fetch(HAS_SUSPECTS, workflows))[0][0])

    async def next_due(self, workflows: Sequence[str]) -> int | None:
        ready_at, now = (await self._pool.fetch(NEXT_DUE, workflows))[0]
        return None if ready_at is None else max(0, ready_at - now)

    async def wake_parked(self, workflows: Sequence[str]) -> int:
        return await self._pool.execute(WAKE_PARKED, workflows)

    async def read_inboxes(self, worker: WorkerId) -> tuple[InboxItem, ...]:
        rows = await self._pool.fetch(READ_INBOXES, worker)
        if rows:
            self._notifications.expect_more()
        return tuple(to_inbox_item(row) for row in rows)


async def _load_claimed(session: PostgresSession, claimed: Sequence[asyncpg.Record]) -> tuple[ClaimedRun, ...]:
    """Without the runs that another worker took over between the claim and the read: it has recorded items that the
    claimed row did not count as read."""
    columns = [[row[name] for row in claimed] for name in ("run_id", "generation", "inbox_read")]
    stored = {row["id"]: row for row in await session.fetch(READ_RUNS, *columns)}
    watched = [row["run_id"] for row in claimed if row["watchers"]]
    # A statement of its own, because few runs are watched.
    watchers = rows_by_run(await session.fetch(WATCHERS, watched) if watched else ())
    runs = (
        to_claimed_run(
            row[2:13],  # behind `now` and `number`
            found[1:7],
            epoch=row["epoch"],
            entries=map(to_entry, found["history"]),
            inbox=map(to_inbox_item, found["inbox"]),
            waits=zip(found["waits"], found["keys"], strict=True),
            watchers=(to_watcher(watcher[1:]) for watcher in watchers[row["run_id"]]),
            step_commits=map(to_step_commit, found["step_commits"]),
        )
        for row, found in ((row, stored[row["run_id"]]) for row in claimed)
    )
    return tuple(run for run in runs if all((entry.inbox_no or 0) <= run.inbox_read for entry in run.entries))
