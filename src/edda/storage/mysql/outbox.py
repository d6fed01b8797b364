"""Which events for others are due, page by page, and none behind one of its key that is not.

Every bound is written out, as for events: of each row, "an earlier one that is not due" would be looked for in all of
its key. These are plain reads under the lock of the outbox: whoever is about to commit a new event is not waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from edda.core.model import OutboxEvent, OutboxRow, OutboxState, Rejected, SendLater, SendResult, Sent

from .clock import NOW, READ_CLOCK
from .locks import OUTBOX, certify, lock_exclusive, repeated
from .pool import Pool
from .rows import outgoing_record
from .session import BEGIN, COMMIT, Row, Session
from .statement import Statement, bind, in_batches, inserts, join_values, literal, quote_bytes, quote_text, text_or_null

# In two parts: all that nobody has tried yet are due at one and the same time, so they are read in order and no further
# than needed, however many there are. The others are sorted.
_PAGE = b"""(SELECT seq, order_key FROM edda_outbox FORCE INDEX (edda_outbox_due)
    WHERE state = 'pending' AND %b AND seq > %%d%%b ORDER BY seq LIMIT %%d)"""
FIND_PAGE = (
    b" UNION ALL ".join([_PAGE % b"due = 0", _PAGE % (b"due <> 0 AND due <= " + NOW)]) + b" ORDER BY seq LIMIT %d"
)
NOT_KEYS = b" AND order_key NOT IN (%b)"
FIND_OBSTACLE = b"""(SELECT order_key, seq FROM edda_outbox FORCE INDEX (edda_outbox_key)
    WHERE order_key = %b AND state = 'pending' AND seq < %d AND due > %d ORDER BY seq LIMIT 1)"""

_BRANCHES = 100


async def find_due_outbox(session: Session, limit: int) -> tuple[int, list[int]]:
    """The time, read before all else, and the numbers; the lock is held until the commit."""
    *_, clock, reply = await session.send(
        bind(BEGIN), lock_exclusive([OUTBOX]), bind(READ_CLOCK), find_due_page(0, (), limit)
    )
    now, page = int(clock.rows[0][0]), reply.rows
    due: list[int] = []
    behind: set[bytes] = set()
    while page:
        obstacles = await _find_obstacles(session, page, now)
        due += [seq for seq, key in page if seq < obstacles.get(key, seq + 1)]
        behind.update(obstacles)  # all that is left of their keys is behind them
        if len(page) < limit or len(due) >= limit:
            break
        (reply,) = await session.send(find_due_page(page[-1][0], behind, limit))
        page = reply.rows
    return now, due[:limit]


def find_due_page(after: int, behind: Collection[bytes], limit: int) -> Statement:
    """The next that are due, whatever is before them, without those of some keys."""
    part = (after, NOT_KEYS % literal(sorted(behind)) if behind else b"", limit)
    return Statement(FIND_PAGE.decode(), FIND_PAGE % (*part, *part, limit))


async def _find_obstacles(session: Session, page: Sequence[Row], now: int) -> dict[bytes, int]:
    """For each key of a page the first that is not due, if there is one before the last of the page."""
    replies = await session.send(*find_blocking({key: seq for seq, key in page}, now))
    return {key: seq for reply in replies for key, seq in reply.rows}


def find_blocking(last: Mapping[bytes, int], now: int) -> Iterator[Statement]:
    branches = [FIND_OBSTACLE % (quote_bytes(key), seq, now) for key, seq in last.items()]
    for i in range(0, len(branches), _BRANCHES):
        yield Statement(FIND_OBSTACLE.decode(), b" UNION ALL ".join(branches[i : i + _BRANCHES]))


SENT = (
    b"UPDATE edda_outbox FORCE INDEX (PRIMARY) SET state = 'sent', reason = NULL, ended_at = " + NOW + b""
    b" WHERE state = 'pending' AND seq IN (%b)"
)
_HELD = b"o.seq = v.seq AND o.attempts = v.attempts AND o.state = 'pending'"
REFUSED = (
    b"UPDATE (%b) v STRAIGHT_JOIN edda_outbox o ON " + _HELD + b""
    b" SET o.state = 'dead', o.reason = v.reason, o.ended_at = " + NOW
)
FIND_HELD = b"SELECT o.seq, o.order_key FROM (%b) v STRAIGHT_JOIN edda_outbox o ON " + _HELD
FIND_OF_KEY = b"""SELECT seq FROM edda_outbox FORCE INDEX (edda_outbox_key)
    WHERE order_key = %b AND state = 'pending' AND due < %b"""
POSTPONE = b"UPDATE (%b) v STRAIGHT_JOIN edda_outbox o ON o.seq = v.seq SET o.due = v.due, o.reason = v.reason"
DELAY_KEY = b"UPDATE edda_outbox FORCE INDEX (PRIMARY) SET due = %b WHERE seq IN (%b)"


async def record_send_results(session: Session, receipts: Sequence[SendResult]) -> None:
    postponed = [receipt for receipt in receipts if isinstance(receipt, SendLater)]
    begin = (bind(BEGIN), lock_exclusive([OUTBOX]), *certify(OUTBOX, session.node), *_finished(receipts))
    if postponed:
        await _postpone(session, begin, postponed)
        await session.run(COMMIT)
    else:
        await session.send(*begin, bind(COMMIT))


def _finished(receipts: Sequence[SendResult]) -> Iterator[Statement]:
    yield from in_batches(SENT, [receipt.seq for receipt in receipts if isinstance(receipt, Sent)])
    yield from join_values(REFUSED, [_held_row(receipt) for receipt in receipts if isinstance(receipt, Rejected)])


async def _postpone(session: Session, begin: Iterable[Statement], postponed: Sequence[SendLater]) -> None:
    answers = await session.query(*begin, *join_values(FIND_HELD, [_held_row(receipt) for receipt in postponed]))
    dues, rows = _retry_times(postponed, dict(answers.rows_of(FIND_HELD)))
    for key, due in dues.items():
        others = await session.run(FIND_OF_KEY, key, due)
        for statement in in_batches(DELAY_KEY, [row[0] for row in others.rows], due):
            await session.send(statement)  # one by one: there may be very many, and each gets all the patience there is
    await session.send(*join_values(POSTPONE, rows))


def _held_row(receipt: Rejected | SendLater) -> bytes:
    row = (receipt.seq, receipt.attempts, quote_text(receipt.reason))
    return b"SELECT %d AS seq, %d AS attempts, %b AS reason" % row


def _retry_times(postponed: Sequence[SendLater], keys: Mapping[int, bytes]) -> tuple[dict[bytes, int], list[bytes]]:
    """The latest time of each key, which holds for all others of it, and the rows of those that are postponed
    themselves: a later receipt defers them like the others, an earlier one does not."""
    dues: dict[bytes, int] = {}
    rows: dict[int, bytes] = {}
    for receipt in reversed(postponed):
        if (key := keys.get(receipt.seq)) is not None and receipt.seq not in rows:
            dues[key] = due = max(receipt.due, dues.get(key, receipt.due))
            rows[receipt.seq] = b"SELECT %d AS seq, %d AS due, %b AS reason" % (
                receipt.seq,
                due,
                quote_text(receipt.reason),
            )
    return dues, list(rows.values())


INSERT_OUTGOING = (
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
REVIVE = b"""UPDATE edda_outbox FORCE INDEX (PRIMARY)
    SET state = 'pending', due = 0, attempts = 0, ended_at = NULL WHERE seq IN (%b)"""


def outgoing_row(event: OutboxEvent) -> bytes:
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
    _pool: Pool

    @repeated
    async def enqueue(self, events: Sequence[OutboxEvent]) -> None:
        if not events:
            return
        async with self._pool.session() as session:
            rows = inserts(INSERT_OUTGOING, [outgoing_row(event) for event in events], session.limit)
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
            claimed = map(outgoing_record, found.rows_of(READ))
            return tuple(replace(record, due=now + lease, attempts=record.attempts + 1) for record in claimed)

    @repeated
    async def record_send_results(self, receipts: Sequence[SendResult]) -> None:
        if receipts:
            async with self._pool.session() as session:
                await record_send_results(session, receipts)

    async def next_outbox_due(self) -> int | None:
        ((now, first),) = (await self._pool.run(NEXT)).rows
        return None if first is None else max(0, first - int(now))

    async def find_outbox(
        self, state: OutboxState | None = None, after: int = 0, limit: int = 50
    ) -> tuple[OutboxRow, ...]:
        find = bind(FIND, after, limit) if state is None else bind(FIND_IN_STATE, state, after, limit)
        (found,) = await self._pool.send(find)
        return tuple(map(outgoing_record, found.rows))

    @repeated
    async def retry_outbox(self, ids: Sequence[str] | None) -> int:
        wanted = None if ids is None else {id.encode() for id in ids}
        async with self._pool.session() as session:
            *_, dead = await session.send(bind(BEGIN), lock_exclusive([OUTBOX]), bind(FIND_DEAD))
            chosen = [seq for seq, id in dead.rows if wanted is None or id in wanted]
            await session.send(*in_batches(REVIVE, chosen), *certify(OUTBOX, session.node), bind(COMMIT))
            return len(chosen)
