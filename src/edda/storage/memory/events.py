"""Events, messages, waits and staged events in dictionaries."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import islice

from msgspec.structs import replace

from edda.core.model import (
    AcceptResult,
    EntryKind,
    EventKey,
    MatchPaths,
    NewEvent,
    RunId,
    RunWrite,
    StagedEventRow,
    StagedKind,
    StoredEvent,
    Wait,
)
from edda.errors import StorageConflictError
from edda.storage.shared.batches import receivers_of

from .tables import OpenRun, Tables, check_text, check_values


class MemoryEvents(Tables):
    # Staged events

    def stage(self, kind: StagedKind, body: bytes, due: int) -> StagedEventRow:
        self.last_staged_seq += 1
        row = StagedEventRow(self.last_staged_seq, kind, body)
        self.staged[row.seq] = due, row
        return row

    def take_message(self, key: bytes, lease: int) -> StagedEventRow | None:
        numbers = self.keys.get(key)
        if not numbers:
            return None
        seq = min(numbers)
        numbers.remove(seq)
        return self.stage(StagedKind.REDELIVERY, self.events[seq].event.body, due=self.now() + lease)

    def staged_events(self, limit: int) -> tuple[StagedEventRow, ...]:
        now = self.now()
        return tuple(islice((row for due, row in self.staged.values() if due <= now), limit))

    # Accepting

    def accept(
        self, events: Sequence[NewEvent], versions: Mapping[str, int], staged: Sequence[int] = ()
    ) -> AcceptResult | None:
        for incoming in events:
            for record in (incoming.event, *incoming.starts):
                check_values(record)
        types = {incoming.event.type for incoming in events}
        if any(self.types.get(type, MatchPaths()).version != versions.get(type, 0) for type in types):
            return None
        if missing := set(staged) - self.staged.keys():
            raise StorageConflictError(f"another process has moved {sorted(missing)} into the log")
        for number in set(staged):
            del self.staged[number]
        new, woke = set[int](), False
        for position, incoming in enumerate(events):
            if (incoming.event.source, incoming.event.id) not in self.event_numbers:
                new.add(position)
                woke |= self._store(incoming)
        return AcceptResult(frozenset(new), woke)

    def _store(self, incoming: NewEvent) -> bool:
        """Whether a run received or was started by the event."""
        event, seq = incoming.event, self.newest + 1
        self.events[seq] = StoredEvent(seq, self.now(), event)
        self.event_numbers[event.source, event.id] = seq
        shared = {key.wait_key for key in incoming.keys if not key.exclusive}
        receivers = dict(self._first_steps(shared, event.target))
        for run_id, step in receivers.items():
            self._deliver_to_wait(run_id, EntryKind.EVENT, step, seq)
        served = set(receivers)
        for key in incoming.keys:
            if key.exclusive and (receiver := self._deliver_exclusive(key, event.target, seq, served)):
                served.add(receiver)
            else:
                self.keys.setdefault(key.stored_key, set()).add(seq)
        return bool(served) | bool(self.insert_unowned(incoming.starts))

    def _deliver_exclusive(self, key: EventKey, target: RunId | None, seq: int, served: set[RunId]) -> RunId | None:
        """To one run that waits under the key and has not received the event by another key."""
        for run_id, step in self._first_steps({key.wait_key}, target):
            if run_id not in served:
                self._deliver_to_wait(run_id, EntryKind.MESSAGE, step, seq)
                return run_id
        return None

    def _deliver_to_wait(self, run_id: RunId, kind: EntryKind, step: str, seq: int) -> None:
        del self.wait_rows[run_id][step]
        self.deliver(self.open_runs[run_id], kind, step=step, event=seq)
        self.open_runs[run_id].wake()

    def _first_steps(self, keys: set[bytes], target: RunId | None) -> Iterator[tuple[RunId, str]]:
        """The runs that wait under one of the keys, each with its first waiting step."""
        for run_id, waits in self.wait_rows.items():
            steps = [step for step, wait in waits.items() if wait.key in keys]
            if steps and target in (None, run_id):
                yield run_id, min(steps)

    # Waits, for the journal inside its transaction

    def register_waits(self, run: OpenRun, waits: Sequence[Wait]) -> frozenset[str]:
        """Returns the steps that are not registered: each found an event, perhaps the same as another step."""
        found = self._find_events(run, waits)
        rows = self.wait_rows.setdefault(run.run_id, {})
        for wait in waits:
            if wait.step not in found:
                rows.setdefault(wait.step, replace(wait, cursor=None))
        kinds = {wait.step: EntryKind.MESSAGE if wait.exclusive else EntryKind.EVENT for wait in waits}
        for seq, step in receivers_of(found).items():
            rows.pop(step, None)
            self.deliver(run, kinds[step], step=step, event=seq)
        return frozenset(found)

    def _find_events(self, run: OpenRun, waits: Sequence[Wait]) -> dict[str, int]:
        found: dict[str, int] = {}
        for wait in waits:
            cursor = run.event_cursor if wait.cursor is None else wait.cursor
            newer = [] if wait.exclusive else [seq for seq in self._available(run, wait) if seq > cursor]
            if newer:
                found[wait.step] = min(newer)
        for wait in waits:
            if wait.exclusive and (seq := self._take(run, wait, found.values())) is not None:
                found[wait.step] = seq
        return found

    def _take(self, run: OpenRun, wait: Wait, found: Collection[int]) -> int | None:
        """Take a message that no other step of the run has just found; no other run can find it afterwards."""
        available = self._available(run, wait).difference(found)
        if not available:
            return None
        seq = min(available)
        for key in (wait.key, wait.target_key):
            self.keys.get(key, set()).discard(seq)
        return seq

    def _available(self, run: OpenRun, wait: Wait) -> set[int]:
        received = {item.event for item in self.inboxes.get(run.run_id, {}).values()}
        return (self.keys.get(wait.key, set()) | self.keys.get(wait.target_key, set())) - received

    def cancel_waits(self, write: RunWrite) -> None:
        for step in write.cancelled_waits:
            self.wait_rows.get(write.run_id, {}).pop(step, None)

    def release_items(self, write: RunWrite) -> None:
        inbox = self.inboxes.get(write.run_id, {})
        for inbox_no in write.released_items:
            if inbox_no in inbox:
                inbox[inbox_no] = replace(inbox[inbox_no], kind=EntryKind.LATE_EVENT, event=None)

    def waits(self, run_id: RunId) -> tuple[Wait, ...]:
        return tuple(wait for _, wait in sorted(self.wait_rows.get(run_id, {}).items()))

    # Match paths

    def match_paths(self, types: Sequence[str]) -> dict[str, MatchPaths]:
        return {type: self.types[type] for type in types if type in self.types}

    def register_match_paths(self, type: str, paths: str) -> int:
        check_text(type)
        check_text(paths)
        if (type, paths) not in self.filled_from:
            self.filled_from[type, paths] = self.newest
            before = self.types.get(type, MatchPaths())
            self.types[type] = MatchPaths(before.version + 1, tuple(sorted((*before.known, paths))))
        return self.filled_from[type, paths]

    def backfill_keys(self, type: str, paths: str, keys: Sequence[tuple[bytes, int]], after: int) -> None:
        for key, seq in keys:
            if seq in self.events:  # else pruned meanwhile: a key without its event must never be found
                self.keys.setdefault(key, set()).add(seq)
        if (type, paths) in self.filled_from:
            self.filled_from[type, paths] = min(self.filled_from[type, paths], after)

    # Reading the log

    def events_of_type(self, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
        fitting = (s for s in self.events.values() if s.event.type == type and after < s.seq <= upto)
        return tuple(islice(fitting, limit))

    def events_under_key(self, key: bytes, after: int, limit: int) -> tuple[StoredEvent, ...]:
        numbers = nsmallest(limit, (seq for seq in self.keys.get(key, ()) if seq > after))
        return tuple(self.events[seq] for seq in numbers)

    def last_event(self, before: int | None = None) -> int:
        if before is None:
            return self.newest
        old = [(stored.received_at, stored.seq) for stored in self.events.values() if stored.received_at < before]
        return max(old, default=(0, 0))[1]

    def find_event(self, source: str, id: str) -> StoredEvent | None:
        seq = self.event_numbers.get((source, id))
        return None if seq is None else self.events[seq]
