"""Removing what is old, in dictionaries."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from edda.core.model import MICROSECONDS, InboxItem, RunId

from .memory_tables import Tables

GRACE = 3600 * MICROSECONDS
"""How long an event is kept after it can no longer be found: whoever has just found it still reads it."""


class MemoryPruning(Tables):
    def prune_events(self, before: int, limit: int) -> int:
        kept = set[int]().union(*self.keys.values())
        hidden = set(islice((seq for seq in self._received(before) if seq in kept), limit))
        for numbers in self.keys.values():
            numbers.difference_update(hidden)
        spared = (kept - hidden) | self._unread() | {self.newest}
        gone = list(islice((seq for seq in self._received(before - GRACE) if seq not in spared), limit))
        for seq in gone:
            event = self.events.pop(seq).event
            del self.numbers[event.source, event.id]
        return len(hidden) + len(gone)

    def _received(self, before: int) -> Iterable[int]:
        old = [(stored.received_at, seq) for seq, stored in self.events.items() if stored.received_at < before]
        return (seq for _, seq in sorted(old))

    def _unread(self) -> set[int]:
        return {
            letter.event
            for run_id, sched in self.scheds.items()
            for letter in self.inboxes.get(run_id, {}).values()
            if letter.event is not None and letter.n > sched.absorbed
        }

    def prune_inbox(self, before: int, limit: int) -> int:
        old = [letter for inbox in self.inboxes.values() for letter in inbox.values() if letter.at < before]
        spent = sorted(filter(self._is_spent, old), key=lambda letter: letter.at)[:limit]
        for letter in spent:
            del self.inboxes[letter.run_id][letter.n]
        return len(spent)

    def _is_spent(self, letter: InboxItem) -> bool:
        """A read letter of an open run stays as long as its event: it is what keeps the run from getting it again."""
        sched = self.scheds.get(letter.run_id)
        return sched is None or (letter.n <= sched.absorbed and letter.event not in self.events)

    def prune_runs(self, before: int, limit: int) -> int:
        old = [
            (result.ended_at, run_id)
            for run_id, result in self.results.items()
            if result.ended_at < before and run_id not in self.scheds
        ]
        chosen = [run_id for _, run_id in sorted(old)[:limit]]
        for run_id in chosen:
            self.remove(run_id)
        return len(chosen) + self._prune_generations(before, limit - len(chosen))

    def remove(self, run_id: RunId) -> None:
        for gen in self.runs.pop(run_id):
            self.histories.pop((run_id, gen), None)
        self.inboxes.pop(run_id, None)
        self.watching.pop(run_id, None)
        self.value_rows.pop(run_id, None)
        del self.results[run_id]

    def _prune_generations(self, before: int, limit: int) -> int:
        followed = [
            (generations[gen + 1].created_at, run_id, gen)
            for run_id, generations in self.runs.items()
            for gen in generations
            if run_id in self.scheds and gen + 1 in generations and generations[gen + 1].created_at < before
        ]
        chosen = sorted(followed)[:limit]
        for _, run_id, gen in chosen:
            del self.runs[run_id][gen]
            self.histories.pop((run_id, gen), None)
        return len(chosen)
