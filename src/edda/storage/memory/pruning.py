"""Deleting old rows from dictionaries."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from edda.core.model import MICROSECONDS, InboxItem, OutboxState, RunId

from .tables import Tables

GRACE = 3600 * MICROSECONDS
"""How long an event is kept after its keys are deleted: a run that has just found it still reads it."""


class MemoryPruning(Tables):
    def prune_events(self, before: int, limit: int) -> int:
        with_keys = set[int]().union(*self.keys.values())
        hidden = set(islice((seq for seq in self._received(before) if seq in with_keys), limit))
        for numbers in self.keys.values():
            numbers.difference_update(hidden)
        needed = (with_keys - hidden) | self._unread_events() | {self.newest}
        deleted = list(islice((seq for seq in self._received(before - GRACE) if seq not in needed), limit))
        for seq in deleted:
            event = self.events.pop(seq).event
            del self.event_numbers[event.source, event.id]
        return len(hidden) + len(deleted)

    def _received(self, before: int) -> Iterable[int]:
        old = [(stored.received_at, seq) for seq, stored in self.events.items() if stored.received_at < before]
        return (seq for _, seq in sorted(old))

    def _unread_events(self) -> set[int]:
        return {
            item.event
            for run_id, run in self.open_runs.items()
            for item in self.inboxes.get(run_id, {}).values()
            if item.event is not None and item.inbox_no > run.inbox_read
        }

    def prune_inbox(self, before: int, limit: int) -> int:
        old = [item for inbox in self.inboxes.values() for item in inbox.values() if item.at < before]
        chosen = sorted(filter(self._is_done_with, old), key=lambda item: item.at)[:limit]
        for item in chosen:
            del self.inboxes[item.run_id][item.inbox_no]
        return len(chosen)

    def _is_done_with(self, item: InboxItem) -> bool:
        """A read item of an open run stays as long as its event: it keeps the run from receiving the event again."""
        run = self.open_runs.get(item.run_id)
        return run is None or (item.inbox_no <= run.inbox_read and item.event not in self.events)

    def prune_runs(self, before: int, limit: int) -> int:
        old = [
            (result.ended_at, run_id)
            for run_id, result in self.results.items()
            if result.ended_at < before and run_id not in self.open_runs
        ]
        chosen = [run_id for _, run_id in sorted(old)[:limit]]
        for run_id in chosen:
            self.delete_run(run_id)
        return len(chosen) + self._prune_generations(before, limit - len(chosen))

    def delete_run(self, run_id: RunId) -> None:
        for generation in self.runs.pop(run_id):
            self.histories.pop((run_id, generation), None)
        self.inboxes.pop(run_id, None)
        self.watcher_rows.pop(run_id, None)
        self.value_rows.pop(run_id, None)
        del self.results[run_id]

    def _prune_generations(self, before: int, limit: int) -> int:
        old = [
            (generations[generation + 1].created_at, run_id, generation)
            for run_id, generations in self.runs.items()
            for generation in generations
            if run_id in self.open_runs
            and generation + 1 in generations
            and generations[generation + 1].created_at < before
        ]
        chosen = sorted(old)[:limit]
        for _, run_id, generation in chosen:
            del self.runs[run_id][generation]
            self.histories.pop((run_id, generation), None)
        return len(chosen)

    def prune_outbox(self, before: int, limit: int) -> int:
        old = [
            (row.ended_at, row.seq)
            for row in self.outbox.values()
            if row.state is OutboxState.SENT and row.ended_at is not None and row.ended_at < before
        ]
        chosen = sorted(old)[:limit]
        for _, seq in chosen:
            del self.outbox[seq]
        return len(chosen)
