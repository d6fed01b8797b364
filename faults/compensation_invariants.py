"""What must hold of runs that fail: all they did is undone, the last thing first, each once, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edda.core.codec import Codec
from edda.core.model import EntryKind
from edda.core.states import RunStatus

from .effect_log import Testimony
from .end_invariants import UNDO, token_in
from .final_state import FinalState, Record
from .saga_workload import UNDOABLE, farewell, is_hopeless, pledge, unbook

_UNDONE = frozenset({RunStatus.FAILED, RunStatus.CANCELLED})


def wrong_undos(remains: FinalState, told: Testimony) -> Iterator[str]:
    for result in remains.results.values():
        generations = remains.generations(result.run_id)
        for rows in generations[:-1]:
            if any(row.kind == EntryKind.SETTLED or _is_undo(row) for row in rows):
                yield f"run {result.run_id}: began anew though it was undoing"
        for rows in generations[-1:]:
            yield from _wrong_undoing(result.run_id, result.status, rows)
    yield from _forgotten(remains, told)


def _wrong_undoing(run_id: str, status: str, rows: Sequence[Record]) -> Iterator[str]:
    done = list(_done(rows))
    undos = [row for row in rows if _is_undo(row)]
    undone = [Codec().decode(row.input)["token"] for row in undos]
    if undone != ([] if _stands(status, rows) else done[::-1]):
        yield f"run {run_id} is {status}: it did {done} and undid {undone}; {_story(rows)}"
    if [row.step for row in undos] != [f"{UNDO}{place}/{unbook.name}" for place in range(1, len(undos) + 1)]:
        yield f"run {run_id}: its undos are {[row.step for row in undos]}"
    if [row.ok for row in undos] != [not is_hopeless(token) for token in undone]:
        yield f"run {run_id}: undoing {undone} went as {[row.ok for row in undos]}"
    if status != RunStatus.FAILED and not all(row.ok for row in undos):
        yield f"run {run_id} is {status}, though not all could be undone"
    yield from _wrong_settling(run_id, status, rows)


def _stands(status: str, rows: Sequence[Record]) -> bool:
    """A run that was about to begin anew has nothing to undo any more, though a cancel came in between."""
    return status not in _UNDONE or any(row.name == farewell.name and row.kind == EntryKind.STEP for row in rows)


def _wrong_settling(run_id: str, status: str, rows: Sequence[Record]) -> Iterator[str]:
    """There is another round only if a body was lost in a crash and had to run again."""
    settled = [row for row in rows if row.kind == EntryKind.SETTLED]
    undos = [row.seq for row in rows if _is_undo(row)]
    if [row.step for row in settled] != [f"settled:{place}" for place in range(1, len(settled) + 1)]:
        yield f"run {run_id} settled as {[row.step for row in settled]}"
    if settled and status not in _UNDONE:
        yield f"run {run_id} is {status}, though it settled"
    if undos and (not settled or undos[0] < settled[-1].seq):
        yield f"run {run_id}: settled at {[row.seq for row in settled]}, but undid at {undos}"


def _story(rows: Sequence[Record]) -> str:
    """For whoever looks for the reason."""
    return ", ".join(f"{row.seq} {row.kind} {row.step} {'ok' if row.ok else 'not'} of {row.epoch}" for row in rows)


def _is_undo(row: Record) -> bool:
    return row.kind == EntryKind.STEP and row.step.startswith(UNDO)


def _done(rows: Sequence[Record]) -> Iterator[str]:
    """What has to be undone, in the order in which it was done; what is registered by hand needs code that goes on."""
    for row in rows:
        is_pledge = row.name == pledge.name and row.kind == EntryKind.STEP
        if row.is_outcome and row.ok and (row.name in UNDOABLE or is_pledge):
            yield token_in(Codec().decode(row.value))


def _forgotten(remains: FinalState, told: Testimony) -> Iterator[str]:
    """A body that began has to come to a known end, also one whose process was killed: else it is never undone."""
    known = {(row.run_id, row.generation, row.step) for row in remains.records if row.is_outcome}
    for effect in told.effects:
        result = remains.results.get(effect.run_id)
        if result is None or result.status not in _UNDONE or result.generation != effect.generation:
            continue
        name = effect.step.rpartition("/")[2].partition(":")[0]
        if name in UNDOABLE and (effect.run_id, effect.generation, effect.step) not in known:
            rows = remains.generations(effect.run_id)[-1]
            if not _stands(result.status, rows):
                yield f"run {effect.run_id}: {effect.step} began, and nobody knows what became of it; {_story(rows)}"
