"""Removing what is old: a plain look for what is worth it, then short transactions on primary keys."""

from __future__ import annotations

from collections.abc import Iterable

from edda.core.model import MICROSECONDS

from .events import NEWEST_BEFORE
from .locks import LOG, certify, lock_exclusive, repeated
from .pool import Pool
from .session import BEGIN, COMMIT, Session
from .statement import bind, join_values, quote_text

GRACE = 3600 * MICROSECONDS
"""An event without keys is kept this much longer, for those who found it while it had them."""

# Numbers with keys that are old are the lowest of the index; the bound keeps it from looking at those that are not.
# GROUP BY: DISTINCT would collect all of them before it takes the first few.
FIND_KEYED = b"""SELECT k.seq FROM edda_event_key k FORCE INDEX (edda_event_key_seq)
    STRAIGHT_JOIN edda_event e ON e.seq = k.seq
    WHERE k.seq <= %b AND e.received_at < %b GROUP BY k.seq ORDER BY k.seq LIMIT %b FOR UPDATE SKIP LOCKED"""
DELETE_KEYS = b"""DELETE k FROM (%b) v
    STRAIGHT_JOIN edda_event_key k FORCE INDEX (edda_event_key_seq) ON k.seq = v.seq"""
_UNREAD = b"""edda_delivery d STRAIGHT_JOIN edda_sched s ON s.run_id = d.run_id AND s.absorbed < d.n"""
FIND_OLD = (
    b"""SELECT e.seq FROM edda_event e FORCE INDEX (edda_event_received)
    WHERE e.received_at < %%b AND e.seq < %%b
    AND NOT EXISTS (SELECT 1 FROM edda_event_key k WHERE k.seq = e.seq)
    AND NOT EXISTS (SELECT 1 FROM %b WHERE d.event = e.seq)
    ORDER BY e.received_at LIMIT %%b FOR UPDATE SKIP LOCKED"""
    % _UNREAD
)
# Asked again when the events are locked: then nobody can deliver them or give them keys.
FIND_USED = (
    b"""SELECT seq FROM edda_event_key WHERE seq IN (%%b)
    UNION SELECT d.event FROM %b WHERE d.event IN (%%b)"""
    % _UNREAD
)
DELETE_EVENTS = b"DELETE e FROM (%b) v STRAIGHT_JOIN edda_event e ON e.seq = v.seq"
NEWEST = b"SELECT MAX(seq) FROM edda_event"

# While a run is open, its letter is what keeps it from getting the event twice.
FIND_READ = b"""SELECT d.run_id, d.n FROM edda_delivery d FORCE INDEX (edda_delivery_at)
    LEFT JOIN edda_sched s ON s.run_id = d.run_id LEFT JOIN edda_event e ON e.seq = d.event
    WHERE d.at < %b AND (s.run_id IS NULL OR (d.n <= s.absorbed AND e.seq IS NULL)) ORDER BY d.at LIMIT %b"""
DELETE_LETTERS = b"DELETE d FROM (%b) v STRAIGHT_JOIN edda_delivery d ON d.run_id = v.run_id AND d.n = v.n"

FIND_ENDED = b"""SELECT r.run_id FROM edda_result r FORCE INDEX (edda_result_ended)
    WHERE r.ended_at < %b AND NOT EXISTS (SELECT 1 FROM edda_sched s WHERE s.run_id = r.run_id)
    ORDER BY r.ended_at LIMIT %b FOR UPDATE SKIP LOCKED"""
DELETE_OF_RUNS = (
    b"DELETE p FROM (%b) v STRAIGHT_JOIN edda_past p ON p.run_id = v.run_id",
    b"DELETE h FROM (%b) v STRAIGHT_JOIN edda_hist h ON h.run_id = v.run_id",
    b"DELETE d FROM (%b) v STRAIGHT_JOIN edda_delivery d ON d.run_id = v.run_id",
    b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_watcher w ON w.run_id = v.run_id",
    b"DELETE d FROM (%b) v STRAIGHT_JOIN edda_done d ON d.run_id = v.run_id",
    b"DELETE f FROM (%b) v STRAIGHT_JOIN edda_fact f ON f.run_id = v.run_id",
    b"DELETE r FROM (%b) v STRAIGHT_JOIN edda_run r ON r.id = v.run_id",
    b"DELETE r FROM (%b) v STRAIGHT_JOIN edda_result r ON r.run_id = v.run_id",
)

# Of open runs: those of one that has ended go with it.
FIND_PAST = b"""SELECT p.run_id, p.gen FROM edda_past p FORCE INDEX (edda_past_ended)
    STRAIGHT_JOIN edda_sched s ON s.run_id = p.run_id WHERE p.ended_at < %b ORDER BY p.ended_at LIMIT %b"""
