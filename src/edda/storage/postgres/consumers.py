"""Messages in a post: each goes to one of those who wait under its key, and is kept only if nobody does.

While the locks of its keys are held nobody can begin to wait. So a message for which no wait was seen is kept for good,
and one whose wait went to another message, or away, is looked at again in the next round.
"""

from __future__ import annotations

MAX_PER_KEY = 50
"""Of one key, in one round: each looks at one wait more than the one before it."""

# `number` is that of the key in the post, `place` that of the message among those under the same key.
_PLACE = "row_number() OVER (PARTITION BY plain, target ORDER BY seq) AS place"
NEW = """,
     messages AS MATERIALIZED (
         SELECT u.number, u.plain, u.kept, f.seq, f.target, {place}
           FROM unnest({rows}::edda_key_row[]) WITH ORDINALITY u (of, plain, kept, number)
           JOIN fresh f ON f.place = u.of)""".replace("{place}", _PLACE)
LEFT = """,
     messages AS MATERIALIZED (
         SELECT m.*, {place}
           FROM unnest($4::bigint[], $5::bytea[], $6::bytea[], $7::bigint[], $8::text[]) m (number, plain, kept, seq,
                                                                                           target))""".replace(
    "{place}", _PLACE
)

# Each looks at the wait of its own place, or at the last there is; what is too much for this round looks at any, since
# it must not be kept as long as there is one. A wait without a run is nobody's.
_FOUND = """
         UNION ALL
         SELECT w.run_id, w.step, k.seq, k.number FROM messages k CROSS JOIN LATERAL (
             SELECT w.run_id, w.step FROM (
                 SELECT w.run_id, w.step, row_number() OVER () AS place FROM edda_wait w
                  WHERE w.key = k.plain AND (k.target IS NULL OR k.target = w.run_id)
                    AND EXISTS (SELECT FROM edda_sched s WHERE s.run_id = w.run_id OFFSET 0){undelivered}
                  LIMIT CASE WHEN k.place <= {at_once} THEN k.place ELSE 1 END) w
              ORDER BY w.place DESC LIMIT 1) w""".replace("{at_once}", str(MAX_PER_KEY))
_KEPT = """,
     unwanted AS (
         INSERT INTO edda_event_key (key, seq)
         SELECT kept, seq FROM messages WHERE number NOT IN (SELECT number FROM found WHERE number IS NOT NULL)
         ON CONFLICT DO NOTHING)"""
_LEFT_OVER = """,
       ARRAY(SELECT number FROM found WHERE number IS NOT NULL
             EXCEPT SELECT number FROM woken) AS left_over"""

WITHOUT_MESSAGES = {
    "{no_number}": "",
    "{messages}": "",
    "{broadcast}": "",
    "{number}": "",
    "{t.number}": "",
    "{kind}": "'event'",
    "{unwanted}": "",
    "{left_over}": "",
}
"""What the statement of a post says in these places if it has no messages."""
# A run that gets the event by another key as well leaves the message to somebody else.
WITH_MESSAGES = {
    "{no_number}": ", NULL::bigint AS number",
    "{messages}": _FOUND,
    "{broadcast}": " WHERE number IS NULL",
    "{number}": "number NULLS FIRST, ",
    "{t.number}": ", t.number",
    "{kind}": "CASE WHEN number IS NULL THEN 'event' ELSE 'message' END",
    "{unwanted}": _KEPT,
    "{left_over}": _LEFT_OVER,
}
