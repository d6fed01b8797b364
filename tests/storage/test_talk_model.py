"""What runs say, in any sequence of calls: a database does as the memory adapter does, and no message goes astray."""

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
from tests.conftest import KINDS, Database, new_database

from .comparison import RUNS, Comparison, payloads, runs
from .records import HOUR, LAPSED, LATER, born, bundle, done, incoming, key, outgoing, wait
from .worker import Worker

T = TypeVar("T")

PENDING = OutboxState.PENDING
NAMES = ["place", "progress"]
KEYS = ["orders", "refunds"]
TEAMS = ["jobs", "orders"]
"""Names of which a message goes to one of those who wait."""

some_runs = st.lists(runs, unique=True, min_size=1, max_size=4)
kinds = st.sampled_from(sorted(StagedKind))
dues = st.sampled_from([1, LATER, LATER + 1])
ages = st.sampled_from([-HOUR, HOUR])


class Talking(Comparison):
    """One worker that always knows its fence, and those who carry on what its runs say."""

    worker = WorkerId("worker")

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.ids = count()

    @initialize()
    def open(self) -> None:
        super().open()
        self.ask(lambda storage: Worker(storage, self.worker).register(), bool)
        self._write([born(run) for run in RUNS[:4]])

    # Runs that speak

    @rule(chosen=some_runs, data=st.data())
    def begin(self, chosen: list[RunId], data: st.DataObject) -> None:
        new = [run for run in chosen if run not in self.model.database.runs]
        ends = st.sampled_from([None, replace(done(), settled=0)])
        self._write([self._draw_said(data, born(run, move=data.draw(ends, label="move"))) for run in new])

    @precondition(lambda self: self.awake)
    @rule(data=st.data())
    def speak(self, data: st.DataObject) -> None:
        chosen = st.lists(st.sampled_from(sorted(self.awake)), unique=True, min_size=1)
        scheds = [self.awake[run] for run in data.draw(chosen, label="runs")]
        self._write([self._draw_said(data, self._draw_bundle(data, sched)) for sched in scheds])

    def _draw_bundle(self, data: st.DataObject, sched: OpenRun) -> RunWrite:
        read = data.draw(st.none() | st.integers(sched.absorbed, sched.delivered), label="read")
        settled = data.draw(st.none() | st.integers(sched.absorbed, sched.delivered), label="settled")
        moves: list[Transition | None] = [
            None,
            AckInbox(sched.delivered),
            replace(done(), settled=settled, absorbed=read),
        ]
        return RunWrite(sched.run_id, sched.epoch, sched.gen, move=data.draw(st.sampled_from(moves), label="move"))

    def _draw_said(self, data: st.DataObject, bundle: RunWrite) -> RunWrite:
        names = data.draw(st.lists(st.sampled_from(NAMES), unique=True), label="facts")
        said = data.draw(st.lists(st.builds(StagedEvent, kinds, payloads), max_size=3), label="dispatches")
        sent = data.draw(st.lists(st.sampled_from(KEYS), max_size=2), label="outgoing")
        return replace(
            bundle,
            facts=tuple(RunValue(name, data.draw(payloads)) for name in names),
            dispatches=tuple(said),
            outgoing=tuple(self._new_outgoing(name, bundle.run_id) for name in sent),
        )

    def _new_outgoing(self, order: str, run_id: str | None = None) -> OutboxEvent:
        return outgoing(f"e{next(self.ids)}", order, run_id=run_id)

    @property
    def awake(self) -> dict[RunId, OpenRun]:
        return {run: sched for run, sched in self.model.database.scheds.items() if sched.owner is not None}

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

    # Dispatches

    @rule(places=st.lists(st.integers(0, 9), unique=True), gone=st.integers(0, 4))
    def forward(self, places: list[int], gone: int) -> None:
        async def forward(storage: Storage) -> object:
            waiting = [one.seq for one in await storage.staged_events(1_000)]
            numbers = [waiting[place] for place in places if place < len(waiting)]
            return await storage.accept([], {}, [*numbers, 2**40] if gone == 0 else numbers)

        self.ask(forward)

    @rule(teams=st.lists(st.sampled_from(TEAMS), max_size=3))
    def offer(self, teams: list[str]) -> None:
        post = [incoming(f"m{next(self.ids)}", once=[team]) for team in teams]
        self.ask(lambda storage: storage.accept(post, {}))

    @rule(team=st.sampled_from(TEAMS), lease=st.sampled_from([HOUR, LAPSED]))
    def take(self, team: str, lease: int) -> None:
        self.ask(
            lambda storage: storage.take_message(key(team), lease), lambda taken: taken and (taken.kind, taken.body)
        )

    # The outbox

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def enqueue(self, keys: list[str]) -> None:
        events = [self._new_outgoing(name) for name in keys]
        self.ask(lambda storage: storage.enqueue(events))

    @rule(limit=st.integers(1, 5), lease=st.sampled_from([HOUR, LAPSED]))
    def claim_outgoing(self, limit: int, lease: int) -> None:
        self.ask(lambda storage: storage.claim_outbox(limit, lease), _comparable)

    @precondition(lambda self: self.model.database.outbox)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """Whoever sends says one thing of an event, and holds up a key once."""
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
    def prune_outgoing(self, age: int) -> None:
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
    """Two databases have two clocks and two rows of numbers; when something is over it is no longer due."""
    return [
        replace(x, seq=0, due=_moment(x.due) if x.state is PENDING else 0, ended_at=x.ended_at and 1) for x in records
    ]


