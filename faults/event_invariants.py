"""What must hold of events: each run got every event that was meant for it, in order, once.

Whether an event fits is decided here from its stored body, without the product's keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct

from edda.cloudevents import json_format
from edda.core.codec import Codec
from edda.core.model import EntryKind, RunId
from edda.core.states import RunStatus
from edda.engine.events import run_id_for_event

from .effect_log import Testimony
from .event_sender import values_of
from .final_state import FinalState, Record
from .sql_client import Line, Row, text
from .wait_workload import BEGUN, Match, is_orderly, vigil

EVENTS = "SELECT seq, source, id, type, target, body FROM edda_event ORDER BY seq"
STARTS = "SELECT run_id, since FROM faults_audit WHERE what = 'born'"
VIGILS = f"SELECT id FROM edda_run WHERE workflow = '{vigil.name}'"
WAITS = "SELECT run_id, step FROM edda_wait"


class Logged(Struct, frozen=True):
    seq: int
    source: str
    id: str
    type: str
    target: str | None
    body: bytes


class Wanted(Struct, frozen=True):
    """A type and a match, as a run's history has them."""

    type: str
    match: bytes


class Receipt(Struct, frozen=True):
    wanted: Wanted
    seq: int


class Log:
    """All events there are. The pruner takes away what they are found by, never themselves within the hour."""

    def __init__(self, events: Sequence[Logged]) -> None:
        self.events = events
        self._fitting: dict[Wanted, list[Logged]] = {}

    @cached_property
    def _values(self) -> dict[int, dict[str, Any]]:
        return {event.seq: values_of(event.body) for event in self.events}

    def fitting(self, wanted: Wanted) -> list[Logged]:
        if wanted not in self._fitting:
            match: Match = Codec().decode(wanted.match)
            self._fitting[wanted] = [event for event in self.events if self._fits(event, wanted.type, match)]
        return self._fitting[wanted]

    def _fits(self, event: Logged, type: str, match: Match) -> bool:
        values = self._values[event.seq]
        return event.type == type and all(values.get(path) == value for path, value in match.items())

    def meant_for(self, run_id: str, wanted: Wanted, since: int, upto: int) -> list[int]:
        events = self.fitting(wanted)
        first, last = (bisect_right(events, bound, key=lambda event: event.seq) for bound in (since, upto))
        return [event.seq for event in events[first:last] if event.target in (None, run_id)]


class Mail(Struct, frozen=True):
    log: Log
    since: dict[str, int]
    """The newest event when each run was started."""
    vigils: frozenset[str]
    waits: tuple[tuple[str, str], ...]


async def read_mail(line: Line) -> Mail:
    return Mail(
        Log([_logged(row) for row in await line.rows(EVENTS)]),
        {text(run_id): since for run_id, since in await line.rows(STARTS)},
        frozenset(text(row[0]) for row in await line.rows(VIGILS)),
        tuple((text(run_id), text(step)) for run_id, step in await line.rows(WAITS)),
    )


def _logged(row: Row) -> Logged:
    seq, source, id, type, target, body = row
    return Logged(seq, text(source), text(id), text(type), text(target), bytes(body))


def event_violations(mail: Mail, remains: FinalState, told: Testimony) -> Iterator[str]:
    yield from _lost_posts(mail, told)
    yield from _wrong_starts(mail, remains, told)
    for run_id, rows in remains.history.items():
        yield from _gaps_in_inbox(run_id, rows)
        yield from _wrong_receipts(mail, run_id, rows, _is_completed(remains, run_id))
    for run_id, step in mail.waits:
        yield f"run {run_id}: {step} still waits, though all is over"


def _lost_posts(mail: Mail, told: Testimony) -> Iterator[str]:
    stored = Counter((event.source, event.id) for event in mail.log.events)
    for source, id in sorted(told.posted - stored.keys()):
        yield f"event {id} of {source} was acknowledged, but is not stored"
    for (source, id), times in stored.items():
        if times > 1:
            yield f"event {id} of {source} is stored {times} times"


def _wrong_starts(mail: Mail, remains: FinalState, told: Testimony) -> Iterator[str]:
    """One run for each event that starts one, with the event that is stored, and none without."""
    events = [json_format.parse_stored(event.body) for event in mail.log.events if event.type == BEGUN]
    expected = {run_id_for_event(BEGUN, event): str(json_format.value_of(event)) for event in events}
    found = {RunId(run_id) for run_id in remains.runs if run_id.startswith("event-")}
    for run_id in expected.keys() - found:
        yield f"run {run_id} was not started by its event"
    for run_id in found - expected.keys():
        yield f"run {run_id} was started by no event"
    for effect in told.effects:
        if expected.get(RunId(effect.run_id), effect.link) != effect.link:
            yield f"run {effect.run_id} was started with {effect.link}, and not with the event that is stored"


def _gaps_in_inbox(run_id: str, rows: Sequence[Record]) -> Iterator[str]:
    numbers = [row.n for row in rows if row.n is not None]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"run {run_id}: its inbox was read as {numbers}"


def _is_completed(remains: FinalState, run_id: str) -> bool:
    result = remains.results.get(run_id)
    return result is not None and result.status == RunStatus.COMPLETED


def _wrong_receipts(mail: Mail, run_id: str, rows: Sequence[Record], completed: bool) -> Iterator[str]:
    """What a run gave back it gets again before it completes; one that was cancelled may have had no time to."""
    got = [Receipt(Wanted(row.name, row.input), row.event) for row in rows if row.is_receipt and row.event]
    times = Counter(receipt.seq for receipt in got)
    for seq, count in times.items():
        if count > 1:
            yield f"run {run_id} got event {seq} {count} times"
    orderly = run_id not in mail.vigils or is_orderly(run_id)
    strays = {row.event for row in rows if row.kind == EntryKind.LATE_EVENT and row.event is not None}
    excused = times.keys() | (set() if completed else strays)
    by_key: dict[Wanted, list[int]] = defaultdict(list)
    for receipt in got:
        by_key[receipt.wanted].append(receipt.seq)
    for wanted, seqs in by_key.items():
        for wrong in _wrong_sequence(mail, run_id, wanted, seqs, frozenset(excused), orderly):
            yield f"{wrong}; since {mail.since[run_id]}: {_story(rows)}"


def _story(rows: Sequence[Record]) -> str:
    """What a run got and gave back, for whoever looks for the reason."""
    told = (row for row in rows if row.kind in {EntryKind.EVENT, EntryKind.LATE_EVENT})
    return ", ".join(f"{row.seq} {row.kind} {row.step} {'ok' if row.ok else 'over'} {row.event}" for row in told)


def _wrong_sequence(
    mail: Mail, run_id: str, wanted: Wanted, seqs: list[int], excused: frozenset[int], orderly: bool
) -> Iterator[str]:
    place = f"run {run_id}, {wanted.type} {wanted.match.decode()}"
    meant = mail.log.meant_for(run_id, wanted, mail.since[run_id], max(seqs))
    if foreign := set(seqs).difference(meant):
        yield f"{place}: got {sorted(foreign)}, which are not for it"
    if missed := set(meant) - excused:
        yield f"{place}: got {seqs}, but never {sorted(missed)}"
    if orderly and seqs != sorted(seqs):
        yield f"{place}: got {seqs} in this order"
