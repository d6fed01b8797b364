"""The outbox: events that a relayer claims for a while, sends, and records the result of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from edda.core.model import OutboxEvent, OutboxRow, OutboxState, Rejected, SendLater, SendResult, Sent
from edda.storage.shared.rows import to_outbox_row

from .connection import Connection
from .threads import Part, read, transaction

SCAN_FACTOR = 10
"""How many pending events are read for each that is wanted, before all that are due are searched."""

INSERT = """
INSERT INTO edda_outbox (id, order_key, type, source, body, run_id, created_at, due, attempts, state)
VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0, 'pending')"""

_FIRST_DUE = "SELECT min(due) FROM edda_outbox INDEXED BY edda_outbox_due WHERE state = 'pending'"
_FIRST = """
SELECT seq, due, order_key FROM edda_outbox INDEXED BY edda_outbox_pending
 WHERE state = 'pending' AND seq > 0 ORDER BY seq LIMIT ?"""
_CLAIMABLE = """
SELECT o.seq FROM edda_outbox o INDEXED BY edda_outbox_due
 WHERE o.state = 'pending' AND o.due <= ?1
   AND NOT EXISTS (SELECT 1 FROM edda_outbox e INDEXED BY edda_outbox_key
                    WHERE e.state = 'pending' AND e.order_key = o.order_key AND e.seq < o.seq AND e.due > ?1)
 ORDER BY o.seq LIMIT ?2"""
_CLAIM = "UPDATE edda_outbox SET due = ?, attempts = attempts + 1 WHERE seq = ?"
_CLAIMED = """
SELECT o.seq, o.id, o.order_key, o.type, o.source, o.body, o.created_at, o.run_id, o.state, o.attempts, o.due, o.reason,
       o.ended_at
  FROM json_each(?) i CROSS JOIN edda_outbox o ON o.seq = i.value ORDER BY o.seq"""

_SENT = "UPDATE edda_outbox SET state = 'sent', ended_at = ?, reason = NULL WHERE seq = ? AND state = 'pending'"
_REJECTED = """
UPDATE edda_outbox SET state = 'dead', ended_at = ?, reason = ? WHERE seq = ? AND attempts = ? AND state = 'pending'"""
_SEND_LATER = """
UPDATE edda_outbox SET due = ?, reason = ? WHERE seq = ? AND attempts = ? AND state = 'pending'"""
_DELAY_KEY = """
UPDATE edda_outbox INDEXED BY edda_outbox_key SET due = ?1
 WHERE state = 'pending' AND seq <> ?2 AND due < ?1
   AND order_key = (SELECT order_key FROM edda_outbox WHERE seq = ?2)"""

_ROW = """
SELECT seq, id, order_key, type, source, body, created_at, run_id, state, attempts, due, reason, ended_at
  FROM edda_outbox"""
_FIND = f"{_ROW} WHERE seq > ?1 AND (?2 IS NULL OR state = ?2) ORDER BY seq LIMIT ?3"
_FIND_DEAD = f"{_ROW} INDEXED BY edda_outbox_dead WHERE seq > ? AND state = 'dead' ORDER BY seq LIMIT ?"
_RETRY = """
UPDATE edda_outbox INDEXED BY edda_outbox_dead SET state = 'pending', due = 0, attempts = 0, ended_at = NULL
 WHERE seq > 0 AND state = 'dead' AND (?1 IS NULL OR id IN (SELECT value FROM json_each(?1)))"""


class SQLiteOutbox(Part):
    @transaction
    def enqueue(self, db: Connection, events: Sequence[OutboxEvent]) -> None:
        db.run_many(INSERT, map(event_to_row, events))

    async def claim_outbox(self, limit: int, lease: int) -> tuple[OutboxRow, ...]:
        """Reads first: a relayer that finds nothing does not make other writers wait."""
        if await self.next_outbox_due() != 0 or not await self._can_claim(limit):
            return ()
        return await self._claim_outbox(limit, lease)

    @read
    def _can_claim(self, db: Connection, limit: int) -> bool:
        return bool(_claimable(db, limit, self._now()))

    @transaction
    def _claim_outbox(self, db: Connection, limit: int, lease: int) -> tuple[OutboxRow, ...]:
        now = self._now()
        chosen = _claimable(db, limit, now)
        if not chosen:
            return ()
        db.run_many(_CLAIM, [(now + lease, seq) for seq in chosen])
        return tuple(map(to_outbox_row, db.rows(_CLAIMED, (json.dumps(chosen),))))

    async def record_send_results(self, results: Sequence[SendResult]) -> None:
        if results:
            await self._record_send_results(results)

    @transaction
    def _record_send_results(self, db: Connection, results: Sequence[SendResult]) -> None:
        now = self._now()
        for result in results:
            match result:
                case Sent(seq):
                    db.run(_SENT, (now, seq))
                case Rejected(seq, attempts, reason):
                    db.run(_REJECTED, (now, reason, seq, attempts))
                case SendLater(seq, attempts, due, reason):
                    if db.run(_SEND_LATER, (due, reason, seq, attempts)):
                        db.run(_DELAY_KEY, (due, seq))

    async def next_outbox_due(self) -> int | None:
        due = await self._pool.cached_read(_first_due)
        return None if due is None else max(0, due - self._now())

    @read
    def find_outbox(
        self, db: Connection, state: OutboxState | None = None, after: int = 0, limit: int = 50
    ) -> tuple[OutboxRow, ...]:
        if state is OutboxState.DEAD:
            rows = db.rows(_FIND_DEAD, (after, limit))
        else:
            rows = db.rows(_FIND, (after, state and state.value, limit))
        return tuple(map(to_outbox_row, rows))

    @transaction
    def retry_outbox(self, db: Connection, ids: Sequence[str] | None) -> int:
        return db.run(_RETRY, (None if ids is None else json.dumps(list(ids)),))


def _first_due(db: Connection) -> int | None:
    due: int | None = db.rows(_FIRST_DUE)[0][0]
    return due


def _claimable(db: Connection, limit: int, now: int) -> list[int]:
    """Events that are due, and not behind an event of the same key that is not due.

    The first pending events are mostly enough. If too many of them are not due, all that are due are searched.
    """
    first = db.rows(_FIRST, (SCAN_FACTOR * limit,))
    chosen = _due_in_order(first, now)[:limit]
    if len(chosen) < limit and len(first) == SCAN_FACTOR * limit:
        chosen = [seq for (seq,) in db.rows(_CLAIMABLE, (now, limit))]
    return chosen


def _due_in_order(pending: Iterable[tuple[int, int, str]], now: int) -> list[int]:
    chosen: list[int] = []
    delayed_keys: set[str] = set()
    for seq, due, key in pending:
        if due > now:
            delayed_keys.add(key)
        elif key not in delayed_keys:
            chosen.append(seq)
    return chosen


def event_to_row(event: OutboxEvent) -> tuple[Any, ...]:
    return (event.id, event.key, event.type, event.source, event.body, event.run_id, event.created_at)
