"""This machine: its name among the workers, and which of its processes are gone.

A worker that died on the very host that looks need not be waited for. The name holds the boot and the process
namespace, because a process number means nothing in another container or after a restart, whatever the host is called.
"""

from __future__ import annotations

import hashlib
import os
import socket
from functools import cache
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


@cache
def host_name() -> str:
    name = socket.gethostname()
    try:
        identity = f"{_BOOT.read_text()}{os.readlink(_NAMESPACE)}"
    except OSError:  # not Linux: a name of its own for each process, so that nobody judges it by its number
        identity = f"{os.getpid()}{os.urandom(8).hex()}"
    return f"{name}/{hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()}"


def is_dead(pid: int) -> bool:
    """True only if it is certain. A number that was given out again looks alive, and the lease decides."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in {"Z", "X"}  # killed, and not yet fetched by its parent
