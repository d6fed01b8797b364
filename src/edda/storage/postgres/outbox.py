"""The outbox: claiming events that are due, and recording the results of sending them.

Every transaction that changes pending rows holds the outbox lock. So a claim sees every postponement that was committed
before it, and no event is sent ahead of an earlier one of its key that was just postponed.
"""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import OutboxEvent, OutboxRow, OutboxState, Rejected, SendLater, SendResult, Sent
from edda.storage.shared.rows import to_outbox_row

from .batch_sql import ENQUEUE, outbox_row
from .connection import PostgresSession, with_now
from .locks import LOCK_OUTBOX
from .pool import PostgresPool

_COLUMNS = "seq, id, order_key, type, source, body, created_at, run_id, state, attempts, due, reason, ended_at"

# An earlier event of the key is not due.
_BLOCKED = """EXISTS (
             SELECT FROM edda_outbox e
              WHERE e.state = 'pending' AND e.order_key = o.order_key AND e.seq < o.seq
                AND e.due > (SELECT now FROM clock) OFFSET 0)"""
# Events that were never tried all have due = 0, so the index has them in the order of their numbers, and the scan stops
# at the limit however many there are. Events that were tried have to be sorted first.
_CLAIM = """
WITH clock AS MATERIALIZED (SELECT {now} AS now),
     untried AS MATERIALIZED (
         SELECT o.seq FROM edda_outbox o WHERE o.state = 'pending' AND o.due = 0 AND NOT {blocked}
          ORDER BY o.seq LIMIT $1),
     tried AS MATERIALIZED (
         SELECT seq, order_key FROM edda_outbox
          WHERE state = 'pending' AND due > 0 AND due <= (SELECT now FROM clock) ORDER BY seq),
     retried AS MATERIALIZED (SELECT o.seq FROM tried o WHERE NOT {blocked} LIMIT $1),
     chosen AS MATERIALIZED (
         SELECT seq FROM (SELECT seq FROM untried UNION ALL SELECT seq FROM retried) due ORDER BY seq LIMIT $1),
     claimed AS (
         UPDATE edda_outbox o SET due = clock.now + $2, attempts = o.attempts + 1
           FROM clock, chosen WHERE o.seq = chosen.seq RETURNING o.*)
SELECT {columns} FROM claimed ORDER BY seq"""
CLAIM = with_now(_CLAIM.replace("{blocked}", _BLOCKED).replace("{columns}", _COLUMNS))

RECORD_SENT = with_now("""
UPDATE edda_outbox o SET state = 'sent', reason = NULL, ended_at = {now}
  FROM unnest($1::bigint[]) u WHERE o.seq = u AND o.state = 'pending'""")
RECORD_REJECTED = with_now("""
UPDATE edda_outbox o SET state = 'dead', reason = u.reason, ended_at = {now}
  FROM unnest($1::bigint[], $2::int[], $3::text[]) u (seq, attempts, reason)
 WHERE o.seq = u.seq AND o.attempts = u.attempts AND o.state = 'pending'""")
RECORD_SEND_LATER = """
WITH postponed AS (
    UPDATE edda_outbox o SET due = u.due, reason = u.reason
      FROM unnest($1::bigint[], $2::int[], $3::bigint[], $4::text[]) u (seq, attempts, due, reason)
     WHERE o.seq = u.seq AND o.attempts = u.attempts AND o.state = 'pending' RETURNING o.seq, o.order_key, o.due)
UPDATE edda_outbox o SET due = latest.due
  FROM (SELECT order_key, max(due) AS due FROM postponed GROUP BY order_key) latest
 WHERE o.state = 'pending' AND o.order_key = latest.order_key AND o.due < latest.due
   AND o.seq NOT IN (SELECT seq FROM postponed)"""

NEXT_OUTBOX_DUE = with_now("SELECT due, {now} FROM edda_outbox WHERE state = 'pending' ORDER BY due, seq LIMIT 1")

_FIND = "SELECT {columns} FROM edda_outbox WHERE {state}seq > $1 ORDER BY seq LIMIT $2".replace("{columns}", _COLUMNS)
FIND_OUTBOX = _FIND.replace("{state}", "")
# A literal and not a parameter: the planner uses the partial index of unsent events only for a literal state.
FIND_OUTBOX_IN = {state: _FIND.replace("{state}", f"state = '{state}' AND ") for state in OutboxState}

_RETRY = "UPDATE edda_outbox SET state = 'pending', due = 0, attempts = 0, ended_at = NULL WHERE state = 'dead'"
RETRY_ALL = _RETRY
RETRY = f"{_RETRY} AND id = ANY ($1::text[])"


class PostgresOutbox:
    _pool: PostgresPool

    async def enqueue(self, events: Sequence[OutboxEvent]) -> None:
        if not events:
            return
        await self._pool.execute(ENQUEUE, [outbox_row(event) for event in events])

    async def claim_outbox(self, limit: int, lease: int) -> tuple[OutboxRow, ...]:
        async with self._pool.session() as session, session.transaction(LOCK_OUTBOX):
            rows = await session.fetch(CLAIM, limit, lease)
        return tuple(to_outbox_row(row) for row in rows)

    async def record_send_results(self, results: Sequence[SendResult]) -> None:
        if not results:
            return
        async with self._pool.session() as session, session.transaction(LOCK_OUTBOX):
            await _record_send_results(session, results)

    async def next_outbox_due(self) -> int | None:
        rows = await self._pool.fetch(NEXT_OUTBOX_DUE)
        if not rows:
            return None
        due, now = rows[0]
        return max(0, int(due - now))

    async def find_outbox(
        self, state: OutboxState | None = None, after: int = 0, limit: int = 50
    ) -> tuple[OutboxRow, ...]:
        statement = FIND_OUTBOX if state is None else FIND_OUTBOX_IN[state]
        rows = await self._pool.fetch(statement, after, limit)
        return tuple(to_outbox_row(row) for row in rows)

    async def retry_outbox(self, ids: Sequence[str] | None) -> int:
        async with self._pool.session() as session, session.transaction(LOCK_OUTBOX):
            if ids is None:
                return await session.execute(RETRY_ALL)
            return await session.execute(RETRY, ids)


async def _record_send_results(session: PostgresSession, results: Sequence[SendResult]) -> None:
    if sent := [result.seq for result in results if isinstance(result, Sent)]:
        await session.execute(RECORD_SENT, sent)
    if rejected := [(r.seq, r.attempts, r.reason) for r in results if isinstance(r, Rejected)]:
        await session.execute(RECORD_REJECTED, *zip(*rejected, strict=True))
    if postponed := [(r.seq, r.attempts, r.due, r.reason) for r in results if isinstance(r, SendLater)]:
        await session.execute(RECORD_SEND_LATER, *zip(*postponed, strict=True))
