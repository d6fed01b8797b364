"""The SQL of one batch: one common table expression for each kind of row."""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

from msgspec import Struct

from edda.core.model import OutboxEvent, Start

from .connection import with_now

Row: TypeAlias = tuple[object, ...]

LAST_EVENT = "(SELECT last_value FROM edda_event_seq)"
"""The number of the newest event."""

# The ids come sorted: two statements that start the same runs wait for each other instead of deadlocking. NOT EXISTS
# besides ON CONFLICT: of an open run whose first generation was pruned only a later generation has a row.
_CREATE_RUNS = with_now("""new_run AS MATERIALIZED ({new_run}),
inserted_run AS (
    INSERT INTO edda_run (id, generation, workflow, input, created_at, deadline, parent, parent_step, depth)
    SELECT id, 0, workflow, input, created_at, deadline, parent, parent_step, depth FROM new_run n
     WHERE NOT EXISTS (SELECT FROM edda_run r WHERE r.id = n.id OFFSET 0)
    ON CONFLICT DO NOTHING RETURNING id),
inserted_open_run AS (
    INSERT INTO edda_open_run (run_id, workflow, generation, epoch, status, ready_at, event_cursor)
    SELECT id, workflow, 0, 0, 'running', coalesce(ready_at, {now}), {event_cursor}
      FROM new_run JOIN inserted_run USING (id)
    RETURNING run_id)""")


def create_runs_sql(new_run: str, event_cursor: str = LAST_EVENT) -> str:
    """CTEs that start the runs which `new_run` selects, each id once; `inserted_open_run` has those that did not
    exist."""
    return _CREATE_RUNS.replace("{new_run}", new_run).replace("{event_cursor}", event_cursor)


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


# A parked run and a suspect keep their time.
_WAKES = "s.owner IS NULL AND s.status <> 'parked' AND s.suspect_at IS NULL"
WAKE = """ready_at = CASE WHEN {wakes} THEN 0 ELSE s.ready_at END,
           status   = CASE WHEN {wakes} THEN 'running' ELSE s.status END,
           reason   = CASE WHEN {wakes} THEN NULL ELSE s.reason END""".replace("{wakes}", _WAKES)
# A cancel makes a parked run due at once, and its owner ends it if it still cannot be replayed. A run that compensates
# stays as it is.
IS_PARKED = "s.owner IS NULL AND s.status = 'parked' AND NOT s.compensating AND NOT s.end_if_parked"


def wake(cancels: str = "true") -> str:
    """As `WAKE`, for an inbox item that is a cancel if the condition holds."""
    parked = f"{cancels} AND {IS_PARKED}"
    return f"end_if_parked = s.end_if_parked OR {parked},\n           " + WAKE.replace(
        "THEN 0 ELSE s.ready_at", f"OR {parked} THEN 0 ELSE s.ready_at"
    )


# Each target is in `locked` once, with place 0 before its signals: their inbox numbers are counted on from its
# inbox_count, and of several cancels only the first is inserted. UNION ALL and window functions instead of a join,
# because a join of two CTEs may compare every row with every row.
_SIGNAL = """signal AS MATERIALIZED (
    SELECT run_id, kind, step, value,
           inbox_count + row_number() OVER (PARTITION BY run_id ORDER BY place) AS inbox_no
      FROM (SELECT run_id, place, kind, step, value, first_value(inbox_count) OVER inbox AS inbox_count,
                   cancels AND bool_or(cancels) OVER (
                       inbox ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS is_repeated_cancel
              FROM (SELECT run_id, 0 AS place, NULL AS kind, NULL AS step, NULL::bytea AS value, inbox_count,
                           cancelled AS cancels
                      FROM locked WHERE transition = 'signal'
                    UNION ALL
                    SELECT run_id, place, kind, step, value, NULL, kind = 'cancel'
                      FROM {rows} u WHERE sender NOT IN (SELECT run_id FROM locked WHERE refused)) both_kinds
            WINDOW inbox AS (PARTITION BY run_id ORDER BY place)) numbered
     WHERE place > 0 AND inbox_count IS NOT NULL AND NOT coalesce(is_repeated_cancel, false))"""
