"""What people do to runs and to what is sent, and the record of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edda.core.model import RunId
from edda.core.queries import Audit, Definition, EventSchema, ReopenOutcome

from .batch_sql import RUN_COLUMNS
from .clock import NOW
from .locks import OUTBOX, certify, lock_exclusive, repeated
from .outbox import FIND_DEAD
from .pool import Pool
from .pruning import DELETE_OF_RUNS
from .runs import EXISTS
from .session import BEGIN, COMMIT, ROLLBACK
from .statement import Statement, bind, in_batches, inserts, int_or_null, join_values, quote_bytes, quote_text

# The row that says how a run ended is what everybody locks who wants it open or gone.
LOCK_ENDED = b"SELECT gen FROM edda_result WHERE run_id = %b FOR UPDATE"
IS_OPEN = b"SELECT 1 FROM edda_sched WHERE run_id = %b"
# Letters may be pruned and entries not kept, so both are asked for how far the inbox was read. Into variables: a
# subquery in an INSERT locks what it reads, and would wait for whoever stores an event.
READ_PAST = b"""SELECT COALESCE(MAX(epoch), 0) + 1, COALESCE(MAX(n), 0) INTO @edda_epoch, @edda_read
    FROM edda_hist WHERE run_id = %b"""
READ_INBOX = b"SELECT GREATEST(COALESCE(MAX(n), 0), @edda_read) INTO @edda_read FROM edda_delivery WHERE run_id = %b"
READ_BIRTH = b"SELECT created_at INTO @edda_birth FROM edda_run WHERE id = %b ORDER BY gen LIMIT 1"
# An aggregate, because of nothing there would come nothing.
READ_SEEN = b"""SELECT COALESCE(MAX(o.seq), 0) INTO @edda_seen FROM (
    SELECT seq FROM edda_event FORCE INDEX (edda_event_received)
     WHERE received_at < @edda_birth ORDER BY received_at DESC, seq DESC LIMIT 1) o"""
FOLLOW = (
    b"INSERT INTO edda_run " + RUN_COLUMNS + b" SELECT id, gen + 1, workflow, input, " + NOW + b", NULL, parent,"
    b" parent_step, depth FROM edda_run WHERE id = %b AND gen = %b"
)
FOLLOWED = b"INSERT INTO edda_past (run_id, gen, ended_at) VALUES (%b, %b, " + NOW + b")"
KEEP_ENTRIES = b"""INSERT INTO edda_hist
    (run_id, gen, seq, epoch, kind, step, name, ok, at, attempt, n, event, input, value)
    SELECT run_id, gen + 1, seq, epoch, kind, step, name, ok, at, attempt, n, event, input, value
      FROM edda_hist WHERE run_id = %b AND gen = %b ORDER BY seq LIMIT %b"""
# An event that the new generation does not remember may be given to it again.
LET_GO = b"""UPDATE edda_delivery FORCE INDEX (PRIMARY) SET event = NULL, kind = 'stray'
    WHERE run_id = %b AND event IS NOT NULL AND event NOT IN (
        SELECT event FROM edda_hist WHERE run_id = %b AND gen = %b AND event IS NOT NULL)"""
SCHEDULE = b"""INSERT INTO edda_sched
    (run_id, workflow, status, epoch, gen, start_seq, ready_at, delivered, absorbed)
    SELECT id, workflow, 'running', @edda_epoch, gen + 1, @edda_seen, 0, @edda_read, @edda_read
      FROM edda_run WHERE id = %b AND gen = %b"""
FORGET_DONE = b"DELETE FROM edda_done WHERE run_id = %b AND gen = %b"
FORGET_END = b"DELETE FROM edda_result WHERE run_id = %b"

RESUME = b"""UPDATE edda_sched FORCE INDEX (PRIMARY)
    SET ready_at = 0, status = 'running', reason = NULL, deaths = 0, deaths_alone = 0, died_seq = NULL
    WHERE run_id = %b AND status <> 'running' AND owner IS NULL"""

DROP_OUTGOING = b"DELETE FROM edda_outbox WHERE seq IN (%b)"

NOTE = b"INSERT INTO edda_audit (at, who, action, subject, origin, details) VALUES (%b, %b, %b, %b, %b, %b)"
_AUDITS = b"SELECT at, who, action, subject, origin, details, seq FROM edda_audit"
AUDITS = _AUDITS + b" ORDER BY seq DESC LIMIT %b"
AUDITS_BEFORE = _AUDITS + b" WHERE seq < %b ORDER BY seq DESC LIMIT %b"

INSERT_DEFINITION = b"INSERT INTO edda_definition (workflow, service, details, seen_at) VALUES "
OR_RENEW = b" ON DUPLICATE KEY UPDATE service = VALUES(service), details = VALUES(details), seen_at = VALUES(seen_at)"
INSERT_FORM = b"INSERT INTO edda_form (workflow, type, `schema`) VALUES "
OR_REPLACE = b" ON DUPLICATE KEY UPDATE `schema` = VALUES(`schema`)"


class MySQLSteering:
    _pool: Pool

    @repeated
    async def reopen(self, run: RunId, gen: int, keep: int) -> ReopenOutcome:
        async with self._pool.session() as session:
            _, ended = await session.send(bind(BEGIN), bind(LOCK_ENDED, run))
            if not ended.rows or ended.rows[0][0] != gen:
                known, _ = await session.send(bind(EXISTS, run), bind(ROLLBACK))
                return ReopenOutcome.OPEN if known.rows else ReopenOutcome.MISSING
            await session.send(*_reopening(run, gen, keep), bind(COMMIT))
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
        wanted = {id.encode() for id in ids}
        async with self._pool.session() as session:
            *_, dead = await session.send(bind(BEGIN), lock_exclusive([OUTBOX]), bind(FIND_DEAD))
            chosen = [seq for seq, id in dead.rows if id in wanted]
            await session.send(*in_batches(DROP_OUTGOING, chosen), *certify(OUTBOX, session.node), bind(COMMIT))
        return len(chosen)

    @repeated
    async def add_audit(self, audit: Audit) -> None:
        words = (audit.who, audit.action, audit.subject, audit.origin, audit.details)
        await self._pool.run(NOTE, audit.at, *words)

    async def audits(self, before: int | None, limit: int) -> tuple[Audit, ...]:
        asked = bind(AUDITS, limit) if before is None else bind(AUDITS_BEFORE, before, limit)
        (found,) = await self._pool.send(asked)
        return tuple(Audit(*row) for row in found.rows)

    @repeated
    async def save_definitions(self, definitions: Sequence[Definition], forms: Sequence[EventSchema]) -> None:
        async with self._pool.session() as session:
            statements = _defining(definitions, forms, session.limit)
            await session.send(bind(BEGIN), *statements, bind(COMMIT))


def _reopening(run: RunId, gen: int, keep: int) -> Iterator[Statement]:
    """The next generation, while the row of the end is locked."""
    for template in (READ_PAST, READ_INBOX, READ_BIRTH):
        yield bind(template, run)
    yield bind(READ_SEEN)
    for template in (FOLLOW, FOLLOWED):
        yield bind(template, run, gen)
    yield bind(KEEP_ENTRIES, run, gen, keep)
    yield bind(LET_GO, run, run, gen + 1)
    for template in (SCHEDULE, FORGET_DONE):
        yield bind(template, run, gen)
    yield bind(FORGET_END, run)


def _defining(definitions: Sequence[Definition], forms: Sequence[EventSchema], limit: int) -> Iterator[Statement]:
    """Sorted, so that two processes that tell the same at once wait for each other but never in a circle."""
    told = {one.workflow: one for one in definitions}
    rows = [_definition_row(told[workflow]) for workflow in sorted(told)]
    yield from inserts(INSERT_DEFINITION, rows, limit, OR_RENEW)
    schemas = {(form.workflow, form.type): form.schema for form in forms}
    rows = [
        b"(%b,%b,%b)" % (quote_text(name), quote_text(type), quote_bytes(schemas[name, type]))
        for name, type in sorted(schemas)
    ]
    yield from inserts(INSERT_FORM, rows, limit, OR_REPLACE)


def _definition_row(one: Definition) -> bytes:
    return b"(%b,%b,%b,%b)" % (
        quote_text(one.workflow),
        quote_text(one.service),
        quote_bytes(one.details),
        int_or_null(one.seen_at),
    )
