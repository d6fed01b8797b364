"""Workers and their heartbeat: a lock file keeps the lease, so an idle worker writes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from edda.core.model import Crashes, RunId, Takeover, WorkerId, WorkerInfo, suspect_groups
from edda.storage.ports import AT_ONCE as IMMEDIATE
from edda.storage.ports import RECLAIM

from .connection import Connection
from .locks import WorkerLockFile
from .threads import ConnectionThread, ReadCache


class SQLitePulse:
    """Beats on a connection of its own: neither a batch in the writer's queue nor somebody's turn holds it up."""

    def __init__(
        self,
        desk: ConnectionThread,
        presence: WorkerLockFile,
        now: Callable[[], int],
        end: Callable[[ConnectionThread], Awaitable[None]] | None = None,
    ) -> None:
        self._desk = desk
        self._presence = presence
        self._memo = ReadCache()
        self._now = now
        self._end = end

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        """A worker without a file renews its row: in memory, or where somebody deleted it."""
        now = await self._desk.read(lambda db: self._renew(db, worker, lease))
        if now is not None:
            return now
        return await self._desk.transact(lambda db: beat(db, worker, lease, self._now()))

    def _renew(self, db: Connection, worker: WorkerId, lease: int) -> int | None:
        """While nobody writes nobody can have taken over. Who does so just now is stopped by nothing here: the fence
        keeps the old owner from writing, and the next beat tells it."""
        known, now = self._memo.get(db, is_known, worker), self._now()
        return now if known and self._presence.renew(worker, now + lease) else None

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        return await self._desk.transact(lambda db: hand_over(db, worker, keep, self._now()))

    async def close(self) -> None:
        end, self._end = self._end, None
        if end:
            await end(self._desk)


AT_ONCE = 5_000
"""Runs freed in one transaction, so that nobody waits long for his turn."""

_FENCE = "INSERT INTO edda_fence (worker, batch_no, moves) VALUES (?, 0, 0)"
_CLAIMS = "INSERT INTO edda_claim (worker, n) VALUES (?, 0)"
_WORKER = "INSERT INTO edda_worker (id, service, host, pid, started_at, expires_at) VALUES (?, ?, ?, ?, ?, ?)"
_KNOWN = "SELECT 1 FROM edda_worker WHERE id = ?"
_BEAT = "UPDATE edda_worker SET expires_at = ? WHERE id = ?"
_ROSTER = "SELECT id, service, host, pid, expires_at FROM edda_worker"
_OTHERS = "SELECT id, expires_at FROM edda_worker WHERE id <> ? ORDER BY expires_at, id"
_DROP_FENCE = "DELETE FROM edda_fence WHERE worker = ?"
_DROP_CLAIMS = "DELETE FROM edda_claim WHERE worker = ?"
_DROP_WORKER = "DELETE FROM edda_worker WHERE id = ?"
_FREE_OWNED = """
UPDATE edda_sched SET owner = NULL, ready_at = ?, status = 'running', alone = 0
 WHERE run_id IN (SELECT run_id FROM edda_sched WHERE owner = ? ORDER BY run_id LIMIT ?)"""
_FREE_OTHERS = """
UPDATE edda_sched SET owner = NULL, ready_at = ?, status = 'running', alone = 0
 WHERE run_id IN (SELECT run_id FROM edda_sched WHERE owner = ? AND run_id <> ? ORDER BY run_id LIMIT ?)"""
# For `Crashes.after_death`.
_OWNED_BY_DEAD = """
SELECT s.run_id, s.deaths, s.deaths_alone, s.died_seq, s.alone,
       (SELECT coalesce(max(h.seq), 0) FROM edda_hist h
         WHERE h.run_id = s.run_id AND h.gen = s.gen)
  FROM edda_sched s WHERE s.owner = ? ORDER BY s.run_id LIMIT ?"""
_FREE_FROM_DEAD = """
UPDATE edda_sched
   SET owner = NULL, status = 'running', alone = 0, ready_at = ?, suspect_at = ?, deaths = ?, deaths_alone = ?,
       died_seq = ?
 WHERE run_id = ?"""
_KEEP_COMPANY = "UPDATE edda_sched SET alone = 0 WHERE owner = ? AND alone"
_CLEAR_DEATHS = """
UPDATE edda_sched SET deaths = 0, deaths_alone = 0, died_seq = NULL, alone = 0
 WHERE run_id = ? AND epoch = ? AND owner IS NOT NULL"""
_ORPHANED = """
SELECT DISTINCT owner FROM edda_sched
 WHERE owner IS NOT NULL AND NOT EXISTS (SELECT 1 FROM edda_fence WHERE worker = owner) LIMIT 1"""
_NEWEST = "SELECT max(created_at) FROM edda_run"
_CAP_LEASES = "UPDATE edda_worker SET expires_at = ? WHERE expires_at > ?"
# Unowned and `running` is a run that was ready when its row was written: only a start with a delay is due later.
_MEND_READY = """
UPDATE edda_sched SET ready_at = 0
 WHERE owner IS NULL AND status = 'running' AND ready_at > ?1
   AND (epoch > 0 OR ready_at <= ?2 + (
        SELECT created_at FROM edda_run r WHERE r.id = edda_sched.run_id AND r.gen = edda_sched.gen))"""
_MEND_OUTBOX = "UPDATE edda_outbox SET due = ? WHERE state = 'pending' AND due > ?"
_MEND_DISPATCHES = "UPDATE edda_dispatch SET due = ? WHERE due > ?"
_OWNER = "SELECT owner FROM edda_sched WHERE run_id = ? AND owner IS NOT NULL"
_MOVE = "UPDATE edda_fence SET moves = moves + 1 WHERE worker = ?"
_DISOWN = "UPDATE edda_sched SET owner = NULL, ready_at = ?, alone = 0 WHERE run_id = ? AND owner = ?"


def register(db: Connection, worker: WorkerInfo, expires_at: int, now: int) -> int:
    db.run(_FENCE, (worker.id,))
    db.run(_CLAIMS, (worker.id,))
    db.run(_WORKER, (worker.id, worker.service, worker.host, worker.pid, now, expires_at))
    return now


def is_known(db: Connection, worker: WorkerId) -> bool:
    return db.row(_KNOWN, (worker,)) is not None


def beat(db: Connection, worker: WorkerId, lease: int, now: int) -> int | None:
    return now if db.run(_BEAT, (now + lease, worker)) else None


def roster(db: Connection) -> tuple[tuple[WorkerInfo, int], ...]:
    """With the ends of their leases, as far as their rows know."""
    return tuple((WorkerInfo(*info), expires_at) for *info, expires_at in db.rows(_ROSTER))


def retire(db: Connection, worker: WorkerId, died: bool, now: int) -> int:
    """What is left over after the first `AT_ONCE` runs is for the orphan sweep."""
    db.run(_DROP_FENCE, (worker,))
    db.run(_DROP_CLAIMS, (worker,))
    db.run(_DROP_WORKER, (worker,))
    return _free_from_dead(db, worker, now) if died else db.run(_FREE_OWNED, (now, worker, AT_ONCE))


def _free_from_dead(db: Connection, worker: WorkerId, now: int) -> int:
    died = [
        (run_id, Crashes(deaths, alone, seq).after_death(last, bool(is_alone)))
        for run_id, deaths, alone, seq, is_alone, last in db.rows(_OWNED_BY_DEAD, (worker, AT_ONCE))
    ]
    suspects = [(run_id, crashes) for run_id, crashes in died if crashes.is_suspect]
    groups = suspect_groups([crashes for _, crashes in suspects])
    suspect_at = {run_id: now - group for (run_id, _), group in zip(suspects, groups, strict=True)}
    db.run_many(
        _FREE_FROM_DEAD,
        [
            (None if one.is_suspect else now, suspect_at.get(run_id), one.deaths, one.alone, one.seq, run_id)
            for run_id, one in died
        ],
    )
    return len(died)


def keep_company(db: Connection, worker: WorkerId) -> None:
    db.run(_KEEP_COMPANY, (worker,))


def clear_deaths(db: Connection, run_id: RunId, epoch: int) -> None:
    db.run(_CLEAR_DEATHS, (run_id, epoch))


def take_over(db: Connection, me: WorkerId, is_over: Callable[[WorkerId, int], bool], now: int) -> Takeover | None:
    others: list[tuple[WorkerId, int]] = db.rows(_OTHERS, (me,))
    for worker, expires_at in others:
        if is_over(worker, expires_at):
            return Takeover(worker, retire(db, worker, True, now))
    return None


def hand_over(db: Connection, worker: WorkerId, keep: RunId | None, now: int) -> int:
    """Free the runs of a live worker, except the one that blocks its event loop."""
    db.run(_MOVE, (worker,))
    return db.run(_FREE_OTHERS, (now, worker, keep or "", AT_ONCE))


def is_ahead(db: Connection, now: int) -> bool:
    newest = db.row(_NEWEST)
    return newest is not None and newest[0] is not None and newest[0] > now


def mend_times(db: Connection, lease: int, now: int) -> int:
    db.run(_CAP_LEASES, (now + lease, now + lease))
    db.run(_MEND_OUTBOX, (now + RECLAIM, now + RECLAIM))
    db.run(_MEND_DISPATCHES, (now + RECLAIM, now + RECLAIM))
    return db.run(_MEND_READY, (now, IMMEDIATE))


def has_orphans(db: Connection) -> bool:
    return db.row(_ORPHANED) is not None


def free_orphans(db: Connection, now: int) -> int:
    """Frees runs of one owner without a fence row; 0 when there is none left."""
    row = db.row(_ORPHANED)
    return _free_from_dead(db, row[0], now) if row else 0


def disown(db: Connection, run_id: RunId, now: int) -> bool:
    row = db.row(_OWNER, (run_id,))
    if row is None:
        return False
    db.run(_MOVE, row)
    return db.run(_DISOWN, (now, run_id, row[0])) == 1
