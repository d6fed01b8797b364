"""Runs that wait for somebody, and letters that wait for a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from edda.core.model import Claim, ClaimedRun, InboxItem, RunId, WorkerId

from .clock import NOW, READ_CLOCK
from .locks import repeated
from .notifications import MySQLNews
from .pool import Pool
from .rows import claimed_runs, delivery, run_id
from .session import ASSERT_ROW_COUNT, BEGIN, COMMIT, ROLLBACK, AssertionFailedError, Reply, Row, Session
from .statement import Statement, bind, quote_text

# Waits for the batch in flight; without the row the worker was taken over and may claim nothing.
SHARE_FENCE = b"SELECT 1 FROM edda_fence WHERE worker = %b LOCK IN SHARE MODE"
# In a cluster who takes over on another node does not see that lock, so a claim that finds anything writes the row.
HOLD_FENCE = b"SELECT 1 FROM edda_fence WHERE worker = %b FOR UPDATE"
WRITE_FENCE = b"UPDATE edda_fence SET claims = claims + 1 WHERE worker = %b"
# One name at a time: over several the server would sort, and lock all that is due before it takes the first few.
_COLUMNS = (
    b"run_id, workflow, gen, epoch, absorbed, attempts, start_seq, undoing, end_if_parked, deaths, deaths_alone,"
    b" died_seq, watchers"
)
FIND_DUE = (
    b"SELECT ready_at, " + _COLUMNS + b" FROM edda_sched FORCE INDEX (edda_sched_ready)"
    b" WHERE workflow = %b AND ready_at <= " + NOW + b" AND owner IS NULL"
    b" ORDER BY ready_at LIMIT %b FOR UPDATE SKIP LOCKED"
)
# In a row of its own, which only the worker's claims write; taken behind the fence, and in the message that commits.
COUNT_CLAIM = b"UPDATE edda_claim SET n = n + 1 WHERE worker = %b AND n >= %b"
CLAIM_NUMBER = b"SELECT n FROM edda_claim WHERE worker = %b"
TAKE = b"""UPDATE edda_sched FORCE INDEX (PRIMARY)
    SET owner = %b, epoch = epoch + 1, ready_at = NULL, status = 'running', reason = NULL WHERE run_id IN (%b)"""
# Those first that died last; of these the first group is claimed.
FIND_SUSPECTS = (
    b"SELECT suspect_at, " + _COLUMNS + b" FROM edda_sched FORCE INDEX (edda_sched_suspect)"
    b" WHERE suspect_at IS NOT NULL AND workflow IN (%b) AND owner IS NULL"
    b" ORDER BY suspect_at DESC, run_id LIMIT %b"
    b" FOR UPDATE SKIP LOCKED"
)
TAKE_SUSPECTS = b"""UPDATE edda_sched FORCE INDEX (PRIMARY)
    SET owner = %b, epoch = epoch + 1, ready_at = NULL, suspect_at = NULL, status = 'running', reason = NULL,
        alone = %b WHERE run_id IN (%b)"""
HAS_SUSPECTS = b"""SELECT 1 FROM edda_sched FORCE INDEX (edda_sched_suspect)
    WHERE suspect_at IS NOT NULL AND workflow IN (%b) LIMIT 1"""
READ_WAITS = b"SELECT run_id, step, `key` FROM edda_wait WHERE run_id IN (%b) ORDER BY run_id, step"
READ_WATCHERS = b"SELECT run_id, watcher, step FROM edda_watcher WHERE run_id IN (%b) ORDER BY run_id, watcher, step"
READ_RUNS = b"""SELECT r.id, r.input, r.created_at, r.deadline, r.parent, r.parent_step, r.depth
    FROM edda_sched s FORCE INDEX (PRIMARY)
    STRAIGHT_JOIN edda_run r ON r.id = s.run_id AND r.gen = s.gen WHERE s.run_id IN (%b)"""
READ_HISTORY = b"""SELECT h.run_id, h.epoch,
        h.seq, h.kind, h.step, h.name, h.ok, h.at, h.input, h.value, h.attempt, h.n, h.event
    FROM edda_sched s FORCE INDEX (PRIMARY)
    STRAIGHT_JOIN edda_hist h ON h.run_id = s.run_id AND h.gen = s.gen WHERE s.run_id IN (%b)"""
READ_DONE = b"""SELECT d.run_id, d.step, d.attempt, d.value, d.at FROM edda_sched s FORCE INDEX (PRIMARY)
    STRAIGHT_JOIN edda_done d ON d.run_id = s.run_id AND d.gen = s.gen WHERE s.run_id IN (%b) ORDER BY d.step"""
# The first entry of the ready index with a time in it, name by name; a run with an owner has none. One statement: this
# is what an idle worker asks again and again.
NEXT_DUE = b"SELECT " + NOW + b", MIN(f.first) FROM (%b) f"
NEXT_OF_NAME = b"SELECT MIN(ready_at) AS first FROM edda_sched WHERE workflow = %b"
FIND_PARKED = b"SELECT run_id FROM edda_sched WHERE parked IN (%b) AND owner IS NULL AND ready_at > " + NOW
# As `unpark_pause` says.
_UNPARKED_AT = (
    b"GREATEST("
    + NOW
    + b", IF(attempts < 3, 0, COALESCE(parked_at, 0) + CAST(100000 << LEAST(attempts, 8) AS SIGNED)))"
)
UNPARK = (
    b"UPDATE edda_sched FORCE INDEX (PRIMARY) SET ready_at = LEAST(ready_at, " + _UNPARKED_AT + b")"
    b" WHERE run_id IN (%b) AND status = 'parked' AND owner IS NULL AND ready_at IS NOT NULL"
)
FIND_MAIL = b"SELECT run_id, absorbed FROM edda_sched FORCE INDEX (edda_sched_inbox) WHERE inbox = %b"
# Every bound is written out: from a column of another table the server would not make a range, and read all that a
# run ever got. A letter that brings an event has no value of its own.
READ_MAIL = b"""SELECT d.run_id, d.n, d.kind, d.at, d.step, COALESCE(e.body, d.value), d.event
    FROM edda_delivery d FORCE INDEX (PRIMARY) LEFT JOIN edda_event e ON e.seq = d.event
    WHERE %b ORDER BY d.run_id, d.n"""

_INBOXES = 500
"""Ranges in one statement."""


class MySQLQueue:
    _pool: Pool
    _news: MySQLNews

    @repeated
    async def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int, seen: int = 0) -> Claim:
        async with self._pool.session() as session:
            due = await _find_due(session, worker, workflows, limit)
            if due is None:
                return await _claim_nothing(session)
            take = [bind(TAKE, worker, _ids(due))] if due else []
            return await self._take(session, worker, due, take, seen)

    async def _take(
        self, session: Session, worker: WorkerId, due: Sequence[Row], take: list[Statement], seen: int
    ) -> Claim:
        """Count the claim and commit it; what was found is locked."""
        if take and session.node is not None:
            take.append(bind(WRITE_FENCE, worker))
        try:
            *_, counted, _, clock = await session.send(
                bind(COUNT_CLAIM, worker, seen),
                bind(ASSERT_ROW_COUNT, 1),
                *take,
                bind(CLAIM_NUMBER, worker),
                bind(COMMIT),
                bind(READ_CLOCK),
            )
        except AssertionFailedError:
            return await _claim_nothing(session)
        number = int(counted.rows[0][0])
        return Claim(_time(clock), await self._load(session, due) if due else (), number)

    async def _load(self, session: Session, due: Sequence[Row]) -> tuple[ClaimedRun, ...]:
        self._news.expect_more()
        ids = [run_id(row[1]) for row in due]
        # Statements of their own, after the claim: in the claim's they could be older than its rows. The waits
        # first: one that is met between two of these is then seen in the inbox as well, instead of nowhere.
        read = [bind(template, ids) for template in (READ_WAITS, READ_RUNS, READ_HISTORY, READ_DONE)]
        if watched := [run_id(row[1]) for row in due if row[-1]]:
            read.append(bind(READ_WATCHERS, watched))
        found = await session.query(*read, *read_mail((row[1], row[5]) for row in due))
        about = (READ_WAITS, READ_RUNS, READ_HISTORY, READ_MAIL, READ_WATCHERS, READ_DONE)
        return claimed_runs(due, *map(found.rows_of, about))

    @repeated
    async def claim_suspects(
        self, worker: WorkerId, workflows: Sequence[str], few: int, alone: bool, seen: int = 0
    ) -> Claim:
        async with self._pool.session() as session:
            find = bind(FIND_SUSPECTS, workflows, few)
            look = SHARE_FENCE if session.node is None else HOLD_FENCE
            _, fence, found = await session.send(bind(BEGIN), bind(look, worker), find)
            if not fence.rows:
                return await _claim_nothing(session)
            due = [row for row in found.rows if row[0] == found.rows[0][0]]
            take = [bind(TAKE_SUSPECTS, worker, int(alone and len(due) == 1), _ids(due))] if due else []
            return await self._take(session, worker, due, take, seen)

    async def has_suspects(self, workflows: Sequence[str]) -> bool:
        return bool((await self._pool.run(HAS_SUSPECTS, workflows)).rows)

    async def next_due(self, workflows: Sequence[str]) -> int | None:
        if not workflows:
            return None
        ((now, first),) = (await self._pool.send(next_due(workflows)))[0].rows
        return None if first is None else max(0, first - int(now))

    @repeated
    async def wake_parked(self, workflows: Sequence[str]) -> int:
        if not workflows:
            return 0
        async with self._pool.session() as session:
            ids = sorted(run_id(row[0]) for row in (await session.run(FIND_PARKED, workflows)).rows)
            return (await session.run(UNPARK, ids)).affected if ids else 0

    async def read_inboxes(self, worker: WorkerId) -> tuple[InboxItem, ...]:
        async with self._pool.session() as session:
            inboxes = (await session.run(FIND_MAIL, worker)).rows
            if not inboxes:
                return ()
            self._news.expect_more()
            replies = await session.send(*read_mail(inboxes))
            return tuple(delivery(row) for reply in replies for row in reply.rows)


def _ids(due: Iterable[Row]) -> list[RunId]:
    """In the order in which everybody locks them."""
    return sorted(run_id(row[1]) for row in due)


def next_due(workflows: Iterable[str]) -> Statement:
    names = b" UNION ALL ".join(NEXT_OF_NAME % quote_text(workflow) for workflow in workflows)
    return Statement(NEXT_DUE.decode(), NEXT_DUE % names)


def read_mail(inboxes: Iterable[tuple[bytes, int]]) -> Iterator[Statement]:
    """The letters of each run after the last it has read."""
    ranges = [b"(d.run_id = %b AND d.n > %d)" % (quote_text(run_id(run)), absorbed) for run, absorbed in inboxes]
    for i in range(0, len(ranges), _INBOXES):
        yield Statement(READ_MAIL.decode(), READ_MAIL % b" OR ".join(ranges[i : i + _INBOXES]))


async def _claim_nothing(session: Session) -> Claim:
    *_, clock = await session.send(bind(ROLLBACK), bind(READ_CLOCK))
    return Claim(_time(clock), ())


async def _find_due(session: Session, worker: WorkerId, workflows: Sequence[str], limit: int) -> list[Row] | None:
    """Up to `limit` rows of every name are locked, the oldest of all are taken; the commit frees the rest. None if the
    worker has no fence."""
    lock = SHARE_FENCE if session.node is None else HOLD_FENCE
    _, fence, *found = await session.send(
        bind(BEGIN), bind(lock, worker), *(bind(FIND_DUE, workflow, limit) for workflow in workflows)
    )
    return sorted(row for reply in found for row in reply.rows)[:limit] if fence.rows else None


def _time(clock: Reply) -> int:
    return int(clock.rows[0][0])