# The first of them decides who removes a generation: another who found it too waits here, and then removes nothing.
DELETE_GENERATIONS = (
    b"DELETE p FROM (%b) v STRAIGHT_JOIN edda_past p ON p.run_id = v.run_id AND p.gen = v.gen",
    b"DELETE h FROM (%b) v STRAIGHT_JOIN edda_hist h ON h.run_id = v.run_id AND h.gen = v.gen",
    b"DELETE d FROM (%b) v STRAIGHT_JOIN edda_done d ON d.run_id = v.run_id AND d.gen = v.gen",
    b"DELETE r FROM (%b) v STRAIGHT_JOIN edda_run r ON r.id = v.run_id AND r.gen = v.gen",
)

FIND_SENT = b"""SELECT seq FROM edda_outbox FORCE INDEX (edda_outbox_ended)
    WHERE state = 'sent' AND ended_at < %b ORDER BY ended_at, seq LIMIT %b FOR UPDATE SKIP LOCKED"""
DELETE_SENT = b"DELETE o FROM (%b) v STRAIGHT_JOIN edda_outbox o ON o.seq = v.seq"


class MySQLPruning:
    _pool: Pool

    @repeated
    async def prune_events(self, before: int, limit: int) -> int:
        async with self._pool.session() as session:
            return await _prune_keys(session, before, limit) + await _prune_events(session, before - GRACE, limit)

    @repeated
    async def prune_inbox(self, before: int, limit: int) -> int:
        async with self._pool.session() as session:
            read = sorted((await session.run(FIND_READ, before, limit)).rows)
            rows = [b"SELECT %b AS run_id, %d AS n" % (quote_text(run.decode()), n) for run, n in read]
            return sum(reply.affected for reply in await session.send(*join_values(DELETE_LETTERS, rows)))

    @repeated
    async def prune_runs(self, before: int, limit: int) -> int:
        async with self._pool.session() as session:
            _, ended = await session.send(bind(BEGIN), bind(FIND_ENDED, before, limit))
            rows = [b"SELECT %b AS run_id" % quote_text(row[0].decode()) for row in sorted(ended.rows)]
            deletions = (statement for template in DELETE_OF_RUNS for statement in join_values(template, rows))
            await session.send(*deletions, bind(COMMIT))
            return len(rows) + await _prune_generations(session, before, limit - len(rows))

    @repeated
    async def prune_outbox(self, before: int, limit: int) -> int:
        async with self._pool.session() as session:
            _, sent = await session.send(bind(BEGIN), bind(FIND_SENT, before, limit))
            await session.send(*join_values(DELETE_SENT, _numbers(row[0] for row in sent.rows)), bind(COMMIT))
            return len(sent.rows)


async def _prune_keys(session: Session, before: int, limit: int) -> int:
    newest = (await session.run(NEWEST_BEFORE, before)).rows
    if not newest:
        return 0
    _, keyed = await session.send(bind(BEGIN), bind(FIND_KEYED, newest[0][0], before, limit))
    await session.send(*join_values(DELETE_KEYS, _numbers(row[0] for row in keyed.rows)), bind(COMMIT))
    return len(keyed.rows)


async def _prune_events(session: Session, before: int, limit: int) -> int:
    """Never the newest: a run that is started sees the events after it."""
    newest = (await session.run(NEWEST)).rows[0][0]
    if newest is None:
        return 0
    # In a cluster the locks on the events say nothing to who gives them keys on another node: both write a bucket.
    alone = [] if session.node is None else [lock_exclusive([LOG])]
    *_, old = await session.send(bind(BEGIN), *alone, bind(FIND_OLD, before, newest, limit))
    seqs = {row[0] for row in old.rows}
    used = await session.run(FIND_USED, sorted(seqs), sorted(seqs))
    unused = seqs.difference(row[0] for row in used.rows)
    certified = certify(LOG, session.node) if unused else ()
    await session.send(*certified, *join_values(DELETE_EVENTS, _numbers(unused)), bind(COMMIT))
    return len(unused)


async def _prune_generations(session: Session, before: int, limit: int) -> int:
    past = (await session.run(FIND_PAST, before, limit)).rows
    rows = [b"SELECT %b AS run_id, %d AS gen" % (quote_text(run.decode()), gen) for run, gen in sorted(past)]
    if not rows:
        return 0
    claim, *rest = (list(join_values(template, rows)) for template in DELETE_GENERATIONS)
    replies = await session.send(bind(BEGIN), *claim, *(statement for part in rest for statement in part), bind(COMMIT))
    return sum(reply.affected for reply in replies[1 : 1 + len(claim)])


def _numbers(seqs: Iterable[int]) -> list[bytes]:
    return [b"SELECT %d AS seq" % seq for seq in sorted(seqs)]
