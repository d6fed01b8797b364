"""A batch as one statement: the fence first, and everything else joined to it.

Parts of one statement do not see each other's rows, so a run that starts and waits or ends in the same batch is
folded into one row here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct, field

from edda.core.model import Absorb, Bundle, End, Move, Release, Start, Wait, WorkerId
from edda.core.states import RunStatus

from .sections import SECTIONS, SINGLE, text

Row: TypeAlias = tuple[object, ...]

_NO_WAIT = (None,) * 7


class _Rows(Struct):
    """The rows of each section."""

    run: list[Row] = field(default_factory=list)
    sched: list[Row] = field(default_factory=list)
    expected: list[Row] = field(default_factory=list)
    hist: list[Row] = field(default_factory=list)
    locked: list[Row] = field(default_factory=list)
    asked: list[Row] = field(default_factory=list)
    dropped: list[Row] = field(default_factory=list)
    freed: list[Row] = field(default_factory=list)
    result: list[Row] = field(default_factory=list)
    follow: set[str] = field(default_factory=set)
    """The sections without rows of their own that follow from others."""

    def add(self, bundle: Bundle, worker: WorkerId) -> None:
        run_id, gen, epoch, move = bundle.run_id, bundle.gen, bundle.epoch, bundle.move
        for e in bundle.entries:
            self.hist.append(
                (
                    run_id,
                    gen,
                    epoch,
                    e.seq,
                    e.kind,
                    e.step,
                    e.name,
                    e.ok,
                    e.at,
                    e.attempt,
                    e.n,
                    e.event,
                    e.input,
                    e.value,
                )
            )
        if isinstance(move, End):
            self.result.append((run_id, gen, move.status, move.value, move.at))
        if bundle.start is not None:
            self._add_start(bundle, bundle.start, worker)
        elif move is not None:
            self._add_move(bundle, move)

    def _add_start(self, bundle: Bundle, start: Start, worker: WorkerId) -> None:
        self.run.append((start.run_id, bundle.gen, start.workflow, start.input, start.created_at, start.deadline))
        head = (start.run_id, start.workflow, bundle.gen, bundle.epoch)
        match bundle.move:
            case End():
                return  # over before anybody could see it open
            case Release(absorbed, ready_at, status, reason):
                self.sched.append((*head, None, status, reason, ready_at, absorbed, int(status is RunStatus.PARKED)))
            case move:
                owner = worker if start.ready_at is None else None
                absorbed = move.absorbed if move is not None else 0
                self.sched.append((*head, owner, RunStatus.RUNNING, None, start.ready_at, absorbed, 0))
        self.expected.extend((start.run_id, *_wanted(wait)) for wait in bundle.waits)

    def _add_move(self, bundle: Bundle, move: Move) -> None:
        self.dropped.extend((bundle.run_id, step) for step in bundle.drops)
        self.freed.extend((bundle.run_id, n) for n in bundle.frees)
        match move:
            case Absorb(absorbed):
                self._lock(bundle, ("absorb", absorbed, None, None, None))
                self.follow.add("absorbed")
            case Release(absorbed, ready_at, status, reason):
                self._lock(bundle, ("release", absorbed, ready_at, status, reason))
                self.follow.add("released")
            case End():
                self.locked.append((bundle.run_id, "end", None, None, None, None))
                self.follow |= {"gone", "unheard"}

    def _lock(self, bundle: Bundle, move: Row) -> None:
        if not bundle.waits:
            self.locked.append((bundle.run_id, *move))
            return
        self.asked.extend((bundle.run_id, *move, *_wanted(wait), wait.floor) for wait in bundle.waits)
        self.follow |= {"found", "judged", "registered", "letters", "over", "absorbed"}

    def by_section(self) -> dict[str, list[Row]]:
        if self.asked:  # one statement locks all
            self.asked.extend((*row, *_NO_WAIT) for row in self.locked)
            self.locked = []
        return {name: rows for name in SECTIONS if (rows := getattr(self, name, None))}


def _wanted(wait: Wait) -> Row:
    return (wait.step, wait.key, wait.own_key, wait.type, wait.match, wait.due)


def compose(worker: WorkerId, batch: Sequence[Bundle]) -> tuple[str, list[object]]:
    """The statement for this batch and its values, behind $1 to $3 of the fence."""
    rows = _Rows()
    for bundle in batch:
        rows.add(bundle, worker)
    filled = rows.by_section()
    names = tuple(name for name in SECTIONS if name in filled or name in rows.follow)
    if names == ("hist",) and len(rows.hist) == 1:
        return SINGLE, list(rows.hist[0])
    values: list[object] = list(filled.values())
    return text(names), values
