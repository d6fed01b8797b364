"""Events, waits, cancels, new generations and pruning, in any order: a database answers as the memory storage."""

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
from .records import HOUR, LATER, done, entry, incoming, key, new_run, next_generation, wait
from .worker import Worker

TYPES = ["paid", "refunded"]
EVENTS = {f"event-{number}": TYPES[number % 2] for number in range(8)}
"""Whether the second of two equal events in one call counts for the versions is not defined, so both have one type."""
SHAPES = ["a", "b"]
NAMES = ["order", "customer"]
STEPS = [f"{name}-{place}" for name in NAMES for place in "ab"]
"""The key is part of the step's name, so that a step always waits for the same."""

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
        self._write([new_run(run) for run in RUNS[:4]])

    # The worker

    @rule(chosen=some_runs, data=st.data())
    def begin(self, chosen: list[RunId], data: st.DataObject) -> None:
        """New runs of the worker, running or suspended."""
        new = [run for run in chosen if run not in self.model.database.runs]
        self._write([self._draw_birth(data, run) for run in new])

    def _draw_birth(self, data: st.DataObject, run: RunId) -> RunWrite:
        start = replace(data.draw(starts(run), label="start"), ready_at=None)
        transition = data.draw(st.sampled_from([None, AckInbox(0), _suspended(0)]), label="transition")
        return RunWrite(run, 1, 0, (entry(1),), start, transition, self._draw_waits(data, run, cursors=False))

    @precondition(lambda self: self.awake)
    @rule(everything=st.booleans(), data=st.data())
    def wait(self, everything: bool, data: st.DataObject) -> None:
        """Runs that have read all of their inbox, or a part, wait for events and stay or are suspended."""
        self._write([self._draw_wait(data, open_run, everything) for open_run in self._draw_awake(data)])

    def _draw_wait(self, data: st.DataObject, open_run: OpenRun, everything: bool) -> RunWrite:
        inbox_read = (
            open_run.inbox_count if everything else data.draw(st.integers(open_run.inbox_read, open_run.inbox_count))
        )
        transitions: list[Transition] = [AckInbox(inbox_read), _suspended(inbox_read)]
        transition = data.draw(st.sampled_from(transitions), label="transition")
        waits = self._draw_waits(data, open_run.run_id, cursors=True)
        cancelled_waits = set(data.draw(steps, label="drops")) - {wait.step for wait in waits}
        return _run_write(open_run, transition, waits=waits, cancelled_waits=tuple(cancelled_waits))

    def _draw_waits(self, data: st.DataObject, run: RunId, cursors: bool) -> tuple[Wait, ...]:
        places = st.none() | st.integers(0, len(self.numbers[self.model])) if cursors else st.none()
        return tuple(_wait(run, step, data.draw(places, label="cursor")) for step in data.draw(steps, label="waits"))

    @precondition(lambda self: self.awake)
    @rule(end=st.integers(0, 4), data=st.data())
    def give_back(self, end: int, data: st.DataObject) -> None:
        self._write([self._draw_releases(data, open_run, end == 0) for open_run in self._draw_awake(data)])

    def _draw_releases(self, data: st.DataObject, open_run: OpenRun, end: bool) -> RunWrite:
        transition = self._draw_end(data, open_run) if end else AckInbox(open_run.inbox_count)
        return _run_write(open_run, transition, released_items=self._draw_brought(data, open_run))

    def _draw_brought(self, data: st.DataObject, open_run: OpenRun) -> tuple[int, ...]:
        inbox = self.model.database.inboxes.get(open_run.run_id, {})
        brought = [n for n, item in inbox.items() if item.kind is EntryKind.EVENT]
        released_items = data.draw(
            st.lists(st.sampled_from(brought), unique=True) if brought else st.just([]), label="frees"
        )
        return tuple(released_items)

    def _draw_end(self, data: st.DataObject, open_run: OpenRun) -> End:
        """An End that misses a watcher is refused, but its `inbox_read` is stored."""
        overlooked = data.draw(st.booleans(), label="overlooks a watcher")
        inbox_read = data.draw(st.none() | st.integers(open_run.inbox_read, open_run.inbox_count), label="absorbed")
        return replace(done(watchers=max(0, open_run.watchers - overlooked)), inbox_read=inbox_read)

    @precondition(lambda self: self.awake)
    @rule(read=st.booleans(), data=st.data())
    def recur(self, read: bool, data: st.DataObject) -> None:
        """Runs continue as their next generation, if they have read their inbox."""
        self._write([self._draw_recur(data, open_run, read) for open_run in self._draw_awake(data)])

    def _draw_recur(self, data: st.DataObject, open_run: OpenRun, read: bool) -> RunWrite:
        transition = next_generation(open_run.inbox_count if read else open_run.inbox_read)
        cancelled_waits = tuple(data.draw(steps, label="drops"))
        return _run_write(
            open_run, transition, cancelled_waits=cancelled_waits, released_items=self._draw_brought(data, open_run)
        )

    @property
    def awake(self) -> list[OpenRun]:
        return [open_run for open_run in self.model.database.open_runs.values() if open_run.owner is not None]

    def _draw_awake(self, data: st.DataObject) -> list[OpenRun]:
        by_run = {open_run.run_id: open_run for open_run in self.awake}
        chosen = st.lists(st.sampled_from(sorted(by_run)), unique=True, min_size=1)
        return [by_run[run] for run in data.draw(chosen, label="runs")]

    def _write(self, batch: Sequence[RunWrite]) -> None:
        fence = self.model.database.fences[self.worker]
        self.ask(lambda storage: storage.write(fence, [self._numbered(storage, run_write) for run_write in batch]))

    def _numbered(self, storage: Storage, run_write: RunWrite) -> RunWrite:
        """Cursors are drawn as positions in the log."""
        cursors = [None if w.cursor is None else self.number(storage, w.cursor) for w in run_write.waits]
        waits = [replace(w, cursor=cursor) for w, cursor in zip(run_write.waits, cursors, strict=True)]
        return replace(run_write, waits=tuple(waits))

    @rule()
    def claim(self) -> None:
        self.ask(lambda storage: self.claimed(storage, self.worker, WORKFLOWS))

    # Events

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
            for position in sorted(accepted.new) if accepted else ():
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

    # Pruning

    @rule(age=ages)
    def prune_events(self, age: int) -> None:
        """All that may be deleted: the order between events of one call is not defined."""

        async def prune(storage: Storage) -> int:
            return await storage.prune_events(await storage.now() + age, 100)

        self.ask(prune)

    @rule(age=ages)
    def prune_items(self, age: int) -> None:
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
                [await storage.history(run, generation) for run in RUNS for generation in self._generations(run)],
                [self._logged(storage, await storage.events_of_type(type, 0, LATER, 100)) for type in TYPES],
                self.place(storage, await storage.last_event()),
                await storage.match_paths(TYPES),
            )

        self.ask(everything)

    def _generations(self, run: RunId) -> list[int]:
        return sorted(self.model.database.runs.get(run, ()))

    def _logged(self, storage: Storage, log: Sequence[StoredEvent]) -> list[StoredEvent]:
        return [replace(stored, seq=self.place(storage, stored.seq), received_at=0) for stored in log]


