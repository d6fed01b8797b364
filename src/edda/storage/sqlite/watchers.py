"""Who is told the end of a run."""

from __future__ import annotations

from edda.core.model import EndWatcher, RunId

from .connection import Connection

_WATCH = """
INSERT INTO edda_watcher (run_id, watcher, step) SELECT run_id, ?2, ?3 FROM edda_sched WHERE run_id = ?1
    ON CONFLICT (run_id, watcher, step) DO NOTHING"""
_COUNT = "UPDATE edda_sched SET watchers = watchers + 1 WHERE run_id = ?"
_WATCHERS = "SELECT watcher, step FROM edda_watcher WHERE run_id = ? ORDER BY watcher, step"


def add(db: Connection, run_id: RunId, watcher: EndWatcher) -> None:
    """Nobody is told the end of a run that has ended."""
    if db.run(_WATCH, (run_id, watcher.run_id, watcher.step)):
        db.run(_COUNT, (run_id,))


def of_run(db: Connection, run_id: RunId) -> tuple[EndWatcher, ...]:
    return tuple(EndWatcher(*row) for row in db.rows(_WATCHERS, (run_id,)))
