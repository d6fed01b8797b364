"""What must hold, whatever happened: checked on the database's rows, its audit, and the processes' own ledgers.

No clock decides anything here. Which claim an effect belongs to is told by its epoch: an effect under epoch e of a
step that was recorded under an earlier one is a recorded step that ran again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from edda.cloudevents import json_format
from edda.core.codec import Codec
from edda.core.model import EntryKind
from edda.core.states import MOVES, RunStatus

from .audit import READ, Note
from .ledger import Effect, Testimony
from .lines import Line, text
from .vigils import token_of
from .workload import digest

RUNS = "SELECT id FROM edda_run"
HISTORY = """SELECT run_id, seq, epoch, kind, step, name, ok, attempt, n, event, input, value
    FROM edda_hist ORDER BY run_id, gen, seq"""
RESULTS = "SELECT run_id, status, value FROM edda_result"
OPEN = "SELECT run_id, status, owner FROM edda_sched"

CLOCK_SLACK = 5_000
"""Microseconds that two readings of this machine's clock may differ by when it is being adjusted."""
WORTH = 0.9
"""Of the attempted work must have succeeded, or the run proves nothing."""

_OUTCOMES = frozenset({EntryKind.STEP, EntryKind.TIMER, EntryKind.LATE, EntryKind.EVENT})
_BODIES = frozenset({EntryKind.STEP, EntryKind.RETRY, EntryKind.LATE})


class Record(Struct, frozen=True):
    """One row of history."""

    run_id: str
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


class Result(Struct, frozen=True):
    run_id: str
    status: str
    value: bytes


class Remains(Struct, frozen=True):
    """All there is to know when the noise is over."""

    runs: frozenset[str]
    history: dict[str, list[Record]]
    results: dict[str, Result]
    open: tuple[tuple[Any, ...], ...]
    notes: tuple[Note, ...]

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


async def read_remains(line: Line) -> Remains:
    history: dict[str, list[Record]] = defaultdict(list)
    for row in await line.rows(HISTORY):
        run_id, seq, epoch, kind, step, name, ok, *rest = row
        record = Record(text(run_id), seq, epoch, kind, text(step), text(name), bool(ok), *rest)
        history[record.run_id].append(record)
    results = [Result(text(run_id), status, value) for run_id, status, value in await line.rows(RESULTS)]
    return Remains(
        frozenset(text(row[0]) for row in await line.rows(RUNS)),
        history,
        {result.run_id: result for result in results},
        tuple(tuple(map(text, row)) for row in await line.rows(OPEN)),
        tuple(Note(*map(text, row)) for row in await line.rows(READ)),
    )


def violations(remains: Remains, told: Testimony) -> Iterator[str]:
    yield from _lost_starts(remains, told)
    for run_id, rows in remains.history.items():
        yield from _broken_history(run_id, rows)
    yield from _zombie_rows(remains)
    yield from _illegal_moves(remains)
    yield from _wrong_effects(remains, told.effects)
    yield from _records_without_effect(remains, told.effects)
    yield from _early_timers(told.effects)
    yield from _wrong_ends(remains, told)
    yield from _too_little_work(remains, told)


def _lost_starts(remains: Remains, told: Testimony) -> Iterator[str]:
    for run_id in sorted(told.acked - remains.runs):
        yield f"start() returned, but run {run_id} is not stored"


def _broken_history(run_id: str, rows: list[Record]) -> Iterator[str]:
    if [row.seq for row in rows] != list(range(1, len(rows) + 1)):
        yield f"run {run_id}: the history has gaps: {[row.seq for row in rows]}"
    epochs = [row.epoch for row in rows]
    if epochs != sorted(epochs):
        yield f"run {run_id}: the epochs go back: {epochs}"
    outcomes = Counter(row.step for row in rows if row.kind in _OUTCOMES)
    for step, times in outcomes.items():
        if times > 1:
            yield f"run {run_id}: {step} has {times} outcomes"


def _zombie_rows(remains: Remains) -> Iterator[str]:
    """A claim finds all that older epochs will ever have written."""
    for note in remains.notes:
        if note.seen is None or note.new_epoch is None:
            continue
        older = sum(row.epoch < note.new_epoch for row in remains.history.get(note.run_id, ()))
        if older != note.seen:
            yield f"run {note.run_id}: claim {note.new_epoch} found {note.seen} rows of older epochs, now {older}"


def _illegal_moves(remains: Remains) -> Iterator[str]:
    for note in remains.notes:
        match note.what:
            case "tampered":
                yield f"run {note.run_id}: a row of history or result was changed"
            case "moved":
                yield from _illegal_move(note)
            case "ended":
                yield from _illegal_end(note, remains.results.get(note.run_id))


def _illegal_move(note: Note) -> Iterator[str]:
    old, new = RunStatus(str(note.old_status)), RunStatus(str(note.new_status))
    if old is not new and new not in MOVES[old]:
        yield f"run {note.run_id}: from {old} to {new}"
    if note.old_owner is not None and note.new_owner not in (None, note.old_owner):
        yield f"run {note.run_id}: from {note.old_owner} straight to {note.new_owner}"
    is_claim = note.old_owner is None and note.new_owner is not None
    if note.new_epoch != (note.old_epoch or 0) + is_claim:
        yield f"run {note.run_id}: epoch {note.old_epoch} became {note.new_epoch}"


