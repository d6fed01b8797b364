"""What is left in the database when the noise is over: how runs began, went on and ended, and what its audit says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Set
from typing import Any

from msgspec import Struct

from edda.core.model import EntryKind

from .audit_triggers import READ, Note
from .sql_client import Line, text

RUNS = "SELECT id, generation, workflow, parent, parent_step, input FROM edda_run ORDER BY id, generation"
HISTORY = """SELECT run_id, generation, seq, epoch, kind, step, name, ok, attempt, inbox_no, event, input, value
    FROM edda_history ORDER BY run_id, generation, seq"""
RESULTS = "SELECT run_id, generation, status, value FROM edda_result"
OPEN = "SELECT run_id, status, owner FROM edda_open_run"

Step = tuple[str, int, str]
"""A run, its generation, and the step's id."""

_INLINE = frozenset({"status", "cancel"})
"""Steps that leave no trace of their own: what a workflow asks of another run."""


class Birth(Struct, frozen=True):
    """How a generation began."""

    run_id: str
    generation: int
    workflow: str
    parent: str | None
    parent_step: str | None
    input: bytes


class Record(Struct, frozen=True):
    """One row of history."""

    run_id: str
    generation: int
    seq: int
    epoch: int
    kind: str
    step: str
    name: str
    ok: bool
    attempt: int
    n: int | None
    event: int | None
    input: bytes
    value: bytes

    @property
    def is_receipt(self) -> bool:
        """A run got an event."""
        return self.kind == EntryKind.EVENT and self.ok

    @property
    def is_body(self) -> bool:
        """A body ran, and this is how it ended. What was given up before it began ended as nothing."""
        if self.name in _INLINE:
            return False
        if self.kind == EntryKind.LATE:
            return self.n is None and bool(self.value)
        return self.kind in {EntryKind.STEP, EntryKind.RETRY}

    @property
    def is_outcome(self) -> bool:
        """Of a step, whether somebody waited for it or not. What is late and came by letter is the end of a run."""
        return self.kind == EntryKind.STEP or (self.kind == EntryKind.LATE and self.n is None)


class Result(Struct, frozen=True):
    run_id: str
    generation: int
    status: str
    value: bytes


class FinalState(Struct, frozen=True):
    """All there is to know when the noise is over."""

    births: dict[str, list[Birth]]
    """By run, the first generation first."""
    history: dict[str, list[Record]]
    """By run, all generations one after the other."""
    results: dict[str, Result]
    open: tuple[tuple[Any, ...], ...]
    notes: tuple[Note, ...]

    @property
    def runs(self) -> Set[str]:
        return self.births.keys()

    def generations(self, run_id: str) -> list[list[Record]]:
        """The histories of a run."""
        rows = self.history.get(run_id, ())
        return [[row for row in rows if row.generation == birth.generation] for birth in self.births.get(run_id, ())]

    @property
    def records(self) -> Iterator[Record]:
        for rows in self.history.values():
            yield from rows

    @property
    def takeovers(self) -> int:
        return sum(note.what == "left" for note in self.notes)

    @property
    def moved(self) -> int:
        """Runs that passed on because their worker was taken over."""
        return sum(note.what == "moved" and note.fenced == 0 for note in self.notes)


async def read_remains(line: Line) -> FinalState:
    history: dict[str, list[Record]] = defaultdict(list)
    for row in await line.rows(HISTORY):
        run_id, generation, seq, epoch, kind, step, name, ok, *rest = row
        record = Record(text(run_id), generation, seq, epoch, kind, text(step), text(name), bool(ok), *rest)
        history[record.run_id].append(record)
    births: dict[str, list[Birth]] = defaultdict(list)
    for id, generation, workflow, parent, parent_step, input in await line.rows(RUNS):
        birth = Birth(text(id), generation, text(workflow), text(parent), text(parent_step), input)
        births[birth.run_id].append(birth)
    results = [Result(text(run_id), *rest) for run_id, *rest in await line.rows(RESULTS)]
    return FinalState(
        dict(births),
        dict(history),
        {result.run_id: result for result in results},
        tuple(tuple(map(text, row)) for row in await line.rows(OPEN)),
        tuple(Note(*map(text, row)) for row in await line.rows(READ)),
    )
