"""A database is compared with the memory storage: both get the same calls and have to give the same answers."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize
from msgspec.structs import replace

from edda.core.model import ClaimedRun, InboxItem, RunFilter, RunId, RunRecord, Start, WorkerId
from edda.errors import StorageError
from edda.storage.memory.storage import MemoryStorage
from edda.storage.ports import Storage
from tests.conftest import Database

from .records import LATER

T = TypeVar("T")

RUNS = [RunId(f"run-{number}") for number in range(6)]
WORKFLOWS = ["checkout", "refund"]

runs = st.sampled_from(RUNS)
due_times = st.sampled_from([None, 1, LATER, LATER + 1])
payloads = st.binary(max_size=8)
steps = st.sampled_from(["child:1", "child:2"])


class Comparison(RuleBasedStateMachine):
    def __init__(self, database: Database) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.database = database
        self.model = MemoryStorage()
        self.storages: tuple[Storage, Storage] = (self.model, database.storage())
        self.numbers: dict[Storage, list[int]] = {storage: [] for storage in self.storages}
        """Of all events that were accepted: the events are the same on both storages, their numbers need not be."""

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
        """Make the same call on both, and compare the answers or the errors."""

        async def outcome(storage: Storage) -> object:
            try:
                return comparable(await call(storage))
            except StorageError as error:
                return type(error)

        model, subject = (self.runner.run(outcome(storage)) for storage in self.storages)
        assert subject == model

    # What is compared

    async def stored(self, storage: Storage, workers: Sequence[WorkerId]) -> object:
        return (
            comparable(await storage.find(RunFilter(limit=100))),
            [await storage.history(run) for run in RUNS],
            [await storage.watchers(run) for run in RUNS],
            [(await storage.read_fence(worker), await storage.owned_runs(worker)) for worker in workers],
            [self._items(storage, await storage.read_inboxes(worker)) for worker in workers],
            await storage.free_orphans(),
        )

    async def claimed(self, storage: Storage, worker: WorkerId, workflows: Sequence[str]) -> object:
        """The order of claimed runs is not defined between workflows, nor between runs with the same due time."""
        claim = await storage.claim(worker, workflows, 100)
        ordered = sorted(claim.runs, key=lambda run: run.run_id)
        return [(self._claimed(storage, run), self._items(storage, run.inbox)) for run in ordered]

    def _claimed(self, storage: Storage, run: ClaimedRun) -> ClaimedRun:
        return replace(run, inbox=(), event_cursor=self.place(storage, run.event_cursor))

    def _items(self, storage: Storage, items: Sequence[InboxItem]) -> list[InboxItem]:
        return [replace(x, at=0, event=x.event and self.place(storage, x.event)) for x in items]

    def place(self, storage: Storage, number: int) -> int:
        """An event's number as a number that is the same on both: how many events were accepted up to it."""
        return bisect_right(self.numbers[storage], number)

    def number(self, storage: Storage, place: int) -> int:
        return self.numbers[storage][place - 1] if place else 0


def comparable(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Two databases have two clocks: a time that was "now" is compared as one that has passed."""
    return [replace(record, ready_at=record.ready_at and max(record.ready_at, LATER - 1)) for record in records]


def starts(run: RunId) -> st.SearchStrategy[Start]:
    return st.builds(
        Start,
        run_id=st.just(run),
        workflow=st.sampled_from(WORKFLOWS),
        input=payloads,
        created_at=st.integers(0, 4),
        ready_at=due_times,
        deadline=st.none() | st.just(LATER),
        parent=st.none() | runs,
        parent_step=st.none() | steps,
        depth=st.integers(0, 2),
    )
