"""The rows of new runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edda.core.model import AckInbox, Recur, RunWrite, Start, Suspend
from edda.core.states import RunStatus

from .session import ASSERT_ROW_COUNT, assertion
from .statement import Statement, bind, inserts, int_or_null, quote_bytes, quote_text, split_rows, text_or_null

RUN_COLUMNS = b"(id, gen, workflow, input, created_at, deadline, parent, parent_step, depth)"
INSERT_RUN = b"INSERT INTO edda_run " + RUN_COLUMNS + b" VALUES "
FIND_EXISTING = b"SELECT DISTINCT id FROM edda_run WHERE id IN (%b)"
# Of any generation: the first ones of an open run may be pruned, and an INSERT would not meet the others.
COUNT_EXISTING = b"SELECT COUNT(*) INTO @edda_existing FROM edda_run WHERE id IN (%b)"
EXPECT_NONE = assertion(b"@edda_existing = 0")
# Not INSERT IGNORE: that would cut an id which is too long instead of refusing it.
IGNORE_DUPLICATE = b" ON DUPLICATE KEY UPDATE id = id"
INSERT_SCHED = (
    b"INSERT INTO edda_sched"
    b" (run_id, workflow, status, owner, epoch, gen, start_seq, ready_at, absorbed, attempts, reason) VALUES "
)
# Into a variable: a subquery in an INSERT locks what it reads, and would wait for whoever stores an event.
READ_NEWEST = b"SELECT COALESCE(MAX(seq), 0) INTO @edda_newest FROM edda_event"
NEWEST = b"@edda_newest"

STATUSES = {status: quote_text(status) for status in RunStatus}
_RUNNING = STATUSES[RunStatus.RUNNING]


def run_row(start: Start, gen: int) -> bytes:
    return b"(%b,%d,%b,%b,%d,%b,%b,%b,%d)" % (
        quote_text(start.run_id),
        gen,
        quote_text(start.workflow),
        quote_bytes(start.input),
        start.created_at,
        int_or_null(start.deadline),
        text_or_null(start.parent),
        text_or_null(start.parent_step),
        start.depth,
    )


def sched_row(bundle: RunWrite, start: Start, worker: bytes) -> bytes:
    """Start and move of one run in one batch are one row: the statements would not fold them."""
    workflow, epoch, gen = quote_text(start.workflow), bundle.epoch, bundle.gen + isinstance(bundle.move, Recur)
    run_id = quote_text(bundle.run_id)
    if isinstance(move := bundle.move, Suspend):
        rest = (move.absorbed, STATUSES[move.status], int(move.status is RunStatus.PARKED), text_or_null(move.reason))
        return _sched_row(run_id, workflow, b"NULL", epoch, gen, NEWEST, int_or_null(move.ready_at), *rest)
    owner = worker if start.ready_at is None else b"NULL"
    absorbed = move.absorbed if isinstance(move, AckInbox | Recur) else 0
    return _sched_row(run_id, workflow, owner, epoch, gen, NEWEST, int_or_null(start.ready_at), absorbed)


def insert_unowned(births: Sequence[tuple[Start, bytes]], now: bytes, limit: int) -> Iterator[Statement]:
    """Runs that nobody owns yet, each with its `start_seq`; misses its expectation if one is there already."""
    label = (INSERT_RUN + IGNORE_DUPLICATE).decode()
    for rows in split_rows([run_row(start, 0) for start, _ in births], limit - len(label)):
        yield Statement(label, INSERT_RUN + b",".join(rows) + IGNORE_DUPLICATE)
        yield bind(ASSERT_ROW_COUNT, len(rows))
    yield from inserts(INSERT_SCHED, [_ready_row(start, seq, now) for start, seq in births], limit)


def _ready_row(start: Start, start_seq: bytes, now: bytes) -> bytes:
    ready_at = now if start.ready_at is None else int_or_null(start.ready_at)
    return _sched_row(quote_text(start.run_id), quote_text(start.workflow), b"NULL", 0, 0, start_seq, ready_at)


def _sched_row(
    run_id: bytes,
    workflow: bytes,
    owner: bytes,
    epoch: int,
    gen: int,
    start_seq: bytes,
    ready_at: bytes,
    absorbed: int = 0,
    status: bytes = _RUNNING,
    attempts: int = 0,
    reason: bytes = b"NULL",
) -> bytes:
    return b"(%b,%b,%b,%b,%d,%d,%b,%b,%d,%d,%b)" % (
        run_id,
        workflow,
        status,
        owner,
        epoch,
        gen,
        start_seq,
        ready_at,
        absorbed,
        attempts,
        reason,
    )
