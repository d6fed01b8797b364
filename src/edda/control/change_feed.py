"""Telling those who look that something has changed: one look a second for all of them, none if nobody looks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from edda.engine.tasks import start_task
from edda.errors import StorageConflictError, StorageUnavailableError

logger = logging.getLogger(__name__)

PAUSE = 1.0


class ChangeFeed:
    def __init__(self, look: Callable[[], Awaitable[str]], pause: float = PAUSE) -> None:
        self._look = look
        self._pause = pause
        self._looking: asyncio.Task[None] | None = None
        self._watchers: set[asyncio.Event] = set()
        self._mark = ""

    @property
    def is_looking(self) -> bool:
        return self._looking is not None

    async def changes(self) -> AsyncGenerator[str, None]:
        """The first at once, then one whenever it is another."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            mark = await self._look()
            self._tell(mark)
            yield mark
            looking = self._begin()
            while not looking.done():
                if self._mark != mark:
                    mark = self._mark
                    yield mark
                changed.clear()
                if self._mark == mark and not looking.done():
                    await changed.wait()
        finally:
            self._watchers.discard(changed)
            self._stop_if_unused()

    def _begin(self) -> asyncio.Task[None]:
        if self._looking is None:
            self._looking = start_task(self._poll(), name="edda-watch")
        return self._looking

    def _stop_if_unused(self) -> None:
        if not self._watchers and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _tell(self, mark: str) -> None:
        if mark != self._mark:
            self._mark = mark
            self._wake()

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()

    async def _poll(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._pause)
                try:
                    self._tell(await self._look())
                except (StorageUnavailableError, StorageConflictError) as error:
                    logger.debug("nobody knows whether anything has changed: %s", error)
        except Exception:  # the database is closed: there is nothing to watch any more
            logger.debug("watching ends", exc_info=True)
        finally:
            asyncio.get_running_loop().call_soon(self._wake)  # once this task is done, which ends those who watch
