"""A worker for storage tests: it registers, keeps its fence, and writes batches."""

from __future__ import annotations

from msgspec.structs import replace

from edda.core.model import BatchResult, Claim, Fence, RunId, RunWrite, WorkerId, WorkerInfo
from edda.storage.ports import Storage

from .records import HOUR, WORKFLOW


class Worker:
    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.id = WorkerId(name)
        self.fence = Fence(self.id, 0, 0)

    async def register(self, lease: int = HOUR) -> int:
        return await self.storage.register(WorkerInfo(self.id, "shop", "host", 4711), lease)

    async def write(self, *batch: RunWrite) -> frozenset[RunId] | None:
        """The runs that are ready again at once."""
        written = await self.send(*batch)
        return None if written is None else written.ready

    async def send(self, *batch: RunWrite) -> BatchResult | None:
        written = await self.storage.write(self.fence, batch)
        if written is not None:
            self.fence = replace(self.fence, batch_no=self.fence.batch_no + 1)
        return written

    async def claim(self, *workflows: str, limit: int = 100) -> Claim:
        return await self.storage.claim(self.id, workflows or (WORKFLOW,), limit)

    async def beat(self, lease: int = HOUR) -> int | None:
        heartbeat = await self.storage.open_heartbeat()
        try:
            return await heartbeat.beat(self.id, lease)
        finally:
            await heartbeat.close()
