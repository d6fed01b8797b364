"""Reading runs, their history and their values."""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import CancelOutcome, EndWatcher, Entry, RunFilter, RunId, RunRecord, RunValue, Start
from edda.core.states import ENDED, RunStatus

from .batch_sql import IS_PARKED, create_runs_sql, start_row, wake
from .clock import with_now
from .pool import Pool
from .rows import entry_of, record_of, watcher_of

FACTS = "SELECT name, value FROM edda_fact WHERE run_id = $1 ORDER BY name"
FACT = "SELECT name, value FROM edda_fact WHERE run_id = $1 AND name = $2"


class PostgresFacts:
    _pool: Pool

    async def run_values(self, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        async with self._pool.session() as session:
            if name is None:
                rows = await session.fetch(FACTS, run_id)
            else:
                rows = await session.fetch(FACT, run_id, name)
        return tuple(RunValue(row["name"], row["value"]) for row in rows)


START = """
WITH {births} SELECT run_id FROM started""".replace(
    "{births}", create_runs_sql("SELECT * FROM unnest($1::edda_start_row[])")
)

CANCEL = with_now("""
WITH asked AS (
    UPDATE edda_sched s
       SET cancelled = true, delivered = delivered + 1,
           {wake}
     WHERE run_id = $1 AND NOT cancelled RETURNING run_id, delivered)
INSERT INTO edda_delivery (run_id, n, kind, step, at, value)
SELECT run_id, delivered, 'cancel', '', {now}, $2 FROM asked""").replace("{wake}", wake())
CANCEL_PARKED = (
    """
UPDATE edda_sched s SET ready_at = 0, end_if_parked = true WHERE s.run_id = $1 AND """
    + IS_PARKED
)
WHY_NOT_CANCELLED = """
SELECT (SELECT cancelled FROM edda_sched WHERE run_id = $1), EXISTS (SELECT FROM edda_run WHERE id = $1)"""

# Nobody can end the run between the lock and the commit.
WATCH = """
WITH locked AS MATERIALIZED (SELECT run_id FROM edda_sched WHERE run_id = $1 FOR UPDATE),
     added AS (
         INSERT INTO edda_watcher (run_id, watcher, step) SELECT run_id, $2, $3 FROM locked
         ON CONFLICT DO NOTHING RETURNING run_id),
     counted AS (UPDATE edda_sched s SET watchers = s.watchers + 1 FROM added WHERE s.run_id = added.run_id)
SELECT run_id FROM locked"""
WATCHERS = """
SELECT run_id, watcher, step FROM edda_watcher WHERE run_id = ANY ($1::text[]) ORDER BY run_id, watcher, step"""

HISTORY = """
SELECT seq, kind, step, name, ok, at, input, value, attempt, n, event FROM edda_hist
 WHERE run_id = $1 AND gen = coalesce($2::int, (SELECT max(gen) FROM edda_run WHERE id = $1))
   AND seq > $3::bigint AND ($4::text IS NULL OR step = $4) ORDER BY seq LIMIT $5"""

# What waits, but is due and nobody's, runs as soon as somebody takes it: people should not read "waiting".
OPEN_STATUS = with_now("""
              CASE WHEN s.undoing AND (s.status <> 'parked' OR s.ready_at <= (SELECT {now})) THEN 'compensating'
                   WHEN s.owner IS NULL AND s.ready_at <= (SELECT {now}) AND s.status <> 'compensating' THEN 'running'
                   ELSE s.status END""")
VIEW_COLUMNS = """r.id, r.workflow, r.gen, r.input, r.created_at, r.deadline, r.parent, s.owner, s.ready_at, s.reason,
       coalesce(s.deaths, 0) AS deaths, e.ended_at, e.value, state.status,
       coalesce(s.cancelled AND NOT s.undoing AND NOT s.end_if_parked, false) AS has_cancel"""
VIEW_STATES = """
  {open} JOIN edda_sched s ON s.run_id = r.id AND s.gen = r.gen
  {ended} JOIN edda_result e ON e.run_id = r.id AND e.gen = r.gen
 CROSS JOIN LATERAL (
       SELECT coalesce(e.status, {status}) AS status) state""".replace("{status}", OPEN_STATUS)
_VIEW = """
SELECT {columns}
  FROM edda_run r {states}
 WHERE NOT EXISTS (SELECT FROM edda_run later WHERE later.id = r.id AND later.gen > r.gen)""".replace(
    "{columns}", VIEW_COLUMNS
).replace("{states}", VIEW_STATES)
# The keyset has values that let everything through instead of conditions that ask for NULL, which no index can serve.
_PAGE = """
   AND r.created_at >= $1 AND r.created_at < $2 AND (r.created_at, r.id) < ($3, $4)
   AND ($5::text IS NULL OR r.workflow = $5) AND ($6::text IS NULL OR state.status = $6)
 ORDER BY r.created_at DESC, r.id DESC LIMIT $7"""

GET = _VIEW.replace("{open}", "LEFT").replace("{ended}", "LEFT") + " AND r.id = $1"
FIND_ANY = _VIEW.replace("{open}", "LEFT").replace("{ended}", "LEFT") + _PAGE
# With the status known, the smaller table may lead.
FIND_OPEN = _VIEW.replace("{open}", "").replace("{ended}", "LEFT") + _PAGE
FIND_ENDED = _VIEW.replace("{open}", "LEFT").replace("{ended}", "") + _PAGE

_EVER = 2**63 - 1


class PostgresRuns:
    _pool: Pool

    async def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        wanted = {start.run_id: start for start in reversed(starts)}  # of two with one id the first counts
        if not wanted:
            return frozenset()
        async with self._pool.session() as session:
            born = await session.fetch(START, [start_row(start) for _, start in sorted(wanted.items())])
        return frozenset(row[0] for row in born)

    async def cancel(self, run_id: RunId, value: bytes) -> CancelOutcome:
        async with self._pool.session() as session:
            if await session.execute(CANCEL, run_id, value) or await session.execute(CANCEL_PARKED, run_id):
                return CancelOutcome.REQUESTED
            cancelled, known = (await session.fetch(WHY_NOT_CANCELLED, run_id))[0]
        if cancelled:
            return CancelOutcome.ALREADY
        # Open and not cancelled: it was started after we asked, and was not there when we did.
        return CancelOutcome.ENDED if known and cancelled is None else CancelOutcome.MISSING

    async def get(self, run_id: RunId) -> RunRecord | None:
        async with self._pool.session() as session:
            rows = await session.fetch(GET, run_id)
        return record_of(rows[0]) if rows else None

    async def add_watcher(self, run_id: RunId, watcher: EndWatcher) -> RunRecord | None:
        async with self._pool.session() as session, session.transaction():
            is_open = await session.fetch(WATCH, run_id, watcher.run_id, watcher.step)
            rows = await session.fetch(GET, run_id)
        record = record_of(rows[0]) if rows else None
        # Open and not locked: it was started after we asked, and was not there when we did.
        return record if is_open or (record and record.status in ENDED) else None

    async def watchers(self, run_id: RunId) -> tuple[EndWatcher, ...]:
        async with self._pool.session() as session:
            rows = await session.fetch(WATCHERS, [run_id])
        return tuple(watcher_of(row) for row in rows)

    async def history(
        self,
        run_id: RunId,
        gen: int | None = None,
        *,
        step: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> tuple[Entry, ...]:
        async with self._pool.session() as session:
            rows = await session.fetch(HISTORY, run_id, gen, after, step, limit)
        return tuple(entry_of(row) for row in rows)

    async def find(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        since = 0 if filter.created_from is None else filter.created_from
        until = _EVER if filter.created_to is None else filter.created_to
        before = filter.before or (_EVER, "")
        values = (since, until, *before, filter.workflow, filter.status, filter.limit)
        async with self._pool.session() as session:
            rows = await session.fetch(_find(filter.status), *values)
        return tuple(record_of(row) for row in rows)


def _find(status: RunStatus | None) -> str:
    if status is None:
        return FIND_ANY
    return FIND_ENDED if status in ENDED else FIND_OPEN
