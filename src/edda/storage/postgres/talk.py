"""What a batch says besides: parts of its statement that belong to the entries, whatever becomes of the moves."""

from __future__ import annotations

from edda.core.model import OutboxEvent

from .births import Row
from .clock import with_now

RECORDED = """recorded AS (
    DELETE FROM edda_done d USING {rows} u, fence WHERE d.run_id = u.run_id AND d.gen = u.gen AND d.step = u.step)"""

DISPATCHED = """dispatched AS (
    INSERT INTO edda_dispatch (kind, body)
    SELECT u.kind, u.body FROM {rows} WITH ORDINALITY u (kind, body, place), fence ORDER BY u.place)"""

_OUTGOING = """
    INSERT INTO edda_outbox (id, order_key, type, source, body, run_id, created_at, due, attempts, state)
    SELECT u.id, u.order_key, u.type, u.source, u.body, u.run_id, u.created_at, 0, 0, 'pending'
      FROM {rows} WITH ORDINALITY u (id, order_key, type, source, body, run_id, created_at, place){fence}
     ORDER BY u.place"""
OUTGOING = f"outgoing AS ({_OUTGOING})".replace("{fence}", ", fence")
ENQUEUE = _OUTGOING.replace("{rows}", "unnest($1::edda_outgoing_row[])").replace("{fence}", "")

# Nobody else writes the facts of a run, so nobody waits here.
STATED = with_now("""stated AS (
    INSERT INTO edda_fact (run_id, name, value, at) SELECT u.run_id, u.name, u.value, {now} FROM {rows} u, fence
    ON CONFLICT (run_id, name) DO UPDATE SET value = excluded.value, at = excluded.at)""")


def outgoing_row(event: OutboxEvent) -> Row:
    """As `edda_outgoing_row`."""
    return (event.id, event.key, event.type, event.source, event.body, event.run_id, event.created_at)
