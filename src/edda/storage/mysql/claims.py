"""Which events for others are due, page by page, and none behind one of its key that is not.

Every bound is written out, as for events: of each row, "an earlier one that is not due" would be looked for in all of
its key. These are plain reads under the lock of the outbox: whoever is about to commit a new event is not waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from .buckets import OUTBOX, lock_exclusive
from .clock import NOW, READ_CLOCK
from .session import BEGIN, Row, Session
from .statement import Statement, bind, literal, quote_bytes

# In two parts: all that nobody has tried yet are due at one and the same time, so they are read in order and no further
# than needed, however many there are. The others are sorted.
_PAGE = b"""(SELECT seq, order_key FROM edda_outbox FORCE INDEX (edda_outbox_due)
    WHERE state = 'pending' AND %b AND seq > %%d%%b ORDER BY seq LIMIT %%d)"""
FIND_PAGE = (
    b" UNION ALL ".join([_PAGE % b"due = 0", _PAGE % (b"due <> 0 AND due <= " + NOW)]) + b" ORDER BY seq LIMIT %d"
)
NOT_KEYS = b" AND order_key NOT IN (%b)"
FIND_OBSTACLE = b"""(SELECT order_key, seq FROM edda_outbox FORCE INDEX (edda_outbox_key)
    WHERE order_key = %b AND state = 'pending' AND seq < %d AND due > %d ORDER BY seq LIMIT 1)"""

_BRANCHES = 100


async def find_due_outbox(session: Session, limit: int) -> tuple[int, list[int]]:
    """The time, read before all else, and the numbers; the lock is held until the commit."""
    *_, clock, reply = await session.send(
        bind(BEGIN), lock_exclusive([OUTBOX]), bind(READ_CLOCK), find_due_page(0, (), limit)
    )
    now, page = int(clock.rows[0][0]), reply.rows
    due: list[int] = []
    behind: set[bytes] = set()
    while page:
        obstacles = await _find_obstacles(session, page, now)
        due += [seq for seq, key in page if seq < obstacles.get(key, seq + 1)]
        behind.update(obstacles)  # all that is left of their keys is behind them
        if len(page) < limit or len(due) >= limit:
            break
        (reply,) = await session.send(find_due_page(page[-1][0], behind, limit))
        page = reply.rows
    return now, due[:limit]


def find_due_page(after: int, behind: Collection[bytes], limit: int) -> Statement:
    """The next that are due, whatever is before them, without those of some keys."""
    part = (after, NOT_KEYS % literal(sorted(behind)) if behind else b"", limit)
    return Statement(FIND_PAGE.decode(), FIND_PAGE % (*part, *part, limit))


async def _find_obstacles(session: Session, page: Sequence[Row], now: int) -> dict[bytes, int]:
    """For each key of a page the first that is not due, if there is one before the last of the page."""
    replies = await session.send(*find_blocking({key: seq for seq, key in page}, now))
    return {key: seq for reply in replies for key, seq in reply.rows}


def find_blocking(last: Mapping[bytes, int], now: int) -> Iterator[Statement]:
    branches = [FIND_OBSTACLE % (quote_bytes(key), seq, now) for key, seq in last.items()]
    for i in range(0, len(branches), _BRANCHES):
        yield Statement(FIND_OBSTACLE.decode(), b" UNION ALL ".join(branches[i : i + _BRANCHES]))
