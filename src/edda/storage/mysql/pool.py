"""Where the server is, and the sessions with it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import asyncmy

from edda.errors import NotConnectedError, StorageError
from edda.storage.ports import StatementProbe
from edda.storage.shared.url_options import refuse_unknown_options

from .session import SETUP, Reply, Session
from .statement import Statement, Value

CONNECT_TIMEOUT = 5.0
ANSWER_TIMEOUT = 30.0
"""Seconds without an answer after which a connection counts as lost; a lock is waited for 5 seconds at most."""
JOURNAL_PATIENCE = 10.0
"""The same for the journal, whose one connection all runs of a worker wait for. A batch waits a second for a lock at
most, and one without an answer is sent again and found by its token if it was in."""
KNOWN_OPTIONS = frozenset({"charset", "ssl", "ssl_ca", "unix_socket"})


class ConnectionFactory:
    """Makes sessions, and knows them all so that they can be dropped at once."""

    def __init__(self, url: str, probe: StatementProbe | None) -> None:
        self._arguments = arguments(url)
        self._probe = probe
        self._sessions: set[Session] = set()
        self._open = False
        self.is_certified = False
        """Whether the server is a node of a Galera cluster, as the newest session found it."""

    def open(self) -> None:
        self._open = True

    def kill(self) -> None:
        self._open = False
        for session in self._sessions:
            session.close_threadsafe()
        self._sessions.clear()

    async def connect(self, patience: float | None = ANSWER_TIMEOUT, setup: bytes = SETUP) -> Session:
        self._refuse_if_closed()
        session = Session(await self._connect(), self._probe, patience)
        # Known before its first statement: a kill meanwhile must find it.
        self._sessions = {s for s in self._sessions if s.alive} | {session}
        self._refuse_if_closed(session)
        await session.set_up(setup)
        self.is_certified = session.node is not None
        return session

    async def _connect(self) -> Any:
        connect: Callable[..., Awaitable[Any]] = asyncmy.connect
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                return await connect(**self._arguments)
        except Exception as error:
            # Refused, timed out, half a handshake, bad password: all the same to a caller who will try again.
            raise NotConnectedError(f"cannot connect to the database: {error!r}") from error

    def _refuse_if_closed(self, session: Session | None = None) -> None:
        if not self._open:
            if session:
                session.close_now()
            raise NotConnectedError("the storage is closed")


class Pool:
    """At most `size` sessions; whoever borrows one has it alone until the block ends."""

    def __init__(
        self, address: ConnectionFactory, size: int, setup: bytes = SETUP, patience: float = ANSWER_TIMEOUT
    ) -> None:
        self._address = address
        self._setup = setup
        self._patience = patience
        self._free = asyncio.Semaphore(size)
        self._idle: list[Session] = []

    @property
    def is_certified(self) -> bool:
        return self._address.is_certified

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        session = await self.acquire()
        try:
            yield session
        except StorageError:
            await session.rollback()
            raise
        except BaseException:
            session.close_now()
            raise
        finally:
            self.release(session)

    async def acquire(self) -> Session:
        await self._free.acquire()
        try:
            return await self._take()
        except BaseException:
            self._free.release()
            raise

    def release(self, session: Session) -> None:
        if session.alive:
            self._idle.append(session)
        self._free.release()

    async def _take(self) -> Session:
        while self._idle:
            session = self._idle.pop()
            if session.alive:
                return session
        return await self._address.connect(self._patience, self._setup)

    async def run(self, template: bytes, *values: Value) -> Reply:
        async with self.session() as session:
            return await session.run(template, *values)

    async def send(self, *statements: Statement) -> list[Reply]:
        async with self.session() as session:
            return await session.send(*statements)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()


def arguments(url: str) -> dict[str, Any]:
    """What the driver wants to know; never printed, because the password is in it."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    refuse_unknown_options(options, KNOWN_OPTIONS, "MySQL and MariaDB")
    arguments: dict[str, Any] = {
        "host": parts.hostname or "127.0.0.1",
        "port": parts.port or 3306,
        "user": unquote(parts.username or "root"),
        "password": unquote(parts.password or ""),
        "database": unquote(parts.path.lstrip("/")),
        "charset": "utf8mb4",
        "autocommit": True,
    }
    options.pop("charset", None)
    if socket := options.pop("unix_socket", None):
        arguments["unix_socket"] = socket
    authority = options.pop("ssl_ca", None)
    if options.pop("ssl", "false").lower() in {"1", "true", "yes"} or authority:
        arguments["ssl"] = ssl.create_default_context(cafile=authority)
    return arguments
