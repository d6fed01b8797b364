"""A batch as SQL text: one pass over the bundles, then as few statements as there are tables to touch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter

from msgspec.structs import replace

from edda.core.model import End, Fence, Recur, RunId, RunWrite, Start, WorkerId

from .batch_sql import (
    COUNT_EXISTING,
    DROP_WAIT,
    EXPECT_NONE,
    INSERT_HIST,
    INSERT_PAST,
    INSERT_RESULT,
    INSERT_RUN,
    INSERT_SCHED,
    LOCK_AND_LOOK,
    LOCK_SCHED,
    NEWEST,
    READ_NEWEST,
    UNDO,
    TransitionWriter,
    first_entry_row,
    hist_rows,
    insert_unowned,
    next_row,
    old_generation_row,
    result_row,
    run_row,
    sched_row,
)
from .clock import NOW
from .decisions import is_decided_later, needs_locked_rows
from .locks import lock_waits
from .session import ASSERT_ROW_COUNT, BEGIN, COMMIT
from .side_effects import insert_side_effects
from .statement import Statement, bind, inserts, join_values, quote_text
from .waits import INSERT_WAIT, OR_KEEP, find_events, registers_waits, wait_key, wait_row

# The count of claims is read without a lock: it only grows, and the claims that this worker knows of were acknowledged
# before, so less than that was lost by the database.
BUMP_FENCE = b"""UPDATE edda_fence SET batch_no = batch_no + 1, token = %b
    WHERE worker = %b AND batch_no = %b AND moves = %b AND token = %b
      AND EXISTS (SELECT 1 FROM edda_claim c WHERE c.worker = %b AND c.n >= %b)"""
FREE_LETTER = b"""UPDATE (%b) v STRAIGHT_JOIN edda_delivery d ON d.run_id = v.run_id AND d.n = v.n
    SET d.event = NULL, d.kind = 'stray'"""


def build_batch(
    fence: Fence, batch: Sequence[RunWrite], limit: int, token: int = 0, node: int | None = None
) -> Iterator[Statement]:
    """All of a batch in which nothing depends on what is found; else all that does not depend on it, and the commit is
    still to come. It hopes for children that are new and ends that know who watches: an expectation is missed if not.
    """
    yield from lock_and_fence(fence, batch, token, node)
    children = children_of(batch)
    if children:
        yield bind(COUNT_EXISTING, [child.run_id for child in children])
        yield bind(EXPECT_NONE)
    if any(map(needs_locked_rows, batch)):
        yield from build_undecided(fence.worker, batch, children, limit)
    else:
        yield from _Rows(fence.worker, batch, children).statements(limit)
        yield bind(COMMIT)


def lock_and_fence(fence: Fence, batch: Sequence[RunWrite], token: int, node: int | None) -> Iterator[Statement]:
    yield bind(BEGIN)
    if waits := [wait for bundle in batch for wait in bundle.waits]:
        # Who takes a message away must be alone with its key.
        single = [key for wait in waits if wait.once for key in (wait.key, wait.own_key)]
        yield from lock_waits([key for wait in waits for key in (wait.key, wait.own_key)], single, node)
    known = (fence.worker, fence.batch_no, fence.moves, fence.token, fence.worker, fence.claims)
    yield bind(BUMP_FENCE, token, *known)
    yield bind(ASSERT_ROW_COUNT, 1)


def build_undecided(
    worker: WorkerId, batch: Sequence[RunWrite], children: Sequence[Start], limit: int
) -> Iterator[Statement]:
    """All that does not depend on what is found, and the look that decides the rest."""
    yield from _Rows(worker, batch, children, is_judged=True).statements(limit)
    yield from find_events([bundle for bundle in batch if registers_waits(bundle)])


def children_of(batch: Sequence[RunWrite], existing: Collection[RunId] = ()) -> list[Start]:
    """The children to be stored, in lock order; of two with one id the first."""
    children = {child.run_id: child for bundle in reversed(batch) for child in reversed(bundle.children)}
    begun = {bundle.run_id for bundle in batch if bundle.start} if children else ()
    return [children[run] for run in sorted(children) if run not in begun and run not in existing]


class _Rows:
    """The rows of a batch, by table; sorted by run, which is the lock order."""

    def __init__(
        self, worker: WorkerId, batch: Sequence[RunWrite], children: Sequence[Start], *, is_judged: bool = False
    ) -> None:
        self._batch = batch
        self._worker = quote_text(worker)
        self._children = [(child, NEWEST) for child in children]
        self._is_judged = is_judged
        self._runs: list[bytes] = []
        self._born: list[bytes] = []
        self._past: list[bytes] = []
        self._waits: list[bytes] = []
        self._hist: list[bytes] = []
        self._results: list[bytes] = []
        self._touched: list[bytes] = []
        self._dropped: list[bytes] = []
        self._freed: list[bytes] = []
        self._undoing: list[bytes] = []
        self._moves = TransitionWriter()
        for bundle in sorted(batch, key=attrgetter("run_id")):
            self._add(bundle, quote_text(bundle.run_id))

    def _add(self, bundle: RunWrite, run_id: bytes) -> None:
        if bundle.entries:
            self._hist += hist_rows(run_id, bundle.gen, bundle.epoch, bundle.entries)
        if bundle.start:
            self._add_new_run(bundle, bundle.start, run_id)
        elif bundle.move:
            self._add_transition(bundle, run_id)
        if bundle.letters:
            self._touched += [quote_text(letter.run_id) for letter in bundle.letters]

    def _add_new_run(self, bundle: RunWrite, start: Start, run_id: bytes) -> None:
        self._runs.append(run_row(start, bundle.gen))
        match bundle.move:
            case End() as end:
                self._results.append(result_row(run_id, bundle.gen, end))
                return
            case Recur() as recur:
                self._runs.append(next_row(start, bundle.gen, recur))
                self._past.append(old_generation_row(run_id, bundle.gen, recur))
                self._hist += first_entry_row(run_id, bundle, recur)
            case _:
                self._add_compensating(bundle, run_id)
        if registers_waits(bundle):  # what it finds decides whether it is released
            self._born.append(sched_row(replace(bundle, move=None), start, self._worker))
            self._touched.append(run_id)
            return
        self._born.append(sched_row(bundle, start, self._worker))
        self._waits += [wait_row(run_id, wait) for wait in bundle.waits]

    def _add_transition(self, bundle: RunWrite, run_id: bytes) -> None:
        self._touched.append(run_id)
        self._dropped += [wait_key(run_id, step) for step in bundle.drops]
        self._freed += [b"SELECT %b AS run_id, %d AS n" % (run_id, n) for n in bundle.frees]
        self._add_compensating(bundle, run_id)
        if bundle.move is None or (self._is_judged and is_decided_later(bundle)):
            return
        if isinstance(bundle.move, End):
            self._results.append(result_row(run_id, bundle.gen, bundle.move))
        self._moves.add(run_id, bundle.move)

    def _add_compensating(self, bundle: RunWrite, run_id: bytes) -> None:
        if bundle.undoing:
            self._undoing.append(b"SELECT %b AS run_id" % run_id)

    def statements(self, limit: int) -> Iterator[Statement]:
        yield from inserts(INSERT_RUN, self._runs, limit)
        if self._born or self._children:
            yield bind(READ_NEWEST)
        yield from insert_unowned(self._children, NOW, limit)
        yield from inserts(INSERT_SCHED, self._born, limit)
        if self._touched:
            lock = LOCK_AND_LOOK if self._is_judged else LOCK_SCHED
            yield Statement(lock.decode(), lock % b",".join(self._touched))
        yield from join_values(UNDO, self._undoing)
        yield from join_values(DROP_WAIT, self._dropped)
        yield from join_values(FREE_LETTER, self._freed)
        yield from inserts(INSERT_WAIT, self._waits, limit, OR_KEEP)
        yield from self._moves.statements()
        yield from inserts(INSERT_PAST, self._past, limit)
        yield from inserts(INSERT_HIST, self._hist, limit)
        yield from inserts(INSERT_RESULT, self._results, limit)
        yield from insert_side_effects(self._batch, limit)
