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
from edda.core.model import AcceptResult, Event, EventKey, NewEvent, RunId, Start
from edda.engine.clock import Clock
from edda.engine.tasks import Backoff
from edda.engine.worker import supervision
from edda.errors import (
    ArgumentError,
    EventError,
    NotConnectedError,
    OutcomeUnknownError,
    PayloadTooLargeError,
    StorageConflictError,
    StorageDuplicateError,
    StorageRejectedError,
    StorageUnavailableError,
)
from edda.storage.ports import Storage
from edda.workflow.events import event_arguments
from edda.workflow.workflow import Workflow

from .match_paths import MatchPathCache, target_run

logger = logging.getLogger(__name__)

MOST_EVENTS = 200
MOST_BYTES = 4 << 20


class IngestItem(Struct, frozen=True):
    """What goes into the log: an event, with the runs it starts, or a message of a channel."""

    row: Event
    event: CloudEvent | None = None
    starts: tuple[Start, ...] = ()
    keys: tuple[EventKey, ...] = ()
    """Of a message; those of an event depend on who waits for its type."""


class IngestRequest(Struct, eq=False):
    items: Sequence[IngestItem]
    stored: asyncio.Future[None]
    until: float
    """When its sender stops waiting, on the loop's clock."""
    may_be_stored: bool = False
    """A statement with it was sent, and not refused."""
    error: Exception | None = None
    """Why it is not stored yet."""

    @property
    def size(self) -> int:
        return sum(len(item.row.body) for item in self.items)


