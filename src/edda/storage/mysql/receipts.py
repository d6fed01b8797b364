"""What became of events for others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from edda.core.model import Rejected, SendLater, SendResult, Sent

from .buckets import OUTBOX, certify, lock_exclusive
from .clock import NOW
from .session import BEGIN, COMMIT, Session
from .statement import Statement, bind, in_batches, join_values, quote_text

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
