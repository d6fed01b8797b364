"""The SQL of one batch: new runs, history, generations, transitions, inbox items."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

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
from edda.storage.shared.rows import to_run_id

from .connection import ASSERT_ROW_COUNT, Row, assertion, join_all_rows
from .statement import (
    NOW,
    Statement,
    bind,
    inserts,
    int_or_null,
    join_values,
    quote_bytes,
    quote_text,
    split_rows,
    text_or_null,
)

RUN_COLUMNS = b"(id, generation, workflow, input, created_at, deadline, parent, parent_step, depth)"
INSERT_RUN = b"INSERT INTO edda_run " + RUN_COLUMNS + b" VALUES "
FIND_EXISTING = b"SELECT DISTINCT id FROM edda_run WHERE id IN (%b)"
# Of any generation: the first generations of an open run may be pruned, and an INSERT would not conflict with the
# others.
COUNT_EXISTING = b"SELECT COUNT(*) INTO @edda_existing FROM edda_run WHERE id IN (%b)"
ASSERT_NONE_EXISTS = assertion(b"@edda_existing = 0")
# Not INSERT IGNORE, which would cut an id that is too long instead of refusing it.
IGNORE_DUPLICATE = b" ON DUPLICATE KEY UPDATE id = id"
INSERT_OPEN_RUN = (
    b"INSERT INTO edda_open_run"
    b" (run_id, workflow, status, owner, epoch, generation, event_cursor, ready_at, inbox_read, attempts, reason)"
    b" VALUES "
)
_OPEN_RUN_ROW = b"(%b,%b,%b,%b,%d,%d,%b,%b,%d,%d,%b)"
# Into a variable: a subquery in an INSERT locks the rows it reads, and would wait for acceptors of events.
READ_LAST_EVENT = b"SELECT COALESCE(MAX(seq), 0) INTO @edda_last_event FROM edda_event"
LAST_EVENT = b"@edda_last_event"

STATUSES = {status: quote_text(status) for status in RunStatus}


def run_row(start: Start, generation: int) -> bytes:
    return b"(%b,%d,%b,%b,%d,%b,%b,%b,%d)" % (
        quote_text(start.run_id),
        generation,
        quote_text(start.workflow),
        quote_bytes(start.input),
        start.created_at,
        int_or_null(start.deadline),
        text_or_null(start.parent),
        text_or_null(start.parent_step),
        start.depth,
    )


def open_run_row(write: RunWrite, start: Start, worker: bytes) -> bytes:
    """A run's start and transition in the same batch become one row."""
    transition, status, inbox_read, reason = write.transition, RunStatus.RUNNING, 0, b"NULL"
    owner, ready_at = worker if start.ready_at is None else b"NULL", start.ready_at
    if isinstance(transition, AckInbox | Recur | Suspend):
        inbox_read = transition.inbox_read
    if isinstance(transition, Suspend):
        owner, ready_at, status, reason = (
            b"NULL",
            transition.ready_at,
            transition.status,
            text_or_null(transition.reason),
        )
    return _OPEN_RUN_ROW % (
        *(quote_text(write.run_id), quote_text(start.workflow), STATUSES[status], owner),
        *(write.epoch, write.generation + isinstance(transition, Recur), LAST_EVENT, int_or_null(ready_at)),
        *(inbox_read, int(status is RunStatus.PARKED), reason),
    )


def insert_unowned(new_runs: Sequence[tuple[Start, bytes]], now: bytes, limit: int) -> Iterator[Statement]:
    """Runs without an owner, each with its event cursor. The assertion fails if one of the runs exists already."""
    label = (INSERT_RUN + IGNORE_DUPLICATE).decode()
    for rows in split_rows([run_row(start, 0) for start, _ in new_runs], limit - len(label)):
        yield Statement(label, INSERT_RUN + b",".join(rows) + IGNORE_DUPLICATE)
        yield bind(ASSERT_ROW_COUNT, len(rows))
    open_runs = []
    for start, event_cursor in new_runs:
        ready_at = now if start.ready_at is None else int_or_null(start.ready_at)
        names = (quote_text(start.run_id), quote_text(start.workflow), STATUSES[RunStatus.RUNNING], b"NULL")
        open_runs.append(_OPEN_RUN_ROW % (*names, 0, 0, event_cursor, ready_at, 0, 0, b"NULL"))
    yield from inserts(INSERT_OPEN_RUN, open_runs, limit)


