"""Runs that ask for events: what is found is delivered, what is not is waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from edda.core.model import Absorb, Bundle, End, Release, RunId, Wait

from .letters import Letter, deliver
from .moves import Moves
from .statement import Statement, binary, inserts, number, text

INSERT_WAIT = b"INSERT INTO edda_wait (run_id, step, `key`, own_key, type, `match`, due) VALUES "
# A batch whose answer was lost asks again for what is registered.
OR_KEEP = b" ON DUPLICATE KEY UPDATE step = step"
# Every bound is written out: from a column of another table the server would not make a range, and read all events of
# a busy key. The left join is a look-up for each event; NOT EXISTS may become a list of all that the run ever got.
FIND_EVENT = b"""(SELECT %d AS i, k.seq FROM edda_event_key k FORCE INDEX (PRIMARY)
    LEFT JOIN edda_delivery d ON d.event = k.seq AND d.run_id = %b
    WHERE k.`key` = %b AND k.seq > %b AND d.run_id IS NULL ORDER BY k.seq LIMIT 1)"""
START_SEQ = b"(SELECT start_seq FROM edda_sched WHERE run_id = %b)"

_BRANCHES = 100
"""Look-ups in one statement; each is a SELECT with two tables to open."""


def asks(bundle: Bundle) -> bool:
    """What a run asks for when it is started cannot have come yet, and one that ends gets nothing."""
    return bool(bundle.waits) and bundle.start is None and not isinstance(bundle.move, End)


def wait_row(run_id: bytes, wait: Wait) -> bytes:
    key, own_key, match = binary(wait.key), binary(wait.own_key), binary(wait.match)
    return b"(%b,%b,%b,%b,%b,%b,%b)" % (
        run_id,
        text(wait.step),
        key,
        own_key,
        text(wait.type),
        match,
        number(wait.due),
    )


def wait_key(run_id: bytes, step: str) -> bytes:
    return b"SELECT %b AS run_id, %b AS step" % (run_id, text(step))


def find_events(asking: Sequence[Bundle]) -> Iterator[Statement]:
    """The lowest number under each key of each wait, with the position of the wait in all that are asked for."""
    branches = [branch for i, (run, wait) in enumerate(_asked(asking)) for branch in _branches(i, text(run), wait)]
    for first in range(0, len(branches), _BRANCHES):
        union = b" UNION ALL ".join(branches[first : first + _BRANCHES])
        yield Statement(FIND_EVENT.decode(), union)


def _asked(asking: Sequence[Bundle]) -> Iterator[tuple[RunId, Wait]]:
    return ((bundle.run_id, wait) for bundle in asking for wait in bundle.waits)


def _branches(i: int, run_id: bytes, wait: Wait) -> Iterator[bytes]:
    floor = START_SEQ % run_id if wait.floor is None else number(wait.floor)
    for key in (wait.key, wait.own_key):
        yield FIND_EVENT % (i, run_id, binary(key), floor)


class Registration:
    """Decides, run by run, what happens to those who asked; their sched rows are locked."""

    def __init__(
        self, asking: Sequence[Bundle], delivered: Mapping[RunId, int], found: Sequence[tuple[int, int]]
    ) -> None:
        self.unmet: dict[RunId, frozenset[str]] = {}
        self._moves = Moves()
        self._waits: list[bytes] = []
        self._letters: list[Letter] = []
        hits = self._hits(asking, found)
        for bundle in asking:
            self._settle(bundle, delivered.get(bundle.run_id), hits[bundle.run_id])

    @staticmethod
    def _hits(asking: Sequence[Bundle], found: Sequence[tuple[int, int]]) -> dict[RunId, dict[str, int]]:
        """Which event each step found: the lowest of those under its two keys."""
        asked = list(_asked(asking))
        hits: dict[RunId, dict[str, int]] = defaultdict(dict)
        for i, seq in sorted(found, reverse=True):
            run, wait = asked[i]
            hits[run][wait.step] = seq
        return hits

    def _settle(self, bundle: Bundle, delivered: int | None, hits: Mapping[str, int]) -> None:
        run_id, move = bundle.run_id, bundle.move
        assert isinstance(move, Absorb | Release)  # who asks without a start has one of these
        if delivered != move.absorbed:
            hits = {}
            self.unmet[run_id] = frozenset(wait.step for wait in bundle.waits)
        else:
            self._letters += _letters(run_id, delivered, hits)
            self._waits += [wait_row(text(run_id), wait) for wait in bundle.waits if wait.step not in hits]
            if hits:
                self.unmet[run_id] = frozenset(hits)
        self._moves.add(text(run_id), Absorb(move.absorbed) if run_id in self.unmet else move)

    def statements(self, limit: int) -> Iterator[Statement]:
        yield from deliver(self._letters)
        yield from inserts(INSERT_WAIT, self._waits, limit, OR_KEEP)
        yield from self._moves.statements()


def _letters(run_id: RunId, delivered: int, hits: Mapping[str, int]) -> Iterator[Letter]:
    """Numbered in the order of the events; of two steps that found the same one the lower gets it."""
    steps = {seq: step for step, seq in sorted(hits.items(), reverse=True)}
    for n, seq in enumerate(sorted(steps), delivered + 1):
        yield Letter(run_id, n, steps[seq], seq)
