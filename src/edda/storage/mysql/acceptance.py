"""A post of events on its way into the log: under its locks it is compared with what is there, stored, and delivered.

Two messages if nobody waits for any of it, three if somebody does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from edda.core.model import Accepted, Incoming, RunId, Start

from .births import FIND_EXISTING, insert_ready
from .buckets import hold, of_ids, of_keys, of_types, share
from .clock import READ_CLOCK
from .letters import Letter, deliver
from .moves import LOCK_SCHED
from .rows import run_id
from .session import BEGIN, COMMIT, Row, Session
from .statement import Statement, binary, bind, groups, inserts, joins, number, optional, text

VERSIONS = b"SELECT type, version FROM edda_event_type WHERE type IN (%b)"
FIND_KNOWN = b"""SELECT v.i FROM (%b) v
    STRAIGHT_JOIN edda_event e FORCE INDEX (edda_event_once) ON e.source = v.source AND e.id = v.id"""
FIND_WAITS = b"SELECT run_id, step, `key` FROM edda_wait FORCE INDEX (edda_wait_key) WHERE `key` IN (%b)"
INSERT_EVENT = b"INSERT INTO edda_event (source, id, type, target, received_at, body) VALUES "
INSERT_KEY = b"INSERT INTO edda_event_key (`key`, seq) VALUES "
# The rows of one INSERT get numbers in a row; a cluster may give out every third only.
NUMBERS = b"SELECT LAST_INSERT_ID(), @@auto_increment_increment, %b"
NUMBER = b"LAST_INSERT_ID() + %d * @@auto_increment_increment"


class Waiting(NamedTuple):
    run_id: RunId
    step: str
    key: bytes


async def accept(session: Session, post: Sequence[Incoming], versions: Mapping[str, int]) -> Accepted | None:
    """Misses its expectation if somebody else starts one of its runs meanwhile."""
    survey = await session.ask(*_survey(post))
    current = {type.decode(): version for type, version in survey.to(VERSIONS)}
    if any(current.get(type, 0) != versions.get(type, 0) for type in _types(post)):
        await session.run(COMMIT)  # of the locks; nothing is written yet
        return None
    known = {i for (i,) in survey.to(FIND_KNOWN)}
    fresh = [i for i in _first_of_each(post) if i not in known]
    events = [post[i] for i in fresh]
    births = _births(events, {run_id(row[0]) for row in survey.to(FIND_EXISTING)})
    storing = _store(events, births, survey.to(READ_CLOCK)[0][0], session.limit)
    candidates = {wait.run_id for _, wait in _match(events, _waiting(survey.to(FIND_WAITS)))}
    if not candidates:
        await session.send(*storing, bind(COMMIT))
        return Accepted(frozenset(fresh), bool(births))
    letters = await _address(session, storing, events, candidates)
    await session.send(*deliver(letters), bind(COMMIT))
    return Accepted(frozenset(fresh), bool(births or letters))


def _survey(post: Sequence[Incoming]) -> Iterator[Statement]:
    """The locks, and what is there under them."""
    events = [incoming.event for incoming in post]
    plain = _plain_keys(post)
    kept = {key.kept for incoming in post for key in incoming.keys}
    ids = [b"SELECT %d AS i, %b AS source, %b AS id" % (i, text(e.source), text(e.id)) for i, e in enumerate(events)]
    yield bind(BEGIN)
    yield share(of_types(_types(post)))
    yield hold(of_keys(kept.union(plain)) | of_ids((e.source, e.id) for e in events))
    yield bind(READ_CLOCK)
    yield bind(VERSIONS, sorted(_types(post)))
    yield from joins(FIND_KNOWN, ids)
    yield bind(FIND_WAITS, plain)
    yield bind(FIND_EXISTING, sorted({start.run_id for incoming in post for start in incoming.starts}))


def _types(post: Iterable[Incoming]) -> set[str]:
    return {incoming.event.type for incoming in post}


def _plain_keys(post: Iterable[Incoming]) -> list[bytes]:
    return sorted({key.plain for incoming in post for key in incoming.keys})


def _first_of_each(post: Sequence[Incoming]) -> list[int]:
    first: dict[tuple[str, str], int] = {}
    for i, incoming in enumerate(post):
        first.setdefault((incoming.event.source, incoming.event.id), i)
    return list(first.values())


def _births(events: Sequence[Incoming], existing: set[RunId]) -> dict[RunId, tuple[Start, int]]:
    """The runs to be started, in lock order, with the position of the event that starts each."""
    births: dict[RunId, tuple[Start, int]] = {}
    for i, incoming in enumerate(events):
        for start in incoming.starts:
            if start.run_id not in existing:
                births.setdefault(start.run_id, (start, i))
    return dict(sorted(births.items()))


def _store(
    events: Sequence[Incoming], births: Mapping[RunId, tuple[Start, int]], now: int, limit: int
) -> Iterator[Statement]:
    """What depends on an event's number stands right behind the INSERT that gave it out."""
    first = 0
    for rows in groups([_event_row(incoming, now) for incoming in events], limit - len(INSERT_EVENT)):
        positions = range(first, first + len(rows))
        first += len(rows)
        yield Statement(INSERT_EVENT.decode(), INSERT_EVENT + b",".join(rows))
        yield bind(NUMBERS, len(rows))
        keys = sorted({(key.kept, i - positions[0]) for i in positions for key in events[i].keys})
        yield from inserts(INSERT_KEY, [b"(%b,%b)" % (binary(key), NUMBER % i) for key, i in keys], limit)
        started = [(start, NUMBER % (i - positions[0])) for start, i in births.values() if i in positions]
        yield from insert_ready(started, number(now), limit)


def _event_row(incoming: Incoming, now: int) -> bytes:
    event = incoming.event
    row = (text(event.source), text(event.id), text(event.type), optional(event.target), now, binary(event.body))
    return b"(%b,%b,%b,%b,%d,%b)" % row


async def _address(
    session: Session, storing: Iterable[Statement], events: Sequence[Incoming], candidates: Iterable[RunId]
) -> list[Letter]:
    """Store the events, lock the runs, and number their letters; a wait may have ended before its run was locked."""
    look = (bind(LOCK_SCHED, sorted(candidates)), bind(FIND_WAITS, _plain_keys(events)))
    answers = await session.ask(*storing, *look)
    delivered = {run_id(run): n for run, n in answers.to(LOCK_SCHED)}
    numbers = [first + i * step for first, step, size in answers.to(NUMBERS) for i in range(size)]
    letters = []
    for i, wait in _match(events, _waiting(answers.to(FIND_WAITS))):
        delivered[wait.run_id] += 1
        letters.append(Letter(wait.run_id, delivered[wait.run_id], wait.step, numbers[i]))
    return letters


def _waiting(rows: Iterable[Row]) -> Iterator[Waiting]:
    return (Waiting(run_id(run), step.decode(), key) for run, step, key in rows)


def _match(events: Sequence[Incoming], waiting: Iterable[Waiting]) -> Iterator[tuple[int, Waiting]]:
    """Each event, in turn, for the lowest step of every run that waits for it; a wait gets one event."""
    by_key: dict[bytes, set[Waiting]] = defaultdict(set)
    for wait in waiting:
        by_key[wait.key].add(wait)
    for i, incoming in enumerate(events):
        served: set[RunId] = set()
        for wait in sorted({wait for key in incoming.keys for wait in by_key[key.plain]}):
            if wait.run_id not in served and incoming.event.target in (None, wait.run_id):
                served.add(wait.run_id)
                by_key[wait.key].remove(wait)
                yield i, wait
