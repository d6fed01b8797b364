"""A batch as SQL text: one pass over the bundles, then as few statements as there are tables to touch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from edda.core.model import Bundle, End, EntryKind, Fence, WorkerId

from .births import INSERT_RUN, INSERT_SCHED, READ_NEWEST, STATUSES, run_row, sched_row
from .buckets import of_keys, share
from .moves import DROP_WAIT, LOCK_SCHED, Moves
from .session import BEGIN, COMMIT, EXPECT
from .statement import Statement, binary, bind, inserts, joins, number, text
from .waits import INSERT_WAIT, OR_KEEP, asks, find_events, wait_key, wait_row

BUMP_FENCE = b"UPDATE edda_fence SET batch_no = batch_no + 1 WHERE worker = %b AND batch_no = %b AND moves = %b"
INSERT_HIST = (
    b"INSERT INTO edda_hist (run_id, gen, seq, epoch, kind, step, name, ok, at, attempt, n, event, input, value)"
    b" VALUES "
)
INSERT_RESULT = b"INSERT INTO edda_result (run_id, gen, status, value, ended_at) VALUES "
FREE_LETTER = b"""UPDATE (%b) v STRAIGHT_JOIN edda_delivery d ON d.run_id = v.run_id AND d.n = v.n
    SET d.event = NULL, d.kind = 'stray'"""

_KINDS = {kind: text(kind) for kind in EntryKind}


def compose(fence: Fence, batch: Sequence[Bundle], limit: int) -> Iterator[Statement]:
    """All of a batch in which nobody asks for an event; else all that does not depend on what is found, and the
    commit is still to come."""
    yield bind(BEGIN)
    if keys := [key for bundle in batch for wait in bundle.waits for key in (wait.key, wait.own_key)]:
        yield share(of_keys(keys))
    yield bind(BUMP_FENCE, fence.worker, fence.batch_no, fence.moves)
    yield bind(EXPECT, 1)
    yield from _Rows(fence.worker, batch).statements(limit)
    asking = [bundle for bundle in batch if asks(bundle)]
    yield from find_events(asking)
    if not asking:
        yield bind(COMMIT)


class _Rows:
    """The rows of a batch, by table; sorted by run, which is the lock order."""

    def __init__(self, worker: WorkerId, batch: Sequence[Bundle]) -> None:
        self._worker = text(worker)
        self._runs: list[bytes] = []
        self._born: list[bytes] = []
        self._waits: list[bytes] = []
        self._hist: list[bytes] = []
        self._results: list[bytes] = []
        self._touched: list[bytes] = []
        self._dropped: list[bytes] = []
        self._freed: list[bytes] = []
        self._moves = Moves()
        for bundle in sorted(batch, key=attrgetter("run_id")):
            self._add(bundle, text(bundle.run_id))

    def _add(self, bundle: Bundle, run_id: bytes) -> None:
        if bundle.entries:
            self._add_entries(bundle, run_id)
        if isinstance(bundle.move, End):
            end = bundle.move
            row = (run_id, bundle.gen, STATUSES[end.status], binary(end.value), end.at)
            self._results.append(b"(%b,%d,%b,%b,%d)" % row)
        if bundle.start:
            self._runs.append(run_row(bundle.start, bundle.gen))
            if not isinstance(bundle.move, End):
                self._born.append(sched_row(bundle, bundle.start, self._worker))
                self._waits += [wait_row(run_id, wait) for wait in bundle.waits]
        elif bundle.move:
            self._touch(bundle, run_id)

    def _add_entries(self, bundle: Bundle, run_id: bytes) -> None:
        gen, epoch = bundle.gen, bundle.epoch
        self._hist += [
            b"(%b,%d,%d,%d,%b,%b,%b,%d,%d,%d,%b,%b,%b,%b)"
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
                number(e.event),
                binary(e.input),
                binary(e.value),
            )
            for e in bundle.entries
        ]

    def _touch(self, bundle: Bundle, run_id: bytes) -> None:
        self._touched.append(run_id)
        self._dropped += [wait_key(run_id, step) for step in bundle.drops]
        self._freed += [b"SELECT %b AS run_id, %d AS n" % (run_id, n) for n in bundle.frees]
        if bundle.move and not asks(bundle):
            self._moves.add(run_id, bundle.move)

    def statements(self, limit: int) -> Iterator[Statement]:
        yield from inserts(INSERT_RUN, self._runs, limit)
        if self._born:
            yield bind(READ_NEWEST)
        yield from inserts(INSERT_SCHED, self._born, limit)
        if self._touched:
            yield Statement(LOCK_SCHED.decode(), LOCK_SCHED % b",".join(self._touched))
        yield from joins(DROP_WAIT, self._dropped)
        yield from joins(FREE_LETTER, self._freed)
        yield from inserts(INSERT_WAIT, self._waits, limit, OR_KEEP)
        yield from self._moves.statements()
        yield from inserts(INSERT_HIST, self._hist, limit)
        yield from inserts(INSERT_RESULT, self._results, limit)
