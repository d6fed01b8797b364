"""Runs: starting, cancelling and reading them, their history, their inbox, their watchers and their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from edda.core.model import (
    CancelOutcome,
    EndWatcher,
    Entry,
    EntryKind,
    RunFilter,
    RunId,
    RunRecord,
    RunSignal,
    RunValue,
    Start,
)
from edda.core.states import OPEN
from edda.storage.shared.rows import to_entry, to_run_record, to_run_value, to_watcher

from .connection import Connection
from .threads import Part, read, transaction

INSERT_RUN = """
INSERT INTO edda_run (id, generation, workflow, input, created_at, deadline, parent, parent_step, depth)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_INSERT_OPEN_RUN = """
INSERT INTO edda_open_run (run_id, workflow, status, epoch, generation, ready_at, event_cursor)
VALUES (?, ?, 'running', 0, 0, ?, (SELECT coalesce(max(seq), 0) FROM edda_event))"""
EXISTS = "SELECT 1 FROM edda_run WHERE id = ? LIMIT 1"
_IS_OPEN = "SELECT 1 FROM edda_open_run WHERE run_id = ?"

# An item makes a run without an owner ready at once. A parked run and a suspect keep their time.
_WAKES = "owner IS NULL AND status <> 'parked' AND suspect_at IS NULL"
_COUNT_ITEM = """
UPDATE edda_open_run
   SET inbox_count = inbox_count + 1,
       ready_at = CASE WHEN {wakes} THEN 0 ELSE ready_at END,
       status = CASE WHEN {wakes} THEN 'running' ELSE status END,
       reason = CASE WHEN {wakes} THEN NULL ELSE reason END""".replace("{wakes}", _WAKES)
WAKE = f"{_COUNT_ITEM} WHERE run_id = ?"
_CANCEL = f"{_COUNT_ITEM}, cancelled = 1 WHERE run_id = ? AND NOT cancelled"
# A parked run that is cancelled is due at once, and ends if it cannot continue; not in the middle of compensation.
_CANCEL_PARKED = """
UPDATE edda_open_run SET end_if_parked = 1, ready_at = 0
 WHERE run_id = ? AND owner IS NULL AND status = 'parked' AND NOT compensating AND NOT end_if_parked"""
_INSERT_ITEM = """
INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value)
SELECT run_id, inbox_count, ?2, ?3, ?4, ?5 FROM edda_open_run WHERE run_id = ?1"""

_INSERT_WATCHER = """
INSERT INTO edda_watcher (run_id, watcher, step) SELECT run_id, ?2, ?3 FROM edda_open_run WHERE run_id = ?1
    ON CONFLICT (run_id, watcher, step) DO NOTHING"""
_COUNT_WATCHER = "UPDATE edda_open_run SET watchers = watchers + 1 WHERE run_id = ?"
_WATCHERS = "SELECT watcher, step FROM edda_watcher WHERE run_id = ? ORDER BY watcher, step"

SET_VALUE = """
INSERT INTO edda_run_value (run_id, name, value, at) VALUES (?, ?, ?, ?)
    ON CONFLICT (run_id, name) DO UPDATE SET value = excluded.value, at = excluded.at"""
_VALUES = """
SELECT name, value FROM edda_run_value WHERE run_id = ?1 AND (?2 IS NULL OR name = ?2) ORDER BY name"""

# A waiting run that is due is shown as running: it waits for a worker, no longer for its timer. A compensating run is
# shown as such unless it is parked, because a parked run may need an operator.
OPEN_STATUS = """
CASE WHEN s.compensating AND (s.status <> 'parked' OR s.ready_at <= :now) THEN 'compensating'
     WHEN s.owner IS NULL AND s.ready_at <= :now
      AND s.status IN ('waiting_for_event', 'waiting_for_timer', 'waiting_for_message', 'waiting_for_child', 'parked')
     THEN 'running' ELSE s.status END"""
STATUS = f"coalesce(x.status, {OPEN_STATUS})"
RECORD = f"""
SELECT r.id, r.workflow, r.generation, {STATUS} AS state, r.input, r.created_at, r.deadline,
       s.owner, s.ready_at, s.reason, x.ended_at, x.value, r.parent, coalesce(s.deaths, 0),
       coalesce(s.cancelled AND NOT s.compensating AND NOT s.end_if_parked, 0)"""
_GET = f"""{RECORD}
  FROM edda_run r
  LEFT JOIN edda_open_run s ON s.run_id = r.id
  LEFT JOIN edda_result x ON x.run_id = r.id
 WHERE r.id = :run_id ORDER BY r.generation DESC LIMIT 1"""
_PAGE = """
 WHERE r.created_at >= :created_from AND r.created_at < :created_to
   AND (r.created_at, r.id) < (:before_at, :before_id)
   AND (:workflow IS NULL OR r.workflow = :workflow)
   AND (:status IS NULL OR state = :status)
   AND NOT EXISTS (SELECT 1 FROM edda_run later WHERE later.id = r.id AND later.generation > r.generation)
 ORDER BY r.created_at DESC, r.id DESC LIMIT :limit"""
