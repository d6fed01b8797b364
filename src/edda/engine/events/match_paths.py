"""Which sets of paths waits match on, as this process knows them: what keys an event gets, and for which waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

from edda.cloudevents import json_format
from edda.cloudevents.event import CloudEvent
from edda.core.channels import is_message
from edda.core.codec import Codec
from edda.core.event_match import event_keys
from edda.core.model import EventKey, MatchPaths, RunId, StoredEvent
from edda.errors import ArgumentError
from edda.storage.ports import Storage

MOST_SHAPES = 64
"""Of one type. Each costs a row per event that has its paths."""
MAX_TYPES = 10_000
"""Event types whose shapes are kept in memory. Types are the senders' words, so there may be any number of them."""
CHUNK = 500
_NOTHING = MatchPaths()


class MatchPathCache:
    def __init__(self, storage: Storage, codec: Codec) -> None:
        self._storage = storage
        self._codec = codec
        self._shapes: dict[str, MatchPaths] = {}
        self._filled: dict[tuple[str, str], int] = {}
        """Events after this number are known to have their keys."""
        self._learning: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """A lock lives as long as a caller of `teach` holds or awaits it."""
        self.last_event = 0
        """A number that was given out already; a run that is started now sees later events only."""

    # For those who store events

    async def keys(self, events: Sequence[CloudEvent]) -> list[tuple[EventKey, ...]]:
        types = {event.type for event in events}
        if not types <= self._shapes.keys():
            # All types of the batch, not only the unknown ones: `refresh` removes the types that were read longest ago,
            # and a known type of this batch may be one of them.
            await self.reload(types)
        return [event_index_keys(event, self._shapes[event.type].known) for event in events]

    def versions(self, types: Iterable[str]) -> Mapping[str, int]:
        return {type: self._shapes.get(type, _NOTHING).version for type in types}

    async def reload(self, types: Iterable[str]) -> None:
        wanted = sorted(types)
        found = await self._storage.match_paths(wanted)
        for type in wanted:
            self._shapes.pop(type, None)  # so that it is the last one in the order of the dict
            self._shapes[type] = found.get(type, _NOTHING)
        surplus = len(self._shapes) - max(MAX_TYPES, len(wanted))
        for type in list(islice(self._shapes, max(surplus, 0))):
            del self._shapes[type]

    # For those who wait

    async def load_last_event(self) -> None:
        """Runs that are started from here on see later events only."""
        self.last_event = max(self.last_event, await self._storage.last_event())

    def covers(self, type: str, shape: str, floor: int) -> bool:
        """Whether every event after the floor is known to have its key."""
        filled = self._filled.get((type, shape))
        return filled is not None and filled <= floor

    async def ensure_indexed(self, type: str, shape: str, floor: int) -> None:
        async with self._learning.setdefault((type, shape), asyncio.Lock()):
            if self.covers(type, shape, floor):
                return
            await self._check_limit(type, shape)
            filled = await self._storage.register_match_paths(type, shape)
            self.last_event = max(self.last_event, filled)
            if floor < filled:
                await self._backfill(type, shape, floor, filled)
            self._filled[type, shape] = min(filled, floor)
            if len(self._filled) > MAX_TYPES:  # what is forgotten is asked of the database again
                del self._filled[next(iter(self._filled))]

    async def _check_limit(self, type: str, shape: str) -> None:
        known = (await self._storage.match_paths([type])).get(type, _NOTHING).known
        if shape not in known and len(known) >= MOST_SHAPES:
            raise ArgumentError(
                f"wait_event: {len(known)} different sets of match paths are in use for {type!r}, which is the limit; "
                "match on paths that are in use already, such as " + known[0]
            )

    async def _backfill(self, type: str, shape: str, floor: int, filled: int) -> None:
        """Nobody adds events to this range any more, so it needs no lock."""
        after = floor
        while True:
            chunk = await self._storage.events_of_type(type, after, filled, CHUNK)
            events = [stored for stored in chunk if not is_message(stored.event)]
            keys = [(key.kept, stored.seq) for stored in events for key in self._stored_keys(stored, shape)]
            done = len(chunk) < CHUNK
            await self._storage.backfill_keys(type, shape, keys, floor if done else filled)
            if done:
                return
            after = chunk[-1].seq

    def _stored_keys(self, stored: StoredEvent, shape: str) -> tuple[EventKey, ...]:
        return event_index_keys(json_format.parse_stored(self._codec.decrypt(stored.event.body)), (shape,))


def event_index_keys(event: CloudEvent, shapes: Sequence[str]) -> tuple[EventKey, ...]:
    if not shapes:
        return ()
    looks_at_data = any(shape != "[]" for shape in shapes)
    data = json_format.exact_value_of(event) if looks_at_data else None
    return event_keys(event.type, attributes_of(event), data, shapes, event.target)


def attributes_of(event: CloudEvent) -> dict[str, Any]:
    named = {
        "id": event.id,
        "source": event.source,
        "type": event.type,
        "time": event.time,
        "subject": event.subject,
        "datacontenttype": event.datacontenttype,
        "dataschema": event.dataschema,
    }
    return {name: value for name, value in named.items() if value is not None} | dict(event.extensions)


def target_run(event: CloudEvent) -> RunId | None:
    return RunId(event.target) if event.target is not None else None
