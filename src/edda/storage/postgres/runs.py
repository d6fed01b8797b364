"""Starting, cancelling and reading runs, their history, watchers and values."""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import CancelOutcome, EndWatcher, Entry, RunFilter, RunId, RunRecord, RunValue, Start
from edda.core.states import ENDED, RunStatus
from edda.storage.shared.rows import to_entry, to_run_record, to_run_value, to_watcher

from .batch_sql import IS_PARKED, create_runs_sql, start_row, wake
from .connection import with_now
from .pool import PostgresPool

RUN_VALUES = "SELECT name, value FROM edda_run_value WHERE run_id = $1 ORDER BY name"
RUN_VALUE = "SELECT name, value FROM edda_run_value WHERE run_id = $1 AND name = $2"


START = """
WITH {create_runs} SELECT run_id FROM inserted_open_run""".replace(
    "{create_runs}", create_runs_sql("SELECT * FROM unnest($1::edda_start_row[])")
)

CANCEL = with_now("""
WITH cancelled AS (
    UPDATE edda_open_run s
       SET cancelled = true, inbox_count = inbox_count + 1,
           {wake}
     WHERE run_id = $1 AND NOT cancelled RETURNING run_id, inbox_count)
INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value)
SELECT run_id, inbox_count, 'cancel', '', {now}, $2 FROM cancelled""").replace("{wake}", wake())
CANCEL_PARKED = (
    """
UPDATE edda_open_run s SET ready_at = 0, end_if_parked = true WHERE s.run_id = $1 AND """
    + IS_PARKED
)
WHY_NOT_CANCELLED = """
SELECT (SELECT cancelled FROM edda_open_run WHERE run_id = $1), EXISTS (SELECT FROM edda_run WHERE id = $1)"""

# The lock keeps the run from ending before this transaction commits.
WATCH = """
WITH locked AS MATERIALIZED (SELECT run_id FROM edda_open_run WHERE run_id = $1 FOR UPDATE),
     added AS (
         INSERT INTO edda_watcher (run_id, watcher, step) SELECT run_id, $2, $3 FROM locked
         ON CONFLICT DO NOTHING RETURNING run_id),
     counted AS (UPDATE edda_open_run s SET watchers = s.watchers + 1 FROM added WHERE s.run_id = added.run_id)
SELECT run_id FROM locked"""
WATCHERS = """
SELECT run_id, watcher, step FROM edda_watcher WHERE run_id = ANY ($1::text[]) ORDER BY run_id, watcher, step"""

HISTORY = """
SELECT seq, kind, step, name, ok, at, input, value, attempt, inbox_no, event FROM edda_history
 WHERE run_id = $1 AND generation = coalesce($2::int, (SELECT max(generation) FROM edda_run WHERE id = $1))
   AND seq > $3::bigint AND ($4::text IS NULL OR step = $4) ORDER BY seq LIMIT $5"""

# A waiting run that is due and has no owner is shown as running: the next claim takes it.
OPEN_STATUS = with_now("""
              CASE WHEN s.compensating AND (s.status <> 'parked' OR s.ready_at <= (SELECT {now})) THEN 'compensating'
                   WHEN s.owner IS NULL AND s.ready_at <= (SELECT {now}) AND s.status <> 'compensating' THEN 'running'
                   ELSE s.status END""")
VIEW_COLUMNS = """r.id, r.workflow, r.generation, state.status, r.input, r.created_at, r.deadline, s.owner,
       s.ready_at, s.reason, e.ended_at, e.value, r.parent, coalesce(s.deaths, 0) AS deaths,
       coalesce(s.cancelled AND NOT s.compensating AND NOT s.end_if_parked, false) AS has_cancel"""
VIEW_STATES = """
  {open} JOIN edda_open_run s ON s.run_id = r.id AND s.generation = r.generation
  {ended} JOIN edda_result e ON e.run_id = r.id AND e.generation = r.generation
 CROSS JOIN LATERAL (
       SELECT coalesce(e.status, {status}) AS status) state""".replace("{status}", OPEN_STATUS)
