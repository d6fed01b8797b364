"""Waits that look for what is there already: the next event, or a message that goes to one run only.

Whoever takes a message deletes the row of its key. Nobody else can take it meanwhile, and no other can come: the locks
of the keys are held alone.
"""

from __future__ import annotations

# OFFSET keeps the planner from reading all letters at once.
_HAD = "EXISTS (SELECT FROM edda_delivery d WHERE d.event = k.seq AND d.run_id = a.run_id OFFSET 0)"

# The first event under a key that the run has not had.
_FIRST = """(
           SELECT k.seq FROM edda_event_key k
            WHERE k.key = a.{column} AND k.seq > a.since AND NOT {had}
            ORDER BY k.seq LIMIT 1)""".replace("{had}", _HAD)


def first_event_sql(column: str) -> str:
    return _FIRST.replace("{column}", column)


# Of several who ask for the messages under one key each looks at the row of its own place.
_NTH = """(
           SELECT k.seq FROM (
                  SELECT seq FROM edda_event_key WHERE key = a.key ORDER BY seq OFFSET a.place - 1 LIMIT 1) k
            WHERE NOT {had})""".replace("{had}", _HAD)

# Who has lost its message to another, or passed over one that it had by another key, is registered only if nothing is
# left for it; else it asks again.
_LEFT = """EXISTS (
           SELECT FROM edda_event_key k
            WHERE k.key IN (a.key, a.own_key) AND NOT {had} AND (k.key, k.seq) NOT IN (
                  SELECT r.key, r.candidate FROM ranked r WHERE r.won AND r.once))""".replace("{had}", _HAD)

# Of two waits that found the same the first gets it, and an event is better left to the one who takes it from nobody.
FIND_EXCLUSIVE = (
    """sought AS MATERIALIZED (
    SELECT a.*, CASE WHEN a.step IS NOT NULL AND a.delivered = a.absorbed THEN least(
           CASE WHEN a.place > 1 THEN {nth} ELSE {key} END, CASE WHEN a.own_key <> a.key THEN {own_key} END)
           END AS candidate
      FROM (SELECT asked.*, CASE WHEN once AND delivered = absorbed THEN row_number() OVER (
                   PARTITION BY key, once, delivered = absorbed ORDER BY run_id, step) ELSE 1 END AS place
              FROM asked) a),
ranked AS MATERIALIZED (
    SELECT s.*, candidate IS NOT NULL
                AND row_number() OVER (PARTITION BY run_id, candidate ORDER BY once, step COLLATE "C") = 1
                AND (NOT once OR row_number() OVER (PARTITION BY once, key, candidate ORDER BY run_id, step) = 1) AS won
      FROM sought s),
found AS MATERIALIZED (
    SELECT a.*, CASE WHEN won THEN candidate END AS event,
           step IS NOT NULL AND (
           delivered <> absorbed OR won OR CASE WHEN once THEN {left} ELSE candidate IS NOT NULL END) AS unmet
      FROM ranked a)""".replace("{nth}", _NTH)
    .replace("{key}", first_event_sql("key"))
    .replace("{own_key}", first_event_sql("own_key"))
    .replace("{left}", _LEFT)
)
TAKE_EXCLUSIVE = """taken AS (
    DELETE FROM edda_event_key k USING found f
     WHERE f.once AND f.event IS NOT NULL AND k.key IN (f.key, f.own_key) AND k.seq = f.event)"""
