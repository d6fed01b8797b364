"""Registered workers, their leases, and the take-over of a dead worker's runs."""

from __future__ import annotations

from collections.abc import Iterable

from edda.core.model import Crashes, RunId, Takeover, WorkerId, WorkerInfo, WorkerStatus, suspect_groups
from edda.errors import StorageError
from edda.storage.ports import AT_ONCE, RECLAIM
from edda.storage.shared.rows import to_run_id, to_worker_id

from .connection import BEGIN, COMMIT, MySQLConnectionFactory, MySQLPool, MySQLSession, Row
from .locks import repeated
from .statement import NOW, READ_CLOCK, Statement, bind, int_or_null, join_values, quote_text

BEAT_TIMEOUT = 4.0
TAKEOVER_LIMIT = 5_000
"""Keeps the transaction short; `free_orphans` frees the rest."""

REGISTER_FENCE = b"INSERT INTO edda_fence (worker, batch_no, ownership_version) VALUES (%b, 0, 0)"
REGISTER_CLAIMS = b"INSERT INTO edda_claim (worker, claims) VALUES (%b, 0)"
REGISTER_WORKER = (
    b"INSERT INTO edda_worker (id, service, host, pid, started_at, expires_at)"
    b" VALUES (%b, %b, %b, %b, " + NOW + b", " + NOW + b" + %b)"
)
# The SELECT tells whether the worker's row exists: the count of an UPDATE leaves out rows that did not change.
BEAT = (
    b"UPDATE edda_worker SET expires_at = " + NOW + b" + %b WHERE id = %b; "
    b"SELECT " + NOW + b" FROM edda_worker WHERE id = %b"
)
REGISTERED_WORKERS = b"SELECT id, service, host, pid, expires_at < " + NOW + b" FROM edda_worker"
FIND_LAPSED = b"SELECT id FROM edda_worker WHERE expires_at < " + NOW + b" AND id <> %b LIMIT 1 FOR UPDATE SKIP LOCKED"
DELETE_WORKER = b"DELETE FROM edda_worker WHERE id = %b"
DELETE_FENCE = b"DELETE FROM edda_fence WHERE worker = %b"
DELETE_CLAIMS = b"DELETE FROM edda_claim WHERE worker = %b"
RUNS_OF = b"SELECT run_id FROM edda_open_run WHERE owner = %b LIMIT %b"
# FORCE INDEX, here and elsewhere: rows are locked by primary key and in its order. The optimizer likes to scan a small
# table, which would wait for every other lock.
FREE = (
    b"UPDATE edda_open_run FORCE INDEX (PRIMARY) SET owner = NULL, status = 'running', alone = FALSE, ready_at = "
    + NOW
    + b" WHERE run_id IN (%b) AND owner = %b"
)
# For `Crashes.after_death`. One time for all rows: the runs of a group share one suspect_at. Without a lock: only a
# take-over and the owner, which is dead, write the deaths of a run.
RUNS_OF_DEAD = (
    b"SELECT s.run_id, s.deaths, s.deaths_alone, s.died_seq, s.alone,"
    b" (SELECT h.seq FROM edda_history h WHERE h.run_id = s.run_id AND h.generation = s.generation"
    b" ORDER BY h.seq DESC LIMIT 1), " + NOW + b" FROM edda_open_run s WHERE s.owner = %b LIMIT %b"
)
FREE_FROM_DEAD = (
    b"UPDATE (%b) v STRAIGHT_JOIN edda_open_run s FORCE INDEX (PRIMARY) ON s.run_id = v.run_id AND s.owner = v.owner"
    b" SET s.owner = NULL, s.status = 'running', s.alone = FALSE, s.deaths = v.deaths, s.deaths_alone = v.deaths_alone,"
    b" s.died_seq = v.died_seq, s.ready_at = v.ready_at, s.suspect_at = v.suspect_at"
)
KEEP_COMPANY = b"UPDATE edda_open_run SET alone = FALSE WHERE run_id IN (%b) AND owner = %b"
CLEAR_DEATHS = b"""UPDATE edda_open_run SET deaths = 0, deaths_alone = 0, died_seq = NULL, alone = FALSE
    WHERE run_id = %b AND epoch = %b AND owner IS NOT NULL"""
FIND_ORPHANED = b"""SELECT o.owner FROM (SELECT DISTINCT owner FROM edda_open_run WHERE owner IS NOT NULL) o
    LEFT JOIN edda_fence f ON f.worker = o.owner WHERE f.worker IS NULL"""
