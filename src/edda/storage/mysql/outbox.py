"""The outbox: claiming events that are due, and recording the results of sending them.

Due events are read page by page, without those behind an earlier event of their key that is not due. Every bound is a
literal, as for events: otherwise the server would look for the earlier event in all rows of the key. The reads are
plain ones under the outbox lock, so that they do not wait for transactions that insert new events.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from edda.core.model import OutboxEvent, OutboxRow, OutboxState, Rejected, SendLater, SendResult, Sent
from edda.storage.shared.rows import to_outbox_row

from .connection import BEGIN, COMMIT, MySQLPool, MySQLSession, Row
from .locks import OUTBOX, certify, lock_exclusive, repeated
from .statement import (
    NOW,
    READ_CLOCK,
    Statement,
    bind,
    in_batches,
    inserts,
    join_values,
    literal,
    quote_bytes,
    quote_text,
    text_or_null,
    unions,
)

# In two parts: events that were never tried all have due = 0, so they are read in order and the scan stops at the
# limit, however many there are. The others are sorted.
_PAGE = b"""(SELECT seq, order_key FROM edda_outbox FORCE INDEX (edda_outbox_due)
    WHERE state = 'pending' AND %b AND seq > %%d%%b ORDER BY seq LIMIT %%d)"""
FIND_PAGE = (
    b" UNION ALL ".join([_PAGE % b"due = 0", _PAGE % (b"due <> 0 AND due <= " + NOW)]) + b" ORDER BY seq LIMIT %d"
)
NOT_KEYS = b" AND order_key NOT IN (%b)"
FIND_BLOCKING = b"""(SELECT order_key, seq FROM edda_outbox FORCE INDEX (edda_outbox_key)
    WHERE order_key = %b AND state = 'pending' AND seq < %d AND due > %d ORDER BY seq LIMIT 1)"""


async def find_due_outbox(session: MySQLSession, limit: int) -> tuple[int, list[int]]:
    """The time, which is read first, and the numbers of the due events. The lock is held until the COMMIT."""
    *_, clock, reply = await session.send(
        bind(BEGIN), lock_exclusive([OUTBOX]), bind(READ_CLOCK), find_due_page(0, (), limit)
    )
    now, page = int(clock.rows[0][0]), reply.rows
    due: list[int] = []
    blocked: set[bytes] = set()
    while page:
        blocking = await _find_blocking(session, page, now)
        due += [seq for seq, key in page if seq < blocking.get(key, seq + 1)]
        blocked.update(blocking)  # the rest of their keys comes after the blocking events
        if len(page) < limit or len(due) >= limit:
            break
        (reply,) = await session.send(find_due_page(page[-1][0], blocked, limit))
        page = reply.rows
    return now, due[:limit]


def find_due_page(after: int, blocked: Collection[bytes], limit: int) -> Statement:
    """The next due events, without those of blocked keys; earlier events of their keys are not considered here."""
    part = (after, NOT_KEYS % literal(sorted(blocked)) if blocked else b"", limit)
    return Statement(FIND_PAGE.decode(), FIND_PAGE % (*part, *part, limit))


async def _find_blocking(session: MySQLSession, page: Sequence[Row], now: int) -> dict[bytes, int]:
    """For each key of a page its first event that is not due, if that comes before the key's last event of the page."""
    replies = await session.send(*find_blocking({key: seq for seq, key in page}, now))
    return {key: seq for reply in replies for key, seq in reply.rows}


def find_blocking(last: Mapping[bytes, int], now: int) -> Iterator[Statement]:
    return unions(FIND_BLOCKING, [FIND_BLOCKING % (quote_bytes(key), seq, now) for key, seq in last.items()])


SENT = (
    b"UPDATE edda_outbox FORCE INDEX (PRIMARY) SET state = 'sent', reason = NULL, ended_at = " + NOW + b""
    b" WHERE state = 'pending' AND seq IN (%b)"
)
_STILL_PENDING = b"o.seq = v.seq AND o.attempts = v.attempts AND o.state = 'pending'"
REJECTED = (
    b"UPDATE (%b) v STRAIGHT_JOIN edda_outbox o ON " + _STILL_PENDING + b""
    b" SET o.state = 'dead', o.reason = v.reason, o.ended_at = " + NOW
)
FIND_PENDING = b"SELECT o.seq, o.order_key FROM (%b) v STRAIGHT_JOIN edda_outbox o ON " + _STILL_PENDING
FIND_OF_KEY = b"""SELECT seq FROM edda_outbox FORCE INDEX (edda_outbox_key)
    WHERE order_key = %b AND state = 'pending' AND due < %b"""
POSTPONE = b"UPDATE (%b) v STRAIGHT_JOIN edda_outbox o ON o.seq = v.seq SET o.due = v.due, o.reason = v.reason"
DELAY_KEY = b"UPDATE edda_outbox FORCE INDEX (PRIMARY) SET due = %b WHERE seq IN (%b)"


async def record_send_results(session: MySQLSession, results: Sequence[SendResult]) -> None:
    postponed = [result for result in results if isinstance(result, SendLater)]
    begin = (bind(BEGIN), lock_exclusive([OUTBOX]), *certify(OUTBOX, session.node), *_finished(results))
    if postponed:
        await _postpone(session, begin, postponed)
        await session.run(COMMIT)
    else:
        await session.send(*begin, bind(COMMIT))


def _finished(results: Sequence[SendResult]) -> Iterator[Statement]:
    yield from in_batches(SENT, [result.seq for result in results if isinstance(result, Sent)])
    yield from join_values(REJECTED, [_pending_row(result) for result in results if isinstance(result, Rejected)])


