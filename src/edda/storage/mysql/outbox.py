"""Events for others. Whoever changes what is stored of them holds one bucket, so these go one after another.

Who is about to commit a new one is not waited for: what there is is found by plain reads, and changed by its number.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from edda.core.model import OutboxEvent, OutboxRow, OutboxState, SendResult

from .buckets import OUTBOX, certify, lock_exclusive
from .certification import repeated
from .claims import find_due_outbox
from .clock import NOW
from .pool import Pool
from .receipts import record_send_results
from .rows import outgoing_record
from .session import BEGIN, COMMIT
from .statement import bind, in_batches, inserts, quote_bytes, quote_text, text_or_null

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
