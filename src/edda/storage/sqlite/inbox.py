"""Letters: what others put into the inbox of a run."""

from __future__ import annotations

from edda.core.model import EntryKind, Letter

from .connection import Connection

# A run without an owner is ready at once: only an owner ends a run.
_DELIVERED = """
UPDATE edda_sched
   SET delivered = delivered + 1,
       ready_at = CASE WHEN owner IS NULL THEN 0 ELSE ready_at END,
       status = CASE WHEN owner IS NULL THEN 'running' ELSE status END,
       reason = CASE WHEN owner IS NULL THEN NULL ELSE reason END"""
WAKE = f"{_DELIVERED} WHERE run_id = ?"
_CANCEL = f"{_DELIVERED}, cancelled = 1 WHERE run_id = ? AND NOT cancelled"
_LETTER = """
INSERT INTO edda_delivery (run_id, n, kind, step, at, value)
SELECT run_id, delivered, ?2, ?3, ?4, ?5 FROM edda_sched WHERE run_id = ?1"""


def put(db: Connection, letter: Letter, now: int) -> bool:
    """False if the run is not open, or is asked to cancel once more."""
    if not db.run(_CANCEL if letter.kind is EntryKind.CANCEL else WAKE, (letter.run_id,)):
        return False
    db.run(_LETTER, (letter.run_id, letter.kind.value, letter.step, now, letter.value))
    return True
