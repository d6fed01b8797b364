"""Random programs, the world they run in, and the comparison of one run with another.

The world decides what happens next from the seed, the length of the history and what is pending, and
from nothing else: so a run that was disturbed must go exactly as the one that was not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from random import Random
from typing import Any
from zlib import crc32

import msgspec
from msgspec.structs import replace

from edda.core.model import Entry, EntryKind
from edda.errors import NonDeterminismError, ParkedError
from edda.workflow.execution import Command, IdleState, RecurRequested

from .program_fragments import LEAVES, TREES, Boom, Node, Scene
from .recorded_run import DEED, Flow, Incarnation, Lost, is_hasty

MOST_ENTRIES = 150
OUTCOMES = (EntryKind.STEP, EntryKind.LATE)
FAILED, RECURRED = "raised", "recurs"


class Ending(StrEnum):
    """What a program does when its pieces are done."""

    RETURN = "return"
    FAIL = "fail"
    RECUR = "recur"


@dataclass(frozen=True)
class Program:
    seed: int
    root: Node
    stop: EntryKind
    stop_at: int | None
    deadline_at: int | None
    ending: Ending
    is_recurred: bool
    """A later generation: its history begins with what it takes over."""
    is_hurried: bool
    """Cancelled when it has begun to undo."""

    def __str__(self) -> str:
        stops = f"{self.stop} at {self.stop_at}, deadline at {self.deadline_at}"
        return f"seed {self.seed}, {stops}, {self.ending}, recurred {self.is_recurred}: {self.root}"


def write_program(seed: int) -> Program:
    random = Random(seed)
    branches = tuple(
        Node("compensate", 1, (_grow(random, random.choice((1, 2, 3, 4))),)) for _ in range(random.choice((1, 2, 3)))
    )
    return Program(
        seed,
        Node("gather_exceptions" if seed % 3 else "in_turn", 7, branches),
        random.choice((EntryKind.CANCEL, EntryKind.CANCEL, EntryKind.LIMIT)),
        stop_at=random.choice((None, None, random.randrange(1, 12), random.randrange(1, 40))),
        deadline_at=random.choice((None, None, None, random.randrange(1, 20))),
        ending=random.choice((Ending.RETURN, Ending.FAIL, Ending.FAIL, Ending.RECUR)),
        is_recurred=random.random() < 0.2,
        is_hurried=random.random() < 0.3,
    )


def _grow(random: Random, depth: int) -> Node:
    if depth == 0 or random.random() < 0.1:
        return Node(random.choice(LEAVES), random.randrange(1000))
    children = (_grow(random, depth - 1) for _ in range(random.choice((1, 2, 3, 3, 4))))
    return Node(random.choice(TREES), random.randrange(1000), tuple(children))


async def play(program: Program, trace: list[str], flow: Flow) -> Any:
    result = await Scene(flow, trace).run(program.root)
    match program.ending:
        case Ending.FAIL:
            raise Boom("at the end")
        case Ending.RECUR:
            raise RecurRequested(b"%d" % len(trace))
        case Ending.RETURN:
            return result


# The world


class World:
    """What comes next for a run that stands where it stands."""

    def __init__(self, program: Program, run: Incarnation) -> None:
        self._program = program
        self._run = run
        self._make = partial(Entry, run.length + 1)

    def next_entry(self) -> Entry:
        program, run = self._program, self._run
        if run.length == 0 and program.is_recurred:
            return self._make(EntryKind.RECUR, "", "", True, run.now)
        if run.length == program.stop_at or (program.is_hurried and self._has_just_settled):
            return self._make(program.stop, "", "stop it", True, run.now + 500_000)
        if run.length == program.deadline_at:
            return self._make(EntryKind.TIMEOUT, "", "the run passed its deadline", True, run.now)
        choices: list[Command | Lost] = [*_due_first(run), *_still_to_come(run)]
        chosen = choices[_draw(program.seed, run.length, len(choices)) % len(choices)]
        luck = _draw(program.seed, chosen.id, run.length)
        return self._belated(chosen, luck) if isinstance(chosen, Lost) else self._awaited(chosen, luck)

    @property
    def _has_just_settled(self) -> bool:
        return bool(self._run.history) and self._run.history[-1].kind is EntryKind.SETTLED

    def _belated(self, lost: Lost, luck: int) -> Entry:
        ok = luck % 3 != 0
        value = msgspec.json.encode(luck % 10) if ok and not lost.is_child else b""
        at = self._run.now + luck % 3_000_000
        return self._make(EntryKind.LATE, lost.id, lost.name, ok, at, input=lost.input, value=value)

    def _awaited(self, command: Command, luck: int) -> Entry:
        match command.kind:
            case EntryKind.TIMER:
                return self._settle(command, at=max(self._run.now, command.due or 0))
            case EntryKind.SETTLED:
                return self._settle(command, at=self._run.now)
            case EntryKind.START | EntryKind.CHILD:
                return self._follow(command, luck)
            case _:
                return self._work(command, luck)

    def _follow(self, command: Command, luck: int) -> Entry:
        if command.kind is EntryKind.CHILD and (command.started or luck % 4 == 0):
            return self._finish(command, luck)
        entry = self._finish(command, 1 if command.kind is EntryKind.CHILD else luck)
        return replace(entry, kind=EntryKind.START, value=msgspec.json.encode(command.target))

    def _work(self, command: Command, luck: int) -> Entry:
        at = self._run.now + luck % 3_000_000
        if luck % 7 == 0 and command.attempt < 3:
            return self._make(EntryKind.RETRY, command.id, command.name, False, at, attempt=command.attempt)
        if luck % 13 == 0:
            return self._make(EntryKind.HEARTBEAT, command.id, command.name, True, at, value=b"1")
        return self._finish(command, luck)

    def _finish(self, command: Command, luck: int) -> Entry:
        ok = luck % 11 != 0
        value = msgspec.json.encode(luck % 10 if ok else f"no {command.id}")
        return self._settle(command, at=self._run.now + luck % 3_000_000, ok=ok, value=value)

    def _settle(self, command: Command, *, at: int, ok: bool = True, value: bytes = b"") -> Entry:
        return self._make(command.kind, command.id, command.name, ok, at, input=command.input, value=value)


def _draw(*facts: object) -> int:
    return crc32(repr(facts).encode())


def _due_first(run: Incarnation) -> list[Command]:
    """Everything, but of the timers only the one that is due first. Nothing is settled while an orphan lives."""
    timers = [c for c in run.pending.values() if c.kind is EntryKind.TIMER]
    others = (c for c in run.pending.values() if c.kind is not EntryKind.TIMER)
    ready = (c for c in others if c.kind is not EntryKind.SETTLED or not run.cancelled_children)
    return sorted(ready, key=lambda c: c.id) + ([min(timers, key=lambda c: c.due or 0)] if timers else [])


def _still_to_come(run: Incarnation) -> list[Lost]:
    """A deed whose outcome is not known when all is settled was lost in a crash: it is asked for once more."""
    told = [entry.step for entry in run.history if entry.kind is EntryKind.LATE]
    settled = max((entry.seq for entry in run.history if entry.kind is EntryKind.SETTLED), default=0)
    coming = []
    for lost in run.lost:
        if lost.id in told:
            told.remove(lost.id)
        elif not (settled and lost.name == DEED):
            coming.append(lost)
    return coming + _surprises(run, settled)


def _surprises(run: Incarnation, since: int) -> list[Lost]:
    """Deeds that were given up, and whose bodies go on."""
    last = {entry.step: entry for entry in run.history if entry.name == DEED and entry.kind in OUTCOMES}
    failed = (e for e in last.values() if e.kind is EntryKind.STEP and not e.ok and e.seq > since)
    return [Lost(e.step, e.name, e.input) for e in failed if is_hasty(msgspec.json.decode(e.input))]


# Running


@dataclass(frozen=True)
class Account:
    """All that can be told of a run that went to its end."""

    outcome: str
    history: tuple[Entry, ...]
    notes: tuple[str, ...]
    trace: tuple[str, ...]
    numbers: int
    late_cancel: str | None


class Stage:
    """Runs one program, from any prefix of its history, with any number of interruptions."""

    def __init__(self, program: Program, history: Sequence[Entry] = ()) -> None:
        self.program = program
        self.drops = 0
        self.run, self.trace = self._raise_curtain(history)

    def play(self, *, drop_when: frozenset[IdleState] = frozenset()) -> Account:
        while self.run.idle in (IdleState.BUSY, IdleState.WAITING) and self.run.length < MOST_ENTRIES:
            if self.run.idle in drop_when:
                self._drop_and_return()
            self.run.deliver(World(self.program, self.run).next_entry())
        if self.run.idle is IdleState.DONE and self.run.length == self.program.stop_at:
            self.run.deliver(World(self.program, self.run).next_entry())  # a run that begins anew still has an inbox
        account = self._tell()
        self.run.drop()
        return account

    def _raise_curtain(self, history: Sequence[Entry]) -> tuple[Incarnation, list[str]]:
        trace: list[str] = []
        run = Incarnation(partial(play, self.program, trace), history)
        run.start()
        return run, trace

    def _drop_and_return(self) -> None:
        before, waits, notes = self.run, self.run.waits, list(self.run.notes)
        before.drop()
        assert before.notes == notes, "a run that leaves memory asks for nothing and gives nothing up"
        self.run, self.trace = self._raise_curtain(before.history)
        assert self.run.waits == waits, "a run that comes back waits for what it waited for"
        self.drops += 1

    def _tell(self) -> Account:
        run = self.run
        trace = tuple(map(_without_addresses, self.trace))
        return Account(_outcome(run), tuple(run.history), tuple(run.notes), trace, run.numbers, run.late_cancel)


def _outcome(run: Incarnation) -> str:
    if run.idle is not IdleState.DONE:
        return f"{run.idle.value} at {run.loop.stacks()}"
    try:
        return f"returned {run.outcome()!r}"
    except RecurRequested as recurrence:
        return f"{RECURRED} with {recurrence.input!r}"
    except ParkedError as error:
        return _without_addresses(f"is parked: {error!r}")
    except BaseException as error:  # a cancelled run raises CancelledError; all ends are compared
        return _without_addresses(f"{FAILED} {error!r}")


def _without_addresses(text: str) -> str:
    """Texts of Python's own have addresses in them, or tell where the stack ended (tasks that await each other)."""
    return re.sub(r" at 0x[0-9a-f]+|(?<=recursion depth exceeded)[^']+", "", text)


