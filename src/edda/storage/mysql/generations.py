"""Runs that begin anew under their id."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from edda.core.model import Recur, RunWrite, Start

from .births import RUN_COLUMNS, run_row
from .history import INSERT_HIST, hist_rows
from .statement import Statement, bind, check_size, inserts, quote_text

COPY_RUN = (
    b"INSERT INTO edda_run " + RUN_COLUMNS + b" SELECT id, gen + 1, workflow, %b, %b, deadline, parent, parent_step,"
    b" depth FROM edda_run WHERE id = %b AND gen = %b"
)
INSERT_PAST = b"INSERT INTO edda_past (run_id, gen, ended_at) VALUES "


def next_row(start: Start, gen: int, move: Recur) -> bytes:
    return run_row(replace(start, input=move.input, created_at=move.at), gen + 1)


def old_generation_row(run_id: bytes, gen: int, move: Recur) -> bytes:
    return b"(%b,%d,%d)" % (run_id, gen, move.at)


def first_entry_row(run_id: bytes, bundle: RunWrite, move: Recur) -> list[bytes]:
    return hist_rows(run_id, bundle.gen + 1, bundle.epoch, [move.entry])


class GenerationWriter:
    """The next generation of runs whose sched rows are locked."""

    def __init__(self) -> None:
        self._runs: list[Statement] = []
        self._past: list[bytes] = []
        self._hist: list[bytes] = []

    def add(self, bundle: RunWrite, move: Recur) -> None:
        run_id = quote_text(bundle.run_id)
        # One by one: their inputs may be large.
        self._runs.append(bind(COPY_RUN, move.input, move.at, bundle.run_id, bundle.gen))
        self._past.append(old_generation_row(run_id, bundle.gen, move))
        self._hist += first_entry_row(run_id, bundle, move)

    def statements(self, limit: int) -> Iterator[Statement]:
        for statement in self._runs:
            check_size(statement.body, limit)
            yield statement
        yield from inserts(INSERT_PAST, self._past, limit)
        yield from inserts(INSERT_HIST, self._hist, limit)
