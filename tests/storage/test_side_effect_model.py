"""Side effects of runs in any order of calls: a database answers as the memory storage, and no message is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from edda.core.model import (
    AckInbox,
    End,
    EntryKind,
    InboxItem,
    OutboxEvent,
    OutboxRow,
    OutboxState,
    Rejected,
    RunId,
    RunValue,
    RunWrite,
    SendLater,
    SendResult,
    Sent,
    StagedEvent,
    StagedKind,
    Suspend,
    Transition,
    Wait,
    WorkerId,
)
from edda.core.states import RunStatus
from edda.storage.memory.tables import OpenRun, wall_clock
from edda.storage.ports import Storage
from tests.conftest import Database, new_database
from tests.tiers import KINDS

from .comparison import RUNS, Comparison, payloads, runs
from .records import HOUR, LAPSED, LATER, done, incoming, key, new_run, outbox_event, run_write, wait
from .worker import Worker

T = TypeVar("T")

PENDING = OutboxState.PENDING
NAMES = ["place", "progress"]
KEYS = ["orders", "refunds"]
TEAMS = ["jobs", "orders"]
"""Names under which a message goes to one waiting run only."""

some_runs = st.lists(runs, unique=True, min_size=1, max_size=4)
kinds = st.sampled_from(sorted(StagedKind))
dues = st.sampled_from([1, LATER, LATER + 1])
ages = st.sampled_from([-HOUR, HOUR])


class Talking(Comparison):
    """One worker that always knows its fence, and the processes that move staged events and send the outbox."""

    worker = WorkerId("worker")

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.ids = count()

    @initialize()
    def open(self) -> None:
        super().open()
        self.ask(lambda storage: Worker(storage, self.worker).register(), bool)
        self._write([new_run(run) for run in RUNS[:4]])

    # Runs

    @rule(chosen=some_runs, data=st.data())
    def begin(self, chosen: list[RunId], data: st.DataObject) -> None:
        new = [run for run in chosen if run not in self.model.database.runs]
        ends = st.sampled_from([None, replace(done(), expected_inbox_count=0)])
        self._write(
            [self._draw_side_effects(data, new_run(run, transition=data.draw(ends, label="transition"))) for run in new]
        )

    @precondition(lambda self: self.awake)
    @rule(data=st.data())
    def speak(self, data: st.DataObject) -> None:
        chosen = st.lists(st.sampled_from(sorted(self.awake)), unique=True, min_size=1)
        open_runs = [self.awake[run] for run in data.draw(chosen, label="runs")]
        self._write([self._draw_side_effects(data, self._draw_run_write(data, open_run)) for open_run in open_runs])

    def _draw_run_write(self, data: st.DataObject, open_run: OpenRun) -> RunWrite:
        read = data.draw(st.none() | st.integers(open_run.inbox_read, open_run.inbox_count), label="read")
        settled = data.draw(st.none() | st.integers(open_run.inbox_read, open_run.inbox_count), label="settled")
        transitions: list[Transition | None] = [
            None,
            AckInbox(open_run.inbox_count),
            replace(done(), expected_inbox_count=settled, inbox_read=read),
        ]
        return RunWrite(
            open_run.run_id,
            open_run.epoch,
            open_run.generation,
            transition=data.draw(st.sampled_from(transitions), label="transition"),
        )

    def _draw_side_effects(self, data: st.DataObject, run_write: RunWrite) -> RunWrite:
        names = data.draw(st.lists(st.sampled_from(NAMES), unique=True), label="facts")
        effects = data.draw(st.lists(st.builds(StagedEvent, kinds, payloads), max_size=3), label="dispatches")
        sent = data.draw(st.lists(st.sampled_from(KEYS), max_size=2), label="outgoing")
        return replace(
            run_write,
            values=tuple(RunValue(name, data.draw(payloads)) for name in names),
            staged_events=tuple(effects),
            outbox_events=tuple(self._new_outbox_event(name, run_write.run_id) for name in sent),
        )

    def _new_outbox_event(self, order: str, run_id: str | None = None) -> OutboxEvent:
        return outbox_event(f"e{next(self.ids)}", order, run_id=run_id)

    @property
    def awake(self) -> dict[RunId, OpenRun]:
        return {run: open_run for run, open_run in self.model.database.open_runs.items() if open_run.owner is not None}

    def _write(self, batch: Sequence[RunWrite]) -> None:
        fence = self.model.database.fences[self.worker]
        self.ask(lambda storage: storage.write(fence, batch))

    @rule(run=runs, name=st.sampled_from(NAMES))
    def ask_for_a_fact(self, run: RunId, name: str) -> None:
        self.ask(lambda storage: storage.run_values(run, name))

    @rule(run=runs)
    def cancel(self, run: RunId) -> None:
        self.ask(lambda storage: storage.cancel(run, b"stop"))

    @rule()
    def prune_runs(self) -> None:
        self.ask(lambda storage: storage.prune_runs(LATER, 100))

    # Staged events

    @rule(places=st.lists(st.integers(0, 9), unique=True), gone=st.integers(0, 4))
    def move_staged(self, places: list[int], gone: int) -> None:
        async def move_staged(storage: Storage) -> object:
            waiting = [one.seq for one in await storage.staged_events(1_000)]
            numbers = [waiting[place] for place in places if place < len(waiting)]
            return await storage.accept([], {}, [*numbers, 2**40] if gone == 0 else numbers)

        self.ask(move_staged)

    @rule(teams=st.lists(st.sampled_from(TEAMS), max_size=3))
    def publish(self, teams: list[str]) -> None:
        post = [incoming(f"m{next(self.ids)}", exclusive=[team]) for team in teams]
        self.ask(lambda storage: storage.accept(post, {}))

    @rule(team=st.sampled_from(TEAMS), lease=st.sampled_from([HOUR, LAPSED]))
    def take(self, team: str, lease: int) -> None:
        self.ask(
            lambda storage: storage.take_message(key(team), lease), lambda taken: taken and (taken.kind, taken.body)
        )

    # The outbox

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def enqueue(self, keys: list[str]) -> None:
        events = [self._new_outbox_event(name) for name in keys]
        self.ask(lambda storage: storage.enqueue(events))

    @rule(limit=st.integers(1, 5), lease=st.sampled_from([HOUR, LAPSED]))
    def claim_outbox(self, limit: int, lease: int) -> None:
        self.ask(lambda storage: storage.claim_outbox(limit, lease), _comparable)

    @precondition(lambda self: self.model.database.outbox)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """One result per event, and one `SendLater` per key."""
        records = sorted(self.model.database.outbox.values(), key=lambda record: record.seq)
        chosen = data.draw(st.lists(st.sampled_from(records), unique_by=lambda x: x.seq, max_size=4), label="settled")
        receipts, held = [], set[str]()
        for record in chosen:
            receipt = data.draw(_receipts(record), label="receipt")
            if not isinstance(receipt, SendLater) or record.event.key not in held:
                receipts.append(receipt)
                held.add(record.event.key)
        places = {record.seq: place for place, record in enumerate(records)}

        async def settle(storage: Storage) -> None:
            numbers = [record.seq for record in await storage.find_outbox(limit=1_000)]
            await storage.record_send_results([replace(x, seq=numbers[places[x.seq]]) for x in receipts])

        self.ask(settle)

    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        ids = sorted({record.event.id for record in self.model.database.outbox.values()})
        some = st.lists(st.sampled_from(ids)) if ids else st.just([])
        chosen = data.draw(st.none() | some, label="retried")
        self.ask(lambda storage: storage.retry_outbox(chosen))

    @rule(age=ages)
    def prune_outbox(self, age: int) -> None:
        async def prune(storage: Storage) -> int:
            return await storage.prune_outbox(await storage.now() + age, 100)

        self.ask(prune)

    # What is compared

    @invariant()
    def the_same_is_stored(self) -> None:
        async def everything(storage: Storage) -> object:
            due = await storage.next_outbox_due()
            return (
                await self.stored(storage, [self.worker]),
                [(one.kind, one.body) for one in await storage.staged_events(1_000)],
                [await storage.run_values(run) for run in RUNS],
                _comparable(await storage.find_outbox(limit=1_000)),
                due and due > 0,
            )

        self.ask(everything)


def _receipts(record: OutboxRow) -> st.SearchStrategy[SendResult]:
    seq, attempts = record.seq, st.sampled_from([record.attempts, record.attempts, record.attempts + 1])
    reasons = st.sampled_from(["busy", "no"])
    return st.one_of(
        st.just(Sent(seq)),
        st.builds(Rejected, st.just(seq), attempts, reasons),
        st.builds(SendLater, st.just(seq), attempts, dues, reasons),
    )


def _comparable(records: Sequence[OutboxRow]) -> list[OutboxRow]:
    """Two databases have two clocks and two sequences of numbers; an ended event is not due."""
    return [
        replace(x, seq=0, due=_moment(x.due) if x.state is PENDING else 0, ended_at=x.ended_at and 1) for x in records
    ]


def _moment(due: int) -> int:
    """Of a lease only whether it is over is compared."""
    return due if due < 10 or due >= LATER else LAPSED if due < wall_clock() else HOUR


@pytest.mark.timeout(900)  # hypothesis shrinks a failure for minutes
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
def test_a_storage_handles_side_effects_as_the_model_does(kind: str, tmp_path: Path) -> None:
    class OnThisDatabase(Talking):
        def __init__(self) -> None:
            super().__init__(new_database(kind, tmp_path / f"{uuid4()}.db"))

    run_state_machine_as_test(OnThisDatabase)


NEWS = "news"
"""A wait under this name shares the messages with all others."""


class Competing(RuleBasedStateMachine):
    """Which waiting run receives a message is not defined; that exactly one does is."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.database = database
        self.storage = database.storage()
        self.worker = Worker(self.storage, "worker")
        self.epochs: dict[RunId, int] = {}
        """Of the runs that the worker owns."""
        self.read: dict[RunId, int] = {}
        self.letters: dict[tuple[RunId, int], InboxItem] = {}
        self.sent: dict[str, str] = {}
        """Message -> the team it is for."""
        self.used: list[str] = []
        """Messages that a step took."""
        self.shared: set[str] = set()
        """Messages with a shared key as well."""
        self.numbers = count()

    @initialize()
    def open(self) -> None:
        async def open() -> None:
            await self.storage.open()
            await self.storage.migrate()
            await self.worker.register()

        self._do(open())

    def teardown(self) -> None:
        self._do(self.storage.close())
        self.runner.close()
        self.database.drop()

    def _do(self, work: Coroutine[None, None, T]) -> T:
        return self.runner.run(work)

    # The runs

    @rule(waits=st.lists(st.sampled_from([*TEAMS, NEWS]), max_size=2), suspended=st.booleans())
    def begin(self, waits: list[str], suspended: bool) -> None:
        run = RunId(f"run-{next(self.numbers)}")
        self.epochs[run], self.read[run] = 1, 0
        transition = _suspended(0) if suspended else None
        self._write([new_run(run, transition=transition, waits=self._waits(run, waits))])

    @precondition(lambda self: self.epochs)
    @rule(data=st.data(), suspended=st.booleans(), everything=st.booleans())
    def ask(self, data: st.DataObject, suspended: bool, everything: bool) -> None:
        batch = []
        for run in data.draw(st.lists(st.sampled_from(sorted(self.epochs)), unique=True, min_size=1), label="runs"):
            waits = self._waits(run, data.draw(st.lists(st.sampled_from([*TEAMS, NEWS]), max_size=2), label="waits"))
            read = self._delivered(run) if everything else self.read[run]
            transition: Transition = _suspended(read) if suspended and waits else AckInbox(read)
            batch.append(replace(run_write(run, transition=transition, waits=waits), epoch=self.epochs[run]))
            self.read[run] = read
        self._write(batch)

    @precondition(lambda self: self.epochs)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.epochs)), label="run")
        steps = [wait.step for wait in self._do(self.storage.waits(run))]
        cancelled_waits = data.draw(
            st.lists(st.sampled_from(steps), unique=True) if steps else st.just([]), label="drops"
        )
        self._write(
            [
                replace(
                    run_write(run, transition=AckInbox(self.read[run]), cancelled_waits=cancelled_waits),
                    epoch=self.epochs[run],
                )
            ]
        )

    @precondition(lambda self: self.epochs)
    @rule(data=st.data(), overlooks=st.booleans())
    def end(self, data: st.DataObject, overlooks: bool) -> None:
        run = data.draw(st.sampled_from(sorted(self.epochs)), label="run")
        inbox_count = self._delivered(run)
        transition: End = replace(done(), expected_inbox_count=max(0, inbox_count - overlooks))
        ends = transition.expected_inbox_count == inbox_count
        self._write([replace(run_write(run, transition=transition), epoch=self.epochs[run])])
        assert (run not in self.epochs) is ends

    @rule()
    def claim(self) -> None:
        for run in self._do(self.worker.claim()).runs:
            self.epochs[run.run_id] = run.epoch
            self._note(run.inbox)

    def _waits(self, run: RunId, names: Sequence[str]) -> list[Wait]:
        return [wait(run, f"w{next(self.numbers)}", name, exclusive=name in TEAMS) for name in names]

    def _delivered(self, run: RunId) -> int:
        return max((n for other, n in self.letters if other == run), default=0)

    def _write(self, batch: Sequence[RunWrite]) -> None:
        assert self._do(self.worker.send(*batch)) is not None
        self._look()

    def _look(self) -> None:
        self._note(self._do(self.storage.read_inboxes(self.worker.id)))
        owned = self._do(self.storage.owned_runs(self.worker.id))
        self.epochs = {run: epoch for run, epoch in self.epochs.items() if run in owned}

    def _note(self, item: Sequence[InboxItem]) -> None:
        self.letters |= {(item.run_id, item.inbox_no): item for item in item}

    # The messages

    @rule(chosen=st.lists(st.tuples(st.sampled_from(TEAMS), st.booleans()), min_size=1, max_size=4))
    def publish(self, chosen: list[tuple[str, bool]]) -> None:
        post = []
        for team, is_news in chosen:
            id = f"m{next(self.numbers):05}"
            self.sent[id] = team
            self.shared |= {id} if is_news else set()
            post.append(incoming(id, *([NEWS] if is_news else []), exclusive=[team]))
        self._do(self.storage.accept(post, {}))
        self._look()

    @rule(team=st.sampled_from(TEAMS))
    def take(self, team: str) -> None:
        if taken := self._do(self.storage.take_message(key(team), HOUR)):
            self.used.append(taken.body.decode())

    # Invariants

    @invariant()
    def nobody_gets_what_another_took(self) -> None:
        assert max(self._taken().values(), default=0) <= 1
        seen = Counter((run, item.value) for (run, _), item in self.letters.items())
        assert max(seen.values(), default=0) <= 1

    @rule()
    def take_the_rest(self) -> None:
        """Each message that was not taken is stored, in order, and no run waits while one is stored."""
        self.claim()
        runs = sorted({run for run, _ in self.letters} | set(self.read))
        waiting = {bytes(w.match).decode() for run in runs for w in self._do(self.storage.waits(run))}
        for team in TEAMS:
            rest = self._do(self._drain(team))
            assert rest == sorted(rest)
            assert team not in waiting or set(rest) <= self.shared, "a run that had it as news does not take it"
        assert self._taken() == Counter(list(self.sent))

    def _taken(self) -> Counter[str]:
        messages = [item for item in self.letters.values() if item.kind is EntryKind.MESSAGE]
        assert all(self.sent[item.value.decode()] in TEAMS for item in messages)
        return Counter(item.value.decode() for item in messages) + Counter(self.used)

    async def _drain(self, team: str) -> list[str]:
        run = RunId(f"drain-{next(self.numbers)}")
        taken: list[InboxItem] = []
        await self.worker.send(new_run(run))
        while True:
            step = wait(run, f"w{len(taken)}", team, exclusive=True)
            await self.worker.send(run_write(run, transition=AckInbox(len(taken)), waits=[step]))
            item = [item for item in await self.storage.read_inboxes(self.worker.id) if item.run_id == run]
            if not item:
                await self.worker.send(run_write(run, transition=done()))
                return [item.value.decode() for item in taken]
            self._note(item)
            taken += item


def _suspended(inbox_read: int) -> Suspend:
    return Suspend(inbox_read, None, RunStatus.WAITING_FOR_MESSAGE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_every_message_is_taken_once(kind: str, tmp_path: Path) -> None:
    class OnThisDatabase(Competing):
        def __init__(self) -> None:
            super().__init__(new_database(kind, tmp_path / f"{uuid4()}.db"))

    run_state_machine_as_test(OnThisDatabase)
