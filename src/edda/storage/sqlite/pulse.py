"""The heartbeat of a worker: its lease is kept by its file, so that a database at rest is left alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from edda.core.model import RunId, WorkerId

from . import workers
from .connection import Connection
from .desk import ConnectionThread
from .lock import WorkerLockFile
from .memo import ReadCache


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
        return await self._desk.transact(lambda db: workers.beat(db, worker, lease, self._now()))

    def _renew(self, db: Connection, worker: WorkerId, lease: int) -> int | None:
        """While nobody writes nobody can have taken over. Who does so just now is stopped by nothing here: the fence
        keeps the old owner from writing, and the next beat tells it."""
        known, now = self._memo.get(db, workers.is_known, worker), self._now()
        return now if known and self._presence.renew(worker, now + lease) else None

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        return await self._desk.transact(lambda db: workers.hand_over(db, worker, keep, self._now()))

    async def close(self) -> None:
        end, self._end = self._end, None
        if end:
            await end(self._desk)
