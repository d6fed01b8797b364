"""Dispatches: stored by one commit, taken into the log of events by another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edda.core.model import StagedEvent, StagedEventRow, StagedKind
from edda.errors import StorageConflictError

from .clock import NOW
from .locks import lock_exclusive, of_keys, repeated
from .pool import Pool
from .rows import stored_dispatch
from .session import ASSERT_ROW_COUNT, BEGIN, COMMIT, AssertionFailedError, join_all_rows
from .statement import Statement, bind, quote_bytes, quote_text

INSERT_DISPATCH = b"INSERT INTO edda_dispatch (kind, body) VALUES "
DISPATCHES = b"SELECT seq, kind, body FROM edda_dispatch WHERE due <= " + NOW + b" ORDER BY seq LIMIT %b"
# A join: with an IN list a small table is scanned, and whoever is about to commit a dispatch is waited for.
FORWARD = b"DELETE d FROM (%b) v STRAIGHT_JOIN edda_dispatch d ON d.seq = v.seq"

FIND_FIRST = b"SELECT seq FROM edda_event_key FORCE INDEX (PRIMARY) WHERE `key` = %b ORDER BY seq LIMIT 1"
TAKE = b"DELETE FROM edda_event_key WHERE `key` = %b AND seq = %b"
OFFER = (
    b"INSERT INTO edda_dispatch (kind, body, due) SELECT 'offer', body, "
    + NOW
    + b" + %b FROM edda_event WHERE seq = %b"
)
OFFERED = b"SELECT seq, kind, body FROM edda_dispatch WHERE seq = LAST_INSERT_ID()"

_KINDS = {kind: quote_text(kind) for kind in StagedKind}


def dispatch_row(dispatch: StagedEvent) -> bytes:
    return b"(%b,%b)" % (_KINDS[dispatch.kind], quote_bytes(dispatch.body))


def forward(numbers: Sequence[int]) -> Iterator[Statement]:
    """Take dispatches away; misses its expectation if one is gone."""
    return join_all_rows(FORWARD, [b"SELECT %d AS seq" % seq for seq in sorted(set(numbers))])


class MySQLDispatches:
    _pool: Pool

    async def staged_events(self, limit: int) -> tuple[StagedEventRow, ...]:
        return tuple(map(stored_dispatch, (await self._pool.run(DISPATCHES, limit)).rows))

    @repeated
    async def take_message(self, key: bytes, lease: int) -> StagedEventRow | None:
        async with self._pool.session() as session:
            *_, first = await session.send(bind(BEGIN), lock_exclusive(of_keys([key])), bind(FIND_FIRST, key))
            if not first.rows:
                await session.run(COMMIT)
                return None
            seq = first.rows[0][0]
            try:
                *_, offered, _ = await session.send(
                    bind(OFFER, lease, seq),
                    bind(ASSERT_ROW_COUNT, 1),
                    bind(TAKE, key, seq),
                    bind(ASSERT_ROW_COUNT, 1),
                    bind(OFFERED),
                    bind(COMMIT),
                )
            except AssertionFailedError as error:
                raise StorageConflictError("the message has been pruned meanwhile") from error
            return stored_dispatch(offered.rows[0])
