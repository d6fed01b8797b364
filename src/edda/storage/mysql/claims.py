"""Claiming runs that are due, and reading the inboxes of runs in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from edda.core.model import Claim, ClaimedRun, InboxItem, RunId, WorkerId
from edda.storage.shared.polling import PollingNotifications
from edda.storage.shared.rows import (
    rows_by_run,
    to_claimed_run,
    to_entry,
    to_inbox_item,
    to_run_id,
    to_step_commit,
    to_text,
    to_watcher,
)

from .connection import (
    ASSERT_ROW_COUNT,
    BEGIN,
    COMMIT,
    ROLLBACK,
    AssertionFailedError,
    MySQLPool,
    MySQLSession,
    Reply,
    ReplyRows,
    Row,
)
from .locks import repeated
from .statement import NOW, READ_CLOCK, Statement, bind, quote_text

# Waits for the batch in flight. Without the row the worker was taken over, and may claim nothing.
LOCK_FENCE_SHARED = b"SELECT 1 FROM edda_fence WHERE worker = %b LOCK IN SHARE MODE"
# On a cluster a take-over on another node does not see that lock, so a claim that found runs writes the row.
LOCK_FENCE = b"SELECT 1 FROM edda_fence WHERE worker = %b FOR UPDATE"
WRITE_FENCE = b"UPDATE edda_fence SET claims = claims + 1 WHERE worker = %b"
_COLUMNS = (
    b"run_id, workflow, generation, inbox_read, attempts, event_cursor, compensating, end_if_parked, deaths,"
    b" deaths_alone, died_seq, epoch, watchers"
)
# One workflow name at a time: for several names the server would sort, and lock all due runs before it takes the first.
FIND_DUE = (
    b"SELECT ready_at, " + _COLUMNS + b" FROM edda_open_run FORCE INDEX (edda_open_run_ready)"
    b" WHERE workflow = %b AND ready_at <= " + NOW + b" AND owner IS NULL"
    b" ORDER BY ready_at LIMIT %b FOR UPDATE SKIP LOCKED"
)
# In a row of its own, which only the worker's claims write; locked after the fence, in the message with the COMMIT.
COUNT_CLAIM = b"UPDATE edda_claim SET claims = claims + 1 WHERE worker = %b AND claims >= %b"
CLAIM_NUMBER = b"SELECT claims FROM edda_claim WHERE worker = %b"
TAKE = b"""UPDATE edda_open_run FORCE INDEX (PRIMARY)
    SET owner = %b, epoch = epoch + 1, ready_at = NULL, status = 'running', reason = NULL WHERE run_id IN (%b)"""
# The runs that died last come first; the claim takes the first group of them.
FIND_SUSPECTS = (
    b"SELECT suspect_at, " + _COLUMNS + b" FROM edda_open_run FORCE INDEX (edda_open_run_suspect)"
    b" WHERE suspect_at IS NOT NULL AND workflow IN (%b) AND owner IS NULL"
    b" ORDER BY suspect_at DESC, run_id LIMIT %b"
    b" FOR UPDATE SKIP LOCKED"
)
TAKE_SUSPECTS = b"""UPDATE edda_open_run FORCE INDEX (PRIMARY)
    SET owner = %b, epoch = epoch + 1, ready_at = NULL, suspect_at = NULL, status = 'running', reason = NULL,
        alone = %b WHERE run_id IN (%b)"""
HAS_SUSPECTS = b"""SELECT 1 FROM edda_open_run FORCE INDEX (edda_open_run_suspect)
    WHERE suspect_at IS NOT NULL AND workflow IN (%b) LIMIT 1"""
READ_WAITS = b"SELECT run_id, step, `key` FROM edda_wait WHERE run_id IN (%b) ORDER BY run_id, step"
READ_WATCHERS = b"SELECT run_id, watcher, step FROM edda_watcher WHERE run_id IN (%b) ORDER BY run_id, watcher, step"
READ_RUNS = b"""SELECT r.id, r.input, r.created_at, r.deadline, r.parent, r.parent_step, r.depth
    FROM edda_open_run s FORCE INDEX (PRIMARY)
    STRAIGHT_JOIN edda_run r ON r.id = s.run_id AND r.generation = s.generation WHERE s.run_id IN (%b)"""
READ_HISTORY = b"""SELECT h.run_id, h.epoch,
        h.seq, h.kind, h.step, h.name, h.ok, h.at, h.input, h.value, h.attempt, h.inbox_no, h.event
    FROM edda_open_run s FORCE INDEX (PRIMARY)
    STRAIGHT_JOIN edda_history h ON h.run_id = s.run_id AND h.generation = s.generation WHERE s.run_id IN (%b)"""
READ_STEP_COMMITS = b"""SELECT d.run_id, d.step, d.attempt, d.value, d.at FROM edda_open_run s FORCE INDEX (PRIMARY)
    STRAIGHT_JOIN edda_step_commit d ON d.run_id = s.run_id AND d.generation = s.generation
        WHERE s.run_id IN (%b) ORDER BY d.step"""
# The first entry of the ready index for each name; a run with an owner has no ready_at. One statement, because an idle
# worker sends it again and again.
NEXT_DUE = b"SELECT " + NOW + b", MIN(f.first) FROM (%b) f"
NEXT_OF_NAME = b"SELECT MIN(ready_at) AS first FROM edda_open_run WHERE workflow = %b"
FIND_PARKED = b"SELECT run_id FROM edda_open_run WHERE parked IN (%b) AND owner IS NULL AND ready_at > " + NOW
# As `unpark_pause`.
_UNPARKED_AT = (
    b"GREATEST("
    + NOW
    + b", IF(attempts < 3, 0, COALESCE(parked_at, 0) + CAST(100000 << LEAST(attempts, 8) AS SIGNED)))"
)
WAKE_PARKED = (
    b"UPDATE edda_open_run FORCE INDEX (PRIMARY) SET ready_at = LEAST(ready_at, " + _UNPARKED_AT + b")"
    b" WHERE run_id IN (%b) AND status = 'parked' AND owner IS NULL AND ready_at IS NOT NULL"
)
FIND_INBOXES = b"SELECT run_id, inbox_read FROM edda_open_run FORCE INDEX (edda_open_run_inbox) WHERE inbox = %b"
# Every bound is a literal: for a bound from a column of another table the server uses no range, and reads all items
# that the run ever received. An item with an event has no value of its own.
READ_INBOX_ITEMS = b"""SELECT d.run_id, d.inbox_no, d.kind, d.at, d.step, COALESCE(e.body, d.value), d.event
    FROM edda_inbox d FORCE INDEX (PRIMARY) LEFT JOIN edda_event e ON e.seq = d.event
    WHERE %b ORDER BY d.run_id, d.inbox_no"""

_INBOXES = 500
"""Inboxes in one statement."""


class MySQLClaims:
    _pool: MySQLPool
    _notifications: PollingNotifications

    @repeated
    async def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int, known_claims: int = 0) -> Claim:
        async with self._pool.session() as session:
            replies = await _lock_and_find(session, worker, *(bind(FIND_DUE, name, limit) for name in workflows))
            if replies is None:
                return await _claim_nothing(session)
            # Up to `limit` rows of every name are locked. The oldest of all are taken; the COMMIT unlocks the rest.
            due = sorted(row for reply in replies for row in reply.rows)[:limit]
            take = [bind(TAKE, worker, _ids(due))] if due else []
            return await self._take(session, worker, due, take, known_claims)

    async def _take(
        self, session: MySQLSession, worker: WorkerId, due: Sequence[Row], take: list[Statement], known_claims: int
    ) -> Claim:
        """Count the claim and commit it; the found rows are locked."""
        if take and session.node is not None:
            take.append(bind(WRITE_FENCE, worker))
        try:
            *_, counted, _, clock = await session.send(
                bind(COUNT_CLAIM, worker, known_claims),
                bind(ASSERT_ROW_COUNT, 1),
                *take,
                bind(CLAIM_NUMBER, worker),
                bind(COMMIT),
                bind(READ_CLOCK),
            )
        except AssertionFailedError:
            return await _claim_nothing(session)
        number = int(counted.rows[0][0])
        return Claim(int(clock.rows[0][0]), await self._load(session, due) if due else (), number)

    async def _load(self, session: MySQLSession, due: Sequence[Row]) -> tuple[ClaimedRun, ...]:
        self._notifications.expect_more()
        ids = [to_run_id(row[1]) for row in due]
        # After the claim's COMMIT: in the claim's statements the history could be older than the locked rows. The waits
        # come first: an event that is delivered between two of these statements is then seen twice instead of never.
        read = [bind(template, ids) for template in (READ_WAITS, READ_RUNS, READ_HISTORY, READ_STEP_COMMITS)]
        if watched := [to_run_id(row[1]) for row in due if row[-1]]:
            read.append(bind(READ_WATCHERS, watched))
        return _to_claimed_runs(due, await session.query(*read, *read_inbox_items((row[1], row[4]) for row in due)))

    @repeated
    async def claim_suspects(
        self, worker: WorkerId, workflows: Sequence[str], limit: int, alone: bool, known_claims: int = 0
    ) -> Claim:
        async with self._pool.session() as session:
            replies = await _lock_and_find(session, worker, bind(FIND_SUSPECTS, workflows, limit))
            if replies is None:
                return await _claim_nothing(session)
            due = [row for reply in replies for row in reply.rows if row[0] == reply.rows[0][0]]
            take = [bind(TAKE_SUSPECTS, worker, int(alone and len(due) == 1), _ids(due))] if due else []
            return await self._take(session, worker, due, take, known_claims)

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
            ids = sorted(to_run_id(row[0]) for row in (await session.run(FIND_PARKED, workflows)).rows)
            return (await session.run(WAKE_PARKED, ids)).affected if ids else 0

    async def read_inboxes(self, worker: WorkerId) -> tuple[InboxItem, ...]:
        async with self._pool.session() as session:
            inboxes = (await session.run(FIND_INBOXES, worker)).rows
            if not inboxes:
                return ()
            self._notifications.expect_more()
            replies = await session.send(*read_inbox_items(inboxes))
            return tuple(to_inbox_item(row) for reply in replies for row in reply.rows)


def _ids(due: Iterable[Row]) -> list[RunId]:
    """Sorted: every statement locks runs in this order."""
    return sorted(to_run_id(row[1]) for row in due)


def next_due(workflows: Iterable[str]) -> Statement:
    names = b" UNION ALL ".join(NEXT_OF_NAME % quote_text(workflow) for workflow in workflows)
    return Statement(NEXT_DUE.decode(), NEXT_DUE % names)


def read_inbox_items(inboxes: Iterable[tuple[bytes, int]]) -> Iterator[Statement]:
    """The items of each run after the last that it has read."""
    ranges = [
        b"(d.run_id = %b AND d.inbox_no > %d)" % (quote_text(to_run_id(run)), inbox_read) for run, inbox_read in inboxes
    ]
    for i in range(0, len(ranges), _INBOXES):
        yield Statement(READ_INBOX_ITEMS.decode(), READ_INBOX_ITEMS % b" OR ".join(ranges[i : i + _INBOXES]))


async def _claim_nothing(session: MySQLSession) -> Claim:
    *_, clock = await session.send(bind(ROLLBACK), bind(READ_CLOCK))
    return Claim(int(clock.rows[0][0]), ())


async def _lock_and_find(session: MySQLSession, worker: WorkerId, *find: Statement) -> list[Reply] | None:
    """None if the worker has no fence row."""
    lock = LOCK_FENCE_SHARED if session.node is None else LOCK_FENCE
    _, fence, *found = await session.send(bind(BEGIN), bind(lock, worker), *find)
    return found if fence.rows else None


def _to_claimed_runs(due: Iterable[Row], found: ReplyRows) -> tuple[ClaimedRun, ...]:
    """Without the runs that another worker has taken over since the claim."""
    runs = {row[0]: row[1:] for row in found.rows_of(READ_RUNS)}
    read = (READ_HISTORY, READ_INBOX_ITEMS, READ_WAITS, READ_WATCHERS, READ_STEP_COMMITS)
    history, inboxes, waits, watchers, step_commits = (rows_by_run(found.rows_of(template)) for template in read)
    return tuple(
        to_claimed_run(
            open_run,
            runs[run],
            epoch=epoch + 1,
            entries=sorted((to_entry(row[2:]) for row in history[run]), key=attrgetter("seq")),
            inbox=map(to_inbox_item, inboxes[run]),
            waits=((to_text(step), key) for _, step, key in waits[run]),
            watchers=(to_watcher(row[1:]) for row in watchers[run]),
            step_commits=(to_step_commit(row[1:]) for row in step_commits[run]),
        )
        for _, *open_run, epoch, _ in due
        if (run := open_run[0]) in runs and not _was_lost(history[run], epoch + 1, inbox_read=open_run[3])
    )


def _was_lost(history: Iterable[Row], epoch: int, inbox_read: int) -> bool:
    """Whether the history is newer than the claim: this process was stopped, and another worker took the run over."""
    return any(written > epoch or (inbox_no or 0) > inbox_read for _, written, *_, inbox_no, _ in history)
