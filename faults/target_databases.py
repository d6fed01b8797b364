"""Databases for the fault runs: one on a server that may be shared, or a server of our own that can be crashed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from edda.databases import open_storage
from edda.storage.ports import Storage
from tests import databases

from .audit_triggers import INSTALL
from .slow_triggers import SLOW_DOWN, SPEED_UP
from .sql_client import LINES, Line

KINDS = ("postgres", "mysql", "sqlite")
PATIENCE = 60.0
COUNT_DEADLOCKS = {
    "postgres": "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()",
    "mysql": "SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'Innodb_deadlocks'",
}


class Place:
    def __init__(self, kind: str, url: str, urls: Sequence[str] = ()) -> None:
        self.kind = kind
        self.url = url
        self.urls = tuple(urls) or (url,)
        """Where workers connect, one after the other: several if it is a cluster whose nodes all take writes."""

    def line(self) -> Line:
        return LINES[self.kind](self.url)

    def storage(self) -> Storage:
        return open_storage(self.url, pool_size=2)

    async def prepare(self) -> None:
        """Tables, and the audit beside them."""
        storage = self.storage()
        await storage.open()
        await storage.migrate()
        await storage.close()
        await self._execute(INSTALL[self.kind])

    async def slow_down(self) -> None:
        await self._execute(SLOW_DOWN[self.kind])

    async def speed_up(self) -> None:
        await self._execute(SPEED_UP[self.kind])

    async def deadlocks(self) -> int:
        """As the server counts them; a shared MariaDB counts those of its other databases too."""
        if self.kind not in COUNT_DEADLOCKS:
            return 0
        line = self.line()
        try:
            return int((await line.rows(COUNT_DEADLOCKS[self.kind]))[0][0])
        finally:
            line.close()

    @property
    def counts_only_its_own(self) -> bool:
        """Whether every deadlock it counts is one of ours."""
        return self.kind == "postgres"

    async def _execute(self, statements: tuple[str, ...]) -> None:
        line = self.line()
        try:
            for statement in statements:
                await line.once(statement)
        finally:
            line.close()


class Crasher(Protocol):
    def crash(self) -> None: ...

    def restart(self) -> None: ...


class Crashable:
    """A server of our own that dies as a crash would let it, and comes back on the same port."""

    def __init__(self, server: databases.Server, pid: int, how: signal.Signals) -> None:
        self._server = server
        self._how = how
        self._pid = pid
        self._command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
        # A killed process must not lose what it said was committed; only a crash of the machine may.
        if "--innodb-flush-log-at-trx-commit=0" in self._command:
            self._command.append("--innodb-flush-log-at-trx-commit=2")
        self._owner = os.stat(f"/proc/{pid}").st_uid
        self._process: subprocess.Popen[bytes] | None = None

    def crash(self) -> None:
        os.kill(self._pid, self._how)
        if self._process is not None:
            self._process.wait()
        else:
            os.waitpid(self._pid, 0)

    def restart(self) -> None:
        """Returns when the port answers."""
        self._process = subprocess.Popen(
            self._command, user=self._owner, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
        )
        self._pid = self._process.pid
        give_up = time.monotonic() + PATIENCE
        while not self._server.answers(self._server.url):
            assert time.monotonic() < give_up, f"{self._command[0]} does not come back"

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE)


@contextmanager
def fresh(kind: str, folder: Path) -> Iterator[Place]:
    if kind == "sqlite":
        yield Place(kind, f"sqlite:///{folder / 'faults.db'}")
        return
    server = databases.postgres() if kind == "postgres" else databases.mysql()
    assert server is not None, f"there is no {kind} to be had"
    url = server.create()
    try:
        yield Place(kind, url)
    finally:
        server.drop(url)


@contextmanager
def crashable(kind: str) -> Iterator[tuple[Place, Crashable]]:
    server = databases.own_postgres() if kind == "postgres" else databases.own_mysql()
    assert server is not None, f"there are no binaries of {kind} to start a server from"
    how = signal.SIGQUIT if kind == "postgres" else signal.SIGKILL  # what `pg_ctl -m immediate` sends, and kill -9
    crasher = Crashable(server, _pid_of(server.url), how)
    crasher.crash()
    crasher.restart()
    url = server.create()
    try:
        yield Place(kind, url), crasher
    finally:
        server.drop(url)
        crasher.stop()


def _pid_of(url: str) -> int:
    """Of the server that listens there."""
    port = url.rsplit(":", 1)[1].partition("/")[0]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        if f"--port={port}".encode() in command:
            return int(folder.name)
    raise LookupError(f"no server was started with --port={port}")
