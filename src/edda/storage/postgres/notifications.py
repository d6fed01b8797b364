"""Waking other processes: LISTEN and NOTIFY on a connection of their own, or polling where LISTEN is not to be had."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from edda.errors import StorageUnavailableError
from edda.storage.shared.polling import PollingNews

from .pool import Pool
from .session import Session
from .target import Target

CHANNEL = "edda_news"
NOTIFY = f"NOTIFY {CHANNEL}"


class PostgresNews:
    def __init__(self, line: Pool, target: Target) -> None:
        self._line = line
        self._target = target
        self._polling = PollingNews()
        self._arrived = asyncio.Event()
        self._listening: Session | None = None
        self._asked = 0
        self._told = 0

    async def notify(self) -> None:
        """Never part of a transaction: NOTIFY takes a lock on the whole server from there to the commit."""
        self._arrived.set()
        await self._polling.notify()
        self._asked += 1
        mine = self._asked
        # Only a hint: whoever misses it finds the work by looking, a moment later.
        with suppress(StorageUnavailableError):
            async with self._line.session() as session:
                if self._told < mine:  # else one that was sent after we asked speaks for us too
                    await self._tell(session)

    async def _tell(self, session: Session) -> None:
        asked = self._asked
        await session.execute(NOTIFY)
        self._told = asked

    def expect_more(self) -> None:
        """Something was found just now: where nothing can be heard, look again soon."""
        self._polling.expect_more()

    async def wait_for_notification(self, timeout: float) -> None:
        if self._target.is_pooled:
            await self._polling.wait_for_notification(timeout)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                with suppress(StorageUnavailableError):
                    await self.listen()
                await self._arrived.wait()
        self._arrived.clear()

    async def listen(self) -> None:
        async with self._line.session() as session:
            # LISTEN is made on one server connection: behind a pooler the next client would hear it.
            if session is self._listening or self._target.is_pooled:
                return
            await session.listen(CHANNEL, self._arrived.set)
            if self._listening is not None:  # news may have come by while nobody listened
                self._arrived.set()
            self._listening = session