INSERT_HISTORY = (
    b"INSERT INTO edda_history (run_id, generation, seq, epoch, kind, step, name, ok, at, attempt,"
    b" inbox_no, event, input, value)"
    b" VALUES "
)
INSERT_RESULT = b"INSERT INTO edda_result (run_id, generation, status, value, ended_at) VALUES "

KINDS = {kind: quote_text(kind) for kind in EntryKind}


def history_rows(run_id: bytes, generation: int, epoch: int, entries: Iterable[Entry]) -> list[bytes]:
    return [
        b"(%b,%d,%d,%d,%b,%b,%b,%d,%d,%d,%b,%b,%b,%b)"
        % (
            run_id,
            generation,
            e.seq,
            epoch,
            KINDS[e.kind],
            quote_text(e.step),
            quote_text(e.name),
            e.ok,
            e.at,
            e.attempt,
            int_or_null(e.inbox_no),
            int_or_null(e.event),
            quote_bytes(e.input),
            quote_bytes(e.value),
        )
        for e in entries
    ]


def result_row(run_id: bytes, generation: int, end: End) -> bytes:
    return b"(%b,%d,%b,%b,%d)" % (run_id, generation, STATUSES[end.status], quote_bytes(end.value), end.at)


COPY_RUN = (
    b"INSERT INTO edda_run "
    + RUN_COLUMNS
    + b" SELECT id, generation + 1, workflow, %b, %b, deadline, parent, parent_step,"
    b" depth FROM edda_run WHERE id = %b AND generation = %b"
)
INSERT_OLD_GENERATION = b"INSERT INTO edda_old_generation (run_id, generation, ended_at) VALUES "


_IN_ORDER = b" FROM edda_open_run FORCE INDEX (PRIMARY) WHERE run_id IN (%b) ORDER BY run_id FOR UPDATE"
LOCK_OPEN_RUNS = b"SELECT run_id, inbox_count" + _IN_ORDER
LOCK_AND_READ = b"SELECT run_id, inbox_count, watchers, cancelled" + _IN_ORDER
# Joins with a derived table: a CASE over thousands of rows takes quadratic time, and an UPDATE for each row five times
# as long. No expression reads a column that is assigned here: in a join the order of the assignments is not defined.
ACK_INBOX = b"UPDATE (%b) v STRAIGHT_JOIN edda_open_run s ON s.run_id = v.run_id SET s.inbox_read = v.inbox_read"
SUSPEND = b"""UPDATE (%b) v STRAIGHT_JOIN edda_open_run s ON s.run_id = v.run_id SET
    s.owner = NULL,
    s.ready_at = IF(s.inbox_count = v.inbox_read, v.ready_at, 0),
    s.status = IF(s.inbox_count = v.inbox_read, v.status, 'running'),
    s.reason = IF(s.inbox_count = v.inbox_read, v.reason, NULL),
    s.attempts = 0, s.parked_at = NULL, s.end_if_parked = FALSE, s.alone = FALSE,
    s.deaths = 0, s.deaths_alone = 0, s.died_seq = NULL,
    s.inbox_read = v.inbox_read"""