class EventIngest:
    """A post is stored whole or not at all. One commit is in flight; what comes meanwhile shares the next."""

    def __init__(
        self,
        storage: Storage,
        book: MatchPathCache,
        codec: Codec,
        clock: Clock,
        handlers: Callable[[str], Sequence[Workflow[Any, Any]]],
        woke: Callable[[], None],
        begun: Callable[[Start, CloudEvent], None],
        *,
        call_timeout: float,
    ) -> None:
        self._storage = storage
        self._book = book
        self._codec = codec
        self._clock = clock
        self._handlers = handlers
        self._on_wake = woke
        self._on_run_started = begun
        self._call_timeout = call_timeout
        self._posts: deque[IngestRequest] = deque()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return self._task is None

    async def ingest(self, events: Sequence[CloudEvent]) -> None:
        """Stored when it returns."""
        if events:
            await self.submit([self.to_item(event) for event in events])

    async def submit(self, items: Sequence[IngestItem]) -> None:
        loop = asyncio.get_running_loop()
        post = IngestRequest(items, loop.create_future(), loop.time() + self._call_timeout)
        self._posts.append(post)
        if self._task is None:
            self._task = supervision.start_once("storing events", self._work, name="edda-intake")
        await asyncio.wait([post.stored], timeout=self._call_timeout)
        if not post.stored.done():
            self._give_up(post)
        post.stored.result()

    def _is_awaited(self, post: IngestRequest) -> bool:
        if asyncio.get_running_loop().time() >= post.until:  # its sender may have been cancelled, and tells nothing
            self._give_up(post)
        return not post.stored.done()

    def _give_up(self, post: IngestRequest) -> None:
        """Its sender has waited long enough. What was not sent yet is not sent any more."""
        if post in self._posts:
            self._posts.remove(post)
        _fail(post, self._no_answer(post))

    def _no_answer(self, post: IngestRequest) -> StorageUnavailableError:
        first = post.items[0].row
        name = f"event or message {first.id!r} from {first.source}" + (
            f", and {len(post.items) - 1} more" if len(post.items) > 1 else ""
        )
        why = f"storing {name}: the database did not answer within {self._call_timeout:g} seconds"
        if post.error is not None:
            why += f" ({post.error})"
        if not post.may_be_stored:
            return StorageUnavailableError(f"{why}; nothing was stored, send it again")
        return OutcomeUnknownError(
            f"{why}, so it is unknown whether it is stored: send it again under the same id, which counts once"
        )

    def notify(self) -> None:
        """Somebody has something to do."""
        self._on_wake()

    async def close(self) -> None:
        while self._task is not None:
            await asyncio.wait([self._task])

    def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def to_item(self, event: CloudEvent, *, starting: bool = True) -> IngestItem:
        return IngestItem(self._row(event), event, self._starts(event) if starting else ())

    def message_item(self, message: Message, body: bytes | None = None) -> IngestItem:
        packed = pack_message(self._codec, message) if body is None else body
        return IngestItem(message_event(message, packed), keys=message_keys(message))

    def _row(self, event: CloudEvent) -> Event:
        try:
            body = self._codec.encrypt(json_format.emit_stored(event))
        except PayloadTooLargeError as error:
            raise EventError(f"the event is too large: {error}", attribute="data", status=413) from error
        return Event(event.source, event.id, event.type, target_run(event), body)

    def _starts(self, event: CloudEvent) -> tuple[Start, ...]:
        return tuple(self._start(workflow, event) for workflow in self._handlers(event.type))

    def _start(self, workflow: Workflow[Any, Any], event: CloudEvent) -> Start:
        try:
            bound = workflow.signature.bind((), event_arguments(workflow, event))
        except (ArgumentError, ValueError) as error:
            logger.warning("event %r of type %s cannot start %s: %s", event.id, event.type, workflow.name, error)
            raise EventError(
                f"the data does not fit the workflow that {workflow.name!r} events start; the receiver's log has the "
                "details",
                attribute="data",
            ) from error
        now = self._clock.now()
        return Start(
            run_id_for_event(workflow.name, event),
            workflow.name,
            workflow.signature.encode_input(self._codec, bound),
            now,
            now,
        )

    # Storing

    async def _work(self) -> None:
        group: list[IngestRequest] = []
        try:
            while self._posts:
                group = self._take()
                await self._store(group)
        except BaseException as error:  # killed, or a fault of ours: nobody may wait for ever
            for post in (*group, *self._posts):
                _fail(post, error if isinstance(error, Exception) else StorageUnavailableError("the app was stopped"))
            self._posts.clear()
            raise
        finally:
            self._task = None

    def _take(self) -> list[IngestRequest]:
        group: list[IngestRequest] = []
        count = size = 0
        while self._posts and (not group or (count < MOST_EVENTS and size < MOST_BYTES)):
            post = self._posts.popleft()
            group.append(post)
            count += len(post.items)
            size += post.size
        return group

    async def _store(self, group: Sequence[IngestRequest]) -> None:
        """Tried again for as long as a sender waits. A statement without an answer is cancelled when the last of its
        senders is gone, or the next posts would wait for it as well."""
        backoff = Backoff()
        while group := [post for post in group if self._is_awaited(post)]:
            known = [post.may_be_stored for post in group]
            for post in group:
                post.may_be_stored = True
            try:
                async with asyncio.timeout_at(max(post.until for post in group)):
                    accepted = await self.store([item for post in group for item in post.items])
            except (NotConnectedError, StorageConflictError, StorageDuplicateError) as error:
                # Not sent, or rolled back. A duplicate key is a race between two writers, not a fault of the event.
                for post, may_be_stored in zip(group, known, strict=True):
                    post.may_be_stored, post.error = may_be_stored, error
                await backoff.pause()
            except (StorageUnavailableError, TimeoutError) as error:
                for post in group:
                    post.error = error if isinstance(error, StorageUnavailableError) else post.error
                await backoff.pause()
            except StorageRejectedError as error:
                await self._bisect(group, error)
                return
            else:
                self._complete(group, accepted)
                return

    async def store(self, items: Sequence[IngestItem], forwarded: Sequence[int] = ()) -> AcceptResult:
        """In one commit, in which the dispatches that they were made of go."""
        events = [item.event for item in items if item.event is not None]
        types = {item.row.type for item in items}  # somebody may wait for events whose type is that of a channel
        while True:
            keys = iter(await self._book.keys(events))
            incoming = [NewEvent(item.row, next(keys) if item.event else item.keys, item.starts) for item in items]
            accepted = await self._storage.accept(incoming, self._book.versions(types), forwarded)
            if accepted is not None:
                self._notify_started(items, accepted)
                return accepted
            await self._book.reload(types)

    def _notify_started(self, items: Sequence[IngestItem], accepted: AcceptResult) -> None:
        for item in (items[place] for place in sorted(accepted.fresh)):
            if item.event is not None:
                for start in item.starts:
                    self._on_run_started(start, item.event)

    async def _bisect(self, group: Sequence[IngestRequest], error: StorageRejectedError) -> None:
        """One bad post must not be the others' undoing."""
        if len(group) == 1:
            logger.warning("the database refuses an event: %s", error)
            _fail(group[0], EventError("the database refuses the event; the receiver's log has the details"))
            return
        middle = len(group) // 2
        await self._store(group[:middle])
        await self._store(group[middle:])

    def _complete(self, group: Sequence[IngestRequest], accepted: AcceptResult) -> None:
        for post in group:
            if not post.stored.done():
                post.stored.set_result(None)
        if accepted.woke:
            self._on_wake()
        for place, item in enumerate(item for post in group for item in post.items):
            if place not in accepted.fresh:
                logger.debug("event %r from %s came again", item.row.id, item.row.source)


def run_id_for_event(workflow: str, event: CloudEvent | Event) -> RunId:
    """The id of the run that an event starts: the same, whoever takes the event in and however often."""
    digest = blake2b(digest_size=16)
    for part in (workflow, event.source, event.id):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return RunId(f"event-{digest.hexdigest()}")


def _fail(post: IngestRequest, error: Exception) -> None:
    if not post.stored.done():
        post.stored.set_exception(error)
        post.stored.exception()  # looked at: its sender may have gone
