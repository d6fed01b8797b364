"""The rows that only ever grow: what was delivered to runs, and how they ended."""

from __future__ import annotations

from collections.abc import Iterable

from edda.core.model import End, Entry, EntryKind

from .births import STATUSES
from .statement import int_or_null, quote_bytes, quote_text

INSERT_HIST = (
    b"INSERT INTO edda_hist (run_id, gen, seq, epoch, kind, step, name, ok, at, attempt, n, event, input, value)"
    b" VALUES "
)
INSERT_RESULT = b"INSERT INTO edda_result (run_id, gen, status, value, ended_at) VALUES "

KINDS = {kind: quote_text(kind) for kind in EntryKind}


def hist_rows(run_id: bytes, gen: int, epoch: int, entries: Iterable[Entry]) -> list[bytes]:
    return [
        b"(%b,%d,%d,%d,%b,%b,%b,%d,%d,%d,%b,%b,%b,%b)"
        % (
            run_id,
            gen,
            e.seq,
            epoch,
            KINDS[e.kind],
            quote_text(e.step),
            quote_text(e.name),
            e.ok,
            e.at,
            e.attempt,
            int_or_null(e.n),
            int_or_null(e.event),
            quote_bytes(e.input),
            quote_bytes(e.value),
        )
        for e in entries
    ]


def result_row(run_id: bytes, gen: int, end: End) -> bytes:
    return b"(%b,%d,%b,%b,%d)" % (run_id, gen, STATUSES[end.status], quote_bytes(end.value), end.at)
