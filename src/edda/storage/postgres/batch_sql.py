"""The SQL of one batch: one common table expression for each kind of row."""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

from msgspec import Struct

from edda.core.model import OutboxEvent, Start

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


class StatementPart(Struct, frozen=True):
    text: str
    row: str = ""
    """The type of its rows. They come in as one array of rows: an array per column costs the driver twice the time."""


# Only a row that is updated or locked is read afresh after a wait, so all that must be fresh is in this one row.
# The count of claims is read as it was when the statement began: it only grows, and the claims that this worker knows
# of were acknowledged before, so less than that was lost by the database.
FENCE = """WITH fence AS (
    UPDATE edda_fence SET batch_no = batch_no + 1, token = $6
     WHERE worker = $1 AND batch_no = $2 AND moves = $3 AND token = $4
       AND EXISTS (SELECT FROM edda_claim c WHERE c.worker = $1 AND c.n >= $5) RETURNING 1)"""
# In a second statement of the same commit: the row is ours already.
FENCE_ALREADY_TAKEN = """WITH fence AS (
    SELECT FROM edda_fence
     WHERE worker = $1 AND batch_no = $2 + 1 AND moves = $3 AND token = $6 AND $4::bigint + $5::bigint IS NOT NULL)"""

# One row of history alone, the common case of a quiet system: no arrays.
SINGLE = (
    FENCE
    + """
INSERT INTO edda_hist (run_id, gen, epoch, seq, kind, step, name, ok, at, attempt, n, event, input, value)
SELECT $7::text, $8::int, $9::int, $10::int, $11::text, $12::text, $13::text, $14::boolean, $15::bigint, $16::int,
       $17::int, $18::bigint, $19::bytea, $20::bytea
  FROM fence RETURNING NULL::text AS run_id, NULL::text AS step"""
)

# An end that does not know all who watch or would lose a message, a next generation that would leave mail unread.
_REFUSED = """(u.move = 'end' AND (u.watchers <> s.watchers OR coalesce(u.settled, s.delivered) <> s.delivered)
                 OR u.move = 'recur' AND u.absorbed <> s.delivered)"""
# Locked in the order everybody locks runs in, else we deadlock with those who deliver mail; new ids come before. What
# must be fresh comes from the locked row, and a move that is refused becomes another one here, once for all parts.
_LOCK = """
    SELECT run_id, CASE WHEN {refused} THEN 'absorb' ELSE u.move END AS move, {refused} AS refused,
           coalesce(u.absorbed, s.absorbed) AS absorbed, u.ready_at, u.status, u.reason, u.undoing,
           s.delivered, s.cancelled{more}
      FROM {ahead}, {rows} u JOIN edda_sched s USING (run_id)
     ORDER BY s.run_id FOR UPDATE OF s""".replace("{refused}", _REFUSED)
_FROM_FENCE = "fence"
_AHEAD_WITH_CHILDREN = "fence JOIN (SELECT count(*) AS runs FROM started) children ON children.runs >= 0"
# Few are refused, if any; they are read once and hashed.
_NOT_REFUSED = "u.run_id NOT IN (SELECT run_id FROM locked WHERE refused)"