async def _postpone(session: MySQLSession, begin: Iterable[Statement], postponed: Sequence[SendLater]) -> None:
    answers = await session.query(*begin, *join_values(FIND_PENDING, [_pending_row(result) for result in postponed]))
    dues, rows = _retry_times(postponed, dict(answers.rows_of(FIND_PENDING)))
    for key, due in dues.items():
        others = await session.run(FIND_OF_KEY, key, due)
        for statement in in_batches(DELAY_KEY, [row[0] for row in others.rows], due):
            await session.send(statement)  # one message each: there may be very many, and each has its own time-out
    await session.send(*join_values(POSTPONE, rows))


def _pending_row(result: Rejected | SendLater) -> bytes:
    row = (result.seq, result.attempts, quote_text(result.reason))
    return b"SELECT %d AS seq, %d AS attempts, %b AS reason" % row


def _retry_times(postponed: Sequence[SendLater], keys: Mapping[int, bytes]) -> tuple[dict[bytes, int], list[bytes]]:
    """The latest time of each key, to which all its other events are postponed, and the rows of the postponed events
    themselves: a later result of the key postpones them as well, an earlier one does not."""
    dues: dict[bytes, int] = {}
    rows: dict[int, bytes] = {}
    for result in reversed(postponed):
        if (key := keys.get(result.seq)) is not None and result.seq not in rows:
            dues[key] = due = max(result.due, dues.get(key, result.due))
            row = (result.seq, due, quote_text(result.reason))
            rows[result.seq] = b"SELECT %d AS seq, %d AS due, %b AS reason" % row
    return dues, list(rows.values())


INSERT_OUTBOX = (
    b"INSERT INTO edda_outbox (id, order_key, type, source, body, run_id, created_at, due, attempts, state) VALUES "
)
_COLUMNS = b"""SELECT o.seq, o.id, o.order_key, o.type, o.source, o.body, o.created_at, o.run_id,
    o.state, o.attempts, o.due, o.reason, o.ended_at"""
READ = _COLUMNS + b" FROM edda_outbox o FORCE INDEX (PRIMARY) WHERE o.seq IN (%b) ORDER BY o.seq"
CLAIM = b"UPDATE edda_outbox FORCE INDEX (PRIMARY) SET due = %b, attempts = attempts + 1 WHERE seq IN (%b)"
NEXT = b"SELECT " + NOW + b", MIN(due) FROM edda_outbox FORCE INDEX (edda_outbox_due) WHERE state = 'pending'"
FIND = _COLUMNS + b" FROM edda_outbox o WHERE o.seq > %b ORDER BY o.seq LIMIT %b"
FIND_IN_STATE = (
    _COLUMNS + b" FROM edda_outbox o FORCE INDEX (edda_outbox_state)"
    b" WHERE o.state = %b AND o.seq > %b ORDER BY o.seq LIMIT %b"
)
FIND_DEAD = b"SELECT seq, id FROM edda_outbox FORCE INDEX (edda_outbox_state) WHERE state = 'dead'"
RETRY = b"""UPDATE edda_outbox FORCE INDEX (PRIMARY)
    SET state = 'pending', due = 0, attempts = 0, ended_at = NULL WHERE seq IN (%b)"""


def outbox_row(event: OutboxEvent) -> bytes:
    return b"(%b,%b,%b,%b,%b,%b,%d,0,0,'pending')" % (
        quote_text(event.id),
        quote_text(event.key),
        quote_text(event.type),
        quote_text(event.source),
        quote_bytes(event.body),
        text_or_null(event.run_id),
        event.created_at,
    )


class MySQLOutbox:
    _pool: MySQLPool

    @repeated
    async def enqueue(self, events: Sequence[OutboxEvent]) -> None:
        if not events:
            return
        async with self._pool.session() as session:
            rows = inserts(INSERT_OUTBOX, [outbox_row(event) for event in events], session.limit)
            await session.send(bind(BEGIN), *rows, bind(COMMIT))

    @repeated
    async def claim_outbox(self, limit: int, lease: int) -> tuple[OutboxRow, ...]:
        async with self._pool.session() as session:
            now, due = await find_due_outbox(session, limit)
            if not due:
                await session.run(COMMIT)
                return ()
            claiming = (*in_batches(READ, due), *in_batches(CLAIM, due, now + lease), *certify(OUTBOX, session.node))
            found = await session.query(*claiming, bind(COMMIT))
            claimed = map(to_outbox_row, found.rows_of(READ))
            return tuple(replace(record, due=now + lease, attempts=record.attempts + 1) for record in claimed)

    @repeated
    async def record_send_results(self, results: Sequence[SendResult]) -> None:
        if results:
            async with self._pool.session() as session:
                await record_send_results(session, results)

    async def next_outbox_due(self) -> int | None:
        ((now, first),) = (await self._pool.run(NEXT)).rows
        return None if first is None else max(0, first - int(now))

    async def find_outbox(
        self, state: OutboxState | None = None, after: int = 0, limit: int = 50
    ) -> tuple[OutboxRow, ...]:
        find = bind(FIND, after, limit) if state is None else bind(FIND_IN_STATE, state, after, limit)
        (found,) = await self._pool.send(find)
        return tuple(map(to_outbox_row, found.rows))

    @repeated
    async def retry_outbox(self, ids: Sequence[str] | None) -> int:
        chosen_ids = None if ids is None else {id.encode() for id in ids}
        async with self._pool.session() as session:
            *_, dead = await session.send(bind(BEGIN), lock_exclusive([OUTBOX]), bind(FIND_DEAD))
            chosen = [seq for seq, id in dead.rows if chosen_ids is None or id in chosen_ids]
            await session.send(*in_batches(RETRY, chosen), *certify(OUTBOX, session.node), bind(COMMIT))
            return len(chosen)
