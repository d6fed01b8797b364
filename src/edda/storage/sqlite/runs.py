"""Reading runs, their history, their inbox and their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edda.core.model import CancelOutcome, Entry, EntryKind, RunFilter, RunId, RunRecord, RunSignal, RunValue, Start
from edda.core.states import OPEN, RunStatus

from .claims import as_entry
from .connection import Connection

SAY = """
INSERT INTO edda_fact (run_id, name, value, at) VALUES (?, ?, ?, ?)
    ON CONFLICT (run_id, name) DO UPDATE SET value = excluded.value, at = excluded.at"""
_ALL = "SELECT name, value FROM edda_fact WHERE run_id = ? ORDER BY name"
_ONE = "SELECT name, value FROM edda_fact WHERE run_id = ? AND name = ?"


def of_run(db: Connection, run_id: RunId, name: str | None) -> tuple[RunValue, ...]:
    rows = db.rows(_ALL, (run_id,)) if name is None else db.rows(_ONE, (run_id, name))
    return tuple(RunValue(*row) for row in rows)


# A run without an owner is ready at once: only an owner ends a run. A parked run and a suspect keep their time.
_WAKES = "owner IS NULL AND status <> 'parked' AND suspect_at IS NULL"
_DELIVERED = """
UPDATE edda_sched
   SET delivered = delivered + 1,
       ready_at = CASE WHEN {wakes} THEN 0 ELSE ready_at END,
       status = CASE WHEN {wakes} THEN 'running' ELSE status END,
       reason = CASE WHEN {wakes} THEN NULL ELSE reason END""".replace("{wakes}", _WAKES)
WAKE = f"{_DELIVERED} WHERE run_id = ?"
_CANCEL = f"{_DELIVERED}, cancelled = 1 WHERE run_id = ? AND NOT cancelled"
# A cancel has a parked run tried at once, and ended if it cannot go on; one that undoes what it did stays as it is.
_CANCEL_PARKED = """
UPDATE edda_sched SET end_if_parked = 1, ready_at = 0
 WHERE run_id = ? AND owner IS NULL AND status = 'parked' AND NOT undoing AND NOT end_if_parked"""
_LETTER = """
INSERT INTO edda_delivery (run_id, n, kind, step, at, value)
SELECT run_id, delivered, ?2, ?3, ?4, ?5 FROM edda_sched WHERE run_id = ?1"""


def put(db: Connection, letter: RunSignal, now: int) -> bool:
    """False if the run is not open, or is asked to cancel once more."""
    if not db.run(_CANCEL if letter.kind is EntryKind.CANCEL else WAKE, (letter.run_id,)):
        return False
    db.run(_LETTER, (letter.run_id, letter.kind.value, letter.step, now, letter.value))
    if letter.kind is EntryKind.CANCEL:
        cancel_parked(db, letter.run_id)
    return True


def cancel_parked(db: Connection, run_id: RunId) -> bool:
    """False if the run is not parked, or this was asked for before."""
    return db.run(_CANCEL_PARKED, (run_id,)) == 1


INSERT = """
INSERT INTO edda_run (id, gen, workflow, input, created_at, deadline, parent, parent_step, depth)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_SCHED = """
INSERT INTO edda_sched (run_id, workflow, status, epoch, gen, ready_at, start_seq)
VALUES (?, ?, 'running', 0, 0, ?, (SELECT coalesce(max(seq), 0) FROM edda_event))"""

EXISTS = "SELECT 1 FROM edda_run WHERE id = ? LIMIT 1"
_IS_OPEN = "SELECT 1 FROM edda_sched WHERE run_id = ?"

# A waiting run that is due is as good as running: it waits for a worker, no longer for its timer. A run that
# undoes is shown as such unless it is parked, which somebody may have to do something about.
OPEN_STATUS = """
CASE WHEN s.undoing AND (s.status <> 'parked' OR s.ready_at <= :now) THEN 'compensating'
     WHEN s.owner IS NULL AND s.ready_at <= :now
      AND s.status IN ('waiting_for_event', 'waiting_for_timer', 'waiting_for_message', 'waiting_for_child', 'parked')
     THEN 'running' ELSE s.status END"""
STATUS = f"coalesce(x.status, {OPEN_STATUS})"
RECORD = f"""
SELECT r.id, r.workflow, r.gen, {STATUS} AS state, r.input, r.created_at, r.deadline,
       s.owner, s.ready_at, s.reason, x.ended_at, x.value, r.parent, coalesce(s.deaths, 0),
       coalesce(s.cancelled AND NOT s.undoing AND NOT s.end_if_parked, 0)"""
