"""Letters: what others put into the inbox of a run."""

from __future__ import annotations

from edda.core.model import EntryKind, RunId, RunSignal

from .connection import Connection

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
