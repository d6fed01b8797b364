"""A batch as one statement: the fence first, and everything else joined to it.

The text holds only the sections that a batch needs, for every part of a statement costs time even when
it does nothing. Parts of one statement do not see each other's rows, so a run that starts and waits or
ends in the same batch is folded into one row here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

from msgspec import Struct, field

from edda.core.model import Absorb, Bundle, End, Move, Release, Start, WorkerId
from edda.core.states import RunStatus

Row: TypeAlias = tuple[object, ...]


class Section(Struct, frozen=True):
    text: str
    row: str = ""
    """The type of its rows. They come in as one array of rows: an array per column costs the driver twice the time."""


# Only a row that is updated or locked is read afresh after a wait, so all that must be fresh is in this one row.
FENCE = """WITH fence AS (
    UPDATE edda_fence SET batch_no = batch_no + 1
     WHERE worker = $1 AND batch_no = $2 AND moves = $3 RETURNING 1)"""

# One row of history alone, the common case of a quiet system: no arrays.
SINGLE = (
    FENCE
    + """
INSERT INTO edda_hist (run_id, gen, epoch, seq, kind, step, name, ok, at, attempt, n, input, value)
SELECT $4::text, $5::int, $6::int, $7::int, $8::text, $9::text, $10::text, $11::boolean, $12::bigint, $13::int,
       $14::int, $15::bytea, $16::bytea
  FROM fence RETURNING NULL::text"""
)

_SECTIONS = {
    "run": Section(
        """run AS (
    INSERT INTO edda_run (id, gen, workflow, input, created_at, deadline) SELECT u.* FROM {rows} u, fence)""",
        "edda_run_row",
    ),
    "sched": Section(
        """sched AS (
    INSERT INTO edda_sched (run_id, workflow, gen, epoch, owner, status, reason, ready_at, absorbed, attempts)
    SELECT u.* FROM {rows} u, fence)""",
        "edda_sched_row",
    ),
    "hist": Section(
        """hist AS (
    INSERT INTO edda_hist (run_id, gen, epoch, seq, kind, step, name, ok, at, attempt, n, input, value)
    SELECT u.* FROM {rows} u, fence)""",
        "edda_hist_row",
    ),
    # Locked in the order everybody locks runs in, else we deadlock with those who deliver mail.
    "locked": Section(
        """locked AS MATERIALIZED (
    SELECT u.*, s.delivered
      FROM fence, {rows} u JOIN edda_sched s USING (run_id)
     ORDER BY s.run_id FOR UPDATE OF s)""",
        "edda_move_row",
    ),
    "absorbed": Section(
        """absorbed AS (
    UPDATE edda_sched s SET absorbed = l.absorbed FROM locked l WHERE s.run_id = l.run_id AND l.move = 'absorb')"""
    ),
    # Mail that came in meanwhile makes the run ready at once.
    "released": Section(
        """released AS (
    UPDATE edda_sched s
       SET absorbed = l.absorbed, owner = NULL,
           ready_at = CASE WHEN l.delivered = l.absorbed THEN l.ready_at ELSE 0 END,
           status   = CASE WHEN l.delivered = l.absorbed THEN l.status ELSE 'running' END,
           reason   = CASE WHEN l.delivered = l.absorbed THEN l.reason END,
           attempts = CASE WHEN l.status = 'parked' THEN s.attempts + 1 ELSE 0 END
      FROM locked l WHERE s.run_id = l.run_id AND l.move = 'release'
    RETURNING s.run_id, l.delivered <> l.absorbed AS has_mail)"""
    ),
    "gone": Section(
        """gone AS (
    DELETE FROM edda_sched s USING locked l WHERE s.run_id = l.run_id AND l.move = 'end')"""
    ),
    "result": Section(
        """result AS (
    INSERT INTO edda_result (run_id, gen, status, value, ended_at) SELECT u.* FROM {rows} u, fence)""",
        "edda_result_row",
    ),
}

_ANSWER = """
SELECT NULL::text AS run_id FROM fence"""
_ANSWER_WITH_MAIL = """
SELECT NULL::text AS run_id FROM fence UNION ALL SELECT run_id FROM released WHERE has_mail"""


class _Rows(Struct):
    """The rows of each section."""

    run: list[Row] = field(default_factory=list)
    sched: list[Row] = field(default_factory=list)
    hist: list[Row] = field(default_factory=list)
    locked: list[Row] = field(default_factory=list)
    result: list[Row] = field(default_factory=list)
    moves: set[str] = field(default_factory=set)
    """The sections without rows of their own that follow from what is locked."""

    def add(self, bundle: Bundle, worker: WorkerId) -> None:
        run_id, gen, epoch, move = bundle.run_id, bundle.gen, bundle.epoch, bundle.move
        for e in bundle.entries:
            self.hist.append(
                (run_id, gen, epoch, e.seq, e.kind, e.step, e.name, e.ok, e.at, e.attempt, e.n, e.input, e.value)
            )
        if isinstance(move, End):
            self.result.append((run_id, gen, move.status, move.value, move.at))
        if bundle.start is not None:
            self._add_start(bundle, bundle.start, worker)
        elif move is not None:
            self._add_move(bundle, move)

    def _add_start(self, bundle: Bundle, start: Start, worker: WorkerId) -> None:
        self.run.append((start.run_id, bundle.gen, start.workflow, start.input, start.created_at, start.deadline))
        head = (start.run_id, start.workflow, bundle.gen, bundle.epoch)
        match bundle.move:
            case End():
                pass  # over before anybody could see it open
            case Release(absorbed, ready_at, status, reason):
                self.sched.append((*head, None, status, reason, ready_at, absorbed, int(status is RunStatus.PARKED)))
            case move:
                owner = worker if start.ready_at is None else None
                absorbed = move.absorbed if move is not None else 0
                self.sched.append((*head, owner, RunStatus.RUNNING, None, start.ready_at, absorbed, 0))

    def _add_move(self, bundle: Bundle, move: Move) -> None:
        match move:
            case Absorb(absorbed):
                self.locked.append((bundle.run_id, "absorb", absorbed, None, None, None))
                self.moves.add("absorbed")
            case Release(absorbed, ready_at, status, reason):
                self.locked.append((bundle.run_id, "release", absorbed, ready_at, status, reason))
                self.moves.add("released")
            case End():
                self.locked.append((bundle.run_id, "end", None, None, None, None))
                self.moves.add("gone")


def compose(worker: WorkerId, batch: Sequence[Bundle]) -> tuple[str, list[object]]:
    """The statement for this batch and its values, behind $1 to $3 of the fence."""
    rows = _Rows()
    for bundle in batch:
        rows.add(bundle, worker)
    filled = {"run": rows.run, "sched": rows.sched, "hist": rows.hist, "locked": rows.locked, "result": rows.result}
    names = tuple(name for name in _SECTIONS if filled.get(name) or name in rows.moves)
    if names == ("hist",) and len(rows.hist) == 1:
        return SINGLE, list(rows.hist[0])
    values: list[object] = [filled[name] for name in names if name in filled]
    return text(names), values


@cache
def text(names: tuple[str, ...]) -> str:
    parts, taken = [FENCE], 3
    for name in names:
        section = _SECTIONS[name]
        if section.row:
            taken += 1
        parts.append(section.text.replace("{rows}", f"unnest(${taken}::{section.row}[])"))
    return ",\n".join(parts) + (_ANSWER_WITH_MAIL if "released" in names else _ANSWER)