# Comparing


@dataclass(frozen=True)
class Difference:
    program: Program
    disturbance: str
    where: str

    def __str__(self) -> str:
        return f"{self.disturbance}: {self.where}\n{self.program}"


@dataclass
class Tally:
    programs: int = 0
    entries: int = 0
    crashes: int = 0
    drops: int = 0


DROPS = {
    "left memory at every wait": frozenset({IdleState.WAITING}),
    "left memory at every idle point": frozenset({IdleState.WAITING, IdleState.BUSY}),
}


class Examiner:
    """Plays programs undisturbed and disturbed, and looks for a difference."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._junk: list[list[object]] = []

    def examine(self, seed: int) -> Difference | None:
        program = write_program(seed)
        calm = Stage(program).play()
        self.tally.programs += 1
        self.tally.entries += len(calm.history)
        wrong = _wrongly_undone(calm)
        if wrong:
            return Difference(program, "undisturbed", wrong)
        return self._crash_everywhere(program, calm) or self._drop_everywhere(program, calm)

    def replay(self, seed: int, recorded: Account) -> Difference | None:
        """Go through a whole history that was made elsewhere, perhaps on another Python."""
        return self._compare(write_program(seed), recorded, "replayed elsewhere", length=len(recorded.history))

    def _crash_everywhere(self, program: Program, calm: Account) -> Difference | None:
        for length in range(len(calm.history) + 1):
            self._move_addresses(length)
            self.tally.crashes += 1
            found = self._compare(program, calm, f"crashed after entry {length}", length=length)
            if found:
                return found
        return None

    def _drop_everywhere(self, program: Program, calm: Account) -> Difference | None:
        for disturbance, when in DROPS.items():
            self._move_addresses(len(disturbance))
            found = self._compare(program, calm, disturbance, drop_when=when)
            if found:
                return found
        return None

    def _compare(
        self,
        program: Program,
        calm: Account,
        disturbance: str,
        *,
        length: int = 0,
        drop_when: frozenset[IdleState] = frozenset(),
    ) -> Difference | None:
        try:
            stage = Stage(program, calm.history[:length])
            disturbed = stage.play(drop_when=drop_when)
        except (NonDeterminismError, AssertionError) as error:
            return Difference(program, disturbance, str(error))
        self.tally.drops += stage.drops
        where = _first_difference(calm, disturbed)
        return Difference(program, disturbance, where) if where else None

    def _move_addresses(self, salt: int) -> None:
        """The next incarnation gets other addresses: an order that depends on them shows."""
        random = Random(salt + self.tally.crashes)
        self._junk.append([bytearray(random.randrange(400)) for _ in range(random.randrange(70))])
        if len(self._junk) > 20:
            self._junk.pop(random.randrange(20))


def _wrongly_undone(account: Account) -> str | None:
    """What a failed run did is undone once each, the last first; what another one did is not."""
    history = account.history
    undos = [msgspec.json.decode(e.input) for e in history if e.step.startswith("undo:") and e.kind is EntryKind.STEP]
    if not account.outcome.startswith(FAILED):
        ended = account.outcome.startswith(("returned", RECURRED))
        return f"{account.outcome}, and yet undone: {undos}" if undos and ended else None
    done = [e for e in history if e.name == DEED and e.kind in OUTCOMES and e.ok]
    expected = [[msgspec.json.decode(e.input), msgspec.json.decode(e.value)] for e in reversed(done)]
    got = [undo[1:] for undo in undos if undo[0] == DEED]
    return None if expected == got else f"done, last first: {expected}, undone: {got}"


def _first_difference(calm: Account, disturbed: Account) -> str | None:
    for field in Account.__dataclass_fields__:
        expected, got = getattr(calm, field), getattr(disturbed, field)
        if expected != got:
            return f"{field}: {_narrow(expected, got)}"
    return None


def _narrow(expected: Any, got: Any) -> str:
    if isinstance(expected, tuple):
        for index, (one, other) in enumerate(zip(expected, got, strict=False)):
            if one != other:
                return f"at {index}: {one!r} became {other!r}"
        return f"{len(expected)} became {len(got)}: {expected[len(got) :] or got[len(expected) :]}"
    return f"{expected!r} became {got!r}"
