"""The part of a batch that locked rows decide: which wait gets which event, which ends and recurs are refused, and
which signals are sent."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from edda.core.model import AckInbox, End, EntryKind, Recur, RunId, RunWrite, Suspend, Wait
from edda.storage.shared.batches import is_refused, receivers_of

from .batch_sql import (
    COPY_RUN,
    INSERT_HISTORY,
    INSERT_OLD_GENERATION,
    INSERT_RESULT,
    EventInboxRow,
    LockedRun,
    SignalWriter,
    TransitionWriter,
    history_rows,
    insert_event_items,
    result_row,
)
from .connection import COMMIT, Row, join_all_rows
from .statement import Statement, bind, check_size, inserts, int_or_null, quote_bytes, quote_text, unions

# The left join leaves out messages that the run received by another key.
FIND_MESSAGE = b"""(SELECT %d AS i, k.`key`, k.seq FROM edda_event_key k FORCE INDEX (PRIMARY)
    LEFT JOIN edda_inbox d ON d.event = k.seq AND d.run_id = %b
    WHERE k.`key` = %b AND d.run_id IS NULL ORDER BY k.seq LIMIT %d)"""
TAKE_MESSAGES = b"""DELETE k FROM (%b) v STRAIGHT_JOIN edda_event_key k ON k.`key` = v.`key` AND k.seq = v.seq"""


class ExclusiveMessages:
    """The messages found under the locks of their keys, and those of them that waits of this batch have taken."""

    def __init__(self, found: Iterable[Row]) -> None:
        self._rows: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for i, key, seq in found:
            self._rows[i].append((seq, key))
        self._taken: set[tuple[int, bytes]] = set()

    def take_lowest(self, i: int, received: Collection[int]) -> int | None:
        """The lowest number for the wait at this position that no other wait has taken and its run has not received."""
        left = [row for row in self._rows[i] if row not in self._taken and row[0] not in received]
        if not left:
            return None
        seq, _ = min(left)
        self._taken.update(row for row in left if row[0] == seq)
        return seq

    def statements(self) -> Iterator[Statement]:
        """The assertion fails if a message was pruned."""
        rows = [b"SELECT %b AS `key`, %d AS seq" % (quote_bytes(key), seq) for seq, key in sorted(self._taken)]
        yield from join_all_rows(TAKE_MESSAGES, rows)


INSERT_WAIT = b"INSERT INTO edda_wait (run_id, step, `key`, target_key, type, `match`, due, exclusive) VALUES "
# A batch that is sent again after a lost answer has waits that are registered already.
KEEP_EXISTING = b" ON DUPLICATE KEY UPDATE step = step"
# Every bound is a literal: for a bound from a column of another table the server uses no range, and reads all events of
# a busy key. The left join is one look-up per event; NOT EXISTS may become a list of all items the run ever received.
FIND_EVENT = b"""(SELECT %d AS i, k.seq FROM edda_event_key k FORCE INDEX (PRIMARY)
    LEFT JOIN edda_inbox d ON d.event = k.seq AND d.run_id = %b
    WHERE k.`key` = %b AND k.seq > %b AND d.run_id IS NULL ORDER BY k.seq LIMIT 1)"""
EVENT_CURSOR = b"(SELECT event_cursor FROM edda_open_run WHERE run_id = %b)"


def registers_waits(write: RunWrite) -> bool:
    """Whether the batch has to look for events or messages of its waits. No event can have arrived for a run that
    starts in this batch, but an exclusive message may be stored already. A run that ends registers no waits."""
    if not write.waits or isinstance(write.transition, End):
        return False
    return write.start is None or any(wait.exclusive for wait in write.waits)


def wait_row(run_id: bytes, wait: Wait) -> bytes:
    key, target_key, match = quote_bytes(wait.key), quote_bytes(wait.target_key), quote_bytes(wait.match)
    return b"(%b,%b,%b,%b,%b,%b,%b,%d)" % (
        run_id,
        quote_text(wait.step),
        key,
        target_key,
        quote_text(wait.type),
        match,
        int_or_null(wait.due),
        wait.exclusive,
    )


def find_events(registering: Sequence[RunWrite]) -> Iterator[Statement]:
    """The lowest number under each key of each wait, with the position of the wait among all of them. For an exclusive
    wait the lowest numbers: enough for all waits before it, and for the other waits of its run, which may find the same
    messages."""
    events, messages, before = list[bytes](), list[bytes](), Counter[bytes]()
    waits = [(write, wait) for write in registering for wait in write.waits]
    for i, (write, wait) in enumerate(waits):
        run_id = quote_text(write.run_id)
        cursor = EVENT_CURSOR % run_id if wait.cursor is None else int_or_null(wait.cursor)
        for key in (wait.key, wait.target_key):
            if wait.exclusive:
                before[key] += 1
                messages.append(FIND_MESSAGE % (i, run_id, quote_bytes(key), before[key] + len(write.waits) - 1))
            else:
                events.append(FIND_EVENT % (i, run_id, quote_bytes(key), cursor))
    yield from unions(FIND_EVENT, events)
    yield from unions(FIND_MESSAGE, messages)


class WaitRegistration:
    """Decides for each run which of its waits are registered, and which get an event; the open-run rows are locked."""

    def __init__(
        self,
        registering: Sequence[RunWrite],
        inbox_count: Mapping[RunId, int],
        found: Sequence[tuple[int, int]],
        messages: ExclusiveMessages,
    ) -> None:
        self.refused: dict[RunId, frozenset[str]] = {}
        self._messages = messages
        self._transitions = TransitionWriter()
        self._waits: list[bytes] = []
        self._items: list[EventInboxRow] = []
        waits = [(write, wait) for write in registering for wait in write.waits]
        by_step: defaultdict[RunId, dict[str, int]] = defaultdict(dict)
        for i, seq in sorted(found, reverse=True):  # of the events under a wait's two keys the lowest stays
            write, wait = waits[i]
            by_step[write.run_id][wait.step] = seq
        first = 0
        for write in registering:
            self._register(write, inbox_count.get(write.run_id), by_step[write.run_id], first)
            first += len(write.waits)

    def _register(self, write: RunWrite, inbox_count: int | None, events: dict[str, int], first: int) -> None:
        """`events` are those that its steps found, and `first` is the position of its first wait."""
        run_id, transition = write.run_id, write.transition
        assert isinstance(transition, AckInbox | Suspend | None)  # a write with waits has one of these, or a start
        inbox_read = transition.inbox_read if transition else 0
        if inbox_count != inbox_read:
            self.refused[run_id] = frozenset(wait.step for wait in write.waits)
        else:
            for i, wait in enumerate(write.waits, first):
                if wait.exclusive and (seq := self._messages.take_lowest(i, events.values())) is not None:
                    events[wait.step] = seq
            self._items += _event_items(write, inbox_read, events)
            self._waits += [wait_row(quote_text(run_id), wait) for wait in write.waits if wait.step not in events]
            if events:
                self.refused[run_id] = frozenset(events)
        if transition:
            self._transitions.add(quote_text(run_id), AckInbox(inbox_read) if run_id in self.refused else transition)

    def statements(self, limit: int) -> Iterator[Statement]:
        """Inbox items before keys: pruning locks the events before it deletes their keys, and items lock the events."""
        yield from insert_event_items(self._items)
        yield from self._messages.statements()
        yield from inserts(INSERT_WAIT, self._waits, limit, KEEP_EXISTING)
        yield from self._transitions.statements()


def _event_items(write: RunWrite, inbox_count: int, events: Mapping[str, int]) -> Iterator[EventInboxRow]:
    exclusive = {wait.step for wait in write.waits if wait.exclusive}
    for n, (seq, step) in enumerate(receivers_of(events).items(), inbox_count + 1):
        kind = EntryKind.MESSAGE if step in exclusive else EntryKind.EVENT
        yield EventInboxRow(write.run_id, n, step, seq, kind)


def needs_locked_rows(write: RunWrite) -> bool:
    """Whether the statements for it depend on rows that are locked first."""
    if write.signals or registers_waits(write):
        return True
    if write.start:
        return False
    return isinstance(write.transition, Recur) or (isinstance(write.transition, End) and write.transition.watchers > 0)


def is_decided_later(write: RunWrite) -> bool:
    """Whether its transition is left to `BatchDecision`. A run that starts in the batch has no other rows to lock."""
    return registers_waits(write) or (write.start is None and isinstance(write.transition, End | Recur))


class BatchDecision:
    def __init__(
        self,
        batch: Sequence[RunWrite],
        locked: Mapping[RunId, LockedRun],
        found: Sequence[tuple[int, int]],
        messages: Iterable[Row] = (),
    ) -> None:
        registering = [write for write in batch if registers_waits(write)]
        inbox_count = {run: row.inbox_count for run, row in locked.items()}
        self._registration = WaitRegistration(registering, inbox_count, found, ExclusiveMessages(messages))
        self._transitions = TransitionWriter()
        self._signals = SignalWriter(locked)
        self._copied_runs: list[Statement] = []
        self._rows: defaultdict[bytes, list[bytes]] = defaultdict(list)
        self.refused = dict(self._registration.refused)
        for write in batch:
            self._decide(write, locked.get(write.run_id))

    def _decide(self, write: RunWrite, row: LockedRun | None) -> None:
        run_id, transition = quote_text(write.run_id), write.transition
        if row and is_refused(transition, row.watchers, row.inbox_count):
            self.refused[write.run_id] = frozenset()
            inbox_read = transition.inbox_read if isinstance(transition, Recur | End) else None
            if inbox_read is not None:
                self._transitions.add(run_id, AckInbox(inbox_read))
            return
        self._signals.add(write.signals)
        if not is_decided_later(write):
            return
        match transition:
            case End() as end:
                self._rows[INSERT_RESULT].append(result_row(run_id, write.generation, end))
            case Recur() as recur if row:
                # One statement each: inputs may be large.
                self._copied_runs.append(bind(COPY_RUN, recur.input, recur.at, write.run_id, write.generation))
                self._rows[INSERT_OLD_GENERATION].append(b"(%b,%d,%d)" % (run_id, write.generation, recur.at))
                self._rows[INSERT_HISTORY] += history_rows(run_id, write.generation + 1, write.epoch, [recur.entry])
            case _:
                return
        if row:
            self._transitions.add(run_id, transition)

    def statements(self, limit: int) -> Iterator[Statement]:
        yield from self._registration.statements(limit)
        for statement in self._copied_runs:
            check_size(statement.body, limit)
            yield statement
        for head in (INSERT_OLD_GENERATION, INSERT_HISTORY):
            yield from inserts(head, self._rows[head], limit)
        yield from self._transitions.statements()
        yield from inserts(INSERT_RESULT, self._rows[INSERT_RESULT], limit)
        yield from self._signals.statements(limit)
        yield bind(COMMIT)
