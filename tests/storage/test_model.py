"""Any sequence of calls gives the same answers on a database as on the memory storage, which is the model."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Incarnations
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from edda.core.model import (
    AckInbox,
    End,
    EndWatcher,
    Entry,
    EntryKind,
    Fence,
    Recur,
    RunFilter,
    RunId,
    RunSignal,
    RunWrite,
    Suspend,
    Takeover,
    Transition,
    WorkerId,
)
from edda.core.states import ENDED, OPEN, RunStatus
from edda.storage.memory.tables import OpenRun
from edda.storage.ports import Storage
from tests.conftest import Database, new_database

from .comparison import RUNS, WORKFLOWS, Comparison, comparable, due_times, payloads, runs, starts, steps
from .records import HOUR, LAPSED, entry
from .worker import Worker

workflows = st.lists(st.sampled_from(WORKFLOWS), unique=True)
leases = st.sampled_from([HOUR, HOUR, LAPSED])
statuses = st.sampled_from(sorted(RunStatus))


class Life(Comparison):
    workers = Incarnations("workers")

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.registered: list[WorkerId] = []

    # Workers

    @rule(target=workers, lease=leases)
    def register(self, lease: int) -> WorkerId:
        """With a new id each time, as each process of a worker has one."""
        worker = WorkerId(f"worker-{len(self.registered)}")
        self.registered.append(worker)
        self.ask(lambda storage: Worker(storage, worker).register(lease), bool)
        return worker

    @rule(worker=workers, lease=leases)
    def beat(self, worker: WorkerId, lease: int) -> None:
        self.ask(lambda storage: Worker(storage, worker).beat(lease), bool)

    @rule(worker=workers)
    def retire(self, worker: WorkerId) -> None:
        self.ask(lambda storage: storage.remove_worker(worker))

    @rule(worker=workers)
    def sweep(self, worker: WorkerId) -> None:
        async def take_all(storage: Storage) -> set[Takeover]:
            """Which worker is taken first is free."""
            taken = set()
            while took := await storage.take_over(worker):
                taken.add(took)
            return taken

        self.ask(take_all)

    @rule(run=runs)
    def disown(self, run: RunId) -> None:
        self.ask(lambda storage: storage.release_run(run))

    # The journal

    @rule(worker=workers, chosen=st.lists(runs, unique=True), stale=st.integers(0, 9), data=st.data())
    def write(self, worker: WorkerId, chosen: list[RunId], stale: int, data: st.DataObject) -> None:
        fence = self.model.database.fences.get(worker, Fence(worker, 0, 0))
        if stale == 0:
            fence = replace(fence, ownership_version=fence.ownership_version + 1)
        batch = [run_write for run in chosen if (run_write := self._draw_run_write(data, worker, run))]
        batch = self._draw_lineage(data, batch)
        self.ask(lambda storage: storage.write(fence, batch))

    def _draw_run_write(self, data: st.DataObject, worker: WorkerId, run: RunId) -> RunWrite | None:
        """A write that the engine could send: a new run, or a change of a run that this worker owns."""
        open_run = self.model.database.open_runs.get(run)
        if open_run is None:
            return self._draw_start(data, run)
        if open_run.owner != worker:
            return None
        read = data.draw(st.booleans(), label="reads its mail")
        items = range(open_run.inbox_read + 1, open_run.inbox_count + 1) if read else range(0)
        entries = self._draw_entries(data, run, items, open_run.generation)
        transition = self._draw_transition(data, open_run, open_run.inbox_count if read else open_run.inbox_read)
        if transition is None and items:
            transition = AckInbox(open_run.inbox_count)
        return RunWrite(run, open_run.epoch, open_run.generation, entries, None, transition)

    def _draw_start(self, data: st.DataObject, run: RunId) -> RunWrite:
        start = data.draw(starts(run), label="start")
        if start.ready_at is not None:
            return RunWrite(run, 0, 0, (), start)
        transition = data.draw(_transitions(0, 0, start.created_at), label="transition")
        return RunWrite(run, 1, 0, self._draw_entries(data, run, range(0)), start, transition)

    def _draw_transition(self, data: st.DataObject, open_run: OpenRun, inbox_read: int) -> Transition | None:
        overlooked = data.draw(st.integers(0, 4), label="overlooks a watcher") == 0
        created_at = self.model.database.runs[open_run.run_id][open_run.generation].created_at
        return data.draw(_transitions(inbox_read, open_run.watchers - overlooked, created_at), label="transition")

    def _draw_lineage(self, data: st.DataObject, batch: list[RunWrite]) -> list[RunWrite]:
        """Signals go neither to runs that write in the same batch nor to those that are being started."""
        strangers = sorted(set(RUNS) - {run_write.run_id for run_write in batch})
        if not strangers:
            return batch
        told = set(data.draw(st.lists(st.sampled_from(strangers)), label="told"))
        return [self._draw_others(data, run_write, sorted(told), sorted(set(strangers) - told)) for run_write in batch]

    def _draw_others(
        self, data: st.DataObject, run_write: RunWrite, told: list[RunId], started: list[RunId]
    ) -> RunWrite:
        if run_write.start and run_write.start.ready_at is not None:  # for any worker, so it has no entries yet
            return run_write
        if started:
            children = data.draw(st.lists(st.sampled_from(started).flatmap(starts), max_size=2), label="children")
            run_write = replace(run_write, children=tuple(children))
        if run_write.start is None and run_write.transition is None:
            return run_write
        items = data.draw(st.lists(_items(told), max_size=3), label="signals") if told else []
        compensating = data.draw(st.booleans(), label="undoing")
        return replace(run_write, signals=tuple(items), compensating=compensating)

    def _draw_entries(self, data: st.DataObject, run: RunId, items: range, generation: int = 0) -> tuple[Entry, ...]:
        seq = len(self.model.database.histories.get((run, generation), ()))
        if data.draw(st.integers(0, 19), label="repeats a number") == 0:
            seq = max(0, seq - 1)
        steps = [entry(seq + 1 + place, value) for place, value in enumerate(data.draw(st.lists(payloads, max_size=3)))]
        return (*steps, *(entry(seq + len(steps) + 1 + place, n=n) for place, n in enumerate(items)))

    # The queue

    @rule(worker=workers, workflows=workflows)
    def claim(self, worker: WorkerId, workflows: list[str]) -> None:
        self.ask(lambda storage: self.claimed(storage, worker, workflows))

    @rule(workflows=workflows)
    def next_due(self, workflows: list[str]) -> None:
        self.ask(lambda storage: storage.next_due(workflows), lambda due: due and due > 0)

    @rule(workflows=workflows)
    def unpark(self, workflows: list[str]) -> None:
        self.ask(lambda storage: storage.wake_parked(workflows))

    # Runs

    @rule(chosen=st.lists(runs, min_size=1), data=st.data())
    def start(self, chosen: list[RunId], data: st.DataObject) -> None:
        new = [data.draw(starts(run)) for run in chosen]
        self.ask(lambda storage: storage.start(new))

    @rule(run=runs, value=payloads)
    def cancel(self, run: RunId, value: bytes) -> None:
        self.ask(lambda storage: storage.cancel(run, value))

    @rule(run=runs, watcher=st.builds(EndWatcher, runs, steps))
    def watch(self, run: RunId, watcher: EndWatcher) -> None:
        async def watch(storage: Storage) -> object:
            record = await storage.add_watcher(run, watcher)
            return comparable([record] if record else [])

        self.ask(watch)

    @rule(run=runs, generation=st.integers(0, 3))
    def history(self, run: RunId, generation: int) -> None:
        self.ask(lambda storage: storage.history(run, generation))

    @rule(before=st.integers(0, 10))
    def prune_runs(self, before: int) -> None:
        self.ask(lambda storage: storage.prune_runs(before, 100))

    @rule(
        status=st.none() | statuses,
        workflow=st.none() | st.sampled_from(WORKFLOWS),
        since=st.none() | st.integers(0, 4),
        until=st.none() | st.integers(0, 5),
        limit=st.integers(1, 4),
        before=st.none() | st.tuples(st.integers(0, 4), runs),
    )
    def find(
        self,
        status: RunStatus | None,
        workflow: str | None,
        since: int | None,
        until: int | None,
        limit: int,
        before: tuple[int, RunId] | None,
    ) -> None:
        filter = RunFilter(status, workflow, since, until, before, limit)
        self.ask(lambda storage: storage.find(filter), comparable)

    @invariant()
    def the_same_is_stored(self) -> None:
        self.ask(lambda storage: self.stored(storage, self.registered))


def _transitions(inbox_read: int, watchers: int, created_at: int) -> st.SearchStrategy[Transition | None]:
    resting = st.sampled_from(sorted(OPEN - {RunStatus.RUNNING}))
    reasons = st.none() | st.just("because")
    ended = st.sampled_from(sorted(ENDED))
    return st.one_of(
        st.none(),
        st.just(AckInbox(inbox_read)),
        st.builds(Suspend, st.just(inbox_read), due_times, resting, reasons),
        st.builds(End, ended, payloads, st.integers(0, 9), st.just(watchers)),
        st.builds(_recur, st.just(inbox_read), payloads, st.integers(created_at, created_at + 2), payloads),
    )


def _recur(inbox_read: int, input: bytes, at: int, left: bytes) -> Recur:
    return Recur(inbox_read, input, at, Entry(1, EntryKind.RECUR, "", "", ok=True, at=at, value=left))


def _items(told: list[RunId]) -> st.SearchStrategy[RunSignal]:
    kinds = st.sampled_from([EntryKind.CHILD, EntryKind.CANCEL])
    return st.builds(RunSignal, st.sampled_from(told), kinds, steps, payloads)


@pytest.mark.timeout(900)  # hypothesis shrinks a failure for minutes
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
def test_an_adapter_does_what_the_model_does(kind: str, tmp_path: Path) -> None:
    class OnThisDatabase(Life):
        def __init__(self) -> None:
            super().__init__(new_database(kind, tmp_path / f"{uuid4()}.db"))

    run_state_machine_as_test(OnThisDatabase)
