"""The storage on one SQLite file, shared by as many processes of one host as like, or on a database in memory.

A thread writes, one reads, one watches for news, and one is for the transactions of users. All but theirs travel to
the threads whole, never as single statements.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar, TypeVarTuple

from edda.core.model import (
    AcceptResult,
    BatchResult,
    CancelOutcome,
    Claim,
    EndWatcher,
    Entry,
    Fence,
    InboxItem,
    MatchPaths,
    NewEvent,
    OutboxEvent,
    OutboxRow,
    OutboxState,
    RunFilter,
    RunId,
    RunRecord,
    RunValue,
    RunWrite,
    SendResult,
    StagedEventRow,
    Start,
    StepCommit,
    StoredEvent,
    Takeover,
    Wait,
    WorkerId,
    WorkerInfo,
    WorkerStatus,
)
from edda.errors import AppError, StorageUnavailableError
from edda.storage.ports import StatementProbe, WriteLock
from edda.storage.shared.session_target import SessionTarget

from . import claims, events, journal, migrations, outbox, pruning, runs, staged_events, transactions, waits, workers
from .admin import SQLiteSteering
from .connection import MEMORY, OLDEST, SYNCHRONOUS, Connection
from .locks import WorkerLockFile
from .opened_file import OpenedFile
from .queries import SQLiteSurvey
from .slow_write import SlowWrite
from .threads import NO_TURN, ChangePoller, ConnectionThread, HeldTransactions, ReadCache
from .workers import SQLitePulse

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

QUERY_TIMEOUT = 5.0
"""Seconds after which people are told that they ask for too much."""
KILL_TIMEOUT = 1.0
"""Seconds a kill waits for the statements that run; whoever stands in a queue for the file is left there."""


def system_microseconds() -> int:
    return time.time_ns() // 1000


class SQLiteStorage(SQLiteSurvey, SQLiteSteering):
    def __init__(
        self,
        path: str,
        *,
        now: Callable[[], int] = system_microseconds,
        probe: StatementProbe | None = None,
        synchronous: str = "FULL",
    ) -> None:
        """`synchronous` weaker than FULL may lose the last commits when the machine (not the process) dies."""
        if synchronous not in SYNCHRONOUS:
            raise ValueError(f"synchronous is one of {', '.join(SYNCHRONOUS)}, not {synchronous!r}")
        if path != MEMORY:
            path = os.path.realpath(path)
        self._path = path
        self.url = f"sqlite:///{path}"
        self._now = now
        self._probe = probe
        self._synchronous = synchronous
        self._presence = WorkerLockFile(path)
        self._file = None if path == MEMORY else OpenedFile(path)
        self._workers: set[WorkerId] = set()
        self._writer: ConnectionThread | None = None
        self._reader: ConnectionThread | None = None
        self._observer: ConnectionThread | None = None
        self._memo = ReadCache()
        self._watch: ChangePoller | None = None
        self._pulses: set[ConnectionThread] = set()
        self._tenures: HeldTransactions | None = None
        self._news = asyncio.Event()
        self._name = secrets.token_hex(4)

    # Its life

    def session_target(self) -> SessionTarget:
        if self._path == MEMORY:
            raise AppError("ctx.session needs a file: nobody else can see a database in memory; use sqlite:///file.db")
        return SessionTarget("sqlite", path=self._path)

    async def open(self) -> None:
        if sqlite3.sqlite_version_info < OLDEST:
            wanted = ".".join(map(str, OLDEST))
            raise StorageUnavailableError(f"SQLite {sqlite3.sqlite_version} is too old: {wanted} or newer is needed")
        try:
            await self._open()
        except BaseException:  # failed or cancelled: nothing stays half open
            self.kill()
            raise

    async def _open(self) -> None:
        self._news = asyncio.Event()  # of this loop: the app may have run on another before
        if self._file is not None:
            self._file.forget()
        self._writer = self._connection_thread("writer", lent=self._in_memory)
        await self._writer.transact(lambda db: None)
        if self._in_memory:
            self._reader = self._writer
        else:
            self._reader = self._connection_thread("reader")
            await self._reader.read(lambda db: None)  # it opens now, not while somebody has the turn for long
            self._watch = ChangePoller(Connection(self._path, self._synchronous, file=self._file), self._news.set)
            await self._watch.open()

    async def close(self) -> None:
        for part in self._pop_parts():
            await part.close()
        self._release_workers()

    def kill(self) -> None:
        parts = tuple(self._pop_parts())
        for part in parts:
            part.kill()
        until = time.monotonic() + KILL_TIMEOUT
        for part in parts:
            part.join(max(0.0, until - time.monotonic()))
        self._release_workers()

    async def migrate(self) -> tuple[str, ...]:
        return await self._transact(lambda db: migrations.migrate(db, self._now()))

    async def pending_migrations(self) -> tuple[str, ...]:
        return await self._read(migrations.pending)

    async def now(self) -> int:
        """Asks the database though the clock is ours, so that it fails when the database does."""
        await self._read(lambda db: db.row("SELECT 1"))
        return self._now()

    # Journal: what a worker asks about its own writes waits behind them

    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        with SlowWrite(self._path, self._name_holder):
            return await self._transact(lambda db: journal.write(db, fence, batch, token, self._now()))

    def _name_holder(self) -> str:
        """Who keeps the others from writing."""
        return self._tenures.holder if self._tenures else ""

    async def read_fence(self, worker: WorkerId) -> Fence | None:
        return await _require_open(self._writer).read(lambda db: journal.read_fence(db, worker))

    async def owned_runs(self, worker: WorkerId) -> dict[RunId, int]:
        return await _require_open(self._writer).read(lambda db: journal.owned(db, worker))

    async def locked(self, runs: Collection[RunId]) -> frozenset[RunId]:
        """There is one lock for all of the file, and who writes waits for it."""
        return frozenset()

    # Workers

    async def register(self, worker: WorkerInfo, lease: int) -> int:
        if not self._in_memory:
            self._presence.lock(worker.id)
            self._workers.add(worker.id)
        try:
            return await self._transact(lambda db: self._register(db, worker, lease))
        except BaseException:  # whoever sees a row all the same may take it over at once
            self._release(worker.id)
            raise

    def _register(self, db: Connection, worker: WorkerInfo, lease: int) -> int:
        now = self._now()
        self._presence.renew(worker.id, now + lease)
        return workers.register(db, worker, now + lease, now)

    async def remove_worker(self, worker: WorkerId, died: bool = False) -> None:
        await self._transact(lambda db: workers.retire(db, worker, died, self._now()))
        self._remove_worker(worker)

    async def registered_workers(self) -> tuple[WorkerStatus, ...]:
        known = await self._cached_read(workers.roster)
        return tuple(WorkerStatus(info, self._is_over(info.id, expires_at)) for info, expires_at in known)

    def _is_over(self, worker: WorkerId, expires_at: int) -> bool:
        return self._presence.lease_is_over(worker, expires_at, self._now())

    async def take_over(self, me: WorkerId) -> Takeover | None:
        takeover = await self._transact(lambda db: workers.take_over(db, me, self._is_over, self._now()))
        if takeover:
            self._remove_worker(takeover.worker)
        return takeover

    async def free_orphans(self) -> int:
        total = 0
        while await self._cached_read(workers.has_orphans):
            total += await self._transact(lambda db: workers.free_orphans(db, self._now()))
        return total

    async def release_run(self, run_id: RunId) -> bool:
        return await self._transact(lambda db: workers.disown(db, run_id, self._now()))

    async def is_ahead(self) -> bool:
        return await self._read(lambda db: workers.is_ahead(db, self._now()))

    async def mend_times(self, lease: int) -> int:
        for info, _ in await self._read(workers.roster):
            self._presence.cap(info.id, self._now() + lease)
        return await self._transact(lambda db: workers.mend_times(db, lease, self._now()))

    async def keep_company(self, worker: WorkerId) -> None:
        await self._transact(lambda db: workers.keep_company(db, worker))

    async def clear_deaths(self, run_id: RunId, epoch: int) -> None:
        await self._transact(lambda db: workers.clear_deaths(db, run_id, epoch))

    async def open_heartbeat(self) -> SQLitePulse:
        if self._in_memory:
            return SQLitePulse(_require_open(self._writer), self._presence, self._now)
        _require_open(self._writer)
        desk = self._connection_thread("pulse")
        self._pulses.add(desk)
        return SQLitePulse(desk, self._presence, self._now, self._end_pulse)

    # Queue

    async def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int, seen: int = 0) -> Claim:
        return await self._transact(lambda db: claims.claim(db, worker, workflows, limit, seen, self._now()))

    async def claim_suspects(
        self, worker: WorkerId, workflows: Sequence[str], few: int, alone: bool, seen: int = 0
    ) -> Claim:
        return await self._transact(
            lambda db: claims.claim_suspects(db, worker, workflows, few, alone, seen, self._now())
        )

    async def has_suspects(self, workflows: Sequence[str]) -> bool:
        return await self._cached_read(claims.has_suspects, tuple(workflows))

    async def next_due(self, workflows: Sequence[str]) -> int | None:
        ready_at = await self._cached_read(claims.next_ready, tuple(workflows))
        return None if ready_at is None else max(0, ready_at - self._now())

    async def wake_parked(self, workflows: Sequence[str]) -> int:
        return await self._transact(lambda db: claims.unpark(db, workflows, self._now()))

    async def read_inboxes(self, worker: WorkerId) -> tuple[InboxItem, ...]:
        return await self._read(lambda db: claims.mail(db, worker))

    # Runs

    async def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        return await self._transact(lambda db: runs.start(db, starts, self._now()))

    async def cancel(self, run_id: RunId, value: bytes) -> CancelOutcome:
        return await self._transact(lambda db: runs.cancel(db, run_id, value, self._now()))

    async def get(self, run_id: RunId) -> RunRecord | None:
        return await self._read(lambda db: runs.get(db, run_id, self._now()))

    async def add_watcher(self, run_id: RunId, watcher: EndWatcher) -> RunRecord | None:
        return await self._transact(lambda db: self._watch_run(db, run_id, watcher))

    def _watch_run(self, db: Connection, run_id: RunId, watcher: EndWatcher) -> RunRecord | None:
        claims.add(db, run_id, watcher)
        return runs.get(db, run_id, self._now())

    async def watchers(self, run_id: RunId) -> tuple[EndWatcher, ...]:
        return await self._read(lambda db: claims.of_run(db, run_id))

    async def history(
        self,
        run_id: RunId,
        gen: int | None = None,
        *,
        step: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> tuple[Entry, ...]:
        return await self._read(lambda db: runs.history(db, run_id, gen, step, after, limit))

    async def find(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        return await self._read(lambda db: runs.find(db, filter, self._now()))

    # Events

    async def accept(
        self, post: Sequence[NewEvent], versions: Mapping[str, int], forwarded: Sequence[int] = ()
    ) -> AcceptResult | None:
        return await self._transact(lambda db: events.accept(db, post, versions, forwarded, self._now()))

    async def staged_events(self, limit: int) -> tuple[StagedEventRow, ...]:
        return await self._read(lambda db: self._dispatches(db, limit))

    def _dispatches(self, db: Connection, limit: int) -> tuple[StagedEventRow, ...]:
        due, now = self._memo.get(db, staged_events.first_due), self._now()
        return () if due is None or due > now else staged_events.lowest(db, limit, now)

    async def match_paths(self, types: Sequence[str]) -> dict[str, MatchPaths]:
        return await self._read(lambda db: events.shapes(db, types))

    async def register_match_paths(self, type: str, shape: str) -> int:
        return await self._transact(lambda db: events.learn(db, type, shape))

    async def backfill_keys(self, type: str, shape: str, keys: Sequence[tuple[bytes, int]], after: int) -> None:
        await self._transact(lambda db: events.fill(db, type, shape, keys, after))

    async def events_of_type(self, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
        return await self._read(lambda db: events.log(db, type, after, upto, limit))

    async def events_under_key(self, key: bytes, after: int, limit: int) -> tuple[StoredEvent, ...]:
        return await self._read(lambda db: events.page(db, key, after, limit))

    async def last_event(self, before: int | None = None) -> int:
        return await self._read(lambda db: events.last_event(db, before))

    async def find_event(self, source: str, id: str) -> StoredEvent | None:
        return await self._read(lambda db: events.find_event(db, source, id))

    async def waits(self, run_id: RunId) -> tuple[Wait, ...]:
        return await self._read(lambda db: waits.of_run(db, run_id))

    # Outbox

    async def enqueue(self, events: Sequence[OutboxEvent]) -> None:
        await self._transact(lambda db: outbox.enqueue(db, events))

    async def claim_outbox(self, limit: int, lease: int) -> tuple[OutboxRow, ...]:
        """Nobody is kept from writing by one who finds nothing."""
        if await self.next_outbox_due() != 0 or not await self._read(
            lambda db: outbox.claimable(db, limit, self._now())
        ):
            return ()
        return await self._transact(lambda db: outbox.claim(db, limit, lease, self._now()))

    async def record_send_results(self, receipts: Sequence[SendResult]) -> None:
        if receipts:
            await self._transact(lambda db: outbox.settle(db, receipts, self._now()))

    async def next_outbox_due(self) -> int | None:
        due = await self._cached_read(outbox.first_due)
        return None if due is None else max(0, due - self._now())

    async def find_outbox(
        self, state: OutboxState | None = None, after: int = 0, limit: int = 50
    ) -> tuple[OutboxRow, ...]:
        return await self._read(lambda db: outbox.find(db, state, after, limit))

    async def retry_outbox(self, ids: Sequence[str] | None) -> int:
        return await self._transact(lambda db: outbox.retry(db, ids))

    # Facts

    async def run_values(self, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        return await self._read(lambda db: runs.of_run(db, run_id, name))

    # Joints

    async def begin(self, holder: str = "") -> transactions.SQLiteJoint:
        return await transactions.begin(self._user_transactions(), holder)

    @property
    def is_certified(self) -> bool:
        return False

    async def acquire_write_lock(self, holder: str = "") -> WriteLock:
        """Of a database in memory nobody else has a connection."""
        return NO_TURN if self._in_memory else await self._user_transactions().begin(holder=holder)

    async def find_step_commit(self, run_id: RunId, gen: int, step: str) -> StepCommit | None:
        return await self._read(lambda db: journal.find(db, run_id, gen, step))

    async def take_message(self, key: bytes, lease: int) -> StagedEventRow | None:
        if not await self._cached_read(staged_events.is_kept, key):
            return None
        return await self._transact(lambda db: staged_events.take(db, key, self._now() + lease))

    # Pruning

    async def prune_events(self, before: int, limit: int) -> int:
        if not await self._is_any_before(before, pruning.oldest_event):
            return 0
        hidden = await self._transact(lambda db: pruning.hide_events(db, before, limit))
        return hidden + await self._transact(lambda db: pruning.prune_events(db, before, limit))

    async def prune_inbox(self, before: int, limit: int) -> int:
        if not await self._is_any_before(before, pruning.oldest_letter):
            return 0
        return await self._transact(lambda db: pruning.prune_letters(db, before, limit))

    async def prune_runs(self, before: int, limit: int) -> int:
        for oldest in (pruning.first_ended, pruning.first_followed):
            if await self._is_any_before(before, oldest):
                return await self._transact(lambda db: pruning.prune_runs(db, before, limit))
        return 0

    async def prune_outbox(self, before: int, limit: int) -> int:
        if not await self._is_any_before(before, outbox.first_sent):
            return 0
        return await self._transact(lambda db: outbox.prune(db, before, limit))

    async def _is_any_before(self, before: int, oldest: Callable[[Connection], int | None]) -> bool:
        moment = await self._cached_read(oldest)
        return moment is not None and moment < before

    # News

    async def notify(self) -> None:
        """The commit itself is what other processes see; this wakes our own."""
        self._news.set()

    async def wait_for_notification(self, timeout: float) -> None:
        watch = self._watch
        if watch:
            watch.start_polling()
        try:
            async with asyncio.timeout(timeout):
                await self._news.wait()
        except TimeoutError:
            pass
        finally:
            self._news.clear()
            if watch:
                watch.stop_polling()

    async def change_token(self) -> str:
        """Of this very object: the numbers of one connection say nothing of another's."""
        version = await self._read(lambda db: db.version())
        return "-".join(map(str, (self._name, *version)))

    # Its parts

    @property
    def _in_memory(self) -> bool:
        return self._path == MEMORY

    def _connection_thread(self, name: str, *, lent: bool = False) -> ConnectionThread:
        return ConnectionThread(
            name, Connection(self._path, self._synchronous, self._probe, lent=lent, file=self._file)
        )

    def _user_transactions(self) -> HeldTransactions:
        """A database in memory has one connection only."""
        writer = _require_open(self._writer)
        if self._tenures is None:
            self._tenures = HeldTransactions(writer if self._in_memory else self._connection_thread("joint", lent=True))
        return self._tenures

    async def _transact(self, job: Callable[[Connection], T]) -> T:
        return await _require_open(self._writer).transact(job)

    async def _read(self, job: Callable[[Connection], T]) -> T:
        return await _require_open(self._reader).read(job)

    async def _query(self, job: Callable[[Connection], T]) -> T:
        """For people, who may ask for much: the engine's own questions do not wait behind it."""
        writer = _require_open(self._writer)
        if self._in_memory:
            return await writer.read(job, QUERY_TIMEOUT)
        if self._observer is None:
            self._observer = self._connection_thread("observer")
        return await self._observer.read(job, QUERY_TIMEOUT)

    async def _cached_read(self, ask: Callable[[Connection, *Ts], T], *args: *Ts) -> T:
        """What is asked by the clock costs a database at rest no statement."""
        return await self._read(lambda db: self._memo.get(db, ask, *args))

    async def _end_pulse(self, desk: ConnectionThread) -> None:
        self._pulses.discard(desk)
        await desk.close()

    def _pop_parts(self) -> Iterator[ConnectionThread | HeldTransactions | ChangePoller]:
        """Every part, each forgotten as it is given away; first who may hold the turn that the others need to close."""
        tenures, self._tenures = self._tenures, None
        if tenures:
            yield tenures
        while self._pulses:
            yield self._pulses.pop()
        watch, self._watch = self._watch, None
        observer, self._observer = self._observer, None
        reader, self._reader = self._reader, None
        writer, self._writer = self._writer, None
        yield from (part for part in (watch, observer, reader, writer) if part)

    def _release_workers(self) -> None:
        """After the threads have ended: to look dead while one still writes would be a lie."""
        for worker in tuple(self._workers):
            self._release(worker)

    def _remove_worker(self, worker: WorkerId) -> None:
        """Its lock too, should it be this very process that overslept."""
        self._release(worker)
        self._presence.remove(worker)

    def _release(self, worker: WorkerId) -> None:
        self._workers.discard(worker)
        self._presence.release(worker)


def _require_open(desk: ConnectionThread | None) -> ConnectionThread:
    if desk is None:
        raise StorageUnavailableError("the storage is not open")
    return desk