_INSERTED_SIGNAL = with_now("""inserted_signal AS (
    INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value)
    SELECT run_id, inbox_no, kind, step, {now}, value FROM signal)""")
_WOKEN = """woken AS (
    UPDATE edda_open_run s
       SET inbox_count = p.inbox_count, cancelled = s.cancelled OR p.cancels,
           {wake}
      FROM (SELECT run_id, max(inbox_no) AS inbox_count, bool_or(kind = 'cancel') AS cancels
              FROM signal GROUP BY run_id) p
     WHERE s.run_id = p.run_id)""".replace("{wake}", wake("p.cancels"))


# OFFSET 0 keeps the planner from reading all inbox items at once.
_RECEIVED = "EXISTS (SELECT FROM edda_inbox d WHERE d.event = k.seq AND d.run_id = a.run_id OFFSET 0)"

# The first event under a key that the run has not received.
_FIRST_EVENT = """(
           SELECT k.seq FROM edda_event_key k
            WHERE k.key = a.{column} AND k.seq > a.cursor AND NOT {received}
            ORDER BY k.seq LIMIT 1)""".replace("{received}", _RECEIVED)


def first_event_sql(column: str) -> str:
    return _FIRST_EVENT.replace("{column}", column)


# Of several waits for messages under one key, the nth reads the nth row of the key.
_NTH_MESSAGE = """(
           SELECT k.seq FROM (
                  SELECT seq FROM edda_event_key WHERE key = a.key ORDER BY seq OFFSET a.place - 1 LIMIT 1) k
            WHERE NOT {received})""".replace("{received}", _RECEIVED)

# A wait whose candidate went to another wait, or that skipped a message which its run received by another key, is
# registered only if no message is left for it; else it is refused, and the run registers it again.
_MESSAGE_LEFT = """EXISTS (
           SELECT FROM edda_event_key k
            WHERE k.key IN (a.key, a.target_key) AND NOT {received} AND (k.key, k.seq) NOT IN (
                  SELECT r.key, r.candidate FROM ranked_candidate r WHERE r.won AND r.exclusive))""".replace(
    "{received}", _RECEIVED
)

# Of two waits with the same candidate the first gets it. Of one run's waits a shared one comes before an exclusive one,
# because it takes the message from no other run.
_CANDIDATES = (
    """candidate AS MATERIALIZED (
    SELECT a.*, CASE WHEN a.step IS NOT NULL AND a.inbox_count = a.inbox_read THEN least(
           CASE WHEN a.place > 1 THEN {nth} ELSE {key} END, CASE WHEN a.target_key <> a.key THEN {target_key} END)
           END AS candidate
      FROM (SELECT requested_wait.*, CASE WHEN exclusive AND inbox_count = inbox_read THEN row_number() OVER (
                   PARTITION BY key, exclusive, inbox_count = inbox_read ORDER BY run_id, step) ELSE 1 END AS place
              FROM requested_wait) a),
ranked_candidate AS MATERIALIZED (
    SELECT c.*, candidate IS NOT NULL
                AND row_number() OVER (PARTITION BY run_id, candidate ORDER BY exclusive, step COLLATE "C") = 1
                AND (NOT exclusive OR row_number() OVER (
                        PARTITION BY exclusive, key, candidate ORDER BY run_id, step) = 1) AS won
      FROM candidate c),
matched AS MATERIALIZED (
    SELECT a.*, CASE WHEN won THEN candidate END AS event,
           step IS NOT NULL AND (
           inbox_count <> inbox_read OR won OR CASE WHEN exclusive THEN {left} ELSE candidate IS NOT NULL END)
           AS refused_wait
      FROM ranked_candidate a)""".replace("{nth}", _NTH_MESSAGE)
    .replace("{key}", first_event_sql("key"))
    .replace("{target_key}", first_event_sql("target_key"))
    .replace("{left}", _MESSAGE_LEFT)
)

