"""What people do to runs, the audit of it, and the definitions that the viewer shows."""

from __future__ import annotations

import json
from collections.abc import Sequence

from edda.core.model import RunId
from edda.core.queries import Audit, Definition, EventSchema, ReopenOutcome

from .connection import Connection
from .events import last_event
from .pruning import delete_runs
from .runs import EXISTS, MAX_INTEGER
from .threads import Part, query, transaction

_DELETE_RESULT = "DELETE FROM edda_result WHERE run_id = ? AND generation = ?"
_DELETE_STEP_COMMITS = "DELETE FROM edda_step_commit WHERE run_id = ?"
_FIRST_CREATED = "SELECT min(created_at) FROM edda_run WHERE id = ?"
# The epoch is above all that are in the history. An epoch without entries can be used again: no row has it.
_INSERT_OPEN_RUN = """
INSERT INTO edda_open_run (run_id, workflow, status, epoch, generation, event_cursor, ready_at, inbox_count, inbox_read)
SELECT r.id, r.workflow, 'running', h.epoch, r.generation + 1, ?3, 0, max(h.inbox_no, d.inbox_no), max(h.inbox_no,
    d.inbox_no)
  FROM edda_run r,
       (SELECT coalesce(max(epoch), 0) + 1 AS epoch, coalesce(max(inbox_no), 0) AS inbox_no FROM edda_history
           WHERE run_id = ?1) h,
       (SELECT coalesce(max(inbox_no), 0) AS inbox_no FROM edda_inbox WHERE run_id = ?1) d
 WHERE r.id = ?1 AND r.generation = ?2"""
_INSERT_GENERATION = """
INSERT INTO edda_run (id, generation, workflow, input, created_at, parent, parent_step, depth)
SELECT id, generation + 1, workflow, input, ?3, parent, parent_step, depth FROM edda_run WHERE id = ?1
    AND generation = ?2"""
_COPY_ENTRIES = """
INSERT INTO edda_history (run_id, generation, epoch, seq, kind, step, name, ok, at, attempt, inbox_no, event, input,
    value)
SELECT run_id, generation + 1, epoch, seq, kind, step, name, ok, at, attempt, inbox_no, event, input, value
  FROM edda_history WHERE run_id = ? AND generation = ? ORDER BY seq LIMIT ?"""
# Events that are not in the copied entries: the run may receive them again.
_RELEASE_EVENTS = """
UPDATE edda_inbox SET event = NULL, kind = 'late_event'
 WHERE run_id = ?1 AND event IS NOT NULL
   AND event NOT IN (SELECT event FROM edda_history WHERE run_id = ?1 AND generation = ?2 + 1 AND event IS NOT NULL)"""

_RESUME = """
UPDATE edda_open_run
   SET ready_at = 0, status = 'running', reason = NULL, deaths = 0, deaths_alone = 0, died_seq = NULL
 WHERE run_id = ? AND status <> 'running' AND owner IS NULL"""
_HAS_ENDED = "SELECT 1 FROM edda_result WHERE run_id = ?"
_DELETE_OUTBOX = """
DELETE FROM edda_outbox INDEXED BY edda_outbox_dead
 WHERE seq > 0 AND state = 'dead' AND id IN (SELECT value FROM json_each(?))"""

_INSERT_AUDIT = "INSERT INTO edda_audit (at, who, action, subject, origin, details) VALUES (?, ?, ?, ?, ?, ?)"
_AUDITS = """
SELECT at, who, action, subject, origin, details, seq FROM edda_audit WHERE seq < ? ORDER BY seq DESC LIMIT ?"""
_SAVE_DEFINITION = """
INSERT INTO edda_definition (workflow, service, details, seen_at) VALUES (?, ?, ?, ?)
    ON CONFLICT (workflow) DO UPDATE
   SET service = excluded.service, details = excluded.details, seen_at = excluded.seen_at"""
_SAVE_SCHEMA = """
INSERT INTO edda_event_schema (workflow, type, schema) VALUES (?, ?, ?)
    ON CONFLICT (workflow, type) DO UPDATE SET schema = excluded.schema"""


class SQLiteAdmin(Part):
    @transaction
    def reopen(self, db: Connection, run_id: RunId, generation: int, keep: int) -> ReopenOutcome:
        if not db.run(_DELETE_RESULT, (run_id, generation)):
            return ReopenOutcome.OPEN if db.row(EXISTS, (run_id,)) else ReopenOutcome.MISSING
        ((created_at,),) = db.rows(_FIRST_CREATED, (run_id,))
        db.run(_INSERT_OPEN_RUN, (run_id, generation, last_event(db, created_at)))
        db.run(_INSERT_GENERATION, (run_id, generation, self._now()))
        db.run(_COPY_ENTRIES, (run_id, generation, keep))
        db.run(_RELEASE_EVENTS, (run_id, generation))
        db.run(_DELETE_STEP_COMMITS, (run_id,))
        return ReopenOutcome.DONE

    @transaction
    def resume(self, db: Connection, run_id: RunId) -> bool:
        return db.run(_RESUME, (run_id,)) == 1

    @transaction
    def delete(self, db: Connection, run_id: RunId) -> bool:
        if not db.row(_HAS_ENDED, (run_id,)):
            return False
        delete_runs(db, [(run_id,)])
        return True

    @transaction
    def delete_outbox(self, db: Connection, ids: Sequence[str]) -> int:
        return db.run(_DELETE_OUTBOX, (json.dumps(list(ids)),))

    @transaction
    def add_audit(self, db: Connection, audit: Audit) -> None:
        db.run(_INSERT_AUDIT, (audit.at, audit.who, audit.action, audit.subject, audit.origin, audit.details))

    @query
    def audits(self, db: Connection, before: int | None, limit: int) -> tuple[Audit, ...]:
        return tuple(Audit(*row) for row in db.rows(_AUDITS, (MAX_INTEGER if before is None else before, limit)))

    @transaction
    def save_definitions(
        self, db: Connection, definitions: Sequence[Definition], schemas: Sequence[EventSchema]
    ) -> None:
        db.run_many(_SAVE_DEFINITION, [(d.workflow, d.service, d.details, d.seen_at) for d in definitions])
        db.run_many(_SAVE_SCHEMA, [(schema.workflow, schema.type, schema.schema) for schema in schemas])
