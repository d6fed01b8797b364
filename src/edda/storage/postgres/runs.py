"""Starting, cancelling and looking at runs, without owning them."""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import CancelOutcome, Entry, RunFilter, RunId, RunRecord, Start
from edda.core.states import ENDED, RunStatus

from .clock import timed
from .pool import Pool
from .rows import entry_of, record_of

# The ids come sorted: two processes that start the same ones wait for each other, but never in a circle.
START = timed("""
WITH wanted AS MATERIALIZED (
         SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[], $4::bigint[], $5::bigint[], $6::bigint[])
                    AS w (id, workflow, input, created_at, ready_at, deadline)),
     born AS (
         INSERT INTO edda_run (id, gen, workflow, input, created_at, deadline)
         SELECT id, 0, workflow, input, created_at, deadline FROM wanted
         ON CONFLICT DO NOTHING RETURNING id)
INSERT INTO edda_sched (run_id, workflow, gen, epoch, status, ready_at, start_seq)
SELECT id, workflow, 0, 0, 'running', coalesce(ready_at, {now}), (SELECT last_value FROM edda_event_seq)
  FROM wanted JOIN born USING (id)
RETURNING run_id""")

CANCEL = timed("""
WITH asked AS (
    UPDATE edda_sched
       SET cancelled = true, delivered = delivered + 1,
           ready_at = CASE WHEN owner IS NULL THEN 0 ELSE ready_at END,
           status   = CASE WHEN owner IS NULL THEN 'running' ELSE status END,
           reason   = CASE WHEN owner IS NULL THEN NULL ELSE reason END
     WHERE run_id = $1 AND NOT cancelled RETURNING run_id, delivered)
INSERT INTO edda_delivery (run_id, n, kind, step, at, value)
SELECT run_id, delivered, 'cancel', '', {now}, $2 FROM asked""")
WHY_NOT_CANCELLED = """
SELECT (SELECT cancelled FROM edda_sched WHERE run_id = $1), EXISTS (SELECT FROM edda_run WHERE id = $1)"""

HISTORY = """
SELECT seq, kind, step, name, ok, at, input, value, attempt, n, event FROM edda_hist
 WHERE run_id = $1 AND gen = coalesce($2::int, (SELECT max(gen) FROM edda_run WHERE id = $1)) ORDER BY seq"""

# What waits, but is due and nobody's, runs as soon as somebody takes it: people should not read "waiting".
_VIEW = timed("""
SELECT r.id, r.workflow, r.gen, r.input, r.created_at, r.deadline, s.owner, s.ready_at, s.reason,
       e.ended_at, e.value, state.status
  FROM edda_run r
  {open} JOIN edda_sched s ON s.run_id = r.id AND s.gen = r.gen
  {ended} JOIN edda_result e ON e.run_id = r.id AND e.gen = r.gen
 CROSS JOIN LATERAL (
       SELECT CASE WHEN e.status IS NOT NULL THEN e.status
                   WHEN s.owner IS NULL AND s.ready_at <= {now} AND s.status <> 'compensating' THEN 'running'
                   ELSE s.status END AS status) state
 WHERE NOT EXISTS (SELECT FROM edda_run later WHERE later.id = r.id AND later.gen > r.gen)""")
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
        rows = [
            (s.run_id, s.workflow, s.input, s.created_at, s.ready_at, s.deadline) for _, s in sorted(wanted.items())
        ]
        if not rows:
            return frozenset()
        async with self._pool.session() as session:
            born = await session.fetch(START, *zip(*rows, strict=True))
        return frozenset(row[0] for row in born)

    async def cancel(self, run_id: RunId, value: bytes) -> CancelOutcome:
        async with self._pool.session() as session:
            if await session.execute(CANCEL, run_id, value):
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

    async def history(self, run_id: RunId, gen: int | None = None) -> tuple[Entry, ...]:
        async with self._pool.session() as session:
            rows = await session.fetch(HISTORY, run_id, gen)
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
