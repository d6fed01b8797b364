"""The event log, match paths, waits, and staged events."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from edda.core.model import AcceptResult, MatchPaths, NewEvent, RunId, StagedEventRow, StoredEvent, Wait
from edda.errors import StorageConflictError
from edda.storage.shared.rows import to_staged_event, to_stored_event, to_wait

from .accept_sql import AcceptBatch
from .connection import BEGIN, PostgresSession, with_now
from .locks import lock_event_keys, lock_key, lock_type
from .pool import PostgresPool

MATCH_PATHS = """
SELECT t.type, t.version, ARRAY(SELECT s.paths FROM edda_match_paths s WHERE s.type = t.type ORDER BY s.paths) AS known
  FROM edda_event_type t WHERE t.type = ANY ($1::text[])"""

# The lock of the type excludes acceptors, so this statement sees every stored event of the type.
REGISTER_PATHS = """
WITH inserted AS (
         INSERT INTO edda_match_paths (type, paths, filled_from)
         SELECT $1, $2, coalesce(max(seq), 0) FROM edda_event
         ON CONFLICT DO NOTHING RETURNING filled_from),
     raised AS (
         INSERT INTO edda_event_type AS t (type, version) SELECT $1, 1 FROM inserted
         ON CONFLICT (type) DO UPDATE SET version = t.version + 1)
SELECT filled_from FROM inserted
UNION ALL SELECT filled_from FROM edda_match_paths WHERE type = $1 AND paths = $2"""

# FOR KEY SHARE: an event that is being pruned gets no new keys, because they would outlive it.
BACKFILL_KEYS = """
WITH present AS MATERIALIZED (
         SELECT u.key, u.seq FROM unnest($3::bytea[], $4::bigint[]) u (key, seq) JOIN edda_event e USING (seq)
          ORDER BY u.key, u.seq FOR KEY SHARE OF e),
     filled AS (INSERT INTO edda_event_key (key, seq) SELECT key, seq FROM present ON CONFLICT DO NOTHING)
UPDATE edda_match_paths SET filled_from = least(filled_from, $5) WHERE type = $1 AND paths = $2"""

_EVENT = "SELECT seq, received_at, source, id, type, target, body FROM edda_event"
EVENTS_OF_TYPE = f"{_EVENT} WHERE type = $1 AND seq > $2 AND seq <= $3 ORDER BY seq LIMIT $4"
FIND_EVENT = f"{_EVENT} WHERE source = $1 AND id = $2"

EVENTS_UNDER_KEY = """
SELECT e.seq, e.received_at, e.source, e.id, e.type, e.target, e.body
  FROM edda_event_key k JOIN edda_event e ON e.seq = k.seq
 WHERE k.key = $1 AND k.seq > $2 ORDER BY k.seq LIMIT $3"""

LAST_EVENT = "SELECT seq FROM edda_event ORDER BY seq DESC LIMIT 1"
LAST_EVENT_BEFORE = "SELECT seq FROM edda_event WHERE received_at < $1 ORDER BY received_at DESC, seq DESC LIMIT 1"

WAITS = "SELECT step, key, target_key, type, match, due, exclusive FROM edda_wait WHERE run_id = $1 ORDER BY step"

STAGED_EVENTS = with_now(
    "SELECT seq, kind, body FROM edda_staged_event WHERE due <= (SELECT {now}) ORDER BY seq LIMIT $1"
)

# Sorted: two processes that move the same rows wait for each other instead of deadlocking.
DELETE_STAGED = """
WITH locked AS MATERIALIZED (SELECT seq FROM edda_staged_event WHERE seq = ANY ($1::bigint[]) ORDER BY seq FOR UPDATE)
DELETE FROM edda_staged_event d USING locked WHERE d.seq = locked.seq"""

TAKE_MESSAGE = with_now("""
WITH first AS MATERIALIZED (
         SELECT k.key, k.seq, e.body FROM edda_event_key k JOIN edda_event e USING (seq)
          WHERE k.key = $1 ORDER BY k.seq LIMIT 1),
     taken AS (DELETE FROM edda_event_key k USING first f WHERE k.key = f.key AND k.seq = f.seq)