_OUTBOX = """
    INSERT INTO edda_outbox (id, order_key, type, source, body, run_id, created_at, due, attempts, state)
    SELECT u.id, u.order_key, u.type, u.source, u.body, u.run_id, u.created_at, 0, 0, 'pending'
      FROM {rows} WITH ORDINALITY u (id, order_key, type, source, body, run_id, created_at, place){fence}
     ORDER BY u.place"""
ENQUEUE = _OUTBOX.replace("{rows}", "unnest($1::edda_outbox_row[])").replace("{fence}", "")


def outbox_row(event: OutboxEvent) -> Row:
    """As `edda_outbox_row`."""
    return (event.id, event.key, event.type, event.source, event.body, event.run_id, event.created_at)


class StatementPart(Struct, frozen=True):
    text: str
    row: str = ""
    """The type of its rows. They come as one array of rows: an array per column costs the driver twice the time."""


# Only a row that the statement updates or locks is read again after a wait, so everything that must be current is in
# this one row. The count of claims is read as it was when the statement began. That is enough: it only grows, and the
# claims this worker knows of were acknowledged before, so a lower count means that the database lost commits.
FENCE = """WITH fence AS (
    UPDATE edda_fence SET batch_no = batch_no + 1, token = $6
     WHERE worker = $1 AND batch_no = $2 AND ownership_version = $3 AND token = $4
       AND EXISTS (SELECT FROM edda_claim c WHERE c.worker = $1 AND c.claims >= $5) RETURNING 1)"""
# For a second statement of the same transaction, which has updated the row already.
FENCE_ALREADY_TAKEN = """WITH fence AS (
    SELECT FROM edda_fence
     WHERE worker = $1 AND batch_no = $2 + 1 AND ownership_version = $3 AND token = $6
         AND $4::bigint + $5::bigint IS NOT NULL)"""

_COLUMNS = "(run_id, generation, epoch, seq, kind, step, name, ok, at, attempt, inbox_no, event, input, value)"
# One history row alone, the common case on a quiet system: no arrays.
SINGLE = (
    FENCE
    + """
INSERT INTO edda_history {columns}
SELECT $7::text, $8::int, $9::int, $10::int, $11::text, $12::text, $13::text, $14::boolean, $15::bigint, $16::int,
       $17::int, $18::bigint, $19::bytea, $20::bytea
  FROM fence RETURNING NULL::text AS run_id, NULL::text AS step""".replace("{columns}", _COLUMNS)
)

# An end whose number of watchers is wrong or that would lose a message, and a recur that would leave items unread.
_REFUSED = """(u.transition = 'end' AND (u.watchers <> s.watchers OR coalesce(u.expected_inbox_count,
    s.inbox_count) <> s.inbox_count)
                 OR u.transition = 'recur' AND u.inbox_read <> s.inbox_count)"""
# Runs are locked in the order of run_id, as every statement does: else the batch would deadlock with transactions that
# deliver inbox items. New ids are inserted before. What must be current comes from the locked row, and a refused
# transition becomes 'ack' here, once for all other parts.
_LOCK = """
    SELECT run_id, CASE WHEN {refused} THEN 'ack' ELSE u.transition END AS transition, {refused} AS refused,
           coalesce(u.inbox_read, s.inbox_read) AS inbox_read, u.ready_at, u.status, u.reason, u.compensating,
           s.inbox_count, s.cancelled{more}
      FROM {before}, {rows} u JOIN edda_open_run s USING (run_id)
     ORDER BY s.run_id FOR UPDATE OF s""".replace("{refused}", _REFUSED)
_FROM_FENCE = "fence"
_FROM_CHILDREN = "fence JOIN (SELECT count(*) AS runs FROM inserted_open_run) children ON children.runs >= 0"
# The subquery is read once and hashed: few transitions are refused.
_NOT_REFUSED = "u.run_id NOT IN (SELECT run_id FROM locked WHERE refused)"


