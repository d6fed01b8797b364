"""What people do to runs and to what is sent, and the record of it."""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import RunId
from edda.core.queries import Audit, Definition, EventSchema, ReopenOutcome

from .clock import with_now
from .locks import HOLD_OUTBOX
from .pool import Pool
from .pruning import DELETE_RUNS
from .session import Session

# The row that says how a run ended is what everybody locks who wants it open or gone. Whoever waited for it sees what
# became of it in a statement of its own.
LOCK_ENDED = "SELECT gen FROM edda_result WHERE run_id = $1 FOR UPDATE"
IS_OPEN = "SELECT FROM edda_sched WHERE run_id = $1"
EXISTS = "SELECT FROM edda_run WHERE id = $1 LIMIT 1"

# Letters may be pruned and entries not kept, so both are asked for how far the inbox was read. Parts of one statement
# do not see each other's rows: what is copied and counted here is the old generation. An event that the new one does
# not remember may be given to it again.
REOPEN = with_now("""
WITH born AS (
    INSERT INTO edda_run (id, gen, workflow, input, created_at, parent, parent_step, depth)
    SELECT id, gen + 1, workflow, input, {now}, parent, parent_step, depth FROM edda_run WHERE id = $1 AND gen = $2
    RETURNING id, workflow, gen),
kept AS (
    INSERT INTO edda_hist (run_id, gen, seq, epoch, kind, step, name, ok, at, attempt, n, event, input, value)
    SELECT run_id, gen + 1, seq, epoch, kind, step, name, ok, at, attempt, n, event, input, value
      FROM edda_hist WHERE run_id = $1 AND gen = $2 ORDER BY seq LIMIT $3),
remembered AS MATERIALIZED (
    SELECT event FROM (SELECT event FROM edda_hist WHERE run_id = $1 AND gen = $2 ORDER BY seq LIMIT $3) first
     WHERE event IS NOT NULL),
let_go AS (
    UPDATE edda_delivery SET event = NULL, kind = 'stray'
     WHERE run_id = $1 AND event IS NOT NULL AND event NOT IN (SELECT event FROM remembered)),
past AS (SELECT max(epoch) AS epoch, max(n) AS n FROM edda_hist WHERE run_id = $1),
inbox AS (SELECT max(n) AS n FROM edda_delivery WHERE run_id = $1),
birth AS (SELECT created_at FROM edda_run WHERE id = $1 ORDER BY gen LIMIT 1),
undone AS (DELETE FROM edda_done WHERE run_id = $1 AND gen = $2),
unended AS (DELETE FROM edda_result WHERE run_id = $1)
INSERT INTO edda_sched (run_id, workflow, status, epoch, gen, start_seq, ready_at, delivered, absorbed)
SELECT born.id, born.workflow, 'running', coalesce(past.epoch, 0) + 1, born.gen,
       coalesce((SELECT seq FROM edda_event WHERE received_at < (SELECT created_at FROM birth)
                  ORDER BY received_at DESC, seq DESC LIMIT 1), 0),
       0, greatest(past.n, inbox.n, 0), greatest(past.n, inbox.n, 0)
  FROM born, past, inbox""")

RESUME = """
UPDATE edda_sched
   SET ready_at = 0, status = 'running', reason = NULL, deaths = 0, deaths_alone = 0, died_seq = NULL
 WHERE run_id = $1 AND status <> 'running' AND owner IS NULL"""

DROP_OUTGOING = "DELETE FROM edda_outbox WHERE state = 'dead' AND id = ANY ($1::text[])"

NOTE = "INSERT INTO edda_audit (at, who, action, subject, origin, details) VALUES ($1, $2, $3, $4, $5, $6)"
AUDITS = """
SELECT at, who, action, subject, origin, details, seq FROM edda_audit WHERE seq < $1 ORDER BY seq DESC LIMIT $2"""

# Sorted, so that two processes that tell the same at once wait for each other but never in a circle.
DEFINE = """
INSERT INTO edda_definition (workflow, service, details, seen_at)
SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[], $4::bigint[]) u (workflow, service, details, seen_at)
 ORDER BY workflow COLLATE "C"
ON CONFLICT (workflow) DO UPDATE
   SET service = excluded.service, details = excluded.details, seen_at = excluded.seen_at"""
KEEP_FORMS = """
INSERT INTO edda_form (workflow, type, schema)
SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[]) u (workflow, type, schema)
 ORDER BY workflow COLLATE "C", type COLLATE "C"
ON CONFLICT (workflow, type) DO UPDATE SET schema = excluded.schema"""

_EVER = 2**63 - 1


class PostgresSteering:
    _pool: Pool

    async def reopen(self, run_id: RunId, gen: int, keep: int) -> ReopenOutcome:
        async with self._pool.session() as session, session.transaction():
            ended = await session.fetch(LOCK_ENDED, run_id)
            if not ended:
                return ReopenOutcome.OPEN if await session.fetch(EXISTS, run_id) else ReopenOutcome.MISSING
            if ended[0][0] != gen:
                return ReopenOutcome.OPEN
            await session.execute(REOPEN, run_id, gen, keep)
        return ReopenOutcome.DONE

    async def resume(self, run_id: RunId) -> bool:
        async with self._pool.session() as session:
            return await session.execute(RESUME, run_id) == 1

    async def delete(self, run_id: RunId) -> bool:
        async with self._pool.session() as session, session.transaction():
            if not await session.fetch(LOCK_ENDED, run_id) or await session.fetch(IS_OPEN, run_id):
                return False
            await session.execute(DELETE_RUNS, [run_id])
        return True

    async def delete_outbox(self, ids: Sequence[str]) -> int:
        async with self._pool.session() as session, session.transaction(HOLD_OUTBOX):
            return await session.execute(DROP_OUTGOING, ids)

    async def add_audit(self, audit: Audit) -> None:
        words = (audit.who, audit.action, audit.subject, audit.origin, audit.details)
        async with self._pool.session() as session:
            await session.execute(NOTE, audit.at, *words)

    async def audits(self, before: int | None, limit: int) -> tuple[Audit, ...]:
        async with self._pool.session() as session:
            rows = await session.fetch(AUDITS, _EVER if before is None else before, limit)
        return tuple(Audit(*row) for row in rows)

    async def save_definitions(self, definitions: Sequence[Definition], forms: Sequence[EventSchema]) -> None:
        async with self._pool.session() as session, session.transaction():
            await _define(session, definitions)
            await _keep_forms(session, forms)


async def _define(session: Session, definitions: Sequence[Definition]) -> None:
    told = {one.workflow: one for one in definitions}
    if told:
        rows = [(one.workflow, one.service, one.details, one.seen_at) for one in told.values()]
        await session.execute(DEFINE, *zip(*rows, strict=True))


async def _keep_forms(session: Session, forms: Sequence[EventSchema]) -> None:
    rows = {(form.workflow, form.type): form.schema for form in forms}
    if rows:
        columns = zip(*((*key, schema) for key, schema in rows.items()), strict=True)
        await session.execute(KEEP_FORMS, *columns)
