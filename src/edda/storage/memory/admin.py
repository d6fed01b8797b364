"""Administration in dictionaries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from msgspec.structs import replace

from edda.core.model import Entry, EntryKind, OutboxState, RunId
from edda.core.queries import Audit, Definition, EventSchema, ReopenOutcome
from edda.core.states import RunStatus

from .events import MemoryEvents
from .pruning import MemoryPruning
from .tables import Result, check_values


class MemoryAdmin(MemoryEvents, MemoryPruning):
    def reopen(self, run_id: RunId, generation: int, keep: int) -> ReopenOutcome:
        if run_id not in self.runs:
            return ReopenOutcome.MISSING
        result = self.results.get(run_id)
        if result is None or result.generation != generation:
            return ReopenOutcome.OPEN
        self._insert_next_generation(run_id, self.results.pop(run_id))
        history = self.histories.get((run_id, generation), {})
        kept = {seq: history[seq] for seq in islice(sorted(history), keep)}
        self.histories[run_id, generation + 1] = kept
        self._release_events(run_id, kept.values())
        return ReopenOutcome.DONE

    def _insert_next_generation(self, run_id: RunId, result: Result) -> None:
        """Without an owner, ready at once, and with all inbox items read."""
        generations = self.runs[run_id]
        cursor = self.last_event(min(start.created_at for start in generations.values()))
        start = replace(generations[result.generation], created_at=self.now(), deadline=None)
        self.insert(start, ready_at=0, event_cursor=cursor, generation=result.generation + 1, epoch=result.epoch + 1)
        run = self.open_runs[run_id]
        run.inbox_count = run.inbox_read = self._last_inbox_no(run_id)

    def _last_inbox_no(self, run_id: RunId) -> int:
        histories = (self.histories.get((run_id, generation), {}) for generation in self.runs[run_id])
        read = (entry.inbox_no for history in histories for entry in history.values() if entry.inbox_no is not None)
        return max((0, *self.inboxes.get(run_id, {}), *read))

    def _release_events(self, run_id: RunId, kept: Collection[Entry]) -> None:
        """Those that are not in the kept entries: the run may receive them again."""
        kept_events = {entry.event for entry in kept}
        inbox = self.inboxes.get(run_id, {})
        for inbox_no, item in inbox.items():
            if item.event is not None and item.event not in kept_events:
                inbox[inbox_no] = replace(item, kind=EntryKind.LATE_EVENT, event=None)

    def resume(self, run_id: RunId) -> bool:
        run = self.open_runs.get(run_id)
        if run is None or run.status is RunStatus.RUNNING or run.owner is not None:
            return False
        run.resume()
        return True

    def delete(self, run_id: RunId) -> bool:
        if run_id not in self.results:
            return False
        self.delete_run(run_id)
        return True

    def delete_outbox(self, ids: Sequence[str]) -> int:
        dead = [row.seq for row in self.outbox.values() if row.state is OutboxState.DEAD and row.event.id in ids]
        for seq in dead:
            del self.outbox[seq]
        return len(dead)

    def add_audit(self, audit: Audit) -> None:
        check_values(audit)
        self.audit_rows.append(replace(audit, seq=len(self.audit_rows) + 1))

    def audits(self, before: int | None, limit: int) -> tuple[Audit, ...]:
        older = (audit for audit in reversed(self.audit_rows) if before is None or audit.seq < before)
        return tuple(islice(older, limit))

    def save_definitions(self, definitions: Sequence[Definition], schemas: Sequence[EventSchema]) -> None:
        for record in (*definitions, *schemas):
            check_values(record)
        self.definition_rows.update((definition.workflow, definition) for definition in definitions)
        self.schema_rows.update(((schema.workflow, schema.type), schema) for schema in schemas)
