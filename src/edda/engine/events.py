"""Events and messages on their way into the event log: all that arrive during one commit share the next. The match
paths of their types, as this process knows them, decide which index keys they get.

A user's transaction cannot store them in the log: that holds the locks of their keys until the commit, and the
transaction may be long. So they wait in edda_staged_event; one commit stores them and deletes their rows. Every worker
moves them; of two that move the same rows one is refused as a whole, so nothing is stored twice or out of order.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from msgspec import Struct

from edda.cloudevents import json_format
from edda.cloudevents.event import CloudEvent
from edda.core.channels import (
    Message,
    for_redelivery,
    is_message,
    message_event,
    message_keys,
    pack_message,
    unpack_message,
)
from edda.core.codec import Codec
from edda.core.event_match import event_keys
from edda.core.model import (
    AcceptResult,
    Event,
    EventKey,
    MatchPaths,
    NewEvent,
    RunId,
    StagedEventRow,
    StagedKind,
    Start,
)
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

from .tasks import Backoff, halves
from .worker import supervision

if TYPE_CHECKING:
    from .services import EngineServices

logger = logging.getLogger(__name__)

MAX_EVENTS = 200
MAX_BYTES = 4 << 20
STAGED_BATCH = 500
MAX_MATCH_PATHS = 64
"""Sets of paths of one type. Each costs a row per event that has the paths."""
MAX_TYPES = 10_000
"""Event types in memory. Senders choose the types, so there may be any number of them."""
CHUNK = 500
_NOTHING = MatchPaths()


class MatchPathCache:
    def __init__(self, storage: Storage, codec: Codec) -> None:
        self._storage = storage
        self._codec = codec
        self._known: dict[str, MatchPaths] = {}
        self._filled: dict[tuple[str, str], int] = {}
        """Events after this number have their keys."""
        self._registering: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """A lock lives as long as a caller of `ensure_indexed` holds or awaits it."""
        self.last_event = 0
        """The number of a stored event; a run that is started now gets later events only."""

    # For storing events

    async def keys(self, events: Sequence[CloudEvent]) -> list[tuple[EventKey, ...]]:
        types = {event.type for event in events}
        if not types <= self._known.keys():
            # All types of the batch, not only the unknown ones: `reload` removes the types that were read longest ago,
            # and a known type of this batch may be one of them.
            await self.reload(types)
        return [event_index_keys(event, self._known[event.type].known) for event in events]

    def versions(self, types: Iterable[str]) -> Mapping[str, int]:
        return {type: self._known.get(type, _NOTHING).version for type in types}

    async def reload(self, types: Iterable[str]) -> None:
        wanted = sorted(types)
        found = await self._storage.match_paths(wanted)
        for type in wanted:
            self._known.pop(type, None)  # so that it is the last one in the order of the dict
            self._known[type] = found.get(type, _NOTHING)
        surplus = len(self._known) - max(MAX_TYPES, len(wanted))
        for type in list(islice(self._known, max(surplus, 0))):
            del self._known[type]

    # For registering waits

    async def load_last_event(self) -> None:
        """Runs that are started from here on get later events only."""
        self.last_event = max(self.last_event, await self._storage.last_event())

    def covers(self, type: str, paths: str, cursor: int) -> bool:
        """Whether every event after the cursor has its key."""
        filled = self._filled.get((type, paths))
        return filled is not None and filled <= cursor

    async def ensure_indexed(self, type: str, paths: str, cursor: int) -> None:
        async with self._registering.setdefault((type, paths), asyncio.Lock()):
            if self.covers(type, paths, cursor):
                return
            known = (await self._storage.match_paths([type])).get(type, _NOTHING).known
            if paths not in known and len(known) >= MAX_MATCH_PATHS:
                raise ArgumentError(
                    f"wait_event: {len(known)} different sets of match paths are in use for {type!r}, which is the "
                    "limit; match on paths that are in use already, such as " + known[0]
                )
            filled = await self._storage.register_match_paths(type, paths)
            self.last_event = max(self.last_event, filled)
            if cursor < filled:
                await self._backfill(type, paths, cursor, filled)
            self._filled[type, paths] = min(filled, cursor)
            if len(self._filled) > MAX_TYPES:  # a removed one is read from the database again
                del self._filled[next(iter(self._filled))]

    async def _backfill(self, type: str, paths: str, cursor: int, filled: int) -> None:
        """No event is added to this range any more, so it needs no lock."""
        after = cursor
        while True:
            chunk = await self._storage.events_of_type(type, after, filled, CHUNK)
            keys: list[tuple[bytes, int]] = []
            for stored in chunk:
                if not is_message(stored.event):
                    event = json_format.parse_stored(self._codec.decrypt(stored.event.body))
                    keys += [(key.stored_key, stored.seq) for key in event_index_keys(event, (paths,))]
            done = len(chunk) < CHUNK
            await self._storage.backfill_keys(type, paths, keys, cursor if done else filled)
            if done:
                return
            after = chunk[-1].seq


def event_index_keys(event: CloudEvent, path_sets: Sequence[str]) -> tuple[EventKey, ...]:
    if not path_sets:
        return ()
    needs_data = any(paths != "[]" for paths in path_sets)
    data = json_format.exact_value_of(event) if needs_data else None
    named = {
        "id": event.id,
        "source": event.source,
        "type": event.type,
        "time": event.time,
        "subject": event.subject,
        "datacontenttype": event.datacontenttype,
        "dataschema": event.dataschema,
    }
    attributes = {name: value for name, value in named.items() if value is not None} | dict(event.extensions)
    return event_keys(event.type, attributes, data, path_sets, event.target)


class IngestItem(Struct, frozen=True):
    """An event with the runs that it starts, or a message of a channel."""

    row: Event
    event: CloudEvent | None = None
    starts: tuple[Start, ...] = ()
    keys: tuple[EventKey, ...] = ()
    """Of a message; those of an event are made from the match paths of its type."""


class IngestRequest(Struct, eq=False):
    items: Sequence[IngestItem]
    stored: asyncio.Future[None]
    until: float
    """When its sender stops waiting, on the loop's clock."""
    may_be_stored: bool = False
    """A statement with it was sent, and not refused."""
    error: Exception | None = None
    """Why it is not stored yet."""


