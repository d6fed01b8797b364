"""Administration and pruning in dictionaries."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from msgspec.structs import replace

from edda.core.model import MICROSECONDS, Entry, EntryKind, InboxItem, OutboxState, RunId
from edda.core.queries import Audit, Definition, EventSchema, ReopenOutcome
from edda.core.states import RunStatus

from .events import MemoryEvents
from .tables import Result, Tables, check_values

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


class MemorySteering(MemoryEvents, MemoryPruning):
    def reopen(self, run_id: RunId, gen: int, keep: int) -> ReopenOutcome:
        if run_id not in self.runs:
            return ReopenOutcome.MISSING
        result = self.results.get(run_id)
        if result is None or result.gen != gen:
            return ReopenOutcome.OPEN
        self._follow(run_id, self.results.pop(run_id))
        history = self.histories.get((run_id, gen), {})
        kept = {seq: history[seq] for seq in islice(sorted(history), keep)}
        self.histories[run_id, gen + 1] = kept
        self._let_go(run_id, kept.values())
        return ReopenOutcome.DONE

    def _follow(self, run_id: RunId, result: Result) -> None:
        """Nobody's run once more, ready at once, and with all its letters read."""
        generations = self.runs[run_id]
        born = self.last_event(min(start.created_at for start in generations.values()))
        start = replace(generations[result.gen], created_at=self.now(), deadline=None)
        self.insert(start, ready_at=0, start_seq=born, gen=result.gen + 1, epoch=result.epoch + 1)
        self.scheds[run_id].delivered = self.scheds[run_id].absorbed = self._last_letter(run_id)

    def _last_letter(self, run_id: RunId) -> int:
        entries = (entry for gen in self.runs[run_id] for entry in self.histories.get((run_id, gen), {}).values())
        return max((0, *self.inboxes.get(run_id, {}), *(entry.n for entry in entries if entry.n is not None)))

    def _let_go(self, run_id: RunId, kept: Collection[Entry]) -> None:
        """Of events that it does not remember: it may be given them again."""
        remembered = {entry.event for entry in kept}
        inbox = self.inboxes.get(run_id, {})
        for n, letter in inbox.items():
            if letter.event is not None and letter.event not in remembered:
                inbox[n] = replace(letter, kind=EntryKind.STRAY, event=None)

    def resume(self, run_id: RunId) -> bool:
        sched = self.scheds.get(run_id)
        if sched is None or sched.status is RunStatus.RUNNING or sched.owner is not None:
            return False
        sched.resume()
        return True

    def delete(self, run_id: RunId) -> bool:
        if run_id not in self.results:
            return False
        self.remove(run_id)
        return True

    def delete_outbox(self, ids: Sequence[str]) -> int:
        dead = [r.seq for r in self.outbox.values() if r.state is OutboxState.DEAD and r.event.id in ids]
        for seq in dead:
            del self.outbox[seq]
        return len(dead)

    def add_audit(self, audit: Audit) -> None:
        check_values(audit)
        self.audit_rows.append(replace(audit, seq=len(self.audit_rows) + 1))

    def audits(self, before: int | None, limit: int) -> tuple[Audit, ...]:
        older = (audit for audit in reversed(self.audit_rows) if before is None or audit.seq < before)
        return tuple(islice(older, limit))

    def save_definitions(self, definitions: Sequence[Definition], forms: Sequence[EventSchema]) -> None:
        for record in (*definitions, *forms):
            check_values(record)
        self.known_workflows.update((definition.workflow, definition) for definition in definitions)
        self.known_forms.update(((form.workflow, form.type), form) for form in forms)
