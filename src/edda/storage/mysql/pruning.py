"""Pruning: deleting old rows, a few at a time, in short transactions on primary keys."""

from __future__ import annotations

from collections.abc import Iterable

from edda.core.model import MICROSECONDS

from .connection import BEGIN, COMMIT, MySQLPool, MySQLSession
from .events import LAST_EVENT_BEFORE
from .locks import EVENT_LOG, certify, lock_exclusive, repeated
from .statement import bind, join_values, quote_text

GRACE = 3600 * MICROSECONDS
"""Between deleting an event's keys and the event: a process that found the event by a key has read it by then."""

# The keys of old events have the lowest numbers of the index, and the bound ends the scan. GROUP BY, because DISTINCT
# would collect all numbers before it returns the first.
FIND_KEYED = b"""SELECT k.seq FROM edda_event_key k FORCE INDEX (edda_event_key_seq)
    STRAIGHT_JOIN edda_event e ON e.seq = k.seq
    WHERE k.seq <= %b AND e.received_at < %b GROUP BY k.seq ORDER BY k.seq LIMIT %b FOR UPDATE SKIP LOCKED"""
DELETE_KEYS = b"""DELETE k FROM (%b) v
    STRAIGHT_JOIN edda_event_key k FORCE INDEX (edda_event_key_seq) ON k.seq = v.seq"""
_UNREAD = b"""edda_inbox d STRAIGHT_JOIN edda_open_run s ON s.run_id = d.run_id AND s.inbox_read < d.inbox_no"""
FIND_OLD = (
    b"""SELECT e.seq FROM edda_event e FORCE INDEX (edda_event_received)
    WHERE e.received_at < %%b AND e.seq < %%b
    AND NOT EXISTS (SELECT 1 FROM edda_event_key k WHERE k.seq = e.seq)
    AND NOT EXISTS (SELECT 1 FROM %b WHERE d.event = e.seq)
    ORDER BY e.received_at LIMIT %%b FOR UPDATE SKIP LOCKED"""
    % _UNREAD
)
# Read again when the events are locked: then no transaction can deliver them or add keys.
FIND_USED = (
    b"""SELECT seq FROM edda_event_key WHERE seq IN (%%b)
    UNION SELECT d.event FROM %b WHERE d.event IN (%%b)"""
    % _UNREAD
)
DELETE_EVENTS = b"DELETE e FROM (%b) v STRAIGHT_JOIN edda_event e ON e.seq = v.seq"
MAX_EVENT = b"SELECT MAX(seq) FROM edda_event"

# As long as the event exists, its item in an open run's inbox keeps the run from receiving it twice.
FIND_READ = b"""SELECT d.run_id, d.inbox_no FROM edda_inbox d FORCE INDEX (edda_inbox_at)
    LEFT JOIN edda_open_run s ON s.run_id = d.run_id LEFT JOIN edda_event e ON e.seq = d.event
    WHERE d.at < %b AND (s.run_id IS NULL OR (d.inbox_no <= s.inbox_read AND e.seq IS NULL)) ORDER BY d.at LIMIT %b"""
DELETE_INBOX_ITEMS = (
    b"DELETE d FROM (%b) v STRAIGHT_JOIN edda_inbox d ON d.run_id = v.run_id AND d.inbox_no = v.inbox_no"
)

FIND_ENDED = b"""SELECT r.run_id FROM edda_result r FORCE INDEX (edda_result_ended)
    WHERE r.ended_at < %b AND NOT EXISTS (SELECT 1 FROM edda_open_run s WHERE s.run_id = r.run_id)
    ORDER BY r.ended_at LIMIT %b FOR UPDATE SKIP LOCKED"""
DELETE_OF_RUNS = (
    b"DELETE p FROM (%b) v STRAIGHT_JOIN edda_old_generation p ON p.run_id = v.run_id",
    b"DELETE h FROM (%b) v STRAIGHT_JOIN edda_history h ON h.run_id = v.run_id",
    b"DELETE d FROM (%b) v STRAIGHT_JOIN edda_inbox d ON d.run_id = v.run_id",
    b"DELETE w FROM (%b) v STRAIGHT_JOIN edda_watcher w ON w.run_id = v.run_id",
    b"DELETE d FROM (%b) v STRAIGHT_JOIN edda_step_commit d ON d.run_id = v.run_id",
    b"DELETE f FROM (%b) v STRAIGHT_JOIN edda_run_value f ON f.run_id = v.run_id",
    b"DELETE r FROM (%b) v STRAIGHT_JOIN edda_run r ON r.id = v.run_id",
    b"DELETE r FROM (%b) v STRAIGHT_JOIN edda_result r ON r.run_id = v.run_id",
)

