"""Where events come in: stored in one commit with all that came at the same time, each with what it wakes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from msgspec import Struct

from edda.cloudevents import json_format
from edda.cloudevents.event import CloudEvent
from edda.core.channels import Message, message_event, message_keys, pack_message
from edda.core.codec import Codec
from edda.core.model import Accepted, Event, EventKey, Incoming, RunId, Start
from edda.errors import (
    ArgumentError,
    EventError,
    PayloadTooLargeError,
    StorageConflictError,
    StorageRejectedError,
    StorageUnavailableError,
)
from edda.storage.ports import Storage
from edda.workflow.events import arguments
from edda.workflow.workflow import Workflow

from .backoff import Backoff
from .clock import Clock
from .shapes import ShapeBook, target_of

logger = logging.getLogger(__name__)

MOST_EVENTS = 200
MOST_BYTES = 4 << 20
PATIENCE = 3.0
"""Seconds that a post waits for a database that is away before its sender is told to come again."""


class Item(Struct, frozen=True):
    """What goes into the log: an event, with the runs it starts, or a message of a channel."""

    row: Event
    event: CloudEvent | None = None
    starts: tuple[Start, ...] = ()
    keys: tuple[EventKey, ...] = ()
    """Of a message; those of an event depend on who waits for its type."""


class Post(Struct):
    items: Sequence[Item]
    stored: asyncio.Future[None]
    since: float

    @property
    def size(self) -> int:
        return sum(len(item.row.body) for item in self.items)


class Intake:
    """A post is stored whole or not at all. One commit is in flight; what comes meanwhile shares the next."""

    def __init__(
        self,
        storage: Storage,
        book: ShapeBook,
        codec: Codec,
        clock: Clock,
        handlers: Callable[[str], Sequence[Workflow[Any, Any]]],
        woke: Callable[[], None],
        begun: Callable[[Start, CloudEvent], None],
    ) -> None:
        self._storage = storage
        self._book = book
        self._codec = codec
        self._clock = clock
        self._handlers = handlers
        self._woke = woke
        self._begun = begun
        self._posts: deque[Post] = deque()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return self._task is None

    async def accept(self, events: Sequence[CloudEvent]) -> None:
        """Stored when it returns."""
        if events:
            await self.take_in([self.item_of(event) for event in events])

    async def take_in(self, items: Sequence[Item]) -> None:
        loop = asyncio.get_running_loop()
        post = Post(items, loop.create_future(), loop.time())
        self._posts.append(post)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="edda-intake")
        await post.stored

    def tell(self) -> None:
        """Somebody has something to do."""
        self._woke()

    async def close(self) -> None:
        while self._task is not None:
            await asyncio.wait([self._task])

    def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def item_of(self, event: CloudEvent, *, starting: bool = True) -> Item:
        return Item(self._row(event), event, self._starts(event) if starting else ())

    def message_item(self, message: Message, body: bytes | None = None) -> Item:
        packed = pack_message(self._codec, message) if body is None else body
        return Item(message_event(message, packed), keys=message_keys(message))

    def _row(self, event: CloudEvent) -> Event:
        try:
            body = self._codec.seal(json_format.emit_stored(event))
        except PayloadTooLargeError as error:
            raise EventError(f"the event is too large: {error}", attribute="data", status=413) from error
        return Event(event.source, event.id, event.type, target_of(event), body)

    def _starts(self, event: CloudEvent) -> tuple[Start, ...]:
        return tuple(self._start(workflow, event) for workflow in self._handlers(event.type))

    def _start(self, workflow: Workflow[Any, Any], event: CloudEvent) -> Start:
        try:
            bound = workflow.signature.bind((), arguments(workflow, event))
        except (ArgumentError, ValueError) as error:
            logger.warning("event %r of type %s cannot start %s: %s", event.id, event.type, workflow.name, error)
            raise EventError(
                f"the data does not fit the workflow that {workflow.name!r} events start; the receiver's log has the "
                "details",
                attribute="data",
            ) from error
        now = self._clock.now()
        return Start(
            run_of(workflow.name, event), workflow.name, workflow.signature.encode(self._codec, bound), now, now
        )

    # Storing

    async def _work(self) -> None:
        group: list[Post] = []
        try:
            while self._posts:
                group = self._take()
                await self._store(group)
        except BaseException as error:  # killed, or a fault of ours: nobody may wait for ever
            for post in (*group, *self._posts):
                _fail(post, error if isinstance(error, Exception) else StorageUnavailableError("the app was stopped"))
            self._posts.clear()
            if not isinstance(error, Exception):
                raise
            logger.exception("storing events failed")
        finally:
            self._task = None

    def _take(self) -> list[Post]:
        group: list[Post] = []
        count = size = 0
        while self._posts and (not group or (count < MOST_EVENTS and size < MOST_BYTES)):
            post = self._posts.popleft()
            group.append(post)
            count += len(post.items)
            size += post.size
        return group

    async def _store(self, group: Sequence[Post]) -> None:
        backoff = Backoff()
        while True:
            try:
                accepted = await self.store([item for post in group for item in post.items])
            except StorageRejectedError as error:
                await self._isolate(group, error)
                return
            except (StorageConflictError, StorageUnavailableError) as error:
                if self._has_waited(group):
                    for post in group:
                        _fail(post, StorageUnavailableError(f"the database did not take the event: {error}"))
                    return
                await backoff.pause()
                continue
            self._settle(group, accepted)
            return

    async def store(self, items: Sequence[Item], forwarded: Sequence[int] = ()) -> Accepted:
        """In one commit, in which the dispatches that they were made of go."""
        events = [item.event for item in items if item.event is not None]
        types = {item.row.type for item in items}  # somebody may wait for events whose type is that of a channel
        while True:
            keys = iter(await self._book.keys(events))
            incoming = [Incoming(item.row, next(keys) if item.event else item.keys, item.starts) for item in items]
            accepted = await self._storage.accept(incoming, self._book.versions(types), forwarded)
            if accepted is not None:
                self._tell_begun(items, accepted)
                return accepted
            await self._book.refresh(types)

    def _tell_begun(self, items: Sequence[Item], accepted: Accepted) -> None:
        for item in (items[place] for place in sorted(accepted.fresh)):
            if item.event is not None:
                for start in item.starts:
                    self._begun(start, item.event)

    def _has_waited(self, group: Sequence[Post]) -> bool:
        return asyncio.get_running_loop().time() - min(post.since for post in group) > PATIENCE

    async def _isolate(self, group: Sequence[Post], error: StorageRejectedError) -> None:
        """One bad post must not be the others' undoing."""
        if len(group) == 1:
            logger.warning("the database refuses an event: %s", error)
            _fail(group[0], EventError("the database refuses the event; the receiver's log has the details"))
            return
        middle = len(group) // 2
        await self._store(group[:middle])
        await self._store(group[middle:])

    def _settle(self, group: Sequence[Post], accepted: Accepted) -> None:
        for post in group:
            if not post.stored.done():
                post.stored.set_result(None)
        if accepted.woke:
            self._woke()
        for place, item in enumerate(item for post in group for item in post.items):
            if place not in accepted.fresh:
                logger.debug("event %r from %s came again", item.row.id, item.row.source)


def run_of(workflow: str, event: CloudEvent | Event) -> RunId:
    """The id of the run that an event starts: the same, whoever takes the event in and however often."""
    digest = blake2b(digest_size=16)
    for part in (workflow, event.source, event.id):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return RunId(f"event-{digest.hexdigest()}")


def _fail(post: Post, error: Exception) -> None:
    if not post.stored.done():
        post.stored.set_exception(error)
        post.stored.exception()  # looked at: its sender may have gone
