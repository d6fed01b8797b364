"""The outbox in a dictionary."""

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
        self.insert_outbox(events)

    def claim_outbox(self, limit: int, lease: int) -> tuple[OutboxRow, ...]:
        now = self.now()
        claimed = [
            replace(row, due=now + lease, attempts=row.attempts + 1)
            for row in islice(self._due(now), limit)  # read to the end before the first row changes
        ]
        self.outbox.update((row.seq, row) for row in claimed)
        return tuple(claimed)

    def _due(self, now: int) -> Iterator[OutboxRow]:
        """By number, and none behind an event of the same key that is not due."""
        delayed_keys = set[str]()
        for row in self._pending():
            if row.due > now:
                delayed_keys.add(row.event.key)
            elif row.event.key not in delayed_keys:
                yield row

    def _pending(self) -> Iterator[OutboxRow]:
        return (row for row in self.outbox.values() if row.state is OutboxState.PENDING)

    def record_send_results(self, results: Sequence[SendResult]) -> None:
        for result in results:
            check_values(result)
        for result in results:
            row = self.outbox.get(result.seq)
            if row and row.state is OutboxState.PENDING and _counts(result, row):
                self._record(row, result)

    def _record(self, row: OutboxRow, result: SendResult) -> None:
        match result:
            case Sent(seq):
                self.outbox[seq] = replace(row, state=OutboxState.SENT, reason=None, ended_at=self.now())
            case Rejected(seq, _, reason):
                self.outbox[seq] = replace(row, state=OutboxState.DEAD, reason=reason, ended_at=self.now())
            case SendLater(seq, _, due, reason):
                same_key = [other for other in self._pending() if other.event.key == row.event.key and other.due < due]
                self.outbox.update((other.seq, replace(other, due=due)) for other in same_key)
                self.outbox[seq] = replace(row, due=due, reason=reason)

    def next_outbox_due(self) -> int | None:
        first = min((row.due for row in self._pending()), default=None)
        return None if first is None else max(0, first - self.now())

    def find_outbox(self, state: OutboxState | None = None, after: int = 0, limit: int = 50) -> tuple[OutboxRow, ...]:
        fitting = (row for row in self.outbox.values() if row.seq > after and state in (None, row.state))
        return tuple(islice(fitting, limit))

    def retry_outbox(self, ids: Sequence[str] | None) -> int:
        dead = [
            replace(row, state=OutboxState.PENDING, due=0, attempts=0, ended_at=None)
            for row in self.outbox.values()
            if row.state is OutboxState.DEAD and (ids is None or row.event.id in ids)
        ]
        self.outbox.update((row.seq, row) for row in dead)
        return len(dead)


def _counts(result: SendResult, row: OutboxRow) -> bool:
    """`Sent` counts from any claimer; the other results only from the one that still holds the claim."""
    return isinstance(result, Sent) or result.attempts == row.attempts
