"""Admin operations: reopen, resume and delete runs, delete dead outbox events, the audit log, definitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edda.core.model import RunId
from edda.core.queries import Audit, Definition, EventSchema, ReopenOutcome

from .batch_sql import RUN_COLUMNS
from .connection import BEGIN, COMMIT, ROLLBACK, MySQLPool
from .locks import OUTBOX, certify, lock_exclusive, repeated
from .outbox import FIND_DEAD
from .pruning import DELETE_OF_RUNS
from .runs import EXISTS
from .statement import NOW, Statement, bind, in_batches, inserts, int_or_null, join_values, quote_bytes, quote_text

# Reopening, deleting and pruning all lock the run's row in edda_result.
LOCK_ENDED = b"SELECT generation FROM edda_result WHERE run_id = %b FOR UPDATE"
IS_OPEN = b"SELECT 1 FROM edda_open_run WHERE run_id = %b"
# Inbox items may be pruned and entries may not be copied, so the highest inbox number is read from both tables. Into
# variables: a subquery in an INSERT locks the rows it reads, and would wait for acceptors of events.
READ_PREVIOUS = b"""SELECT COALESCE(MAX(epoch), 0) + 1, COALESCE(MAX(inbox_no), 0) INTO @edda_epoch, @edda_read
    FROM edda_history WHERE run_id = %b"""
READ_INBOX = (
    b"SELECT GREATEST(COALESCE(MAX(inbox_no), 0), @edda_read) INTO @edda_read FROM edda_inbox WHERE run_id = %b"
)
READ_CREATED_AT = b"SELECT created_at INTO @edda_created_at FROM edda_run WHERE id = %b ORDER BY generation LIMIT 1"
# MAX, because a SELECT INTO without a row leaves the variable as it was.
READ_LAST_SEEN = b"""SELECT COALESCE(MAX(o.seq), 0) INTO @edda_last_seen FROM (
    SELECT seq FROM edda_event FORCE INDEX (edda_event_received)
     WHERE received_at < @edda_created_at ORDER BY received_at DESC, seq DESC LIMIT 1) o"""
INSERT_NEXT_GENERATION = (
    b"INSERT INTO edda_run " + RUN_COLUMNS + b" SELECT id, generation + 1, workflow, input, " + NOW + b", NULL, parent,"
    b" parent_step, depth FROM edda_run WHERE id = %b AND generation = %b"
)
INSERT_ENDED_GENERATION = (
    b"INSERT INTO edda_old_generation (run_id, generation, ended_at) VALUES (%b, %b, " + NOW + b")"
)
KEEP_ENTRIES = b"""INSERT INTO edda_history
    (run_id, generation, seq, epoch, kind, step, name, ok, at, attempt, inbox_no, event, input, value)
    SELECT run_id, generation + 1, seq, epoch, kind, step, name, ok, at, attempt, inbox_no, event, input, value
      FROM edda_history WHERE run_id = %b AND generation = %b ORDER BY seq LIMIT %b"""
# An event that is not in the copied history is released, so that the new generation can receive it again.
RELEASE_EVENTS = b"""UPDATE edda_inbox FORCE INDEX (PRIMARY) SET event = NULL, kind = 'late_event'
    WHERE run_id = %b AND event IS NOT NULL AND event NOT IN (
        SELECT event FROM edda_history WHERE run_id = %b AND generation = %b AND event IS NOT NULL)"""
INSERT_REOPENED = b"""INSERT INTO edda_open_run
    (run_id, workflow, status, epoch, generation, event_cursor, ready_at, inbox_count, inbox_read)
    SELECT id, workflow, 'running', @edda_epoch, generation + 1, @edda_last_seen, 0, @edda_read, @edda_read
      FROM edda_run WHERE id = %b AND generation = %b"""
DELETE_STEP_COMMITS = b"DELETE FROM edda_step_commit WHERE run_id = %b AND generation = %b"
DELETE_RESULT = b"DELETE FROM edda_result WHERE run_id = %b"

RESUME = b"""UPDATE edda_open_run FORCE INDEX (PRIMARY)
    SET ready_at = 0, status = 'running', reason = NULL, deaths = 0, deaths_alone = 0, died_seq = NULL
    WHERE run_id = %b AND status <> 'running' AND owner IS NULL"""

DELETE_DEAD = b"DELETE FROM edda_outbox WHERE seq IN (%b)"

ADD_AUDIT = b"INSERT INTO edda_audit (at, who, action, subject, origin, details) VALUES (%b, %b, %b, %b, %b, %b)"
_AUDITS = b"SELECT at, who, action, subject, origin, details, seq FROM edda_audit"
AUDITS = _AUDITS + b" ORDER BY seq DESC LIMIT %b"
AUDITS_BEFORE = _AUDITS + b" WHERE seq < %b ORDER BY seq DESC LIMIT %b"

INSERT_DEFINITION = b"INSERT INTO edda_definition (workflow, service, details, seen_at) VALUES "
UPDATE_EXISTING = (
    b" ON DUPLICATE KEY UPDATE service = VALUES(service), details = VALUES(details), seen_at = VALUES(seen_at)"
)
INSERT_EVENT_SCHEMA = b"INSERT INTO edda_event_schema (workflow, type, `schema`) VALUES "
REPLACE_EXISTING = b" ON DUPLICATE KEY UPDATE `schema` = VALUES(`schema`)"


class MySQLAdmin:
    _pool: MySQLPool

    @repeated
    async def reopen(self, run: RunId, generation: int, keep: int) -> ReopenOutcome:
        async with self._pool.session() as session:
            _, ended = await session.send(bind(BEGIN), bind(LOCK_ENDED, run))
            if not ended.rows or ended.rows[0][0] != generation:
                known, _ = await session.send(bind(EXISTS, run), bind(ROLLBACK))
                return ReopenOutcome.OPEN if known.rows else ReopenOutcome.MISSING
            await session.send(*reopen_statements(run, generation, keep), bind(COMMIT))
        return ReopenOutcome.DONE

    @repeated
    async def resume(self, run: RunId) -> bool:
        return (await self._pool.run(RESUME, run)).affected == 1

    @repeated
    async def delete(self, run: RunId) -> bool:
        async with self._pool.session() as session:
            _, ended, open = await session.send(bind(BEGIN), bind(LOCK_ENDED, run), bind(IS_OPEN, run))
            if not ended.rows or open.rows:
                await session.run(ROLLBACK)
                return False
            row = [b"SELECT %b AS run_id" % quote_text(run)]
            await session.send(
                *(one for template in DELETE_OF_RUNS for one in join_values(template, row)), bind(COMMIT)
            )
        return True

    @repeated
    async def delete_outbox(self, ids: Sequence[str]) -> int:
        chosen_ids = {id.encode() for id in ids}
        async with self._pool.session() as session:
            *_, dead = await session.send(bind(BEGIN), lock_exclusive([OUTBOX]), bind(FIND_DEAD))
            chosen = [seq for seq, id in dead.rows if id in chosen_ids]
            await session.send(*in_batches(DELETE_DEAD, chosen), *certify(OUTBOX, session.node), bind(COMMIT))
        return len(chosen)

    @repeated
    async def add_audit(self, audit: Audit) -> None:
        fields = (audit.who, audit.action, audit.subject, audit.origin, audit.details)
        await self._pool.run(ADD_AUDIT, audit.at, *fields)

    async def audits(self, before: int | None, limit: int) -> tuple[Audit, ...]:
        statement = bind(AUDITS, limit) if before is None else bind(AUDITS_BEFORE, before, limit)
        (found,) = await self._pool.send(statement)
        return tuple(Audit(*row) for row in found.rows)

    @repeated
    async def save_definitions(self, definitions: Sequence[Definition], schemas: Sequence[EventSchema]) -> None:
        async with self._pool.session() as session:
            statements = _save_statements(definitions, schemas, session.limit)
            await session.send(bind(BEGIN), *statements, bind(COMMIT))


def reopen_statements(run: RunId, generation: int, keep: int) -> Iterator[Statement]:
    """The next generation, while the run's row in edda_result is locked."""
    for template in (READ_PREVIOUS, READ_INBOX, READ_CREATED_AT):
        yield bind(template, run)
    yield bind(READ_LAST_SEEN)
    for template in (INSERT_NEXT_GENERATION, INSERT_ENDED_GENERATION):
        yield bind(template, run, generation)
    yield bind(KEEP_ENTRIES, run, generation, keep)
    yield bind(RELEASE_EVENTS, run, run, generation + 1)
    for template in (INSERT_REOPENED, DELETE_STEP_COMMITS):
        yield bind(template, run, generation)
    yield bind(DELETE_RESULT, run)


def _save_statements(
    definitions: Sequence[Definition], schemas: Sequence[EventSchema], limit: int
) -> Iterator[Statement]:
    """Sorted, so that two processes that save the same definitions wait for each other instead of deadlocking."""
    by_workflow = {each.workflow: each for each in definitions}
    rows = [_definition_row(by_workflow[workflow]) for workflow in sorted(by_workflow)]
    yield from inserts(INSERT_DEFINITION, rows, limit, UPDATE_EXISTING)
    by_type = {(each.workflow, each.type): each.schema for each in schemas}
    rows = [
        b"(%b,%b,%b)" % (quote_text(name), quote_text(type), quote_bytes(by_type[name, type]))
        for name, type in sorted(by_type)
    ]
    yield from inserts(INSERT_EVENT_SCHEMA, rows, limit, REPLACE_EXISTING)


def _definition_row(definition: Definition) -> bytes:
    return b"(%b,%b,%b,%b)" % (
        quote_text(definition.workflow),
        quote_text(definition.service),
        quote_bytes(definition.details),
        int_or_null(definition.seen_at),
    )
