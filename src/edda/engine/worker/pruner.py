"""Removing what nobody asks for any more, a little at a time and beside everything else."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from edda.core.model import MICROSECONDS
from edda.engine.clock import Clock
from edda.engine.settings import Settings
from edda.errors import StorageConflictError, StorageUnavailableError
from edda.storage.ports import Pruning

logger = logging.getLogger(__name__)

BATCH = 500
PAUSE = 0.05
"""Seconds between two batches: whoever works goes first."""
_DAY = 86_400 * MICROSECONDS

Prune = Callable[[int, int], Awaitable[int]]


class Pruner:
    """Every worker does it; what one has in hand the others leave alone."""

    def __init__(self, storage: Pruning, clock: Clock, settings: Settings) -> None:
        self._storage = storage
        self._clock = clock
        self._settings = settings

    async def run(self) -> None:
        await self._repeat(self.prune)

    async def run_for_outbox(self) -> None:
        """For a process that only sends: how long all else is kept is not its business."""
        await self._repeat(self.prune_sent)

    async def _repeat(self, prune: Callable[[], Awaitable[int]]) -> None:
        while True:
            await asyncio.sleep(self._settings.prune_every * random.uniform(0.5, 1.0))
            try:
                await prune()
            except (StorageUnavailableError, StorageConflictError) as error:
                logger.debug("pruning failed, and is tried again later: %s", error)

    async def prune(self) -> int:
        """All that is old enough; returns how many rows of each kind went, added up."""
        messages = self._before(self._settings.message_retention_days)
        removed = await self._drain(self._storage.prune_events, messages)
        removed += await self._drain(self._storage.prune_inbox, messages)
        removed += await self.prune_sent()
        if self._settings.run_retention_days is not None:
            removed += await self._drain(self._storage.prune_runs, self._before(self._settings.run_retention_days))
        return removed

    async def prune_sent(self) -> int:
        """Events of the outbox that were sent; those that are dead stay for people to look at."""
        return await self._drain(self._storage.prune_outbox, self._before(self._settings.message_retention_days))

    def _before(self, days: float) -> int:
        return self._clock.now() - int(days * _DAY)

    async def _drain(self, prune: Prune, before: int) -> int:
        total = 0
        while removed := await prune(before, BATCH):
            total += removed
            await asyncio.sleep(PAUSE)
        return total