SECTIONS = {
    "run": StatementPart(
        """run AS (
    INSERT INTO edda_run (id, generation, workflow, input, created_at, deadline, parent, parent_step, depth)
    SELECT u.* FROM {rows} u, fence)""",
        "edda_run_row",
    ),
    "open_run": StatementPart(
        """open_run AS (
    INSERT INTO edda_open_run (run_id, workflow, generation, epoch, owner, status, reason, ready_at, inbox_read,
        attempts, compensating, event_cursor)
    SELECT u.*, {last_event} FROM {rows} u, fence)""".replace("{last_event}", LAST_EVENT),
        "edda_open_run_row",
    ),
    # Waits of new runs: no event can have arrived for them yet.
    "initial_wait": StatementPart(
        """initial_wait AS (
    INSERT INTO edda_wait (run_id, step, key, target_key, type, match, due, exclusive)
    SELECT u.* FROM {rows} u, fence)""",
        "edda_wait_row",
    ),
    "history": StatementPart(
        """history AS (
    INSERT INTO edda_history {columns} SELECT u.* FROM {rows} u, fence)""".replace("{columns}", _COLUMNS),
        "edda_history_row",
    ),
    "children": StatementPart(create_runs_sql("SELECT u.* FROM {rows} u, fence"), "edda_start_row"),
    "locked": StatementPart("locked AS MATERIALIZED (" + _LOCK.replace("{more}", "") + ")", "edda_transition_row"),
    # In a batch with waits these three replace `locked`.
    "requested_wait": StatementPart(
        "requested_wait AS MATERIALIZED ("
        + _LOCK.replace(
            "{more}",
            """,
           u.step, u.key, u.target_key, u.type, u.match, u.due, u.exclusive,
           CASE WHEN u.exclusive THEN 0 ELSE coalesce(u.cursor, s.event_cursor) END AS cursor""",
        )
        + ")",
        "edda_wait_request_row",
    ),
    "matched": StatementPart(
        """matched AS MATERIALIZED (
    SELECT l.*, step IS NOT NULL AND (inbox_count <> inbox_read OR event IS NOT NULL) AS refused_wait
      FROM (SELECT a.*, CASE WHEN a.step IS NOT NULL AND a.inbox_count = a.inbox_read THEN least(
           {key}, {target_key}) END AS event
              FROM requested_wait a) l)""".replace("{key}", first_event_sql("key")).replace(
            "{target_key}", first_event_sql("target_key")
        )
    ),
    # Replaces `matched` if a wait of the batch is exclusive.
    "candidate": StatementPart(_CANDIDATES),
    "taken_message": StatementPart(
        """taken_message AS (
    DELETE FROM edda_event_key k USING matched f
     WHERE f.exclusive AND f.event IS NOT NULL AND k.key IN (f.key, f.target_key) AND k.seq = f.event)"""
    ),
    # A run with unread items is not suspended. GROUP BY instead of a join: a join of two CTEs may compare every row
    # with every row.
    "decided": StatementPart(
        """locked AS MATERIALIZED (
    SELECT run_id, CASE WHEN transition = 'suspend'
        AND bool_or(refused_wait) THEN 'ack' ELSE transition END AS transition,
           refused, inbox_read, ready_at, status, reason, compensating, cancelled,
           inbox_count + count(DISTINCT event) AS inbox_count
      FROM matched
     GROUP BY run_id, transition, refused, inbox_read, ready_at, status, reason, compensating, cancelled,
         inbox_count)"""
    ),
    "registered": StatementPart(
        """registered AS (
    INSERT INTO edda_wait (run_id, step, key, target_key, type, match, due, exclusive)
    SELECT run_id, step, key, target_key, type, match, due, exclusive
      FROM matched WHERE step IS NOT NULL AND NOT refused_wait
    ON CONFLICT DO NOTHING)"""
    ),
    # Of two waits that matched the same event the first step gets it; the run registers the other one again.
    "inbox_item": StatementPart(
        with_now("""inbox_item AS (
    INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value, event)
    SELECT DISTINCT ON (run_id, event) run_id,
           inbox_count + dense_rank() OVER (PARTITION BY run_id ORDER BY event),
           CASE WHEN exclusive THEN 'message' ELSE 'event' END, step, {now}, '', event
      FROM matched WHERE event IS NOT NULL ORDER BY run_id, event, step COLLATE "C"
    RETURNING run_id, step)""")
    ),
    # The wait may be registered already: after a lost answer the run sends it again.
    "ended_wait": StatementPart(
        """ended_wait AS (
    DELETE FROM edda_wait w USING inbox_item i WHERE w.run_id = i.run_id AND w.step = i.step)"""
    ),
    # The lock keeps inbox_count from changing; `decided` has added the items of the waits that matched.
    "acked": StatementPart(
        """acked AS (
    UPDATE edda_open_run s SET inbox_read = l.inbox_read, inbox_count = l.inbox_count,
        compensating = s.compensating OR l.compensating
      FROM locked l WHERE s.run_id = l.run_id AND l.transition = 'ack')"""
    ),
    # Unread items make the run ready at once, except a parked run, which cannot read them.
    "suspended": StatementPart(
        with_now("""suspended AS (
    UPDATE edda_open_run s
       SET inbox_read = l.inbox_read, owner = NULL, compensating = s.compensating OR l.compensating, alone = false,
           ready_at = CASE WHEN {waits} THEN l.ready_at ELSE 0 END,
           status   = CASE WHEN {waits} THEN l.status ELSE 'running' END,
           reason   = CASE WHEN {waits} THEN l.reason END,
           attempts = CASE WHEN {parked} THEN s.attempts + 1 ELSE 0 END,
           parked_at = CASE WHEN {parked} THEN {now} END,
           end_if_parked = {parked} AND s.end_if_parked,
           deaths = CASE WHEN {parked} THEN s.deaths ELSE 0 END,
           deaths_alone = CASE WHEN {parked} THEN s.deaths_alone ELSE 0 END,
           died_seq = CASE WHEN {parked} THEN s.died_seq END
      FROM locked l WHERE s.run_id = l.run_id AND l.transition = 'suspend'
    RETURNING s.run_id, NOT {waits} AS has_unread)""")
        .replace("{waits}", "(l.inbox_count = l.inbox_read OR l.status = 'parked')")
        .replace("{parked}", "(l.status = 'parked')")
    ),
    "recurred": StatementPart(
        """recurred AS (
    UPDATE edda_open_run s
       SET generation = s.generation + 1, inbox_read = l.inbox_read, cancelled = false, attempts = 0,
           compensating = false, end_if_parked = false, deaths = 0, deaths_alone = 0, died_seq = NULL
      FROM locked l WHERE s.run_id = l.run_id AND l.transition = 'recur')"""
    ),
    "deleted_run": StatementPart(
        """deleted_run AS (
    DELETE FROM edda_open_run s USING locked l WHERE s.run_id = l.run_id AND l.transition = 'end')"""
    ),
    "deleted_waits": StatementPart(
        """deleted_waits AS (
    DELETE FROM edda_wait w USING locked l WHERE w.run_id = l.run_id AND l.transition IN ('end', 'recur'))"""
    ),
    "deleted_watchers": StatementPart(
        """deleted_watchers AS (
    DELETE FROM edda_watcher w USING locked l WHERE w.run_id = l.run_id AND l.transition = 'end')"""
    ),
    # The count reads `locked` to its end, so that all runs are locked before anything is deleted.
    "cancelled_wait": StatementPart(
        """cancelled_wait AS (
    DELETE FROM edda_wait w USING {rows} u, (SELECT count(*) AS runs FROM locked) l
     WHERE l.runs > 0 AND w.run_id = u.run_id AND w.step = u.step)""",
        "edda_cancelled_wait_row",
    ),
    "released_item": StatementPart(
        """released_item AS (
    UPDATE edda_inbox d SET event = NULL, kind = 'late_event'
      FROM {rows} u, (SELECT count(*) AS runs FROM locked) l
     WHERE l.runs > 0 AND d.run_id = u.run_id AND d.inbox_no = u.inbox_no)""",
        "edda_released_item_row",
    ),
    "result": StatementPart(
        """result AS (
    INSERT INTO edda_result (run_id, generation, status, value, ended_at) SELECT u.* FROM {rows} u, fence)""",
        "edda_result_row",
    ),
    # Replaces `result` if an end of the batch can be refused.
    "guarded_result": StatementPart(
        """guarded_result AS (
    INSERT INTO edda_result (run_id, generation, status, value, ended_at)
    SELECT u.* FROM {rows} u, fence WHERE {not_refused})""".replace("{not_refused}", _NOT_REFUSED),
        "edda_result_row",
    ),
    "next_generation": StatementPart(
        """next_generation AS (
    INSERT INTO edda_run (id, generation, workflow, input, created_at, deadline, parent, parent_step, depth)
    SELECT r.id, r.generation + 1, r.workflow, u.input, u.created_at, r.deadline, r.parent, r.parent_step, r.depth
      FROM fence, {rows} u JOIN edda_run r ON r.id = u.run_id AND r.generation = u.generation
     WHERE {not_refused})""".replace("{not_refused}", _NOT_REFUSED),
        "edda_recur_row",
    ),
    "first_entry": StatementPart(
        """first_entry AS (
    INSERT INTO edda_history {columns}
    SELECT u.* FROM {rows} u, fence WHERE {not_refused})""".replace("{columns}", _COLUMNS).replace(
            "{not_refused}", _NOT_REFUSED
        ),
        "edda_history_row",
    ),
    "signal": StatementPart(_SIGNAL, "edda_signal_row"),
    "inserted_signal": StatementPart(_INSERTED_SIGNAL),
    "woken": StatementPart(_WOKEN),
    "recorded_step": StatementPart(
        """recorded_step AS (
    DELETE FROM edda_step_commit d USING {rows} u, fence
     WHERE d.run_id = u.run_id AND d.generation = u.generation AND d.step = u.step)""",
        "edda_recorded_step_row",
    ),
    "staged_event": StatementPart(
        """staged_event AS (
    INSERT INTO edda_staged_event (kind, body)
    SELECT u.kind, u.body FROM {rows} WITH ORDINALITY u (kind, body, place), fence ORDER BY u.place)""",
        "edda_staged_event_row",
    ),
    "outbox_event": StatementPart(
        f"outbox_event AS ({_OUTBOX})".replace("{fence}", ", fence"),
        "edda_outbox_row",
    ),
    # Only a run's owner writes its values, so this waits for no other transaction.
    "saved_value": StatementPart(
        with_now("""saved_value AS (
    INSERT INTO edda_run_value (run_id, name, value, at) SELECT u.run_id, u.name, u.value, {now} FROM {rows} u, fence
    ON CONFLICT (run_id, name) DO UPDATE SET value = excluded.value, at = excluded.at)"""),
        "edda_run_value_row",
    ),
}

_ANSWER = "\nSELECT NULL::text AS run_id, NULL::text AS step FROM fence"
_ANSWERS = {
    "suspended": " UNION ALL SELECT run_id, NULL FROM suspended WHERE has_unread",
    "registered": " UNION ALL SELECT run_id, step FROM matched WHERE refused_wait",
    "deleted_waits": " UNION ALL SELECT run_id, '' FROM locked WHERE refused",
}


@cache
def batch_statement(names: tuple[str, ...]) -> str:
    """The statement with these sections; their values follow $1 to $6 of the fence."""
    parts, parameters = [FENCE], 6
    before = _FROM_CHILDREN if "children" in names else _FROM_FENCE
    for name in names:
        section = SECTIONS[name]
        if section.row:
            parameters += 1
        rows = f"unnest(${parameters}::{section.row}[])"
        parts.append(section.text.replace("{before}", before).replace("{rows}", rows))
    return ",\n".join(parts) + _ANSWER + "".join(more for name, more in _ANSWERS.items() if name in names)
