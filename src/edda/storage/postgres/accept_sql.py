"""The SQL of accepting events.

An exclusive message goes to one of the waits under its key, and is stored under the key only if there is none. The
acceptor holds the locks of the keys, so no wait is registered meanwhile: a message without a wait is stored for good. A
message whose wait was matched by another message, or ended before its run was locked, is tried again in the next round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache

from msgspec import Struct

from edda.core.model import EventKey, NewEvent

from .batch_sql import WAKE, Row, create_runs_sql, start_row
from .connection import with_now

MAX_PER_KEY = 50
"""Messages under one key in one round: each reads one wait more than the one before it."""

# `number` is that of the key among all keys of the events, `place` that of the message among those under the same key.
_PLACE = "row_number() OVER (PARTITION BY wait_key, target ORDER BY seq) AS place"
_NEW_MESSAGES = """,
     messages AS MATERIALIZED (
         SELECT u.number, u.wait_key, u.stored_key, f.seq, f.target, {place}
           FROM unnest({rows}::edda_key_row[]) WITH ORDINALITY u (of, wait_key, stored_key, number)
           JOIN inserted f ON f.place = u.of)""".replace("{place}", _PLACE)
_LEFT_MESSAGES = """,
     messages AS MATERIALIZED (
         SELECT m.*, {place}
           FROM unnest($4::bigint[], $5::bytea[], $6::bytea[], $7::bigint[], $8::text[])
                m (number, wait_key, stored_key, seq, target))""".replace("{place}", _PLACE)

# The nth message of a key gets the nth wait, or the last one. A message beyond MAX_PER_KEY gets any wait: it must not
# be stored as long as there is one. A wait whose run is not open is left out.
_MESSAGE_CANDIDATES = """
         UNION ALL
         SELECT w.run_id, w.step, k.seq, k.number FROM messages k CROSS JOIN LATERAL (
             SELECT w.run_id, w.step FROM (
                 SELECT w.run_id, w.step, row_number() OVER () AS place FROM edda_wait w
                  WHERE w.key = k.wait_key AND (k.target IS NULL OR k.target = w.run_id)
                    AND EXISTS (SELECT FROM edda_open_run s WHERE s.run_id = w.run_id OFFSET 0){not_received}
                  LIMIT CASE WHEN k.place <= {max_per_key} THEN k.place ELSE 1 END) w
              ORDER BY w.place DESC LIMIT 1) w""".replace("{max_per_key}", str(MAX_PER_KEY))
_STORED_MESSAGES = """,
     stored_message AS (
         INSERT INTO edda_event_key (key, seq)
         SELECT stored_key, seq FROM messages
          WHERE number NOT IN (SELECT number FROM candidate WHERE number IS NOT NULL)
         ON CONFLICT DO NOTHING)"""
_LEFT_OVER = """,
       ARRAY(SELECT number FROM candidate WHERE number IS NOT NULL
             EXCEPT SELECT number FROM woken) AS left_over"""

_WITHOUT_MESSAGES = {
    "{no_number}": "",
    "{messages}": "",
    "{broadcast}": "",
    "{number}": "",
    "{t.number}": "",
    "{kind}": "'event'",
    "{stored_message}": "",
    "{left_over}": "",
}
"""The texts of the placeholders in a statement without exclusive messages."""
# NULLS FIRST: a run that gets the event by a shared key as well leaves the message to another run.
_WITH_MESSAGES = {
    "{no_number}": ", NULL::bigint AS number",
    "{messages}": _MESSAGE_CANDIDATES,
    "{broadcast}": " WHERE number IS NULL",
    "{number}": "number NULLS FIRST, ",
    "{t.number}": ", t.number",
    "{kind}": "CASE WHEN number IS NULL THEN 'event' ELSE 'message' END",
    "{stored_message}": _STORED_MESSAGES,
    "{left_over}": _LEFT_OVER,
}


# Events are numbered in the order of the request, but inserted sorted by source and id: two requests with the same
# events wait for each other instead of deadlocking.
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
     inserted AS MATERIALIZED (SELECT n.place, n.seq, n.target FROM numbered n JOIN stored USING (seq)),
     keys AS MATERIALIZED (
         SELECT u.wait_key, u.stored_key, f.seq, f.target
           FROM unnest($4::edda_key_row[]) u JOIN inserted f USING (place)),
     stored_key AS (INSERT INTO edda_event_key (key, seq) SELECT stored_key, seq FROM keys ON CONFLICT DO NOTHING)"""

# Of two starts with one id the first counts.
_NEW_RUN = """
    SELECT DISTINCT ON (u.id COLLATE "C") u.*, f.seq
      FROM unnest({rows}::edda_start_row[]) u JOIN inserted f USING (place)
     ORDER BY u.id COLLATE "C", place"""
_START = f", {create_runs_sql(_NEW_RUN, event_cursor='seq')}"

