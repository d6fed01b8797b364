"""Transactions that the user's code and Edda share, on a connection and a thread of their own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from edda.core.model import RunId, StepCommit
from edda.errors import StorageConflictError, StorageUnavailableError
from edda.storage.ports import Dialect, WriteLock
from edda.storage.shared.rows import to_step_commit
from edda.storage.shared.step_commit import NoWriteLock

from .connection import Connection
from .threads import ConnectionThread, JobQueue, Part, SQLitePool, read

T = TypeVar("T")
_Values = Sequence[Any] | Mapping[str, Any]

_STEP_COMMIT = "SELECT step, attempt, value, at FROM edda_step_commit WHERE run_id = ? AND generation = ? AND step = ?"


class HeldTransaction:
    """A job that holds the file's write lock and does what its owner submits, until the owner ends it."""

    def __init__(self, thread: ConnectionThread, prepare: Callable[[Connection], object], holder: str) -> None:
        self.holder = holder
        self.jobs = JobQueue("the transaction is over")
        self._prepare = prepare
        self._db: Connection | None = None
        self.over = thread.hold(self._serve)

    async def begin(self) -> None:
        begun = self.jobs.submit(_nothing)
        try:
            await asyncio.wait((begun, self.over), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:  # the caller was cancelled: the thread gives the lock back as soon as it has it
            self.jobs.stop()
            raise
        if not begun.done():
            self.over.result()
            raise StorageUnavailableError("the storage was closed")

    def submit(self, act: Callable[[Connection], T]) -> asyncio.Future[T]:
        return self.jobs.submit(lambda: act(self.db))

    @property
    def db(self) -> Connection:
        if self._db is None or self.jobs.is_stopped:
            raise StorageUnavailableError("the transaction is over")
        return self._db

    @property
    def has_begun(self) -> bool:
        return self._db is not None

    async def end(self) -> None:
        """Returns when the write lock is released, also if the storage ended the transaction first."""
        self.jobs.stop()
        await asyncio.wait((self.over,))

    def _serve(self, db: Connection) -> None:
        if self.jobs.is_stopped:
            return
        self._prepare(db)
        self._db = db
        self.jobs.run_jobs()


class HeldTransactions:
    """Those that hold the write lock or wait for it. One thread and one connection serve all: only one has the lock."""

    def __init__(self, pool: SQLitePool) -> None:
        self._pool = pool
        self._thread: ConnectionThread | None = None
        self._all: set[HeldTransaction] = set()

    @property
    def holder(self) -> str:
        """The name of the transaction that has the write lock now; empty if none has."""
        return next((held.holder for held in self._all if held.has_begun), "")

    async def begin(self, prepare: Callable[[Connection], object] | None = None, holder: str = "") -> HeldTransaction:
        writer = self._pool.writer  # raises if the storage is closed
        if self._thread is None:
            in_memory = self._pool.in_memory
            self._thread = writer if in_memory else self._pool.connection_thread("transactions", lent=True)
        held = HeldTransaction(self._thread, prepare or _nothing, holder)
        self._all.add(held)
        held.over.add_done_callback(lambda over: self._discard(held, over))
        await held.begin()
        return held

    async def close(self) -> None:
        self._stop()
        thread, self._thread = self._thread, None
        if thread:
            await thread.close()

    def kill(self) -> None:
        if self._thread:
            self._thread.kill()
        self._stop()

    def join(self, timeout: float) -> None:
        thread, self._thread = self._thread, None
        if thread:
            thread.join(timeout)

    def _stop(self) -> None:
        for held in tuple(self._all):
            held.jobs.stop()

    def _discard(self, held: HeldTransaction, over: asyncio.Future[None]) -> None:
        self._all.discard(held)
        if not over.cancelled():
            over.exception()  # `begin` raises it to its caller; retrieved here so that asyncio does not log it


def _nothing(*_: Any) -> None: ...


class SQLiteTransactions(Part):
    _held: HeldTransactions

    async def begin(self, holder: str = "") -> SQLiteTransaction:
        return SQLiteTransaction(await self._held.begin(lambda db: db.run("BEGIN IMMEDIATE"), holder))

    @property
    def is_certified(self) -> bool:
        return False

    async def acquire_write_lock(self, holder: str = "") -> WriteLock:
        # No other connection can write to a database in memory.
        return NoWriteLock() if self._pool.in_memory else await self._held.begin(holder=holder)

    @read
    def find_step_commit(self, db: Connection, run_id: RunId, generation: int, step: str) -> StepCommit | None:
        row = db.row(_STEP_COMMIT, (run_id, generation, step))
        return to_step_commit(row) if row else None


class SQLiteTransaction:
    dialect: Dialect = "sqlite"
    is_certified = False

    def __init__(self, held: HeldTransaction) -> None:
        self._held = held
        self.connection = TransactionConnection(held)

    @property
    def is_lost(self) -> bool:
        return False

    @property
    def has_begun(self) -> bool:
        return True

    async def execute(self, sql: str, values: Mapping[str, Any]) -> int:
        return await self.connection.execute(sql, values)

    async def fetch(self, sql: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        return await self.connection.fetch(sql, values)

    async def commit(self) -> None:
        try:
            await self._held.submit(_commit)
        finally:
            await self._held.end()

    async def rollback(self) -> None:
        """Does nothing if the transaction is over."""
        try:
            if not self._held.jobs.is_stopped:
                await self._held.submit(_roll_back)
        finally:
            await self._held.end()


class TransactionConnection:
    """What `ctx.transaction()` gives the user's code; the transaction's own thread runs each call, one after the other.

    Values are a sequence for `?` or a mapping for `:name`. The transaction holds the file's write lock while it is
    open: a call to Edda that writes (starting a workflow, sending an event) would wait for this very transaction. A
    database in memory cannot even be read by others meanwhile.
    """

    def __init__(self, held: HeldTransaction) -> None:
        self._held = held

    @property
    def raw(self) -> sqlite3.Connection:
        """The driver's own connection. Its calls block the event loop: see `run`."""
        return self._held.db.lend_to_user()

    async def run(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """Call `act` with the driver's own connection, in the transaction's thread."""
        return await self._held.submit(_in_transaction(lambda db: act(db.lend_to_user())))

    async def execute(self, sql: str, values: _Values = ()) -> int:
        """Returns how many rows the statement changed."""
        return await self._held.submit(_in_transaction(lambda db: db.run(sql, values)))

    async def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        await self._held.submit(_in_transaction(lambda db: db.run_many(sql, rows)))

    async def fetch(self, sql: str, values: _Values = ()) -> list[tuple[Any, ...]]:
        return await self._held.submit(_in_transaction(lambda db: db.rows(sql, values)))

    async def fetchone(self, sql: str, values: _Values = ()) -> tuple[Any, ...] | None:
        return next(iter(await self.fetch(sql, values)), None)


def _in_transaction(act: Callable[[Connection], T]) -> Callable[[Connection], T]:
    """Refuse the call if there is no transaction any more: SQLite rolls back by itself after some errors, and each
    later statement would be a transaction of its own."""

    def checked(db: Connection) -> T:
        if not db.in_transaction:
            raise StorageConflictError("the transaction is no longer open: SQLite has rolled it back")
        return act(db)

    return checked


@_in_transaction
def _commit(db: Connection) -> None:
    try:
        db.run("COMMIT")
    except sqlite3.IntegrityError:  # a deferred constraint: the transaction stays open, and `end` rolls it back
        raise
    except sqlite3.Error as error:
        db.reset()
        raise StorageUnavailableError(str(error)) from error


def _roll_back(db: Connection) -> None:
    try:
        if db.in_transaction:
            db.run("ROLLBACK")
    except sqlite3.Error:  # the connection is closed, and its transaction with it
        db.reset()
