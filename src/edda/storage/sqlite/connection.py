"""Connections to one SQLite file: how they are opened, what they may do when, and what their errors mean.

Whoever opens to write, writes, checkpoints or closes holds the file's `Turn`. That is more than fairness: SQLite before
3.51.3 can corrupt a WAL database when one connection checkpoints and resets the WAL while another writes
(sqlite.org/wal.html#walresetbug). No two of our connections ever do that; a foreign writer, such as a shell that
someone left open with its automatic checkpoints, is outside the rule.
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

from edda.errors import StorageConflictError, StorageRejectedError, StorageUnavailableError
from edda.storage.ports import StatementProbe

from . import faults
from .locks import WriteLock, acquire_lock_file, create_private, release_lock_file
from .opened_file import OpenedFile

T = TypeVar("T")
_Values = Sequence[Any] | Mapping[str, Any]
Version = tuple[int, int, int]

MEMORY = ":memory:"
OLDEST = (3, 35, 0)

PROGRESS_STEPS = 10_000
"""Steps of SQLite's machine between two looks at the clock, some tenths of a millisecond."""
CHECKPOINT_AT = 4 << 20
TRUNCATE_AT = 64 << 20
BUSY_TIMEOUT = 30_000
"""Milliseconds; only foreign writers are ever waited for."""

_PRAGMAS = (
    "PRAGMA wal_autocheckpoint = 0",
    # After a complete checkpoint the WAL is written from its start again; cut back to this size, it is longer
    # exactly when the next checkpoint is due.
    f"PRAGMA journal_size_limit = {CHECKPOINT_AT}",
)
SYNCHRONOUS = {mode: f"PRAGMA synchronous = {mode}" for mode in ("OFF", "NORMAL", "FULL", "EXTRA")}

_NO_DATABASE = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB})
"""A folder, a file of another kind, or one that may not be read."""
_log = logging.getLogger(__name__)


