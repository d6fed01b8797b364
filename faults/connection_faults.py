"""What goes wrong between a worker and its database, done from inside the worker's process."""

from __future__ import annotations

import os
import random
import socket
import stat
import time
from collections.abc import Callable, Iterator

from edda.errors import StorageUnavailableError


class Saboteur:
    """A probe that naps beside statements, loses answers, and cuts connections while a batch is on its way."""

    def __init__(self, port: int | None, on_cut: Callable[[], None]) -> None:
        self.quiet = False
        self._port = port
        self._on_cut = on_cut

    def before(self, statement: str) -> None:
        if self.quiet:
            return
        if random.random() < 0.02:
            time.sleep(random.choice((0.002, 0.01, 0.05)))
        if self._port is None and random.random() < 0.002:
            self._lose("the statement")

    def after(self, statement: str) -> None:
        if not self.quiet and random.random() < 0.004:
            self._lose("the answer")  # what was sent is done, and nobody knows

    def _lose(self, what: str) -> None:
        self._on_cut()
        raise StorageUnavailableError(f"{what} was lost on purpose")

    def cut(self) -> None:
        """Shut down some of this process's sockets to the database, whoever uses them at the moment."""
        if self.quiet or self._port is None:
            return
        self._on_cut()
        lines = list(_sockets_to(self._port))
        for line in lines if random.random() < 0.3 else random.sample(lines, min(2, len(lines))):
            try:
                line.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it was closed meanwhile
        for line in lines:
            line.close()


def _sockets_to(port: int) -> Iterator[socket.socket]:
    """Second handles on the sockets, whichever driver opened them; closing a handle leaves the socket open."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            handle = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        if _peer_port(handle) == port:
            yield handle
        else:
            handle.close()


def _peer_port(handle: socket.socket) -> int | None:
    try:
        peer = handle.getpeername()
    except OSError:
        return None
    return peer[1] if isinstance(peer, tuple) else None
