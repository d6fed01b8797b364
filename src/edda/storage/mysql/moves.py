"""What becomes of runs whose sched rows are locked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from edda.core.model import AckInbox, End, Recur, RunId, Suspend, Transition
from edda.core.states import RunStatus

from .births import STATUSES
from .clock import NOW
from .rows import run_id as id_of
from .session import Row, join_all_rows
from .statement import Statement, int_or_null, join_values, text_or_null

_IN_ORDER = b" FROM edda_sched FORCE INDEX (PRIMARY) WHERE run_id IN (%b) ORDER BY run_id FOR UPDATE"
LOCK_SCHED = b"SELECT run_id, delivered" + _IN_ORDER
LOCK_AND_LOOK = b"SELECT run_id, delivered, watchers, cancelled" + _IN_ORDER
# Joins with a derived table: a CASE over thousands of rows takes quadratic time, an UPDATE for each five times this.
# No expression reads a column that is set here: in a join the order of the assignments is not defined.
ABSORB = b"UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET s.absorbed = v.absorbed"
RELEASE = b"""UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET
    s.owner = NULL,
    s.ready_at = IF(s.delivered = v.absorbed, v.ready_at, 0),
    s.status = IF(s.delivered = v.absorbed, v.status, 'running'),
    s.reason = IF(s.delivered = v.absorbed, v.reason, NULL),
    s.attempts = 0, s.parked_at = NULL, s.end_if_parked = FALSE, s.alone = FALSE,
    s.deaths = 0, s.deaths_alone = 0, s.died_seq = NULL,
    s.absorbed = v.absorbed"""
# A parked run rests whatever is in its inbox: it could not read it.
PARK = (
    b"UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET"
    b" s.owner = NULL, s.ready_at = v.ready_at, s.status = v.status, s.reason = v.reason,"
    b" s.attempts = s.attempts + 1, s.alone = FALSE, s.absorbed = v.absorbed, s.parked_at = " + NOW
)
RECUR = b"""UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET
    s.gen = s.gen + 1, s.absorbed = v.absorbed, s.cancelled = FALSE, s.attempts = 0, s.undoing = FALSE,
    s.end_if_parked = FALSE, s.deaths = 0, s.deaths_alone = 0, s.died_seq = NULL"""
UNDO = b"UPDATE (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id SET s.undoing = TRUE"
# A join as well: with an IN list MariaDB scans a small table from end to end here, and ignores a FORCE INDEX.
END = b"DELETE s FROM (%b) v STRAIGHT_JOIN edda_sched s ON s.run_id = v.run_id AND s.watchers = v.watchers"
END_IF_SETTLED = END + b" AND s.delivered = v.settled"
DROP_WAIT = b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_wait w ON w.run_id = v.run_id AND w.step = v.step"
END_WAITS = b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_wait w ON w.run_id = v.run_id"
END_WATCHING = b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_watcher w ON w.run_id = v.run_id"


class LockedRun(NamedTuple):
    delivered: int
    watchers: int
    cancelled: int


def locked(rows: Iterable[Row]) -> dict[RunId, LockedRun]:
    return {id_of(run): LockedRun(*rest) for run, *rest in rows}


class TransitionWriter:
    def __init__(self) -> None:
        self._absorbed: list[bytes] = []
        self._released: list[bytes] = []
        self._parked: list[bytes] = []
        self._recurred: list[bytes] = []
        self._ended: list[bytes] = []
        self._settled: list[bytes] = []
        self._stopped: list[bytes] = []
        self._watched: list[bytes] = []

    def add(self, run_id: bytes, move: Transition) -> None:
        match move:
            case AckInbox(absorbed):
                self._absorbed.append(b"SELECT %b AS run_id, %d AS absorbed" % (run_id, absorbed))
            case Suspend(absorbed, ready_at, status):
                rows = self._parked if status is RunStatus.PARKED else self._released
                rows.append(
                    b"SELECT %b AS run_id, %d AS absorbed, %b AS ready_at, %b AS status, %b AS reason"
                    % (run_id, absorbed, int_or_null(ready_at), STATUSES[status], text_or_null(move.reason))
                )
            case Recur(absorbed):
                self._recurred.append(b"SELECT %b AS run_id, %d AS absorbed" % (run_id, absorbed))
                self._stopped.append(b"SELECT %b AS run_id" % run_id)
            case End(watchers=watchers, settled=settled):
                if settled is None:
                    self._ended.append(b"SELECT %b AS run_id, %d AS watchers" % (run_id, watchers))
                else:
                    row = (run_id, watchers, settled)
                    self._settled.append(b"SELECT %b AS run_id, %d AS watchers, %d AS settled" % row)
                self._stopped.append(b"SELECT %b AS run_id" % run_id)
                if watchers:
                    self._watched.append(b"SELECT %b AS run_id" % run_id)

    def statements(self) -> Iterator[Statement]:
        """Misses its expectation if others watch a run that ends than it knows of, or if it has got mail since."""
        yield from join_values(ABSORB, self._absorbed)
        yield from join_values(RELEASE, self._released)
        yield from join_values(PARK, self._parked)
        yield from join_values(RECUR, self._recurred)
        yield from join_all_rows(END, self._ended)
        yield from join_all_rows(END_IF_SETTLED, self._settled)
        yield from join_values(END_WAITS, self._stopped)
        yield from join_values(END_WATCHING, self._watched)
