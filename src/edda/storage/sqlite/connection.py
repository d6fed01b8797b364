"""A connection to one SQLite file: how it is opened, what it may do when, and what its errors mean.

A connection holds the file's `WriteLockFile` while it opens to write, writes, checkpoints or closes. The lock does not
only share the file fairly: SQLite before 3.51.3 can corrupt a WAL database when one connection checkpoints and resets
the WAL while another writes (sqlite.org/wal.html#walresetbug). No two connections of Edda do that. The lock does not
cover a program that is not Edda, such as an open `sqlite3` shell with its automatic checkpoints.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar

from edda.errors import NotConnectedError, StorageConflictError, StorageRejectedError, StorageUnavailableError
from edda.storage.ports import StatementProbe

from . import faults
from .locks import WriteLockFile, close_write_lock, create_private, open_write_lock

T = TypeVar("T")
_Values = Sequence[Any] | Mapping[str, Any]
Version = tuple[int, int, int]

MEMORY = ":memory:"
MIN_VERSION = (3, 35, 0)

PROGRESS_STEPS = 10_000
"""Instructions of SQLite's virtual machine between two checks of a time-out: some tenths of a millisecond."""
CHECKPOINT_AT = 4 << 20
TRUNCATE_AT = 64 << 20
BUSY_TIMEOUT = 30_000
"""Milliseconds that SQLite waits for another program: processes of Edda wait for the lock file instead."""

_PRAGMAS = (
    "PRAGMA wal_autocheckpoint = 0",
    # After a complete checkpoint the WAL is written from its start again; cut back to this size, it is longer
    # exactly when the next checkpoint is due.
    f"PRAGMA journal_size_limit = {CHECKPOINT_AT}",
)
SYNCHRONOUS = {mode: f"PRAGMA synchronous = {mode}" for mode in ("OFF", "NORMAL", "FULL", "EXTRA")}

_NO_DATABASE = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB})
"""A folder, a file of another kind, or one that may not be read."""
FILE_CHECK_SECONDS = 0.5

logger = logging.getLogger(__name__)


