"""Notifications: other processes notice a commit by polling the file's version; nothing is written to tell them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from .connection import Connection, Version
from .threads import ConnectionThread, Part, SQLitePool, read

MIN_PAUSE = 0.005
MAX_PAUSE = 0.05
PAUSE_GROWTH = 1.02
"""From the shortest pause to the longest within two seconds without a commit: waking a thread costs more than the
statement it runs."""

logger = logging.getLogger(__name__)


class ChangePoller:
    """Polls the file's version, from a thread and on a connection of its own, while a caller waits for changes.

    The connection never writes: its own commits would count as changes.
    """

    def __init__(self, pool: SQLitePool, on_change: Callable[[], None]) -> None:
        self._thread: ConnectionThread = pool.connection_thread("watch", is_probed=False)
        self._on_change = on_change
        self._seen: Version | None = None
        self._pause = MIN_PAUSE
        self._callers = 0
        self._is_polling = False

    async def open(self) -> None:
        """Every commit after this is a change."""
        self._seen = await self._thread.read(Connection.version)

    async def close(self) -> None:
        self._callers = 0
        await self._thread.close()

    def kill(self) -> None:
        self._thread.kill()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def start_polling(self) -> None:
        """Each caller calls `stop_polling` in the end."""
        self._callers += 1
        self._poll()

    def stop_polling(self) -> None:
        self._callers -= 1

    def _poll(self) -> None:
        if not self._is_polling:
            self._is_polling = True
            self._thread.read(self._wait_for_change).add_done_callback(self._polled)

    def _polled(self, changed: asyncio.Future[bool]) -> None:
        self._is_polling = False
        try:
            has_changed = changed.result()
        except Exception as error:  # the engine's own calls report what is wrong; the next caller polls again
            logger.debug("polling the file for changes failed (%r), polling again with the next caller", error)
            return
        if has_changed:
            self._on_change()
        elif self._callers > 0:  # one began to wait just as the thread stopped
            self._poll()

    def _wait_for_change(self, db: Connection) -> bool:
        """In the thread: True at the first change, False when no caller waits any more."""
        while self._callers > 0:
            time.sleep(self._pause)
            if (version := db.version()) != self._seen:
                self._seen, self._pause = version, MIN_PAUSE
                return True
            self._pause = min(self._pause * PAUSE_GROWTH, MAX_PAUSE)
        return False


class SQLiteNotifications(Part):
    _changed: asyncio.Event
    _poller: ChangePoller | None
    _name: str
    """A random name of this storage object."""

    async def notify(self) -> None:
        """Wakes the waiting tasks of this process; other processes see the commit itself."""
        self._changed.set()

    async def wait_for_notification(self, timeout: float) -> None:
        poller = self._poller
        if poller:
            poller.start_polling()
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._changed.clear()
            if poller:
                poller.stop_polling()

    @read
    def change_token(self, db: Connection) -> str:
        """With the name of this object: SQLite counts versions per connection, so two objects' numbers differ."""
        return "-".join(map(str, (self._name, *db.version())))
