"""What people do to runs, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from edda.core.model import RunId
from edda.core.queries import Audit, Definition, EventSchema, ReopenOutcome

from .connection import Connection
from .events import last_event
from .pruning import remove_runs
from .runs import EXISTS

T = TypeVar("T")

_FORGET_RESULT = "DELETE FROM edda_result WHERE run_id = ? AND gen = ?"
_FORGET_DONE = "DELETE FROM edda_done WHERE run_id = ?"
_FIRST_CREATED = "SELECT min(created_at) FROM edda_run WHERE id = ?"
# Epochs are in the history; one that no entry tells of cannot be in the way of another generation.
_SCHED = """
INSERT INTO edda_sched (run_id, workflow, status, epoch, gen, start_seq, ready_at, delivered, absorbed)
SELECT r.id, r.workflow, 'running', h.epoch, r.gen + 1, ?3, 0, max(h.n, d.n), max(h.n, d.n)
  FROM edda_run r,
       (SELECT coalesce(max(epoch), 0) + 1 AS epoch, coalesce(max(n), 0) AS n FROM edda_hist WHERE run_id = ?1) h,
       (SELECT coalesce(max(n), 0) AS n FROM edda_delivery WHERE run_id = ?1) d
 WHERE r.id = ?1 AND r.gen = ?2"""
_RUN = """
INSERT INTO edda_run (id, gen, workflow, input, created_at, parent, parent_step, depth)
SELECT id, gen + 1, workflow, input, ?3, parent, parent_step, depth FROM edda_run WHERE id = ?1 AND gen = ?2"""
_KEEP = """
INSERT INTO edda_hist (run_id, gen, epoch, seq, kind, step, name, ok, at, attempt, n, event, input, value)
SELECT run_id, gen + 1, epoch, seq, kind, step, name, ok, at, attempt, n, event, input, value
  FROM edda_hist WHERE run_id = ? AND gen = ? ORDER BY seq LIMIT ?"""
# Events that it does not remember: it may be given them again.
_LET_GO = """
UPDATE edda_delivery SET event = NULL, kind = 'stray'
 WHERE run_id = ?1 AND event IS NOT NULL
   AND event NOT IN (SELECT event FROM edda_hist WHERE run_id = ?1 AND gen = ?2 + 1 AND event IS NOT NULL)"""

_RESUME = """
UPDATE edda_sched
   SET ready_at = 0, status = 'running', reason = NULL, deaths = 0, deaths_alone = 0, died_seq = NULL
 WHERE run_id = ? AND status <> 'running' AND owner IS NULL"""
_HAS_ENDED = "SELECT 1 FROM edda_result WHERE run_id = ?"
_DROP = """
DELETE FROM edda_outbox INDEXED BY edda_outbox_dead
 WHERE seq > 0 AND state = 'dead' AND id IN (SELECT value FROM json_each(?))"""

_NOTE = "INSERT INTO edda_audit (at, who, action, subject, origin, details) VALUES (?, ?, ?, ?, ?, ?)"
_AUDITS = """
SELECT at, who, action, subject, origin, details, seq FROM edda_audit WHERE seq < ? ORDER BY seq DESC LIMIT ?"""
_LAST = 2**63 - 1
_DEFINE = """
INSERT INTO edda_definition (workflow, service, details, seen_at) VALUES (?, ?, ?, ?)
    ON CONFLICT (workflow) DO UPDATE
   SET service = excluded.service, details = excluded.details, seen_at = excluded.seen_at"""
_FORM = """
INSERT INTO edda_form (workflow, type, schema) VALUES (?, ?, ?)
    ON CONFLICT (workflow, type) DO UPDATE SET schema = excluded.schema"""


def reopen(db: Connection, run_id: RunId, gen: int, keep: int, now: int) -> ReopenOutcome:
    if not db.run(_FORGET_RESULT, (run_id, gen)):
        return ReopenOutcome.OPEN if db.row(EXISTS, (run_id,)) else ReopenOutcome.MISSING
    ((born,),) = db.rows(_FIRST_CREATED, (run_id,))
    db.run(_SCHED, (run_id, gen, last_event(db, born)))
    db.run(_RUN, (run_id, gen, now))
    db.run(_KEEP, (run_id, gen, keep))
    db.run(_LET_GO, (run_id, gen))
    db.run(_FORGET_DONE, (run_id,))
    return ReopenOutcome.DONE


def delete(db: Connection, run_id: RunId) -> bool:
    if not db.row(_HAS_ENDED, (run_id,)):
        return False
    remove_runs(db, [(run_id,)])
    return True


def save_definitions(db: Connection, definitions: Sequence[Definition], forms: Sequence[EventSchema]) -> None:
    db.run_many(_DEFINE, [(d.workflow, d.service, d.details, d.seen_at) for d in definitions])
    db.run_many(_FORM, [(f.workflow, f.type, f.schema) for f in forms])


def audits(db: Connection, before: int | None, limit: int) -> tuple[Audit, ...]:
    return tuple(Audit(*row) for row in db.rows(_AUDITS, (_LAST if before is None else before, limit)))


class SQLiteSteering:
    """The part of the storage that people act through."""

    _now: Callable[[], int]

    async def _transact(self, job: Callable[[Connection], T]) -> T:
        raise NotImplementedError

    async def _query(self, job: Callable[[Connection], T]) -> T:
        raise NotImplementedError

    async def reopen(self, run_id: RunId, gen: int, keep: int) -> ReopenOutcome:
        return await self._transact(lambda db: reopen(db, run_id, gen, keep, self._now()))

    async def resume(self, run_id: RunId) -> bool:
        return await self._transact(lambda db: db.run(_RESUME, (run_id,)) == 1)

    async def delete(self, run_id: RunId) -> bool:
        return await self._transact(lambda db: delete(db, run_id))

    async def delete_outbox(self, ids: Sequence[str]) -> int:
        return await self._transact(lambda db: db.run(_DROP, (json.dumps(list(ids)),)))

    async def add_audit(self, audit: Audit) -> None:
        row = (audit.at, audit.who, audit.action, audit.subject, audit.origin, audit.details)
        await self._transact(lambda db: db.run(_NOTE, row))

    async def audits(self, before: int | None, limit: int) -> tuple[Audit, ...]:
        return await self._query(lambda db: audits(db, before, limit))

    async def save_definitions(self, definitions: Sequence[Definition], forms: Sequence[EventSchema]) -> None:
        await self._transact(lambda db: save_definitions(db, definitions, forms))