def _illegal_end(note: Note, result: Result | None) -> Iterator[str]:
    if note.old_owner is None:
        yield f"run {note.run_id} was ended by nobody"
    if result is None:
        yield f"run {note.run_id} is gone without a result"
    elif RunStatus(result.status) not in MOVES[RunStatus(str(note.old_status))]:
        yield f"run {note.run_id}: from {note.old_status} to {result.status}"


def _wrong_effects(remains: Remains, effects: Iterable[Effect]) -> Iterator[str]:
    owners = _owners(remains.notes)
    attempts: Counter[tuple[str, str, int, int]] = Counter()
    links: dict[tuple[str, str], str] = {}
    recorded = _recorded(remains)
    for effect in effects:
        place = f"run {effect.run_id}, {effect.step}, attempt {effect.attempt}, epoch {effect.epoch}"
        if effect.run_id not in remains.runs:
            yield f"{place}: ran though its run is not stored"
        for row in recorded.get((effect.run_id, effect.step), ()):
            if row.epoch < effect.epoch and row.attempt >= effect.attempt:
                yield f"{place}: ran again, recorded as {row.kind} of attempt {row.attempt} in epoch {row.epoch}"
        attempts[effect.run_id, effect.step, effect.attempt, effect.epoch] += 1
        if attempts[effect.run_id, effect.step, effect.attempt, effect.epoch] == 2:
            yield f"{place}: ran twice under one claim"
        if owners.get((effect.run_id, effect.epoch)) != effect.worker:
            yield f"{place}: ran in {effect.worker}, owned by {owners.get((effect.run_id, effect.epoch))}"
        if links.setdefault((effect.run_id, effect.step), effect.link) != effect.link:
            yield f"{place}: ran before what it was decided on was recorded"


def _owners(notes: Iterable[Note]) -> dict[tuple[str, int], str]:
    """Who claimed which run under which epoch; one born owned is its owner's first epoch."""
    claims = (note for note in notes if note.new_owner is not None and note.new_epoch is not None)
    return {(note.run_id, note.new_epoch or 0): note.new_owner or "" for note in claims}


def _recorded(remains: Remains) -> dict[tuple[str, str], list[Record]]:
    rows: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for row in remains.records:
        if row.kind in _BODIES:
            rows[row.run_id, row.step].append(row)
    return rows


def _records_without_effect(remains: Remains, effects: Iterable[Effect]) -> Iterator[str]:
    ran = {(effect.run_id, effect.step, effect.attempt, effect.epoch) for effect in effects}
    for row in remains.records:
        if row.kind in _BODIES and (row.run_id, row.step, row.attempt, row.epoch) not in ran:
            yield f"run {row.run_id}: {row.step} has a {row.kind} of epoch {row.epoch} but did not run in it"


def _early_timers(effects: Iterable[Effect]) -> Iterator[str]:
    for effect in effects:
        if effect.at + CLOCK_SLACK < effect.not_before:
            yield f"run {effect.run_id}, {effect.step}: {effect.not_before - effect.at} µs before its timer was due"


def _wrong_ends(remains: Remains, told: Testimony) -> Iterator[str]:
    for row in remains.open:
        yield f"run {row[0]} did not end: {row[1]}, owned by {row[2]}"
    for run_id in remains.runs - remains.results.keys() - {row[0] for row in remains.open}:
        yield f"run {run_id} is neither open nor ended"
    for run_id in remains.history.keys() - remains.runs:
        yield f"run {run_id} has a history but does not exist"
    for result in remains.results.values():
        yield from _wrong_end(result, remains, told)


def _wrong_end(result: Result, remains: Remains, told: Testimony) -> Iterator[str]:
    codec = Codec()
    match result.status:
        case "completed":
            if codec.decode(result.value) != digest(_tokens(remains.history.get(result.run_id, ()), codec)):
                yield f"run {result.run_id}: its result is not what its history says"
        case "cancelled" if result.run_id in told.cancelled:
            pass
        case _:
            yield f"run {result.run_id} ended as {result.status}: {result.value[:300]!r}"


def _tokens(rows: Iterable[Record], codec: Codec) -> Iterator[str]:
    """What the history gave the workflow: the results of its steps, and its events."""
    for row in rows:
        if row.kind == EntryKind.STEP and row.ok:
            yield codec.decode(row.value)
        elif row.is_receipt:
            event = json_format.parse_stored(codec.unseal(row.value))
            yield token_of(event.source, event.id)


def _too_little_work(remains: Remains, told: Testimony) -> Iterator[str]:
    share = success(remains, told)
    if share < WORTH:
        yield f"only {share:.1%} of the attempted work succeeded; this run proves nothing"


def success(remains: Remains, told: Testimony) -> float:
    done = sum(result.status in {"completed", "cancelled"} for result in remains.results.values())
    done += len(told.posted)
    attempted = len(remains.runs) + len(told.failures) + len(told.posted) + told.refused
    return done / attempted if attempted else 0.0
