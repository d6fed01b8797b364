"""Letters from run to run, and what a letter does to a run that nobody has."""

from __future__ import annotations

from .clock import with_now

# A parked run and a suspect keep their time.
_WAKES = "s.owner IS NULL AND s.status <> 'parked' AND s.suspect_at IS NULL"
WAKE = """ready_at = CASE WHEN {wakes} THEN 0 ELSE s.ready_at END,
           status   = CASE WHEN {wakes} THEN 'running' ELSE s.status END,
           reason   = CASE WHEN {wakes} THEN NULL ELSE s.reason END""".replace("{wakes}", _WAKES)
# A cancel has a parked run tried at once, and ended if it cannot go on; one that undoes what it did stays as it is.
IS_PARKED = "s.owner IS NULL AND s.status = 'parked' AND NOT s.undoing AND NOT s.end_if_parked"


def wake(cancels: str = "true") -> str:
    """As `WAKE`, for a letter that is a cancel if the condition says so."""
    parked = f"{cancels} AND {IS_PARKED}"
    return f"end_if_parked = s.end_if_parked OR {parked},\n           " + WAKE.replace(
        "THEN 0 ELSE s.ready_at", f"OR {parked} THEN 0 ELSE s.ready_at"
    )


# Each target is in `locked` once, and stands ahead of its letters here: what it has had is counted on from there, and
# of the cancels only the first goes in. Put together and not joined, for a join may compare everything with everything.
POSTED = """posted AS MATERIALIZED (
    SELECT run_id, kind, step, value, had + row_number() OVER (PARTITION BY run_id ORDER BY place) AS n
      FROM (SELECT run_id, place, kind, step, value, first_value(had) OVER inbox AS had,
                   cancels AND bool_or(cancels) OVER (inbox ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS vain
              FROM (SELECT run_id, 0 AS place, NULL AS kind, NULL AS step, NULL::bytea AS value, delivered AS had,
                           cancelled AS cancels
                      FROM locked WHERE move = 'mail'
                    UNION ALL
                    SELECT run_id, place, kind, step, value, NULL, kind = 'cancel'
                      FROM {rows} u WHERE sender NOT IN (SELECT run_id FROM locked WHERE refused)) lines
            WINDOW inbox AS (PARTITION BY run_id ORDER BY place)) letters
     WHERE place > 0 AND had IS NOT NULL AND NOT coalesce(vain, false))"""
SENT = with_now("""sent AS (
    INSERT INTO edda_delivery (run_id, n, kind, step, at, value)
    SELECT run_id, n, kind, step, {now}, value FROM posted)""")
TOLD = """told AS (
    UPDATE edda_sched s
       SET delivered = p.delivered, cancelled = s.cancelled OR p.cancels,
           {wake}
      FROM (SELECT run_id, max(n) AS delivered, bool_or(kind = 'cancel') AS cancels FROM posted GROUP BY run_id) p
     WHERE s.run_id = p.run_id)""".replace("{wake}", wake("p.cancels"))
