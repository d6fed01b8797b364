"""This machine: its name among the workers, and which of its processes are gone.

A worker that died on the very host that looks need not be waited for, if its death is certain. A process number cannot
tell: with `hidepid` or systemd's `ProtectProc` the processes of other users are not to be seen, and in another
container, after a boot, or on a copy of a virtual machine the same number is another process.

So each worker holds a lock on a file of its own in a folder that does not survive a boot. The kernel frees the lock
when the process ends, in whatever way. A file that is there and not locked is therefore a process that ended here;
without the file, or with a lock on it, nothing is certain, and the lease decides. A process in another container, on
another machine or on a copy of this one has its file elsewhere.
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
_KEPT = 86_400.0
"""Seconds for which the file of a dead process is kept: whoever restarts it needs it to see that it is dead."""


@cache
def host_name() -> str:
    name = socket.gethostname()
    try:
        identity = f"{_BOOT.read_text()}{os.readlink(_NAMESPACE)}"
    except OSError:  # not Linux: a name of its own for each process, so that none is judged by another
        identity = f"{os.getpid()}{os.urandom(8).hex()}"
    return f"{name}/{hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()}"


class Presence:
    """The locked file of one worker of this process."""

    def __init__(self, worker: WorkerId, folder: Path | None = None) -> None:
        self._folder = folder or _shared_folder()
        self._file = self._folder / f"{_PREFIX}{worker}"
        self._descriptor: int | None = None

    def hold(self) -> None:
        """Before the worker is registered. Where no file can be written its lease alone tells that it lives."""
        _remove_old(self._folder)
        with suppress(OSError):
            # Locked before it has its name, so that it is never seen without its lock.
            fresh = f"{self._file}.new"
            self._descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            os.fchmod(self._descriptor, 0o644)  # whatever the umask: others have to be able to look
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(fresh, self._file)

    def release(self) -> None:
        """The worker is gone, and so is its row, or its runs are to wait for nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def remove(self) -> None:
        """Its row is gone, too."""
        self.release()
        with suppress(OSError):  # another user's file in a folder with the sticky bit: it is removed by its owner
            self._file.unlink()


def has_ended(worker: WorkerId, pid: int, folder: Path | None = None) -> bool:
    """Whether a worker that was registered with our own `host_name` is dead for certain."""
    if pid == os.getpid():  # our own lock would not keep us out, and to close the file here would free it
        return False
    return _is_unlocked((folder or _shared_folder()) / f"{_PREFIX}{worker}")


def forget(worker: WorkerId) -> None:
    """After the burial of a worker that has ended."""
    Presence(worker).remove()


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
    """Files of our own processes that died long ago without a worker to bury them."""
    with suppress(OSError):
        for file in folder.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                about = file.stat()
                if about.st_uid == os.getuid() and time.time() - about.st_mtime > _KEPT and _is_unlocked(file):
                    file.unlink()


@cache
def _shared_folder() -> Path:
    """Of all processes of this host, whoever runs them, until the next boot. A service with a folder of its own
    (`PrivateTmp`, a container) is judged by its lease."""
    return _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
