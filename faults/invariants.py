"""What must hold, whatever happened: checked on the database's rows, its audit, and the processes' own ledgers.

No clock decides anything here. Which claim an effect belongs to is told by its epoch: an effect under epoch e of a
step that was recorded under an earlier one is a recorded step that ran again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from edda.core.model import EntryKind
from edda.core.states import TRANSITIONS, RunStatus

from .audit_triggers import Note
from .child_invariants import wrong_kinship
from .compensation_invariants import wrong_undos
from .effect_log import Effect, Testimony
from .end_invariants import wrong_ends
from .final_state import FinalState, Record, Result, Step

CLOCK_SLACK = 5_000
"""Microseconds that two readings of this machine's clock may differ by when it is being adjusted."""
WORTH = 0.9
"""Of the attempted work must have succeeded, or the run proves nothing."""

_ONCE = frozenset(
    {EntryKind.STEP, EntryKind.TIMER, EntryKind.EVENT, EntryKind.MESSAGE, EntryKind.START, EntryKind.CHILD}
)


def violations(remains: FinalState, told: Testimony) -> Iterator[str]:
    yield from lost_starts(remains, told)
    yield from history_violations(remains)
    yield from _wrong_effects(remains, told.effects)
    yield from _records_without_effect(remains, told.effects)
    yield from _early_timers(told.effects)
    yield from wrong_ends(remains, told)
    yield from wrong_undos(remains, told)
    yield from wrong_kinship(remains)
    yield from _too_little_work(remains, told)


def history_violations(remains: FinalState) -> Iterator[str]:
    """Of any workflow."""
    for run_id in remains.runs:
        yield from _broken_run(run_id, remains)
    yield from _zombie_rows(remains)
    yield from _illegal_moves(remains)


def lost_starts(remains: FinalState, told: Testimony) -> Iterator[str]:
    for run_id in sorted(told.acked - remains.runs):
        yield f"start() returned, but run {run_id} is not stored"


def _broken_run(run_id: str, remains: FinalState) -> Iterator[str]:
    generations = remains.generations(run_id)
    numbers = [birth.generation for birth in remains.births[run_id]]
    if numbers != list(range(len(numbers))):
        yield f"run {run_id}: its generations are {numbers}"
    for rows in generations:
        yield from _broken_history(run_id, rows)
    epochs = [row.epoch for rows in generations for row in rows]
    if epochs != sorted(epochs):
        yield f"run {run_id}: the epochs go back: {epochs}"
    for generation, rows in enumerate(generations):
        starts = [row.seq for row in rows if row.kind == EntryKind.RECUR]
        if starts != ([1] if generation else []):
            yield f"run {run_id}, generation {generation}: begins anew at {starts}"


def _broken_history(run_id: str, rows: list[Record]) -> Iterator[str]:
    if [row.seq for row in rows] != list(range(1, len(rows) + 1)):
        yield f"run {run_id}: the history has gaps: {[row.seq for row in rows]}"
    times = Counter((row.step, row.kind) for row in rows if row.kind in _ONCE)
    for step, kind in (key for key, count in times.items() if count > 1):
        yield f"run {run_id}: {step} has {times[step, kind]} entries {kind}"
    yield from _wrong_outcomes(run_id, rows)


def _wrong_outcomes(run_id: str, rows: list[Record]) -> Iterator[str]:
    """A step ends once. Only what was given up may turn out to have gone well after all."""
    outcomes: dict[str, list[Record]] = defaultdict(list)
    for row in rows:
        if row.is_outcome:
            outcomes[row.step].append(row)
    for step, ends in outcomes.items():
        found = [(end.kind, end.ok) for end in ends]
        if len(found) > 1 and not (len(found) == 2 and not found[0][1] and found[1] == (EntryKind.LATE, True)):
            yield f"run {run_id}: {step} ended as {found}"


def _zombie_rows(remains: FinalState) -> Iterator[str]:
    """A claim finds all that older epochs will ever have written."""
    for note in remains.notes:
        if note.seen is None or note.new_epoch is None:
            continue
        older = sum(row.epoch < note.new_epoch for row in remains.history.get(note.run_id, ()))
        if older != note.seen:
            yield f"run {note.run_id}: claim {note.new_epoch} found {note.seen} rows of older epochs, now {older}"


