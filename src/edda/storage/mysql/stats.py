"""How much there is, how fast it goes, and whether anything has changed."""

from __future__ import annotations

from collections.abc import Iterable

from edda.core.queries import MAX_COUNT, Backlog, Latency, TimeBucket
from edda.storage.shared.stats import measure

from .clock import NOW
from .pool import Pool
from .search import SCAN_LIMIT
from .session import Row
from .statement import Statement, bind, int_or_null, quote_text

NAMES = b"SELECT DISTINCT workflow FROM edda_sched"
# One name at a time: a bound that is not written out beside its name is no range. A run with an owner is never ready.
_DUE = (
    b"(SELECT run_id, gen, absorbed, ready_at FROM edda_sched FORCE INDEX (edda_sched_ready)"
    b" WHERE workflow = %b AND ready_at <= " + NOW + b" LIMIT %b)"
)
# What is ready at once has no moment of its own: that of its mail counts, or else its beginning.
READY = b"""SELECT COUNT(*), MIN(o.since) FROM (SELECT COALESCE(NULLIF(s.ready_at, 0),
    (SELECT d.at FROM edda_delivery d WHERE d.run_id = s.run_id AND d.n = s.absorbed + 1),
    (SELECT r.created_at FROM edda_run r WHERE r.id = s.run_id AND r.gen = s.gen)) AS since FROM (%b) s LIMIT %b) o"""
READY_MARK = b"SELECT COUNT(*), SUM(o.ready_at) FROM (SELECT s.ready_at FROM (%b) s LIMIT %b) o"
_WAITING = (
    b"s.owner IS NULL AND s.status LIKE 'waiting%%' AND NOT s.undoing AND (s.ready_at IS NULL OR s.ready_at > "
    + NOW
    + b")"
)
WAITING = b"SELECT COUNT(*) FROM (SELECT 1 FROM edda_sched s WHERE " + _WAITING + b" LIMIT %b) o"
# Who has waited longest is mostly among the oldest runs; if not, all that wait are looked at.
OLDEST_OF_FEW = (
    b"SELECT c.created_at FROM (SELECT id, gen, created_at FROM edda_run FORCE INDEX (edda_run_created)"
    b" ORDER BY created_at, id LIMIT %b) c STRAIGHT_JOIN edda_sched s ON s.run_id = c.id AND s.gen = c.gen"
    b" WHERE " + _WAITING + b" ORDER BY c.created_at LIMIT 1"
)
OLDEST = (
    b"SELECT MIN(r.created_at) FROM edda_sched s STRAIGHT_JOIN edda_run r FORCE INDEX (PRIMARY)"
    b" ON r.id = s.run_id AND r.gen = s.gen WHERE " + _WAITING
)
PARKED = (
    b"SELECT COUNT(*) FROM edda_sched FORCE INDEX (edda_sched_parked)"
    b" WHERE parked IS NOT NULL AND (ready_at IS NULL OR ready_at > " + NOW + b")"
)
OUTGOING = b"""SELECT COUNT(*) FROM (
    SELECT 1 FROM edda_outbox FORCE INDEX (edda_outbox_state) WHERE state = %b LIMIT %b) o"""
OLDEST_OUTGOING = b"""SELECT created_at FROM edda_outbox FORCE INDEX (edda_outbox_state)
    WHERE state = 'pending' ORDER BY seq LIMIT 1"""
DISPATCHES = b"SELECT COUNT(*) FROM (SELECT 1 FROM edda_dispatch LIMIT %b) o"

STARTED = b"""SELECT (created_at - %b) DIV %b AS place, COUNT(*) FROM edda_run FORCE INDEX (edda_run_created)
    WHERE created_at >= %b AND created_at < %b AND gen = 0 GROUP BY place"""
ENDED = b"""SELECT (ended_at - %b) DIV %b AS place,
    SUM(status = 'completed'), SUM(status = 'failed'), SUM(status = 'cancelled')
    FROM edda_result FORCE INDEX (edda_result_ended) WHERE ended_at >= %b AND ended_at < %b GROUP BY place"""
DURATIONS = b"""SELECT e.ended_at - r.created_at FROM (
    SELECT run_id, gen, ended_at FROM edda_result FORCE INDEX (edda_result_ended)
     WHERE ended_at >= %b ORDER BY ended_at DESC LIMIT %b) e
    STRAIGHT_JOIN edda_run r ON r.id = e.run_id AND r.gen = e.gen"""

