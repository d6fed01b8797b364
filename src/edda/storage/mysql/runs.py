"""Reading runs, their history and their values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from edda.core.model import CancelOutcome, EndWatcher, Entry, EntryKind, RunFilter, RunId, RunRecord, RunValue, Start
from edda.errors import StorageConflictError

from .batch_sql import FIND_EXISTING, IS_PARKED, NEWEST, READ_NEWEST, WAKES, insert_unowned
from .clock import NOW, READ_CLOCK
from .locks import repeated
from .pool import Pool
from .rows import entry, fact, run_id, run_record, watcher
from .session import BEGIN, COMMIT, AssertionFailedError
from .statement import Value, bind, int_or_null, quote_bytes, quote_text

INSERT_FACT = b"INSERT INTO edda_fact (run_id, name, value, at) VALUES "
OR_REPLACE = b" ON DUPLICATE KEY UPDATE value = VALUES(value), at = VALUES(at)"
FACTS = b"SELECT name, value FROM edda_fact WHERE run_id = %b ORDER BY name"
FACT = b"SELECT name, value FROM edda_fact WHERE run_id = %b AND name = %b"


def fact_row(run_id: RunId, fact: RunValue) -> bytes:
    return b"(%b,%b,%b,%b)" % (quote_text(run_id), quote_text(fact.name), quote_bytes(fact.value), NOW)


class MySQLFacts:
    _pool: Pool

    async def run_values(self, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        asked = self._pool.run(FACTS, run_id) if name is None else self._pool.run(FACT, run_id, name)
        return tuple(map(fact, (await asked).rows))


_START_ATTEMPTS = 5

LOCK = b"SELECT cancelled, delivered FROM edda_sched WHERE run_id = %b FOR UPDATE"
EXISTS = b"SELECT 1 FROM edda_run WHERE id = %b LIMIT 1"
CANCEL = b"UPDATE edda_sched SET cancelled = TRUE, delivered = %b WHERE run_id = %b"
DELIVER = b"INSERT INTO edda_delivery (run_id, n, kind, step, at, value) VALUES (%b, %b, %b, '', " + NOW + b", %b)"
WAKE = b"UPDATE edda_sched s SET ready_at = 0, status = 'running', reason = NULL WHERE run_id = %b AND " + WAKES
CANCEL_PARKED = b"UPDATE edda_sched s SET ready_at = 0, end_if_parked = TRUE WHERE run_id = %b AND " + IS_PARKED
_ALL = 2**63 - 1
LATEST_GEN = b"SELECT MAX(gen) FROM edda_run WHERE id = %b"
HISTORY = b"""SELECT seq, kind, step, name, ok, at, input, value, attempt, n, event
    FROM edda_hist WHERE run_id = %b AND gen = %b AND seq > %b AND (%b IS NULL OR step = %b) ORDER BY seq LIMIT %b"""
LOCK_WATCHED = b"SELECT 1 FROM edda_sched WHERE run_id = %b FOR UPDATE"
INSERT_WATCHER = b"""INSERT INTO edda_watcher (run_id, watcher, step)
    SELECT run_id, %b, %b FROM edda_sched WHERE run_id = %b ON DUPLICATE KEY UPDATE step = step"""
COUNT_WATCHERS = b"""UPDATE edda_sched
    SET watchers = (SELECT COUNT(*) FROM edda_watcher WHERE run_id = %b) WHERE run_id = %b"""
WATCHERS = b"SELECT watcher, step FROM edda_watcher WHERE run_id = %b ORDER BY watcher, step"

# A run that rests but is due counts as running: somebody may claim it at any moment. One that undoes what it did is
# compensating whatever it does, unless it is parked.
OPEN_STATUS = (
    b"CASE WHEN s.owner IS NULL AND s.ready_at <= " + NOW + b""
    b" THEN IF(s.undoing OR s.status = 'compensating', 'compensating', 'running')"
    b" WHEN s.undoing AND s.status <> 'parked' THEN 'compensating' ELSE s.status END"
)
STATUS = b"COALESCE(e.status, " + OPEN_STATUS + b")"
COLUMNS = (
    b"SELECT r.id, r.workflow, r.gen, " + STATUS + b", r.input, r.created_at, r.deadline,"
    b" s.owner, s.ready_at, s.reason, e.ended_at, e.value, r.parent, COALESCE(s.deaths, 0),"
    b" COALESCE(s.cancelled AND NOT s.undoing AND NOT s.end_if_parked, FALSE) FROM "
)
# The end of the index, run by run: "no newer one" would be looked for in all generations, for each of them.
RECORDS = (
    COLUMNS + b"edda_run r"
    b" LEFT JOIN edda_sched s ON s.run_id = r.id LEFT JOIN edda_result e ON e.run_id = r.id AND e.gen = r.gen"
    b" WHERE r.gen = (SELECT last.gen FROM edda_run last WHERE last.id = r.id ORDER BY last.gen DESC LIMIT 1)"
)
# The number beforehand: else all generations are read, each to find out whether it is the newest.
NEWEST_OF_ID = b" AND r.id = %b AND r.gen = (SELECT MAX(gen) FROM edda_run WHERE id = %b)"
OF_STATUS = b" AND " + STATUS + b" = %b"
OF_WORKFLOW = b" AND r.workflow = %b"
CREATED_FROM = b" AND r.created_at >= %b"
CREATED_TO = b" AND r.created_at < %b"
# Spelled out: the comparison of two pairs does not use the index.
BEFORE = b" AND r.created_at <= %b AND (r.created_at < %b OR r.id < %b)"
NEWEST_FIRST = b" ORDER BY r.created_at DESC, r.id DESC LIMIT %b"


class MySQLRuns:
    _pool: Pool

    @repeated
    async def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        wanted = {start.run_id: start for start in reversed(starts)}
        if not wanted:
            return frozenset()
        for _ in range(_START_ATTEMPTS):
            with suppress(AssertionFailedError):
                return await self._start(wanted)
        raise StorageConflictError("others keep starting runs with the same ids")

    async def _start(self, wanted: dict[RunId, Start]) -> frozenset[RunId]:
        """Insert what is not there; misses its expectation if somebody else does the same meanwhile."""
        async with self._pool.session() as session:
            clock, existing = await session.send(bind(READ_CLOCK), bind(FIND_EXISTING, sorted(wanted)))
            new = wanted.keys() - {run_id(row[0]) for row in existing.rows}
            if new:
                births = [(wanted[run], NEWEST) for run in sorted(new)]
                insertion = insert_unowned(births, int_or_null(clock.rows[0][0]), session.limit)
                await session.send(bind(BEGIN), bind(READ_NEWEST), *insertion, bind(COMMIT))
            return frozenset(new)

    @repeated
    async def cancel(self, run: RunId, value: bytes) -> CancelOutcome:
        async with self._pool.session() as session:
            _, sched = await session.send(bind(BEGIN), bind(LOCK, run))
            if not sched.rows:
                known, _ = await session.send(bind(EXISTS, run), bind(COMMIT))
                return CancelOutcome.ENDED if known.rows else CancelOutcome.MISSING
            cancelled, delivered = sched.rows[0]
            if cancelled:
                tried, _ = await session.send(bind(CANCEL_PARKED, run), bind(COMMIT))
                return CancelOutcome.REQUESTED if tried.affected else CancelOutcome.ALREADY
            n = delivered + 1
            wake = (bind(WAKE, run), bind(CANCEL_PARKED, run))
            letter = bind(DELIVER, run, n, EntryKind.CANCEL, value)
            await session.send(bind(CANCEL, n, run), *wake, letter, bind(COMMIT))
            return CancelOutcome.REQUESTED

    async def get(self, run: RunId) -> RunRecord | None:
        rows = (await self._pool.run(RECORDS + NEWEST_OF_ID, run, run)).rows
        return run_record(rows[0]) if rows else None

    @repeated
    async def add_watcher(self, run: RunId, watcher: EndWatcher) -> RunRecord | None:
        *_, found, _ = await self._pool.send(
            bind(BEGIN),
            bind(LOCK_WATCHED, run),
            bind(INSERT_WATCHER, watcher.run_id, watcher.step, run),
            bind(COUNT_WATCHERS, run, run),
            bind(RECORDS + NEWEST_OF_ID, run, run),
            bind(COMMIT),
        )
        return run_record(found.rows[0]) if found.rows else None

    async def watchers(self, run: RunId) -> tuple[EndWatcher, ...]:
        return tuple(map(watcher, (await self._pool.run(WATCHERS, run)).rows))

    async def history(
        self,
        run_id: RunId,
        gen: int | None = None,
        *,
        step: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> tuple[Entry, ...]:
        most = _ALL if limit is None else limit
        async with self._pool.session() as session:
            if gen is None:
                gen = (await session.run(LATEST_GEN, run_id)).rows[0][0]
            found = await session.run(HISTORY, run_id, gen, after, step, step, most)
        return tuple(entry(row) for row in found.rows)

    async def find(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        conditions, values = [RECORDS], list[Value]()
        for condition, given in _conditions(filter):
            conditions.append(condition)
            values += given
        query = b"".join([*conditions, NEWEST_FIRST])
        return tuple(run_record(row) for row in (await self._pool.run(query, *values, filter.limit)).rows)


def _conditions(filter: RunFilter) -> Iterator[tuple[bytes, Sequence[Value]]]:
    if filter.status is not None:
        yield OF_STATUS, [filter.status]
    if filter.workflow is not None:
        yield OF_WORKFLOW, [filter.workflow]
    if filter.created_from is not None:
        yield CREATED_FROM, [filter.created_from]
    if filter.created_to is not None:
        yield CREATED_TO, [filter.created_to]
    if filter.before is not None:
        created_at, run = filter.before
        yield BEFORE, [created_at, created_at, run]
