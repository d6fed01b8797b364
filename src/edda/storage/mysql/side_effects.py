"""What goes in with the entries of runs, whatever becomes of their moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edda.core.model import RunWrite

from .outbox import INSERT_OUTGOING, outgoing_row
from .runs import INSERT_FACT, OR_REPLACE, fact_row
from .staged_events import INSERT_DISPATCH, dispatch_row
from .statement import Statement, inserts, join_values, quote_text

DELETE_DONE = b"""DELETE d FROM (%b) v
    STRAIGHT_JOIN edda_done d ON d.run_id = v.run_id AND d.gen = v.gen AND d.step = v.step"""


def insert_side_effects(batch: Sequence[RunWrite], limit: int) -> Iterator[Statement]:
    yield from inserts(INSERT_DISPATCH, [dispatch_row(each) for b in batch for each in b.dispatches], limit)
    yield from inserts(INSERT_OUTGOING, [outgoing_row(event) for b in batch for event in b.outgoing], limit)
    yield from inserts(INSERT_FACT, [fact_row(b.run_id, fact) for b in batch for fact in b.facts], limit, OR_REPLACE)
    yield from join_values(DELETE_DONE, [_done(bundle, step) for bundle in batch for step in bundle.recorded])


def _done(bundle: RunWrite, step: str) -> bytes:
    return b"SELECT %b AS run_id, %d AS gen, %b AS step" % (quote_text(bundle.run_id), bundle.gen, quote_text(step))