class EventIngest:
    """A request is stored whole or not at all. One commit is in flight; requests that come meanwhile share the next."""

    def __init__(
        self,
        services: EngineServices,
        on_wake: Callable[[], None],
        on_run_started: Callable[[Start, CloudEvent], None],
    ) -> None:
        self.notify = on_wake
        """An event was stored that a run waits for, or that starts one."""
        self._storage = services.storage
        self._match_paths = services.match_paths
        self._codec = services.codec
        self._clock = services.clock
        self._handlers = services.registry.handlers
        self._on_run_started = on_run_started
        self._call_timeout = services.settings.call_timeout
        self._requests: deque[IngestRequest] = deque()
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
        request = IngestRequest(items, loop.create_future(), loop.time() + self._call_timeout)
        self._requests.append(request)
        if self._task is None:
            self._task = supervision.start_once("storing events", self._work, name="edda-ingest")
        await asyncio.wait([request.stored], timeout=self._call_timeout)
        if not request.stored.done():
            self._give_up(request)
        request.stored.result()

    def _is_awaited(self, request: IngestRequest) -> bool:
        if asyncio.get_running_loop().time() >= request.until:  # also if its sender was cancelled
            self._give_up(request)
        return not request.stored.done()

    def _give_up(self, request: IngestRequest) -> None:
        """Its sender's time is over. A request that was not sent yet is removed."""
        if request in self._requests:
            self._requests.remove(request)
        first, others = request.items[0].row, len(request.items) - 1
        name = f"event or message {first.id!r} from {first.source}" + (f", and {others} more" if others else "")
        why = f"storing {name}: the database did not answer within {self._call_timeout:g} seconds"
        if request.error is not None:
            why += f" ({request.error})"
        if not request.may_be_stored:
            _fail(request, StorageUnavailableError(f"{why}; nothing was stored, send it again"))
            return
        advice = "send it again under the same id, which counts once"
        _fail(request, OutcomeUnknownError(f"{why}, so it is unknown whether it is stored: {advice}"))

    async def close(self) -> None:
        while self._task is not None:
            await asyncio.wait([self._task])

    def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def to_item(self, event: CloudEvent, *, starting: bool = True) -> IngestItem:
        try:
            body = self._codec.encrypt(json_format.emit_stored(event))
        except PayloadTooLargeError as error:
            raise EventError(f"the event is too large: {error}", attribute="data", status=413) from error
        target = RunId(event.target) if event.target is not None else None
        handlers = self._handlers(event.type) if starting else ()
        starts = tuple(self._start(workflow, event) for workflow in handlers)
        return IngestItem(Event(event.source, event.id, event.type, target, body), event, starts)

    def message_item(self, message: Message, body: bytes | None = None) -> IngestItem:
        packed = pack_message(self._codec, message) if body is None else body
        return IngestItem(message_event(message, packed), keys=message_keys(message))

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
            while self._requests:
                group = self._take()
                await self._store(group)
        except BaseException as error:  # killed, or a bug: every sender gets an answer
            answer = error if isinstance(error, Exception) else StorageUnavailableError("the app was stopped")
            for request in (*group, *self._requests):
                _fail(request, answer)
            self._requests.clear()
            raise
        finally:
            self._task = None

    def _take(self) -> list[IngestRequest]:
        group: list[IngestRequest] = []
        count = size = 0
        while self._requests and (not group or (count < MAX_EVENTS and size < MAX_BYTES)):
            request = self._requests.popleft()
            group.append(request)
            count += len(request.items)
            size += sum(len(item.row.body) for item in request.items)
        return group

    async def _store(self, group: Sequence[IngestRequest]) -> None:
        """Tried again for as long as a sender waits. A statement without an answer is cancelled when the time of its
        last sender is over: else the next requests would wait for it, too."""
        backoff = Backoff()
        while group := [request for request in group if self._is_awaited(request)]:
            known = [request.may_be_stored for request in group]
            for request in group:
                request.may_be_stored = True
            try:
                async with asyncio.timeout_at(max(request.until for request in group)):
                    accepted = await self.store([item for request in group for item in request.items])
            except (NotConnectedError, StorageConflictError, StorageDuplicateError) as error:
                # Not sent, or rolled back. A duplicate key is a race between two writers, not a fault of the event.
                for request, may_be_stored in zip(group, known, strict=True):
                    request.may_be_stored, request.error = may_be_stored, error
                await backoff.pause()
            except (StorageUnavailableError, TimeoutError) as error:
                for request in group:
                    request.error = error if isinstance(error, StorageUnavailableError) else request.error
                await backoff.pause()
            except StorageRejectedError as error:
                await self._bisect(group, error)
                return
            else:
                self._complete(group, accepted)
                return

    async def store(self, items: Sequence[IngestItem], staged: Sequence[int] = ()) -> AcceptResult:
        """In one commit with the removal of the staged events that they were made of, if there are any."""
        events = [item.event for item in items if item.event is not None]
        types = {item.row.type for item in items}  # a run may wait for events whose type is that of a channel
        while True:
            keys = iter(await self._match_paths.keys(events))
            incoming = [NewEvent(item.row, next(keys) if item.event else item.keys, item.starts) for item in items]
            accepted = await self._storage.accept(incoming, self._match_paths.versions(types), staged)
            if accepted is not None:
                for item in (items[index] for index in sorted(accepted.new)):
                    if item.event is not None:
                        for start in item.starts:
                            self._on_run_started(start, item.event)
                return accepted
            await self._match_paths.reload(types)

    async def _bisect(self, group: Sequence[IngestRequest], error: StorageRejectedError) -> None:
        """One bad request must not fail the others."""
        if len(group) == 1:
            logger.warning("event ingest: the database refuses an event (%s), failing its sender", error)
            _fail(group[0], EventError("the database refuses the event; the receiver's log has the details"))
            return
        for half in halves(group):
            await self._store(half)

    def _complete(self, group: Sequence[IngestRequest], accepted: AcceptResult) -> None:
        for request in group:
            if not request.stored.done():
                request.stored.set_result(None)
        if accepted.woke:
            self.notify()
        for index, item in enumerate(item for request in group for item in request.items):
            if index not in accepted.new:
                logger.debug("event %r from %s is stored already, ignoring it", item.row.id, item.row.source)


