"""File locks: one that lets the processes of a database write in turn, and one per worker that shows it lives.

The file of a worker also keeps its lease: renewing it there costs no transaction.

`lockf`, not `flock`: a child forked by user code would keep a `flock` after its parent was killed. A `lockf` lock
excludes processes, not threads, and is lost when ANY descriptor of the file is closed in its process. So each
file is opened once per process, and these registries are process-wide.
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
"""The mode of files that are made here: what runs are given and return is in them."""

_guard = threading.Lock()
_turns: dict[str, WriteLock] = {}
_alive: dict[str, int] = {}
"""The locked files of this process's own workers, with their descriptors."""


class FairLock:
    """A lock that goes to whoever has waited longest. Who gives a `threading.Lock` back and wants it again has it
    before the one who waits is awake: a stream of short transactions would keep the journal out."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            call = threading.Lock()
            call.acquire()
            self._waiting.append(call)
        call.acquire()

    def release(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


class WriteLock:
    """Held by the one thread of the one process that may write just now.

    SQLite's own waiting sleeps and polls: of four busy processes one gets nearly all the turns. The kernel's
    queue is fair, and so is that of the threads.
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


def acquire_lock_file(path: str) -> WriteLock:
    """The process's one `Turn` for this file; every user gives it back with `leave_turn`."""
    with _guard:
        turn = _turns.get(path) or _turns.setdefault(path, WriteLock(path))
        turn.users += 1
        return turn


def release_lock_file(turn: WriteLock) -> None:
    with _guard:
        turn.users -= 1
        if not turn.users and _turns.get(turn.path) is turn:
            del _turns[turn.path]
            turn.close()


class WorkerLockFile:
    """Shows that a worker's process lives: the kernel unlocks its file when it dies, however it dies."""

    def __init__(self, database: str) -> None:
        self._database = database
        self._prefix = f"{database}.worker-"

    def lock(self, worker: WorkerId) -> None:
        """Before the worker's row is visible, so that nobody who sees the row finds the file unlocked."""
        file = self._prefix + worker
        with _guard:
            if file in _alive:
                raise StorageRejectedError(f"worker {worker} is registered in this process already")
            descriptor = _open(file, self._database)
            if not _try_lock(descriptor):
                os.close(descriptor)
                raise StorageRejectedError(f"worker {worker} is registered in another process already")
            _alive[file] = descriptor

    def process_is_dead(self, worker: WorkerId) -> bool:
        """Whether the process of this worker is dead for certain; without its file nothing is certain."""
        file = self._prefix + worker
        with _guard:
            if file in _alive:  # our own lock would not stop us, and closing the descriptor would drop it
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
        """Keep the lease as the time of the file, in microseconds of the database's clock; False if there is no file.

        By name: to open the file here and close it again might drop the lock.
        """
        try:
            os.utime(self._prefix + worker, ns=(until * 1000, until * 1000))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StorageUnavailableError(f"cannot renew {self._prefix}{worker}: {error}") from error
        return True

    def cap(self, worker: WorkerId, until: int) -> None:
        """Let the lease end then at the latest; a live worker prolongs it with its next beat."""
        with suppress(OSError):
            if os.stat(self._prefix + worker).st_mtime_ns // 1000 > until:
                os.utime(self._prefix + worker, ns=(until * 1000, until * 1000))

    def lease_is_over(self, worker: WorkerId, expires_at: int, now: int) -> bool:
        """Nobody waits for the lease of a process that is dead; `expires_at` is for workers without a file."""
        return self.lease_end(worker, expires_at) < now or self.process_is_dead(worker)

    def lease_end(self, worker: WorkerId, expires_at: int) -> int:
        """When its lease ends."""
        with suppress(OSError):
            return os.stat(self._prefix + worker).st_mtime_ns // 1000
        return expires_at

    def release(self, worker: WorkerId) -> None:
        """Look dead to everybody; the file stays for them to find."""
        with _guard:
            if (descriptor := _alive.pop(self._prefix + worker, None)) is not None:
                os.close(descriptor)

    def remove(self, worker: WorkerId) -> None:
        with suppress(OSError):  # gone already, or not ours to delete: an empty file hurts nobody
            os.unlink(self._prefix + worker)


def create_private(database: str) -> None:
    """Make an empty database file for its owner alone, if there is none: SQLite itself would let everybody read it.

    SQLite gives the mode of this file to the `-wal` and `-shm` files beside it.
    """
    with suppress(OSError):  # it is there, or cannot be made: SQLite says then what is wrong
        os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE))


def _open(file: str, database: str) -> int:
    """A new lock file gets the mode of its database: who may write to the one has to be able to lock the other."""
    try:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE)
        except FileExistsError:
            return os.open(file, os.O_RDWR | os.O_CREAT, PRIVATE)
        with suppress(OSError):  # there is no database yet, or this is no file system with modes
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
            # The kernel takes a process for one thread: two processes that write to the same two databases look
            # like a deadlock to it, though each lock will be given back by a thread that waits for nothing.
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
    """A forked child owns none of its parent's locks, and the parent's threads that hold mutexes are not there."""
    global _guard
    _guard = threading.Lock()
    _turns.clear()
    _alive.clear()


os.register_at_fork(after_in_child=_forget)
