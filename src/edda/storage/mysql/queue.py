"""Runs that wait for somebody, and letters that wait for a run."""

from __future__ import annotations

from collections.abc import Sequence

from edda.core.model import Claim, Delivery, WorkerId

from .clock import NOW, READ_CLOCK
from .news import MySQLNews
from .pool import Pool
from .rows import claimed_runs, delivery, run_id
from .session import BEGIN, COMMIT, Reply, Row, Session
from .statement import bind

# Waits for the batch in flight; without the row the worker was taken over and may claim nothing.
SHARE_FENCE = b"SELECT 1 FROM edda_fence WHERE worker = %b LOCK IN SHARE MODE"
# One name at a time: over several the server would sort, and lock all that is due before it takes the first few.
FIND_DUE = (
    b"SELECT ready_at, run_id, workflow, gen, epoch, absorbed, attempts FROM edda_sched FORCE INDEX (edda_sched_ready)"
    b" WHERE workflow = %b AND ready_at <= " + NOW + b" AND owner IS NULL"
    b" ORDER BY ready_at LIMIT %b FOR UPDATE SKIP LOCKED"
)
TAKE = b"""UPDATE edda_sched FORCE INDEX (PRIMARY)
    SET owner = %b, epoch = epoch + 1, ready_at = NULL, status = 'running', reason = NULL WHERE run_id IN (%b)"""
READ_RUNS = b"""SELECT r.id, r.input, r.created_at, r.deadline FROM edda_sched s FORCE INDEX (PRIMARY)
    STRAIGHT_JOIN edda_run r ON r.id = s.run_id AND r.gen = s.gen WHERE s.run_id IN (%b)"""
READ_HISTORY = b"""SELECT h.run_id, h.epoch,
        h.seq, h.kind, h.step, h.name, h.ok, h.at, h.input, h.value, h.attempt, h.n
    FROM edda_sched s FORCE INDEX (PRIMARY)
    STRAIGHT_JOIN edda_hist h ON h.run_id = s.run_id AND h.gen = s.gen WHERE s.run_id IN (%b)"""
READ_MAIL = b"""SELECT d.run_id, d.n, d.kind, d.at, d.step, d.value FROM edda_sched s FORCE INDEX (PRIMARY)
    STRAIGHT_JOIN edda_delivery d ON d.run_id = s.run_id AND d.n > s.absorbed WHERE s.run_id IN (%b)
    ORDER BY d.run_id, d.n"""
# The first entry of the ready index with a time in it; a run with an owner has none.
NEXT_DUE = b"SELECT MIN(ready_at) FROM edda_sched WHERE workflow = %b"
FIND_PARKED = b"SELECT run_id FROM edda_sched WHERE parked IN (%b) AND owner IS NULL"
UNPARK = (
    b"UPDATE edda_sched FORCE INDEX (PRIMARY) SET ready_at = " + NOW + b""
    b" WHERE run_id IN (%b) AND status = 'parked' AND owner IS NULL"
)
MAIL = b"""SELECT d.run_id, d.n, d.kind, d.at, d.step, d.value FROM edda_sched s FORCE INDEX (edda_sched_inbox)
    STRAIGHT_JOIN edda_delivery d ON d.run_id = s.run_id AND d.n > s.absorbed WHERE s.inbox = %b
    ORDER BY d.run_id, d.n"""


class MySQLQueue:
    _pool: Pool
    _news: MySQLNews

    async def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int) -> Claim:
        async with self._pool.session() as session:
            due = await _find_due(session, worker, workflows, limit)
            ids = [run_id(row[1]) for row in due]
            take = [bind(TAKE, worker, sorted(ids))] if ids else []
            *_, clock = await session.send(*take, bind(COMMIT), bind(READ_CLOCK))
            if not ids:
                return Claim(_time(clock), ())
            self._news.expect_more()
            # Statements of their own, after the claim: in the claim's they could be older than its rows.
            read = (READ_RUNS, READ_HISTORY, READ_MAIL)
            runs, history, mail = await session.send(*(bind(template, ids) for template in read))
            return Claim(_time(clock), claimed_runs(due, runs, history, mail))

    async def next_due(self, workflows: Sequence[str]) -> int | None:
        clock, *firsts = await self._pool.send(bind(READ_CLOCK), *(bind(NEXT_DUE, workflow) for workflow in workflows))
        times = [reply.rows[0][0] for reply in firsts if reply.rows[0][0] is not None]
        return max(0, min(times) - _time(clock)) if times else None

    async def unpark(self, workflows: Sequence[str]) -> int:
        if not workflows:
            return 0
        async with self._pool.session() as session:
            ids = sorted(run_id(row[0]) for row in (await session.run(FIND_PARKED, workflows)).rows)
            return (await session.run(UNPARK, ids)).affected if ids else 0

    async def mail(self, worker: WorkerId) -> tuple[Delivery, ...]:
        letters = tuple(delivery(row) for row in (await self._pool.run(MAIL, worker)).rows)
        if letters:
            self._news.expect_more()
        return letters


async def _find_due(session: Session, worker: WorkerId, workflows: Sequence[str], limit: int) -> list[Row]:
    """Up to `limit` rows of every name are locked, the oldest of all are taken; the commit frees the rest."""
    _, fence, *found = await session.send(
        bind(BEGIN), bind(SHARE_FENCE, worker), *(bind(FIND_DUE, workflow, limit) for workflow in workflows)
    )
    return sorted(row for reply in found for row in reply.rows)[:limit] if fence.rows else []


def _time(clock: Reply) -> int:
    return int(clock.rows[0][0])