INSERT INTO edda_staged_event (kind, body, due) SELECT 'redelivery', body, {now} + $2 FROM first
RETURNING seq, kind, body""")


class PostgresEvents:
    _pool: PostgresPool

    async def accept(
        self, events: Sequence[NewEvent], versions: Mapping[str, int], staged: Sequence[int] = ()
    ) -> AcceptResult | None:
        if not events and not staged:
            return AcceptResult(frozenset(), woke=False)
        batch = AcceptBatch.of(events)
        opening = lock_event_keys(batch.types, batch.keys) if events else BEGIN
        async with self._pool.session() as session, session.transaction(opening):
            accepted = await _accept(session, batch, versions) if events else AcceptResult(frozenset(), woke=False)
            if accepted is not None and staged:
                await delete_staged(session, staged)
        return accepted

    async def match_paths(self, types: Sequence[str]) -> dict[str, MatchPaths]:
        rows = await self._pool.fetch(MATCH_PATHS, types)
        return {row["type"]: MatchPaths(row["version"], tuple(row["known"])) for row in rows}

    async def register_match_paths(self, type: str, paths: str) -> int:
        async with self._pool.session() as session, session.transaction(lock_type(type)):
            filled_from: int = (await session.fetch(REGISTER_PATHS, type, paths))[0][0]
        return filled_from

    async def backfill_keys(self, type: str, paths: str, keys: Sequence[tuple[bytes, int]], after: int) -> None:
        names, numbers = [key for key, _ in keys], [seq for _, seq in keys]
        await self._pool.execute(BACKFILL_KEYS, type, paths, names, numbers, after)

    async def events_of_type(self, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
        rows = await self._pool.fetch(EVENTS_OF_TYPE, type, after, upto, limit)
        return tuple(to_stored_event(row) for row in rows)

    async def events_under_key(self, key: bytes, after: int, limit: int) -> tuple[StoredEvent, ...]:
        rows = await self._pool.fetch(EVENTS_UNDER_KEY, key, after, limit)
        return tuple(to_stored_event(row) for row in rows)

    async def last_event(self, before: int | None = None) -> int:
        if before is None:
            rows = await self._pool.fetch(LAST_EVENT)
        else:
            rows = await self._pool.fetch(LAST_EVENT_BEFORE, before)
        return rows[0][0] if rows else 0

    async def find_event(self, source: str, id: str) -> StoredEvent | None:
        rows = await self._pool.fetch(FIND_EVENT, source, id)
        return to_stored_event(rows[0]) if rows else None

    async def waits(self, run_id: RunId) -> tuple[Wait, ...]:
        rows = await self._pool.fetch(WAITS, run_id)
        return tuple(to_wait(row) for row in rows)

    async def staged_events(self, limit: int) -> tuple[StagedEventRow, ...]:
        rows = await self._pool.fetch(STAGED_EVENTS, limit)
        return tuple(to_staged_event(row) for row in rows)

    async def take_message(self, key: bytes, lease: int) -> StagedEventRow | None:
        async with self._pool.session() as session, session.transaction(lock_key(key)):
            rows = await session.fetch(TAKE_MESSAGE, key, lease)
        return to_staged_event(rows[0]) if rows else None


async def _accept(session: PostgresSession, batch: AcceptBatch, versions: Mapping[str, int]) -> AcceptResult | None:
    statement, values = batch.compose(versions)
    row = (await session.fetch(statement, *values))[0]
    if not row["current"]:
        return None  # nothing was written
    numbers = dict(zip(row["places"], row["numbers"], strict=True))
    woke = row["woke"]
    while row["more"] or row.get("left_over"):
        statement, values = batch.compose_more(numbers, row.get("left_over") or ())
        row = (await session.fetch(statement, *values))[0]
        woke = woke or row["woke"]
    return AcceptResult(frozenset(numbers), woke)


async def delete_staged(session: PostgresSession, numbers: Collection[int]) -> None:
    """After the runs are locked: a step's transaction, which deletes the redeliveries it used, locks in this order
    too."""
    if await session.execute(DELETE_STAGED, numbers) != len(set(numbers)):
        raise StorageConflictError("another process has moved one of the staged events into the log")