class Connection:
    """Opens itself when first used, and again after it was lost. Used by one thread only, save for `kill`."""

    def __init__(
        self,
        path: str,
        synchronous: str,
        probe: StatementProbe | None = None,
        *,
        lent: bool = False,
        file: OpenedFile | None = None,
    ) -> None:
        """`lent`: for the user's own code too, whose threads are its own. `file` is shared by the connections of one
        storage."""
        self._path = path
        self._file = file
        self._lent = lent
        self._synchronous = SYNCHRONOUS[synchronous]
        self._probe = probe
        self._raw: sqlite3.Connection | None = None
        self._openings = 0
        self._touched = False
        self._killed = threading.Event()
        # Nobody else can see a database in memory, so there is nobody to take turns with.
        self._turn: AbstractContextManager[None] = (
            nullcontext() if path == MEMORY else acquire_lock_file(f"{path}.lock")
        )

    # What jobs use

    def run(self, sql: str, values: _Values = ()) -> int:
        """The number of rows changed."""
        return self._execute(sql, lambda raw: raw.execute(sql, values).rowcount)

    def run_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        # Closed at once: a cursor that lives on in a traceback keeps a dropped connection, and its transaction, open.
        self._execute(sql, lambda raw: raw.executemany(sql, rows).close())

    def rows(self, sql: str, values: _Values = ()) -> list[Any]:
        return self._execute(sql, lambda raw: raw.execute(sql, values).fetchall())

    def row(self, sql: str, values: _Values = ()) -> Any | None:
        return next(iter(self.rows(sql, values)), None)

    @property
    def in_transaction(self) -> bool:
        return self._raw is not None and self._raw.in_transaction

    def lend_to_user(self) -> sqlite3.Connection:
        """To code that may leave anything behind; it is dropped at the end of the turn."""
        self._touched = True
        return self._usable()

    def reset(self) -> None:
        """Whatever it was in the middle of; the next job opens another."""
        self._rollback()
        if self._path != MEMORY:
            self._drop()

    def version(self) -> Version:
        """The same for as long as the database is the same, whoever writes to it.

        `data_version` tells of the others' commits, in numbers of each connection's own. No probe stands beside the
        look: it comes by the clock and asks for nothing that is stored.
        """
        raw = self._usable()
        ((seen,),) = raw.execute("PRAGMA data_version").fetchall()
        return self._openings, raw.total_changes, seen

    # What lanes use

    def run_in_transaction(self, job: Callable[[Connection], T]) -> T:
        """One job, one transaction, one turn."""
        with self._turn, self._map_errors():
            self._check_file()
            self._open()
            self.run("BEGIN IMMEDIATE")
            answer = job(self)
            self.run("COMMIT")
            self._checkpoint()
            return answer

    def with_write_lock(self, job: Callable[[Connection], T]) -> T:
        """One job, one turn; it begins and ends its transactions itself, but none outlives it."""
        with self._turn, self._map_errors():
            self._check_file()
            self._open()
            answer = job(self)
            if self.in_transaction:
                self.reset()
            self._checkpoint()
            if self._touched:
                self.reset()
            return answer

    def read(self, job: Callable[[Connection], T], patience: float | None = None) -> T:
        """One job that only reads. Each statement sees a snapshot of its own; none of them waits for a writer.

        After `patience` seconds it is given up.
        """
        if self._raw is None and not self._open_to_read():
            with self._turn, self._map_errors():
                self._open()
        with self._map_errors():
            self._check_file()
            return job(self) if patience is None else self._with_timeout(job, patience)

    def _check_file(self) -> None:
        if self._file is not None:
            self._file.check()

    def _open_to_read(self) -> bool:
        """Without the turn: a step may hold it for as long as its transaction is open, and nobody who only looks waits
        for that. False if the file is not in WAL mode yet, which only the one with the turn may change."""
        if self._path == MEMORY or self._killed.is_set() or not os.path.exists(self._path):
            return False
        with self._map_errors():
            self._connect()
            (mode,) = self._usable().execute("PRAGMA journal_mode").fetchone()
            if mode == "wal":
                return True
        self._drop()
        return False

    def _with_timeout(self, job: Callable[[Connection], T], patience: float) -> T:
        raw, until = self._usable(), time.monotonic() + patience
        raw.set_progress_handler(lambda: time.monotonic() > until, PROGRESS_STEPS)
        try:
            return job(self)
        except sqlite3.OperationalError as error:
            if time.monotonic() > until:
                raise StorageUnavailableError(f"no answer within {patience:g} s: ask for less") from error
            raise
        finally:
            raw.set_progress_handler(None, 0)

    def close(self) -> None:
        """For good, and in the thread that used it. The last connection of all checkpoints as it closes."""
        self._killed.set()
        with self._turn:
            self._drop()
        if isinstance(self._turn, WriteLock):
            release_lock_file(self._turn)

    def kill(self) -> None:
        """From any thread: the statement that runs may end, no other one begins."""
        self._killed.set()
        if raw := self._raw:
            with suppress(sqlite3.ProgrammingError):  # its thread has just closed it
                raw.interrupt()

    # How it is done

    def _execute(self, sql: str, send: Callable[[sqlite3.Connection], T]) -> T:
        """Every statement passes here."""
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
        try:
            self._open_to_write()
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_DATABASE:
                raise StorageUnavailableError(f"{self._path} cannot be opened as a SQLite database: {error}") from error
            raise

    def _open_to_write(self) -> None:
        if self._raw is not None or self._killed.is_set():
            return
        raw = self._connect()
        if self._path != MEMORY:
            (mode,) = raw.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise StorageUnavailableError(f"{self._path} cannot be put into WAL mode: is it on a network disk?")

    def _connect(self) -> sqlite3.Connection:
        self._openings += 1
        self._touched = False
        if self._file is not None:
            self._file.check(at_once=True)
        if self._path != MEMORY:
            create_private(self._path)
        # Autocommit: transactions begin where we say so.
        self._raw = raw = sqlite3.connect(
            self._path, timeout=BUSY_TIMEOUT / 1000, isolation_level=None, check_same_thread=not self._lent
        )
        for pragma in (*_PRAGMAS, self._synchronous):
            raw.execute(pragma).fetchall()
        if self._file is not None:
            self._file.add_audit()
        return raw

    def _checkpoint(self) -> None:
        """After the commit: what is written is safe already, so trouble here is for the next one to meet."""
        size = self._wal_size()
        if size <= CHECKPOINT_AT or self._raw is None:
            return
        try:
            if size <= TRUNCATE_AT:
                self.rows("PRAGMA wal_checkpoint(PASSIVE)")
            else:
                self._truncate()
        except sqlite3.Error as error:
            _log.warning("checkpoint of %s failed: %s", self._path, error)

    def _truncate(self) -> None:
        """Only if no reader is in the way: waiting for one would stop every writer."""
        self.rows("PRAGMA busy_timeout = 0")
        try:
            self.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self.rows(f"PRAGMA busy_timeout = {BUSY_TIMEOUT}")

    def _wal_size(self) -> int:
        try:
            return os.stat(self._path + "-wal").st_size
        except FileNotFoundError:
            return 0

    @contextmanager
    def _map_errors(self) -> Iterator[None]:
        """Leave no transaction open, and drop a connection in doubt: the next job opens another."""
        try:
            yield
        except BaseException as error:  # whatever it was: a dead client's transaction would be gone as well
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
            self._undo(self._raw)
        except sqlite3.Error as error:  # closing does it too
            _log.warning("rollback on %s failed: %s", self._path, error)
            self._drop()

    def _undo(self, raw: sqlite3.Connection) -> None:
        try:
            raw.rollback()
        except sqlite3.OperationalError:  # `kill` interrupts whatever runs, this too, but only once
            raw.rollback()

    def _drop(self) -> None:
        raw, self._raw = self._raw, None
        if raw is not None:
            raw.close()
