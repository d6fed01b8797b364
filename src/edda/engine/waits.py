"""The event waits of one run: what is asked for, what is registered, and what has to be asked for again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol

from edda.cloudevents import json_format
from edda.core.codec import Codec
from edda.core.model import RunWrite, ClaimedRun, EntryKind, StoredEvent, BatchResult
from edda.errors import ArgumentError
from edda.workflow.channels import MessageCall, Subscription
from edda.workflow.events import EventCall, stored_type
from edda.workflow.execution import Command

from .draft import RunWriteBuffer
from .floors import EventCursors
from .pages import ChannelBacklog
from .shapes import MatchPathCache, keys_of
from .tasks import start_task
from .timetable import TimerQueue

Pending = Mapping[str, Command]
WAITS = (EntryKind.EVENT, EntryKind.MESSAGE)
"""Commands that something in the log of events ends."""


class WaitServices(Protocol):
    """What waits need of the worker."""

    loop: asyncio.AbstractEventLoop
    codec: Codec
    book: MatchPathCache

    def prepare_wait(self, floors: EventCursors, command: Command) -> Awaitable[None]:
        """See to it that the events it asks for can be found."""
        ...

    def read_page(self, key: bytes, after: int) -> Awaitable[tuple[StoredEvent, ...]]: ...


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
        self._prepared = prepared
        self._failed = failed
        self._floors = EventCursors(claimed, registry.codec)
        self._pages = ChannelBacklog(claimed.run_id)
        self.readers: deque[Command] = deque()
        """Those that read the log, in the order they asked."""
        self._registered = set(claimed.waits)
        self.may_hold_messages = bool(claimed.waits or claimed.mail)
        """Whether its inbox may have a message that was taken from the others for it."""
        self._preparing: set[asyncio.Task[None]] = set()
        self._unmet: set[str] = set()
        """To ask for again once the inbox is read."""
        self._unanswered: dict[str, Command] = {}
        """Nobody has looked yet whether their events are there, so it cannot be too late for them either."""

    @property
    def is_busy(self) -> bool:
        return bool(self._preparing or self._unmet or self.readers)

    @property
    def next_due(self) -> int | None:
        """Of those that have no answer yet; the others are in the timetable."""
        return min((command.due for command in self._unanswered.values() if command.due is not None), default=None)

    def ask(self, command: Command) -> None:
        if command.id in self._registered:
            self._pages.stands(command)
            self._answered(command)
            return
        self._unanswered[command.id] = command
        self.may_hold_messages |= command.call.once
        if self._pages.is_open_for(command) and self._floors.are_final(command.call.type):
            self.readers.append(command)
        elif self._floors.is_ready(command, self._registry.book):
            self._pages.stands(command)
            self._draft.ask(self._floors.wait_of(command))
        else:
            self._begin(command, lambda: self._registry.prepare_wait(self._floors, command))

    def read_next(self, pending: Pending) -> tuple[Command, StoredEvent] | None:
        """The next message out of the log, and whose it is; None if there is none at hand."""
        while self.readers:
            command = self.readers.popleft()
            if pending.get(command.id) is not command:
                continue
            message = self._pages.take(command, self._floors.reached(command))
            if message is not None:
                self._unanswered.pop(command.id, None)
                self._floors.received(command, message.seq, by_letter=False)
                return command, message
            self._begin(command, partial(self._turn_page, command))
        return None

    async def _turn_page(self, command: Command) -> None:
        page = await self._registry.read_page(command.call.key(self._run_id), self._floors.reached(command))
        self._pages.fill(command, page)

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
        self._prepared(command, failure)

    def _answered(self, command: Command) -> None:
        self._unanswered.pop(command.id, None)
        if command.due is not None:
            self._timetable.add(command.due, command)

    def drop(self, step: str) -> None:
        self._unanswered.pop(step, None)
        self._registered.discard(step)
        self._unmet.discard(step)
        self._draft.drop(step)

    def drop_all_but(self, pending: Pending) -> None:
        """Registered by somebody who could not take it back any more."""
        for step in self._registered - pending.keys():
            self._pages.shut()
            self.drop(step)

    def takes(self, command: Command, body: bytes) -> bool:
        """A step that was named may have been named before: what comes late for that one is not for this."""
        if command.kind not in WAITS:
            return False
        call: EventCall | MessageCall = command.call
        if not call.is_named:
            return True
        codec = self._registry.codec
        if isinstance(call, MessageCall):
            return stored_type(codec, body) == call.type
        event = json_format.parse_stored(codec.unseal(body))
        key = call.key(self._run_id)
        return event.type == call.type and any(one.plain == key for one in keys_of(event, (call.shape,)))

    def received(self, command: Command, event: int) -> None:
        self._unanswered.pop(command.id, None)
        self._registered.discard(command.id)
        self._pages.fell(command)
        self._floors.received(command, event)

    def give_back(self, step: str, type: str, event: int, pending: Pending) -> None:
        """Other waits may have passed the event by meanwhile, so they ask anew."""
        self._registered.discard(step)
        self._floors.given_back(type, event)
        others = tuple(self._registered)
        for other in others:
            self.drop(other)
        for asking in (step, *others):
            if asking in pending:
                self.ask(pending[asking])

    def ask_again(self, command: Command) -> None:
        """What came was not for it."""
        self._registered.discard(command.id)
        if command.kind in WAITS:
            self.ask(command)

    def carry(self, subscriptions: Mapping[str, Subscription]) -> bytes:
        """What the next generation has to know."""
        return self._floors.pack(subscriptions)

    def settle(self, bundle: RunWrite, written: BatchResult, pending: Pending) -> bool:
        """Whether mail has to be read before the rest can be asked for."""
        unmet = written.unmet.get(self._run_id, frozenset())
        steps = {wait.step for wait in bundle.waits if wait.step in pending}
        self._registered |= steps - unmet
        self._unmet |= steps & unmet
        for step in steps & unmet:
            self._pages.found_more(pending[step])
        for step in steps - unmet:
            self._answered(pending[step])
        return bool(unmet)

    def mail_checked(self, pending: Pending) -> None:
        unmet, self._unmet = self._unmet, set()
        for step in unmet:
            if step in pending:
                self.ask(pending[step])

    def cancel(self) -> None:
        for task in self._preparing:
            task.cancel()

    def close(self) -> None:
        """Forget who wanted to know: the two would keep each other in memory."""
        self._prepared = self._failed = _nobody


def _nobody(*_: object) -> None:
    pass
