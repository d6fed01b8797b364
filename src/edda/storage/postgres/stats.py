"""How much there is, how fast it goes, and whether anything has changed."""

from __future__ import annotations

from edda.core.queries import MAX_COUNT, Backlog, Latency, TimeBucket
from edda.storage.shared.stats import measure

from .clock import with_now
from .pool import Pool
from .search import SCAN_LIMIT

# From name to name in the index, instead of through all that wait.
_NAMES = """
WITH RECURSIVE names (name) AS (
    (SELECT workflow FROM edda_sched WHERE owner IS NULL ORDER BY workflow LIMIT 1)
    UNION ALL
    SELECT (SELECT workflow FROM edda_sched WHERE owner IS NULL AND workflow > names.name ORDER BY workflow LIMIT 1)
      FROM names WHERE names.name IS NOT NULL)"""
_DUE = """names CROSS JOIN LATERAL (
           SELECT run_id, gen, absorbed, ready_at FROM edda_sched
            WHERE workflow = names.name AND owner IS NULL AND ready_at <= (SELECT {now}) LIMIT {most}) due"""

# What is ready at once has no moment of its own: that of its mail counts, or else its beginning. Who has waited longest
# is mostly among the oldest runs; if not, all that wait are looked at.
_BACKLOG = """,
ready AS MATERIALIZED (
    SELECT coalesce(nullif(due.ready_at, 0),
                    (SELECT at FROM edda_delivery d WHERE d.run_id = due.run_id AND d.n = due.absorbed + 1),
                    (SELECT created_at FROM edda_run r WHERE r.id = due.run_id AND r.gen = due.gen)) AS since
      FROM {due}
     LIMIT {most}),
waiting AS (
    SELECT run_id, gen FROM edda_sched
     WHERE owner IS NULL AND status LIKE 'waiting%' AND NOT undoing
       AND (ready_at IS NULL OR ready_at > (SELECT {now})))
SELECT (SELECT count(*) FROM ready),
       (SELECT min(since) FROM ready),
       (SELECT count(*) FROM (SELECT FROM waiting LIMIT {most}) w),
       coalesce((SELECT oldest.created_at
                   FROM (SELECT id, gen, created_at FROM edda_run ORDER BY created_at, id LIMIT {glance}) oldest
                   JOIN waiting w ON w.run_id = oldest.id AND w.gen = oldest.gen
                  ORDER BY oldest.created_at LIMIT 1),
                (SELECT min(r.created_at) FROM waiting w JOIN edda_run r ON r.id = w.run_id AND r.gen = w.gen)),
       (SELECT count(*) FROM edda_sched
         WHERE status = 'parked' AND (ready_at IS NULL OR ready_at > (SELECT {now}))),
       (SELECT count(*) FROM (SELECT FROM edda_outbox WHERE state = 'pending' LIMIT {most}) o),
       (SELECT count(*) FROM (SELECT FROM edda_outbox WHERE state = 'dead' LIMIT {most}) o),
       (SELECT created_at FROM edda_outbox WHERE state = 'pending' ORDER BY seq LIMIT 1),
       (SELECT count(*) FROM (SELECT FROM edda_dispatch LIMIT {most}) d)"""
BACKLOG = with_now((_NAMES + _BACKLOG).replace("{due}", _DUE))
BACKLOG = BACKLOG.replace("{most}", str(MAX_COUNT)).replace("{glance}", str(SCAN_LIMIT))

STARTED = """
SELECT (created_at - $1) / $2, count(*) FROM edda_run
 WHERE created_at >= $1 AND created_at < $1 + $2 * $3 AND gen = 0 GROUP BY 1"""
ENDED = """
SELECT (ended_at - $1) / $2, count(*) FILTER (WHERE status = 'completed'),
       count(*) FILTER (WHERE status = 'failed'), count(*) FILTER (WHERE status = 'cancelled')
  FROM edda_result WHERE ended_at >= $1 AND ended_at < $1 + $2 * $3 GROUP BY 1"""

DURATIONS = """
SELECT e.ended_at - r.created_at
  FROM (SELECT run_id, gen, ended_at FROM edda_result WHERE ended_at >= $1 ORDER BY ended_at DESC LIMIT $2) e
  JOIN edda_run r ON r.id = e.run_id AND r.gen = e.gen"""

# Every batch of a worker moves its fence; claims move the epochs of what is owned; outsiders leave runs, letters,
# events, lines of the audit, and what is ready. Each is the end of an index, and of what is ready at most a thousand.
# What the code says is a few rows, each known by the transaction that wrote it.
_MARK = """
SELECT row(
    (SELECT concat_ws(' ', count(*), sum(ready_at)) FROM (SELECT due.ready_at FROM {due} LIMIT {most}) ready),
    (SELECT md5(string_agg(concat_ws(' ', worker, batch_no, moves), ',' ORDER BY worker)) FROM edda_fence),
    (SELECT concat_ws(' ', count(*), sum(epoch)) FROM edda_sched WHERE owner IS NOT NULL),
    (SELECT concat_ws(' ', created_at, id, gen) FROM edda_run ORDER BY created_at DESC, id DESC LIMIT 1),
    (SELECT concat_ws(' ', ended_at, run_id) FROM edda_result ORDER BY ended_at DESC LIMIT 1),
    (SELECT at FROM edda_delivery ORDER BY at DESC LIMIT 1),
    (SELECT last_value FROM edda_event_seq),
    (SELECT concat_ws(' ', max(seq), min(due)) FROM edda_outbox WHERE state = 'pending'),
    (SELECT max(seq) FROM edda_outbox WHERE state = 'dead'),
    (SELECT max(ended_at) FROM edda_outbox WHERE state = 'sent'),
    (SELECT concat_ws(' ', min(seq), max(seq)) FROM edda_dispatch),
    (SELECT max(seq) FROM edda_audit),
    (SELECT concat_ws(' ', count(*), sum(xmin::text::bigint)) FROM edda_definition),
    (SELECT concat_ws(' ', count(*), sum(xmin::text::bigint)) FROM edda_form))::text"""
PULSE_MARK = with_now((_NAMES + _MARK).replace("{due}", _DUE)).replace("{most}", "1000")


class PostgresFigures:
    _survey: Pool

    async def backlog(self) -> Backlog:
        async with self._survey.session() as session:
            return Backlog(*(await session.fetch(BACKLOG))[0])

    async def throughput(self, since: int, width: int, count: int) -> tuple[TimeBucket, ...]:
        async with self._survey.session() as session:
            started = {row[0]: row[1] for row in await session.fetch(STARTED, since, width, count)}
            ended = {place: counts for place, *counts in await session.fetch(ENDED, since, width, count)}
        return tuple(TimeBucket(since + i * width, started.get(i, 0), *ended.get(i, ())) for i in range(count))

    async def latency(self, since: int, most: int) -> Latency:
        async with self._survey.session() as session:
            rows = await session.fetch(DURATIONS, since, most)
        return measure(row[0] for row in rows)

    async def change_token(self) -> str:
        async with self._survey.session() as session:
            mark: str = (await session.fetch(PULSE_MARK))[0][0]
        return mark