def _moment(due: int) -> int:
    """The end of a lease is told apart only by whether it is over."""
    return due if due < 10 or due >= LATER else LAPSED if due < wall_clock() else HOUR


@pytest.mark.timeout(900)  # a failure takes minutes to be made small
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mysql"])
def test_an_adapter_carries_on_what_runs_say_as_the_model_does(kind: str, tmp_path: Path) -> None:
    class OnThisDatabase(Talking):
        def __init__(self) -> None:
            super().__init__(new_database(kind, tmp_path / f"{uuid4()}.db"))

    run_state_machine_as_test(OnThisDatabase)


NEWS = "news"
"""Who waits for news gets what comes, and takes nothing away."""


class Competing(RuleBasedStateMachine):
    """Which of those who wait gets a message is free; that exactly one does is not."""

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
        """Messages that are news as well."""
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

    @rule(waits=st.lists(st.sampled_from([*TEAMS, NEWS]), max_size=2), asleep=st.booleans())
    def begin(self, waits: list[str], asleep: bool) -> None:
        run = RunId(f"run-{next(self.numbers)}")
        self.epochs[run], self.read[run] = 1, 0
        move = _asleep(0) if asleep else None
        self._write([born(run, move=move, waits=self._waits(run, waits))])

    @precondition(lambda self: self.epochs)
    @rule(data=st.data(), asleep=st.booleans(), everything=st.booleans())
    def ask(self, data: st.DataObject, asleep: bool, everything: bool) -> None:
        batch = []
        for run in data.draw(st.lists(st.sampled_from(sorted(self.epochs)), unique=True, min_size=1), label="runs"):
            waits = self._waits(run, data.draw(st.lists(st.sampled_from([*TEAMS, NEWS]), max_size=2), label="waits"))
            read = self._delivered(run) if everything else self.read[run]
            move: Transition = _asleep(read) if asleep and waits else AckInbox(read)
            batch.append(replace(bundle(run, move=move, waits=waits), epoch=self.epochs[run]))
            self.read[run] = read
        self._write(batch)

    @precondition(lambda self: self.epochs)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.epochs)), label="run")
        steps = [wait.step for wait in self._do(self.storage.waits(run))]
        drops = data.draw(st.lists(st.sampled_from(steps), unique=True) if steps else st.just([]), label="drops")
        self._write([replace(bundle(run, move=AckInbox(self.read[run]), drops=drops), epoch=self.epochs[run])])

    @precondition(lambda self: self.epochs)
    @rule(data=st.data(), overlooks=st.booleans())
    def end(self, data: st.DataObject, overlooks: bool) -> None:
        run = data.draw(st.sampled_from(sorted(self.epochs)), label="run")
        delivered = self._delivered(run)
        move: End = replace(done(), settled=max(0, delivered - overlooks))
        ends = move.settled == delivered
        self._write([replace(bundle(run, move=move), epoch=self.epochs[run])])
        assert (run not in self.epochs) is ends

    @rule()
    def claim(self) -> None:
        for run in self._do(self.worker.claim()).runs:
            self.epochs[run.run_id] = run.epoch
            self._note(run.mail)

    def _waits(self, run: RunId, names: Sequence[str]) -> list[Wait]:
        return [wait(run, f"w{next(self.numbers)}", name, once=name in TEAMS) for name in names]

    def _delivered(self, run: RunId) -> int:
        return max((n for other, n in self.letters if other == run), default=0)

    def _write(self, batch: Sequence[RunWrite]) -> None:
        assert self._do(self.worker.send(*batch)) is not None
        self._look()

    def _look(self) -> None:
        self._note(self._do(self.storage.read_inboxes(self.worker.id)))
        owned = self._do(self.storage.owned_runs(self.worker.id))
        self.epochs = {run: epoch for run, epoch in self.epochs.items() if run in owned}

    def _note(self, mail: Sequence[InboxItem]) -> None:
        self.letters |= {(letter.run_id, letter.n): letter for letter in mail}

    # The messages

    @rule(chosen=st.lists(st.tuples(st.sampled_from(TEAMS), st.booleans()), min_size=1, max_size=4))
    def offer(self, chosen: list[tuple[str, bool]]) -> None:
        post = []
        for team, is_news in chosen:
            id = f"m{next(self.numbers):05}"
            self.sent[id] = team
            self.shared |= {id} if is_news else set()
            post.append(incoming(id, *([NEWS] if is_news else []), once=[team]))
        self._do(self.storage.accept(post, {}))
        self._look()

    @rule(team=st.sampled_from(TEAMS))
    def take(self, team: str) -> None:
        if taken := self._do(self.storage.take_message(key(team), HOUR)):
            self.used.append(taken.body.decode())

    # What has to hold

    @invariant()
    def nobody_gets_what_another_took(self) -> None:
        assert max(self._taken().values(), default=0) <= 1
        seen = Counter((run, letter.value) for (run, _), letter in self.letters.items())
        assert max(seen.values(), default=0) <= 1

    @rule()
    def take_the_rest(self) -> None:
        """Whatever was not taken is there, in order; and nobody has waited for it in vain."""
        self.claim()
        runs = sorted({run for run, _ in self.letters} | set(self.read))
        waiting = {bytes(w.match).decode() for run in runs for w in self._do(self.storage.waits(run))}
        for team in TEAMS:
            rest = self._do(self._drain(team))
            assert rest == sorted(rest)
            assert team not in waiting or set(rest) <= self.shared, "a run that had it as news does not take it"
        assert self._taken() == Counter(list(self.sent))

    def _taken(self) -> Counter[str]:
        messages = [letter for letter in self.letters.values() if letter.kind is EntryKind.MESSAGE]
        assert all(self.sent[letter.value.decode()] in TEAMS for letter in messages)
        return Counter(letter.value.decode() for letter in messages) + Counter(self.used)

    async def _drain(self, team: str) -> list[str]:
        run = RunId(f"drain-{next(self.numbers)}")
        taken: list[InboxItem] = []
        await self.worker.send(born(run))
        while True:
            step = wait(run, f"w{len(taken)}", team, once=True)
            await self.worker.send(bundle(run, move=AckInbox(len(taken)), waits=[step]))
            mail = [letter for letter in await self.storage.read_inboxes(self.worker.id) if letter.run_id == run]
            if not mail:
                await self.worker.send(bundle(run, move=done()))
                return [letter.value.decode() for letter in taken]
            self._note(mail)
            taken += mail


def _asleep(absorbed: int) -> Suspend:
    return Suspend(absorbed, None, RunStatus.WAITING_FOR_MESSAGE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_every_message_is_taken_once_whatever_happens(kind: str, tmp_path: Path) -> None:
    class OnThisDatabase(Competing):
        def __init__(self) -> None:
            super().__init__(new_database(kind, tmp_path / f"{uuid4()}.db"))

    run_state_machine_as_test(OnThisDatabase)