# Every batch of a worker moves its fence; claims move the epochs of what is owned; outsiders leave runs, letters,
# events, lines of the audit, and what is ready. Each is the end of an index, and of what is ready at most a thousand.
# What the code says is a few rows.
PULSE = (
    b"SELECT worker, batch_no, moves FROM edda_fence ORDER BY worker",
    b"SELECT COUNT(*), SUM(epoch) FROM edda_sched FORCE INDEX (edda_sched_owner) WHERE owner IS NOT NULL",
    b"""SELECT created_at, id, gen FROM edda_run FORCE INDEX (edda_run_created)
    ORDER BY created_at DESC, id DESC LIMIT 1""",
    b"SELECT ended_at, run_id FROM edda_result FORCE INDEX (edda_result_ended) ORDER BY ended_at DESC LIMIT 1",
    b"SELECT MAX(at) FROM edda_delivery",
    b"SELECT MAX(seq) FROM edda_event",
    b"SELECT MAX(seq) FROM edda_outbox",
    b"SELECT MIN(due) FROM edda_outbox FORCE INDEX (edda_outbox_due) WHERE state = 'pending'",
    b"SELECT MAX(seq) FROM edda_outbox FORCE INDEX (edda_outbox_state) WHERE state = 'dead'",
    b"SELECT MAX(ended_at) FROM edda_outbox FORCE INDEX (edda_outbox_ended) WHERE state = 'sent'",
    b"SELECT MIN(seq), MAX(seq) FROM edda_dispatch",
    b"SELECT MAX(seq) FROM edda_audit",
    b"SELECT COUNT(*), SUM(CRC32(CONCAT(seen_at, details))) FROM edda_definition",
    b"SELECT COUNT(*), SUM(CRC32(`schema`)) FROM edda_form",
)

_MARKED = 1_000


class MySQLFigures:
    _survey: Pool

    async def backlog(self) -> Backlog:
        async with self._survey.session() as session:
            names = (await session.run(NAMES)).rows
            ready, waiting, oldest, parked, pending, dead, first, dispatches = await session.send(
                due(READY, names, MAX_COUNT),
                bind(WAITING, MAX_COUNT),
                bind(OLDEST_OF_FEW, SCAN_LIMIT),
                bind(PARKED),
                bind(OUTGOING, "pending", MAX_COUNT),
                bind(OUTGOING, "dead", MAX_COUNT),
                bind(OLDEST_OUTGOING),
                bind(DISPATCHES, MAX_COUNT),
            )
            since = oldest.rows or (await session.run(OLDEST)).rows
        return Backlog(
            ready=ready.rows[0][0],
            oldest_ready=ready.rows[0][1],
            waiting=waiting.rows[0][0],
            oldest_wait=since[0][0],
            parked=parked.rows[0][0],
            outbox_pending=pending.rows[0][0],
            outbox_dead=dead.rows[0][0],
            oldest_outgoing=first.rows[0][0] if first.rows else None,
            dispatches=dispatches.rows[0][0],
        )

    async def throughput(self, since: int, width: int, count: int) -> tuple[TimeBucket, ...]:
        span = (since, width, since, since + width * count)
        begun, over = await self._survey.send(bind(STARTED, *span), bind(ENDED, *span))
        started = {row[0]: row[1] for row in begun.rows}
        ended = {place: tuple(map(int, counts)) for place, *counts in over.rows}
        return tuple(TimeBucket(since + i * width, started.get(i, 0), *ended.get(i, ())) for i in range(count))

    async def latency(self, since: int, most: int) -> Latency:
        return measure(row[0] for row in (await self._survey.run(DURATIONS, since, most)).rows)

    async def change_token(self) -> str:
        async with self._survey.session() as session:
            names = (await session.run(NAMES)).rows
            replies = await session.send(due(READY_MARK, names, _MARKED), *map(bind, PULSE))
        return " ".join(_word(value) for reply in replies for row in reply.rows for value in (*row, ";"))


def due(template: bytes, names: Iterable[Row], limit: int) -> Statement:
    """What is ready of the workflows with these names, of which there may be none."""
    parts = [_DUE % (quote_text(name.decode()), int_or_null(limit)) for (name,) in names] or [
        _DUE % (quote_text(""), int_or_null(0))
    ]
    return Statement(template.decode(), template % (b" UNION ALL ".join(parts), int_or_null(limit)))


def _word(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
