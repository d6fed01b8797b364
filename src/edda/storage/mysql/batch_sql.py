"""The rows and statements of one batch: new runs, history, generations, transitions, inboxes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from edda.core.model import (
    AckInbox,
    End,
    Entry,
    EntryKind,
    Recur,
    RunId,
    RunSignal,
    RunWrite,
    Start,
    Suspend,
    Transition,
)
from edda.core.states import RunStatus

from .clock import NOW
from .rows import run_id as id_of
from .session import ASSERT_ROW_COUNT, Row, assertion, join_all_rows
from .statement import (
    Statement,
    bind,
    check_size,
    inserts,
    int_or_null,
    join_values,
    quote_bytes,
    quote_text,
    split_rows,
    text_or_null,
)

RUN_COLUMNS = b"(id, gen, workflow, input, created_at, deadline, parent, parent_step, depth)"
INSERT_RUN = b"INSERT INTO edda_run " + RUN_COLUMNS + b" VALUES "
FIND_EXISTING = b"SELECT DISTINCT id FROM edda_run WHERE id IN (%b)"
# Of any generation: the first ones of an open run may be pruned, and an INSERT would not meet the others.
COUNT_EXISTING = b"SELECT COUNT(*) INTO @edda_existing FROM edda_run WHERE id IN (%b)"
EXPECT_NONE = assertion(b"@edda_existing = 0")
# Not INSERT IGNORE: that would cut an id which is too long instead of refusing it.
IGNORE_DUPLICATE = b" ON DUPLICATE KEY UPDATE id = id"
INSERT_SCHED = (
    b"INSERT INTO edda_sched"
    b" (run_id, workflow, status, owner, epoch, gen, start_seq, ready_at, absorbed, attempts, reason) VALUES "
)
# Into a variable: a subquery in an INSERT locks what it reads, and would wait for whoever stores an event.
READ_NEWEST = b"SELECT COALESCE(MAX(seq), 0) INTO @edda_newest FROM edda_event"
NEWEST = b"@edda_newest"

STATUSES = {status: quote_text(status) for status in RunStatus}
_RUNNING = STATUSES[RunStatus.RUNNING]


def run_row(start: Start, gen: int) -> bytes:
    return b"(%b,%d,%b,%b,%d,%b,%b,%b,%d)" % (
        quote_text(start.run_id),
        gen,
        quote_text(start.workflow),
        quote_bytes(start.input),
        start.created_at,
        int_or_null(start.deadline),
        text_or_null(start.parent),
        text_or_null(start.parent_step),
        start.depth,
    )


def sched_row(bundle: RunWrite, start: Start, worker: bytes) -> bytes:
    """Start and move of one run in one batch are one row: the statements would not fold them."""
    workflow, epoch, gen = quote_text(start.workflow), bundle.epoch, bundle.gen + isinstance(bundle.move, Recur)
    run_id = quote_text(bundle.run_id)
    if isinstance(move := bundle.move, Suspend):
        rest = (move.absorbed, STATUSES[move.status], int(move.status is RunStatus.PARKED), text_or_null(move.reason))
        return _sched_row(run_id, workflow, b"NULL", epoch, gen, NEWEST, int_or_null(move.ready_at), *rest)
    owner = worker if start.ready_at is None else b"NULL"
    absorbed = move.absorbed if isinstance(move, AckInbox | Recur) else 0
    return _sched_row(run_id, workflow, owner, epoch, gen, NEWEST, int_or_null(start.ready_at), absorbed)


def insert_unowned(births: Sequence[tuple[Start, bytes]], now: bytes, limit: int) -> Iterator[Statement]:
    """Runs that nobody owns yet, each with its `start_seq`; misses its expectation if one is there already."""
    label = (INSERT_RUN + IGNORE_DUPLICATE).decode()
    for rows in split_rows([run_row(start, 0) for start, _ in births], limit - len(label)):
        yield Statement(label, INSERT_RUN + b",".join(rows) + IGNORE_DUPLICATE)
        yield bind(ASSERT_ROW_COUNT, len(rows))
    yield from inserts(INSERT_SCHED, [_ready_row(start, seq, now) for start, seq in births], limit)


def _ready_row(start: Start, start_seq: bytes, now: bytes) -> bytes:
    ready_at = now if start.ready_at is None else int_or_null(start.ready_at)
    return _sched_row(quote_text(start.run_id), quote_text(start.workflow), b"NULL", 0, 0, start_seq, ready_at)


def _sched_row(
    run_id: bytes,
    workflow: bytes,
    owner: bytes,
    epoch: int,
    gen: int,
    start_seq: bytes,
    ready_at: bytes,
    absorbed: int = 0,
    status: bytes = _RUNNING,
    attempts: int = 0,
    reason: bytes = b"NULL",
) -> bytes:
    return b"(%b,%b,%b,%b,%d,%d,%b,%b,%d,%d,%b)" % (
        run_id,
        workflow,
        status,
        owner,
        epoch,
        gen,
        start_seq,
        ready_at,
        absorbed,
        attempts,
        reason,
    )


INSERT_HIST = (
    b"INSERT INTO edda_hist (run_id, gen, seq, epoch, kind, step, name, ok, at, attempt, n, event, input, value)"
    b" VALUES "
)
INSERT_RESULT = b"INSERT INTO edda_result (run_id, gen, status, value, ended_at) VALUES "

KINDS = {kind: quote_text(kind) for kind in EntryKind}


def hist_rows(run_id: bytes, gen: int, epoch: int, entries: Iterable[Entry]) -> list[bytes]:
    return [
        b"(%b,%d,%d,%d,%b,%b,%b,%d,%d,%d,%b,%b,%b,%b)"
        % (
            run_id,
            gen,
            e.seq,
            epoch,
            KINDS[e.kind],
            quote_text(e.step),
            quote_text(e.name),
            e.ok,
            e.at,
            e.attempt,
            int_or_null(e.n),
            int_or_null(e.event),
            quote_bytes(e.input),
            quote_bytes(e.value),
        )
        for e in entries
    ]


def result_row(run_id: bytes, gen: int, end: End) -> bytes:
    return b"(%b,%d,%b,%b,%d)" % (run_id, gen, STATUSES[end.status], quote_bytes(end.value), end.at)


COPY_RUN = (
    b"INSERT INTO edda_run " + RUN_COLUMNS + b" SELECT id, gen + 1, workflow, %b, %b, deadline, parent, parent_step,"
    b" depth FROM edda_run WHERE id = %b AND gen = %b"
)
INSERT_PAST = b"INSERT INTO edda_past (run_id, gen, ended_at) VALUES "


def next_row(start: Start, gen: int, move: Recur) -> bytes:
    return run_row(replace(start, input=move.input, created_at=move.at), gen + 1)


def old_generation_row(run_id: bytes, gen: int, move: Recur) -> bytes:
    return b"(%b,%d,%d)" % (run_id, gen, move.at)


def first_entry_row(run_id: bytes, bundle: RunWrite, move: Recur) -> list[bytes]:
    return hist_rows(run_id, bundle.gen + 1, bundle.epoch, [move.entry])


class GenerationWriter:
    """The next generation of runs whose sched rows are locked."""

    def __init__(self) -> None:
        self._runs: list[Statement] = []
        self._past: list[bytes] = []
        self._hist: list[bytes] = []

    def add(self, bundle: RunWrite, move: Recur) -> None:
        run_id = quote_text(bundle.run_id)
        # One by one: their inputs may be large.
        self._runs.append(bind(COPY_RUN, move.input, move.at, bundle.run_id, bundle.gen))
        self._past.append(old_generation_row(run_id, bundle.gen, move))
        self._hist += first_entry_row(run_id, bundle, move)

    def statements(self, limit: int) -> Iterator[Statement]:
        for statement in self._runs:
            check_size(statement.body, limit)
            yield statement
        yield from inserts(INSERT_PAST, self._past, limit)
        yield from inserts(INSERT_HIST, self._hist, limit)


_IN_ORDER = b" FROM edda_sched FORCE INDEX (PRIMARY) WHERE run_id IN (%b) ORDER BY run_id FOR UPDATE"
LOCK_SCHED = b"SELECT run_id, delivered" + _IN_ORDER
LOCK_AND_LOOK = b"SELECT run_id, delivered, watchers, cancelled" + _IN_ORDER
# Joins with a derived table: a CASE over thousands of rows takes quadratic time, an UPDATE for each five times this.
# No expression reads a column that is set here: in a join the order of the assignments is not defined.
ABSORB = b"UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET s.absorbed = v.absorbed"
RELEASE = b"""UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET
    s.owner = NULL,
    s.ready_at = IF(s.delivered = v.absorbed, v.ready_at, 0),
    s.status = IF(s.delivered = v.absorbed, v.status, 'running'),
    s.reason = IF(s.delivered = v.absorbed, v.reason, NULL),
    s.attempts = 0, s.parked_at = NULL, s.end_if_parked = FALSE, s.alone = FALSE,
    s.deaths = 0, s.deaths_alone = 0, s.died_seq = NULL,
    s.absorbed = v.absorbed"""
# A parked run rests whatever is in its inbox: it could not read it.
PARK = (
    b"UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET"
    b" s.owner = NULL, s.ready_at = v.ready_at, s.status = v.status, s.reason = v.reason,"
    b" s.attempts = s.attempts + 1, s.alone = FALSE, s.absorbed = v.absorbed, s.parked_at = " + NOW
)
RECUR = b"""UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET
    s.gen = s.gen + 1, s.absorbed = v.absorbed, s.cancelled = FALSE, s.attempts = 0, s.undoing = FALSE,
    s.end_if_parked = FALSE, s.deaths = 0, s.deaths_alone = 0, s.died_seq = NULL"""
UNDO = b"UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET s.undoing = TRUE"
# A join as well: with an IN list MariaDB scans a small table from end to end here, and ignores a FORCE INDEX.
END = b"DELETE s FROM (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id AND s.watchers = v.watchers"
END_IF_SETTLED = END + b" AND s.delivered = v.settled"
DROP_WAIT = b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_wait w ON w.run_id = v.run_id AND w.step = v.step"
END_WAITS = b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_wait w ON w.run_id = v.run_id"
END_WATCHING = b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_watcher w ON w.run_id = v.run_id"


class LockedRun(NamedTuple):
    delivered: int
    watchers: int
    cancelled: int


def locked(rows: Iterable[Row]) -> dict[RunId, LockedRun]:
    return {id_of(run): LockedRun(*rest) for run, *rest in rows}


class TransitionWriter:
    def __init__(self) -> None:
        self._absorbed: list[bytes] = []
        self._released: list[bytes] = []
        self._parked: list[bytes] = []
        self._recurred: list[bytes] = []
        self._ended: list[bytes] = []
        self._settled: list[bytes] = []
        self._stopped: list[bytes] = []
        self._watched: list[bytes] = []

    def add(self, run_id: bytes, move: Transition) -> None:
        match move:
            case AckInbox(absorbed):
                self._absorbed.append(b"SELECT %b AS run_id, %d AS absorbed" % (run_id, absorbed))
            case Suspend(absorbed, ready_at, status):
                rows = self._parked if status is RunStatus.PARKED else self._released
                rows.append(
                    b"SELECT %b AS run_id, %d AS absorbed, %b AS ready_at, %b AS status, %b AS reason"
                    % (run_id, absorbed, int_or_null(ready_at), STATUSES[status], text_or_null(move.reason))
                )
            case Recur(absorbed):
                self._recurred.append(b"SELECT %b AS run_id, %d AS absorbed" % (run_id, absorbed))
                self._stopped.append(b"SELECT %b AS run_id" % run_id)
            case End(watchers=watchers, settled=settled):
                if settled is None:
                    self._ended.append(b"SELECT %b AS run_id, %d AS watchers" % (run_id, watchers))
                else:
                    row = (run_id, watchers, settled)
                    self._settled.append(b"SELECT %b AS run_id, %d AS watchers, %d AS settled" % row)
                self._stopped.append(b"SELECT %b AS run_id" % run_id)
                if watchers:
                    self._watched.append(b"SELECT %b AS run_id" % run_id)

    def statements(self) -> Iterator[Statement]:
        """Misses its expectation if others watch a run that ends than it knows of, or if it has got mail since."""
        yield from join_values(ABSORB, self._absorbed)
        yield from join_values(RELEASE, self._released)
        yield from join_values(PARK, self._parked)
        yield from join_values(RECUR, self._recurred)
        yield from join_all_rows(END, self._ended)
        yield from join_all_rows(END_IF_SETTLED, self._settled)
        yield from join_values(END_WAITS, self._stopped)
        yield from join_values(END_WATCHING, self._watched)


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


INSERT_MAIL = b"INSERT INTO edda_delivery (run_id, n, kind, step, at, value) VALUES "
CANCEL = b"UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET s.cancelled = TRUE"
CANCEL_PARKED = (
    b"UPDATE (%%b) v STRAIGHT_JOIN edda_sched s FORCE INDEX (PRIMARY) ON s.run_id = v.run_id AND %b"
    b" SET s.ready_at = 0, s.end_if_parked = TRUE" % IS_PARKED
)


class SignalWriter:
    """Numbers the letters in the order in which they are added."""

    def __init__(self, locked: Mapping[RunId, LockedRun]) -> None:
        self._locked = locked
        self._last: dict[RunId, int] = {}
        self._cancelled: set[RunId] = set()
        self._rows: list[bytes] = []

    def add(self, letters: Iterable[RunSignal]) -> None:
        for letter in letters:
            target = self._locked.get(letter.run_id)
            if target and self._lets_in(letter, target):
                n = self._last[letter.run_id] = self._last.get(letter.run_id, target.delivered) + 1
                row = (
                    quote_text(letter.run_id),
                    n,
                    KINDS[letter.kind],
                    quote_text(letter.step),
                    NOW,
                    quote_bytes(letter.value),
                )
                self._rows.append(b"(%b,%d,%b,%b,%b,%b)" % row)

    def _lets_in(self, letter: RunSignal, target: LockedRun) -> bool:
        if letter.kind is not EntryKind.CANCEL:
            return True
        is_first = not target.cancelled and letter.run_id not in self._cancelled
        if is_first:
            self._cancelled.add(letter.run_id)
        return is_first

    def statements(self, limit: int) -> Iterator[Statement]:
        yield from inserts(INSERT_MAIL, self._rows, limit)
        yield from set_inbox_count(self._last)
        cancelled = [b"SELECT %b AS run_id" % quote_text(run) for run in sorted(self._cancelled)]
        yield from join_values(CANCEL, cancelled)
        yield from join_values(CANCEL_PARKED, cancelled)