# The first step of a run gets the event with the lowest number; if the run has other candidates, `more` asks for
# another round. The count of started runs is read before the locks, because every statement inserts new ids before it
# locks runs, sorted by id.
_DELIVER = """,
     candidate AS MATERIALIZED (
         SELECT w.run_id, w.step, k.seq{no_number} FROM keys k JOIN edda_wait w ON w.key = k.wait_key
          WHERE (k.target IS NULL OR k.target = w.run_id){not_received}{messages}),
     chosen AS MATERIALIZED (SELECT DISTINCT ON (run_id) * FROM candidate ORDER BY run_id, seq, {number}step),
     locked AS MATERIALIZED (
         SELECT c.* FROM (SELECT {started} AS runs) s CROSS JOIN chosen c JOIN edda_open_run USING (run_id)
          WHERE s.runs >= 0 ORDER BY run_id FOR UPDATE OF edda_open_run),
     ended_wait AS (
         DELETE FROM edda_wait w USING locked l WHERE w.run_id = l.run_id AND w.step = l.step RETURNING l.*),
     woken AS (
         UPDATE edda_open_run s
            SET inbox_count = s.inbox_count + 1, {wake}
           FROM ended_wait t WHERE s.run_id = t.run_id RETURNING s.run_id, s.inbox_count, t.step, t.seq{t.number}),
     inbox_item AS (
         INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value, event)
         SELECT run_id, inbox_count, {kind}, step, {now}, '', seq FROM woken){stored_message}
SELECT (SELECT count(*) FROM woken) + {started} > 0 AS woke,
       EXISTS (SELECT FROM locked)
       AND (SELECT count(*) FROM candidate{broadcast}) > (SELECT count(*) FROM chosen{broadcast}) AS more{left_over}"""

_STORED = """,
       EXISTS (SELECT FROM current) AS current,
       ARRAY(SELECT place FROM inserted) AS places, ARRAY(SELECT seq FROM inserted) AS numbers"""

_KEYS = """
WITH keys AS MATERIALIZED (
         SELECT * FROM unnest($1::bytea[], $2::bigint[], $3::text[]) k (wait_key, seq, target))"""
_NOT_RECEIVED = """
            AND NOT EXISTS (
                SELECT FROM edda_inbox d WHERE d.event = k.seq AND d.run_id = w.run_id OFFSET 0)"""


def _deliver(started: str, not_received: str, has_messages: bool) -> str:
    text = _DELIVER
    for placeholder, replacement in (_WITH_MESSAGES if has_messages else _WITHOUT_MESSAGES).items():
        text = text.replace(placeholder, replacement)
    return text.replace("{started}", started).replace("{not_received}", not_received).replace("{wake}", WAKE)


@cache
def accept_text(starts: bool, has_messages: bool) -> str:
    text, started = _STORE, "0"
    if has_messages:
        text += _NEW_MESSAGES.replace("{rows}", "$5")
    if starts:
        text += _START.replace("{rows}", "$6" if has_messages else "$5")
        started = "(SELECT count(*) FROM inserted_open_run)"
    return with_now(text + _deliver(started, "", has_messages) + _STORED)


ACCEPT = accept_text(starts=False, has_messages=False)
ACCEPT_AND_START = accept_text(starts=True, has_messages=False)
DELIVER_MORE = with_now(_KEYS + _deliver("0", _NOT_RECEIVED, has_messages=False))
DELIVER_MORE_MESSAGES = with_now(_KEYS + _LEFT_MESSAGES + _deliver("0", _NOT_RECEIVED, has_messages=True))


class AcceptBatch(Struct, frozen=True):
    """The events of one request, each once, by their places in it."""

    events: Mapping[int, NewEvent]

    @classmethod
    def of(cls, events: Sequence[NewEvent]) -> AcceptBatch:
        first = {(new.event.source, new.event.id): place for place, new in reversed([*enumerate(events)])}
        return cls({place: events[place] for place in sorted(first.values())})

    @property
    def types(self) -> list[str]:
        return sorted({new.event.type for new in self.events.values()})

    @property
    def keys(self) -> set[bytes]:
        return {key for new in self.events.values() for pair in new.keys for key in (pair.wait_key, pair.stored_key)}

    def compose(self, versions: Mapping[str, int]) -> tuple[str, list[object]]:
        types = self.types
        expected = [versions.get(type, 0) for type in types]
        events = ((place, new.event) for place, new in self.events.items())
        rows = [(place, e.source, e.id, e.type, e.target, e.body) for place, e in events]
        keys, messages = (
            [(place, key.wait_key, key.stored_key) for place, key in self._keys(exclusive)]
            for exclusive in (False, True)
        )
        starts = [start_row(start, place) for place, new in self.events.items() for start in new.starts]
        values: list[object] = [types, expected, rows, keys]
        values += [more for more in (messages, starts) if more]
        return accept_text(bool(starts), bool(messages)), values

    def compose_more(self, numbers: Mapping[int, int], left_over: Collection[int] = ()) -> tuple[str, list[object]]:
        """The next round, for the events that were new, with their numbers, and the messages that are left over."""
        shared = [
            (key.wait_key, seq, self.events[place].event.target)
            for place, seq in numbers.items()
            for key in self.events[place].keys
            if not key.exclusive
        ]
        if not left_over:
            return DELIVER_MORE, _columns(shared, 3)
        messages = [
            (number, key.wait_key, key.stored_key, numbers[place], self.events[place].event.target)
            for number, (place, key) in enumerate(self._keys(exclusive=True), 1)
            if number in left_over
        ]
        return DELIVER_MORE_MESSAGES, [*_columns(shared, 3), *_columns(messages, 5)]

    def _keys(self, exclusive: bool) -> Iterable[tuple[int, EventKey]]:
        return ((place, key) for place, new in self.events.items() for key in new.keys if key.exclusive is exclusive)


def _columns(rows: Sequence[Row], width: int) -> list[object]:
    return [[row[column] for row in rows] for column in range(width)]
