"""Events and the waits for them, in dictionaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from edda.core.model import (
    Accepted,
    Bundle,
    EntryKind,
    Incoming,
    RunId,
    Shapes,
    StoredEvent,
    Wait,
)

from .memory_tables import Sched, Tables, check_text, check_values


class MemoryEvents(Tables):
    # Accepting

    def accept(self, post: Sequence[Incoming], versions: Mapping[str, int]) -> Accepted | None:
        for incoming in post:
            for record in (incoming.event, *incoming.starts):
                check_values(record)
        types = {incoming.event.type for incoming in post}
        if any(self.types.get(type, Shapes()).version != versions.get(type, 0) for type in types):
            return None
        fresh, woke = set[int](), False
        for position, incoming in enumerate(post):
            if (incoming.event.source, incoming.event.id) not in self.numbers:
                fresh.add(position)
                woke |= self._take_in(incoming)
        return Accepted(frozenset(fresh), woke)

    def _take_in(self, incoming: Incoming) -> bool:
        """Whether there is something to do for somebody."""
        event, seq = incoming.event, self.newest + 1
        self.events[seq] = StoredEvent(seq, self.now(), event)
        self.numbers[event.source, event.id] = seq
        for key in incoming.keys:
            self.keys.setdefault(key.kept, set()).add(seq)
        takers = list(self._takers(incoming))
        for sched, step in takers:
            del self.waiting[sched.run_id][step]
            self.deliver(sched, EntryKind.EVENT, step=step, event=seq)
            sched.wake()
        started = [start for start in incoming.starts if start.run_id not in self.runs]
        for start in started:
            self.insert(start, ready_at=self.now() if start.ready_at is None else start.ready_at, start_seq=seq)
        return bool(takers or started)

    def _takers(self, incoming: Incoming) -> Iterator[tuple[Sched, str]]:
        """At most one wait of each run: that of the first step."""
        plain, target = {key.plain for key in incoming.keys}, incoming.event.target
        for run_id, waits in self.waiting.items():
            steps = [step for step, wait in waits.items() if wait.key in plain]
            if steps and target in (None, run_id):
                yield self.scheds[run_id], min(steps)

    # Waiting: what the journal asks for, inside its own transaction

    def register_waits(self, sched: Sched, waits: Sequence[Wait]) -> frozenset[str]:
        """Returns the steps that are not registered: each found its event, or one that another step found too."""
        found = {wait.step: seq for wait in waits if (seq := self._find(sched, wait)) is not None}
        rows = self.waiting.setdefault(sched.run_id, {})
        for wait in waits:
            if wait.step not in found:
                rows.setdefault(wait.step, replace(wait, floor=None))
        first = {seq: step for step, seq in sorted(found.items(), reverse=True)}
        for seq, step in sorted(first.items()):
            rows.pop(step, None)
            self.deliver(sched, EntryKind.EVENT, step=step, event=seq)
        return frozenset(found)

    def _find(self, sched: Sched, wait: Wait) -> int | None:
        floor = sched.start_seq if wait.floor is None else wait.floor
        had = {letter.event for letter in self.inboxes.get(sched.run_id, {}).values()}
        kept = self.keys.get(wait.key, set()) | self.keys.get(wait.own_key, set())
        return min((seq for seq in kept - had if seq > floor), default=None)

    def drop(self, bundle: Bundle) -> None:
        for step in bundle.drops:
            self.waiting.get(bundle.run_id, {}).pop(step, None)

    def give_back(self, bundle: Bundle) -> None:
        inbox = self.inboxes.get(bundle.run_id, {})
        for n in bundle.frees:
            if n in inbox:
                inbox[n] = replace(inbox[n], kind=EntryKind.STRAY, event=None)

    # Shapes

    def shapes(self, types: Sequence[str]) -> dict[str, Shapes]:
        return {type: self.types[type] for type in types if type in self.types}

    def learn(self, type: str, shape: str) -> int:
        check_text(type)
        check_text(shape)
        if (type, shape) not in self.filled:
            self.filled[type, shape] = self.newest
            before = self.types.get(type, Shapes())
            self.types[type] = Shapes(before.version + 1, tuple(sorted((*before.known, shape))))
        return self.filled[type, shape]

    def fill(self, type: str, shape: str, keys: Sequence[tuple[bytes, int]], after: int) -> None:
        for key, seq in keys:
            if seq in self.events:  # else pruned meanwhile: a key without its event must never be found
                self.keys.setdefault(key, set()).add(seq)
        if (type, shape) in self.filled:
            self.filled[type, shape] = min(self.filled[type, shape], after)

    # Looking

    def log(self, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
        fitting = [s for s in self.events.values() if s.event.type == type and after < s.seq <= upto]
        return tuple(fitting[:limit])

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
