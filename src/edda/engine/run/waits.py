"""The event waits of one run: what is asked for, what is registered, and what has to be asked for again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol

from edda.cloudevents import json_format
from edda.core.codec import Codec
from edda.core.model import BatchResult, ClaimedRun, EntryKind, RunWrite, StoredEvent
from edda.engine.events.match_paths import MatchPathCache, event_index_keys
from edda.engine.tasks import start_task
from edda.errors import ArgumentError
from edda.workflow.channels import MessageCall, Subscription
from edda.workflow.events import EventCall, stored_event_type
from edda.workflow.execution import Command

from .backlog import ChannelBacklog
from .cursors import EventCursors
from .timers import TimerQueue
from .writes import RunWriteBuffer

Pending = Mapping[str, Command]
WAITS = (EntryKind.EVENT, EntryKind.MESSAGE)
"""Commands that something in the log of events ends."""


class WaitServices(Protocol):
    """What waits need of the worker."""

    loop: asyncio.AbstractEventLoop
    codec: Codec
    match_paths: MatchPathCache

    def ensure_wait_indexed(self, floors: EventCursors, command: Command) -> Awaitable[None]:
        """See to it that the events it asks for can be found."""
        ...

    def read_backlog(self, key: bytes, after: int) -> Awaitable[tuple[StoredEvent, ...]]: ...


class EventWaits:
    """`prepared` is told when a wait that needed something first can be asked for, or cannot be; `failed` of an
    unexpected error on the way."""

    def __init__(
        self,
        registry: WaitServices,
        claimed: ClaimedRun,
        draft: RunWriteBuffer,
        timetable: TimerQueue,
        prepared: Callable[[Command, Exception | None], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._registry = registry
        self._run_id = claimed.run_id
        self._draft = draft
        self._timetable = timetable
        self._on_indexed = prepared
        self._failed = failed
        self._floors = EventCursors(claimed, registry.codec)
        self._pages = ChannelBacklog(claimed.run_id)
        self.backlog_waits: deque[Command] = deque()
        """Those that read the log, in the order they asked."""
        self._stored_keys = dict(claimed.waits)
        self._registered = set(self._stored_keys)
        self._inherited = self._registered | {letter.step for letter in claimed.mail if letter.event is not None}
        """Steps whose waits another process registered, maybe with other code: what comes for them may not fit."""
        self.may_have_exclusive_messages = bool(claimed.waits or claimed.mail)
        """Whether its inbox may have a message that was taken from the others for it."""
        self._preparing: set[asyncio.Task[None]] = set()
        self._not_registered: set[str] = set()
        """To ask for again once the inbox is read."""
        self._unanswered: dict[str, Command] = {}
        """Nobody has looked yet whether their events are there, so it cannot be too late for them either."""

    @property
    def is_busy(self) -> bool:
        return bool(self._preparing or self._not_registered or self.backlog_waits)

    @property
    def next_due(self) -> int | None:
        """Of those that have no answer yet; the others are in the timetable."""
        return min((command.due for command in self._unanswered.values() if command.due is not None), default=None)

    def register(self, command: Command) -> None:
        if command.id in self._registered:
            self._pages.wait_registered(command)
            self._schedule_timeout(command)
            return
        self._unanswered[command.id] = command
        self.may_have_exclusive_messages |= command.call.once
        if self._pages.can_read(command) and self._floors.has_no_released(command.call.type):
            self.backlog_waits.append(command)
        elif self._floors.is_indexed(command, self._registry.match_paths):
            self._pages.wait_registered(command)
            self._draft.add_wait(self._floors.to_wait(command))
        else:
            self._begin(command, lambda: self._registry.ensure_wait_indexed(self._floors, command))

    def next_from_backlog(self, pending: Pending) -> tuple[Command, StoredEvent] | None:
        """The next message out of the log, and whose it is; None if there is none at hand."""
        while self.backlog_waits:
            command = self.backlog_waits.popleft()
            if pending.get(command.id) is not command:
                continue
            message = self._pages.next_message(command, self._floors.position(command))
            if message is not None:
                self._unanswered.pop(command.id, None)
                self._floors.received(command, message.seq, by_letter=False)
                return command, message
            self._begin(command, partial(self._load_page, command))
        return None

    async def _load_page(self, command: Command) -> None:
        page = await self._registry.read_backlog(command.call.key(self._run_id), self._floors.position(command))
        self._pages.add_page(command, page)

    def _begin(self, command: Command, preparation: Callable[[], Awaitable[None]]) -> None:
        self._preparing.add(
            start_task(self._prepare(command, preparation), loop=self._registry.loop, name="edda-prepare")
        )

    async def _prepare(self, command: Command, preparation: Callable[[], Awaitable[None]]) -> None:
        failure: Exception | None = None
        try:
            await preparation()
        except ArgumentError as error:
            failure = error
            self._unanswered.pop(command.id, None)
        except Exception as error:  # not the wait's: the run would wait for an answer that never comes
            self._failed(error)
            return
        finally:
            self._preparing = {task for task in self._preparing if task is not asyncio.current_task()}
        self._on_indexed(command, failure)

    def _schedule_timeout(self, command: Command) -> None:
        self._unanswered.pop(command.id, None)
        if command.due is not None:
            self._timetable.add(command.due, command)

    def cancel(self, step: str) -> None:
        self._unanswered.pop(step, None)
        self._registered.discard(step)
        self._not_registered.discard(step)
        self._draft.cancel_wait(step)

    def cancel_stale(self, pending: Pending) -> None:
        """Registered by somebody who could not take it back any more, or by code that asked for something else."""
        for step in sorted(self._registered):
            command = pending.get(step)
            if command is None or not self._is_stored_wait(command):
                self._pages.disable()
                self.cancel(step)

    def _is_stored_wait(self, command: Command) -> bool:
        """The id of a step does not tell: it has the type of the event but not what is matched, or a chosen name."""
        return command.kind in WAITS and command.call.key(self._run_id) == self._stored_keys[command.id]

    def accepts(self, command: Command, body: bytes) -> bool:
        """A step that was named may have been named before, and one whose wait was registered by another process may
        have been changed since: what comes for that wait is not for this."""
        if command.kind not in WAITS:
            return False
        call: EventCall | MessageCall = command.call
        if not call.is_named and command.id not in self._inherited:
            return True
        try:
            return self._is_for(call, body)
        except Exception:  # it cannot be read, as when a key is missing: its delivery says so and parks the run
            return True

    def _is_for(self, call: EventCall | MessageCall, body: bytes) -> bool:
        codec = self._registry.codec
        if isinstance(call, MessageCall):
            return stored_event_type(codec, body) == call.type
        event = json_format.parse_stored(codec.decrypt(body))
        key = call.key(self._run_id)
        return event.type == call.type and any(one.plain == key for one in event_index_keys(event, (call.shape,)))

    def on_received(self, command: Command, event: int) -> None:
        self._unanswered.pop(command.id, None)
        self._registered.discard(command.id)
        self._inherited.discard(command.id)
        self._pages.wait_done(command)
        self._floors.received(command, event)

    def release_event(self, step: str, type: str, event: int, pending: Pending) -> None:
        """Other waits may have passed the event by meanwhile, so they ask anew."""
        self._registered.discard(step)
        self._inherited.discard(step)
        self._floors.on_released(type, event)
        others = tuple(self._registered)
        for other in others:
            self.cancel(other)
        for asking in (step, *others):
            if asking in pending:
                self.register(pending[asking])

    def register_again(self, command: Command) -> None:
        """What came was not for it."""
        self._registered.discard(command.id)
        self._inherited.discard(command.id)
        if command.kind in WAITS:
            self.register(command)

    def export_cursors(self, subscriptions: Mapping[str, Subscription]) -> bytes:
        """What the next generation has to know."""
        return self._floors.export(subscriptions)

    def apply_result(self, bundle: RunWrite, written: BatchResult, pending: Pending) -> bool:
        """Whether mail has to be read before the rest can be asked for."""
        unmet = written.unmet.get(self._run_id, frozenset())
        steps = {wait.step for wait in bundle.waits if wait.step in pending}
        self._registered |= steps - unmet
        self._not_registered |= steps & unmet
        for step in steps & unmet:
            self._pages.mark_backlog(pending[step])
        for step in steps - unmet:
            self._schedule_timeout(pending[step])
        return bool(unmet)

    def retry_unregistered(self, pending: Pending) -> None:
        unmet, self._not_registered = self._not_registered, set()
        for step in unmet:
            if step in pending:
                self.register(pending[step])

    def cancel_indexing(self) -> None:
        for task in self._preparing:
            task.cancel()

    def close(self) -> None:
        """Forget who wanted to know: the two would keep each other in memory."""
        self._on_indexed = self._failed = _nobody


def _nobody(*_: object) -> None:
    pass
