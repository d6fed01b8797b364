"""Events, messages, waits, staged events and run values in dictionaries."""

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
    RunValue,
    RunWrite,
    StagedEventRow,
    StagedKind,
    StoredEvent,
    Wait,
)
from edda.errors import StorageConflictError

from .tables import OpenRun, Tables, check_text, check_values


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


class MemoryEvents(MemoryStaging):
    # Accepting

    def accept(
        self, post: Sequence[NewEvent], versions: Mapping[str, int], forwarded: Sequence[int] = ()
    ) -> AcceptResult | None:
        for incoming in post:
            for record in (incoming.event, *incoming.starts):
                check_values(record)
        types = {incoming.event.type for incoming in post}
        if any(self.types.get(type, MatchPaths()).version != versions.get(type, 0) for type in types):
            return None
        self.forward(forwarded)
        fresh, woke = set[int](), False
        for position, incoming in enumerate(post):
            if (incoming.event.source, incoming.event.id) not in self.numbers:
                fresh.add(position)
                woke |= self._store(incoming)
        return AcceptResult(frozenset(fresh), woke)

    def _store(self, incoming: NewEvent) -> bool:
        """Whether there is something to do for somebody."""
        event, seq = incoming.event, self.newest + 1
        self.events[seq] = StoredEvent(seq, self.now(), event)
        self.numbers[event.source, event.id] = seq
        had = set(self._deliver_shared(incoming, seq))
        for key in incoming.keys:
            if key.once and (taker := self._deliver_exclusive(key, event.target, seq, had)):
                had.add(taker)
            else:
                self.keys.setdefault(key.kept, set()).add(seq)
        started = [start for start in incoming.starts if start.run_id not in self.runs]
        for start in started:
            self.insert(start, ready_at=self.now() if start.ready_at is None else start.ready_at, start_seq=seq)
        return bool(had or started)

    def _deliver_shared(self, incoming: NewEvent, seq: int) -> list[RunId]:
        plain = {key.plain for key in incoming.keys if not key.once}
        takers = list(self._first_steps(plain, incoming.event.target))
        for run_id, step in takers:
            self._deliver(run_id, EntryKind.EVENT, step, seq)
        return [run_id for run_id, _ in takers]

    def _deliver_exclusive(self, key: EventKey, target: RunId | None, seq: int, had: set[RunId]) -> RunId | None:
        """One of those who wait under the key; nobody who has the event by another key gets it twice."""
        for run_id, step in self._first_steps({key.plain}, target):
            if run_id not in had:
                self._deliver(run_id, EntryKind.MESSAGE, step, seq)
                return run_id
        return None

    def _deliver(self, run_id: RunId, kind: EntryKind, step: str, seq: int) -> None:
        del self.waiting[run_id][step]
        self.deliver(self.scheds[run_id], kind, step=step, event=seq)
        self.scheds[run_id].wake()

    def _first_steps(self, plain: set[bytes], target: RunId | None) -> Iterator[tuple[RunId, str]]:
        """At most one wait of each run: that of the first step."""
        for run_id, waits in self.waiting.items():
            steps = [step for step, wait in waits.items() if wait.key in plain]
            if steps and target in (None, run_id):
                yield run_id, min(steps)

    # Waiting: what the journal asks for, inside its own transaction

    def register_waits(self, sched: OpenRun, waits: Sequence[Wait]) -> frozenset[str]:
        """Returns the steps that are not registered: each found its event, or one that another step found too."""
        found = self._look(sched, waits)
        rows = self.waiting.setdefault(sched.run_id, {})
        for wait in waits:
            if wait.step not in found:
                rows.setdefault(wait.step, replace(wait, floor=None))
        kinds = {wait.step: EntryKind.MESSAGE if wait.once else EntryKind.EVENT for wait in waits}
        first = {seq: step for step, seq in sorted(found.items(), reverse=True)}
        for seq, step in sorted(first.items()):
            rows.pop(step, None)
            self.deliver(sched, kinds[step], step=step, event=seq)
        return frozenset(found)

    def _look(self, sched: OpenRun, waits: Sequence[Wait]) -> dict[str, int]:
        shared = ((wait.step, self._find(sched, wait)) for wait in waits if not wait.once)
        found = {step: seq for step, seq in shared if seq is not None}
        for wait in waits:
            if wait.once and (seq := self._take(sched, wait, found.values())) is not None:
                found[wait.step] = seq
        return found

    def _find(self, sched: OpenRun, wait: Wait) -> int | None:
        floor = sched.start_seq if wait.floor is None else wait.floor
        return min((seq for seq in self._available(sched, wait) if seq > floor), default=None)

    def _take(self, sched: OpenRun, wait: Wait, found: Collection[int]) -> int | None:
        """Away from all others, and not what another step of the run has just found."""
        unseen = self._available(sched, wait).difference(found)
        if not unseen:
            return None
        seq = min(unseen)
        for key in (wait.key, wait.own_key):
            self.keys.get(key, set()).discard(seq)
        return seq

    def _available(self, sched: OpenRun, wait: Wait) -> set[int]:
        had = {letter.event for letter in self.inboxes.get(sched.run_id, {}).values()}
        return (self.keys.get(wait.key, set()) | self.keys.get(wait.own_key, set())) - had

    def drop(self, bundle: RunWrite) -> None:
        for step in bundle.drops:
            self.waiting.get(bundle.run_id, {}).pop(step, None)

    def give_back(self, bundle: RunWrite) -> None:
        inbox = self.inboxes.get(bundle.run_id, {})
        for n in bundle.frees:
            if n in inbox:
                inbox[n] = replace(inbox[n], kind=EntryKind.STRAY, event=None)

    # Shapes

    def match_paths(self, types: Sequence[str]) -> dict[str, MatchPaths]:
        return {type: self.types[type] for type in types if type in self.types}

    def register_match_paths(self, type: str, shape: str) -> int:
        check_text(type)
        check_text(shape)
        if (type, shape) not in self.filled:
            self.filled[type, shape] = self.newest
            before = self.types.get(type, MatchPaths())
            self.types[type] = MatchPaths(before.version + 1, tuple(sorted((*before.known, shape))))
        return self.filled[type, shape]

    def backfill_keys(self, type: str, shape: str, keys: Sequence[tuple[bytes, int]], after: int) -> None:
        for key, seq in keys:
            if seq in self.events:  # else pruned meanwhile: a key without its event must never be found
                self.keys.setdefault(key, set()).add(seq)
        if (type, shape) in self.filled:
            self.filled[type, shape] = min(self.filled[type, shape], after)

    # Looking

    def events_of_type(self, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
        fitting = [s for s in self.events.values() if s.event.type == type and after < s.seq <= upto]
        return tuple(fitting[:limit])

    def events_under_key(self, key: bytes, after: int, limit: int) -> tuple[StoredEvent, ...]:
        above = nsmallest(limit, (seq for seq in self.keys.get(key, ()) if seq > after))
        return tuple(self.events[seq] for seq in above)

    def last_event(self, before: int | None = None) -> int:
        if before is None:
            return self.newest
        old = [(stored.received_at, stored.seq) for stored in self.events.values() if stored.received_at < before]
        return max(old, default=(0, 0))[1]

    def find_event(self, source: str, id: str) -> StoredEvent | None:
        seq = self.numbers.get((source, id))
        return None if seq is None else self.events[seq]

    def waits(self, run_id: RunId) -> tuple[Wait, ...]:
        return tuple(wait for _, wait in sorted(self.waiting.get(run_id, {}).items()))
