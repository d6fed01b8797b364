"""Claiming runs: those that are due, and those that are suspected of killing their processes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from edda.core.model import Claim, ClaimedRun, InboxItem, RunId, WorkerId
from edda.storage.shared.rows import rows_by_run, to_claimed_run, to_entry, to_inbox_item, to_step_commit

from .connection import Connection
from .runs import read_watchers
from .threads import Part, read, transaction

# No row changes if the worker was taken over, or if the database has lost one of its claims.
_COUNT_CLAIM = """
UPDATE edda_claim SET claims = claims + 1
 WHERE worker = ?1 AND claims >= ?2 AND EXISTS (SELECT 1 FROM edda_fence WHERE worker = ?1)"""
_CLAIM_NUMBER = "SELECT claims FROM edda_claim WHERE worker = ?"
_DUE = """
SELECT ready_at, run_id FROM edda_open_run INDEXED BY edda_open_run_ready
 WHERE owner IS NULL AND workflow = ? AND ready_at <= ? ORDER BY ready_at LIMIT ?"""
_CLAIM = """
UPDATE edda_open_run SET owner = ?, epoch = epoch + 1, ready_at = NULL, status = 'running', reason = NULL
 WHERE run_id = ?"""
# The first group of the process that died last.
_SUSPECTS = """
SELECT run_id FROM edda_open_run INDEXED BY edda_open_run_suspect
 WHERE suspect_at = (SELECT max(suspect_at) FROM edda_open_run INDEXED BY edda_open_run_suspect
                      WHERE suspect_at IS NOT NULL AND workflow IN (SELECT value FROM json_each(?1)))
   AND workflow IN (SELECT value FROM json_each(?1))
 ORDER BY run_id LIMIT ?2"""
_CLAIM_SUSPECT = """
UPDATE edda_open_run
   SET owner = ?, epoch = epoch + 1, ready_at = NULL, suspect_at = NULL, status = 'running', reason = NULL, alone = ?
 WHERE run_id = ?"""
_HAS_SUSPECTS = """
SELECT 1 FROM edda_open_run INDEXED BY edda_open_run_suspect
 WHERE suspect_at IS NOT NULL AND workflow IN (SELECT value FROM json_each(?)) LIMIT 1"""
_CLAIMED = """
SELECT s.run_id, s.epoch, s.watchers,
       s.run_id, r.workflow, r.generation, s.inbox_read, s.attempts, s.event_cursor, s.compensating, s.end_if_parked,
       s.deaths, s.deaths_alone, s.died_seq,
       r.input, r.created_at, r.deadline, r.parent, r.parent_step, r.depth
  FROM json_each(?) i
 CROSS JOIN edda_open_run s ON s.run_id = i.value
 CROSS JOIN edda_run r ON r.id = s.run_id AND r.generation = s.generation
 ORDER BY i.key"""
_HISTORY = """
SELECT h.run_id, h.seq, h.kind, h.step, h.name, h.ok, h.at, h.input, h.value, h.attempt, h.inbox_no, h.event
  FROM json_each(?) i
 CROSS JOIN edda_open_run s ON s.run_id = i.value
 CROSS JOIN edda_history h ON h.run_id = s.run_id AND h.generation = s.generation
 ORDER BY i.key, h.seq"""
_STEP_COMMITS = """
SELECT d.run_id, d.step, d.attempt, d.value, d.at
  FROM json_each(?) i
 CROSS JOIN edda_open_run s ON s.run_id = i.value
 CROSS JOIN edda_step_commit d ON d.run_id = s.run_id AND d.generation = s.generation
 ORDER BY i.key, d.step"""
_WAITS = """
SELECT w.run_id, w.step, w.key FROM json_each(?) i CROSS JOIN edda_wait w ON w.run_id = i.value
 ORDER BY w.run_id, w.step"""
# The inbox item of an event stores the event's number; the body is in the event's row.
_ITEM = "SELECT d.run_id, d.inbox_no, d.kind, d.at, d.step, coalesce(e.body, d.value), d.event"
_UNREAD = f"""{_ITEM}
  FROM json_each(?) i
 CROSS JOIN edda_open_run s ON s.run_id = i.value
 CROSS JOIN edda_inbox d ON d.run_id = s.run_id AND d.inbox_no > s.inbox_read
  LEFT JOIN edda_event e ON e.seq = d.event
 ORDER BY i.key, d.inbox_no"""
_NEXT_READY = """
SELECT ready_at FROM edda_open_run INDEXED BY edda_open_run_ready
 WHERE owner IS NULL AND workflow = ? AND ready_at IS NOT NULL ORDER BY ready_at LIMIT 1"""
# The same time as `model.unpark_pause`.
_UNPARKED_AT = "max(?1, CASE WHEN attempts < 3 THEN 0 ELSE coalesce(parked_at, 0) + (100000 << min(attempts, 8)) END)"
_WAKE_PARKED = """
UPDATE edda_open_run INDEXED BY edda_open_run_parked SET ready_at = {due}
 WHERE status = 'parked' AND owner IS NULL AND ready_at > {due}
   AND workflow IN (SELECT value FROM json_each(?2))""".replace("{due}", _UNPARKED_AT)
_INBOXES = f"""{_ITEM}
  FROM edda_open_run s INDEXED BY edda_open_run_inbox
 CROSS JOIN edda_inbox d ON d.run_id = s.run_id AND d.inbox_no > s.inbox_read
  LEFT JOIN edda_event e ON e.seq = d.event
 WHERE s.owner = ? AND s.inbox_count > s.inbox_read
 ORDER BY d.run_id, d.inbox_no"""


class SQLiteClaims(Part):
    """A claim holds the write lock, so the history and the row of a claimed run always fit together."""

    @transaction
    def claim(
        self, db: Connection, worker: WorkerId, workflows: Sequence[str], limit: int, known_claims: int = 0
    ) -> Claim:
        now, number = self._now(), _count_claim(db, worker, known_claims)
        if number is None:
            return Claim(now, ())
        # The runs that have been due longest, of all workflows together: each workflow has its own range of the index.
        found = [row for workflow in workflows for row in db.rows(_DUE, (workflow, now, limit))]
        due = [run_id for _, run_id in sorted(found)[:limit]]
        db.run_many(_CLAIM, [(worker, run_id) for run_id in due])
        return Claim(now, _load(db, due), number)

    @transaction
    def claim_suspects(
        self, db: Connection, worker: WorkerId, workflows: Sequence[str], limit: int, alone: bool, known_claims: int = 0
    ) -> Claim:
        now, number = self._now(), _count_claim(db, worker, known_claims)
        if number is None:
            return Claim(now, ())
        chosen = [run_id for (run_id,) in db.rows(_SUSPECTS, (json.dumps(list(workflows)), limit))]
        is_alone = alone and len(chosen) == 1
        db.run_many(_CLAIM_SUSPECT, [(worker, int(is_alone), run_id) for run_id in chosen])
        return Claim(now, _load(db, chosen), number)

    async def has_suspects(self, workflows: Sequence[str]) -> bool:
        return await self._pool.cached_read(_has_suspects, tuple(workflows))

    async def next_due(self, workflows: Sequence[str]) -> int | None:
        ready_at = await self._pool.cached_read(_next_ready, tuple(workflows))
        return None if ready_at is None else max(0, ready_at - self._now())

    @transaction
    def wake_parked(self, db: Connection, workflows: Sequence[str]) -> int:
        return db.run(_WAKE_PARKED, (self._now(), json.dumps(list(workflows))))

    @read
    def read_inboxes(self, db: Connection, worker: WorkerId) -> tuple[InboxItem, ...]:
        return tuple(map(to_inbox_item, db.rows(_INBOXES, (worker,))))


def _count_claim(db: Connection, worker: WorkerId, known_claims: int) -> int | None:
    """The number of this claim; None if the worker was taken over, or the database has lost one of its claims."""
    if not db.run(_COUNT_CLAIM, (worker, known_claims)):
        return None
    ((number,),) = db.rows(_CLAIM_NUMBER, (worker,))
    return int(number)


def _has_suspects(db: Connection, workflows: tuple[str, ...]) -> bool:
    return db.row(_HAS_SUSPECTS, (json.dumps(workflows),)) is not None


def _next_ready(db: Connection, workflows: tuple[str, ...]) -> int | None:
    """When the first run without an owner is due."""
    return min((row[0] for workflow in workflows if (row := db.row(_NEXT_READY, (workflow,)))), default=None)


def _load(db: Connection, run_ids: list[RunId]) -> tuple[ClaimedRun, ...]:
    if not run_ids:
        return ()
    ids = (json.dumps(run_ids),)
    read = (_WAITS, _HISTORY, _STEP_COMMITS, _UNREAD)
    waits, history, step_commits, inboxes = (rows_by_run(db.rows(sql, ids)) for sql in read)
    return tuple(
        to_claimed_run(
            columns[:11],
            columns[11:],
            epoch=epoch,
            entries=(to_entry(row[1:]) for row in history[run_id]),
            inbox=map(to_inbox_item, inboxes[run_id]),
            waits=((step, key) for _, step, key in waits[run_id]),
            watchers=read_watchers(db, run_id) if watchers else (),
            step_commits=(to_step_commit(row[1:]) for row in step_commits[run_id]),
        )
        for run_id, epoch, watchers, *columns in db.rows(_CLAIMED, ids)
    )