def run_id_for_event(workflow: str, event: CloudEvent | Event) -> RunId:
    """The id of the run that an event starts: the same in every process, however often the event is sent."""
    digest = blake2b(digest_size=16)
    for part in (workflow, event.source, event.id):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return RunId(f"event-{digest.hexdigest()}")


def _fail(request: IngestRequest, error: Exception) -> None:
    if not request.stored.done():
        request.stored.set_exception(error)
        request.stored.exception()  # else asyncio logs that it was never retrieved


class StagedEventMover:
    def __init__(self, services: EngineServices, ingest: EventIngest) -> None:
        self._storage = services.storage
        self._ingest = ingest
        self._codec = services.codec
        self._poll = services.settings.poll
        self._woken = asyncio.Event()
        self._busy = False
        self._skipped: set[int] = set()
        """Rows that this process cannot read, as for want of an encryption key: they stay for a process that can."""

    @property
    def is_idle(self) -> bool:
        return not self._busy and not self._woken.is_set()

    def wake(self) -> None:
        """There are rows to move."""
        self._woken.set()

    async def run(self) -> None:
        """For ever. Rows of other processes are found every `poll` seconds."""
        backoff = Backoff()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll):
                    await self._woken.wait()
            self._busy = True
            self._woken.clear()
            try:
                while await self.move_batch():
                    pass
                backoff = Backoff()
            except (StorageConflictError, StorageUnavailableError) as error:
                self._woken.set()
                message = "moving staged events failed (%s), trying again"
                if isinstance(error, StorageConflictError):  # every worker moves staged events, so conflicts are normal
                    logger.debug(message, error)
                else:
                    backoff.warn(logger, message, error)
                await backoff.pause()
            except Exception:  # the supervision logs it and starts this method again, which reads the rows again
                self._woken.set()
                raise
            finally:
                self._busy = False

    async def move_batch(self) -> bool:
        """Move up to `STAGED_BATCH` rows; False if there are no more."""
        found = await self._storage.staged_events(STAGED_BATCH + len(self._skipped))
        pairs = [
            (one, item) for one in found if one.seq not in self._skipped and (item := self._to_item(one)) is not None
        ]
        if pairs:
            await self._store_batch(pairs)
        return len(pairs) >= STAGED_BATCH

    async def _store_batch(self, pairs: Sequence[tuple[StagedEventRow, IngestItem]]) -> None:
        try:
            accepted = await self._ingest.store([item for _, item in pairs], [one.seq for one, _ in pairs])
        except StorageRejectedError as error:
            if len(pairs) == 1:
                self._skip(pairs[0][0], error)
                return
            for half in halves(pairs):  # a row that the database refuses must not stop the others
                await self._store_batch(half)
            return
        if accepted.woke:
            self._ingest.notify()

    def _skip(self, row: StagedEventRow, error: Exception) -> None:
        self._skipped.add(row.seq)
        logger.error("staged event %d (%s) cannot be moved by this process (%r), keeping it", row.seq, row.kind, error)

    def _to_item(self, row: StagedEventRow) -> IngestItem | None:
        try:
            if row.kind is not StagedKind.EVENT:
                message = unpack_message(self._codec, row.body)
                if row.kind is StagedKind.REDELIVERY:
                    return self._ingest.message_item(for_redelivery(message))
                return self._ingest.message_item(message, row.body)
            event = json_format.parse_stored(self._codec.decrypt(row.body))
            try:
                return self._ingest.to_item(event)
            except EventError as error:  # its sender is gone; the event is stored for runs that wait for it
                logger.error("event %r of type %s starts no run (%s), storing it", event.id, event.type, error)
                return self._ingest.to_item(event, starting=False)
        except Exception as error:  # a codec without the key may raise any error
            self._skip(row, error)
            return None