_GET = f"""{RECORD}
  FROM edda_run r
  LEFT JOIN edda_sched s ON s.run_id = r.id
  LEFT JOIN edda_result x ON x.run_id = r.id
 WHERE r.id = :run_id ORDER BY r.gen DESC LIMIT 1"""
_PAGE = """
 WHERE r.created_at >= :created_from AND r.created_at < :created_to
   AND (r.created_at, r.id) < (:before_at, :before_id)
   AND (:workflow IS NULL OR r.workflow = :workflow)
   AND (:status IS NULL OR state = :status)
   AND NOT EXISTS (SELECT 1 FROM edda_run later WHERE later.id = r.id AND later.gen > r.gen)
 ORDER BY r.created_at DESC, r.id DESC LIMIT :limit"""
_FIND = f"""{RECORD}
  FROM edda_run r INDEXED BY edda_run_created
  LEFT JOIN edda_sched s ON s.run_id = r.id
  LEFT JOIN edda_result x ON x.run_id = r.id
{_PAGE}"""
# The open runs are few among the finished ones: begin with them.
_FIND_OPEN = f"""{RECORD}
  FROM edda_sched s
 CROSS JOIN edda_run r ON r.id = s.run_id AND r.gen = s.gen
  LEFT JOIN edda_result x ON x.run_id = r.id
{_PAGE}"""
_LAST = 2**63 - 1

_HISTORY = """
SELECT seq, kind, step, name, ok, at, input, value, attempt, n, event FROM edda_hist
 WHERE run_id = ?1 AND gen = coalesce(?2, (SELECT max(gen) FROM edda_run WHERE id = ?1))
   AND seq > ?3 AND (?4 IS NULL OR step = ?4) ORDER BY seq LIMIT ?5"""


def start(db: Connection, starts: Iterable[Start], now: int) -> frozenset[RunId]:
    return frozenset(s.run_id for s in sorted(starts, key=lambda s: s.run_id) if _start(db, s, now))


def _start(db: Connection, s: Start, now: int) -> bool:
    if db.row(EXISTS, (s.run_id,)):  # in whatever generation: the first may be pruned
        return False
    db.run(INSERT, as_row(s, 0))
    db.run(_SCHED, (s.run_id, s.workflow, now if s.ready_at is None else s.ready_at))
    return True


def as_row(s: Start, gen: int) -> tuple[Any, ...]:
    return (s.run_id, gen, s.workflow, s.input, s.created_at, s.deadline, s.parent, s.parent_step, s.depth)


def cancel(db: Connection, run_id: RunId, value: bytes, now: int) -> CancelOutcome:
    if put(db, RunSignal(run_id, EntryKind.CANCEL, value=value), now) or cancel_parked(db, run_id):
        return CancelOutcome.REQUESTED
    if db.row(_IS_OPEN, (run_id,)):
        return CancelOutcome.ALREADY
    return CancelOutcome.ENDED if db.row(EXISTS, (run_id,)) else CancelOutcome.MISSING


def get(db: Connection, run_id: RunId, now: int) -> RunRecord | None:
    row = db.row(_GET, {"run_id": run_id, "now": now})
    return as_record(row) if row else None


def history(
    db: Connection, run_id: RunId, gen: int | None, step: str | None, after: int, limit: int | None
) -> tuple[Entry, ...]:
    most = _LAST if limit is None else limit
    return tuple(map(as_entry, db.rows(_HISTORY, (run_id, gen, after, step, most))))


def find(db: Connection, filter: RunFilter, now: int) -> tuple[RunRecord, ...]:
    before_at, before_id = filter.before or (_LAST, "")
    values = {
        "now": now,
        "created_from": 0 if filter.created_from is None else filter.created_from,
        "created_to": _LAST if filter.created_to is None else filter.created_to,
        "before_at": before_at,
        "before_id": before_id,
        "workflow": filter.workflow,
        "status": filter.status and filter.status.value,
        "limit": filter.limit,
    }
    return tuple(map(as_record, db.rows(_FIND_OPEN if filter.status in OPEN else _FIND, values)))


def as_record(row: Sequence[Any]) -> RunRecord:
    run_id, workflow, gen, status, *rest = row
    rest[-1] = bool(rest[-1])
    return RunRecord(run_id, workflow, gen, RunStatus(status), *rest)
