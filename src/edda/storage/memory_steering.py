"""What people do, to dictionaries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from msgspec.structs import replace

from edda.core.model import Entry, EntryKind, OutboxState, RunId
from edda.core.states import RunStatus
from edda.core.survey import Audit, Definition, EventSchema, ReopenOutcome

from .memory_events import MemoryEvents
from .memory_pruning import MemoryPruning
from .memory_tables import Result, check_values


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
