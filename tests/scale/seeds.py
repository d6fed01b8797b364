"""A database as after a busy month, written by SQL alone.

Half of the runs that wait are the oldest of all (for timers), half the newest (for events): whoever looks for what has
ended has to get past these, whoever looks for the timers past all that ended. One run in 5,000 failed, one in 100 was
cancelled, one in 50,000 is of the workflow `rare`, and every tenth that waits for an event has had another one before.
"""

from __future__ import annotations

from collections.abc import Iterator

# Started one by one over a month. {first} and {last} are the first and the last that ended.
_RUNS = (
    """
INSERT INTO edda_run (id, generation, workflow, input, created_at)
SELECT {id}, 0, CASE WHEN i % 50000 = 7 THEN 'rare' ELSE {workflow} END, '{"order": "A-17"}', {created}
  FROM {numbers}""",
    """
INSERT INTO edda_open_run (run_id, workflow, status, epoch, generation, event_cursor, ready_at, reason)
SELECT {id}, CASE WHEN i % 50000 = 7 THEN 'rare' ELSE {workflow} END,
       CASE WHEN i < {first} THEN 'waiting_for_timer' ELSE 'waiting_for_event' END, 1, 0, 0,
       CASE WHEN i < {first} THEN 9000000000000000 + i END, 'waits for something'
  FROM {numbers} WHERE i < {first} OR i > {last}""",
    """
INSERT INTO edda_result (run_id, generation, status, value, ended_at)
SELECT {id}, 0, CASE WHEN i % 5000 = 3 THEN 'failed' WHEN i % 100 = 9 THEN 'cancelled' ELSE 'completed' END, '{}',
       {created} + 100000 + i % 60 * 1000000
  FROM {numbers} WHERE i >= {first} AND i <= {last}""",
    """
INSERT INTO edda_history (run_id, generation, seq, epoch, kind, step, name, ok, at, attempt, inbox_no, event, input,
    value)
SELECT {id}, 0, 1, 1, 'step', 'charge:1', 'charge', true, {created}, 1, NULL, NULL, '[]', '{}'
  FROM {numbers}""",
    """
INSERT INTO edda_event (seq, source, id, type, received_at, body)
SELECT i - {last}, 'shop', {id}, CASE WHEN i % 50000 = 7 THEN 'rare' ELSE 'payment' END, {created}, '{}'
  FROM {numbers} WHERE i > {last} ORDER BY i""",
    """
INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value, event)
SELECT {id}, 1, 'event', 'wait:1', {created}, '', i - {last}
  FROM {numbers} WHERE i > {last} AND i % 10 = 0""",
    """
INSERT INTO edda_wait (run_id, step, {key}, target_key, type, {match})
SELECT {id}, 'wait:2', {digest}, {digest}, CASE WHEN i % 50000 = 7 THEN 'rare' ELSE 'payment' END, '{}'
  FROM {numbers} WHERE i > {last}""",
)

_CREATED = "{now} - ({all} - i) * {step}"
_MONTH = 30 * 24 * 3600 * 1_000_000

_DIGITS = " UNION ALL ".join(f"SELECT {digit} AS d" for digit in range(10))

_WORDS = {
    "postgres": {
        "{id}": "'run' || lpad(i::text, 8, '0')",
        "{workflow}": "'workflow' || i % 10",
        "{digest}": "decode(md5('key' || i), 'hex')",
        "{now}": "(extract(epoch from now()) * 1000000)::bigint",
        "{numbers}": "generate_series(1::bigint, {all}) i",
        "{key}": "key",
        "{match}": "match",
    },
    "mysql": {
        "{id}": "CONCAT('run', LPAD(i, 8, '0'))",
        "{workflow}": "CONCAT('workflow', i % 10)",
        "{digest}": "UNHEX(MD5(CONCAT('key', i)))",
        "{now}": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', UTC_TIMESTAMP(6))",
        "{numbers}": "(SELECT i FROM scale_number WHERE i <= {all}) n",
        "{key}": "`key`",
        "{match}": "`match`",
    },
    "sqlite": {
        "{id}": "printf('run%08d', i)",
        "{workflow}": "'workflow' || (i % 10)",
        "{digest}": "CAST(printf('%016d', i) AS BLOB)",
        "{now}": "unixepoch() * 1000000",
        "{numbers}": "(WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {all}) SELECT i FROM n)",
        "{key}": "key",
        "{match}": "match",
    },
}
# The servers' own ways to count differ.
_BEFORE: dict[str, tuple[str, ...]] = {
    "postgres": (),
    "sqlite": (),
    "mysql": (
        "CREATE TABLE scale_number (i BIGINT NOT NULL PRIMARY KEY)",
        f"""INSERT INTO scale_number SELECT i FROM (
        SELECT 1 + a.d + 10 * b.d + 100 * c.d + 1000 * e.d + 10000 * f.d + 100000 * g.d + 1000000 * h.d AS i
          FROM ({_DIGITS}) a, ({_DIGITS}) b, ({_DIGITS}) c, ({_DIGITS}) e, ({_DIGITS}) f, ({_DIGITS}) g,
               (SELECT 0 AS d UNION ALL SELECT 1) h) n WHERE i <= {{all}}""",
    ),
}
_AFTER = {
    "sqlite": ("ANALYZE",),
    "postgres": ("SELECT setval('edda_event_seq', (SELECT max(seq) FROM edda_event))", "VACUUM ANALYZE"),
    "mysql": (
        "DROP TABLE scale_number",
        "ANALYZE TABLE edda_run, edda_open_run, edda_result, edda_history, edda_event, edda_inbox, edda_wait",
    ),
}


def statements(database: str, ended: int, waiting: int) -> Iterator[str]:
    """At most two million runs."""
    for text in (*_BEFORE[database], *_RUNS):
        yield _fill(text, {"{created}": _CREATED} | _WORDS[database] | _sizes(ended, waiting))
    yield from _AFTER[database]


def _sizes(ended: int, waiting: int) -> dict[str, str]:
    all, half = ended + waiting, waiting // 2
    sizes = {"{all}": all, "{step}": _MONTH // all, "{first}": half + 1, "{last}": half + ended}
    return {name: str(size) for name, size in sizes.items()}


def _fill(text: str, words: dict[str, str]) -> str:
    for name, word in words.items():
        text = text.replace(name, word)
    return text
