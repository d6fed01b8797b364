"""What must hold of runs that start others and wait for them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from edda.core.codec import Codec
from edda.core.model import EntryKind
from edda.core.states import RunStatus
from edda.engine.run.children import CANCELLED
from edda.workflow.children import ChildStarted
from edda.workflow.execution import STOPS

from .audit_triggers import Note
from .final_state import FinalState, Record, Result, Step

DERIVED = "child-"
"""How the ids of children begin that were not given one."""


class Bond(Struct, frozen=True):
    """One run has another one started, or told to it."""

    run_id: str
    generation: int
    step: str
    seq: int
    started: ChildStarted


def wrong_kinship(remains: FinalState) -> Iterator[str]:
    bonds = list(_bonds(remains.records))
    targets = {(bond.run_id, bond.generation, bond.step): bond.started.run_id for bond in bonds}
    yield from _lost_children(remains, bonds)
    yield from _wrong_news(remains, targets)
    yield from _told_twice(remains, targets)
    yield from _unstopped(remains, bonds)
    yield from _wrongly_stopped(remains, bonds)
    yield from _settled_early(remains, bonds)


def _bonds(records: Iterable[Record]) -> Iterator[Bond]:
    codec = Codec()
    for row in records:
        if row.kind == EntryKind.START and row.ok:
            yield Bond(row.run_id, row.generation, row.step, row.seq, codec.decode(row.value, ChildStarted))


def _lost_children(remains: FinalState, bonds: Iterable[Bond]) -> Iterator[str]:
    """A child is there if and only if its parent's history says so."""
    parents: dict[str, list[str]] = defaultdict(list)
    for bond in bonds:
        if bond.started.run_id not in remains.runs:
            yield f"run {bond.run_id}: {bond.step} started {bond.started.run_id}, which does not exist"
        parents[bond.started.run_id].append(bond.run_id)
    for run_id, births in remains.births.items():
        if run_id.startswith(DERIVED) and births[0].parent not in parents[run_id]:
            yield f"run {run_id} is a child of {births[0].parent}, whose history does not know it"


def _wrong_news(remains: FinalState, targets: Mapping[Step, str]) -> Iterator[str]:
    """Who waited was told how the other run really ended."""
    for row in remains.records:
        target = targets.get((row.run_id, row.generation, row.step))
        if row.kind != EntryKind.CHILD or target is None:
            continue
        result = remains.results.get(target)
        if result is None:
            yield f"run {row.run_id}: {row.step} says that {target} has ended"
        elif not _is_true(row, result):
            yield f"run {row.run_id}: {row.step} was told otherwise than {target} ended, which is {result.status}"


def _is_true(row: Record, result: Result) -> bool:
    if row.ok != (result.status == RunStatus.COMPLETED):
        return False
    return result.status == RunStatus.CANCELLED or row.value == result.value


def _told_twice(remains: FinalState, targets: Mapping[Step, str]) -> Iterator[str]:
    """A step is told once of a run, however late; what it no longer waits for is named by the entry.

    Who watches a run may be told its end before it has recorded that it watches.
    """
    told: Counter[tuple[str, str, str | None]] = Counter()
    for row in remains.records:
        if row.n is not None and row.kind in {EntryKind.LATE, EntryKind.CHILD}:
            target = row.name if row.kind == EntryKind.LATE else targets.get((row.run_id, row.generation, row.step))
            told[row.run_id, row.step, target] += 1
    for (run_id, step, target), times in told.items():
        if times > 1:
            yield f"run {run_id}: {step} was told {times} times of {target or 'a run'}"


def _unstopped(remains: FinalState, bonds: Iterable[Bond]) -> Iterator[str]:
    """A parent that was stopped stops its children before it ends: those that end after it have been asked to."""
    ends = {note.run_id: (place, note) for place, note in enumerate(remains.notes) if note.what == "ended"}
    stopped = {(row.run_id, row.generation) for row in remains.records if row.kind in STOPS}
    for bond in bonds:
        if (bond.run_id, bond.generation) not in stopped or not bond.started.cancel_with_parent:
            continue
        if _ends_later(ends, bond) and not ends[bond.started.run_id][1].cancelled:
            yield f"run {bond.started.run_id} went on after its parent {bond.run_id} was stopped"


def _ends_later(ends: dict[str, tuple[int, Note]], bond: Bond) -> bool:
    parent, child = ends.get(bond.run_id), ends.get(bond.started.run_id)
    return parent is not None and child is not None and child[0] > parent[0]


def _wrongly_stopped(remains: FinalState, bonds: Iterable[Bond]) -> Iterator[str]:
    """With its parent only a child that follows it. One with a chosen id may be stopped before it is recorded."""
    following = {bond.started.run_id for bond in bonds if bond.started.cancel_with_parent}
    following |= {
        run_id for run_id, births in remains.births.items() if births[0].parent and not run_id.startswith(DERIVED)
    }
    for row in remains.records:
        if row.kind == EntryKind.CANCEL and row.name == CANCELLED and row.run_id not in following:
            yield f"run {row.run_id} was stopped with a run that it does not follow"


def _settled_early(remains: FinalState, bonds: Iterable[Bond]) -> Iterator[str]:
    """Undoing waits for children that were waited for: they undo what is theirs first."""
    settled: dict[tuple[str, int], int] = {}
    heard: dict[Step, int] = {}
    for row in remains.records:
        if row.kind == EntryKind.SETTLED:
            settled.setdefault((row.run_id, row.generation), row.seq)
        elif row.kind in {EntryKind.CHILD, EntryKind.LATE}:
            heard.setdefault((row.run_id, row.generation, row.step), row.seq)
    for bond in bonds:
        at = settled.get((bond.run_id, bond.generation))
        if at is None or not (bond.started.cancel_with_parent and bond.started.is_awaited):
            continue
        if heard.get((bond.run_id, bond.generation, bond.step), at) >= at:
            yield f"run {bond.run_id}: settled before {bond.started.run_id} had ended"
