"""The event log, match paths, waits, and staged events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from edda.core.model import (
    AcceptResult,
    MatchPaths,
    NewEvent,
    RunId,
    StagedEvent,
    StagedEventRow,
    StagedKind,
    StoredEvent,
    Wait,
)
from edda.errors import StorageConflictError
from edda.storage.shared.rows import to_match_paths, to_staged_event, to_stored_event, to_wait

from .accept_sql import ALREADY_MOVED, INSERT_KEY, accept, delete_staged
from .connection import ASSERT_ROW_COUNT, BEGIN, COMMIT, AssertionFailedError, MySQLPool
from .locks import EVENT_LOG, certify, lock_exclusive, lock_type, of_keys, repeated
from .statement import NOW, bind, inserts, quote_bytes, quote_text

_ACCEPT_ATTEMPTS = 5

# One statement, so that the paths belong to the version.
MATCH_PATHS = b"""SELECT t.type, t.version, s.paths FROM edda_event_type t STRAIGHT_JOIN edda_match_paths s
    ON s.type = t.type
    WHERE t.type IN (%b) ORDER BY t.type, s.paths"""
FILLED_FROM = b"SELECT filled_from FROM edda_match_paths WHERE type = %b AND paths = %b"
LAST_EVENT = b"SELECT COALESCE(MAX(seq), 0) FROM edda_event"
LAST_EVENT_BEFORE = b"""SELECT seq FROM edda_event FORCE INDEX (edda_event_received)
    WHERE received_at < %b ORDER BY received_at DESC, seq DESC LIMIT 1"""
INSERT_MATCH_PATHS = b"INSERT INTO edda_match_paths (type, paths, filled_from) VALUES (%b, %b, %b)"
RAISE_VERSION = b"""INSERT INTO edda_event_type (type, version) VALUES (%b, 1)
    ON DUPLICATE KEY UPDATE version = version + 1"""
LOCK_EVENTS_SHARED = (
    b"SELECT seq FROM edda_event FORCE INDEX (PRIMARY) WHERE seq IN (%b) ORDER BY seq LOCK IN SHARE MODE"
)
KEEP_EXISTING_KEY = b" ON DUPLICATE KEY UPDATE seq = seq"
LOWER_FILLED = b"UPDATE edda_match_paths SET filled_from = LEAST(filled_from, %b) WHERE type = %b AND paths = %b"
_EVENTS = b"SELECT seq, received_at, source, id, type, target, body FROM edda_event "
EVENTS_OF_TYPE = (
    _EVENTS + b"FORCE INDEX (edda_event_type) WHERE type = %b AND seq > %b AND seq <= %b ORDER BY seq LIMIT %b"
)
FIND_EVENT = _EVENTS + b"WHERE source = %b AND id = %b"
EVENTS_UNDER_KEY = (
    b"SELECT e.seq, e.received_at, e.source, e.id, e.type, e.target, e.body "
    b"FROM edda_event_key k FORCE INDEX (PRIMARY) STRAIGHT_JOIN edda_event e ON e.seq = k.seq "
    b"WHERE k.`key` = %b AND k.seq > %b ORDER BY k.seq LIMIT %b"
)
WAITS = b"SELECT step, `key`, target_key, type, `match`, due, exclusive FROM edda_wait WHERE run_id = %b ORDER BY step"

INSERT_STAGED = b"INSERT INTO edda_staged_event (kind, body) VALUES "
STAGED_EVENTS = b"SELECT seq, kind, body FROM edda_staged_event WHERE due <= " + NOW + b" ORDER BY seq LIMIT %b"

FIND_FIRST = b"SELECT seq FROM edda_event_key FORCE INDEX (PRIMARY) WHERE `key` = %b ORDER BY seq LIMIT 1"
TAKE = b"DELETE FROM edda_event_key WHERE `key` = %b AND seq = %b"
INSERT_REDELIVERY = (
    b"INSERT INTO edda_staged_event (kind, body, due) SELECT 'redelivery', body, "
    + NOW
    + b" + %b FROM edda_event WHERE seq = %b"
)
READ_REDELIVERY = b"SELECT seq, kind, body FROM edda_staged_event WHERE seq = LAST_INSERT_ID()"

_KINDS = {kind: quote_text(kind) for kind in StagedKind}


class MySQLEvents:
    _pool: MySQLPool

    @repeated
    async def accept(
        self, events: Sequence[NewEvent], versions: Mapping[str, int], staged: Sequence[int] = ()
    ) -> AcceptResult | None:
        if not events:  # no event was made from the staged ones
            if staged:
                try:
                    await self._pool.send(bind(BEGIN), *delete_staged(staged), bind(COMMIT))
                except AssertionFailedError as error:
                    raise StorageConflictError(ALREADY_MOVED) from error
            return AcceptResult(frozenset(), woke=False)
        for attempt in range(_ACCEPT_ATTEMPTS):
            with suppress(AssertionFailedError):
                async with self._pool.session() as session:
                    return await accept(session, events, versions, staged, attempt)
        raise StorageConflictError("other processes keep starting the same runs, or ending waits for the same messages")

    async def match_paths(self, types: Sequence[str]) -> dict[str, MatchPaths]:
        return to_match_paths((await self._pool.run(MATCH_PATHS, types)).rows)

    @repeated
    async def register_match_paths(self, type: str, paths: str) -> int:
        async with self._pool.session() as session:
            _, _, known, newest = await session.send(
                bind(BEGIN), lock_type(type, session.node), bind(FILLED_FROM, type, paths), bind(LAST_EVENT)
            )
            if known.rows:
                await session.run(COMMIT)
                return int(known.rows[0][0])
            filled_from = int(newest.rows[0][0])
            await session.send(
                bind(INSERT_MATCH_PATHS, type, paths, filled_from), bind(RAISE_VERSION, type), bind(COMMIT)
            )
            return filled_from

    @repeated
    async def backfill_keys(self, type: str, paths: str, keys: Sequence[tuple[bytes, int]], after: int) -> None:
        async with self._pool.session() as session:
            # A pruned event must get no new keys, and a locked event cannot be pruned. On a cluster pruning on another
            # node does not see the lock, so both write a bucket.
            certified = certify(EVENT_LOG, session.node)
            *_, locked = await session.send(
                bind(BEGIN), *certified, bind(LOCK_EVENTS_SHARED, sorted({seq for _, seq in keys}))
            )
            existing = {row[0] for row in locked.rows}
            rows = [b"(%b,%d)" % (quote_bytes(key), seq) for key, seq in sorted(set(keys)) if seq in existing]
            await session.send(
                *inserts(INSERT_KEY, rows, session.limit, KEEP_EXISTING_KEY),
                bind(LOWER_FILLED, after, type, paths),
                bind(COMMIT),
            )

    async def events_of_type(self, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
        return tuple(map(to_stored_event, (await self._pool.run(EVENTS_OF_TYPE, type, after, upto, limit)).rows))

    async def events_under_key(self, key: bytes, after: int, limit: int) -> tuple[StoredEvent, ...]:
        return tuple(map(to_stored_event, (await self._pool.run(EVENTS_UNDER_KEY, key, after, limit)).rows))

    async def last_event(self, before: int | None = None) -> int:
        asked = bind(LAST_EVENT) if before is None else bind(LAST_EVENT_BEFORE, before)
        (reply,) = await self._pool.send(asked)
        return int(reply.rows[0][0]) if reply.rows else 0

    async def find_event(self, source: str, id: str) -> StoredEvent | None:
        rows = (await self._pool.run(FIND_EVENT, source, id)).rows
        return to_stored_event(rows[0]) if rows else None

    async def waits(self, run_id: RunId) -> tuple[Wait, ...]:
        return tuple(map(to_wait, (await self._pool.run(WAITS, run_id)).rows))

    async def staged_events(self, limit: int) -> tuple[StagedEventRow, ...]:
        return tuple(map(to_staged_event, (await self._pool.run(STAGED_EVENTS, limit)).rows))

    @repeated
    async def take_message(self, key: bytes, lease: int) -> StagedEventRow | None:
        async with self._pool.session() as session:
            *_, first = await session.send(bind(BEGIN), lock_exclusive(of_keys([key])), bind(FIND_FIRST, key))
            if not first.rows:
                await session.run(COMMIT)
                return None
            seq = first.rows[0][0]
            try:
                *_, redelivery, _ = await session.send(
                    bind(INSERT_REDELIVERY, lease, seq),
                    bind(ASSERT_ROW_COUNT, 1),
                    bind(TAKE, key, seq),
                    bind(ASSERT_ROW_COUNT, 1),
                    bind(READ_REDELIVERY),
                    bind(COMMIT),
                )
            except AssertionFailedError as error:
                raise StorageConflictError("the message was pruned meanwhile") from error
            return to_staged_event(redelivery.rows[0])


def staged_row(event: StagedEvent) -> bytes:
    return b"(%b,%b)" % (_KINDS[event.kind], quote_bytes(event.body))
