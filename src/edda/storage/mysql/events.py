"""The log of events, and who waits for which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from edda.core.model import AcceptResult, MatchPaths, NewEvent, RunId, StoredEvent, Wait
from edda.errors import StorageConflictError

from .accept_sql import INSERT_KEY, accept
from .locks import LOG as LOG_BUCKET
from .locks import certify, hold_type, repeated
from .pool import Pool
from .rows import stored_event, wait
from .session import BEGIN, COMMIT, AssertionFailedError
from .staged_events import forward
from .statement import bind, inserts, quote_bytes

_ACCEPT_ATTEMPTS = 5

# One statement: the shapes fit the version.
SHAPES = b"""SELECT t.type, t.version, s.shape FROM edda_event_type t STRAIGHT_JOIN edda_shape s ON s.type = t.type
    WHERE t.type IN (%b) ORDER BY t.type, s.shape"""
FILLED_FROM = b"SELECT filled_from FROM edda_shape WHERE type = %b AND shape = %b"
NEWEST = b"SELECT COALESCE(MAX(seq), 0) FROM edda_event"
NEWEST_BEFORE = b"""SELECT seq FROM edda_event FORCE INDEX (edda_event_received)
    WHERE received_at < %b ORDER BY received_at DESC, seq DESC LIMIT 1"""
INSERT_SHAPE = b"INSERT INTO edda_shape (type, shape, filled_from) VALUES (%b, %b, %b)"
RAISE_VERSION = b"""INSERT INTO edda_event_type (type, version) VALUES (%b, 1)
    ON DUPLICATE KEY UPDATE version = version + 1"""
SHARE_EVENTS = b"SELECT seq FROM edda_event FORCE INDEX (PRIMARY) WHERE seq IN (%b) ORDER BY seq LOCK IN SHARE MODE"
OR_KEEP_KEY = b" ON DUPLICATE KEY UPDATE seq = seq"
LOWER_FILLED = b"UPDATE edda_shape SET filled_from = LEAST(filled_from, %b) WHERE type = %b AND shape = %b"
_EVENTS = b"SELECT seq, received_at, source, id, type, target, body FROM edda_event "
LOG = _EVENTS + b"FORCE INDEX (edda_event_type) WHERE type = %b AND seq > %b AND seq <= %b ORDER BY seq LIMIT %b"
FIND_EVENT = _EVENTS + b"WHERE source = %b AND id = %b"
PAGE = (
    b"SELECT e.seq, e.received_at, e.source, e.id, e.type, e.target, e.body "
    b"FROM edda_event_key k FORCE INDEX (PRIMARY) STRAIGHT_JOIN edda_event e ON e.seq = k.seq "
    b"WHERE k.`key` = %b AND k.seq > %b ORDER BY k.seq LIMIT %b"
)
WAITS = b"SELECT step, `key`, own_key, type, `match`, due, once FROM edda_wait WHERE run_id = %b ORDER BY step"


class MySQLEvents:
    _pool: Pool

    @repeated
    async def accept(
        self, post: Sequence[NewEvent], versions: Mapping[str, int], forwarded: Sequence[int] = ()
    ) -> AcceptResult | None:
        if not post:
            await self._forward(forwarded)
            return AcceptResult(frozenset(), woke=False)
        for attempt in range(_ACCEPT_ATTEMPTS):
            with suppress(AssertionFailedError):
                async with self._pool.session() as session:
                    return await accept(session, post, versions, forwarded, attempt)
        raise StorageConflictError("others keep starting the same runs, or stop waiting for the same messages")

    async def _forward(self, numbers: Sequence[int]) -> None:
        """Only that: they led to nothing."""
        if numbers:
            try:
                await self._pool.send(bind(BEGIN), *forward(numbers), bind(COMMIT))
            except AssertionFailedError as error:
                raise StorageConflictError("somebody else has forwarded one of the dispatches") from error

    async def match_paths(self, types: Sequence[str]) -> dict[str, MatchPaths]:
        versions: dict[str, int] = {}
        known: dict[str, list[str]] = defaultdict(list)
        for type, version, shape in (await self._pool.run(SHAPES, types)).rows:
            versions[type.decode()] = version
            known[type.decode()].append(shape.decode())
        return {type: MatchPaths(version, tuple(known[type])) for type, version in versions.items()}

    @repeated
    async def register_match_paths(self, type: str, shape: str) -> int:
        async with self._pool.session() as session:
            _, _, known, newest = await session.send(
                bind(BEGIN), hold_type(type, session.node), bind(FILLED_FROM, type, shape), bind(NEWEST)
            )
            if known.rows:
                await session.run(COMMIT)
                return int(known.rows[0][0])
            filled_from = int(newest.rows[0][0])
            await session.send(bind(INSERT_SHAPE, type, shape, filled_from), bind(RAISE_VERSION, type), bind(COMMIT))
            return filled_from

    @repeated
    async def backfill_keys(self, type: str, shape: str, keys: Sequence[tuple[bytes, int]], after: int) -> None:
        async with self._pool.session() as session:
            # An event that was pruned meanwhile must not be found again; one that is locked cannot be pruned.
            # Of another node's lock who prunes sees nothing: there both write a bucket.
            alone = certify(LOG_BUCKET, session.node)
            *_, there = await session.send(bind(BEGIN), *alone, bind(SHARE_EVENTS, sorted({seq for _, seq in keys})))
            kept = {row[0] for row in there.rows}
            rows = [b"(%b,%d)" % (quote_bytes(key), seq) for key, seq in sorted(set(keys)) if seq in kept]
            await session.send(
                *inserts(INSERT_KEY, rows, session.limit, OR_KEEP_KEY),
                bind(LOWER_FILLED, after, type, shape),
                bind(COMMIT),
            )

    async def events_of_type(self, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
        return tuple(map(stored_event, (await self._pool.run(LOG, type, after, upto, limit)).rows))

    async def events_under_key(self, key: bytes, after: int, limit: int) -> tuple[StoredEvent, ...]:
        return tuple(map(stored_event, (await self._pool.run(PAGE, key, after, limit)).rows))

    async def last_event(self, before: int | None = None) -> int:
        asked = bind(NEWEST) if before is None else bind(NEWEST_BEFORE, before)
        (reply,) = await self._pool.send(asked)
        return int(reply.rows[0][0]) if reply.rows else 0

    async def find_event(self, source: str, id: str) -> StoredEvent | None:
        rows = (await self._pool.run(FIND_EVENT, source, id)).rows
        return stored_event(rows[0]) if rows else None

    async def waits(self, run_id: RunId) -> tuple[Wait, ...]:
        return tuple(map(wait, (await self._pool.run(WAITS, run_id)).rows))
