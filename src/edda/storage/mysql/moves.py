"""What becomes of runs whose sched rows are locked."""

from __future__ import annotations

from collections.abc import Iterator

from edda.core.model import Absorb, End, Move, Release

from .births import STATUSES, reason
from .statement import Statement, joins, number

LOCK_SCHED = b"""SELECT run_id, delivered FROM edda_sched FORCE INDEX (PRIMARY)
    WHERE run_id IN (%b) ORDER BY run_id FOR UPDATE"""
# Joins with a derived table: a CASE over thousands of rows takes quadratic time, an UPDATE for each five times this.
# No expression reads a column that is set here: in a join the order of the assignments is not defined.
ABSORB = b"UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET s.absorbed = v.absorbed"
RELEASE = b"""UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET
    s.owner = NULL,
    s.ready_at = IF(s.delivered = v.absorbed, v.ready_at, 0),
    s.status = IF(s.delivered = v.absorbed, v.status, 'running'),
    s.reason = IF(s.delivered = v.absorbed, v.reason, NULL),
    s.attempts = IF(v.status = 'parked', s.attempts + 1, 0),
    s.absorbed = v.absorbed"""
# A join as well: with an IN list MariaDB scans a small table from end to end here, and ignores a FORCE INDEX.
END = b"DELETE s FROM (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id"
DROP_WAIT = b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_wait w ON w.run_id = v.run_id AND w.step = v.step"
END_WAITS = b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_wait w ON w.run_id = v.run_id"


class Moves:
    def __init__(self) -> None:
        self._absorbed: list[bytes] = []
        self._released: list[bytes] = []
        self._ended: list[bytes] = []

    def add(self, run_id: bytes, move: Move) -> None:
        match move:
            case Absorb(absorbed):
                self._absorbed.append(b"SELECT %b AS run_id, %d AS absorbed" % (run_id, absorbed))
            case Release(absorbed, ready_at, status):
                self._released.append(
                    b"SELECT %b AS run_id, %d AS absorbed, %b AS ready_at, %b AS status, %b AS reason"
                    % (run_id, absorbed, number(ready_at), STATUSES[status], reason(move))
                )
            case End():
                self._ended.append(b"SELECT %b AS run_id" % run_id)

    def statements(self) -> Iterator[Statement]:
        yield from joins(ABSORB, self._absorbed)
        yield from joins(RELEASE, self._released)
        yield from joins(END, self._ended)
        yield from joins(END_WAITS, self._ended)