# A parked run stays parked whatever is in its inbox, because it cannot be replayed.
PARK = (
    b"UPDATE (%b) v STRAIGHT_JOIN edda_open_run s ON s.run_id = v.run_id SET"
    b" s.owner = NULL, s.ready_at = v.ready_at, s.status = v.status, s.reason = v.reason,"
    b" s.attempts = s.attempts + 1, s.alone = FALSE, s.inbox_read = v.inbox_read, s.parked_at = " + NOW
)
RECUR = b"""UPDATE (%b) v STRAIGHT_JOIN edda_open_run s ON s.run_id = v.run_id SET
    s.generation = s.generation + 1, s.inbox_read = v.inbox_read, s.cancelled = FALSE, s.attempts = 0,
        s.compensating = FALSE,
    s.end_if_parked = FALSE, s.deaths = 0, s.deaths_alone = 0, s.died_seq = NULL"""
SET_COMPENSATING = b"UPDATE (%b) v STRAIGHT_JOIN edda_open_run s ON s.run_id = v.run_id SET s.compensating = TRUE"
# A join as well: with an IN list MariaDB scans a small table from end to end here, and ignores FORCE INDEX.
END = b"DELETE s FROM (%b) v STRAIGHT_JOIN edda_open_run s ON s.run_id = v.run_id AND s.watchers = v.watchers"
END_IF_READ = END + b" AND s.inbox_count = v.expected_inbox_count"
DROP_WAIT = b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_wait w ON w.run_id = v.run_id AND w.step = v.step"
END_WAITS = b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_wait w ON w.run_id = v.run_id"
END_WATCHING = b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_watcher w ON w.run_id = v.run_id"


class LockedRun(NamedTuple):
    inbox_count: int
    watchers: int
    cancelled: int


def locked(rows: Iterable[Row]) -> dict[RunId, LockedRun]:
    return {to_run_id(run): LockedRun(*rest) for run, *rest in rows}


class TransitionWriter:
    def __init__(self) -> None:
        self._rows: defaultdict[bytes, list[bytes]] = defaultdict(list)

    def add(self, run_id: bytes, transition: Transition) -> None:
        rows = self._rows
        match transition:
            case AckInbox(inbox_read):
                rows[ACK_INBOX].append(b"SELECT %b AS run_id, %d AS inbox_read" % (run_id, inbox_read))
            case Suspend(inbox_read, ready_at, status):
                rows[PARK if status is RunStatus.PARKED else SUSPEND].append(
                    b"SELECT %b AS run_id, %d AS inbox_read, %b AS ready_at, %b AS status, %b AS reason"
                    % (run_id, inbox_read, int_or_null(ready_at), STATUSES[status], text_or_null(transition.reason))
                )
            case Recur(inbox_read):
                rows[RECUR].append(b"SELECT %b AS run_id, %d AS inbox_read" % (run_id, inbox_read))
                rows[END_WAITS].append(b"SELECT %b AS run_id" % run_id)
            case End(watchers=watchers, expected_inbox_count=expected):
                row = b"SELECT %b AS run_id, %d AS watchers" % (run_id, watchers)
                if expected is None:
                    rows[END].append(row)
                else:
                    rows[END_IF_READ].append(row + b", %d AS expected_inbox_count" % expected)
                rows[END_WAITS].append(b"SELECT %b AS run_id" % run_id)
                if watchers:
                    rows[END_WATCHING].append(b"SELECT %b AS run_id" % run_id)

    def statements(self) -> Iterator[Statement]:
        """The assertions fail if an ending run has other watchers than it knows, or received items meanwhile."""
        for template in (ACK_INBOX, SUSPEND, PARK, RECUR, END, END_IF_READ, END_WAITS, END_WATCHING):
            join = join_all_rows if template in (END, END_IF_READ) else join_values
            yield from join(template, self._rows[template])


