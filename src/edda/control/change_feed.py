"""`ChangeFeed`: queries the change token once a second for all watchers together; without watchers, not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from edda.engine.tasks import start_task
from edda.errors import StorageConflictError, StorageUnavailableError

logger = logging.getLogger(__name__)

PAUSE = 1.0


class ChangeFeed:
    def __init__(self, read_token: Callable[[], Awaitable[str]], pause: float = PAUSE) -> None:
        self._read_token = read_token
        self._pause = pause
        self._polling: asyncio.Task[None] | None = None
        self._watchers: set[asyncio.Event] = set()
        self._token = ""

    async def watch(self) -> AsyncGenerator[str, None]:
        """Yields the change token at once, then each time it differs."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            token = await self._read_token()
            self._publish(token)
            yield token
            if self._polling is None:
                self._polling = start_task(self._poll(), name="edda-watch")
            polling = self._polling
            while not polling.done():
                if self._token != token:
                    token = self._token
                    yield token
                changed.clear()
                if self._token == token and not polling.done():
                    await changed.wait()
        finally:
            self._watchers.discard(changed)
            if not self._watchers and self._polling is not None:
                self._polling.cancel()
                self._polling = None

    def _publish(self, token: str) -> None:
        if token != self._token:
            self._token = token
            self._wake()

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()

    async def _poll(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._pause)
                try:
                    self._publish(await self._read_token())
                except (StorageUnavailableError, StorageConflictError) as error:
                    logger.debug("change feed: the query failed (%s), trying again in %g s", error, self._pause)
        except Exception:  # the storage is closed
            logger.debug("change feed: ends", exc_info=True)
        finally:
            asyncio.get_running_loop().call_soon(self._wake)  # readers then see that this task is done, and end