_VIEW = """
SELECT {columns}
  FROM edda_run r {states}
 WHERE NOT EXISTS (SELECT FROM edda_run later WHERE later.id = r.id AND later.generation > r.generation)""".replace(
    "{columns}", VIEW_COLUMNS
).replace("{states}", VIEW_STATES)
# A bound that the caller does not give gets a value that every row passes. `$1 IS NULL OR ...` could not use the index.
_PAGE = """
   AND r.created_at >= $1 AND r.created_at < $2 AND (r.created_at, r.id) < ($3, $4)
   AND ($5::text IS NULL OR r.workflow = $5) AND ($6::text IS NULL OR state.status = $6)
 ORDER BY r.created_at DESC, r.id DESC LIMIT $7"""

GET = _VIEW.replace("{open}", "LEFT").replace("{ended}", "LEFT") + " AND r.id = $1"
FIND_ANY = _VIEW.replace("{open}", "LEFT").replace("{ended}", "LEFT") + _PAGE
# With the status known, an inner join lets the planner begin with the smaller table.
FIND_OPEN = _VIEW.replace("{open}", "").replace("{ended}", "LEFT") + _PAGE
FIND_ENDED = _VIEW.replace("{open}", "LEFT").replace("{ended}", "") + _PAGE

_EVER = 2**63 - 1


class PostgresRuns:
    _pool: PostgresPool

    async def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        new = {start.run_id: start for start in reversed(starts)}  # of two with one id the first counts
        if not new:
            return frozenset()
        started = await self._pool.fetch(START, [start_row(start) for _, start in sorted(new.items())])
        return frozenset(row[0] for row in started)

    async def cancel(self, run_id: RunId, value: bytes) -> CancelOutcome:
        async with self._pool.session() as session:
            if await session.execute(CANCEL, run_id, value) or await session.execute(CANCEL_PARKED, run_id):
                return CancelOutcome.REQUESTED
            cancelled, known = (await session.fetch(WHY_NOT_CANCELLED, run_id))[0]
        if cancelled:
            return CancelOutcome.ALREADY
        # Open and not cancelled: it was started after CANCEL, which did not find it.
        return CancelOutcome.ENDED if known and cancelled is None else CancelOutcome.MISSING

    async def get(self, run_id: RunId) -> RunRecord | None:
        rows = await self._pool.fetch(GET, run_id)
        return to_run_record(rows[0]) if rows else None

    async def add_watcher(self, run_id: RunId, watcher: EndWatcher) -> RunRecord | None:
        async with self._pool.session() as session, session.transaction():
            is_open = await session.fetch(WATCH, run_id, watcher.run_id, watcher.step)
            rows = await session.fetch(GET, run_id)
        record = to_run_record(rows[0]) if rows else None
        # Open and not locked: it was started after WATCH, which did not find it.
        return record if is_open or (record and record.status in ENDED) else None

    async def watchers(self, run_id: RunId) -> tuple[EndWatcher, ...]:
        rows = await self._pool.fetch(WATCHERS, [run_id])
        return tuple(to_watcher(row[1:]) for row in rows)

    async def history(
        self,
        run_id: RunId,
        generation: int | None = None,
        *,
        step: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> tuple[Entry, ...]:
        rows = await self._pool.fetch(HISTORY, run_id, generation, after, step, limit)
        return tuple(to_entry(row) for row in rows)

    async def find(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        since = 0 if filter.created_from is None else filter.created_from
        until = _EVER if filter.created_to is None else filter.created_to
        before = filter.before or (_EVER, "")
        values = (since, until, *before, filter.workflow, filter.status, filter.limit)
        rows = await self._pool.fetch(_find(filter.status), *values)
        return tuple(to_run_record(row) for row in rows)

    async def run_values(self, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        if name is None:
            rows = await self._pool.fetch(RUN_VALUES, run_id)
        else:
            rows = await self._pool.fetch(RUN_VALUE, run_id, name)
        return tuple(to_run_value(row) for row in rows)


def _find(status: RunStatus | None) -> str:
    if status is None:
        return FIND_ANY
    return FIND_ENDED if status in ENDED else FIND_OPEN
