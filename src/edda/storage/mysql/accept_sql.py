"""The SQL of accepting events: which wait gets which event, and the rows that follow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from edda.core.model import AcceptResult, EntryKind, NewEvent, RunId, Start
from edda.errors import StorageConflictError
from edda.storage.shared.rows import to_run_id

from .batch_sql import FIND_EXISTING, LOCK_OPEN_RUNS, EventInboxRow, insert_event_items, insert_unowned
from .connection import BEGIN, COMMIT, ROLLBACK, AssertionFailedError, MySQLSession, ReplyRows, join_all_rows
from .locks import lock_events, lock_types_shared
from .statement import (
    READ_CLOCK,
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


class WaitingStep(NamedTuple):
    run_id: RunId
    step: str
    key: bytes


class Match(NamedTuple):
    event: int
    """Its position in the request."""
    wait: WaitingStep
    kind: EntryKind


def match_events(events: Sequence[NewEvent], waiting: Iterable[WaitingStep]) -> list[Match]:
    by_key: dict[bytes, set[WaitingStep]] = defaultdict(set)
    for wait in waiting:
        by_key[wait.key].add(wait)
    return [each for i, new in enumerate(events) for each in _match_one(i, new, by_key)]


def _match_one(i: int, new: NewEvent, by_key: dict[bytes, set[WaitingStep]]) -> Iterator[Match]:
    """The event goes to the lowest step of every run that waits for it under a shared key, then to one run under each
    exclusive key. A wait gets one event, and a run gets an event once."""
    matched: set[RunId] = set()
    shared = {wait for key in new.keys if not key.exclusive for wait in by_key[key.wait_key]}
    exclusive = [by_key[key.wait_key] for key in new.keys if key.exclusive]
    for waits, is_exclusive in [(shared, False), *((waits, True) for waits in exclusive)]:
        for wait in sorted(waits):
            if wait.run_id not in matched and new.event.target in (None, wait.run_id):
                matched.add(wait.run_id)
                by_key[wait.key].remove(wait)
                yield Match(i, wait, EntryKind.MESSAGE if is_exclusive else EntryKind.EVENT)
                if is_exclusive:
                    break


def shared_keys(events: Sequence[NewEvent]) -> list[tuple[bytes, int]]:
    """The shared keys under which the events are stored, with the positions of the events."""
    return sorted({(key.stored_key, i) for i, new in enumerate(events) for key in new.keys if not key.exclusive})


VERSIONS = b"SELECT type, version FROM edda_event_type WHERE type IN (%b)"
FIND_KNOWN = b"""SELECT v.i FROM (%b) v
    STRAIGHT_JOIN edda_event e FORCE INDEX (edda_event_identity) ON e.source = v.source AND e.id = v.id"""
_WAITS = b"SELECT run_id, step, `key` FROM edda_wait FORCE INDEX (edda_wait_key) WHERE `key` "
FIND_WAITS = _WAITS + b"IN (%b)"
# Of the waits under an exclusive key a few are enough, however many there are.
FIND_SOME = b"(" + _WAITS + b"= %b ORDER BY run_id, step LIMIT %b)"
FIND_OF_RUN = b"(" + _WAITS + b"= %b AND run_id = %b ORDER BY step LIMIT %b)"
INSERT_EVENT = b"INSERT INTO edda_event (source, id, type, target, received_at, body) VALUES "
INSERT_KEY = b"INSERT INTO edda_event_key (`key`, seq) VALUES "
# The rows of one INSERT get numbers at a fixed distance, which is above 1 on a cluster.
NUMBERS = b"SELECT LAST_INSERT_ID(), @@auto_increment_increment, %b"
NUMBER = b"LAST_INSERT_ID() + %d * @@auto_increment_increment"

_EXTRA_WAITS = 8
"""How many more waits than messages are read: some of their runs may get the event by another key."""


async def accept(
    session: MySQLSession, events: Sequence[NewEvent], versions: Mapping[str, int], staged: Sequence[int], attempt: int
) -> AcceptResult | None:
    """An assertion fails if another process starts one of the runs meanwhile, or if the waits it read for a message
    have ended and it has not read all others; each attempt reads more waits."""
    lookup = WaitLookup(events, _EXTRA_WAITS << 6 * attempt)
    try:
        found = await session.query(*lookup_statements(lookup, staged, session.node))
    except AssertionFailedError as error:
        raise StorageConflictError(ALREADY_MOVED) from error
    current = {type.decode(): version for type, version in found.rows_of(VERSIONS)}
    if any(current.get(new.event.type, 0) != versions.get(new.event.type, 0) for new in events):
        await session.run(ROLLBACK)
        return None
    known = {i for (i,) in found.rows_of(FIND_KNOWN)}
    first_of_each = {(new.event.source, new.event.id): i for i, new in reversed([*enumerate(events)])}
    positions = [i for i in sorted(first_of_each.values()) if i not in known]
    new = [events[i] for i in positions]
    new_runs = _runs_to_start(new, {to_run_id(row[0]) for row in found.rows_of(FIND_EXISTING)})
    waits = lookup.waits(found)
    matches = match_events(new, waits)
    # If no wait matches, every message is stored now; else this is decided when the runs are locked.
    keys = shared_keys(new) if matches else [*shared_keys(new), *lookup.unmatched_messages(new, matches, waits)]
    storing = _store(new, keys, new_runs, found.rows_of(READ_CLOCK)[0][0], session.limit)
    if not matches:
        await session.send(*storing, bind(COMMIT))
        return AcceptResult(frozenset(positions), bool(new_runs))
    delivered = await _deliver(session, storing, new, lookup, {each.wait.run_id for each in matches})
    return AcceptResult(frozenset(positions), bool(new_runs) or delivered > 0)


class WaitLookup:
    """Which waits are read for the events of a request."""

    def __init__(self, events: Sequence[NewEvent], extra: int) -> None:
        self.events = events
        keys = [(key, new.event.target) for new in events for key in new.keys]
        self._shared = sorted({key.wait_key for key, _ in keys if not key.exclusive})
        number = Counter(key.wait_key for key, _ in keys if key.exclusive)
        self._limits = {
            key.wait_key: number[key.wait_key] + extra for key, run in keys if key.exclusive and run is None
        }
        self._targets = {
            (key.wait_key, run, number[key.wait_key]) for key, run in keys if key.exclusive and run is not None
        }

    def statements(self) -> Iterator[Statement]:
        yield bind(FIND_WAITS, self._shared)
        for key, limit in sorted(self._limits.items()):
            yield bind(FIND_SOME, key, limit)
        for key, run, limit in sorted(self._targets):
            yield bind(FIND_OF_RUN, key, run, limit)

    def waits(self, found: ReplyRows) -> set[WaitingStep]:
        rows = (row for template in (FIND_WAITS, FIND_SOME, FIND_OF_RUN) for row in found.rows_of(template))
        return {WaitingStep(to_run_id(run), step.decode(), key) for run, step, key in rows}

    def unmatched_messages(
        self, events: Sequence[NewEvent], matches: Iterable[Match], waits: Iterable[WaitingStep]
    ) -> list[tuple[bytes, int]]:
        """The messages without a wait. Raises if there may be waits that were not read."""
        matched = {(each.event, each.wait.key) for each in matches if each.kind is EntryKind.MESSAGE}
        messages = ((key, i) for i, new in enumerate(events) for key in new.keys if key.exclusive)
        keys = sorted({(key.stored_key, i) for key, i in messages if (i, key.wait_key) not in matched})
        number = Counter(wait.key for wait in waits)
        if any(key in self._limits and number[key] >= self._limits[key] for key, _ in keys):
            raise AssertionFailedError("there may be more waits for a message than were read")
        return keys


def lookup_statements(lookup: WaitLookup, staged: Sequence[int], node: int | None = None) -> Iterator[Statement]:
    """The locks, and the reads under them."""
    events = [new.event for new in lookup.events]
    keys = {key for new in lookup.events for pair in new.keys for key in (pair.wait_key, pair.stored_key)}
    ids = [
        b"SELECT %d AS i, %b AS source, %b AS id" % (i, quote_text(e.source), quote_text(e.id))
        for i, e in enumerate(events)
    ]
    types = {event.type for event in events}
    yield bind(BEGIN)
    yield lock_types_shared(types, node)
    yield lock_events(keys, [(e.source, e.id) for e in events], node)
    yield from delete_staged(staged)
    yield bind(READ_CLOCK)
    yield bind(VERSIONS, sorted(types))
    yield from join_values(FIND_KNOWN, ids)
    yield from lookup.statements()
    yield bind(FIND_EXISTING, sorted({start.run_id for new in lookup.events for start in new.starts}))


# A join: with an IN list the server scans a small table, and waits for transactions that insert staged events.
DELETE_STAGED = b"DELETE d FROM (%b) v STRAIGHT_JOIN edda_staged_event d ON d.seq = v.seq"
ALREADY_MOVED = "another process has moved one of the staged events into the log"


def delete_staged(numbers: Sequence[int]) -> Iterator[Statement]:
    """The assertion fails if one of them does not exist."""
    return join_all_rows(DELETE_STAGED, [b"SELECT %d AS seq" % seq for seq in sorted(set(numbers))])


def _runs_to_start(events: Sequence[NewEvent], existing: set[RunId]) -> dict[RunId, tuple[Start, int]]:
    """The runs to start, in lock order, with the position of the event that starts each."""
    new_runs: dict[RunId, tuple[Start, int]] = {}
    for i, new in enumerate(events):
        for start in new.starts:
            if start.run_id not in existing:
                new_runs.setdefault(start.run_id, (start, i))
    return dict(sorted(new_runs.items()))


def _store(
    events: Sequence[NewEvent],
    keys: Sequence[tuple[bytes, int]],
    new_runs: Mapping[RunId, tuple[Start, int]],
    now: int,
    limit: int,
) -> Iterator[Statement]:
    """The rows that need an event's number follow the INSERT of the event: they use LAST_INSERT_ID()."""
    first = 0
    event_rows = [
        b"(%b,%b,%b,%b,%d,%b)"
        % (
            *(quote_text(new.event.source), quote_text(new.event.id), quote_text(new.event.type)),
            *(text_or_null(new.event.target), now, quote_bytes(new.event.body)),
        )
        for new in events
    ]
    for rows in split_rows(event_rows, limit - len(INSERT_EVENT)):
        positions = range(first, first + len(rows))
        first += len(rows)
        yield Statement(INSERT_EVENT.decode(), INSERT_EVENT + b",".join(rows))
        yield bind(NUMBERS, len(rows))
        numbered = [(key, NUMBER % (i - positions[0])) for key, i in keys if i in positions]
        yield from inserts(INSERT_KEY, [b"(%b,%b)" % (quote_bytes(key), seq) for key, seq in numbered], limit)
        started = [(start, NUMBER % (i - positions[0])) for start, i in new_runs.values() if i in positions]
        yield from insert_unowned(started, int_or_null(now), limit)


