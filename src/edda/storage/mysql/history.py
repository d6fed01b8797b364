"""The rows that only ever grow: what was delivered to runs, and how they ended."""

from __future__ import annotations

from collections.abc import Iterable

from edda.core.model import End, Entry, EntryKind

from .births import STATUSES
from .statement import binary, number, text

INSERT_HIST = (
    b"INSERT INTO edda_hist (run_id, gen, seq, epoch, kind, step, name, ok, at, attempt, n, event, input, value)"
    b" VALUES "
)
INSERT_RESULT = b"INSERT INTO edda_result (run_id, gen, status, value, ended_at) VALUES "

KINDS = {kind: text(kind) for kind in EntryKind}


def hist_rows(run_id: bytes, gen: int, epoch: int, entries: Iterable[Entry]) -> list[bytes]:
    return [
        b"(%b,%d,%d,%d,%b,%b,%b,%d,%d,%d,%b,%b,%b,%b)"
        % (
            run_id,
            gen,
            e.seq,
            epoch,
            KINDS[e.kind],
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
        for e in entries
    ]


def result_row(run_id: bytes, gen: int, end: End) -> bytes:
    return b"(%b,%d,%b,%b,%d)" % (run_id, gen, STATUSES[end.status], binary(end.value), end.at)
