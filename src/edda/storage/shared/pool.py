"""Sessions with a database server, each on one connection, and pools of them, which reconnect by themselves."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

from edda.errors import NotConnectedError


class PooledSession(ABC):
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    @property
    @abstractmethod
    def is_usable(self) -> bool:
        """Whether its connection is open, and the pool may give it out again."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def close_now(self) -> None:
        """Close the socket, without sending what is still in its buffers; the server rolls back an open transaction."""

    def kill(self) -> None:
        """`close_now`, from any thread: the session of a heartbeat belongs to the event loop of another thread."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        with suppress(RuntimeError):  # the loop is closed, and its connections with it
            if self._loop.is_running() and self._loop is not running:
                self._loop.call_soon_threadsafe(self.close_now)
            elif not self._loop.is_closed():
                self.close_now()


S = TypeVar("S", bound=PooledSession)


class SessionPool(Generic[S]):
    """At most `size` sessions, each used by one task at a time. A lost session is replaced when one is next needed."""

    def __init__(self, connect: Callable[[], Awaitable[S]], size: int) -> None:
        self._connect = connect
        self._size = size
        self._free = asyncio.Semaphore(size)
        self._idle: list[S] = []
        self._busy: set[S] = set()
        self._open = True

    def open(self) -> None:
        if not self._open:  # the loop may be another than the one it was closed on
            self._free = asyncio.Semaphore(self._size)
        self._open = True

    @asynccontextmanager
    async def session(self) -> AsyncIterator[S]:
        session = await self.acquire()
        try:
            yield session
        finally:
            self.release(session)

    async def acquire(self) -> S:
        """For callers that call `release` themselves."""
        await self._free.acquire()
        try:
            if not self._open:
                raise NotConnectedError("the storage is closed")
            while self._idle:
                session = self._idle.pop()
                if session.is_usable:
                    break
                session.close_now()
            else:
                session = await self._connect_anew()
            self._busy.add(session)
            return session
        except BaseException:  # even a cancel
            self._free.release()
            raise

    async def _connect_anew(self) -> S:
        session = await self._connect()
        if not self._open:  # closed while it was being connected
            session.close_now()
            raise NotConnectedError("the storage is closed")
        return session

    def release(self, session: S) -> None:
        self._busy.discard(session)
        if self._open:
            self._idle.append(session)
        else:
            session.close_now()
        self._free.release()

    async def close(self) -> None:
        self._open = False
        while self._idle:
            await self._idle.pop().close()
        self.kill()

    def kill(self) -> None:
        self._open = False
        for session in (*self._idle, *self._busy):
            session.kill()
        self._idle.clear()