IS_AHEAD = b"SELECT MAX(created_at) > " + NOW + b" FROM edda_run"
CAP_LEASES = b"UPDATE edda_worker SET expires_at = " + NOW + b" + %b WHERE expires_at > " + NOW + b" + %b"
# An unowned run in status `running` was ready when its row was written; only a start with a delay is due later.
FIND_LATE = (
    b"SELECT s.run_id FROM edda_open_run s JOIN edda_run r ON r.id = s.run_id AND r.generation = s.generation"
    b" WHERE s.owner IS NULL AND s.status = 'running' AND s.ready_at > " + NOW + b""
    b" AND (s.epoch > 0 OR s.ready_at <= r.created_at + %b) LIMIT %b"
)
MEND_READY = (
    b"UPDATE edda_open_run FORCE INDEX (PRIMARY) SET ready_at = 0"
    b" WHERE run_id IN (%b) AND owner IS NULL AND status = 'running' AND ready_at > " + NOW
)
MEND_OUTBOX = (
    b"UPDATE edda_outbox SET due = " + NOW + b" + %b WHERE state = 'pending' AND due > " + NOW + b" + %b ORDER BY seq"
)
MEND_STAGED_EVENTS = b"UPDATE edda_staged_event SET due = " + NOW + b" + %b WHERE due > " + NOW + b" + %b ORDER BY seq"
OWNER = b"SELECT owner FROM edda_open_run WHERE run_id = %b AND owner IS NOT NULL"
BUMP_OWNERSHIP = b"UPDATE edda_fence SET ownership_version = ownership_version + 1 WHERE worker = %b"


class MySQLWorkers:
    _factory: MySQLConnectionFactory
    _pool: MySQLPool

    @repeated
    async def register(self, worker: WorkerInfo, lease: int) -> int:
        _, clock, *_ = await self._pool.send(
            bind(BEGIN),
            bind(READ_CLOCK),
            bind(REGISTER_WORKER, worker.id, worker.service, worker.host, worker.pid, lease),
            bind(REGISTER_FENCE, worker.id),
            bind(REGISTER_CLAIMS, worker.id),
            bind(COMMIT),
        )
        return int(clock.rows[0][0])

    @repeated
    async def remove_worker(self, worker: WorkerId, died: bool = False) -> None:
        async with self._pool.session() as session:
            await session.send(bind(BEGIN), *_removal(worker))
            await _free_all(session, worker, died)
            await session.run(COMMIT)

    async def registered_workers(self) -> tuple[WorkerStatus, ...]:
        rows = (await self._pool.run(REGISTERED_WORKERS)).rows
        return tuple(
            WorkerStatus(WorkerInfo(to_worker_id(id), service, host, pid), bool(lapsed))
            for id, service, host, pid, lapsed in rows
        )

    @repeated
    async def take_over(self, me: WorkerId) -> Takeover | None:
        async with self._pool.session() as session:
            _, lapsed = await session.send(bind(BEGIN), bind(FIND_LAPSED, me))
            if not lapsed.rows:
                await session.run(COMMIT)
                return None
            worker = to_worker_id(lapsed.rows[0][0])
            await session.send(*_removal(worker))
            # Reads after DELETE_FENCE, so that it sees the worker's last batch.
            moved = await _free_some(session, worker, died=True)
            await session.run(COMMIT)
            return Takeover(worker, moved)

    @repeated
    async def free_orphans(self) -> int:
        async with self._pool.session() as session:
            # A worker without a fence row never gets one again, so its runs are still orphans when they are freed.
            dead = (await session.run(FIND_ORPHANED)).rows
            return sum([await _free_all(session, to_worker_id(row[0]), died=True) for row in dead])

    @repeated
    async def release_run(self, run: RunId) -> bool:
        rows = (await self._pool.run(OWNER, run)).rows
        if not rows:
            return False
        owner = to_worker_id(rows[0][0])
        # The fence first: it waits for the owner's batch in flight, and makes the fence refuse the next one.
        *_, freed, _ = await self._pool.send(
            bind(BEGIN), bind(BUMP_OWNERSHIP, owner), bind(FREE, [run], owner), bind(COMMIT)
        )
        return freed.affected == 1

    async def is_ahead(self) -> bool:
        return bool((await self._pool.run(IS_AHEAD)).rows[0][0])

    async def mend_times(self, lease: int) -> int:
        async with self._pool.session() as session:
            await session.run(CAP_LEASES, lease, lease)
            await session.run(MEND_OUTBOX, RECLAIM, RECLAIM)
            await session.run(MEND_STAGED_EVENTS, RECLAIM, RECLAIM)
            mended = 0
            while late := (await session.run(FIND_LATE, AT_ONCE, TAKEOVER_LIMIT)).rows:
                moved = (await session.run(MEND_READY, sorted(to_run_id(row[0]) for row in late))).affected
                mended += moved
                if not moved:  # all of these runs were claimed meanwhile
                    break
            return mended

    async def keep_company(self, worker: WorkerId) -> None:
        async with self._pool.session() as session:
            owned = sorted(to_run_id(row[0]) for row in (await session.run(RUNS_OF, worker, TAKEOVER_LIMIT)).rows)
            if owned:
                await session.run(KEEP_COMPANY, owned, worker)

    async def clear_deaths(self, run: RunId, epoch: int) -> None:
        await self._pool.run(CLEAR_DEATHS, run, epoch)

    async def open_heartbeat(self) -> MySQLHeartbeat:
        return MySQLHeartbeat(self._factory)


