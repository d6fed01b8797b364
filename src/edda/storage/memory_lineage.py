"""Runs that start, watch, tell and follow each other, in dictionaries."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from edda.core.model import NO_CRASHES, End, EndWatcher, EntryKind, Recur, RunId, RunSignal, RunWrite

from .memory_tables import OpenRun, Tables


class MemoryJournal(Tables):
    # Watching

    def _insert_watcher(self, run_id: RunId, watcher: EndWatcher) -> None:
        sched, known = self.scheds.get(run_id), self.watching.get(run_id, set())
        if sched and watcher not in known:
            self.watching[run_id] = known | {watcher}
            sched.watchers += 1

    def watchers(self, run_id: RunId) -> tuple[EndWatcher, ...]:
        return tuple(sorted(self.watching.get(run_id, ()), key=lambda watcher: (watcher.run_id, watcher.step)))

    # What the journal asks for, inside its own transaction

    def is_refused(self, bundle: RunWrite) -> bool:
        """An end that does not know all who watch, an end or a next generation that would leave mail unread."""
        sched = self.scheds.get(bundle.run_id)
        if sched is None or bundle.start:
            return False
        match bundle.move:
            case End(watchers=known, settled=settled):
                return known != sched.watchers or settled not in (None, sched.delivered)
            case Recur(absorbed):
                return absorbed != sched.delivered
        return False

    def recur(self, sched: OpenRun, gen: int, move: Recur) -> None:
        generations = self.runs[sched.run_id]
        generations[gen + 1] = replace(generations[gen], input=move.input, created_at=move.at)
        self.histories[sched.run_id, gen + 1] = {move.entry.seq: move.entry}
        self.waiting.pop(sched.run_id, None)
        sched.gen, sched.absorbed = gen + 1, move.absorbed
        sched.cancelled, sched.undoing, sched.attempts = False, False, 0
        sched.end_if_parked, sched.crashes = False, NO_CRASHES

    def send(self, letters: Iterable[RunSignal]) -> None:
        """Who has ended gets none, and who is cancelled already no further cancel."""
        for letter in letters:
            sched, is_cancel = self.scheds.get(letter.run_id), letter.kind is EntryKind.CANCEL
            if sched is None or (is_cancel and sched.cancelled):
                continue
            sched.cancelled |= is_cancel
            if is_cancel:
                sched.cancel_parked()
            self.deliver(sched, letter.kind, step=letter.step, value=letter.value)
            sched.wake()