class OpenedFile:
    """Notices that the database file was removed or replaced while connections to it are open.

    SQLite goes on writing to a file that has no name any more: every commit succeeds, and is lost when the process
    ends. A connection that opens again would create a new, empty file. The connections of a storage share one object,
    and use it from their threads.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._next_check = 0.0
        self._is_logged = False

    def remember(self) -> None:
        """Take the file that has the name now for the right one; called after a connection was opened."""
        if self._identity is None:
            self._identity = self._find()

    def forget(self) -> None:
        """The storage is opened anew: the next `remember` takes the file that is there then."""
        self._identity, self._next_check, self._is_logged = None, 0.0, False

    def check(self, *, at_once: bool = False) -> None:
        """Raise `NotConnectedError` if another file, or none, has the name now; asks the file system twice a second."""
        now = time.monotonic()
        if self._identity is None or (now < self._next_check and not at_once):
            return
        found = self._find()
        if found == self._identity:
            self._next_check, self._is_logged = now + FILE_CHECK_SECONDS, False
            return
        self._next_check = 0.0
        what = "was removed" if found is None else "was replaced by another file"
        if not self._is_logged:
            self._is_logged = True
            logger.critical(
                "database file %s %s while this process uses it; refusing to read and write until that file is back or "
                "the process is started again",
                self._path,
                what,
            )
        raise NotConnectedError(
            f"{self._path} {what} while this process uses it, so nothing that is written would be kept: put the file "
            "back, or start the process again"
        )

    def _find(self) -> tuple[int, int] | None:
        try:
            about = os.stat(self._path)
        except FileNotFoundError:
            return None
        except OSError:  # an unreadable folder or a network disk that is away: the statements report what is wrong
            return self._identity
        return about.st_dev, about.st_ino


class Connection:
    """Opens the file when it is first used, and again after an error closed it. One thread uses it; only `kill` may be
    called from another."""

    def __init__(
        self,
        path: str,
        synchronous: str,
        probe: StatementProbe | None = None,
        *,
        lent: bool = False,
        file: OpenedFile | None = None,
    ) -> None:
        """`lent`: the user's code gets the driver's connection too, and may call it from any thread."""
        self._path = path
        self._file = file
        self._lent = lent
        self._synchronous = SYNCHRONOUS[synchronous]
        self._probe = probe
        self._raw: sqlite3.Connection | None = None
        self._openings = 0
        self._is_lent_now = False
        self._killed = threading.Event()
        # Only this connection can see a database in memory: there is no other writer to wait for.
        self._write_lock: AbstractContextManager[None] = (
            nullcontext() if path == MEMORY else open_write_lock(f"{path}.lock")
        )

    # For jobs

    def run(self, sql: str, values: _Values = ()) -> int:
        """Returns the number of rows that the statement changed."""
        return self._execute(sql, lambda raw: raw.execute(sql, values).rowcount)

    def run_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        # Closed at once: a cursor that a traceback refers to keeps a closed connection, and its transaction, open.
        self._execute(sql, lambda raw: raw.executemany(sql, rows).close())

    def rows(self, sql: str, values: _Values = ()) -> list[Any]:
        return self._execute(sql, lambda raw: raw.execute(sql, values).fetchall())

    def row(self, sql: str, values: _Values = ()) -> Any | None:
        return next(iter(self.rows(sql, values)), None)

    @property
    def in_transaction(self) -> bool:
        return self._raw is not None and self._raw.in_transaction

    def lend_to_user(self) -> sqlite3.Connection:
        """The driver's connection, for the user's code. It may leave settings behind, so it is closed afterwards."""
        self._is_lent_now = True
        return self._usable()

    def reset(self) -> None:
        """Roll back and close; the next job opens the file again. A database in memory is only rolled back."""
        self._rollback()
        if self._path != MEMORY:
            self._close_raw()

    def version(self) -> Version:
        """Changes with every commit to the database, by this connection or any other.

        `data_version` changes with the commits of other connections; each connection counts for itself. The test probe
        does not see this statement: loops run it by the clock, and it reads nothing that is stored.
        """
        raw = self._usable()
        ((seen,),) = raw.execute("PRAGMA data_version").fetchall()
        return self._openings, raw.total_changes, seen

    # For threads

    def run_in_transaction(self, job: Callable[[Connection], T]) -> T:
        """Run one job in one transaction, with the write lock."""
        with self._write_lock, self._map_errors():
            self._check_file()
            self._open()
            self.run("BEGIN IMMEDIATE")
            answer = job(self)
            self.run("COMMIT")
            self._checkpoint()
            return answer

    def with_write_lock(self, job: Callable[[Connection], T]) -> T:
        """Run one job with the write lock. It begins and ends its transactions itself; one that is still open is rolled
        back."""
        with self._write_lock, self._map_errors():
            self._check_file()
            self._open()
            answer = job(self)
            if self.in_transaction:
                self.reset()
            self._checkpoint()
            if self._is_lent_now:
                self.reset()
            return answer

    def read(self, job: Callable[[Connection], T], timeout: float | None = None) -> T:
        """Run one job that only reads. Each statement sees a snapshot of its own, and none waits for a writer.

        A job that takes longer than `timeout` seconds fails with `StorageUnavailableError`.
        """
        if self._raw is None and not self._open_to_read():
            with self._write_lock, self._map_errors():
                self._open()
        with self._map_errors():
            self._check_file()
            return job(self) if timeout is None else self._with_timeout(job, timeout)

    def _check_file(self) -> None:
        if self._file is not None:
            self._file.check()

    def _open_to_read(self) -> bool:
        """Without the write lock: a step holds it for as long as its transaction is open, and readers do not wait for
        that. False if the file is not in WAL mode yet: only a connection with the write lock may change the mode."""
        if self._path == MEMORY or self._killed.is_set() or not os.path.exists(self._path):
            return False
        with self._map_errors():
            self._connect()
            (mode,) = self._usable().execute("PRAGMA journal_mode").fetchone()
            if mode == "wal":
                return True
        self._close_raw()
        return False

    def _with_timeout(self, job: Callable[[Connection], T], timeout: float) -> T:
        raw, until = self._usable(), time.monotonic() + timeout
        raw.set_progress_handler(lambda: time.monotonic() > until, PROGRESS_STEPS)
        try:
            return job(self)
        except sqlite3.OperationalError as error:
            if time.monotonic() > until:
                raise StorageUnavailableError(f"no answer within {timeout:g} s: ask for less") from error
            raise
        finally:
            raw.set_progress_handler(None, 0)

    def close(self) -> None:
        """For good, in the thread that used it. SQLite checkpoints when the last connection to the file closes."""
        self._killed.set()
        with self._write_lock:
            self._close_raw()
        if isinstance(self._write_lock, WriteLockFile):
            close_write_lock(self._write_lock)

    def kill(self) -> None:
        """From any thread: interrupts the statement that runs, and no other one begins."""
        self._killed.set()
        if raw := self._raw:
            with suppress(sqlite3.ProgrammingError):  # its own thread has just closed it
                raw.interrupt()

    # Opening, checkpoints, errors

    def _execute(self, sql: str, send: Callable[[sqlite3.Connection], T]) -> T:
        raw, probe = self._usable(), self._probe
        if probe is None:
            return send(raw)
        probe.before(sql)
        answer = send(raw)
        probe.after(sql)
        return answer

    def _usable(self) -> sqlite3.Connection:
        if self._killed.is_set() or self._raw is None:
            raise StorageUnavailableError("the connection is closed")
        return self._raw

    def _open(self) -> None:
        if self._raw is not None or self._killed.is_set():
            return
        try:
            raw = self._connect()
            mode = "wal" if self._path == MEMORY else raw.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_DATABASE:
                raise StorageUnavailableError(f"{self._path} cannot be opened as a SQLite database: {error}") from error
            raise
        if mode != "wal":
            raise StorageUnavailableError(f"{self._path} cannot be put into WAL mode: is it on a network disk?")

    def _connect(self) -> sqlite3.Connection:
        self._openings += 1
        self._is_lent_now = False
        if self._file is not None:
            self._file.check(at_once=True)
        if self._path != MEMORY:
            create_private(self._path)
        # Autocommit: the driver begins no transaction by itself.
        self._raw = raw = sqlite3.connect(
            self._path, timeout=BUSY_TIMEOUT / 1000, isolation_level=None, check_same_thread=not self._lent
        )
        for pragma in (*_PRAGMAS, self._synchronous):
            raw.execute(pragma).fetchall()
        if self._file is not None:
            self._file.remember()
        return raw

    def _checkpoint(self) -> None:
        """After the commit. An error here is only logged: the data is stored, and the next transaction tries again."""
        try:
            size = os.stat(self._path + "-wal").st_size
        except FileNotFoundError:
            return
        if size <= CHECKPOINT_AT or self._raw is None:
            return
        try:
            if size <= TRUNCATE_AT:
                self.rows("PRAGMA wal_checkpoint(PASSIVE)")
                return
            # Only if no reader is active: every writer would wait while SQLite waits for a reader.
            self.rows("PRAGMA busy_timeout = 0")
            try:
                self.rows("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                self.rows(f"PRAGMA busy_timeout = {BUSY_TIMEOUT}")
        except sqlite3.Error as error:
            logger.warning("checkpoint of %s failed: %s", self._path, error)

    @contextmanager
    def _map_errors(self) -> Iterator[None]:
        """Translate the error, roll back, and close a connection in an uncertain state; the next job opens another."""
        try:
            yield
        except BaseException as error:  # of any kind: no transaction may stay open
            meaning = faults.translate(error, self._path)
            if isinstance(meaning, StorageConflictError | StorageRejectedError):
                self._rollback()
            else:
                self.reset()
            if meaning is error:
                raise
            raise meaning from error

    def _rollback(self) -> None:
        if self._raw is None or not self._raw.in_transaction:
            return
        try:
            try:
                self._raw.rollback()
            except sqlite3.OperationalError:  # `kill` interrupts the statement that runs, this one too, but only once
                self._raw.rollback()
        except sqlite3.Error as error:  # closing rolls back too
            logger.warning("rollback on %s failed: %s", self._path, error)
            self._close_raw()

    def _close_raw(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()
