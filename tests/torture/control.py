"""The protocol broken on purpose, in one way at a time. The checker must notice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from unittest.mock import patch

from msgspec.structs import replace

from edda.core.model import Accepted, Bundle, Fence, Incoming, WorkerId, WorkerInfo, Written
from edda.engine.ids import Ids
from edda.storage.ports import Pulse, Storage

_LEASE = 1_000_000
"""Of the fence made for one batch: what that batch left owned is soon somebody else's."""


def break_fence(storage: Storage) -> None:
    """What the fence refuses is written all the same, and nobody hears that he was taken over."""
    write, pulse = storage.write, storage.pulse

    async def write_anyway(fence: Fence, batch: Sequence[Bundle]) -> Written | None:
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


def break_locks(storage: Storage) -> None:
    """Acceptors and registrars no longer exclude each other, so both may look before either writes."""
    match type(storage).__name__:
        case "PostgresStorage":
            from edda.storage.postgres import events, journal, locks

            patch.object(journal, "share_keys", lambda keys: locks.share_keys(())).start()
            patch.object(events, "hold_keys", lambda types, keys: locks.hold_keys(types, ())).start()
        case "MySQLStorage":
            from edda.storage.mysql import acceptance, batch

            for module in (acceptance, batch):
                patch.object(module, "of_keys", lambda keys: set()).start()
        case _:
            _forget_keys(storage)  # one lock there is everybody's: the nearest is to do what the missing ones lead to


def _forget_keys(storage: Storage) -> None:
    """Now and then an event is stored that no wait can find."""
    accept = storage.accept

    async def accept_badly(post: Sequence[Incoming], versions: Mapping[str, int]) -> Accepted | None:
        return await accept([replace(one, keys=()) if random.random() < 0.05 else one for one in post], versions)

    patch.object(storage, "accept", accept_badly).start()


def break_promise(storage: Storage) -> None:
    """What is not stored yet is said to be."""
    accept, under_way = storage.accept, set[asyncio.Task[None]]()

    async def store(post: Sequence[Incoming], versions: Mapping[str, int]) -> None:
        await asyncio.sleep(0.05)
        await accept(post, versions)

    async def accept_later(post: Sequence[Incoming], versions: Mapping[str, int]) -> Accepted:
        under_way.add(asyncio.create_task(store(post, versions)))
        return Accepted(frozenset(range(len(post))), woke=True)

    patch.object(storage, "accept", accept_later).start()


CONTROLS: dict[str, Callable[[Storage], None]] = {
    "fence": break_fence,
    "locks": break_locks,
    "promise": break_promise,
}
