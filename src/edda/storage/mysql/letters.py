"""Letters that bring events to runs whose sched rows are locked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from edda.core.model import EntryKind, RunId

from .clock import NOW
from .history import KINDS
from .moves import DROP_WAIT
from .session import join_all_rows
from .statement import Statement, join_values, quote_text

# Only of events that are still there: one that was found a moment ago may be pruned by now.
INSERT_LETTER = (
    b"INSERT INTO edda_delivery (run_id, n, kind, step, at, value, event)"
    b" SELECT v.run_id, v.n, v.kind, v.step, " + NOW + b", '', e.seq"
    b" FROM (%b) v STRAIGHT_JOIN edda_event e ON e.seq = v.event LOCK IN SHARE MODE"
)
NOTE = b"UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET s.delivered = v.n"
# A run without an owner is ready now; a parked run and a suspect keep their time.
WAKES = b"s.owner IS NULL AND s.status <> 'parked' AND s.suspect_at IS NULL"
WAKE = b"UPDATE (%%b) v STRAIGHT_JOIN edda_sched s FORCE INDEX (PRIMARY) ON s.run_id = v.run_id AND %b SET %b" % (
    WAKES,
    b"s.ready_at = 0, s.status = 'running', s.reason = NULL",
)
# A cancel has a parked run tried at once, and ended if it cannot go on; one that undoes what it did stays as it is.
IS_PARKED = b"s.owner IS NULL AND s.status = 'parked' AND NOT s.undoing AND NOT s.end_if_parked"


class EventInboxRow(NamedTuple):
    run_id: RunId
    n: int
    step: str
    event: int
    kind: EntryKind = EntryKind.EVENT
    """A message was taken from the others."""


def insert_event_items(letters: Sequence[EventInboxRow]) -> Iterator[Statement]:
    """Deliver them, and end the waits they are for; misses its expectation if an event is gone."""
    rows = [_row(letter) for letter in letters]
    yield from join_all_rows(INSERT_LETTER, rows)
    yield from join_values(DROP_WAIT, rows)
    yield from set_inbox_count({letter.run_id: letter.n for letter in letters})


def set_inbox_count(last: Mapping[RunId, int]) -> Iterator[Statement]:
    """Up to which number each run has got letters now."""
    rows = [b"SELECT %b AS run_id, %d AS n" % (quote_text(run), n) for run, n in last.items()]
    yield from join_values(NOTE, rows)
    yield from join_values(WAKE, rows)


def _row(letter: EventInboxRow) -> bytes:
    row = (quote_text(letter.run_id), letter.n, KINDS[letter.kind], quote_text(letter.step), letter.event)
    return b"SELECT %b AS run_id, %d AS n, %b AS kind, %b AS step, %d AS event" % row
