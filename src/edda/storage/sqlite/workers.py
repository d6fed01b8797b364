"""Who is alive, and what happens to the runs of those who are not."""

from __future__ import annotations

from collections.abc import Callable

from edda.core.model import RunId, Takeover, WorkerId, WorkerInfo

from .connection import Connection

AT_ONCE = 5_000
"""Runs freed in one transaction, so that nobody waits long for his turn."""

_FENCE = "INSERT INTO edda_fence (worker, batch_no, moves) VALUES (?, 0, 0)"
_WORKER = "INSERT INTO edda_worker (id, service, host, pid, started_at, expires_at) VALUES (?, ?, ?, ?, ?, ?)"
_KNOWN = "SELECT 1 FROM edda_worker WHERE id = ?"
_BEAT = "UPDATE edda_worker SET expires_at = ? WHERE id = ?"
_ROSTER = "SELECT id, service, host, pid, expires_at FROM edda_worker"
_OTHERS = "SELECT id, expires_at FROM edda_worker WHERE id <> ? ORDER BY expires_at, id"
_DROP_FENCE = "DELETE FROM edda_fence WHERE worker = ?"
_DROP_WORKER = "DELETE FROM edda_worker WHERE id = ?"
_FREE_OWNED = """
UPDATE edda_sched SET owner = NULL, ready_at = ?, status = 'running'
 WHERE run_id IN (SELECT run_id FROM edda_sched WHERE owner = ? ORDER BY run_id LIMIT ?)"""
_ORPHANED = """
SELECT DISTINCT owner FROM edda_sched
 WHERE owner IS NOT NULL AND NOT EXISTS (SELECT 1 FROM edda_fence WHERE worker = owner) LIMIT 1"""
_OWNER = "SELECT owner FROM edda_sched WHERE run_id = ? AND owner IS NOT NULL"
_MOVE = "UPDATE edda_fence SET moves = moves + 1 WHERE worker = ?"
_DISOWN = "UPDATE edda_sched SET owner = NULL, ready_at = ? WHERE run_id = ? AND owner = ?"


def register(db: Connection, worker: WorkerInfo, expires_at: int, now: int) -> int:
    db.run(_FENCE, (worker.id,))
    db.run(_WORKER, (worker.id, worker.service, worker.host, worker.pid, now, expires_at))
    return now


def is_known(db: Connection, worker: WorkerId) -> bool:
    return db.row(_KNOWN, (worker,)) is not None


def beat(db: Connection, worker: WorkerId, lease: int, now: int) -> int | None:
    return now if db.run(_BEAT, (now + lease, worker)) else None


def roster(db: Connection) -> tuple[tuple[WorkerInfo, int], ...]:
    """With the ends of their leases, as far as their rows know."""
    return tuple((WorkerInfo(*info), expires_at) for *info, expires_at in db.rows(_ROSTER))


def retire(db: Connection, worker: WorkerId, now: int) -> int:
    """What is left over after the first `AT_ONCE` runs is for the orphan sweep."""
    db.run(_DROP_FENCE, (worker,))
    db.run(_DROP_WORKER, (worker,))
    return db.run(_FREE_OWNED, (now, worker, AT_ONCE))


def take_over(db: Connection, me: WorkerId, is_over: Callable[[WorkerId, int], bool], now: int) -> Takeover | None:
    others: list[tuple[WorkerId, int]] = db.rows(_OTHERS, (me,))
    for worker, expires_at in others:
        if is_over(worker, expires_at):
            return Takeover(worker, retire(db, worker, now))
    return None


def has_orphans(db: Connection) -> bool:
    return db.row(_ORPHANED) is not None


def free_orphans(db: Connection, now: int) -> int:
    """Frees runs of one owner without a fence row; 0 when there is none left."""
    row = db.row(_ORPHANED)
    return db.run(_FREE_OWNED, (now, row[0], AT_ONCE)) if row else 0


def disown(db: Connection, run_id: RunId, now: int) -> bool:
    row = db.row(_OWNER, (run_id,))
    if row is None:
        return False
    db.run(_MOVE, row)
    return db.run(_DISOWN, (now, run_id, row[0])) == 1
