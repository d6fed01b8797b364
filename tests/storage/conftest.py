from __future__ import annotations

from typing import Protocol

import pytest

from edda.storage.ports import Storage

from .records import HOUR
from .worker import Worker


class MakeWorker(Protocol):
    async def __call__(self, name: str, lease: int = HOUR, on: Storage | None = None) -> Worker: ...


@pytest.fixture
def make_worker(storage: Storage) -> MakeWorker:
    """A registered worker, on another process's storage if one is given."""

    async def make(name: str, lease: int = HOUR, on: Storage | None = None) -> Worker:
        worker = Worker(on or storage, name)
        await worker.register(lease)
        return worker

    return make


@pytest.fixture
async def worker(make_worker: MakeWorker) -> Worker:
    return await make_worker("worker-1")
