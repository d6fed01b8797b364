"""Messages in a post: each goes to one of those who wait under its key, and is kept only if nobody does.

While the locks of its keys are held nobody can begin to wait. So a message for which no wait was seen is kept for good,
and one whose wait went to another message, or away, is looked at again in the next round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache

from msgspec import Struct

from edda.core.model import EventKey, NewEvent

from .batch_sql import WAKE, Row, create_runs_sql, start_row
from .clock import with_now

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


# Numbers in the order of the post, but rows in an order of their own: two posts with the same events wait for each
# other, and never in a circle.
_STORE = """
WITH current AS MATERIALIZED (
         SELECT FROM (VALUES (1)) one WHERE NOT EXISTS (
             SELECT FROM unnest($1::text[], $2::int[]) p (type, version) LEFT JOIN edda_event_type t USING (type)
              WHERE coalesce(t.version, 0) <> p.version)),
     numbered AS MATERIALIZED (
         SELECT nextval('edda_event_seq') AS seq, u.* FROM current, unnest($3::edda_event_row[]) u),
     stored AS (
         INSERT INTO edda_event (seq, source, id, type, target, received_at, body)
         SELECT seq, source, id, type, target, (SELECT {now}), body FROM numbered
          ORDER BY source COLLATE "C", id COLLATE "C"
         ON CONFLICT (source, id) DO NOTHING RETURNING seq),
     fresh AS MATERIALIZED (SELECT n.place, n.seq, n.target FROM numbered n JOIN stored USING (seq)),
     keys AS MATERIALIZED (
         SELECT u.plain, u.kept, f.seq, f.target FROM unnest($4::edda_key_row[]) u JOIN fresh f USING (place)),
     kept AS (INSERT INTO edda_event_key (key, seq) SELECT kept, seq FROM keys ON CONFLICT DO NOTHING)"""

# Of two with one id the first counts.
_WANTED = """
    SELECT DISTINCT ON (u.id COLLATE "C") u.*, f.seq FROM unnest({rows}::edda_start_row[]) u JOIN fresh f USING (place)
     ORDER BY u.id COLLATE "C", place"""
_START = f", {create_runs_sql(_WANTED, start_seq='seq')}"

# Of one run the lowest number goes to the first step; if that leaves others, `more` asks for another round.
# Everybody locks runs sorted by id, and chosen ids before: all that were started are counted ahead of the locks.
_GIVE = """,
     found AS MATERIALIZED (
         SELECT w.run_id, w.step, k.seq{no_number} FROM keys k JOIN edda_wait w ON w.key = k.plain
          WHERE (k.target IS NULL OR k.target = w.run_id){undelivered}{messages}),
     picked AS MATERIALIZED (SELECT DISTINCT ON (run_id) * FROM found ORDER BY run_id, seq, {number}step),
     locked AS MATERIALIZED (
         SELECT p.* FROM (SELECT {started} AS runs) s CROSS JOIN picked p JOIN edda_sched USING (run_id)
          WHERE s.runs >= 0 ORDER BY run_id FOR UPDATE OF edda_sched),
     taken AS (
         DELETE FROM edda_wait w USING locked l WHERE w.run_id = l.run_id AND w.step = l.step RETURNING l.*),
     woken AS (
         UPDATE edda_sched s
            SET delivered = s.delivered + 1, {wake}
           FROM taken t WHERE s.run_id = t.run_id RETURNING s.run_id, s.delivered, t.step, t.seq{t.number}),
     letters AS (
         INSERT INTO edda_delivery (run_id, n, kind, step, at, value, event)
         SELECT run_id, delivered, {kind}, step, {now}, '', seq FROM woken){unwanted}
