"""Messages that only one run gets, and that nobody has got yet: whoever asks takes the row of the key away."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator

from edda.core.model import RunId, Wait

from .session import Row, join_all_rows
from .statement import Statement, quote_bytes, quote_text

# Not what this run has got by another key. A look-up for each, as for events.
FIND_MESSAGE = b"""(SELECT %d AS i, k.`key`, k.seq FROM edda_event_key k FORCE INDEX (PRIMARY)
    LEFT JOIN edda_delivery d ON d.event = k.seq AND d.run_id = %b
    WHERE k.`key` = %b AND d.run_id IS NULL ORDER BY k.seq LIMIT %d)"""
TAKE = b"""DELETE k FROM (%b) v STRAIGHT_JOIN edda_event_key k ON k.`key` = v.`key` AND k.seq = v.seq"""

_BRANCHES = 100


def find_exclusive_messages(asked: Iterable[tuple[int, RunId, Wait, int]]) -> Iterator[Statement]:
    """The lowest numbers for each wait, with its position: enough of them, whatever those before it take and whatever
    so many other waits of its own run have found."""
    before = Counter[bytes]()
    branches = []
    for i, run_id, wait, others in asked:
        for key in (wait.key, wait.own_key):
            before[key] += 1
            branches.append(FIND_MESSAGE % (i, quote_text(run_id), quote_bytes(key), before[key] + others))
    for first in range(0, len(branches), _BRANCHES):
        yield Statement(FIND_MESSAGE.decode(), b" UNION ALL ".join(branches[first : first + _BRANCHES]))


class ExclusiveMessages:
    """What was found under the locks of its keys, and how much of it is still there."""

    def __init__(self, found: Iterable[Row]) -> None:
        self._rows: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for i, key, seq in found:
            self._rows[i].append((seq, key))
        self._taken: set[tuple[int, bytes]] = set()

    def take_lowest(self, i: int, had: Collection[int]) -> int | None:
        """The lowest number for the wait at this position that nobody has taken, nor its run found by another."""
        left = [row for row in self._rows[i] if row not in self._taken and row[0] not in had]
        if not left:
            return None
        seq, _ = min(left)
        self._taken.update(row for row in left if row[0] == seq)
        return seq

    def statements(self) -> Iterator[Statement]:
        """Misses its expectation if a row is gone."""
        rows = [b"SELECT %b AS `key`, %d AS seq" % (quote_bytes(key), seq) for seq, key in sorted(self._taken)]
        yield from join_all_rows(TAKE, rows)
