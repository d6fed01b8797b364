"""Events for others: claimed for a while, sent by whoever claimed them, and settled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from edda.core.model import OutboxEvent, OutboxRow, OutboxState, Rejected, SendLater, SendResult, Sent

from .connection import Connection

GLANCE = 10
"""How many pending events are looked at for each that is wanted."""

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
_REFUSED = """
UPDATE edda_outbox SET state = 'dead', ended_at = ?, reason = ? WHERE seq = ? AND attempts = ? AND state = 'pending'"""
_POSTPONED = """
UPDATE edda_outbox SET due = ?, reason = ? WHERE seq = ? AND attempts = ? AND state = 'pending'"""
_HOLD = """
UPDATE edda_outbox INDEXED BY edda_outbox_key SET due = ?1
 WHERE state = 'pending' AND seq <> ?2 AND due < ?1
   AND order_key = (SELECT order_key FROM edda_outbox WHERE seq = ?2)"""

_FIND = """
SELECT seq, id, order_key, type, source, body, created_at, run_id, state, attempts, due, reason, ended_at
  FROM edda_outbox WHERE seq > ?1 AND (?2 IS NULL OR state = ?2) ORDER BY seq LIMIT ?3"""
_FIND_DEAD = """
SELECT seq, id, order_key, type, source, body, created_at, run_id, state, attempts, due, reason, ended_at
  FROM edda_outbox INDEXED BY edda_outbox_dead WHERE seq > ? AND state = 'dead' ORDER BY seq LIMIT ?"""
_RETRY = """
UPDATE edda_outbox INDEXED BY edda_outbox_dead SET state = 'pending', due = 0, attempts = 0, ended_at = NULL
 WHERE seq > 0 AND state = 'dead' AND (?1 IS NULL OR id IN (SELECT value FROM json_each(?1)))"""
_FIRST_SENT = "SELECT min(ended_at) FROM edda_outbox INDEXED BY edda_outbox_sent WHERE state = 'sent'"
_PRUNE = """
DELETE FROM edda_outbox WHERE seq IN (
SELECT seq FROM edda_outbox INDEXED BY edda_outbox_sent
 WHERE state = 'sent' AND ended_at < ? ORDER BY ended_at, seq LIMIT ?)"""


def as_row(event: OutboxEvent) -> tuple[Any, ...]:
    return (event.id, event.key, event.type, event.source, event.body, event.run_id, event.created_at)


def enqueue(db: Connection, events: Iterable[OutboxEvent]) -> None:
    db.run_many(INSERT, map(as_row, events))


def first_due(db: Connection) -> int | None:
    due: int | None = db.rows(_FIRST_DUE)[0][0]
    return due


def claimable(db: Connection, limit: int, now: int) -> list[int]:
    """What is due, and not behind one of its key that is not.

    Mostly a few of the first will do. If too many of them are not due, all that is due is gone through.
    """
    first = db.rows(_FIRST, (GLANCE * limit,))
    chosen = _free(first, now)[:limit]
    if len(chosen) < limit and len(first) == GLANCE * limit:
        chosen = [seq for (seq,) in db.rows(_CLAIMABLE, (now, limit))]
    return chosen


def _free(pending: Iterable[tuple[int, int, str]], now: int) -> list[int]:
    free: list[int] = []
    held: set[str] = set()
    for seq, due, key in pending:
        if due > now:
            held.add(key)
        elif key not in held:
            free.append(seq)
    return free


def claim(db: Connection, limit: int, lease: int, now: int) -> tuple[OutboxRow, ...]:
    chosen = claimable(db, limit, now)
    if not chosen:
        return ()
    db.run_many(_CLAIM, [(now + lease, seq) for seq in chosen])
    return tuple(map(_as_record, db.rows(_CLAIMED, (json.dumps(chosen),))))


def settle(db: Connection, receipts: Iterable[SendResult], now: int) -> None:
    for receipt in receipts:
        match receipt:
            case Sent(seq):
                db.run(_SENT, (now, seq))
            case Rejected(seq, attempts, reason):
                db.run(_REFUSED, (now, reason, seq, attempts))
            case SendLater(seq, attempts, due, reason):
                if db.run(_POSTPONED, (due, reason, seq, attempts)):
                    db.run(_HOLD, (due, seq))


def find(db: Connection, state: OutboxState | None, after: int, limit: int) -> tuple[OutboxRow, ...]:
    if state is OutboxState.DEAD:
        rows = db.rows(_FIND_DEAD, (after, limit))
    else:
        rows = db.rows(_FIND, (after, state and state.value, limit))
    return tuple(map(_as_record, rows))


def retry(db: Connection, ids: Sequence[str] | None) -> int:
    return db.run(_RETRY, (None if ids is None else json.dumps(list(ids)),))


def first_sent(db: Connection) -> int | None:
    moment: int | None = db.rows(_FIRST_SENT)[0][0]
    return moment


def prune(db: Connection, before: int, limit: int) -> int:
    return db.run(_PRUNE, (before, limit))


def _as_record(row: Sequence[Any]) -> OutboxRow:
    seq, id, key, type, source, body, created_at, run_id, state, *rest = row
    event = OutboxEvent(id, key, type, source, body, created_at, run_id)
    return OutboxRow(seq, event, OutboxState(state), *rest)
