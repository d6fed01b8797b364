"""Starting, cancelling and reading runs, their history, watchers and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from edda.core.model import CancelOutcome, EndWatcher, Entry, EntryKind, RunFilter, RunId, RunRecord, RunValue, Start
from edda.errors import StorageConflictError
from edda.storage.shared.rows import to_entry, to_run_id, to_run_record, to_run_value, to_watcher

from .batch_sql import FIND_EXISTING, IS_PARKED, LAST_EVENT, READ_LAST_EVENT, WAKES, insert_unowned
from .connection import BEGIN, COMMIT, AssertionFailedError, MySQLPool
from .locks import repeated
from .statement import NOW, READ_CLOCK, Value, bind, int_or_null, quote_bytes, quote_text

INSERT_RUN_VALUE = b"INSERT INTO edda_run_value (run_id, name, value, at) VALUES "
REPLACE_EXISTING = b" ON DUPLICATE KEY UPDATE value = VALUES(value), at = VALUES(at)"
RUN_VALUES = b"SELECT name, value FROM edda_run_value WHERE run_id = %b ORDER BY name"
RUN_VALUE = b"SELECT name, value FROM edda_run_value WHERE run_id = %b AND name = %b"


def run_value_row(run_id: RunId, value: RunValue) -> bytes:
    return b"(%b,%b,%b,%b)" % (quote_text(run_id), quote_text(value.name), quote_bytes(value.value), NOW)


_START_ATTEMPTS = 5

LOCK = b"SELECT cancelled, inbox_count FROM edda_open_run WHERE run_id = %b FOR UPDATE"
EXISTS = b"SELECT 1 FROM edda_run WHERE id = %b LIMIT 1"
CANCEL = b"UPDATE edda_open_run SET cancelled = TRUE, inbox_count = %b WHERE run_id = %b"
INSERT_CANCEL = (
    b"INSERT INTO edda_inbox (run_id, inbox_no, kind, step, at, value) VALUES (%b, %b, %b, '', " + NOW + b", %b)"
)
WAKE = b"UPDATE edda_open_run s SET ready_at = 0, status = 'running', reason = NULL WHERE run_id = %b AND " + WAKES
CANCEL_PARKED = b"UPDATE edda_open_run s SET ready_at = 0, end_if_parked = TRUE WHERE run_id = %b AND " + IS_PARKED
_ALL = 2**63 - 1
LATEST_GENERATION = b"SELECT MAX(generation) FROM edda_run WHERE id = %b"
HISTORY = b"""SELECT seq, kind, step, name, ok, at, input, value, attempt, inbox_no, event
    FROM edda_history WHERE run_id = %b AND generation = %b AND seq > %b AND (%b IS NULL OR step = %b)
        ORDER BY seq LIMIT %b"""
LOCK_WATCHED = b"SELECT 1 FROM edda_open_run WHERE run_id = %b FOR UPDATE"
INSERT_WATCHER = b"""INSERT INTO edda_watcher (run_id, watcher, step)
    SELECT run_id, %b, %b FROM edda_open_run WHERE run_id = %b ON DUPLICATE KEY UPDATE step = step"""
COUNT_WATCHERS = b"""UPDATE edda_open_run
    SET watchers = (SELECT COUNT(*) FROM edda_watcher WHERE run_id = %b) WHERE run_id = %b"""
WATCHERS = b"SELECT watcher, step FROM edda_watcher WHERE run_id = %b ORDER BY watcher, step"

# A waiting run that is due and has no owner is shown as running: the next claim takes it. A run that compensates is
# shown as compensating unless it is parked.
OPEN_STATUS = (
    b"CASE WHEN s.owner IS NULL AND s.ready_at <= " + NOW + b""
    b" THEN IF(s.compensating OR s.status = 'compensating', 'compensating', 'running')"
    b" WHEN s.compensating AND s.status <> 'parked' THEN 'compensating' ELSE s.status END"
)
STATUS = b"COALESCE(e.status, " + OPEN_STATUS + b")"
COLUMNS = (
    b"SELECT r.id, r.workflow, r.generation, " + STATUS + b", r.input, r.created_at, r.deadline,"
    b" s.owner, s.ready_at, s.reason, e.ended_at, e.value, r.parent, COALESCE(s.deaths, 0),"
    b" COALESCE(s.cancelled AND NOT s.compensating AND NOT s.end_if_parked, FALSE) FROM "
)
# Reads the last entry of the index for each run; NOT EXISTS would compare each generation with all others.
RECORDS = (
    COLUMNS + b"edda_run r"
    b" LEFT JOIN edda_open_run s ON s.run_id = r.id"
    b" LEFT JOIN edda_result e ON e.run_id = r.id AND e.generation = r.generation"
    b" WHERE r.generation = (SELECT last.generation FROM edda_run last WHERE last.id = r.id"
    b" ORDER BY last.generation DESC LIMIT 1)"
)
# The generation as a value: else the server reads all generations and looks for a newer one of each.
NEWEST_OF_ID = b" AND r.id = %b AND r.generation = (SELECT MAX(generation) FROM edda_run WHERE id = %b)"
OF_STATUS = b" AND " + STATUS + b" = %b"
OF_WORKFLOW = b" AND r.workflow = %b"
CREATED_FROM = b" AND r.created_at >= %b"
CREATED_TO = b" AND r.created_at < %b"
# Not as a comparison of two pairs, for which the server uses no index.
BEFORE = b" AND r.created_at <= %b AND (r.created_at < %b OR r.id < %b)"
NEWEST_FIRST = b" ORDER BY r.created_at DESC, r.id DESC LIMIT %b"


class MySQLRuns:
    _pool: MySQLPool

    @repeated
    async def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        new = {start.run_id: start for start in reversed(starts)}  # of two with one id the first counts
        if not new:
            return frozenset()
        for _ in range(_START_ATTEMPTS):
            with suppress(AssertionFailedError):
                return await self._start(new)
        raise StorageConflictError("other processes keep starting runs with the same ids")

    async def _start(self, starts: dict[RunId, Start]) -> frozenset[RunId]:
        """Insert the runs that do not exist; the assertion fails if another process does the same meanwhile."""
        async with self._pool.session() as session:
            clock, existing = await session.send(bind(READ_CLOCK), bind(FIND_EXISTING, sorted(starts)))
            new = starts.keys() - {to_run_id(row[0]) for row in existing.rows}
            if new:
                new_runs = [(starts[run], LAST_EVENT) for run in sorted(new)]
                insertion = insert_unowned(new_runs, int_or_null(clock.rows[0][0]), session.limit)
                await session.send(bind(BEGIN), bind(READ_LAST_EVENT), *insertion, bind(COMMIT))
            return frozenset(new)

    @repeated
    async def cancel(self, run: RunId, value: bytes) -> CancelOutcome:
        async with self._pool.session() as session:
            _, open_run = await session.send(bind(BEGIN), bind(LOCK, run))
            if not open_run.rows:
                known, _ = await session.send(bind(EXISTS, run), bind(COMMIT))
                return CancelOutcome.ENDED if known.rows else CancelOutcome.MISSING
            cancelled, inbox_count = open_run.rows[0]
            if cancelled:
                unparked, _ = await session.send(bind(CANCEL_PARKED, run), bind(COMMIT))
                return CancelOutcome.REQUESTED if unparked.affected else CancelOutcome.ALREADY
            n = inbox_count + 1
            wake = (bind(WAKE, run), bind(CANCEL_PARKED, run))
            item = bind(INSERT_CANCEL, run, n, EntryKind.CANCEL, value)
            await session.send(bind(CANCEL, n, run), *wake, item, bind(COMMIT))
            return CancelOutcome.REQUESTED

    async def get(self, run: RunId) -> RunRecord | None:
        rows = (await self._pool.run(RECORDS + NEWEST_OF_ID, run, run)).rows
        return to_run_record(rows[0]) if rows else None

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
        return to_run_record(found.rows[0]) if found.rows else None

    async def watchers(self, run: RunId) -> tuple[EndWatcher, ...]:
        return tuple(map(to_watcher, (await self._pool.run(WATCHERS, run)).rows))

    async def history(
        self,
        run_id: RunId,
        generation: int | None = None,
        *,
        step: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> tuple[Entry, ...]:
        max_rows = _ALL if limit is None else limit
        async with self._pool.session() as session:
            if generation is None:
                generation = (await session.run(LATEST_GENERATION, run_id)).rows[0][0]
            found = await session.run(HISTORY, run_id, generation, after, step, step, max_rows)
        return tuple(to_entry(row) for row in found.rows)

    async def find(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        conditions, values = [RECORDS], list[Value]()
        for condition, given in _conditions(filter):
            conditions.append(condition)
            values += given
        query = b"".join([*conditions, NEWEST_FIRST])
        return tuple(to_run_record(row) for row in (await self._pool.run(query, *values, filter.limit)).rows)

    async def run_values(self, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        asked = self._pool.run(RUN_VALUES, run_id) if name is None else self._pool.run(RUN_VALUE, run_id, name)
        return tuple(map(to_run_value, (await asked).rows))


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
