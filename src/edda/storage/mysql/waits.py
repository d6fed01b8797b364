"""Runs that ask for events: what is found is delivered, what is not is waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from edda.core.model import AckInbox, End, EntryKind, RunId, RunWrite, Suspend, Wait

from .batch_sql import EventInboxRow, TransitionWriter, insert_event_items
from .exclusive_messages import ExclusiveMessages, find_exclusive_messages
from .statement import Statement, inserts, int_or_null, quote_bytes, quote_text

INSERT_WAIT = b"INSERT INTO edda_wait (run_id, step, `key`, own_key, type, `match`, due, once) VALUES "
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


def registers_waits(bundle: RunWrite) -> bool:
    """An event that a run asks for when it is started cannot have come yet, but a message may lie there for anybody.
    A run that ends gets nothing."""
    if not bundle.waits or isinstance(bundle.move, End):
        return False
    return bundle.start is None or any(wait.once for wait in bundle.waits)


def wait_row(run_id: bytes, wait: Wait) -> bytes:
    key, own_key, match = quote_bytes(wait.key), quote_bytes(wait.own_key), quote_bytes(wait.match)
    return b"(%b,%b,%b,%b,%b,%b,%b,%d)" % (
        run_id,
        quote_text(wait.step),
        key,
        own_key,
        quote_text(wait.type),
        match,
        int_or_null(wait.due),
        wait.once,
    )


def wait_key(run_id: bytes, step: str) -> bytes:
    return b"SELECT %b AS run_id, %b AS step" % (run_id, quote_text(step))


def find_events(asking: Sequence[RunWrite]) -> Iterator[Statement]:
    """The lowest number under each key of each wait, with the position of the wait in all that are asked for."""
    asked = [(i, bundle, wait) for i, (bundle, wait) in enumerate(_all_waits(asking))]
    branches = [branch for i, bundle, wait in asked if not wait.once for branch in _branches(i, bundle.run_id, wait)]
    for first in range(0, len(branches), _BRANCHES):
        union = b" UNION ALL ".join(branches[first : first + _BRANCHES])
        yield Statement(FIND_EVENT.decode(), union)
    yield from find_exclusive_messages(
        (i, bundle.run_id, wait, len(bundle.waits) - 1) for i, bundle, wait in asked if wait.once
    )


def _all_waits(asking: Sequence[RunWrite]) -> Iterator[tuple[RunWrite, Wait]]:
    return ((bundle, wait) for bundle in asking for wait in bundle.waits)


def _branches(i: int, run: RunId, wait: Wait) -> Iterator[bytes]:
    run_id = quote_text(run)
    floor = START_SEQ % run_id if wait.floor is None else int_or_null(wait.floor)
    for key in (wait.key, wait.own_key):
        yield FIND_EVENT % (i, run_id, quote_bytes(key), floor)


class WaitRegistration:
    """Decides, run by run, what happens to those who asked; their sched rows are locked."""

    def __init__(
        self,
        asking: Sequence[RunWrite],
        delivered: Mapping[RunId, int],
        found: Sequence[tuple[int, int]],
        stock: ExclusiveMessages,
    ) -> None:
        self.unmet: dict[RunId, frozenset[str]] = {}
        self._stock = stock
        self._moves = TransitionWriter()
        self._waits: list[bytes] = []
        self._letters: list[EventInboxRow] = []
        hits = self._found_by_step(asking, found)
        first = 0
        for bundle in asking:
            self._settle(bundle, delivered.get(bundle.run_id), hits[bundle.run_id], first)
            first += len(bundle.waits)

    @staticmethod
    def _found_by_step(asking: Sequence[RunWrite], found: Sequence[tuple[int, int]]) -> dict[RunId, dict[str, int]]:
        """Which event each step found: the lowest of those under its two keys."""
        asked = list(_all_waits(asking))
        hits: dict[RunId, dict[str, int]] = defaultdict(dict)
        for i, seq in sorted(found, reverse=True):
            bundle, wait = asked[i]
            hits[bundle.run_id][wait.step] = seq
        return hits

    def _settle(self, bundle: RunWrite, delivered: int | None, hits: dict[str, int], first: int) -> None:
        run_id, move = bundle.run_id, bundle.move
        assert isinstance(move, AckInbox | Suspend | None)  # who asks has one of these, or a start
        absorbed = move.absorbed if move else 0
        if delivered != absorbed:
            self.unmet[run_id] = frozenset(wait.step for wait in bundle.waits)
        else:
            self._take(bundle, hits, first)
            self._letters += _letters(bundle, absorbed, hits)
            self._waits += [wait_row(quote_text(run_id), wait) for wait in bundle.waits if wait.step not in hits]
            if hits:
                self.unmet[run_id] = frozenset(hits)
        if move:
            self._moves.add(quote_text(run_id), AckInbox(absorbed) if run_id in self.unmet else move)

    def _take(self, bundle: RunWrite, hits: dict[str, int], first: int) -> None:
        for i, wait in enumerate(bundle.waits, first):
            if wait.once and (seq := self._stock.take_lowest(i, hits.values())) is not None:
                hits[wait.step] = seq

    def statements(self, limit: int) -> Iterator[Statement]:
        """Letters before rows of keys: who prunes has locked the events when it comes to their keys."""
        yield from insert_event_items(self._letters)
        yield from self._stock.statements()
        yield from inserts(INSERT_WAIT, self._waits, limit, OR_KEEP)
        yield from self._moves.statements()


def _letters(bundle: RunWrite, delivered: int, hits: Mapping[str, int]) -> Iterator[EventInboxRow]:
    """Numbered in the order of the events; of two steps that found the same one the lower gets it."""
    single = {wait.step for wait in bundle.waits if wait.once}
    steps = {seq: step for step, seq in sorted(hits.items(), reverse=True)}
    for n, seq in enumerate(sorted(steps), delivered + 1):
        kind = EntryKind.MESSAGE if steps[seq] in single else EntryKind.EVENT
        yield EventInboxRow(bundle.run_id, n, steps[seq], seq, kind)
