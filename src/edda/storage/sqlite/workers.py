"""Workers, their leases and their runs. A lease is kept in the worker's lock file: an idle worker writes no row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from edda.core.model import Crashes, RunId, Takeover, WorkerId, WorkerInfo, WorkerStatus, suspect_groups
from edda.storage.ports import AT_ONCE, RECLAIM

from .connection import Connection
from .locks import WorkerLockFiles
from .threads import ConnectionThread, Part, ReadCache, read, transaction

MAX_FREED = 5_000
"""Runs freed in one transaction, so that other writers do not wait long."""

_INSERT_FENCE = "INSERT INTO edda_fence (worker, batch_no, ownership_version) VALUES (?, 0, 0)"
_INSERT_CLAIMS = "INSERT INTO edda_claim (worker, claims) VALUES (?, 0)"
_INSERT_WORKER = "INSERT INTO edda_worker (id, service, host, pid, started_at, expires_at) VALUES (?, ?, ?, ?, ?, ?)"
_IS_REGISTERED = "SELECT 1 FROM edda_worker WHERE id = ?"
_RENEW_LEASE = "UPDATE edda_worker SET expires_at = ? WHERE id = ?"
_WORKERS = "SELECT id, service, host, pid, expires_at FROM edda_worker"
_OTHERS = "SELECT id, expires_at FROM edda_worker WHERE id <> ? ORDER BY expires_at, id"
_DELETE_WORKER = (
    "DELETE FROM edda_fence WHERE worker = ?",
    "DELETE FROM edda_claim WHERE worker = ?",
    "DELETE FROM edda_worker WHERE id = ?",
)
_FREE_OWNED = """
UPDATE edda_open_run SET owner = NULL, ready_at = ?, status = 'running', alone = 0
 WHERE run_id IN (SELECT run_id FROM edda_open_run WHERE owner = ? AND run_id <> ? ORDER BY run_id LIMIT ?)"""
# For `Crashes.after_death`.
_OWNED_BY_DEAD = """
SELECT s.run_id, s.deaths, s.deaths_alone, s.died_seq, s.alone,
       (SELECT coalesce(max(h.seq), 0) FROM edda_history h
         WHERE h.run_id = s.run_id AND h.generation = s.generation)
  FROM edda_open_run s WHERE s.owner = ? ORDER BY s.run_id LIMIT ?"""
_FREE_FROM_DEAD = """
UPDATE edda_open_run
   SET owner = NULL, status = 'running', alone = 0, ready_at = ?, suspect_at = ?, deaths = ?, deaths_alone = ?,
       died_seq = ?
 WHERE run_id = ?"""
_KEEP_COMPANY = "UPDATE edda_open_run SET alone = 0 WHERE owner = ? AND alone"
_CLEAR_DEATHS = """
UPDATE edda_open_run SET deaths = 0, deaths_alone = 0, died_seq = NULL, alone = 0
 WHERE run_id = ? AND epoch = ? AND owner IS NOT NULL"""
_ORPHANED = """
SELECT DISTINCT owner FROM edda_open_run
 WHERE owner IS NOT NULL AND NOT EXISTS (SELECT 1 FROM edda_fence WHERE worker = owner) LIMIT 1"""
_NEWEST_RUN = "SELECT max(created_at) FROM edda_run"
_CAP_LEASES = "UPDATE edda_worker SET expires_at = ?1 WHERE expires_at > ?1"
# A `running` run without an owner was ready when its row was written. Only a start with a delay is due later.
_MEND_READY = """
UPDATE edda_open_run SET ready_at = 0
 WHERE owner IS NULL AND status = 'running' AND ready_at > ?1
   AND (epoch > 0 OR ready_at <= ?2 + (
        SELECT created_at FROM edda_run r WHERE r.id = edda_open_run.run_id
            AND r.generation = edda_open_run.generation))"""
_MEND_OUTBOX = "UPDATE edda_outbox SET due = ?1 WHERE state = 'pending' AND due > ?1"
_MEND_STAGED = "UPDATE edda_staged_event SET due = ?1 WHERE due > ?1"
_OWNER = "SELECT owner FROM edda_open_run WHERE run_id = ? AND owner IS NOT NULL"
_BUMP_OWNERSHIP = "UPDATE edda_fence SET ownership_version = ownership_version + 1 WHERE worker = ?"
_RELEASE_RUN = "UPDATE edda_open_run SET owner = NULL, ready_at = ?, alone = 0 WHERE run_id = ? AND owner = ?"


class SQLiteHeartbeat:
    """Renews leases on a connection of its own: it waits neither for a batch in the writer's queue nor, mostly, for the
    write lock."""

    def __init__(
        self,
        thread: ConnectionThread,
        lock_files: WorkerLockFiles,
        now: Callable[[], int],
        close_thread: Callable[[ConnectionThread], Awaitable[None]] | None = None,
    ) -> None:
        self._thread = thread
        self._lock_files = lock_files
        self._cache = ReadCache()
        self._now = now
        self._close_thread = close_thread

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        """A worker without a lock file (in memory, or the file was deleted) renews the lease in its row."""
        now = await self._thread.read(lambda db: self._renew_file(db, worker, lease))
        if now is not None:
            return now
        return await self._thread.transact(lambda db: self._renew_row(db, worker, lease))

    def _renew_file(self, db: Connection, worker: WorkerId, lease: int) -> int | None:
        """Without a transaction: a take-over that commits just now is not noticed here. The fence keeps the old owner
        from writing, and the next heartbeat finds its row gone."""
        is_registered, now = self._cache.get(db, _is_registered, worker), self._now()
        return now if is_registered and self._lock_files.renew(worker, now + lease) else None

    def _renew_row(self, db: Connection, worker: WorkerId, lease: int) -> int | None:
        now = self._now()
        return now if db.run(_RENEW_LEASE, (now + lease, worker)) else None

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        return await self._thread.transact(lambda db: self._hand_over(db, worker, keep))

    def _hand_over(self, db: Connection, worker: WorkerId, keep: RunId | None) -> int:
        db.run(_BUMP_OWNERSHIP, (worker,))
        return db.run(_FREE_OWNED, (self._now(), worker, keep or "", MAX_FREED))

    async def close(self) -> None:
        close_thread, self._close_thread = self._close_thread, None
        if close_thread:
            await close_thread(self._thread)


class SQLiteWorkers(Part):
    _lock_files: WorkerLockFiles
    _own_workers: set[WorkerId]
    """The workers that this storage registered."""
    _heartbeats: set[ConnectionThread]

    async def register(self, worker: WorkerInfo, lease: int) -> int:
        if not self._pool.in_memory:
            self._lock_files.lock(worker.id)
            self._own_workers.add(worker.id)
        try:
            return await self._register(worker, lease)
        except BaseException:  # if the row was committed all the same, any process may take the worker over at once
            self._unlock(worker.id)
            raise

    @transaction
    def _register(self, db: Connection, worker: WorkerInfo, lease: int) -> int:
        now = self._now()
        self._lock_files.renew(worker.id, now + lease)
        db.run(_INSERT_FENCE, (worker.id,))
        db.run(_INSERT_CLAIMS, (worker.id,))
        db.run(_INSERT_WORKER, (worker.id, worker.service, worker.host, worker.pid, now, now + lease))
        return now

    async def remove_worker(self, worker: WorkerId, died: bool = False) -> None:
        await self._pool.transact(lambda db: self._remove_rows(db, worker, died))
        self._remove_file(worker)

    def _remove_rows(self, db: Connection, worker: WorkerId, died: bool) -> int:
        """Frees the first `MAX_FREED` of its runs; `free_orphans` frees the rest."""
        for sql in _DELETE_WORKER:
            db.run(sql, (worker,))
        if died:
            return _free_from_dead(db, worker, self._now())
        return db.run(_FREE_OWNED, (self._now(), worker, "", MAX_FREED))

    async def registered_workers(self) -> tuple[WorkerStatus, ...]:
        known = await self._pool.cached_read(_workers)
        return tuple(WorkerStatus(info, self._is_lapsed(info.id, expires_at)) for info, expires_at in known)

    def _is_lapsed(self, worker: WorkerId, expires_at: int) -> bool:
        return self._lock_files.lease_is_over(worker, expires_at, self._now())

    async def take_over(self, me: WorkerId) -> Takeover | None:
        takeover = await self._take_over(me)
        if takeover:
            self._remove_file(takeover.worker)
        return takeover

    @transaction
    def _take_over(self, db: Connection, me: WorkerId) -> Takeover | None:
        others: list[tuple[WorkerId, int]] = db.rows(_OTHERS, (me,))
        for worker, expires_at in others:
            if self._is_lapsed(worker, expires_at):
                return Takeover(worker, self._remove_rows(db, worker, died=True))
        return None

    async def free_orphans(self) -> int:
        total = 0
        while await self._pool.cached_read(_orphaned_by) is not None:
            total += await self._free_orphans()
        return total

    @transaction
    def _free_orphans(self, db: Connection) -> int:
        owner = _orphaned_by(db)
        return 0 if owner is None else _free_from_dead(db, owner, self._now())

    @transaction
    def release_run(self, db: Connection, run_id: RunId) -> bool:
        row = db.row(_OWNER, (run_id,))
        if row is None:
            return False
        db.run(_BUMP_OWNERSHIP, row)
        return db.run(_RELEASE_RUN, (self._now(), run_id, row[0])) == 1

    @read
    def is_ahead(self, db: Connection) -> bool:
        row = db.row(_NEWEST_RUN)
        return row is not None and row[0] is not None and row[0] > self._now()

    async def mend_times(self, lease: int) -> int:
        for info, _ in await self._pool.read(_workers):
            self._lock_files.cap(info.id, self._now() + lease)
        return await self._mend_times(lease)

    @transaction
    def _mend_times(self, db: Connection, lease: int) -> int:
        now = self._now()
        db.run(_CAP_LEASES, (now + lease,))
        db.run(_MEND_OUTBOX, (now + RECLAIM,))
        db.run(_MEND_STAGED, (now + RECLAIM,))
        return db.run(_MEND_READY, (now, AT_ONCE))

    @transaction
    def keep_company(self, db: Connection, worker: WorkerId) -> None:
        db.run(_KEEP_COMPANY, (worker,))

    @transaction
    def clear_deaths(self, db: Connection, run_id: RunId, epoch: int) -> None:
        db.run(_CLEAR_DEATHS, (run_id, epoch))

    async def open_heartbeat(self) -> SQLiteHeartbeat:
        writer = self._pool.writer
        if self._pool.in_memory:
            return SQLiteHeartbeat(writer, self._lock_files, self._now)
        thread = self._pool.connection_thread("heartbeat")
        self._heartbeats.add(thread)
        return SQLiteHeartbeat(thread, self._lock_files, self._now, self._close_heartbeat)

    async def _close_heartbeat(self, thread: ConnectionThread) -> None:
        self._heartbeats.discard(thread)
        await thread.close()

    def _unlock_own_workers(self) -> None:
        """After the threads have ended: a worker whose thread still writes must not look dead."""
        for worker in tuple(self._own_workers):
            self._unlock(worker)

    def _remove_file(self, worker: WorkerId) -> None:
        """Unlocks it too: the worker that was taken over may be one of this process."""
        self._unlock(worker)
        self._lock_files.remove(worker)

    def _unlock(self, worker: WorkerId) -> None:
        self._own_workers.discard(worker)
        self._lock_files.release(worker)


def _is_registered(db: Connection, worker: WorkerId) -> bool:
    return db.row(_IS_REGISTERED, (worker,)) is not None


def _workers(db: Connection) -> tuple[tuple[WorkerInfo, int], ...]:
    """Each with the end of the lease in its row."""
    return tuple((WorkerInfo(*info), expires_at) for *info, expires_at in db.rows(_WORKERS))


def _free_from_dead(db: Connection, worker: WorkerId, now: int) -> int:
    died = [
        (run_id, Crashes(deaths, alone, seq).after_death(last, bool(is_alone)))
        for run_id, deaths, alone, seq, is_alone, last in db.rows(_OWNED_BY_DEAD, (worker, MAX_FREED))
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


def _orphaned_by(db: Connection) -> WorkerId | None:
    """An owner without a fence row; None if there is none."""
    row = db.row(_ORPHANED)
    return row[0] if row else None
