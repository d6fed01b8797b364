"""What must hold of how runs end: with what their history says, and not otherwise than it says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from edda.cloudevents import json_format
from edda.core.codec import Codec
from edda.core.model import EntryKind
from edda.core.states import RunStatus
from edda.engine.run.children import CANCELLED
from edda.workflow.children import ChildStarted
from edda.workflow.execution import STOPS

from .effect_log import Testimony
from .final_state import Birth, FinalState, Record, Result
from .saga_workload import LOST, RECALLED, is_doomed, ruin, venture
from .wait_workload import token_of, vigil
from .workload import digest

RECURRING = frozenset({vigil.name, venture.name})
"""They are told what the generations before were given."""
UNDO = "undo:"
"""How the ids of steps that undo begin."""
_MOVES_NOTHING = frozenset({*STOPS, EntryKind.LATE, EntryKind.LATE_EVENT})


def wrong_ends(remains: FinalState, told: Testimony) -> Iterator[str]:
    for row in remains.open:
        last = [f"{entry.kind} {entry.step}" for entry in remains.history.get(row[0], ())[-3:]]
        yield f"run {row[0]} did not end: {row[1]}, owned by {row[2]}; its last entries: {', '.join(last)}"
    for run_id in remains.runs - remains.results.keys() - {row[0] for row in remains.open}:
        yield f"run {run_id} is neither open nor ended"
    for run_id in remains.history.keys() - remains.runs:
        yield f"run {run_id} has a history but does not exist"
    for result in remains.results.values():
        yield from _wrong_end(result, remains, told)


def _wrong_end(result: Result, remains: FinalState, told: Testimony) -> Iterator[str]:
    births = remains.births.get(result.run_id, [])
    if not births or births[-1].generation != result.generation:
        yield f"run {result.run_id}: generation {result.generation} of {len(births)} has the result"
        return
    generations = remains.generations(result.run_id)
    yield from _wrong_value(result, births, generations)
    yield from _wrong_stops(births[-1], generations, told)
    yield from _wrong_status(result, births[-1], generations[-1])


def _wrong_value(result: Result, births: Sequence[Birth], generations: Sequence[Sequence[Record]]) -> Iterator[str]:
    links = [_link(birth, rows) for birth, rows in zip(births, generations, strict=True)]
    for birth, link in zip(births[1:], links, strict=False):
        if _past(birth) != link:
            yield f"run {result.run_id}, generation {birth.generation}: was not given what the history before it says"
    if result.status == RunStatus.COMPLETED and Codec().decode(result.value) != links[-1]:
        yield f"run {result.run_id}: its result is not what its history says"


def _wrong_stops(birth: Birth, generations: Sequence[Sequence[Record]], told: Testimony) -> Iterator[str]:
    """Who cancels writes it down first, and whoever is stopped does not begin anew."""
    for generation, rows in enumerate(generations):
        stops = [row for row in rows if row.kind in STOPS]
        if stops and generation < birth.generation:
            yield f"run {birth.run_id}: began anew after it was stopped in generation {generation} by {stops[0].kind}"
        for stop in stops:
            by_others = birth.parent is not None and stop.name in (CANCELLED, RECALLED)
            if stop.kind == EntryKind.CANCEL and not by_others and birth.run_id not in told.cancelled:
                yield f"run {birth.run_id} was cancelled by nobody: {stop.name}"


def _wrong_status(result: Result, birth: Birth, rows: Sequence[Record]) -> Iterator[str]:
    stops = [place for place, row in enumerate(rows) if row.kind in STOPS]
    first = rows[stops[0]].kind if stops else None
    place = f"run {result.run_id} ended as {result.status}"
    match result.status:
        case RunStatus.COMPLETED:
            if stops and any(row.kind not in _MOVES_NOTHING for row in rows[stops[0] :]):
                yield f"{place}: it went on after it was stopped by {first}"
            if birth.workflow == venture.name and is_doomed(birth.run_id):
                yield f"{place}, though it was to fail"
        case RunStatus.CANCELLED:
            if first != EntryKind.CANCEL:
                yield f"{place}: it was stopped by {first}"
        case RunStatus.FAILED:
            if first != EntryKind.TIMEOUT and not any(_is_ruinous(row) for row in rows):
                yield f"{place}: {result.value[:300]!r}"
        case _:
            yield place


def _is_ruinous(row: Record) -> bool:
    """What ruins a run, or its undoing."""
    return row.kind == EntryKind.STEP and not row.ok and (row.name == ruin.name or row.step.startswith(UNDO))


def _link(birth: Birth, rows: Iterable[Record]) -> str:
    past = [_past(birth)] if birth.workflow in RECURRING else []
    return digest([*past, *_tokens(rows, Codec())])


def _past(birth: Birth) -> str:
    past: str = Codec().decode(birth.input).get("past", "")
    return past


def _tokens(rows: Iterable[Record], codec: Codec) -> Iterator[str]:
    """What the history gave the workflow: the results of its steps, its events, and what became of other runs."""
    for row in rows:
        if row.kind == EntryKind.STEP and row.ok and not row.step.startswith(UNDO):
            yield token_in(codec.decode(row.value))
        elif row.is_receipt:
            event = json_format.parse_stored(codec.decrypt(row.value))
            yield token_of(event.source, event.id)
        elif row.kind == EntryKind.CHILD:
            yield codec.decode(row.value) if row.ok else LOST
        elif (
            row.kind == EntryKind.START and row.ok and not (started := codec.decode(row.value, ChildStarted)).is_awaited
        ):
            yield started.run_id


def token_in(value: Any) -> str:
    """Of a step's result."""
    return str(value["token"] if isinstance(value, dict) else value)
