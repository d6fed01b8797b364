"""A connection and the thread it lives in; transactions go there whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from .connection import Connection
from .lane import JobThread

T = TypeVar("T")


class ConnectionThread:
    def __init__(self, name: str, connection: Connection) -> None:
        self._connection = connection
        self._lane = JobThread(f"edda-sqlite-{name}", connection.close)

    def transact(self, job: Callable[[Connection], T]) -> asyncio.Future[T]:
        return self._lane.submit(lambda: self._connection.run_in_transaction(job))

    def hold(self, job: Callable[[Connection], T]) -> asyncio.Future[T]:
        return self._lane.submit(lambda: self._connection.with_write_lock(job))

    def read(self, job: Callable[[Connection], T], patience: float | None = None) -> asyncio.Future[T]:
        return self._lane.submit(lambda: self._connection.read(job, patience))

    async def close(self) -> None:
        await self._lane.close()

    def kill(self) -> None:
        self._connection.kill()
        self._lane.stop()

    def join(self, timeout: float) -> None:
        """After a kill."""
        self._lane.join(timeout)
