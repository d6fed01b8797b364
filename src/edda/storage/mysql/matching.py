"""Which of those who wait gets which of the events that came in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from edda.core.model import EntryKind, NewEvent, RunId


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
