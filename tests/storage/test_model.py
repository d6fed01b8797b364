"""Any sequence of calls gives the same answers on a database as on the memory adapter, which is the model."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Incarnations
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from edda.core.model import Absorb, Bundle, End, Entry, Fence, Move, Release, RunFilter, RunId, Takeover, WorkerId
from edda.core.states import ENDED, OPEN, RunStatus
from edda.storage.ports import Storage
from tests.conftest import Database, new_database

from .comparison import WORKFLOWS, Comparison, comparable, due_times, payloads, runs, starts
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
        self.ask(lambda storage: storage.retire(worker))

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
        self.ask(lambda storage: storage.disown(run))

    # The journal

    @rule(worker=workers, chosen=st.lists(runs, unique=True), stale=st.integers(0, 9), data=st.data())
    def write(self, worker: WorkerId, chosen: list[RunId], stale: int, data: st.DataObject) -> None:
        fence = self.model.database.fences.get(worker, Fence(worker, 0, 0))
        if stale == 0:
            fence = replace(fence, moves=fence.moves + 1)
        batch = [bundle for run in chosen if (bundle := self._draw_bundle(data, worker, run))]
        self.ask(lambda storage: storage.write(fence, batch))

    def _draw_bundle(self, data: st.DataObject, worker: WorkerId, run: RunId) -> Bundle | None:
        """What the engine could send: a new run, or something about a run of this worker."""
        sched = self.model.database.scheds.get(run)
        if sched is None:
            return self._draw_start(data, run)
        if sched.owner != worker:
            return None
        read = data.draw(st.booleans(), label="reads its mail")
        letters = range(sched.absorbed + 1, sched.delivered + 1) if read else range(0)
        entries = self._draw_entries(data, run, letters)
        move = data.draw(_moves(sched.delivered if read else sched.absorbed), label="move")
        if move is None and letters:
            move = Absorb(sched.delivered)
        return Bundle(run, sched.epoch, sched.gen, entries, None, move)

    def _draw_start(self, data: st.DataObject, run: RunId) -> Bundle:
        start = data.draw(starts(run), label="start")
        if start.ready_at is not None:
            return Bundle(run, 0, 0, (), start)
        return Bundle(run, 1, 0, self._draw_entries(data, run, range(0)), start, data.draw(_moves(0), label="move"))

    def _draw_entries(self, data: st.DataObject, run: RunId, letters: range) -> tuple[Entry, ...]:
        seq = len(self.model.database.histories.get((run, 0), ()))
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
        self.ask(lambda storage: storage.unpark(workflows))

    # Runs

    @rule(chosen=st.lists(runs, min_size=1), data=st.data())
    def start(self, chosen: list[RunId], data: st.DataObject) -> None:
        new = [data.draw(starts(run)) for run in chosen]
        self.ask(lambda storage: storage.start(new))

    @rule(run=runs, value=payloads)
    def cancel(self, run: RunId, value: bytes) -> None:
        self.ask(lambda storage: storage.cancel(run, value))

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


def _moves(absorbed: int) -> st.SearchStrategy[Move | None]:
    resting = st.sampled_from(sorted(OPEN - {RunStatus.RUNNING}))
    reasons = st.none() | st.just("because")
    ended = st.sampled_from(sorted(ENDED))
    return st.one_of(
        st.none(),
        st.just(Absorb(absorbed)),
        st.builds(Release, st.just(absorbed), due_times, resting, reasons),
        st.builds(End, ended, payloads, st.integers(0, 9)),
    )


@pytest.mark.timeout(900)  # a failure takes minutes to be made small
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
def test_an_adapter_does_what_the_model_does(kind: str, tmp_path: Path) -> None:
    class OnThisDatabase(Life):
        def __init__(self) -> None:
            super().__init__(new_database(kind, tmp_path / f"{uuid4()}.db"))

    run_state_machine_as_test(OnThisDatabase)
