"""Random programs, the world they run in, and the comparison of one run with another.

The world decides what happens next from the seed, the length of the history and what is pending, and
from nothing else: so a run that was disturbed must go exactly as the one that was not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any
from zlib import crc32

import msgspec

from edda.core.model import Entry, EntryKind
from edda.errors import NonDeterminismError
from edda.workflow.execution import Command, Idle

from .incarnation import Flow, Incarnation, Lost
from .pieces import LEAVES, TREES, Node, Scene

MOST_ENTRIES = 150


@dataclass(frozen=True)
class Program:
    seed: int
    root: Node
    cancel_at: int | None
    deadline_at: int | None

    def __str__(self) -> str:
        return f"seed {self.seed}, cancel at {self.cancel_at}, deadline at {self.deadline_at}: {self.root}"


def write_program(seed: int) -> Program:
    random = Random(seed)
    branches = tuple(
        Node("compensate", 1, (_grow(random, random.choice((1, 2, 3, 4))),)) for _ in range(random.choice((1, 2, 3)))
    )
    return Program(
        seed,
        Node("gather_exceptions" if seed % 3 else "in_turn", 7, branches),
        cancel_at=random.choice((None, None, random.randrange(1, 12))),
        deadline_at=random.choice((None, None, None, random.randrange(1, 20))),
    )


def _grow(random: Random, depth: int) -> Node:
    if depth == 0 or random.random() < 0.1:
        return Node(random.choice(LEAVES), random.randrange(1000))
    children = (_grow(random, depth - 1) for _ in range(random.choice((1, 2, 3, 3, 4))))
    return Node(random.choice(TREES), random.randrange(1000), tuple(children))


async def play(root: Node, trace: list[str], flow: Flow) -> Any:
    return await Scene(flow, trace).run(root)


# The world


def next_entry(program: Program, run: Incarnation) -> Entry:
    make = partial(Entry, run.length + 1)
    if run.length == program.cancel_at:
        return make(EntryKind.CANCEL, "", "stop it", True, run.now + 500_000)
    if run.length == program.deadline_at:
        return make(EntryKind.TIMEOUT, "", "the run passed its deadline", True, run.now)
    choices: list[Command | Lost] = [*_due_first(run), *_still_to_come(run)]
    chosen = choices[_draw(program.seed, run.length, len(choices)) % len(choices)]
    luck = _draw(program.seed, chosen.id, run.length)
    at = run.now + luck % 3_000_000
    if isinstance(chosen, Lost):
        return make(EntryKind.LATE, chosen.id, chosen.name, True, at, input=chosen.input, value=b"1")
    if chosen.kind is EntryKind.TIMER:
        return make(EntryKind.TIMER, chosen.id, chosen.name, True, max(run.now, chosen.due or 0))
    if luck % 7 == 0 and chosen.attempt < 3:
        return make(EntryKind.RETRY, chosen.id, chosen.name, False, at, attempt=chosen.attempt)
    value = msgspec.json.encode(f"no {chosen.id}" if luck % 11 == 0 else luck % 10)
    ok = luck % 11 != 0
    return make(EntryKind.STEP, chosen.id, chosen.name, ok, at, input=chosen.input, value=value)


def _draw(*facts: object) -> int:
    return crc32(repr(facts).encode())


def _due_first(run: Incarnation) -> list[Command]:
    """Every step, and the one timer that is due first."""
    steps = sorted((c for c in run.pending.values() if c.kind is EntryKind.STEP), key=lambda c: c.id)
    timers = [c for c in run.pending.values() if c.kind is EntryKind.TIMER]
    return steps + ([min(timers, key=lambda c: c.due or 0)] if timers else [])


def _still_to_come(run: Incarnation) -> list[Lost]:
    told = [entry.step for entry in run.history if entry.kind is EntryKind.LATE]
    coming = []
    for lost in run.lost:
        if lost.id in told:
            told.remove(lost.id)
        else:
            coming.append(lost)
    return coming


# Running


@dataclass(frozen=True)
class Account:
    """All that can be told of a run that went to its end."""

    outcome: str
    history: tuple[Entry, ...]
    notes: tuple[str, ...]
    trace: tuple[str, ...]
    numbers: int


class Stage:
    """Runs one program, from any prefix of its history, with any number of interruptions."""

    def __init__(self, program: Program, history: Sequence[Entry] = ()) -> None:
        self.program = program
        self.drops = 0
        self.run, self.trace = self._raise_curtain(history)

    def play(self, *, drop_when: frozenset[Idle] = frozenset()) -> Account:
        while self.run.idle in (Idle.BUSY, Idle.WAITING) and self.run.length < MOST_ENTRIES:
            if self.run.idle in drop_when:
                self._drop_and_return()
            self.run.deliver(next_entry(self.program, self.run))
        account = self._tell()
        self.run.drop()
        return account

    def _raise_curtain(self, history: Sequence[Entry]) -> tuple[Incarnation, list[str]]:
        trace: list[str] = []
        run = Incarnation(partial(play, self.program.root, trace), history)
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
        return Account(
            _outcome(run), tuple(run.history), tuple(run.notes), tuple(map(_without_addresses, self.trace)), run.numbers
        )


def _outcome(run: Incarnation) -> str:
    if run.idle is not Idle.DONE:
        return f"{run.idle.value} at {run.loop.stacks()}"
    try:
        return f"returned {run.outcome()!r}"
    except BaseException as error:  # a cancelled run raises CancelledError; all ends are compared
        return _without_addresses(f"raised {error!r}")


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
    "left memory at every wait": frozenset({Idle.WAITING}),
    "left memory at every idle point": frozenset({Idle.WAITING, Idle.BUSY}),
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
        drop_when: frozenset[Idle] = frozenset(),
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
