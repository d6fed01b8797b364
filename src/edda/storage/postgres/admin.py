"""Admin operations: reopen, resume and delete runs, delete dead outbox events, the audit log, definitions."""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import RunId
from edda.core.queries import Audit, Definition, EventSchema, ReopenOutcome

from .connection import PostgresSession, with_now
from .locks import LOCK_OUTBOX
from .pool import PostgresPool
from .pruning import DELETE_RUNS

# Reopening, deleting and pruning all lock the run's row in edda_result. After a wait for that lock, the transaction
# reads what the other one did in a statement of its own, with a new snapshot.
LOCK_ENDED = "SELECT generation FROM edda_result WHERE run_id = $1 FOR UPDATE"
IS_OPEN = "SELECT FROM edda_open_run WHERE run_id = $1"
EXISTS = "SELECT FROM edda_run WHERE id = $1 LIMIT 1"

# Inbox items may be pruned and entries may not be copied, so the highest inbox number is read from both tables. The
# parts of one statement do not see each other's rows: everything copied and counted here is the previous generation. An
# event that is not in the copied history is released, so that the new generation can receive it again.
REOPEN = with_now("""
WITH inserted_run AS (
    INSERT INTO edda_run (id, generation, workflow, input, created_at, parent, parent_step, depth)
    SELECT id, generation + 1, workflow, input, {now}, parent, parent_step, depth FROM edda_run WHERE id = $1
        AND generation = $2
    RETURNING id, workflow, generation),
copied AS (
    INSERT INTO edda_history (run_id, generation, seq, epoch, kind, step, name, ok, at, attempt, inbox_no, event,
        input, value)
    SELECT run_id, generation + 1, seq, epoch, kind, step, name, ok, at, attempt, inbox_no, event, input, value
      FROM edda_history WHERE run_id = $1 AND generation = $2 ORDER BY seq LIMIT $3),
remembered AS MATERIALIZED (
    SELECT event FROM (SELECT event FROM edda_history WHERE run_id = $1 AND generation = $2 ORDER BY seq LIMIT $3) first
     WHERE event IS NOT NULL),
released_events AS (
    UPDATE edda_inbox SET event = NULL, kind = 'late_event'
     WHERE run_id = $1 AND event IS NOT NULL AND event NOT IN (SELECT event FROM remembered)),
previous_generation AS (SELECT max(epoch) AS epoch, max(inbox_no) AS inbox_no FROM edda_history WHERE run_id = $1),
inbox AS (SELECT max(inbox_no) AS inbox_no FROM edda_inbox WHERE run_id = $1),
first_generation AS (SELECT created_at FROM edda_run WHERE id = $1 ORDER BY generation LIMIT 1),
deleted_step_commits AS (DELETE FROM edda_step_commit WHERE run_id = $1 AND generation = $2),
deleted_result AS (DELETE FROM edda_result WHERE run_id = $1)
INSERT INTO edda_open_run (run_id, workflow, status, epoch, generation, event_cursor, ready_at, inbox_count, inbox_read)
SELECT r.id, r.workflow, 'running', coalesce(p.epoch, 0) + 1, r.generation,
       coalesce((SELECT seq FROM edda_event WHERE received_at < (SELECT created_at FROM first_generation)
                  ORDER BY received_at DESC, seq DESC LIMIT 1), 0),
       0, greatest(p.inbox_no, inbox.inbox_no, 0), greatest(p.inbox_no, inbox.inbox_no, 0)
  FROM inserted_run r, previous_generation p, inbox""")

RESUME = """
UPDATE edda_open_run
   SET ready_at = 0, status = 'running', reason = NULL, deaths = 0, deaths_alone = 0, died_seq = NULL
 WHERE run_id = $1 AND status <> 'running' AND owner IS NULL"""

DELETE_DEAD = "DELETE FROM edda_outbox WHERE state = 'dead' AND id = ANY ($1::text[])"

ADD_AUDIT = "INSERT INTO edda_audit (at, who, action, subject, origin, details) VALUES ($1, $2, $3, $4, $5, $6)"
AUDITS = """
SELECT at, who, action, subject, origin, details, seq FROM edda_audit WHERE seq < $1 ORDER BY seq DESC LIMIT $2"""

# Sorted, so that two processes that save the same definitions wait for each other instead of deadlocking.
SAVE_DEFINITIONS = """
INSERT INTO edda_definition (workflow, service, details, seen_at)
SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[], $4::bigint[]) u (workflow, service, details, seen_at)
 ORDER BY workflow COLLATE "C"
ON CONFLICT (workflow) DO UPDATE
   SET service = excluded.service, details = excluded.details, seen_at = excluded.seen_at"""
SAVE_EVENT_SCHEMAS = """
INSERT INTO edda_event_schema (workflow, type, schema)
SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[]) u (workflow, type, schema)
 ORDER BY workflow COLLATE "C", type COLLATE "C"
ON CONFLICT (workflow, type) DO UPDATE SET schema = excluded.schema"""

_EVER = 2**63 - 1


class PostgresAdmin:
    _pool: PostgresPool

    async def reopen(self, run_id: RunId, generation: int, keep: int) -> ReopenOutcome:
        async with self._pool.session() as session, session.transaction():
            ended = await session.fetch(LOCK_ENDED, run_id)
            if not ended:
                return ReopenOutcome.OPEN if await session.fetch(EXISTS, run_id) else ReopenOutcome.MISSING
            if ended[0][0] != generation:
                return ReopenOutcome.OPEN
            await session.execute(REOPEN, run_id, generation, keep)
        return ReopenOutcome.DONE

    async def resume(self, run_id: RunId) -> bool:
        return await self._pool.execute(RESUME, run_id) == 1

    async def delete(self, run_id: RunId) -> bool:
        async with self._pool.session() as session, session.transaction():
            if not await session.fetch(LOCK_ENDED, run_id) or await session.fetch(IS_OPEN, run_id):
                return False
            await session.execute(DELETE_RUNS, [run_id])
        return True

    async def delete_outbox(self, ids: Sequence[str]) -> int:
        async with self._pool.session() as session, session.transaction(LOCK_OUTBOX):
            return await session.execute(DELETE_DEAD, ids)

    async def add_audit(self, audit: Audit) -> None:
        fields = (audit.who, audit.action, audit.subject, audit.origin, audit.details)
        await self._pool.execute(ADD_AUDIT, audit.at, *fields)

    async def audits(self, before: int | None, limit: int) -> tuple[Audit, ...]:
        rows = await self._pool.fetch(AUDITS, _EVER if before is None else before, limit)
        return tuple(Audit(*row) for row in rows)

    async def save_definitions(self, definitions: Sequence[Definition], schemas: Sequence[EventSchema]) -> None:
        async with self._pool.session() as session, session.transaction():
            await _save_definitions(session, definitions)
            await _save_event_schemas(session, schemas)


async def _save_definitions(session: PostgresSession, definitions: Sequence[Definition]) -> None:
    by_workflow = {each.workflow: each for each in definitions}
    if by_workflow:
        rows = [(each.workflow, each.service, each.details, each.seen_at) for each in by_workflow.values()]
        await session.execute(SAVE_DEFINITIONS, *zip(*rows, strict=True))


async def _save_event_schemas(session: PostgresSession, schemas: Sequence[EventSchema]) -> None:
    rows = {(each.workflow, each.type): each.schema for each in schemas}
    if rows:
        columns = zip(*((*key, schema) for key, schema in rows.items()), strict=True)
        await session.execute(SAVE_EVENT_SCHEMAS, *columns)
