"""Runs that are started for anybody to claim."""

from __future__ import annotations

from typing import TypeAlias

from edda.core.model import Start

from .clock import with_now

Row: TypeAlias = tuple[object, ...]

LAST_EVENT = "(SELECT last_value FROM edda_event_seq)"
"""The number of the newest event."""

# The ids come sorted: two that start the same ones wait for each other, but never in a circle. An open run whose first
# generation was pruned is known by a later one alone, so it is looked for besides the constraint.
_BIRTHS = with_now("""wanted AS MATERIALIZED ({wanted}),
born AS (
    INSERT INTO edda_run (id, gen, workflow, input, created_at, deadline, parent, parent_step, depth)
    SELECT id, 0, workflow, input, created_at, deadline, parent, parent_step, depth FROM wanted w
     WHERE NOT EXISTS (SELECT FROM edda_run r WHERE r.id = w.id OFFSET 0)
    ON CONFLICT DO NOTHING RETURNING id),
started AS (
    INSERT INTO edda_sched (run_id, workflow, gen, epoch, status, ready_at, start_seq)
    SELECT id, workflow, 0, 0, 'running', coalesce(ready_at, {now}), {start_seq} FROM wanted JOIN born USING (id)
    RETURNING run_id)""")


def create_runs_sql(wanted: str, start_seq: str = LAST_EVENT) -> str:
    """The parts of a statement that start the runs it selects, each id once; `started` has those that are new."""
    return _BIRTHS.replace("{wanted}", wanted).replace("{start_seq}", start_seq)


def start_row(start: Start, place: int = 0) -> Row:
    """As `edda_start_row`."""
    return (
        place,
        start.run_id,
        start.workflow,
        start.input,
        start.created_at,
        start.ready_at,
        start.deadline,
        start.parent,
        start.parent_step,
        start.depth,
    )
