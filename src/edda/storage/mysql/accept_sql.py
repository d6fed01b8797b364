"""The SQL of accepting events: which wait gets which event, and the rows that follow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from edda.core.model import AcceptResult, EntryKind, NewEvent, RunId, Start
from edda.errors import StorageConflictError

from .batch_sql import FIND_EXISTING, LOCK_SCHED, EventInboxRow, insert_event_items, insert_unowned
from .clock import READ_CLOCK
from .locks import hold_events, share_types
from .rows import run_id
from .session import BEGIN, COMMIT, ROLLBACK, AssertionFailedError, ReplyRows, Session
from .staged_events import forward
from .statement import (
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


class WaitRow(NamedTuple):
    run_id: RunId
    step: str
    key: bytes


class Match(NamedTuple):
    event: int
    """Its position."""
    wait: WaitRow
    kind: EntryKind


def match_events(events: Sequence[NewEvent], waiting: Iterable[WaitRow]) -> list[Match]:
    by_key: dict[bytes, set[WaitRow]] = defaultdict(set)
    for wait in waiting:
        by_key[wait.key].add(wait)
    return [each for i, incoming in enumerate(events) for each in _match_one(i, incoming, by_key)]


def _match_one(i: int, incoming: NewEvent, by_key: dict[bytes, set[WaitRow]]) -> Iterator[Match]:
    """An event, in its turn, for the lowest step of every run that waits for it, and then for one run under each key
    that gives it to one only; a wait gets one event, and a run gets an event once."""
    served: set[RunId] = set()
    shared = {wait for key in incoming.keys if not key.once for wait in by_key[key.plain]}
    single = [by_key[key.plain] for key in incoming.keys if key.once]
    for some, is_single in [(shared, False), *((waits, True) for waits in single)]:
        for wait in sorted(some):
            if wait.run_id not in served and incoming.event.target in (None, wait.run_id):
                served.add(wait.run_id)
                by_key[wait.key].remove(wait)
                yield Match(i, wait, EntryKind.MESSAGE if is_single else EntryKind.EVENT)
                if is_single:
                    break


def shared_keys(events: Sequence[NewEvent]) -> list[tuple[bytes, int]]:
    """Under which keys events are kept, with their positions."""
    return sorted({(key.kept, i) for i, incoming in enumerate(events) for key in incoming.keys if not key.once})


def unmatched_exclusive_keys(events: Sequence[NewEvent], matches: Iterable[Match]) -> list[tuple[bytes, int]]:
    """The same for keys that give an event to one run only, and for which nobody was found."""
    given = {(each.event, each.wait.key) for each in matches if each.kind is EntryKind.MESSAGE}
    rows = ((key, i) for i, incoming in enumerate(events) for key in incoming.keys if key.once)
    return sorted({(key.kept, i) for key, i in rows if (i, key.plain) not in given})


VERSIONS = b"SELECT type, version FROM edda_event_type WHERE type IN (%b)"
FIND_KNOWN = b"""SELECT v.i FROM (%b) v
    STRAIGHT_JOIN edda_event e FORCE INDEX (edda_event_once) ON e.source = v.source AND e.id = v.id"""
_WAITS = b"SELECT run_id, step, `key` FROM edda_wait FORCE INDEX (edda_wait_key) WHERE `key` "
FIND_WAITS = _WAITS + b"IN (%b)"
# Of those who compete for a message a few are enough, however many there are.
FIND_SOME = b"(" + _WAITS + b"= %b ORDER BY run_id, step LIMIT %b)"
FIND_OF_RUN = b"(" + _WAITS + b"= %b AND run_id = %b ORDER BY step LIMIT %b)"
INSERT_EVENT = b"INSERT INTO edda_event (source, id, type, target, received_at, body) VALUES "
INSERT_KEY = b"INSERT INTO edda_event_key (`key`, seq) VALUES "
# The rows of one INSERT get numbers in a row; a cluster may give out every third only.
NUMBERS = b"SELECT LAST_INSERT_ID(), @@auto_increment_increment, %b"
NUMBER = b"LAST_INSERT_ID() + %d * @@auto_increment_increment"

_EXTRA_WAITS = 8
"""So many more than messages are looked at of those who wait for one: some may get it by another key."""


async def accept(
    session: Session, post: Sequence[NewEvent], versions: Mapping[str, int], forwarded: Sequence[int], attempt: int
) -> AcceptResult | None:
    """Misses its expectation if somebody else starts one of its runs meanwhile, or if those it looked at no longer wait
    for a message that others may wait for; with each attempt it looks at more of them."""
    look = WaitLookup(post, _EXTRA_WAITS << 6 * attempt)
    lookup_statements = await _survey(session, look, forwarded)
    current = {type.decode(): version for type, version in lookup_statements.rows_of(VERSIONS)}
    if any(current.get(type, 0) != versions.get(type, 0) for type in _types(post)):
        await session.run(ROLLBACK)
        return None
    known = {i for (i,) in lookup_statements.rows_of(FIND_KNOWN)}
    fresh = [i for i in _first_of_each(post) if i not in known]
    events = [post[i] for i in fresh]
    births = _runs_to_start(events, {run_id(row[0]) for row in lookup_statements.rows_of(FIND_EXISTING)})
    waiting = look.found(lookup_statements)
    matches = match_events(events, waiting)
    # Whether a message is kept is known when the runs are locked, or at once if nobody waits for anything.
    kept = (
        shared_keys(events) if matches else [*shared_keys(events), *look.unmatched_messages(events, matches, waiting)]
    )
    storing = _store(events, kept, births, lookup_statements.rows_of(READ_CLOCK)[0][0], session.limit)
    if not matches:
        await session.send(*storing, bind(COMMIT))
        return AcceptResult(frozenset(fresh), bool(births))
    letters = await _deliver(session, storing, events, look, {each.wait.run_id for each in matches})
    return AcceptResult(frozenset(fresh), bool(births) or letters > 0)


class WaitLookup:
    """What is looked at of those who wait for the events of a post."""

    def __init__(self, post: Sequence[NewEvent], spare: int) -> None:
        self.post = post
        keys = [(key, incoming.event.target) for incoming in post for key in incoming.keys]
        self._shared = sorted({key.plain for key, _ in keys if not key.once})
        number = Counter(key.plain for key, _ in keys if key.once)
        self._limits = {key.plain: number[key.plain] + spare for key, run in keys if key.once and run is None}
        self._targets = {(key.plain, run, number[key.plain]) for key, run in keys if key.once and run is not None}

    def statements(self) -> Iterator[Statement]:
        yield bind(FIND_WAITS, self._shared)
        for key, limit in sorted(self._limits.items()):
            yield bind(FIND_SOME, key, limit)
        for key, run, limit in sorted(self._targets):
            yield bind(FIND_OF_RUN, key, run, limit)

    def found(self, answers: ReplyRows) -> set[WaitRow]:
        rows = (row for template in (FIND_WAITS, FIND_SOME, FIND_OF_RUN) for row in answers.rows_of(template))
        return {WaitRow(run_id(run), step.decode(), key) for run, step, key in rows}

    def unmatched_messages(
        self, events: Sequence[NewEvent], matches: Iterable[Match], waiting: Iterable[WaitRow]
    ) -> list[tuple[bytes, int]]:
        """The messages that nobody waits for, as far as that can be said."""
        keys = unmatched_exclusive_keys(events, matches)
        number = Counter(wait.key for wait in waiting)
        if any(kept in self._limits and number[kept] >= self._limits[kept] for kept, _ in keys):
            raise AssertionFailedError("more may wait for a message than were looked at")
        return keys


async def _survey(session: Session, look: WaitLookup, forwarded: Sequence[int]) -> ReplyRows:
    try:
        return await session.query(*lookup_statements(look, forwarded, session.node))
    except AssertionFailedError as error:
        raise StorageConflictError("somebody else has forwarded one of the dispatches") from error


def lookup_statements(look: WaitLookup, forwarded: Sequence[int], node: int | None = None) -> Iterator[Statement]:
    """The locks, and what is there under them."""
    post = look.post
    events = [incoming.event for incoming in post]
    keys = {key for incoming in post for each in incoming.keys for key in (each.plain, each.kept)}
    ids = [
        b"SELECT %d AS i, %b AS source, %b AS id" % (i, quote_text(e.source), quote_text(e.id))
        for i, e in enumerate(events)
    ]
    yield bind(BEGIN)
    yield share_types(_types(post), node)
    yield hold_events(keys, [(e.source, e.id) for e in events], node)
    yield from forward(forwarded)
    yield bind(READ_CLOCK)
    yield bind(VERSIONS, sorted(_types(post)))
    yield from join_values(FIND_KNOWN, ids)
    yield from look.statements()
    yield bind(FIND_EXISTING, sorted({start.run_id for incoming in post for start in incoming.starts}))


def _types(post: Iterable[NewEvent]) -> set[str]:
    return {incoming.event.type for incoming in post}


def _first_of_each(post: Sequence[NewEvent]) -> list[int]:
    first: dict[tuple[str, str], int] = {}
    for i, incoming in enumerate(post):
        first.setdefault((incoming.event.source, incoming.event.id), i)
    return list(first.values())


def _runs_to_start(events: Sequence[NewEvent], existing: set[RunId]) -> dict[RunId, tuple[Start, int]]:
    """The runs to be started, in lock order, with the position of the event that starts each."""
    births: dict[RunId, tuple[Start, int]] = {}
    for i, incoming in enumerate(events):
        for start in incoming.starts:
            if start.run_id not in existing:
                births.setdefault(start.run_id, (start, i))
    return dict(sorted(births.items()))


def _store(
    events: Sequence[NewEvent],
    kept: Sequence[tuple[bytes, int]],
    births: Mapping[RunId, tuple[Start, int]],
    now: int,
    limit: int,
) -> Iterator[Statement]:
    """What depends on an event's number stands right behind the INSERT that gave it out."""
    first = 0
    for rows in split_rows([_event_row(incoming, now) for incoming in events], limit - len(INSERT_EVENT)):
        positions = range(first, first + len(rows))
        first += len(rows)
        yield Statement(INSERT_EVENT.decode(), INSERT_EVENT + b",".join(rows))
        yield bind(NUMBERS, len(rows))
        keys = [(key, NUMBER % (i - positions[0])) for key, i in kept if i in positions]
        yield from inserts(INSERT_KEY, [b"(%b,%b)" % (quote_bytes(key), seq) for key, seq in keys], limit)
        started = [(start, NUMBER % (i - positions[0])) for start, i in births.values() if i in positions]
        yield from insert_unowned(started, int_or_null(now), limit)


