"""The storage on one SQLite file, which any number of processes of one host may share, or on a database in memory."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator

from edda.core.model import WorkerId
from edda.errors import AppError, StorageUnavailableError
from edda.storage.ports import StatementProbe
from edda.storage.shared.migrations import missing
from edda.storage.shared.session_target import SessionTarget

from .admin import SQLiteAdmin
from .claims import SQLiteClaims
from .connection import MEMORY, MIN_VERSION, SYNCHRONOUS, Connection
from .events import SQLiteEvents
from .journal import SQLiteJournal
from .locks import WorkerLockFiles
from .notifications import ChangePoller, SQLiteNotifications
from .outbox import SQLiteOutbox
from .pruning import SQLitePruning
from .queries import SQLiteQueries
from .runs import SQLiteRuns
from .search import SQLiteSearch
from .threads import ConnectionThread, SQLitePool, read, transaction
from .transactions import HeldTransactions, SQLiteTransactions
from .workers import SQLiteWorkers

KILL_TIMEOUT = 1.0
"""Seconds that `kill` waits for running statements; a thread that waits for the write lock is left behind."""

_CREATE_MIGRATIONS = """
CREATE TABLE IF NOT EXISTS edda_migration (
    name TEXT PRIMARY KEY NOT NULL, checksum TEXT NOT NULL, applied_at INTEGER NOT NULL
) WITHOUT ROWID"""
_HAS_MIGRATIONS = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'edda_migration'"
_APPLIED = "SELECT name, checksum FROM edda_migration"
_INSERT_MIGRATION = "INSERT INTO edda_migration (name, checksum, applied_at) VALUES (?, ?, ?)"


def system_microseconds() -> int:
    return time.time_ns() // 1000


class SQLiteStorage(
    SQLiteJournal,
    SQLiteWorkers,
    SQLiteClaims,
    SQLiteRuns,
    SQLiteEvents,
    SQLiteOutbox,
    SQLiteTransactions,
    SQLitePruning,
    SQLiteNotifications,
    SQLiteSearch,
    SQLiteQueries,
    SQLiteAdmin,
):
    def __init__(
        self,
        path: str,
        *,
        now: Callable[[], int] = system_microseconds,
        probe: StatementProbe | None = None,
        synchronous: str = "FULL",
    ) -> None:
        """`synchronous` weaker than FULL may lose the last commits when the machine (not the process) fails."""
        if synchronous not in SYNCHRONOUS:
            raise ValueError(f"synchronous is one of {', '.join(SYNCHRONOUS)}, not {synchronous!r}")
        if path != MEMORY:
            path = os.path.realpath(path)
        self.url = f"sqlite:///{path}"
        self._now = now
        self._pool = SQLitePool(path, synchronous, probe)
        self._held = HeldTransactions(self._pool)
        self._lock_files = WorkerLockFiles(path)
        self._own_workers: set[WorkerId] = set()
        self._heartbeats: set[ConnectionThread] = set()
        self._poller: ChangePoller | None = None
        self._changed = asyncio.Event()
        self._name = secrets.token_hex(4)

    def session_target(self) -> SessionTarget:
        if self._pool.in_memory:
            raise AppError(
                "ctx.session needs a file: no other connection can see a database in memory; use sqlite:///file.db"
            )
        return SessionTarget("sqlite", path=self._pool.path)

    async def open(self) -> None:
        if sqlite3.sqlite_version_info < MIN_VERSION:
            wanted = ".".join(map(str, MIN_VERSION))
            raise StorageUnavailableError(f"SQLite {sqlite3.sqlite_version} is too old: {wanted} or newer is needed")
        try:
            self._changed = asyncio.Event()  # of this loop: the storage may have been open on another before
            await self._pool.open()
            if not self._pool.in_memory:
                self._poller = ChangePoller(self._pool, self._changed.set)
                await self._poller.open()
        except BaseException:  # an error or a cancel: no part may stay open
            self.kill()
            raise

    async def close(self) -> None:
        for part in self._pop_parts():
            await part.close()
        self._unlock_own_workers()

    def kill(self) -> None:
        parts = tuple(self._pop_parts())
        for part in parts:
            part.kill()
        until = time.monotonic() + KILL_TIMEOUT
        for part in parts:
            part.join(max(0.0, until - time.monotonic()))
        self._unlock_own_workers()

    def _pop_parts(self) -> Iterator[ConnectionThread | HeldTransactions | ChangePoller]:
        """All parts that are open. Held transactions come first: the others need the write lock to close."""
        yield self._held
        while self._heartbeats:
            yield self._heartbeats.pop()
        poller, self._poller = self._poller, None
        if poller:
            yield poller
        yield from self._pool.pop_threads()

    @transaction
    def migrate(self, db: Connection) -> tuple[str, ...]:
        """All missing migrations in one transaction: SQLite rolls back DDL like any other statement."""
        db.run(_CREATE_MIGRATIONS)
        todo = missing("sqlite", dict(db.rows(_APPLIED)))
        for migration in todo:
            for statement in migration.statements():
                db.run(statement)
            db.run(_INSERT_MIGRATION, (migration.name, migration.checksum, self._now()))
        return tuple(migration.name for migration in todo)

    @read
    def pending_migrations(self, db: Connection) -> tuple[str, ...]:
        applied = dict(db.rows(_APPLIED)) if db.row(_HAS_MIGRATIONS) else {}
        return tuple(migration.name for migration in missing("sqlite", applied))

    @read
    def now(self, db: Connection) -> int:
        """The process's clock. The statement is there so that the call fails when the database does."""
        db.row("SELECT 1")
        return self._now()