# Joined with edda_event, because an event that was found before may have been pruned.
INSERT_EVENT_ITEM = (
    b"INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value, event)"
    b" SELECT v.run_id, v.inbox_no, v.kind, v.step, " + NOW + b", '', e.seq"
    b" FROM (%b) v STRAIGHT_JOIN edda_event e ON e.seq = v.event LOCK IN SHARE MODE"
)
SET_INBOX_COUNT = b"UPDATE (%b) v STRAIGHT_JOIN edda_open_run s ON s.run_id = v.run_id SET s.inbox_count = v.inbox_no"
# A run without an owner becomes ready; a parked run and a suspect keep their time.
WAKES = b"s.owner IS NULL AND s.status <> 'parked' AND s.suspect_at IS NULL"
WAKE = b"UPDATE (%%b) v STRAIGHT_JOIN edda_open_run s FORCE INDEX (PRIMARY) ON s.run_id = v.run_id AND %b SET %b" % (
    WAKES,
    b"s.ready_at = 0, s.status = 'running', s.reason = NULL",
)
# A cancel makes a parked run due at once, and its owner ends it if it still cannot be replayed. A run that compensates
# stays as it is.
IS_PARKED = b"s.owner IS NULL AND s.status = 'parked' AND NOT s.compensating AND NOT s.end_if_parked"


class EventInboxRow(NamedTuple):
    run_id: RunId
    inbox_no: int
    step: str
    event: int
    kind: EntryKind = EntryKind.EVENT
    """MESSAGE if it was taken under an exclusive key."""


def insert_event_items(items: Sequence[EventInboxRow]) -> Iterator[Statement]:
    """Insert the items and end their waits. The assertion fails if an event was pruned."""
    rows = [
        b"SELECT %b AS run_id, %d AS inbox_no, %b AS kind, %b AS step, %d AS event"
        % (quote_text(item.run_id), item.inbox_no, KINDS[item.kind], quote_text(item.step), item.event)
        for item in items
    ]
    yield from join_all_rows(INSERT_EVENT_ITEM, rows)
    yield from join_values(DROP_WAIT, rows)
    yield from set_inbox_count({item.run_id: item.inbox_no for item in items})


def set_inbox_count(last: Mapping[RunId, int]) -> Iterator[Statement]:
    """Set the inbox count of each run, and wake the runs without an owner."""
    rows = [b"SELECT %b AS run_id, %d AS inbox_no" % (quote_text(run), n) for run, n in last.items()]
    yield from join_values(SET_INBOX_COUNT, rows)
    yield from join_values(WAKE, rows)


INSERT_SIGNAL = b"INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value) VALUES "
CANCEL = b"UPDATE (%b) v STRAIGHT_JOIN edda_open_run s ON s.run_id = v.run_id SET s.cancelled = TRUE"
CANCEL_PARKED = (
    b"UPDATE (%%b) v STRAIGHT_JOIN edda_open_run s FORCE INDEX (PRIMARY) ON s.run_id = v.run_id AND %b"
    b" SET s.ready_at = 0, s.end_if_parked = TRUE" % IS_PARKED
)


class SignalWriter:
    """Numbers the signals of each run in the order in which they are added."""

    def __init__(self, locked: Mapping[RunId, LockedRun]) -> None:
        self._locked = locked
        self._last: dict[RunId, int] = {}
        self._cancelled: set[RunId] = set()
        self._rows: list[bytes] = []

    def add(self, signals: Iterable[RunSignal]) -> None:
        """Every signal is delivered but a repeated cancel."""
        for signal in signals:
            run_id, target = signal.run_id, self._locked.get(signal.run_id)
            if target is None:
                continue
            if signal.kind is EntryKind.CANCEL:
                if target.cancelled or run_id in self._cancelled:
                    continue
                self._cancelled.add(run_id)
            n = self._last[run_id] = self._last.get(run_id, target.inbox_count) + 1
            names = (quote_text(run_id), n, KINDS[signal.kind], quote_text(signal.step))
            self._rows.append(b"(%b,%d,%b,%b,%b,%b)" % (*names, NOW, quote_bytes(signal.value)))

    def statements(self, limit: int) -> Iterator[Statement]:
        yield from inserts(INSERT_SIGNAL, self._rows, limit)
        yield from set_inbox_count(self._last)
        cancelled = [b"SELECT %b AS run_id" % quote_text(run) for run in sorted(self._cancelled)]
        yield from join_values(CANCEL, cancelled)
        yield from join_values(CANCEL_PARKED, cancelled)
