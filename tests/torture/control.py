"""The protocol broken on purpose: a worker that writes whatever its fence says. The checker must notice."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

from edda.core.model import Bundle, Fence, RunId, WorkerId, WorkerInfo
from edda.engine.ids import Ids
from edda.storage.ports import Pulse, Storage

_LEASE = 1_000_000
"""Of the fence made for one batch: what that batch left owned is soon somebody else's."""


def break_fence(storage: Storage) -> None:
    """What the fence refuses is written all the same, and nobody hears that he was taken over."""
    write, pulse = storage.write, storage.pulse

    async def write_anyway(fence: Fence, batch: Sequence[Bundle]) -> frozenset[RunId] | None:
        answer = await write(fence, batch)
        if answer is not None:
            return answer
        ghost = Ids().worker()
        await storage.register(WorkerInfo(ghost, "ghost", "nowhere", 0), _LEASE)
        return await write(Fence(ghost, 0, 0), batch)

    async def deaf_pulse() -> Pulse:
        return DeafPulse(storage, await pulse())

    patch.object(storage, "write", write_anyway).start()
    patch.object(storage, "pulse", deaf_pulse).start()


class DeafPulse:
    def __init__(self, storage: Storage, pulse: Pulse) -> None:
        self._storage = storage
        self._pulse = pulse
        self._last = 0

    async def beat(self, worker: WorkerId, lease: int) -> int | None:
        self._last = await self._pulse.beat(worker, lease) or self._last
        return self._last

    async def close(self) -> None:
        await self._pulse.close()
