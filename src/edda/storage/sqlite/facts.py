"""What runs say of themselves."""

from __future__ import annotations

from edda.core.model import RunId, RunValue

from .connection import Connection

SAY = """
INSERT INTO edda_fact (run_id, name, value, at) VALUES (?, ?, ?, ?)
    ON CONFLICT (run_id, name) DO UPDATE SET value = excluded.value, at = excluded.at"""
_ALL = "SELECT name, value FROM edda_fact WHERE run_id = ? ORDER BY name"
_ONE = "SELECT name, value FROM edda_fact WHERE run_id = ? AND name = ?"


def of_run(db: Connection, run_id: RunId, name: str | None) -> tuple[RunValue, ...]:
    rows = db.rows(_ALL, (run_id,)) if name is None else db.rows(_ONE, (run_id, name))
    return tuple(RunValue(*row) for row in rows)
