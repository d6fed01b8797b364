"""Events, waits, cancels, new generations and prunings, in any sequence: a database does as the memory adapter does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from msgspec.structs import replace

from edda.core.model import (
    AcceptResult,
    AckInbox,
    End,
    EndWatcher,
    EntryKind,
    NewEvent,
    RunId,
    RunWrite,
    StoredEvent,
    Suspend,
    Transition,
    Wait,
    WorkerId,
)
from edda.core.states import RunStatus
from edda.storage.memory.tables import OpenRun
from edda.storage.ports import Storage
from tests.conftest import new_database

from .comparison import RUNS, WORKFLOWS, Comparison, comparable, runs, starts
from .comparison import steps as watching
from .records import HOUR, LATER, again, born, done, entry, incoming, key, wait
from .worker import Worker

TYPES = ["paid", "refunded"]
EVENTS = {f"event-{number}": TYPES[number % 2] for number in range(8)}
"""Whether the second of two equal events in a post counts for the versions is left open, so both have one type."""
SHAPES = ["a", "b"]
NAMES = ["order", "customer"]
STEPS = [f"{name}-{place}" for name in NAMES for place in "ab"]
"""What a step waits for is in its name, so that it asks for the same whenever it asks."""

steps = st.lists(st.sampled_from(STEPS), unique=True)
some_runs = st.lists(runs, unique=True, min_size=1, max_size=4)
ages = st.sampled_from([-HOUR, HOUR // 2, 24 * HOUR])


class Waiting(Comparison):
    """One worker that always knows its fence: every batch is one that the engine could send."""

    worker = WorkerId("worker")

    @initialize()
    def open(self) -> None:
        super().open()
        self.ask(lambda storage: Worker(storage, self.worker).register(), bool)
        self._write([born(run) for run in RUNS[:4]])

    # The worker

    @rule(chosen=some_runs, data=st.data())
    def begin(self, chosen: list[RunId], data: st.DataObject) -> None:
        """Born by the worker, awake or asleep."""
        new = [run for run in chosen if run not in self.model.database.runs]
        self._write([self._draw_birth(data, run) for run in new])

    def _draw_birth(self, data: st.DataObject, run: RunId) -> RunWrite:
        start = replace(data.draw(starts(run), label="start"), ready_at=None)
        move = data.draw(st.sampled_from([None, AckInbox(0), _asleep(0)]), label="move")
        return RunWrite(run, 1, 0, (entry(1),), start, move, self._draw_waits(data, run, floors=False))

    @precondition(lambda self: self.awake)
    @rule(everything=st.booleans(), data=st.data())
    def wait(self, everything: bool, data: st.DataObject) -> None:
        """Runs that have read everything, or some of their mail, ask for events and stay or fall asleep."""
        self._write([self._draw_wait(data, sched, everything) for sched in self._draw_awake(data)])

    def _draw_wait(self, data: st.DataObject, sched: OpenRun, everything: bool) -> RunWrite:
        absorbed = sched.delivered if everything else data.draw(st.integers(sched.absorbed, sched.delivered))
        moves: list[Transition] = [AckInbox(absorbed), _asleep(absorbed)]
        move = data.draw(st.sampled_from(moves), label="move")
        waits = self._draw_waits(data, sched.run_id, floors=True)
        drops = set(data.draw(steps, label="drops")) - {wait.step for wait in waits}
        return _bundle(sched, move, waits=waits, drops=tuple(drops))

    def _draw_waits(self, data: st.DataObject, run: RunId, floors: bool) -> tuple[Wait, ...]:
        places = st.none() | st.integers(0, len(self.numbers[self.model])) if floors else st.none()
        return tuple(_wait(run, step, data.draw(places, label="floor")) for step in data.draw(steps, label="waits"))

    @precondition(lambda self: self.awake)
    @rule(end=st.integers(0, 4), data=st.data())
    def give_back(self, end: int, data: st.DataObject) -> None:
        self._write([self._draw_frees(data, sched, end == 0) for sched in self._draw_awake(data)])

    def _draw_frees(self, data: st.DataObject, sched: OpenRun, end: bool) -> RunWrite:
        move = self._draw_end(data, sched) if end else AckInbox(sched.delivered)
        return _bundle(sched, move, frees=self._draw_brought(data, sched))

    def _draw_brought(self, data: st.DataObject, sched: OpenRun) -> tuple[int, ...]:
        inbox = self.model.database.inboxes.get(sched.run_id, {})
        brought = [n for n, letter in inbox.items() if letter.kind is EntryKind.EVENT]
        frees = data.draw(st.lists(st.sampled_from(brought), unique=True) if brought else st.just([]), label="frees")
        return tuple(frees)

    def _draw_end(self, data: st.DataObject, sched: OpenRun) -> End:
        """What its last entries read is read, even if it overlooks a watcher and has to stay."""
        overlooked = data.draw(st.booleans(), label="overlooks a watcher")
        absorbed = data.draw(st.none() | st.integers(sched.absorbed, sched.delivered), label="absorbed")
        return replace(done(watchers=max(0, sched.watchers - overlooked)), absorbed=absorbed)

    @precondition(lambda self: self.awake)
    @rule(read=st.booleans(), data=st.data())
    def recur(self, read: bool, data: st.DataObject) -> None:
        """Runs go on as their next generation, if they have read everything."""
        self._write([self._draw_recur(data, sched, read) for sched in self._draw_awake(data)])

    def _draw_recur(self, data: st.DataObject, sched: OpenRun, read: bool) -> RunWrite:
        move = again(sched.delivered if read else sched.absorbed)
        drops = tuple(data.draw(steps, label="drops"))
        return _bundle(sched, move, drops=drops, frees=self._draw_brought(data, sched))

    @property
    def awake(self) -> list[OpenRun]:
        return [sched for sched in self.model.database.scheds.values() if sched.owner is not None]

    def _draw_awake(self, data: st.DataObject) -> list[OpenRun]:
        by_run = {sched.run_id: sched for sched in self.awake}
        chosen = st.lists(st.sampled_from(sorted(by_run)), unique=True, min_size=1)
        return [by_run[run] for run in data.draw(chosen, label="runs")]

    def _write(self, batch: Sequence[RunWrite]) -> None:
        fence = self.model.database.fences[self.worker]
        self.ask(lambda storage: storage.write(fence, [self._numbered(storage, bundle) for bundle in batch]))

    def _numbered(self, storage: Storage, bundle: RunWrite) -> RunWrite:
        """Floors are drawn as places in the log."""
        floors = [None if w.floor is None else self.number(storage, w.floor) for w in bundle.waits]
        waits = [replace(w, floor=floor) for w, floor in zip(bundle.waits, floors, strict=True)]
        return replace(bundle, waits=tuple(waits))

    @rule()
    def claim(self) -> None:
        self.ask(lambda storage: self.claimed(storage, self.worker, WORKFLOWS))

    # The world

    @rule(run=runs)
    def cancel(self, run: RunId) -> None:
        self.ask(lambda storage: storage.cancel(run, b"stop"))

    @rule(run=runs, watcher=st.builds(EndWatcher, runs, watching))
    def watch(self, run: RunId, watcher: EndWatcher) -> None:
        async def watch(storage: Storage) -> object:
            record = await storage.add_watcher(run, watcher)
            return comparable([record] if record else [])

        self.ask(watch)

    @rule(data=st.data(), stale=st.integers(0, 9))
    def accept(self, data: st.DataObject, stale: int) -> None:
        post = data.draw(st.lists(_incoming(), min_size=1, max_size=5), label="post")
        versions = {type: known.version for type, known in self.model.database.types.items()}
        if stale == 0:
            versions[TYPES[0]] = versions.get(TYPES[0], 0) + 1

        async def accept(storage: Storage) -> AcceptResult | None:
            accepted = await storage.accept(post, versions)
            for position in sorted(accepted.fresh) if accepted else ():
                stored = await storage.find_event(post[position].event.source, post[position].event.id)
                assert stored
                self.numbers[storage].append(stored.seq)
            return accepted

        self.ask(accept)

    @rule(type=st.sampled_from(TYPES), shape=st.sampled_from(SHAPES))
    def learn(self, type: str, shape: str) -> None:
        async def learn(storage: Storage) -> int:
            return self.place(storage, await storage.register_match_paths(type, shape))

        self.ask(learn)

    @rule(type=st.sampled_from(TYPES), shape=st.sampled_from(SHAPES), data=st.data())
    def fill(self, type: str, shape: str, data: st.DataObject) -> None:
        count = len(self.numbers[self.model])
        after = data.draw(st.integers(0, count), label="after")
        places = data.draw(st.lists(st.integers(1, count), max_size=4) if count else st.just([]), label="events")
        keys = [key(data.draw(st.sampled_from(NAMES), label="name")) for _ in places]

        async def fill(storage: Storage) -> None:
            numbers = [self.number(storage, place) for place in places]
            await storage.backfill_keys(type, shape, list(zip(keys, numbers, strict=True)), self.number(storage, after))

        self.ask(fill)

    # Time

    @rule(age=ages)
    def prune_events(self, age: int) -> None:
        """All that may go: which of them go first is free between events of one post."""

        async def prune(storage: Storage) -> int:
            return await storage.prune_events(await storage.now() + age, 100)

        self.ask(prune)

    @rule(age=ages)
    def prune_letters(self, age: int) -> None:
        async def prune(storage: Storage) -> int:
            return await storage.prune_inbox(await storage.now() + age, 100)

        self.ask(prune)

    @rule(age=ages)
    def prune_runs(self, age: int) -> None:
        async def prune(storage: Storage) -> int:
            return await storage.prune_runs(await storage.now() + age, 100)

        self.ask(prune)

    # What is compared

    @invariant()
    def the_same_is_stored(self) -> None:
        async def everything(storage: Storage) -> object:
            return (
                await self.stored(storage, [self.worker]),
                [await storage.waits(run) for run in RUNS],
                [await storage.history(run, gen) for run in RUNS for gen in self._generations(run)],
                [self._logged(storage, await storage.events_of_type(type, 0, LATER, 100)) for type in TYPES],
                self.place(storage, await storage.last_event()),
                await storage.match_paths(TYPES),
            )

        self.ask(everything)

    def _generations(self, run: RunId) -> list[int]:
        return sorted(self.model.database.runs.get(run, ()))

    def _logged(self, storage: Storage, log: Sequence[StoredEvent]) -> list[StoredEvent]:
        return [replace(stored, seq=self.place(storage, stored.seq), received_at=0) for stored in log]


def _bundle(
    sched: OpenRun,
    move: Transition,
    *,
    waits: tuple[Wait, ...] = (),
    drops: tuple[str, ...] = (),
    frees: tuple[int, ...] = (),
) -> RunWrite:
    return RunWrite(sched.run_id, sched.epoch, sched.gen, (), None, move, waits, drops, frees)


def _asleep(absorbed: int) -> Suspend:
    return Suspend(absorbed, None, RunStatus.WAITING_FOR_EVENT)


def _wait(run: RunId, step: str, floor: int | None) -> Wait:
    return wait(run, step, step.partition("-")[0], floor=floor)


def _incoming() -> st.SearchStrategy[NewEvent]:
    return st.builds(
        lambda id, names, target, starts: incoming(id, *names, type=EVENTS[id], target=target, starts=starts),
        st.sampled_from(sorted(EVENTS)),
        st.lists(st.sampled_from(NAMES), unique=True),
        st.none() | runs,
        st.lists(runs.flatmap(starts), max_size=1),
    )


@pytest.mark.timeout(900)  # a failure takes minutes to be made small
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
def test_an_adapter_handles_events_as_the_model_does(kind: str, tmp_path: Path) -> None:
    class OnThisDatabase(Waiting):
        def __init__(self) -> None:
            super().__init__(new_database(kind, tmp_path / f"{uuid4()}.db"))

    run_state_machine_as_test(OnThisDatabase)
