"""What is on its way into the log of events."""

from __future__ import annotations

from collections.abc import Collection

from edda.core.model import StagedEventRow
from edda.errors import StorageConflictError

from .clock import with_now
from .locks import lock_key
from .pool import Pool
from .rows import dispatch_of
from .session import Session

DISPATCHES = with_now("SELECT seq, kind, body FROM edda_dispatch WHERE due <= (SELECT {now}) ORDER BY seq LIMIT $1")

# Sorted: two who forward the same ones wait for each other, but never in a circle.
FORWARD = """
WITH mine AS MATERIALIZED (SELECT seq FROM edda_dispatch WHERE seq = ANY ($1::bigint[]) ORDER BY seq FOR UPDATE)
DELETE FROM edda_dispatch d USING mine WHERE d.seq = mine.seq"""

TAKE = with_now("""
WITH first AS MATERIALIZED (
         SELECT k.key, k.seq, e.body FROM edda_event_key k JOIN edda_event e USING (seq)
          WHERE k.key = $1 ORDER BY k.seq LIMIT 1),
     taken AS (DELETE FROM edda_event_key k USING first f WHERE k.key = f.key AND k.seq = f.seq)
INSERT INTO edda_dispatch (kind, body, due) SELECT 'offer', body, {now} + $2 FROM first
RETURNING seq, kind, body""")


class PostgresDispatches:
    _pool: Pool

    async def staged_events(self, limit: int) -> tuple[StagedEventRow, ...]:
        async with self._pool.session() as session:
            rows = await session.fetch(DISPATCHES, limit)
        return tuple(dispatch_of(row) for row in rows)

    async def take_message(self, key: bytes, lease: int) -> StagedEventRow | None:
        async with self._pool.session() as session, session.transaction(lock_key(key)):
            rows = await session.fetch(TAKE, key, lease)
        return dispatch_of(rows[0]) if rows else None


async def forward(session: Session, numbers: Collection[int]) -> None:
    """After the runs are locked, as in the transaction of a step, which deletes what it has used."""
    if await session.execute(FORWARD, numbers) != len(set(numbers)):
        raise StorageConflictError("somebody else has forwarded a dispatch of this post")
