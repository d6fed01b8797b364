"""Putting events into the outbox, and looking at what became of them."""

from __future__ import annotations

from collections.abc import Iterable

from edda.cloudevents import json_format
from edda.cloudevents.event import make
from edda.core.codec import Codec
from edda.core.model import OutboxEvent, OutboxRow, OutboxState
from edda.storage.ports import Storage


async def put(storage: Storage, ids: Iterable[object], *, key: str | None = None, codec: Codec | None = None) -> None:
    """Each with its own id as its key, unless one is given for all."""
    await storage.enqueue([outgoing(str(one), key or str(one), codec or Codec()) for one in ids])
    await storage.notify()


def outgoing(id: str, key: str, codec: Codec) -> OutboxEvent:
    event = make("order.shipped", "/shop", id, {"key": key}, time="2026-01-31T18:30:00Z", subject=key)
    return OutboxEvent(id, key, event.type, event.source, codec.encrypt(json_format.emit_stored(event)), created_at=0)


async def records(storage: Storage, state: OutboxState | None = None) -> dict[str, OutboxRow]:
    return {record.event.id: record for record in await storage.find_outbox(state, limit=10_000)}


async def states(storage: Storage) -> dict[str, str]:
    return {id: record.state.value for id, record in (await records(storage)).items()}


async def are_over(storage: Storage) -> bool:
    """Whether nothing waits to be sent."""
    return not await storage.find_outbox(OutboxState.PENDING, limit=1)


def in_order(ids: Iterable[str]) -> list[str]:
    """Each where it came first: what comes again is the price of losing nothing."""
    return list(dict.fromkeys(ids))
