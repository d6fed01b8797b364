"""Steps that are done and not in the history yet: their effect and their row were one commit of the user's."""

from __future__ import annotations

from edda.core.model import RunId, StepCommit

from .connection import Connection

FORGET = "DELETE FROM edda_done WHERE run_id = ? AND gen = ? AND step = ?"
_FIND = "SELECT step, attempt, value, at FROM edda_done WHERE run_id = ? AND gen = ? AND step = ?"


def find(db: Connection, run_id: RunId, gen: int, step: str) -> StepCommit | None:
    row = db.row(_FIND, (run_id, gen, step))
    return StepCommit(*row) if row else None
