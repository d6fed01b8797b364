"""The whole storage in memory: for tests in virtual time, and the model the other adapters are held against.

A `MemoryStorage` is a connection to a `MemoryDatabase`; several on one database act like several processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import ParamSpec, TypeVar

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
from edda.core.queries import (
    Audit,
    Backlog,
    Definition,
    EventQuery,
    EventReceiver,
    EventSchema,
    Generation,
    Latency,
    ReopenOutcome,
    RunQuery,
    TimeBucket,
    WaitRow,
    WorkerRecord,
)
from edda.core.states import RunStatus
from edda.errors import AppError, StorageUnavailableError
from edda.storage.ports import SharedTransaction, StatementProbe
from edda.storage.shared.session_target import SessionTarget

from .journal import MemoryDatabase
from .tables import wall_clock

P = ParamSpec("P")
T = TypeVar("T")


class MemoryStorage:
    """One connection to a database in this process; lost with it."""

    url = "memory://"

    def __init__(
        self,
        *,
        now: Callable[[], int] = wall_clock,
        probe: StatementProbe | None = None,
        database: MemoryDatabase | None = None,
    ) -> None:
        self.database = database or MemoryDatabase(now)
        self._probe = probe
        self._news = asyncio.Event()
        self._open = False

    def session_target(self) -> SessionTarget:
        raise AppError("ctx.session needs a database: memory:// has none; use sqlite:///file.db")

    async def _commit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Each transaction is one statement; other tasks get their turn before it, as with a real database."""
        await asyncio.sleep(0)
        if not self._open:
            raise StorageUnavailableError("the storage is closed")
        statement = f"COMMIT {work.__name__}"
        if self._probe:
            self._probe.before(statement)
        result = work(*args, **kwargs)
        if self._probe:
            self._probe.after(statement)
        return result

    async def open(self) -> None:
        self._open = True
        self.database.listeners.add(self._news)

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._open = False
        self.database.listeners.discard(self._news)

    async def migrate(self) -> tuple[str, ...]:
        return ()

    async def pending_migrations(self) -> tuple[str, ...]:
        return ()

    async def now(self) -> int:
        return await self._commit(self.database.now)

    async def write(self, fence: Fence, batch: Sequence[RunWrite], token: int = 0) -> BatchResult | None:
        return await self._commit(self.database.write, fence, batch, token)

    async def read_fence(self, worker: WorkerId) -> Fence | None:
        return await self._commit(self.database.read_fence, worker)

    async def owned_runs(self, worker: WorkerId) -> dict[RunId, int]:
        return await self._commit(self.database.owned_runs, worker)

    async def locked(self, runs: Collection[RunId]) -> frozenset[RunId]:
        return frozenset()

    async def register(self, worker: WorkerInfo, lease: int) -> int:
        return await self._commit(self.database.register, worker, lease)

    async def remove_worker(self, worker: WorkerId, died: bool = False) -> None:
        await self._commit(self.database.remove_worker, worker, died)

    async def registered_workers(self) -> tuple[WorkerStatus, ...]:
        return await self._commit(self.database.registered_workers)

    async def take_over(self, me: WorkerId) -> Takeover | None:
        return await self._commit(self.database.take_over, me)

    async def free_orphans(self) -> int:
        return await self._commit(self.database.free_orphans)

    async def release_run(self, run_id: RunId) -> bool:
        return await self._commit(self.database.release_run, run_id)

    async def keep_company(self, worker: WorkerId) -> None:
        await self._commit(self.database.keep_company, worker)

    async def clear_deaths(self, run_id: RunId, epoch: int) -> None:
        await self._commit(self.database.clear_deaths, run_id, epoch)

    async def open_heartbeat(self) -> MemoryPulse:
        return MemoryPulse(self)

    async def is_ahead(self) -> bool:
        return await self._commit(self.database.is_ahead)

    async def mend_times(self, lease: int) -> int:
        return await self._commit(self.database.mend_times, lease)

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        return await self._commit(self.database.hand_over, worker, keep)

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        return await self._commit(self.database.beat, worker, lease)

    async def claim(self, worker: WorkerId, workflows: Sequence[str], limit: int, seen: int = 0) -> Claim:
        return await self._commit(self.database.claim, worker, workflows, limit, seen)

    async def claim_suspects(
        self, worker: WorkerId, workflows: Sequence[str], few: int, alone: bool, seen: int = 0
    ) -> Claim:
        return await self._commit(self.database.claim_suspects, worker, workflows, few, alone, seen)

    async def has_suspects(self, workflows: Sequence[str]) -> bool:
        return await self._commit(self.database.has_suspects, workflows)

    async def next_due(self, workflows: Sequence[str]) -> int | None:
        return await self._commit(self.database.next_due, workflows)

    async def wake_parked(self, workflows: Sequence[str]) -> int:
        return await self._commit(self.database.wake_parked, workflows)

    async def read_inboxes(self, worker: WorkerId) -> tuple[InboxItem, ...]:
        return await self._commit(self.database.read_inboxes, worker)

    async def start(self, starts: Sequence[Start]) -> frozenset[RunId]:
        return await self._commit(self.database.start, starts)

    async def cancel(self, run_id: RunId, value: bytes) -> CancelOutcome:
        return await self._commit(self.database.cancel, run_id, value)

    async def get(self, run_id: RunId) -> RunRecord | None:
        return await self._commit(self.database.get, run_id)

    async def add_watcher(self, run_id: RunId, watcher: EndWatcher) -> RunRecord | None:
        return await self._commit(self.database.add_watcher, run_id, watcher)

    async def watchers(self, run_id: RunId) -> tuple[EndWatcher, ...]:
        return await self._commit(self.database.watchers, run_id)

    async def history(
        self,
        run_id: RunId,
        gen: int | None = None,
        *,
        step: str | None = None,
        after: int = -1,
        limit: int | None = None,
    ) -> tuple[Entry, ...]:
        history = await self._commit(self.database.history, run_id, gen)
        return tuple(entry for entry in history if entry.seq > after and step in (None, entry.step))[:limit]

    async def find(self, filter: RunFilter) -> tuple[RunRecord, ...]:
        return await self._commit(self.database.find, filter)

    async def accept(
        self, post: Sequence[NewEvent], versions: Mapping[str, int], forwarded: Sequence[int] = ()
    ) -> AcceptResult | None:
        return await self._commit(self.database.accept, post, versions, forwarded)

    async def staged_events(self, limit: int) -> tuple[StagedEventRow, ...]:
        return await self._commit(self.database.staged_events, limit)

    async def match_paths(self, types: Sequence[str]) -> dict[str, MatchPaths]:
        return await self._commit(self.database.match_paths, types)

    async def register_match_paths(self, type: str, shape: str) -> int:
        return await self._commit(self.database.register_match_paths, type, shape)

    async def backfill_keys(self, type: str, shape: str, keys: Sequence[tuple[bytes, int]], after: int) -> None:
        await self._commit(self.database.backfill_keys, type, shape, keys, after)

    async def events_of_type(self, type: str, after: int, upto: int, limit: int) -> tuple[StoredEvent, ...]:
        return await self._commit(self.database.events_of_type, type, after, upto, limit)

    async def events_under_key(self, key: bytes, after: int, limit: int) -> tuple[StoredEvent, ...]:
        return await self._commit(self.database.events_under_key, key, after, limit)

    async def last_event(self, before: int | None = None) -> int:
        return await self._commit(self.database.last_event, before)

    async def find_event(self, source: str, id: str) -> StoredEvent | None:
        return await self._commit(self.database.find_event, source, id)

    async def waits(self, run_id: RunId) -> tuple[Wait, ...]:
        return await self._commit(self.database.waits, run_id)

    async def enqueue(self, events: Sequence[OutboxEvent]) -> None:
        await self._commit(self.database.enqueue, events)

    async def claim_outbox(self, limit: int, lease: int) -> tuple[OutboxRow, ...]:
        return await self._commit(self.database.claim_outbox, limit, lease)

    async def record_send_results(self, receipts: Sequence[SendResult]) -> None:
        await self._commit(self.database.record_send_results, receipts)

    async def next_outbox_due(self) -> int | None:
        return await self._commit(self.database.next_outbox_due)

    async def find_outbox(
        self, state: OutboxState | None = None, after: int = 0, limit: int = 50
    ) -> tuple[OutboxRow, ...]:
        return await self._commit(self.database.find_outbox, state, after, limit)

    async def retry_outbox(self, ids: Sequence[str] | None) -> int:
        return await self._commit(self.database.retry_outbox, ids)

    async def run_values(self, run_id: RunId, name: str | None = None) -> tuple[RunValue, ...]:
        return await self._commit(self.database.run_values, run_id, name)

    async def begin(self, holder: str = "") -> SharedTransaction:
        raise AppError("ctx.transaction() needs a database: memory:// has none; use sqlite:///file.db")

    @property
    def is_certified(self) -> bool:
        return False

    async def acquire_write_lock(self, holder: str = "") -> MemoryTurn:
        return MemoryTurn()

    async def find_step_commit(self, run_id: RunId, gen: int, step: str) -> StepCommit | None:
        """Always None: such a row comes only with a transaction of the user's own."""
        return None

    async def take_message(self, key: bytes, lease: int) -> StagedEventRow | None:
        return await self._commit(self.database.take_message, key, lease)

    async def prune_events(self, before: int, limit: int) -> int:
        return await self._commit(self.database.prune_events, before, limit)

    async def prune_inbox(self, before: int, limit: int) -> int:
        return await self._commit(self.database.prune_inbox, before, limit)

    async def prune_runs(self, before: int, limit: int) -> int:
        return await self._commit(self.database.prune_runs, before, limit)

    async def prune_outbox(self, before: int, limit: int) -> int:
        return await self._commit(self.database.prune_outbox, before, limit)

    async def notify(self) -> None:
        await self._commit(self.database.notify)

    async def wait_for_notification(self, timeout: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._news.wait()
        self._news.clear()

    async def search(self, query: RunQuery) -> tuple[RunRecord, ...]:
        return await self._commit(self.database.search, query)

    async def count(self, query: RunQuery) -> dict[RunStatus, int]:
        return await self._commit(self.database.count, query)

    async def scan_boundary(self, query: RunQuery, reach: int) -> tuple[int, RunId] | None:
        return await self._commit(self.database.scan_boundary, query, reach)

    async def generations(self, run_id: RunId) -> tuple[Generation, ...]:
        return await self._commit(self.database.generations, run_id)

    async def find_events(self, query: EventQuery) -> tuple[StoredEvent, ...]:
        return await self._commit(self.database.find_events, query)

    async def event(self, seq: int) -> StoredEvent | None:
        return await self._commit(self.database.event, seq)

    async def consumers(self, seq: int, limit: int) -> tuple[EventReceiver, ...]:
        return await self._commit(self.database.consumers, seq, limit)

    async def list_waits(self, type: str | None, after: tuple[str, str] | None, limit: int) -> tuple[WaitRow, ...]:
        return await self._commit(self.database.list_waits, type, after, limit)

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        return await self._commit(self.database.list_workers)

    async def backlog(self) -> Backlog:
        return await self._commit(self.database.backlog)

    async def throughput(self, since: int, width: int, count: int) -> tuple[TimeBucket, ...]:
        return await self._commit(self.database.throughput, since, width, count)

    async def latency(self, since: int, most: int) -> Latency:
        return await self._commit(self.database.latency, since, most)

    async def event_schemas(self, workflow: str) -> tuple[EventSchema, ...]:
        return await self._commit(self.database.event_schemas, workflow)

    async def definitions(self) -> tuple[Definition, ...]:
        return await self._commit(self.database.definitions)

    async def change_token(self) -> str:
        return await self._commit(self.database.change_token)

    async def reopen(self, run_id: RunId, gen: int, keep: int) -> ReopenOutcome:
        return await self._commit(self.database.reopen, run_id, gen, keep)

    async def resume(self, run_id: RunId) -> bool:
        return await self._commit(self.database.resume, run_id)

    async def delete(self, run_id: RunId) -> bool:
        return await self._commit(self.database.delete, run_id)

    async def delete_outbox(self, ids: Sequence[str]) -> int:
        return await self._commit(self.database.delete_outbox, ids)

    async def add_audit(self, audit: Audit) -> None:
        await self._commit(self.database.add_audit, audit)

    async def audits(self, before: int | None, limit: int) -> tuple[Audit, ...]:
        return await self._commit(self.database.audits, before, limit)

    async def save_definitions(self, definitions: Sequence[Definition], forms: Sequence[EventSchema]) -> None:
        await self._commit(self.database.save_definitions, definitions, forms)


class MemoryPulse:
    def __init__(self, storage: MemoryStorage) -> None:
        self._storage = storage

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        return await self._storage.beat(worker, lease)

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        return await self._storage.hand_over(worker, keep)

    async def close(self) -> None:
        pass


class MemoryTurn:
    """Whoever writes elsewhere is in nobody's way."""

    async def end(self) -> None:
        pass
