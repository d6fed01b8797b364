"""The log of events, and who waits for which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edda.core.model import AcceptResult, MatchPaths, NewEvent, RunId, StoredEvent, Wait

from .accept_sql import AcceptBatch
from .locks import lock_event_keys, lock_type
from .pool import Pool
from .rows import event_of, wait_of
from .session import BEGIN, Session
from .staged_events import forward

SHAPES = """
SELECT t.type, t.version, ARRAY(SELECT s.shape FROM edda_shape s WHERE s.type = t.type ORDER BY s.shape) AS known
  FROM edda_event_type t WHERE t.type = ANY ($1::text[])"""

# All events of the type that are stored can be seen here, for nobody else stores one now.
LEARN = """
WITH learned AS (
         INSERT INTO edda_shape (type, shape, filled_from)
         SELECT $1, $2, coalesce(max(seq), 0) FROM edda_event
         ON CONFLICT DO NOTHING RETURNING filled_from),
     raised AS (
         INSERT INTO edda_event_type AS t (type, version) SELECT $1, 1 FROM learned
         ON CONFLICT (type) DO UPDATE SET version = t.version + 1)
SELECT filled_from FROM learned
UNION ALL SELECT filled_from FROM edda_shape WHERE type = $1 AND shape = $2"""

# An event that is being pruned gets no new keys: they would stay behind.
FILL = """
WITH present AS MATERIALIZED (
         SELECT u.key, u.seq FROM unnest($3::bytea[], $4::bigint[]) u (key, seq) JOIN edda_event e USING (seq)
          ORDER BY u.key, u.seq FOR KEY SHARE OF e),
     filled AS (INSERT INTO edda_event_key (key, seq) SELECT key, seq FROM present ON CONFLICT DO NOTHING)
UPDATE edda_shape SET filled_from = least(filled_from, $5) WHERE type = $1 AND shape = $2"""

_EVENT = "SELECT seq, received_at, source, id, type, target, body FROM edda_event"
LOG = f"{_EVENT} WHERE type = $1 AND seq > $2 AND seq <= $3 ORDER BY seq LIMIT $4"
FIND_EVENT = f"{_EVENT} WHERE source = $1 AND id = $2"

PAGE = """
SELECT e.seq, e.received_at, e.source, e.id, e.type, e.target, e.body
  FROM edda_event_key k JOIN edda_event e ON e.seq = k.seq
 WHERE k.key = $1 AND k.seq > $2 ORDER BY k.seq LIMIT $3"""

LAST_EVENT = "SELECT seq FROM edda_event ORDER BY seq DESC LIMIT 1"
LAST_EVENT_BEFORE = "SELECT seq FROM edda_event WHERE received_at < $1 ORDER BY received_at DESC, seq DESC LIMIT 1"

WAITS = "SELECT step, key, own_key, type, match, due, once FROM edda_wait WHERE run_id = $1 ORDER BY step"


class PostgresEvents:
    _pool: Pool

    async def accept(
        self, post: Sequence[NewEvent], versions: Mapping[str, int], forwarded: Sequence[int] = ()
    ) -> AcceptResult | None:
        if not post and not forwarded:
            return AcceptResult(frozenset(), woke=False)
        events = AcceptBatch.of(post)
        opening = lock_event_keys(events.types, events.keys) if post else BEGIN
        async with self._pool.session() as session, session.transaction(opening):
            accepted = await _accept(session, events, versions) if post else AcceptResult(frozenset(), woke=False)
            if accepted is not None and forwarded:
                await forward(session, forwarded)
        return accepted

    async def match_paths(self, types: Sequence[str]) -> dict[str, MatchPaths]:
        async with self._pool.session() as session:
            rows = await session.fetch(SHAPES, types)
        return {row["type"]: MatchPaths(row["version"], tuple(row["known"])) for row in rows}

    async def register_match_paths(self, type: str, shape: str) -> int:
        async with self._pool.session() as session, session.transaction(lock_type(type)):
            filled_from: int = (await session.fetch(LEARN, type, shape))[0][0]
        return filled_from

    async def backfill_keys(self, type: str, shape: str, keys: Sequence[tuple[bytes, int]], after: int) -> None:
        names, numbers = [key for key, _ in keys], [seq for _, seq in keys]
        async with self._pool.session() as session:
            await session.execute(FILL, type, shape, names, numbers, after)

    async def events_of_type(self, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
        async with self._pool.session() as session:
            rows = await session.fetch(LOG, type, after, upto, limit)
        return tuple(event_of(row) for row in rows)

    async def events_under_key(self, key: bytes, after: int, limit: int) -> tuple[StoredEvent, ...]:
        async with self._pool.session() as session:
            rows = await session.fetch(PAGE, key, after, limit)
        return tuple(event_of(row) for row in rows)

    async def last_event(self, before: int | None = None) -> int:
        async with self._pool.session() as session:
            if before is None:
                rows = await session.fetch(LAST_EVENT)
            else:
                rows = await session.fetch(LAST_EVENT_BEFORE, before)
        return rows[0][0] if rows else 0

    async def find_event(self, source: str, id: str) -> StoredEvent | None:
        async with self._pool.session() as session:
            rows = await session.fetch(FIND_EVENT, source, id)
        return event_of(rows[0]) if rows else None

    async def waits(self, run_id: RunId) -> tuple[Wait, ...]:
        async with self._pool.session() as session:
            rows = await session.fetch(WAITS, run_id)
        return tuple(wait_of(row) for row in rows)


async def _accept(session: Session, post: AcceptBatch, versions: Mapping[str, int]) -> AcceptResult | None:
    statement, values = post.compose(versions)
    row = (await session.fetch(statement, *values))[0]
    if not row["current"]:
        return None  # nothing was written
    numbers = dict(zip(row["places"], row["numbers"], strict=True))
    woke = row["woke"]
    while row["more"] or row.get("left_over"):
        statement, values = post.compose_more(numbers, row.get("left_over") or ())
        row = (await session.fetch(statement, *values))[0]
        woke = woke or row["woke"]
    return AcceptResult(frozenset(numbers), woke)