def _illegal_moves(remains: FinalState) -> Iterator[str]:
    for note in remains.notes:
        match note.what:
            case "tampered":
                yield f"run {note.run_id}: a row of history or result was changed"
            case "moved":
                yield from _illegal_move(note)
                if note.unread:
                    yield f"run {note.run_id} began anew with {note.unread} letters unread"
            case "ended":
                yield from _illegal_end(note, remains.results.get(note.run_id))


def _illegal_move(note: Note) -> Iterator[str]:
    old, new = RunStatus(str(note.old_status)), RunStatus(str(note.new_status))
    if old is not new and new not in TRANSITIONS[old]:
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
    elif RunStatus(result.status) not in TRANSITIONS[RunStatus(str(note.old_status))]:
        yield f"run {note.run_id}: from {note.old_status} to {result.status}"


def _wrong_effects(remains: FinalState, effects: Iterable[Effect]) -> Iterator[str]:
    owners = _owners(remains.notes)
    attempts: Counter[tuple[Step, int, int]] = Counter()
    links: dict[Step, str] = {}
    recorded = _recorded(remains)
    for effect in effects:
        step = (effect.run_id, effect.generation, effect.step)
        place = f"run {effect.run_id}, {effect.step}, attempt {effect.attempt}, epoch {effect.epoch}"
        if effect.run_id not in remains.runs:
            yield f"{place}: ran though its run is not stored"
        for row in recorded.get(step, ()):
            if row.epoch < effect.epoch and row.attempt >= effect.attempt:
                yield f"{place}: ran again, recorded as {row.kind} of attempt {row.attempt} in epoch {row.epoch}"
        attempts[step, effect.attempt, effect.epoch] += 1
        if attempts[step, effect.attempt, effect.epoch] == 2:
            yield f"{place}: ran twice under one claim"
        if owners.get((effect.run_id, effect.epoch)) != effect.worker:
            yield f"{place}: ran in {effect.worker}, owned by {owners.get((effect.run_id, effect.epoch))}"
        if links.setdefault(step, effect.link) != effect.link:
            yield f"{place}: ran before what it was decided on was recorded"


def _owners(notes: Iterable[Note]) -> dict[tuple[str, int], str]:
    """Who claimed which run under which epoch; one born owned is its owner's first epoch."""
    claims = (note for note in notes if note.new_owner is not None and note.new_epoch is not None)
    return {(note.run_id, note.new_epoch or 0): note.new_owner or "" for note in claims}


def _recorded(remains: FinalState) -> dict[Step, list[Record]]:
    rows: dict[Step, list[Record]] = defaultdict(list)
    for row in remains.records:
        if row.is_body:
            rows[row.run_id, row.generation, row.step].append(row)
    return rows


def _records_without_effect(remains: FinalState, effects: Iterable[Effect]) -> Iterator[str]:
    """What a given up attempt did counts as the outcome of the one after it."""
    first: dict[tuple[str, int, str, int], int] = {}
    for effect in effects:
        claim = (effect.run_id, effect.generation, effect.step, effect.epoch)
        first[claim] = min(effect.attempt, first.get(claim, effect.attempt))
    for row in remains.records:
        if row.is_body and first.get((row.run_id, row.generation, row.step, row.epoch), row.attempt + 1) > row.attempt:
            yield f"run {row.run_id}: {row.step} has a {row.kind} of epoch {row.epoch} but did not run in it"


def _early_timers(effects: Iterable[Effect]) -> Iterator[str]:
    for effect in effects:
        if effect.at + CLOCK_SLACK < effect.not_before:
            yield f"run {effect.run_id}, {effect.step}: {effect.not_before - effect.at} µs before its timer was due"


def _too_little_work(remains: FinalState, told: Testimony) -> Iterator[str]:
    share = success(remains, told)
    if share < WORTH:
        yield f"only {share:.1%} of the attempted work succeeded; this run proves nothing"


def success(remains: FinalState, told: Testimony) -> float:
    """Whether a run that ended was right to end so is for others to say."""
    done = len(remains.results) + len(told.posted)
    attempted = len(remains.runs) + len(told.failures) + len(told.posted) + told.refused
    return done / attempted if attempted else 0.0
