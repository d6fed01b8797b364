"""A batch as SQL text: one pass over the bundles, then as few statements as there are tables to touch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from edda.core.model import Absorb, Bundle, End, EntryKind, Fence, Release, Start, WorkerId
from edda.core.states import RunStatus

from .session import BEGIN, COMMIT, EXPECT
from .statement import Statement, binary, bind, inserts, number, text

BUMP_FENCE = b"UPDATE edda_fence SET batch_no = batch_no + 1 WHERE worker = %b AND batch_no = %b AND moves = %b"
INSERT_RUN = b"INSERT INTO edda_run (id, gen, workflow, input, created_at, deadline) VALUES "
INSERT_SCHED = (
    b"INSERT INTO edda_sched (run_id, workflow, status, owner, epoch, gen, ready_at, absorbed, attempts, reason)"
    b" VALUES "
)
INSERT_HIST = (
    b"INSERT INTO edda_hist (run_id, gen, seq, epoch, kind, step, name, ok, at, attempt, n, input, value) VALUES "
)
INSERT_RESULT = b"INSERT INTO edda_result (run_id, gen, status, value, ended_at) VALUES "
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

_DERIVED_ROWS = 200
"""Rows of one derived table; its parse tree is one SELECT per row."""
_KINDS = {kind: text(kind) for kind in EntryKind}
_STATUSES = {status: text(status) for status in RunStatus}
_RUNNING = _STATUSES[RunStatus.RUNNING]


def compose(fence: Fence, batch: Sequence[Bundle], limit: int) -> Iterator[Statement]:
    yield bind(BEGIN)
    yield bind(BUMP_FENCE, fence.worker, fence.batch_no, fence.moves)
    yield bind(EXPECT, 1)
    yield from _Rows(fence.worker, batch).statements(limit)
    yield bind(COMMIT)


def run_row(start: Start, gen: int) -> bytes:
    return b"(%b,%d,%b,%b,%d,%b)" % (
        text(start.run_id),
        gen,
        text(start.workflow),
        binary(start.input),
        start.created_at,
        number(start.deadline),
    )


def ready_row(start: Start, now: int) -> bytes:
    """The sched row of a run that nobody owns yet."""
    ready_at = now if start.ready_at is None else start.ready_at
    return _sched_row(text(start.run_id), text(start.workflow), b"NULL", 0, 0, number(ready_at))


def _sched_row(
    run_id: bytes,
    workflow: bytes,
    owner: bytes,
    epoch: int,
    gen: int,
    ready_at: bytes,
    absorbed: int = 0,
    status: bytes = _RUNNING,
    attempts: int = 0,
    reason: bytes = b"NULL",
) -> bytes:
    return b"(%b,%b,%b,%b,%d,%d,%b,%d,%d,%b)" % (
        run_id,
        workflow,
        status,
        owner,
        epoch,
        gen,
        ready_at,
        absorbed,
        attempts,
        reason,
    )


class _Rows:
    """The rows of a batch, by table; sorted by run, which is the lock order."""

    def __init__(self, worker: WorkerId, batch: Sequence[Bundle]) -> None:
        self._worker = text(worker)
        self._runs: list[bytes] = []
        self._born: list[bytes] = []
        self._hist: list[bytes] = []
        self._results: list[bytes] = []
        self._touched: list[bytes] = []
        self._absorbed: list[bytes] = []
        self._released: list[bytes] = []
        self._ended: list[bytes] = []
        for bundle in sorted(batch, key=attrgetter("run_id")):
            self._add(bundle, text(bundle.run_id))

    def _add(self, bundle: Bundle, run_id: bytes) -> None:
        if bundle.entries:
            self._add_entries(bundle, run_id)
        if isinstance(bundle.move, End):
            end = bundle.move
            row = (run_id, bundle.gen, _STATUSES[end.status], binary(end.value), end.at)
            self._results.append(b"(%b,%d,%b,%b,%d)" % row)
        if bundle.start:
            self._runs.append(run_row(bundle.start, bundle.gen))
            if not isinstance(bundle.move, End):
                self._born.append(self._birth(bundle, bundle.start, run_id))
        elif bundle.move:
            self._touched.append(run_id)
            self._add_move(bundle.move, run_id)

    def _add_entries(self, bundle: Bundle, run_id: bytes) -> None:
        gen, epoch = bundle.gen, bundle.epoch
        self._hist += [
            b"(%b,%d,%d,%d,%b,%b,%b,%d,%d,%d,%b,%b,%b)"
            % (
                run_id,
                gen,
                e.seq,
                epoch,
                _KINDS[e.kind],
                text(e.step),
                text(e.name),
                e.ok,
                e.at,
                e.attempt,
                number(e.n),
                binary(e.input),
                binary(e.value),
            )
            for e in bundle.entries
        ]

    def _birth(self, bundle: Bundle, start: Start, run_id: bytes) -> bytes:
        """Start and move of one run in one batch are one row: the statements would not fold them."""
        workflow, epoch, gen = text(start.workflow), bundle.epoch, bundle.gen
        if isinstance(move := bundle.move, Release):
            reason = b"NULL" if move.reason is None else text(move.reason)
            rest = (move.absorbed, _STATUSES[move.status], int(move.status is RunStatus.PARKED), reason)
            return _sched_row(run_id, workflow, b"NULL", epoch, gen, number(move.ready_at), *rest)
        owner = self._worker if start.ready_at is None else b"NULL"
        absorbed = move.absorbed if isinstance(move, Absorb) else 0
        return _sched_row(run_id, workflow, owner, epoch, gen, number(start.ready_at), absorbed)

    def _add_move(self, move: Absorb | Release | End, run_id: bytes) -> None:
        match move:
            case Absorb(absorbed):
                self._absorbed.append(b"SELECT %b AS run_id, %d AS absorbed" % (run_id, absorbed))
            case Release(absorbed, ready_at, status, reason):
                why = b"NULL" if reason is None else text(reason)
                self._released.append(
                    b"SELECT %b AS run_id, %d AS absorbed, %b AS ready_at, %b AS status, %b AS reason"
                    % (run_id, absorbed, number(ready_at), _STATUSES[status], why)
                )
            case End():
                self._ended.append(b"SELECT %b AS run_id" % run_id)

    def statements(self, limit: int) -> Iterator[Statement]:
        yield from inserts(INSERT_RUN, self._runs, limit)
        yield from inserts(INSERT_SCHED, self._born, limit)
        if self._touched:
            yield Statement(LOCK_SCHED.decode(), LOCK_SCHED % b",".join(self._touched))
        yield from _joins(ABSORB, self._absorbed)
        yield from _joins(RELEASE, self._released)
        yield from _joins(END, self._ended)
        yield from inserts(INSERT_HIST, self._hist, limit)
        yield from inserts(INSERT_RESULT, self._results, limit)


def _joins(template: bytes, selects: Sequence[bytes]) -> Iterator[Statement]:
    for i in range(0, len(selects), _DERIVED_ROWS):
        derived = b" UNION ALL ".join(selects[i : i + _DERIVED_ROWS])
        yield Statement(template.decode(), template % derived)