_FIND = f"""{RECORD}
  FROM edda_run r INDEXED BY edda_run_created
  LEFT JOIN edda_open_run s ON s.run_id = r.id
  LEFT JOIN edda_result x ON x.run_id = r.id
{_PAGE}"""
# Open runs are few beside the ended ones: begin with their table.
_FIND_OPEN = f"""{RECORD}
  FROM edda_open_run s
 CROSS JOIN edda_run r ON r.id = s.run_id AND r.generation = s.generation
  LEFT JOIN edda_result x ON x.run_id = r.id
{_PAGE}"""
_HISTORY = """
SELECT seq, kind, step, name, ok, at, input, value, attempt, inbox_no, event FROM edda_history
 WHERE run_id = ?1 AND generation = coalesce(?2, (SELECT max(generation) FROM edda_run WHERE id = ?1))
   AND seq > ?3 AND (?4 IS NULL OR step = ?4) ORDER BY seq LIMIT ?5"""

MAX_INTEGER = 2**63 - 1


class SQLiteRuns(Part):
    @transaction
    def start(self, db: Connection, starts: Sequence[Start]) -> frozenset[RunId]:
        return start_runs(db, starts, self._now())

    @transaction
    def cancel(self, db: Connection, run_id: RunId, value: bytes) -> CancelOutcome:
        if put_signal(db, RunSignal(run_id, EntryKind.CANCEL, value=value), self._now()) or _cancel_parked(db, run_id):
            return CancelOutcome.REQUESTED
        if db.row(_IS_OPEN, (run_id,)):
            return CancelOutcome.ALREADY
        return CancelOutcome.ENDED if db.row(EXISTS, (run_id,)) else CancelOutcome.MISSING

    @read
    def get(self, db: Connection, run_id: RunId) -> RunRecord | None:
        return self._get(db, run_id)

    def _get(self, db: Connection, run_id: RunId) -> RunRecord | None:
        row = db.row(_GET, {"run_id": run_id, "now": self._now()})
        return to_run_record(row) if row else None

    @transaction
    def add_watcher(self, db: Connection, run_id: RunId, watcher: EndWatcher) -> RunRecord | None:
        if db.run(_INSERT_WATCHER, (run_id, watcher.run_id, watcher.step)):
            db.run(_COUNT_WATCHER, (run_id,))
        return self._get(db, run_id)

    @read
    def watchers(self, db: Connection, run_id: RunId) -> tuple[EndWatcher, ...]:
        return read_watchers(db, run_id)

    @read
    def history(
        self,
        db: Connection,
        run_id: RunId,
        generation: int | None = None,
        *,
        step: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> tuple[Entry, ...]:
        values = (run_id, generation, after, step, MAX_INTEGER if limit is None else limit)
        return tuple(map(to_entry, db.rows(_HISTORY, values)))

    @read
    def find(self, db: Connection, filter: RunFilter) -> tuple[RunRecord, ...]:
        before_at, before_id = filter.before or (MAX_INTEGER, "")
        values = {
            "now": self._now(),
            "created_from": 0 if filter.created_from is None else filter.created_from,
            "created_to": MAX_INTEGER if filter.created_to is None else filter.created_to,
            "before_at": before_at,
            "before_id": before_id,
            "workflow": filter.workflow,
            "status": filter.status and filter.status.value,
            "limit": filter.limit,
        }
        return tuple(map(to_run_record, db.rows(_FIND_OPEN if filter.status in OPEN else _FIND, values)))

    @read
    def run_values(self, db: Connection, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        return tuple(map(to_run_value, db.rows(_VALUES, (run_id, name))))


def start_runs(db: Connection, starts: Iterable[Start], now: int) -> frozenset[RunId]:
    """Insert the runs whose ids are new, without an owner; returns those ids."""
    return frozenset(s.run_id for s in sorted(starts, key=lambda s: s.run_id) if _start(db, s, now))


def _start(db: Connection, s: Start, now: int) -> bool:
    if db.row(EXISTS, (s.run_id,)):  # in any generation: the first may be pruned
        return False
    db.run(INSERT_RUN, start_to_row(s, 0))
    db.run(_INSERT_OPEN_RUN, (s.run_id, s.workflow, now if s.ready_at is None else s.ready_at))
    return True


def put_signal(db: Connection, signal: RunSignal, now: int) -> bool:
    """Put an item into a run's inbox. False if the run is not open, or if this is its second cancel."""
    is_cancel = signal.kind is EntryKind.CANCEL
    if not db.run(_CANCEL if is_cancel else WAKE, (signal.run_id,)):
        return False
    db.run(_INSERT_ITEM, (signal.run_id, signal.kind.value, signal.step, now, signal.value))
    if is_cancel:
        _cancel_parked(db, signal.run_id)
    return True


def _cancel_parked(db: Connection, run_id: RunId) -> bool:
    """False if the run is not parked, or was marked before."""
    return db.run(_CANCEL_PARKED, (run_id,)) == 1


def read_watchers(db: Connection, run_id: RunId) -> tuple[EndWatcher, ...]:
    return tuple(map(to_watcher, db.rows(_WATCHERS, (run_id,))))


def start_to_row(s: Start, generation: int) -> tuple[Any, ...]:
    return (s.run_id, generation, s.workflow, s.input, s.created_at, s.deadline, s.parent, s.parent_step, s.depth)