def _event_row(incoming: NewEvent, now: int) -> bytes:
    event = incoming.event
    row = (
        quote_text(event.source),
        quote_text(event.id),
        quote_text(event.type),
        text_or_null(event.target),
        now,
        quote_bytes(event.body),
    )
    return b"(%b,%b,%b,%b,%d,%b)" % row


async def _deliver(
    session: Session,
    storing: Iterable[Statement],
    events: Sequence[NewEvent],
    look: WaitLookup,
    candidates: Iterable[RunId],
) -> int:
    """Store the events, lock the runs, and send what still fits; a wait may have ended before its run was locked."""
    answers = await session.query(*storing, bind(LOCK_SCHED, sorted(candidates)), *look.statements())
    numbers = [first + i * step for first, step, size in answers.rows_of(NUMBERS) for i in range(size)]
    waiting = look.found(answers)
    matches = match_events(events, waiting)
    letters = list(_letters(matches, {run_id(run): n for run, n in answers.rows_of(LOCK_SCHED)}, numbers))
    kept = [b"(%b,%d)" % (quote_bytes(key), numbers[i]) for key, i in look.unmatched_messages(events, matches, waiting)]
    await session.send(*insert_event_items(letters), *inserts(INSERT_KEY, kept, session.limit), bind(COMMIT))
    return len(letters)


def _letters(matches: Iterable[Match], delivered: dict[RunId, int], numbers: Sequence[int]) -> Iterator[EventInboxRow]:
    for event, wait, kind in matches:
        if wait.run_id not in delivered:
            raise AssertionFailedError("a message goes to a run that is not locked")
        delivered[wait.run_id] += 1
        yield EventInboxRow(wait.run_id, delivered[wait.run_id], wait.step, numbers[event], kind)
