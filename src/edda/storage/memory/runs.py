"""Runs, their history, their watchers and their values in dictionaries."""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import (
    CancelOutcome,
    EndWatcher,
    Entry,
    EntryKind,
    RunFilter,
    RunId,
    RunRecord,
    RunValue,
    Start,
)

from .queries import MemoryQueries
from .tables import check_values


class MemoryRuns(MemoryQueries):
    def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        for start in starts:
            check_values(start)
        return self.insert_unowned(starts)

    def cancel(self, run_id: RunId, value: bytes) -> CancelOutcome:
        run = self.open_runs.get(run_id)
        if run is None:
            return CancelOutcome.ENDED if run_id in self.runs else CancelOutcome.MISSING
        is_marked = run.cancel_parked()
        if run.cancelled:
            return CancelOutcome.REQUESTED if is_marked else CancelOutcome.ALREADY
        run.cancelled = True
        self.deliver(run, EntryKind.CANCEL, value=value)
        run.wake()
        return CancelOutcome.REQUESTED

    def get(self, run_id: RunId) -> RunRecord | None:
        return self.record(run_id, self.now()) if run_id in self.runs else None

    def add_watcher(self, run_id: RunId, watcher: EndWatcher) -> RunRecord | None:
        check_values(watcher)
        run, known = self.open_runs.get(run_id), self.watcher_rows.get(run_id, set())
        if run and watcher not in known:
            self.watcher_rows[run_id] = known | {watcher}
            run.watchers += 1
        return self.get(run_id)

    def watchers(self, run_id: RunId) -> tuple[EndWatcher, ...]:
        return tuple(sorted(self.watcher_rows.get(run_id, ()), key=lambda watcher: (watcher.run_id, watcher.step)))

    def history(
        self,
        run_id: RunId,
        generation: int | None = None,
        *,
        step: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> tuple[Entry, ...]:
        if generation is None:
            generation = max(self.runs.get(run_id, (0,)))
        history = self.histories.get((run_id, generation), {})
        entries = (history[seq] for seq in sorted(history) if seq > after)
        return tuple(entry for entry in entries if step in (None, entry.step))[:limit]

    def find(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        now = self.now()
        records = [record for run_id in self.runs if _fits(record := self.record(run_id, now), filter)]
        records.sort(key=lambda record: (record.created_at, record.run_id), reverse=True)
        return tuple(records[: filter.limit])

    def run_values(self, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        values = sorted(self.value_rows.get(run_id, {}).items())
        return tuple(value for _, value in values if name in (None, value.name))


def _fits(record: RunRecord, filter: RunFilter) -> bool:
    return (
        (filter.status is None or record.status is filter.status)
        and (filter.workflow is None or record.workflow == filter.workflow)
        and (filter.created_from is None or record.created_at >= filter.created_from)
        and (filter.created_to is None or record.created_at < filter.created_to)
        and (filter.before is None or (record.created_at, record.run_id) < filter.before)
    )
