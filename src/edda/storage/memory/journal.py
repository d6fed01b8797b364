"""Batches of run writes in dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from edda.core.model import (
    NO_CRASHES,
    AckInbox,
    BatchResult,
    End,
    EntryKind,
    Fence,
    Recur,
    RunId,
    RunSignal,
    RunWrite,
    Suspend,
    WorkerId,
)
from edda.errors import StorageDuplicateError
from edda.storage.shared.batches import is_refused

from .events import MemoryEvents
from .tables import OpenRun, Result, check_values


class MemoryJournal(MemoryEvents):
    def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        stored = self.fences.get(fence.worker)
        if stored is None or stored.claims < fence.claims or replace(stored, claims=fence.claims) != fence:
            return None
        for write in batch:  # all of them before the first change: a batch is written whole or not at all
            self._check(write)
        self.fences[fence.worker] = replace(stored, batch_no=fence.batch_no + 1, token=token)
        ready = set[RunId]()
        refused = dict[RunId, frozenset[str]]()
        for write in batch:
            self._add(fence.worker, write)
        self.insert_unowned(child for write in batch for child in write.children)
        for write in batch:
            run = self.open_runs.get(write.run_id) if write.start is None else None
            stays = run is not None and is_refused(write.transition, run.watchers, run.inbox_count)
            steps = self._change_waits(write)
            if stays or steps:
                refused[write.run_id] = steps
            if self._change_state(write, stays=stays or bool(steps)):
                ready.add(write.run_id)
            if not stays:
                self._send(write.signals)
        return BatchResult(frozenset(ready), refused)

    def _check(self, write: RunWrite) -> None:
        for record in _records(write):
            check_values(record)
        seqs = {entry.seq for entry in write.entries}
        recorded = self.histories.get((write.run_id, write.generation), {})
        if len(seqs) < len(write.entries) or not seqs.isdisjoint(recorded):
            raise StorageDuplicateError(f"run {write.run_id}: a history row with this number exists")
        if write.start and (write.run_id in self.open_runs or write.generation in self.runs.get(write.run_id, {})):
            raise StorageDuplicateError(f"run {write.run_id} exists")
        if isinstance(write.transition, End) and write.run_id in self.results:
            raise StorageDuplicateError(f"run {write.run_id} has a result")
        if isinstance(write.transition, End | Suspend) and (run := self.open_runs.get(write.run_id)):
            run.check_status(write.transition.status, write.compensating)

    def _add(self, worker: WorkerId, write: RunWrite) -> None:
        """The rows that are written even if the transition is refused."""
        if start := write.start:
            self.insert(
                start,
                ready_at=start.ready_at,
                event_cursor=self.newest,
                generation=write.generation,
                epoch=write.epoch,
                owner=worker if start.ready_at is None else None,
            )
        history = self.histories.setdefault((write.run_id, write.generation), {})
        history.update((entry.seq, entry) for entry in write.entries)
        for staged in write.staged_events:
            self.stage(staged.kind, staged.body, due=0)
        self.insert_outbox(write.outbox_events)
        if write.values:
            self.value_rows.setdefault(write.run_id, {}).update((value.name, value) for value in write.values)
        if write.compensating and (run := self.open_runs.get(write.run_id)):
            run.compensating = True

    def _change_waits(self, write: RunWrite) -> frozenset[str]:
        """Returns the steps that are not registered, because the run has inbox items to read first."""
        run = self.open_runs.get(write.run_id)
        if run is None:
            return frozenset()
        self.cancel_waits(write)
        self.release_items(write)
        if not write.waits:
            return frozenset()
        if isinstance(write.transition, AckInbox | Suspend) and run.inbox_count != write.transition.inbox_read:
            return frozenset(wait.step for wait in write.waits)
        return self.register_waits(run, write.waits)

    def _change_state(self, write: RunWrite, stays: bool) -> bool:
        """Whether the run is suspended and ready again at once. `stays`: the transition is refused."""
        run = self.open_runs.get(write.run_id)
        match write.transition:
            case End(status, value, at) if not stays:
                self.results[write.run_id] = Result(write.generation, status, value, at, write.epoch)
                for rows in (self.open_runs, self.wait_rows, self.watcher_rows):
                    rows.pop(write.run_id, None)
            case Recur() as recur if run and not stays:
                self._recur(run, write.generation, recur)
            case Suspend() as suspend if run and not stays:
                return run.suspend(suspend, self.now())
            case AckInbox(inbox_read) | Suspend(inbox_read) | Recur(inbox_read) | End(inbox_read=int(inbox_read)) if (
                run
            ):
                run.inbox_read = inbox_read
        return False

    def _recur(self, run: OpenRun, generation: int, recur: Recur) -> None:
        generations = self.runs[run.run_id]
        generations[generation + 1] = replace(generations[generation], input=recur.input, created_at=recur.at)
        self.histories[run.run_id, generation + 1] = {recur.entry.seq: recur.entry}
        self.wait_rows.pop(run.run_id, None)
        run.generation, run.inbox_read = generation + 1, recur.inbox_read
        run.cancelled, run.compensating, run.attempts = False, False, 0
        run.end_if_parked, run.crashes = False, NO_CRASHES

    def _send(self, signals: Iterable[RunSignal]) -> None:
        """A run that has ended receives none, and a run that is cancelled no second cancel."""
        for signal in signals:
            run, is_cancel = self.open_runs.get(signal.run_id), signal.kind is EntryKind.CANCEL
            if run is None or (is_cancel and run.cancelled):
                continue
            if is_cancel:
                run.cancelled = True
                run.cancel_parked()
            self.deliver(run, signal.kind, step=signal.step, value=signal.value)
            run.wake()

    def read_fence(self, worker: WorkerId) -> Fence | None:
        return self.fences.get(worker)

    def owned_runs(self, worker: WorkerId) -> dict[RunId, int]:
        return {run.run_id: run.epoch for run in self.owned_by(worker)}


def _records(write: RunWrite) -> Iterator[Struct]:
    """All records of it that are stored."""
    yield write
    yield from (record for record in (write.start, write.transition) if record is not None)
    if isinstance(write.transition, Recur):
        yield write.transition.entry
    yield from (*write.entries, *write.waits, *write.children, *write.signals)
    yield from (*write.staged_events, *write.outbox_events, *write.values)
