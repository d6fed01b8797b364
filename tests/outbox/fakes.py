"""A sink in memory, and an outbox that misbehaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from edda.cloudevents.event import CloudEvent
from edda.core.model import OutboxRow, SendResult
from edda.storage.ports import Storage

Behaviour = Callable[[CloudEvent, int], Awaitable[None]]
"""What it does at the n-th try of an event, from 1."""


async def take(event: CloudEvent, attempt: int) -> None:
    return


class ListSink:
    def __init__(self, behaviour: Behaviour = take) -> None:
        self.behaviour = behaviour
        self.tried: list[str] = []
        self.taken: list[str] = []
        self.under_way = 0
        self.most_under_way = 0
        self.closed = 0
        self._tries: Counter[str] = Counter()

    async def send(self, event: CloudEvent) -> None:
        self.tried.append(event.id)
        self._tries[event.id] += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.behaviour(event, self._tries[event.id])
            self.taken.append(event.id)
        finally:
            self.under_way -= 1

    async def close(self) -> None:
        self.closed += 1


class Sabotaged:
    """A storage whose claims and receipts can fail; everything else is as it is."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.claims = 0
        self.looks = 0
        self.before_claim: Callable[[], None] = lambda: None
        self.before_settling: Callable[[Sequence[SendResult]], None] = lambda receipts: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    async def next_outbox_due(self) -> int | None:
        self.looks += 1
        return await self._storage.next_outbox_due()

    async def claim_outbox(self, limit: int, lease: int) -> tuple[OutboxRow, ...]:
        self.claims += 1
        self.before_claim()
        return await self._storage.claim_outbox(limit, lease)

    async def record_send_results(self, receipts: Sequence[SendResult]) -> None:
        self.before_settling(receipts)
        await self._storage.record_send_results(receipts)

    @property
    def as_storage(self) -> Storage:
        return cast("Storage", self)


async def forever(event: CloudEvent, attempt: int) -> None:
    await asyncio.Event().wait()
