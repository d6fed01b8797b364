"""Any sequence of calls gives the same answers on a database as on the memory adapter, which is the model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Incarnations
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from edda.core.model import (
    Absorb,
    Bundle,
    Claim,
    ClaimedRun,
    Delivery,
    End,
    Entry,
    Fence,
    Move,
    Release,
    RunFilter,
    RunId,
    RunRecord,
    Start,
    Takeover,
    WorkerId,
)
from edda.core.states import ENDED, OPEN, RunStatus
from edda.errors import StorageError
from edda.storage.memory import MemoryStorage
from edda.storage.ports import Storage
from tests.conftest import Database, new_database

from .records import HOUR, LAPSED, LATER, entry
from .worker import Worker

T = TypeVar("T")

RUNS = [RunId(f"run-{number}") for number in range(6)]
WORKFLOWS = ["checkout", "refund"]

runs = st.sampled_from(RUNS)
workflows = st.lists(st.sampled_from(WORKFLOWS), unique=True)
leases = st.sampled_from([HOUR, HOUR, LAPSED])
due_times = st.sampled_from([None, 1, LATER, LATER + 1])
payloads = st.binary(max_size=8)
statuses = st.sampled_from(sorted(RunStatus))


class Comparison(RuleBasedStateMachine):
    workers = Incarnations("workers")

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.registered: list[WorkerId] = []
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.database = database
        self.model = MemoryStorage()
        self.storages: tuple[Storage, Storage] = (self.model, database.storage())

    @initialize()
    def open(self) -> None:
        async def open_and_migrate(storage: Storage) -> None:
            await storage.open()
            await storage.migrate()

        self.ask(open_and_migrate)

    def teardown(self) -> None:
        self.ask(lambda storage: storage.close())
        self.runner.close()
        self.database.drop()

    def ask(
        self, call: Callable[[Storage], Awaitable[T]], comparable: Callable[[T], object] = lambda answer: answer
    ) -> None:
        """Both get the same call and have to give the same answer, or the same error."""

        async def outcome(storage: Storage) -> object:
            try:
                return comparable(await call(storage))
            except StorageError as error:
                return type(error)

        model, subject = (self.runner.run(outcome(storage)) for storage in self.storages)
        assert subject == model

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
        start = data.draw(_starts(run), label="start")
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
        self.ask(lambda storage: storage.claim(worker, workflows, 100), _claimed)

    @rule(workflows=workflows)
    def next_due(self, workflows: list[str]) -> None:
        self.ask(lambda storage: storage.next_due(workflows), lambda due: due and due > 0)

    @rule(workflows=workflows)
    def unpark(self, workflows: list[str]) -> None:
        self.ask(lambda storage: storage.unpark(workflows))

    # Runs

    @rule(chosen=st.lists(runs, min_size=1), data=st.data())
    def start(self, chosen: list[RunId], data: st.DataObject) -> None:
        starts = [data.draw(_starts(run)) for run in chosen]
        self.ask(lambda storage: storage.start(starts))

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
        self.ask(lambda storage: storage.find(filter), _records)

    @invariant()
    def the_same_is_stored(self) -> None:
        self.ask(lambda storage: _everything(storage, self.registered))


async def _everything(storage: Storage, workers: list[WorkerId]) -> object:
    return (
        _records(await storage.find(RunFilter(limit=100))),
        [await storage.history(run) for run in RUNS],
        [(await storage.read_fence(worker), await storage.owned(worker)) for worker in workers],
        [_letters(await storage.mail(worker)) for worker in workers],
        await storage.free_orphans(),
    )


def _starts(run: RunId) -> st.SearchStrategy[Start]:
    return st.builds(
        Start,
        run_id=st.just(run),
        workflow=st.sampled_from(WORKFLOWS),
        input=payloads,
        created_at=st.integers(0, 4),
        ready_at=due_times,
        deadline=st.none() | st.just(LATER),
    )


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


# Two databases have two clocks: a time that is "now" on its own is compared as one that has come.


def _records(records: tuple[RunRecord, ...]) -> list[RunRecord]:
    return [replace(record, ready_at=record.ready_at and max(record.ready_at, LATER - 1)) for record in records]


def _letters(letters: tuple[Delivery, ...]) -> list[Delivery]:
    return [replace(letter, at=0) for letter in letters]


def _claimed(claim: Claim) -> list[tuple[ClaimedRun, list[Delivery]]]:
    """In which order runs are claimed is free between workflows, and between runs that are due alike."""
    ordered = sorted(claim.runs, key=lambda run: run.run_id)
    return [(replace(run, mail=()), _letters(run.mail)) for run in ordered]


@pytest.mark.timeout(900)  # a failure takes minutes to be made small
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
def test_an_adapter_does_what_the_model_does(kind: str, tmp_path: Path) -> None:
    class OnThisDatabase(Comparison):
        def __init__(self) -> None:
            super().__init__(new_database(kind, tmp_path / f"{uuid4()}.db"))

    run_state_machine_as_test(OnThisDatabase)