SELECT (SELECT count(*) FROM woken) + {started} > 0 AS woke,
       EXISTS (SELECT FROM locked)
       AND (SELECT count(*) FROM found{broadcast}) > (SELECT count(*) FROM picked{broadcast}) AS more{left_over}"""

_STORED = """,
       EXISTS (SELECT FROM current) AS current,
       ARRAY(SELECT place FROM fresh) AS places, ARRAY(SELECT seq FROM fresh) AS numbers"""

_KEYS = """
WITH keys AS MATERIALIZED (
         SELECT * FROM unnest($1::bytea[], $2::bigint[], $3::text[]) k (plain, seq, target))"""
_UNDELIVERED = """
            AND NOT EXISTS (
                SELECT FROM edda_delivery d WHERE d.event = k.seq AND d.run_id = w.run_id OFFSET 0)"""


def _give(started: str, undelivered: str, has_messages: bool) -> str:
    text = _GIVE
    for place, words in (WITH_MESSAGES if has_messages else WITHOUT_MESSAGES).items():
        text = text.replace(place, words)
    return text.replace("{started}", started).replace("{undelivered}", undelivered).replace("{wake}", WAKE)


@cache
def accept_text(starts: bool, has_messages: bool) -> str:
    text, started = _STORE, "0"
    if has_messages:
        text += NEW.replace("{rows}", "$5")
    if starts:
        text += _START.replace("{rows}", "$6" if has_messages else "$5")
        started = "(SELECT count(*) FROM started)"
    return with_now(text + _give(started, "", has_messages) + _STORED)


ACCEPT = accept_text(starts=False, has_messages=False)
ACCEPT_AND_START = accept_text(starts=True, has_messages=False)
GIVE_MORE = with_now(_KEYS + _give("0", _UNDELIVERED, has_messages=False))
GIVE_MORE_MESSAGES = with_now(_KEYS + LEFT + _give("0", _UNDELIVERED, has_messages=True))


class AcceptBatch(Struct, frozen=True):
    """The events of a post, each once, under their places in it."""

    events: Mapping[int, NewEvent]

    @classmethod
    def of(cls, post: Sequence[NewEvent]) -> AcceptBatch:
        first = {(incoming.event.source, incoming.event.id): place for place, incoming in reversed([*enumerate(post)])}
        return cls({place: post[place] for place in sorted(first.values())})

    @property
    def types(self) -> list[str]:
        return sorted({incoming.event.type for incoming in self.events.values()})

    @property
    def keys(self) -> set[bytes]:
        return {key for incoming in self.events.values() for pair in incoming.keys for key in (pair.plain, pair.kept)}

    def compose(self, versions: Mapping[str, int]) -> tuple[str, list[object]]:
        types, messages, starts = self.types, self._key_rows(once=True), self._start_rows()
        expected = [versions.get(type, 0) for type in types]
        values: list[object] = [types, expected, self._event_rows(), self._key_rows(once=False)]
        values += [rows for rows in (messages, starts) if rows]
        return accept_text(bool(starts), bool(messages)), values

    def compose_more(self, numbers: Mapping[int, int], left_over: Collection[int] = ()) -> tuple[str, list[object]]:
        """The next round, for the events that were new, now that they have numbers, and the messages that are left."""
        shared = [
            (key.plain, seq, self.events[place].event.target)
            for place, seq in numbers.items()
            for key in self.events[place].keys
            if not key.once
        ]
        if not left_over:
            return GIVE_MORE, _columns(shared, 3)
        messages = [
            (number, key.plain, key.kept, numbers[place], self.events[place].event.target)
            for number, (place, key) in enumerate(self._keys(once=True), 1)
            if number in left_over
        ]
        return GIVE_MORE_MESSAGES, [*_columns(shared, 3), *_columns(messages, 5)]

    def _event_rows(self) -> list[Row]:
        events = ((place, incoming.event) for place, incoming in self.events.items())
        return [(place, e.source, e.id, e.type, e.target, e.body) for place, e in events]

    def _key_rows(self, once: bool) -> list[Row]:
        return [(place, key.plain, key.kept) for place, key in self._keys(once)]

    def _keys(self, once: bool) -> Iterable[tuple[int, EventKey]]:
        return ((place, key) for place, incoming in self.events.items() for key in incoming.keys if key.once is once)

    def _start_rows(self) -> list[Row]:
        starts = ((place, start) for place, incoming in self.events.items() for start in incoming.starts)
        return [start_row(start, place) for place, start in starts]


def _columns(rows: Sequence[Row], width: int) -> list[object]:
    return [[row[column] for row in rows] for column in range(width)]
