"""Events for others: who sends which, and what became of it.

Whoever changes pending rows holds the lock of the outbox. So a claim sees every postponement before it, and nothing is
sent ahead of what was just held up.
"""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import OutboxEvent, OutboxRow, OutboxState, Rejected, SendLater, SendResult, Sent

from .batch_sql import ENQUEUE, outgoing_row
from .clock import with_now
from .locks import HOLD_OUTBOX
from .pool import Pool
from .rows import outgoing_of
from .session import Session

_COLUMNS = "seq, id, order_key, type, source, body, run_id, created_at, due, attempts, state, reason, ended_at"

# An earlier one of the key is not due.
_HELD = """EXISTS (
             SELECT FROM edda_outbox e
              WHERE e.state = 'pending' AND e.order_key = o.order_key AND e.seq < o.seq
                AND e.due > (SELECT now FROM clock) OFFSET 0)"""
# What was never tried is in the index in the order of its numbers, and is read no further than it is needed, however
# much there is. What was tried has to be sorted first.
_CLAIM = """
WITH clock AS MATERIALIZED (SELECT {now} AS now),
     fresh AS MATERIALIZED (
         SELECT o.seq FROM edda_outbox o WHERE o.state = 'pending' AND o.due = 0 AND NOT {held}
          ORDER BY o.seq LIMIT $1),
     tried AS MATERIALIZED (
         SELECT seq, order_key FROM edda_outbox
          WHERE state = 'pending' AND due > 0 AND due <= (SELECT now FROM clock) ORDER BY seq),
     again AS MATERIALIZED (SELECT o.seq FROM tried o WHERE NOT {held} LIMIT $1),
     chosen AS MATERIALIZED (
         SELECT seq FROM (SELECT seq FROM fresh UNION ALL SELECT seq FROM again) due ORDER BY seq LIMIT $1),
     claimed AS (
         UPDATE edda_outbox o SET due = clock.now + $2, attempts = o.attempts + 1
           FROM clock, chosen WHERE o.seq = chosen.seq RETURNING o.*)
SELECT {columns} FROM claimed ORDER BY seq"""
CLAIM = with_now(_CLAIM.replace("{held}", _HELD).replace("{columns}", _COLUMNS))

SETTLE_SENT = with_now("""
UPDATE edda_outbox o SET state = 'sent', reason = NULL, ended_at = {now}
  FROM unnest($1::bigint[]) u WHERE o.seq = u AND o.state = 'pending'""")
SETTLE_REFUSED = with_now("""
UPDATE edda_outbox o SET state = 'dead', reason = u.reason, ended_at = {now}
  FROM unnest($1::bigint[], $2::int[], $3::text[]) u (seq, attempts, reason)
 WHERE o.seq = u.seq AND o.attempts = u.attempts AND o.state = 'pending'""")
SETTLE_POSTPONED = """
WITH postponed AS (
    UPDATE edda_outbox o SET due = u.due, reason = u.reason
      FROM unnest($1::bigint[], $2::int[], $3::bigint[], $4::text[]) u (seq, attempts, due, reason)
     WHERE o.seq = u.seq AND o.attempts = u.attempts AND o.state = 'pending' RETURNING o.seq, o.order_key, o.due)
UPDATE edda_outbox o SET due = held.due
  FROM (SELECT order_key, max(due) AS due FROM postponed GROUP BY order_key) held
 WHERE o.state = 'pending' AND o.order_key = held.order_key AND o.due < held.due
   AND o.seq NOT IN (SELECT seq FROM postponed)"""

NEXT_OUTGOING = with_now("SELECT due, {now} FROM edda_outbox WHERE state = 'pending' ORDER BY due, seq LIMIT 1")

_FIND = "SELECT {columns} FROM edda_outbox WHERE {state}seq > $1 ORDER BY seq LIMIT $2".replace("{columns}", _COLUMNS)
FIND_OUTGOING = _FIND.replace("{state}", "")
# A word and not a parameter: the index of those that were not sent serves only who says so.
FIND_OUTGOING_IN = {state: _FIND.replace("{state}", f"state = '{state}' AND ") for state in OutboxState}

_RETRY = "UPDATE edda_outbox SET state = 'pending', due = 0, attempts = 0, ended_at = NULL WHERE state = 'dead'"
RETRY_ALL = _RETRY
RETRY = f"{_RETRY} AND id = ANY ($1::text[])"


class PostgresOutbox:
    _pool: Pool

    async def enqueue(self, events: Sequence[OutboxEvent]) -> None:
        if not events:
            return
        async with self._pool.session() as session:
            await session.execute(ENQUEUE, [outgoing_row(event) for event in events])

    async def claim_outbox(self, limit: int, lease: int) -> tuple[OutboxRow, ...]:
        async with self._pool.session() as session, session.transaction(HOLD_OUTBOX):
            rows = await session.fetch(CLAIM, limit, lease)
        return tuple(outgoing_of(row) for row in rows)

    async def record_send_results(self, receipts: Sequence[SendResult]) -> None:
        if not receipts:
            return
        async with self._pool.session() as session, session.transaction(HOLD_OUTBOX):
            await _settle(session, receipts)

    async def next_outbox_due(self) -> int | None:
        async with self._pool.session() as session:
            rows = await session.fetch(NEXT_OUTGOING)
        if not rows:
            return None
        due, now = rows[0]
        return max(0, int(due - now))

    async def find_outbox(
        self, state: OutboxState | None = None, after: int = 0, limit: int = 50
    ) -> tuple[OutboxRow, ...]:
        statement = FIND_OUTGOING if state is None else FIND_OUTGOING_IN[state]
        async with self._pool.session() as session:
            rows = await session.fetch(statement, after, limit)
        return tuple(outgoing_of(row) for row in rows)

    async def retry_outbox(self, ids: Sequence[str] | None) -> int:
        async with self._pool.session() as session, session.transaction(HOLD_OUTBOX):
            if ids is None:
                return await session.execute(RETRY_ALL)
            return await session.execute(RETRY, ids)


async def _settle(session: Session, receipts: Sequence[SendResult]) -> None:
    if sent := [receipt.seq for receipt in receipts if isinstance(receipt, Sent)]:
        await session.execute(SETTLE_SENT, sent)
    if refused := [(r.seq, r.attempts, r.reason) for r in receipts if isinstance(r, Rejected)]:
        await session.execute(SETTLE_REFUSED, *zip(*refused, strict=True))
    if postponed := [(r.seq, r.attempts, r.due, r.reason) for r in receipts if isinstance(r, SendLater)]:
        await session.execute(SETTLE_POSTPONED, *zip(*postponed, strict=True))
