"""Lock files beside the database file: one write lock for all processes, and one file per worker.

A worker's file is locked while its process lives. It also keeps the worker's lease, as its modification time: renewing
the lease costs no transaction.

The locks are made by `lockf`, not by `flock`: a child that user code forks would keep a `flock` after its parent was
killed. A `lockf` lock excludes other processes, not other threads, and is lost when ANY descriptor of the file is
closed in its process. So each file is opened once per process, and the registries below are process-wide.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections import deque
from contextlib import suppress
from types import TracebackType

from edda.core.model import WorkerId
from edda.errors import StorageRejectedError, StorageUnavailableError

PRIVATE = 0o600
"""The mode of new files: the database holds the inputs and results of runs."""

_guard = threading.Lock()
_write_locks: dict[str, WriteLockFile] = {}
_worker_files: dict[str, int] = {}
"""The locked files of this process's own workers -> their descriptors."""


class FairLock:
    """A lock that goes to the thread that has waited longest. A thread that releases a `threading.Lock` and acquires it
    again gets it before a waiting thread is awake: a stream of short transactions would keep the journal out."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._is_held = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self) -> None:
        with self._guard:
            if not self._is_held:
                self._is_held = True
                return
            handed_over = threading.Lock()
            handed_over.acquire()
            self._waiting.append(handed_over)
        handed_over.acquire()

    def release(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False


class WriteLockFile:
    """A context manager: held by the one thread of the one process that may write to the database just now.

    SQLite itself waits by sleeping and polling: of four busy processes one gets nearly all the transactions. The
    kernel's queue for a file lock is fair between processes, and `FairLock` is fair between the threads of one.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.users = 0
        self._threads = FairLock()
        self._descriptor = _open(path, path.removesuffix(".lock"))

    def __enter__(self) -> None:
        self._threads.acquire()
        try:
            _lock(self._descriptor)
        except OSError as error:
            self._threads.release()
            raise StorageUnavailableError(f"cannot lock {self.path}: {error}") from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        self._threads.release()

    def close(self) -> None:
        os.close(self._descriptor)


def open_write_lock(path: str) -> WriteLockFile:
    """The process's one object for this lock file; each user gives it back with `close_write_lock`."""
    with _guard:
        lock = _write_locks.get(path) or _write_locks.setdefault(path, WriteLockFile(path))
        lock.users += 1
        return lock


def close_write_lock(lock: WriteLockFile) -> None:
    with _guard:
        lock.users -= 1
        if not lock.users and _write_locks.get(lock.path) is lock:
            del _write_locks[lock.path]
            lock.close()


class WorkerLockFiles:
    """The files of a database's workers. The kernel unlocks a worker's file when its process ends in any way."""

    def __init__(self, database: str) -> None:
        self._database = database
        self._prefix = f"{database}.worker-"

    def lock(self, worker: WorkerId) -> None:
        """Called before the worker's row is committed: a process that reads the row finds the file locked."""
        file = self._prefix + worker
        with _guard:
            if file in _worker_files:
                raise StorageRejectedError(f"worker {worker} is registered in this process already")
            descriptor = _open(file, self._database)
            if not _try_lock(descriptor):
                os.close(descriptor)
                raise StorageRejectedError(f"worker {worker} is registered in another process already")
            _worker_files[file] = descriptor

    def process_is_dead(self, worker: WorkerId) -> bool:
        """Whether this worker's process has certainly ended. False if the file is missing, which proves nothing."""
        file = self._prefix + worker
        with _guard:
            if file in _worker_files:  # this process could lock it again, and closing the descriptor would unlock it
                return False
            try:
                descriptor = os.open(file, os.O_RDWR)
            except OSError:
                return False
            try:
                return _try_lock(descriptor)
            finally:
                os.close(descriptor)

    def renew(self, worker: WorkerId, until: int) -> bool:
        """Store the end of the lease (microseconds) as the file's modification time; False if there is no file.

        By the file's name: opening and closing the file here would unlock it.
        """
        try:
            os.utime(self._prefix + worker, ns=(until * 1000, until * 1000))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StorageUnavailableError(f"cannot renew {self._prefix}{worker}: {error}") from error
        return True

    def cap(self, worker: WorkerId, until: int) -> None:
        """Let the lease end at `until` at the latest; a live worker prolongs it with its next heartbeat."""
        with suppress(OSError):
            if os.stat(self._prefix + worker).st_mtime_ns // 1000 > until:
                os.utime(self._prefix + worker, ns=(until * 1000, until * 1000))

    def lease_is_over(self, worker: WorkerId, expires_at: int, now: int) -> bool:
        """True at once if the process has ended. `expires_at`, from the worker's row, counts if there is no file."""
        return self.lease_end(worker, expires_at) < now or self.process_is_dead(worker)

    def lease_end(self, worker: WorkerId, expires_at: int) -> int:
        with suppress(OSError):
            return os.stat(self._prefix + worker).st_mtime_ns // 1000
        return expires_at

    def release(self, worker: WorkerId) -> None:
        """Unlock the file and keep it: other processes then take the worker for dead."""
        with _guard:
            if (descriptor := _worker_files.pop(self._prefix + worker, None)) is not None:
                os.close(descriptor)

    def remove(self, worker: WorkerId) -> None:
        with suppress(OSError):  # removed already, or not permitted: an empty file does no harm
            os.unlink(self._prefix + worker)


def create_private(database: str) -> None:
    """Create an empty database file that only its owner can read, if there is none: SQLite would make it readable for
    all. SQLite gives the mode of this file to the `-wal` and `-shm` files beside it."""
    with suppress(OSError):  # it exists, or cannot be created: SQLite's own error follows
        os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE))


def _open(file: str, database: str) -> int:
    """A new lock file gets the mode of its database: a user who may write to the database has to be able to lock it."""
    try:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE)
        except FileExistsError:
            return os.open(file, os.O_RDWR | os.O_CREAT, PRIVATE)
        with suppress(OSError):  # there is no database yet, or the file system has no modes
            os.fchmod(descriptor, stat.S_IMODE(os.stat(database).st_mode) & 0o666)
        return descriptor
    except OSError as error:
        folder = os.path.dirname(os.path.abspath(file))
        if not os.path.isdir(folder):
            raise StorageUnavailableError(
                f"the folder {folder} does not exist: make it, or correct the URL of the database (sqlite:///name.db "
                "is relative, sqlite:////dir/name.db absolute)"
            ) from error
        raise StorageUnavailableError(f"cannot open {file}: {error}") from error


def _lock(descriptor: int) -> None:
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
            return
        except OSError as error:
            # The kernel treats a process as one thread: two processes that write to the same two databases look like a
            # deadlock, though the threads that hold the locks wait for nothing and will release them.
            if error.errno != errno.EDEADLK:
                raise
            time.sleep(0.001)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _forget() -> None:
    """A forked child owns none of its parent's locks, and has none of the threads that would release its mutexes."""
    global _guard
    _guard = threading.Lock()
    _write_locks.clear()
    _worker_files.clear()


os.register_at_fork(after_in_child=_forget)