SECTIONS = {
    "run": StatementPart(
        """run AS (
    INSERT INTO edda_run (id, gen, workflow, input, created_at, deadline, parent, parent_step, depth)
    SELECT u.* FROM {rows} u, fence)""",
        "edda_run_row",
    ),
    "sched": StatementPart(
        """sched AS (
    INSERT INTO edda_sched (run_id, workflow, gen, epoch, owner, status, reason, ready_at, absorbed, attempts,
                            undoing, start_seq)
    SELECT u.*, {newest} FROM {rows} u, fence)""".replace("{newest}", LAST_EVENT),
        "edda_sched_row",
    ),
    # Waits of new runs: nothing can have come for them yet.
    "expected": StatementPart(
        """expected AS (
    INSERT INTO edda_wait (run_id, step, key, own_key, type, match, due, once) SELECT u.* FROM {rows} u, fence)""",
        "edda_wait_row",
    ),
    "hist": StatementPart(
        """hist AS (
    INSERT INTO edda_hist (run_id, gen, epoch, seq, kind, step, name, ok, at, attempt, n, event, input, value)
    SELECT u.* FROM {rows} u, fence)""",
        "edda_hist_row",
    ),
    "children": StatementPart(create_runs_sql("SELECT u.* FROM {rows} u, fence"), "edda_start_row"),
    "locked": StatementPart("locked AS MATERIALIZED (" + _LOCK.replace("{more}", "") + ")", "edda_move_row"),
    # In a batch with waits these three stand for the one above.
    "asked": StatementPart(
        "asked AS MATERIALIZED ("
        + _LOCK.replace(
            "{more}",
            """,
           u.step, u.key, u.own_key, u.type, u.match, u.due, u.once,
           CASE WHEN u.once THEN 0 ELSE coalesce(u.floor, s.start_seq) END AS since""",
        )
        + ")",
        "edda_ask_row",
    ),
    "found": StatementPart(
        """found AS MATERIALIZED (
    SELECT l.*, step IS NOT NULL AND (delivered <> absorbed OR event IS NOT NULL) AS unmet
      FROM (SELECT a.*, CASE WHEN a.step IS NOT NULL AND a.delivered = a.absorbed THEN least(
           {key}, {own_key}) END AS event
              FROM asked a) l)""".replace("{key}", first_event_sql("key")).replace(
            "{own_key}", first_event_sql("own_key")
        )
    ),
    # Stands for the one above if somebody asks for what is given to one run only.
    "sought": StatementPart(FIND_EXCLUSIVE),
    "taken": StatementPart(TAKE_EXCLUSIVE),
    # A run with unread mail stays. Grouped, not joined: two parts that are joined may be compared row by row.
    "judged": StatementPart(
        """locked AS MATERIALIZED (
    SELECT run_id, CASE WHEN move = 'release' AND bool_or(unmet) THEN 'absorb' ELSE move END AS move,
           refused, absorbed, ready_at, status, reason, undoing, cancelled,
           delivered + count(DISTINCT event) AS delivered
      FROM found
     GROUP BY run_id, move, refused, absorbed, ready_at, status, reason, undoing, cancelled, delivered)"""
    ),
    "registered": StatementPart(
        """registered AS (
    INSERT INTO edda_wait (run_id, step, key, own_key, type, match, due, once)
    SELECT run_id, step, key, own_key, type, match, due, once FROM found WHERE step IS NOT NULL AND NOT unmet
    ON CONFLICT DO NOTHING)"""
    ),
    # Of two waits that found the same event the first step gets it; the other asks again.
    "letters": StatementPart(
        with_now("""letters AS (
    INSERT INTO edda_delivery (run_id, n, kind, step, at, value, event)
    SELECT DISTINCT ON (run_id, event) run_id,
           delivered + dense_rank() OVER (PARTITION BY run_id ORDER BY event),
           CASE WHEN once THEN 'message' ELSE 'event' END, step, {now}, '', event
      FROM found WHERE event IS NOT NULL ORDER BY run_id, event, step COLLATE "C"
    RETURNING run_id, step)""")
    ),
    # It may have been registered before, if it asks again for want of an answer.
    "over": StatementPart(
        """over AS (
    DELETE FROM edda_wait w USING letters l WHERE w.run_id = l.run_id AND w.step = l.step)"""
    ),
    # Nobody has written `delivered` since it was locked; it has grown if waits found their events.
    "absorbed": StatementPart(
        """absorbed AS (
    UPDATE edda_sched s SET absorbed = l.absorbed, delivered = l.delivered, undoing = s.undoing OR l.undoing
      FROM locked l WHERE s.run_id = l.run_id AND l.move = 'absorb')"""
    ),
    # Mail that came in meanwhile makes the run ready at once, but not a parked run, which could not read it.
    "released": StatementPart(
        with_now("""released AS (
    UPDATE edda_sched s
       SET absorbed = l.absorbed, owner = NULL, undoing = s.undoing OR l.undoing, alone = false,
           ready_at = CASE WHEN {rests} THEN l.ready_at ELSE 0 END,
           status   = CASE WHEN {rests} THEN l.status ELSE 'running' END,
           reason   = CASE WHEN {rests} THEN l.reason END,
           attempts = CASE WHEN {parked} THEN s.attempts + 1 ELSE 0 END,
           parked_at = CASE WHEN {parked} THEN {now} END,
           end_if_parked = {parked} AND s.end_if_parked,
           deaths = CASE WHEN {parked} THEN s.deaths ELSE 0 END,
           deaths_alone = CASE WHEN {parked} THEN s.deaths_alone ELSE 0 END,
           died_seq = CASE WHEN {parked} THEN s.died_seq END
      FROM locked l WHERE s.run_id = l.run_id AND l.move = 'release'
    RETURNING s.run_id, NOT {rests} AS has_mail)""")
        .replace("{rests}", "(l.delivered = l.absorbed OR l.status = 'parked')")
        .replace("{parked}", "(l.status = 'parked')")
    ),
    "followed": StatementPart(
        """followed AS (
    UPDATE edda_sched s
       SET gen = s.gen + 1, absorbed = l.absorbed, cancelled = false, attempts = 0, undoing = false,
           end_if_parked = false, deaths = 0, deaths_alone = 0, died_seq = NULL
      FROM locked l WHERE s.run_id = l.run_id AND l.move = 'recur')"""
    ),
    "gone": StatementPart(
        """gone AS (
    DELETE FROM edda_sched s USING locked l WHERE s.run_id = l.run_id AND l.move = 'end')"""
    ),
    "unheard": StatementPart(
        """unheard AS (
    DELETE FROM edda_wait w USING locked l WHERE w.run_id = l.run_id AND l.move IN ('end', 'recur'))"""
    ),
    "unwatched": StatementPart(
        """unwatched AS (
    DELETE FROM edda_watcher w USING locked l WHERE w.run_id = l.run_id AND l.move = 'end')"""
    ),
    # All runs are locked first, because all of them are counted.
    "dropped": StatementPart(
        """dropped AS (
    DELETE FROM edda_wait w USING {rows} u, (SELECT count(*) AS runs FROM locked) l
     WHERE l.runs > 0 AND w.run_id = u.run_id AND w.step = u.step)""",
        "edda_drop_row",
    ),
    "freed": StatementPart(
        """freed AS (
    UPDATE edda_delivery d SET event = NULL, kind = 'stray'
      FROM {rows} u, (SELECT count(*) AS runs FROM locked) l
     WHERE l.runs > 0 AND d.run_id = u.run_id AND d.n = u.n)""",
        "edda_free_row",
    ),
    "result": StatementPart(
        """result AS (
    INSERT INTO edda_result (run_id, gen, status, value, ended_at) SELECT u.* FROM {rows} u, fence)""",
        "edda_result_row",
    ),
    # Stands for the one above if there are ends that may not happen.
    "ended": StatementPart(
        """ended AS (
    INSERT INTO edda_result (run_id, gen, status, value, ended_at)
    SELECT u.* FROM {rows} u, fence WHERE {happens})""".replace("{happens}", _NOT_REFUSED),
        "edda_result_row",
    ),
    "next": StatementPart(
        """next AS (
    INSERT INTO edda_run (id, gen, workflow, input, created_at, deadline, parent, parent_step, depth)
    SELECT r.id, r.gen + 1, r.workflow, u.input, u.created_at, r.deadline, r.parent, r.parent_step, r.depth
      FROM fence, {rows} u JOIN edda_run r ON r.id = u.run_id AND r.gen = u.gen WHERE {happens})""".replace(
            "{happens}", _NOT_REFUSED
        ),
        "edda_recur_row",
    ),
    "opening": StatementPart(
        """opening AS (
    INSERT INTO edda_hist (run_id, gen, epoch, seq, kind, step, name, ok, at, attempt, n, event, input, value)
    SELECT u.* FROM {rows} u, fence WHERE {happens})""".replace("{happens}", _NOT_REFUSED),
        "edda_hist_row",
    ),
    "posted": StatementPart(POSTED, "edda_post_row"),
    "sent": StatementPart(SENT),
    "told": StatementPart(TOLD),
    "recorded": StatementPart(RECORDED, "edda_recorded_row"),
    "dispatched": StatementPart(DISPATCHED, "edda_dispatch_row"),
    "outgoing": StatementPart(OUTGOING, "edda_outgoing_row"),
    "stated": StatementPart(STATED, "edda_fact_row"),
}

_ANSWER = "\nSELECT NULL::text AS run_id, NULL::text AS step FROM fence"
_ANSWERS = {
    "released": " UNION ALL SELECT run_id, NULL FROM released WHERE has_mail",
    "registered": " UNION ALL SELECT run_id, step FROM found WHERE unmet",
    "unheard": " UNION ALL SELECT run_id, '' FROM locked WHERE refused",
}


@cache
def batch_statement(names: tuple[str, ...]) -> str:
    """The statement with these sections; its values come behind $1 to $6 of the fence."""
    parts, taken = [FENCE], 6
    ahead = _AHEAD_WITH_CHILDREN if "children" in names else _FROM_FENCE
    for name in names:
        section = SECTIONS[name]
        if section.row:
            taken += 1
        parts.append(section.text.replace("{ahead}", ahead).replace("{rows}", f"unnest(${taken}::{section.row}[])"))
    return ",\n".join(parts) + _ANSWER + "".join(more for name, more in _ANSWERS.items() if name in names)
