"""Who is alive, and what becomes of the runs of those who are not."""

from __future__ import annotations

from edda.core.model import Registered, RunId, Takeover, WorkerId, WorkerInfo
from edda.errors import StorageError

from .clock import NOW, READ_CLOCK
from .pool import Address, Pool
from .rows import run_id, worker_id
from .session import BEGIN, COMMIT, Session
from .statement import Statement, bind

BEAT_PATIENCE = 4.0
TAKEOVER_LIMIT = 5_000
"""More would be a long transaction; `free_orphans` finds the rest."""

REGISTER_FENCE = b"INSERT INTO edda_fence (worker, batch_no, moves) VALUES (%b, 0, 0)"
REGISTER_WORKER = (
    b"INSERT INTO edda_worker (id, service, host, pid, started_at, expires_at)"
    b" VALUES (%b, %b, %b, %b, " + NOW + b", " + NOW + b" + %b)"
)
# The row says whether the worker is still there: the count of an UPDATE leaves out rows that did not change.
BEAT = (
    b"UPDATE edda_worker SET expires_at = " + NOW + b" + %b WHERE id = %b; "
    b"SELECT " + NOW + b" FROM edda_worker WHERE id = %b"
)
ROSTER = b"SELECT id, service, host, pid, expires_at < " + NOW + b" FROM edda_worker"
FIND_LAPSED = b"SELECT id FROM edda_worker WHERE expires_at < " + NOW + b" AND id <> %b LIMIT 1 FOR UPDATE SKIP LOCKED"
DELETE_WORKER = b"DELETE FROM edda_worker WHERE id = %b"
DELETE_FENCE = b"DELETE FROM edda_fence WHERE worker = %b"
RUNS_OF = b"SELECT run_id FROM edda_sched WHERE owner = %b LIMIT %b"
# FORCE INDEX, here and elsewhere: rows are locked by primary key and in its order, and a scan of the whole table,
# which the optimizer likes while it is small, would wait for everybody's locks.
FREE = (
    b"UPDATE edda_sched FORCE INDEX (PRIMARY) SET owner = NULL, status = 'running', ready_at = " + NOW + b""
    b" WHERE run_id IN (%b) AND owner = %b"
)
FIND_ORPHANED = b"""SELECT o.owner FROM (SELECT DISTINCT owner FROM edda_sched WHERE owner IS NOT NULL) o
    LEFT JOIN edda_fence f ON f.worker = o.owner WHERE f.worker IS NULL"""
OWNER = b"SELECT owner FROM edda_sched WHERE run_id = %b AND owner IS NOT NULL"
BUMP_MOVES = b"UPDATE edda_fence SET moves = moves + 1 WHERE worker = %b"


class MySQLWorkers:
    _address: Address
    _pool: Pool

    async def register(self, worker: WorkerInfo, lease: int) -> int:
        _, clock, *_ = await self._pool.send(
            bind(BEGIN),
            bind(READ_CLOCK),
            bind(REGISTER_WORKER, worker.id, worker.service, worker.host, worker.pid, lease),
            bind(REGISTER_FENCE, worker.id),
            bind(COMMIT),
        )
        return int(clock.rows[0][0])

    async def retire(self, worker: WorkerId) -> None:
        async with self._pool.session() as session:
            await session.send(bind(BEGIN), *_removal(worker))
            await _free_all(session, worker)
            await session.run(COMMIT)

    async def roster(self) -> tuple[Registered, ...]:
        rows = (await self._pool.run(ROSTER)).rows
        return tuple(
            Registered(WorkerInfo(worker_id(id), service, host, pid), bool(lapsed))
            for id, service, host, pid, lapsed in rows
        )

    async def take_over(self, me: WorkerId) -> Takeover | None:
        async with self._pool.session() as session:
            _, lapsed = await session.send(bind(BEGIN), bind(FIND_LAPSED, me))
            if not lapsed.rows:
                await session.run(COMMIT)
                return None
            worker = worker_id(lapsed.rows[0][0])
            await session.send(*_removal(worker))
            moved = await _free_some(session, worker)  # reads after the fence is gone: sees what its last batch did
            await session.run(COMMIT)
            return Takeover(worker, moved)

    async def free_orphans(self) -> int:
        async with self._pool.session() as session:
            # A worker without a fence never gets one again: what is its now is still an orphan when it is freed.
            dead = (await session.run(FIND_ORPHANED)).rows
            return sum([await _free_all(session, worker_id(row[0])) for row in dead])

    async def disown(self, run: RunId) -> bool:
        rows = (await self._pool.run(OWNER, run)).rows
        if not rows:
            return False
        owner = worker_id(rows[0][0])
        # The fence first: the owner's batch in flight ends before the run moves, and its next one is refused.
        *_, freed, _ = await self._pool.send(
            bind(BEGIN), bind(BUMP_MOVES, owner), bind(FREE, [run], owner), bind(COMMIT)
        )
        return freed.affected == 1

    async def pulse(self) -> MySQLPulse:
        return MySQLPulse(self._address)


class MySQLPulse:
    """Its connection is made by, and for, the loop that beats."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._session: Session | None = None

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        if self._session is None or not self._session.alive:
            self._session = await self._address.connect(BEAT_PATIENCE)
        try:
            renewed = (await self._session.run(BEAT, lease, worker, worker)).rows
        except StorageError:
            self._session.abort()
            raise
        return int(renewed[0][0]) if renewed else None

    async def close(self) -> None:
        if self._session:
            await self._session.close()


def _removal(worker: WorkerId) -> tuple[Statement, Statement]:
    """Worker before fence, as everybody locks them; the fence waits for the batch in flight."""
    return bind(DELETE_WORKER, worker), bind(DELETE_FENCE, worker)


async def _free_all(session: Session, worker: WorkerId) -> int:
    total = 0
    while freed := await _free_some(session, worker):
        total += freed
    return total


async def _free_some(session: Session, worker: WorkerId) -> int:
    """Read without locks, then lock by primary key: by the owner's index the order would be another one."""
    rows = (await session.run(RUNS_OF, worker, TAKEOVER_LIMIT)).rows
    if not rows:
        return 0
    return (await session.run(FREE, sorted(run_id(row[0]) for row in rows), worker)).affected
