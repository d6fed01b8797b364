"""Events for others, in a dictionary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec.structs import replace

from edda.core.model import OutboxEvent, OutboxRow, OutboxState, Rejected, SendLater, SendResult, Sent

from .tables import Tables, check_values


class MemoryOutbox(Tables):
    def enqueue(self, events: Sequence[OutboxEvent]) -> None:
        for event in events:
            check_values(event)
        self.enqueue_outbox(events)

    def claim_outbox(self, limit: int, lease: int) -> tuple[OutboxRow, ...]:
        now = self.now()
        claimed = [
            replace(record, due=now + lease, attempts=record.attempts + 1)
            for record in islice(self._due(now), limit)  # looked through before the first of them is changed
        ]
        self.outbox.update((record.seq, record) for record in claimed)
        return tuple(claimed)

    def _due(self, now: int) -> Iterator[OutboxRow]:
        """By number, and none behind one of its key that is not due."""
        held = set[str]()
        for record in self._pending():
            if record.due > now:
                held.add(record.event.key)
            elif record.event.key not in held:
                yield record

    def _pending(self) -> Iterator[OutboxRow]:
        return (record for record in self.outbox.values() if record.state is OutboxState.PENDING)

    def record_send_results(self, receipts: Sequence[SendResult]) -> None:
        for receipt in receipts:
            check_values(receipt)
        for receipt in receipts:
            record = self.outbox.get(receipt.seq)
            if record and record.state is OutboxState.PENDING and _counts(receipt, record):
                self._settle(record, receipt)

    def _settle(self, record: OutboxRow, receipt: SendResult) -> None:
        match receipt:
            case Sent(seq):
                self.outbox[seq] = replace(record, state=OutboxState.SENT, reason=None, ended_at=self.now())
            case Rejected(seq, _, reason):
                self.outbox[seq] = replace(record, state=OutboxState.DEAD, reason=reason, ended_at=self.now())
            case SendLater(seq, _, due, reason):
                self._hold(record.event.key, due)
                self.outbox[seq] = replace(record, due=due, reason=reason)

    def _hold(self, key: str, due: int) -> None:
        held = [record for record in self._pending() if record.event.key == key and record.due < due]
        self.outbox.update((record.seq, replace(record, due=due)) for record in held)

    def next_outbox_due(self) -> int | None:
        first = min((record.due for record in self._pending()), default=None)
        return None if first is None else max(0, first - self.now())

    def find_outbox(self, state: OutboxState | None = None, after: int = 0, limit: int = 50) -> tuple[OutboxRow, ...]:
        fitting = (r for r in self.outbox.values() if r.seq > after and state in (None, r.state))
        return tuple(islice(fitting, limit))

    def retry_outbox(self, ids: Sequence[str] | None) -> int:
        dead = [
            replace(record, state=OutboxState.PENDING, due=0, attempts=0, ended_at=None)
            for record in self.outbox.values()
            if record.state is OutboxState.DEAD and (ids is None or record.event.id in ids)
        ]
        self.outbox.update((record.seq, record) for record in dead)
        return len(dead)

    def prune_outbox(self, before: int, limit: int) -> int:
        old = [
            (record.ended_at, record.seq)
            for record in self.outbox.values()
            if record.state is OutboxState.SENT and record.ended_at is not None and record.ended_at < before
        ]
        chosen = sorted(old)[:limit]
        for _, seq in chosen:
            del self.outbox[seq]
        return len(chosen)


def _counts(receipt: SendResult, record: OutboxRow) -> bool:
    """What was sent was sent, whoever did it; all else is said by who still holds the claim."""
    return isinstance(receipt, Sent) or receipt.attempts == record.attempts
