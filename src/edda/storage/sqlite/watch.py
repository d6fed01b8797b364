"""Learning that somebody else wrote to the file: `PRAGMA data_version`, a few microseconds per look."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from .connection import Connection, Version
from .desk import ConnectionThread

logger = logging.getLogger(__name__)

SHORTEST = 0.005
LONGEST = 0.05
GROWTH = 1.02
"""From the shortest pause to the longest in two quiet seconds: waking up costs far more than looking."""


class ChangePoller:
    """Looks from a thread and a connection of its own, and only while somebody asks.

    The connection never writes: its own commits would be news.
    """

    def __init__(self, connection: Connection, heard: Callable[[], None]) -> None:
        self._desk = ConnectionThread("watch", connection)
        self._on_change = heard
        self._seen: Version | None = None
        self._pause = SHORTEST
        self._askers = 0
        self._looking = False

    async def open(self) -> None:
        """News is what comes after this."""
        self._seen = await self._desk.read(Connection.version)

    async def close(self) -> None:
        self._askers = 0
        await self._desk.close()

    def kill(self) -> None:
        self._desk.kill()

    def join(self, timeout: float) -> None:
        self._desk.join(timeout)

    def start_polling(self) -> None:
        """Each asker calls `rest` in the end."""
        self._askers += 1
        self._look()

    def stop_polling(self) -> None:
        self._askers -= 1

    def _look(self) -> None:
        if not self._looking:
            self._looking = True
            self._desk.read(self._wait).add_done_callback(self._tell)

    def _tell(self, changed: asyncio.Future[bool]) -> None:
        self._looking = False
        try:
            news = changed.result()
        except Exception as error:  # the engine's own calls tell what is wrong; the next asker tries again
            logger.debug("watching the file failed, looking again later: %r", error)
            return
        if news:
            self._on_change()
        elif self._askers > 0:  # who came just as the thread gave up
            self._look()

    def _wait(self, db: Connection) -> bool:
        """In the thread: True at the first change, False when nobody asks any more."""
        while self._askers > 0:
            time.sleep(self._pause)
            if (version := db.version()) != self._seen:
                self._seen, self._pause = version, SHORTEST
                return True
            self._pause = min(self._pause * GROWTH, LONGEST)
        return False
