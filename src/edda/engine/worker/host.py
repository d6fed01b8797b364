"""This machine: its name among the workers, and which of its processes are gone.

The lease of a worker whose process certainly ended on this host need not lapse first. A process number does not prove
that: with `hidepid` or systemd's `ProtectProc` the processes of other users are invisible, and in another container,
after a boot, or on a copy of a virtual machine the same number is another process.

So each worker holds a lock on a file of its own in a folder that does not survive a boot. The kernel frees the lock
when the process ends in any way. A file that exists and is not locked is therefore a process that ended here; without
the file, or with a lock on it, nothing is proven, and the lease decides. A process in another container, on another
machine or on a copy of this one has its file elsewhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from edda.core.model import WorkerId

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_MEMORY = Path("/dev") / "shm"
_PREFIX = "edda-worker-"
_KEEP_SECONDS = 86_400.0
"""For the file of a dead process: the process that replaces it reads it to see that it is dead."""
_CLEANUP_SECONDS = 3_600.0
"""Between two scans of the folder by one process: a crash loop may leave thousands of files there."""
_next_cleanup = 0.0


@cache
def host_name() -> str:
    name = socket.gethostname()
    try:
        identity = f"{_BOOT.read_text()}{os.readlink(_NAMESPACE)}"
    except OSError:  # not Linux: a name of its own for each process, so that no process checks another
        identity = f"{os.getpid()}{os.urandom(8).hex()}"
    return f"{name}/{hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()}"


class Presence:
    """The locked file of one worker of this process."""

    def __init__(self, worker: WorkerId, folder: Path | None = None) -> None:
        self._folder = folder or _shared_folder()
        self._file = self._folder / f"{_PREFIX}{worker}"
        self._descriptor: int | None = None

    def hold(self) -> None:
        """Before the worker is registered. Where no file can be written, the lease alone shows that it lives."""
        _remove_old(self._folder)
        with suppress(OSError):
            # Locked before it has its name, so that it is never seen without its lock.
            fresh = f"{self._file}.new"
            self._descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            os.fchmod(self._descriptor, 0o644)  # independent of the umask: other users' workers have to read it
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(fresh, self._file)

    def release(self) -> None:
        """The worker has ended: from now on other processes may remove it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def remove(self) -> None:
        """The worker has ended, and its row is deleted."""
        self.release()
        with suppress(OSError):  # another user's file in a folder with the sticky bit: its owner removes it
            self._file.unlink()


def has_ended(worker: WorkerId, pid: int, folder: Path | None = None) -> bool:
    """Whether a worker that was registered with this process's `host_name` has certainly ended."""
    if pid == os.getpid():  # a process is not locked out by its own lock, and closing the file here would free it
        return False
    return _is_unlocked((folder or _shared_folder()) / f"{_PREFIX}{worker}")


def _is_unlocked(file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove_old(folder: Path) -> None:
    """Files of this user's processes that died long ago, and that no worker removed."""
    global _next_cleanup
    if time.monotonic() < _next_cleanup:
        return
    _next_cleanup = time.monotonic() + _CLEANUP_SECONDS
    with suppress(OSError):
        for file in folder.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                about = file.stat()
                if about.st_uid == os.getuid() and time.time() - about.st_mtime > _KEEP_SECONDS and _is_unlocked(file):
                    file.unlink()


@cache
def _shared_folder() -> Path:
    """Of all processes of this host and all its users, until the next boot. For a service with a folder of its own
    (`PrivateTmp`, a container) the lease decides."""
    return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
