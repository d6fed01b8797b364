"""The storage in memory: for tests in virtual time, and as the model that the SQL storages are compared with.

A `MemoryStorage` is a connection to a `MemoryDatabase`; several on one database act like several processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from edda.core.model import RunId, StepCommit, WorkerId
from edda.errors import AppError, StorageUnavailableError
from edda.storage.ports import SharedTransaction, StatementProbe
from edda.storage.shared.session_target import SessionTarget
from edda.storage.shared.step_commit import NoWriteLock

from .admin import MemoryAdmin
from .claims import MemoryClaims
from .journal import MemoryJournal
from .outbox import MemoryOutbox
from .tables import wall_clock
from .workers import MemoryWorkers

P = ParamSpec("P")
T = TypeVar("T")


class MemoryDatabase(MemoryJournal, MemoryWorkers, MemoryClaims, MemoryOutbox, MemoryAdmin):
    """The rows, and the port methods as plain functions: nothing else runs in the process while one of them does."""

    def __init__(self, now: Callable[[], int] = wall_clock) -> None:
        super().__init__(now)
        self.listeners: set[asyncio.Event] = set()

    def notify(self) -> None:
        for listener in self.listeners:
            listener.set()


def _commit(
    work: Callable[Concatenate[MemoryDatabase, P], T],
) -> Callable[Concatenate[MemoryStorage, P], Coroutine[Any, Any, T]]:
    """The storage's method that calls `work` as one transaction of one statement."""
    statement = f"COMMIT {work.__name__}"

    @wraps(work)
    async def method(self: MemoryStorage, /, *args: P.args, **kwargs: P.kwargs) -> T:
        await self.begin_statement(statement)
        result = work(self.database, *args, **kwargs)
        self.end_statement(statement)
        return result

    return method


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
        self._notified = asyncio.Event()
        self._open = False

    def session_target(self) -> SessionTarget:
        raise AppError("ctx.session needs a database: memory:// has none; use sqlite:///file.db")

    async def begin_statement(self, statement: str) -> None:
        await asyncio.sleep(0)  # other tasks run before it, as with a real database
        if not self._open:
            raise StorageUnavailableError("the storage is closed")
        if self._probe:
            self._probe.before(statement)

    def end_statement(self, statement: str) -> None:
        if self._probe:
            self._probe.after(statement)

    async def open(self) -> None:
        self._open = True
        self.database.listeners.add(self._notified)

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._open = False
        self.database.listeners.discard(self._notified)

    async def migrate(self) -> tuple[str, ...]:
        return ()

    async def pending_migrations(self) -> tuple[str, ...]:
        return ()

    async def now(self) -> int:
        await self.begin_statement("COMMIT now")
        now = self.database.now()
        self.end_statement("COMMIT now")
        return now

    # Journal

    write = _commit(MemoryDatabase.write)
    read_fence = _commit(MemoryDatabase.read_fence)
    owned_runs = _commit(MemoryDatabase.owned_runs)

    async def locked(self, runs: Collection[RunId]) -> frozenset[RunId]:
        return frozenset()

    # Workers

    register = _commit(MemoryDatabase.register)
    remove_worker = _commit(MemoryDatabase.remove_worker)
    registered_workers = _commit(MemoryDatabase.registered_workers)
    take_over = _commit(MemoryDatabase.take_over)
    free_orphans = _commit(MemoryDatabase.free_orphans)
    release_run = _commit(MemoryDatabase.release_run)
    is_ahead = _commit(MemoryDatabase.is_ahead)
    mend_times = _commit(MemoryDatabase.mend_times)
    keep_company = _commit(MemoryDatabase.keep_company)
    clear_deaths = _commit(MemoryDatabase.clear_deaths)
    beat = _commit(MemoryDatabase.beat)
    hand_over = _commit(MemoryDatabase.hand_over)

    async def open_heartbeat(self) -> MemoryHeartbeat:
        return MemoryHeartbeat(self)

    # ClaimQueue

    claim = _commit(MemoryDatabase.claim)
    claim_suspects = _commit(MemoryDatabase.claim_suspects)
    has_suspects = _commit(MemoryDatabase.has_suspects)
    next_due = _commit(MemoryDatabase.next_due)
    wake_parked = _commit(MemoryDatabase.wake_parked)
    read_inboxes = _commit(MemoryDatabase.read_inboxes)

    # Runs and RunValues

    start = _commit(MemoryDatabase.start)
    cancel = _commit(MemoryDatabase.cancel)
    get = _commit(MemoryDatabase.get)
    add_watcher = _commit(MemoryDatabase.add_watcher)
    watchers = _commit(MemoryDatabase.watchers)
    history = _commit(MemoryDatabase.history)
    find = _commit(MemoryDatabase.find)
    run_values = _commit(MemoryDatabase.run_values)

    # Events

    accept = _commit(MemoryDatabase.accept)
    staged_events = _commit(MemoryDatabase.staged_events)
    match_paths = _commit(MemoryDatabase.match_paths)
    register_match_paths = _commit(MemoryDatabase.register_match_paths)
    backfill_keys = _commit(MemoryDatabase.backfill_keys)
    events_of_type = _commit(MemoryDatabase.events_of_type)
    events_under_key = _commit(MemoryDatabase.events_under_key)
    last_event = _commit(MemoryDatabase.last_event)
    find_event = _commit(MemoryDatabase.find_event)
    waits = _commit(MemoryDatabase.waits)
    take_message = _commit(MemoryDatabase.take_message)

    # Outbox

    enqueue = _commit(MemoryDatabase.enqueue)
    claim_outbox = _commit(MemoryDatabase.claim_outbox)
    record_send_results = _commit(MemoryDatabase.record_send_results)
    next_outbox_due = _commit(MemoryDatabase.next_outbox_due)
    find_outbox = _commit(MemoryDatabase.find_outbox)
    retry_outbox = _commit(MemoryDatabase.retry_outbox)

    # Transactions

    async def begin(self, holder: str = "") -> SharedTransaction:
        raise AppError("ctx.transaction() needs a database: memory:// has none; use sqlite:///file.db")

    @property
    def is_certified(self) -> bool:
        return False

    async def acquire_write_lock(self, holder: str = "") -> NoWriteLock:
        return NoWriteLock()

    async def find_step_commit(self, run_id: RunId, generation: int, step: str) -> StepCommit | None:
        """Always None: a step commit is written in a transaction that the user's code shares."""
        return None

    # Pruning

    prune_events = _commit(MemoryDatabase.prune_events)
    prune_inbox = _commit(MemoryDatabase.prune_inbox)
    prune_runs = _commit(MemoryDatabase.prune_runs)
    prune_outbox = _commit(MemoryDatabase.prune_outbox)

    # Notifications

    notify = _commit(MemoryDatabase.notify)

    async def wait_for_notification(self, timeout: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._notified.wait()
        self._notified.clear()

    # Queries

    search = _commit(MemoryDatabase.search)
    count = _commit(MemoryDatabase.count)
    scan_boundary = _commit(MemoryDatabase.scan_boundary)
    generations = _commit(MemoryDatabase.generations)
    find_events = _commit(MemoryDatabase.find_events)
    event = _commit(MemoryDatabase.event)
    consumers = _commit(MemoryDatabase.consumers)
    list_waits = _commit(MemoryDatabase.list_waits)
    list_workers = _commit(MemoryDatabase.list_workers)
    backlog = _commit(MemoryDatabase.backlog)
    throughput = _commit(MemoryDatabase.throughput)
    latency = _commit(MemoryDatabase.latency)
    event_schemas = _commit(MemoryDatabase.event_schemas)
    definitions = _commit(MemoryDatabase.definitions)
    change_token = _commit(MemoryDatabase.change_token)

    # Admin

    reopen = _commit(MemoryDatabase.reopen)
    resume = _commit(MemoryDatabase.resume)
    delete = _commit(MemoryDatabase.delete)
    delete_outbox = _commit(MemoryDatabase.delete_outbox)
    add_audit = _commit(MemoryDatabase.add_audit)
    audits = _commit(MemoryDatabase.audits)
    save_definitions = _commit(MemoryDatabase.save_definitions)


class MemoryHeartbeat:
    def __init__(self, storage: MemoryStorage) -> None:
        self._storage = storage

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        return await self._storage.beat(worker, lease)

    async def hand_over(self, worker: WorkerId, keep: RunId | None) -> int:
        return await self._storage.hand_over(worker, keep)

    async def close(self) -> None:
        pass