async def _deliver(
    session: MySQLSession,
    storing: Iterable[Statement],
    events: Sequence[NewEvent],
    lookup: WaitLookup,
    candidates: Iterable[RunId],
) -> int:
    """Store the events, lock the runs, and match again: a wait may have ended before its run was locked."""
    found = await session.query(*storing, bind(LOCK_OPEN_RUNS, sorted(candidates)), *lookup.statements())
    numbers = [first + i * step for first, step, size in found.rows_of(NUMBERS) for i in range(size)]
    waits = lookup.waits(found)
    matches = match_events(events, waits)
    inbox_count = {to_run_id(run): n for run, n in found.rows_of(LOCK_OPEN_RUNS)}
    items = []
    for event, wait, kind in matches:
        if wait.run_id not in inbox_count:
            raise AssertionFailedError("an event matches a run that is not locked")
        inbox_count[wait.run_id] += 1
        items.append(EventInboxRow(wait.run_id, inbox_count[wait.run_id], wait.step, numbers[event], kind))
    keys = [b"(%b,%d)" % (quote_bytes(key), numbers[i]) for key, i in lookup.unmatched_messages(events, matches, waits)]
    await session.send(*insert_event_items(items), *inserts(INSERT_KEY, keys, session.limit), bind(COMMIT))
    return len(items)