# Of open runs only: DELETE_OF_RUNS deletes the generations of ended runs.
FIND_OLD_GENERATIONS = b"""SELECT p.run_id, p.generation
    FROM edda_old_generation p FORCE INDEX (edda_old_generation_ended)
    STRAIGHT_JOIN edda_open_run s ON s.run_id = p.run_id WHERE p.ended_at < %b ORDER BY p.ended_at LIMIT %b"""
# The first DELETE decides which process prunes a generation: another one that found it waits here, and deletes nothing.
DELETE_GENERATIONS = (
    b"DELETE p FROM (%b) v STRAIGHT_JOIN edda_old_generation p ON p.run_id = v.run_id AND p.generation = v.generation",
    b"DELETE h FROM (%b) v STRAIGHT_JOIN edda_history h ON h.run_id = v.run_id AND h.generation = v.generation",
    b"DELETE d FROM (%b) v STRAIGHT_JOIN edda_step_commit d ON d.run_id = v.run_id AND d.generation = v.generation",
    b"DELETE r FROM (%b) v STRAIGHT_JOIN edda_run r ON r.id = v.run_id AND r.generation = v.generation",
)

FIND_SENT = b"""SELECT seq FROM edda_outbox FORCE INDEX (edda_outbox_ended)
    WHERE state = 'sent' AND ended_at < %b ORDER BY ended_at, seq LIMIT %b FOR UPDATE SKIP LOCKED"""
DELETE_SENT = b"DELETE o FROM (%b) v STRAIGHT_JOIN edda_outbox o ON o.seq = v.seq"


class MySQLPruning:
    _pool: MySQLPool

    @repeated
    async def prune_events(self, before: int, limit: int) -> int:
        async with self._pool.session() as session:
            return await _prune_keys(session, before, limit) + await _prune_events(session, before - GRACE, limit)

    @repeated
    async def prune_inbox(self, before: int, limit: int) -> int:
        async with self._pool.session() as session:
            read = sorted((await session.run(FIND_READ, before, limit)).rows)
            rows = [b"SELECT %b AS run_id, %d AS inbox_no" % (quote_text(run.decode()), n) for run, n in read]
            return sum(reply.affected for reply in await session.send(*join_values(DELETE_INBOX_ITEMS, rows)))

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


async def _prune_keys(session: MySQLSession, before: int, limit: int) -> int:
    newest = (await session.run(LAST_EVENT_BEFORE, before)).rows
    if not newest:
        return 0
    _, keyed = await session.send(bind(BEGIN), bind(FIND_KEYED, newest[0][0], before, limit))
    await session.send(*join_values(DELETE_KEYS, _numbers(row[0] for row in keyed.rows)), bind(COMMIT))
    return len(keyed.rows)


async def _prune_events(session: MySQLSession, before: int, limit: int) -> int:
    """Never the newest event: new runs take their event cursor from it."""
    newest = (await session.run(MAX_EVENT)).rows[0][0]
    if newest is None:
        return 0
    # On a cluster a process on another node that adds keys does not see the locks on events, so both write a bucket.
    bucket = [] if session.node is None else [lock_exclusive([EVENT_LOG])]
    *_, old = await session.send(bind(BEGIN), *bucket, bind(FIND_OLD, before, newest, limit))
    seqs = {row[0] for row in old.rows}
    used = await session.run(FIND_USED, sorted(seqs), sorted(seqs))
    unused = seqs.difference(row[0] for row in used.rows)
    certified = certify(EVENT_LOG, session.node) if unused else ()
    await session.send(*certified, *join_values(DELETE_EVENTS, _numbers(unused)), bind(COMMIT))
    return len(unused)


async def _prune_generations(session: MySQLSession, before: int, limit: int) -> int:
    past = (await session.run(FIND_OLD_GENERATIONS, before, limit)).rows
    rows = [
        b"SELECT %b AS run_id, %d AS generation" % (quote_text(run.decode()), generation)
        for run, generation in sorted(past)
    ]
    if not rows:
        return 0
    claim, *rest = (list(join_values(template, rows)) for template in DELETE_GENERATIONS)
    replies = await session.send(bind(BEGIN), *claim, *(statement for part in rest for statement in part), bind(COMMIT))
    return sum(reply.affected for reply in replies[1 : 1 + len(claim)])


def _numbers(seqs: Iterable[int]) -> list[bytes]:
    return [b"SELECT %d AS seq" % seq for seq in sorted(seqs)]
