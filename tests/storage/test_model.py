"""Any sequence of calls gives the same answers on a database as on the memory adapter, which is the model."""

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
        """Under a name of its own each time, as every incarnation of a worker has one."""
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
            fence = replace(fence, moves=fence.moves + 1)
        batch = [bundle for run in chosen if (bundle := self._draw_bundle(data, worker, run))]
        batch = self._draw_lineage(data, batch)
        self.ask(lambda storage: storage.write(fence, batch))

    def _draw_bundle(self, data: st.DataObject, worker: WorkerId, run: RunId) -> RunWrite | None:
        """What the engine could send: a new run, or something about a run of this worker."""
        sched = self.model.database.scheds.get(run)
        if sched is None:
            return self._draw_start(data, run)
        if sched.owner != worker:
            return None
        read = data.draw(st.booleans(), label="reads its mail")
        letters = range(sched.absorbed + 1, sched.delivered + 1) if read else range(0)
        entries = self._draw_entries(data, run, letters, sched.gen)
        move = self._draw_move(data, sched, sched.delivered if read else sched.absorbed)
        if move is None and letters:
            move = AckInbox(sched.delivered)
        return RunWrite(run, sched.epoch, sched.gen, entries, None, move)

    def _draw_start(self, data: st.DataObject, run: RunId) -> RunWrite:
        start = data.draw(starts(run), label="start")
        if start.ready_at is not None:
            return RunWrite(run, 0, 0, (), start)
        move = data.draw(_moves(0, 0, start.created_at), label="move")
        return RunWrite(run, 1, 0, self._draw_entries(data, run, range(0)), start, move)

    def _draw_move(self, data: st.DataObject, sched: OpenRun, absorbed: int) -> Transition | None:
        overlooked = data.draw(st.integers(0, 4), label="overlooks a watcher") == 0
        created_at = self.model.database.runs[sched.run_id][sched.gen].created_at
        return data.draw(_moves(absorbed, sched.watchers - overlooked, created_at), label="move")

    def _draw_lineage(self, data: st.DataObject, batch: list[RunWrite]) -> list[RunWrite]:
        """Letters go neither to runs that write themselves nor to those that are being started."""
        strangers = sorted(set(RUNS) - {bundle.run_id for bundle in batch})
        if not strangers:
            return batch
        told = set(data.draw(st.lists(st.sampled_from(strangers)), label="told"))
        return [self._draw_others(data, bundle, sorted(told), sorted(set(strangers) - told)) for bundle in batch]

    def _draw_others(self, data: st.DataObject, bundle: RunWrite, told: list[RunId], started: list[RunId]) -> RunWrite:
        if bundle.start and bundle.start.ready_at is not None:  # for anybody, so nobody has run it yet
            return bundle
        if started:
            children = data.draw(st.lists(st.sampled_from(started).flatmap(starts), max_size=2), label="children")
            bundle = replace(bundle, children=tuple(children))
        if bundle.start is None and bundle.move is None:
            return bundle
        letters = data.draw(st.lists(_letters(told), max_size=3), label="letters") if told else []
        undoing = data.draw(st.booleans(), label="undoing")
        return replace(bundle, letters=tuple(letters), undoing=undoing)

    def _draw_entries(self, data: st.DataObject, run: RunId, letters: range, gen: int = 0) -> tuple[Entry, ...]:
        seq = len(self.model.database.histories.get((run, gen), ()))
        if data.draw(st.integers(0, 19), label="repeats a number") == 0:
            seq = max(0, seq - 1)
        steps = [entry(seq + 1 + place, value) for place, value in enumerate(data.draw(st.lists(payloads, max_size=3)))]
        return (*steps, *(entry(seq + len(steps) + 1 + place, n=n) for place, n in enumerate(letters)))

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

    @rule(run=runs, gen=st.integers(0, 3))
    def history(self, run: RunId, gen: int) -> None:
        self.ask(lambda storage: storage.history(run, gen))

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


def _moves(absorbed: int, watchers: int, created_at: int) -> st.SearchStrategy[Transition | None]:
    resting = st.sampled_from(sorted(OPEN - {RunStatus.RUNNING}))
    reasons = st.none() | st.just("because")
    ended = st.sampled_from(sorted(ENDED))
    return st.one_of(
        st.none(),
        st.just(AckInbox(absorbed)),
        st.builds(Suspend, st.just(absorbed), due_times, resting, reasons),
        st.builds(End, ended, payloads, st.integers(0, 9), st.just(watchers)),
        st.builds(_recur, st.just(absorbed), payloads, st.integers(created_at, created_at + 2), payloads),
    )


def _recur(absorbed: int, input: bytes, at: int, left: bytes) -> Recur:
    return Recur(absorbed, input, at, Entry(1, EntryKind.RECUR, "", "", ok=True, at=at, value=left))


def _letters(told: list[RunId]) -> st.SearchStrategy[RunSignal]:
    kinds = st.sampled_from([EntryKind.CHILD, EntryKind.CANCEL])
    return st.builds(RunSignal, st.sampled_from(told), kinds, steps, payloads)


@pytest.mark.timeout(900)  # a failure takes minutes to be made small
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
def test_an_adapter_does_what_the_model_does(kind: str, tmp_path: Path) -> None:
    class OnThisDatabase(Life):
        def __init__(self) -> None:
            super().__init__(new_database(kind, tmp_path / f"{uuid4()}.db"))

    run_state_machine_as_test(OnThisDatabase)
