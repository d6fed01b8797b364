"""What runs say, to the log of events and of themselves, in dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from edda.core.model import RunId, RunValue, RunWrite, StagedEventRow, StagedKind
from edda.errors import StorageConflictError

from .memory_tables import Tables


class MemoryStaging(Tables):
    def write_side_effects(self, bundle: RunWrite) -> None:
        """What goes in with a bundle's entries."""
        for dispatch in bundle.dispatches:
            self._dispatch(dispatch.kind, dispatch.body, due=0)
        self.enqueue_outbox(bundle.outgoing)
        if bundle.facts:
            self.value_rows.setdefault(bundle.run_id, {}).update((fact.name, fact) for fact in bundle.facts)

    def _dispatch(self, kind: StagedKind, body: bytes, due: int) -> StagedEventRow:
        self.dispatched += 1
        stored = StagedEventRow(self.dispatched, kind, body)
        self.waiting_dispatches[stored.seq] = due, stored
        return stored

    def take_message(self, key: bytes, lease: int) -> StagedEventRow | None:
        kept = self.keys.get(key)
        if not kept:
            return None
        seq = min(kept)
        kept.remove(seq)
        return self._dispatch(StagedKind.OFFER, self.events[seq].event.body, due=self.now() + lease)

    def staged_events(self, limit: int) -> tuple[StagedEventRow, ...]:
        now = self.now()
        return tuple(islice((stored for due, stored in self.waiting_dispatches.values() if due <= now), limit))

    def forward(self, numbers: Sequence[int]) -> None:
        gone = set(numbers) - self.waiting_dispatches.keys()
        if gone:
            raise StorageConflictError(f"somebody else has forwarded {sorted(gone)}")
        for number in set(numbers):
            del self.waiting_dispatches[number]

    def run_values(self, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        return tuple(fact for _, fact in sorted(self.value_rows.get(run_id, {}).items()) if name in (None, fact.name))