class MySQLHeartbeat:
    """Connects on the event loop of the heartbeat's thread."""

    def __init__(self, factory: MySQLConnectionFactory) -> None:
        self._factory = factory
        self._session: MySQLSession | None = None

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        if self._session is None or not self._session.is_usable:
            self._session = await self._factory.connect(BEAT_TIMEOUT)
        try:
            renewed = (await self._session.run(BEAT, lease, worker, worker)).rows
        except StorageError:
            self._session.close_now()
            raise
        return int(renewed[0][0]) if renewed else None

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        if self._session is None or not self._session.is_usable:
            self._session = await self._factory.connect(BEAT_TIMEOUT)
        session = self._session
        try:
            await session.send(bind(BEGIN), bind(BUMP_OWNERSHIP, worker))
            rows = (await session.run(RUNS_OF, worker, TAKEOVER_LIMIT)).rows
            others = sorted(run for row in rows if (run := to_run_id(row[0])) != keep)
            moved = (await session.run(FREE, others, worker)).affected if others else 0
            await session.run(COMMIT)
        except StorageError:
            session.close_now()
            raise
        return moved

    async def close(self) -> None:
        if self._session:
            await self._session.close()


def _removal(worker: WorkerId) -> tuple[Statement, ...]:
    """Worker before fence, which is the lock order; DELETE_FENCE waits for the batch in flight."""
    return bind(DELETE_WORKER, worker), bind(DELETE_FENCE, worker), bind(DELETE_CLAIMS, worker)


async def _free_all(session: MySQLSession, worker: WorkerId, died: bool) -> int:
    total = 0
    while freed := await _free_some(session, worker, died):
        total += freed
    return total


async def _free_some(session: MySQLSession, worker: WorkerId, died: bool) -> int:
    """Read without locks, then lock by primary key: the owner's index would lock in another order."""
    if died:
        owned = (await session.run(RUNS_OF_DEAD, worker, TAKEOVER_LIMIT)).rows
        freed = await session.send(*join_values(FREE_FROM_DEAD, _deaths(owned, worker)))
        return sum(reply.affected for reply in freed)
    rows = (await session.run(RUNS_OF, worker, TAKEOVER_LIMIT)).rows
    if not rows:
        return 0
    return (await session.run(FREE, sorted(to_run_id(row[0]) for row in rows), worker)).affected


def _deaths(rows: Iterable[Row], worker: WorkerId) -> list[bytes]:
    died = [
        (to_run_id(run), Crashes(deaths, alone, seq).after_death(last or 0, bool(is_alone)), int(now))
        for run, deaths, alone, seq, is_alone, last, now in sorted(rows)
    ]
    suspects = [(run, crashes) for run, crashes, _ in died if crashes.is_suspect]
    groups = suspect_groups([crashes for _, crashes in suspects])
    group_of = {run: group for (run, _), group in zip(suspects, groups, strict=True)}
    return [_death(run, worker, crashes, now, group_of.get(run)) for run, crashes, now in died]


def _death(run: RunId, worker: WorkerId, crashes: Crashes, now: int, group: int | None) -> bytes:
    return (
        b"SELECT %b AS run_id, %b AS owner, %d AS deaths, %d AS deaths_alone, %b AS died_seq, %b AS ready_at,"
        b" %b AS suspect_at"
    ) % (
        quote_text(run),
        quote_text(worker),
        crashes.deaths,
        crashes.alone,
        int_or_null(crashes.seq),
        int_or_null(now if group is None else None),
        int_or_null(None if group is None else now - group),
    )