def _run_write(
    open_run: OpenRun,
    transition: Transition,
    *,
    waits: tuple[Wait, ...] = (),
    cancelled_waits: tuple[str, ...] = (),
    released_items: tuple[int, ...] = (),
) -> RunWrite:
    return RunWrite(
        open_run.run_id,
        open_run.epoch,
        open_run.generation,
        (),
        None,
        transition,
        waits,
        cancelled_waits,
        released_items,
    )


def _suspended(inbox_read: int) -> Suspend:
    return Suspend(inbox_read, None, RunStatus.WAITING_FOR_EVENT)


def _wait(run: RunId, step: str, cursor: int | None) -> Wait:
    return wait(run, step, step.partition("-")[0], cursor=cursor)


def _incoming() -> st.SearchStrategy[NewEvent]:
    return st.builds(
        lambda id, names, target, starts: incoming(id, *names, type=EVENTS[id], target=target, starts=starts),
        st.sampled_from(sorted(EVENTS)),
        st.lists(st.sampled_from(NAMES), unique=True),
        st.none() | runs,
        st.lists(runs.flatmap(starts), max_size=1),
    )


@pytest.mark.timeout(900)  # hypothesis shrinks a failure for minutes
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
def test_an_adapter_handles_events_as_the_model_does(kind: str, tmp_path: Path) -> None:
    class OnThisDatabase(Waiting):
        def __init__(self) -> None:
            super().__init__(new_database(kind, tmp_path / f"{uuid4()}.db"))

    run_state_machine_as_test(OnThisDatabase)
