"""The event waits of one run: which are to be registered, which are registered, and from which number each reads.

A wait that is registered costs a commit and gets one message. A run with a backlog reads the event log instead, a page
at a time: the messages of a key appear there in the order of their numbers, and every number that was received is in
the history. That is safe only while no wait for the key is registered, since a registered wait may put a message of
the key into the run's inbox. A wait that was cancelled may have done so before, so its key is not read any more until
the run has left memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from heapq import nlargest
from typing import TYPE_CHECKING

from edda.cloudevents import json_format
from edda.core.channels import ChannelMode, channel_key
from edda.core.codec import Codec
from edda.core.event_match import wait_key
from edda.core.model import BatchResult, ClaimedRun, Entry, EntryKind, RunWrite, StoredEvent, Wait
from edda.engine.events import MatchPathCache, event_index_keys
from edda.engine.tasks import start_task
from edda.errors import ArgumentError
from edda.storage.ports import Storage
from edda.workflow.channels import MessageCall, Subscription
from edda.workflow.events import EventCall, stored_event_type
from edda.workflow.execution import Command

if TYPE_CHECKING:
    from .run import LiveRun

Pending = Mapping[str, Command]
WAITS = (EntryKind.EVENT, EntryKind.MESSAGE)
"""Commands that an event or a message ends."""
MAX_CARRIED_CURSORS = 1_000
"""Cursors that the next generation gets."""
PAGE_SIZE = 64
"""Messages that are read from the log at once."""


class EventWaits:
    def __init__(self, run: LiveRun) -> None:
        claimed = run.claimed
        self._run = run
        self._run_id = run.run_id
        self._codec = run.services.codec
        self._match_paths = run.services.match_paths
        self._writes = run.writes
        self._timers = run.timers
        self.cursors = EventCursors(claimed, self._codec)
        self._backlog = ChannelBacklog(claimed.run_id)
        self.backlog_waits: deque[Command] = deque()
        """Those that read the log, in the order they were issued."""
        self._stored_keys = dict(claimed.waits)
        self._registered = set(self._stored_keys)
        self._inherited = self._registered | {item.step for item in claimed.inbox if item.event is not None}
        """Steps whose waits another process registered, maybe with other code: their events may not fit."""
        self._preparing: set[asyncio.Task[None]] = set()
        self._not_registered: set[str] = set()
        """To register again once the inbox is read."""
        self._unanswered: dict[str, Command] = {}
        """It is unknown whether their events are stored already: their time-outs do not run before that is known."""

    @property
    def is_busy(self) -> bool:
        return bool(self._preparing or self._not_registered or self.backlog_waits)

    @property
    def next_due(self) -> int | None:
        """Of those that have no answer yet; the others are in the timers."""
        return min((command.due for command in self._unanswered.values() if command.due is not None), default=None)

    def register(self, command: Command) -> None:
        if command.id in self._registered:
            self._backlog.wait_registered(command)
            self._schedule_timeout(command)
            return
        self._unanswered[command.id] = command
        self._run.may_have_exclusive_messages |= command.call.exclusive
        if self._backlog.can_read(command) and self.cursors.has_no_released(command.call.type):
            self.backlog_waits.append(command)
        elif self.cursors.is_indexed(command, self._match_paths):
            self._backlog.wait_registered(command)
            self._writes.add_wait(self.cursors.to_wait(command))
        else:
            self._begin(command, lambda: self._run.worker.ensure_wait_indexed(self.cursors, command))

    def next_from_backlog(self, pending: Pending) -> tuple[Command, StoredEvent] | None:
        """The next message out of the log, and whose it is; None if there is none at hand."""
        while self.backlog_waits:
            command = self.backlog_waits.popleft()
            if pending.get(command.id) is not command:
                continue
            message = self._backlog.next_message(command, self.cursors.position(command))
            if message is not None:
                self._unanswered.pop(command.id, None)
                self.cursors.received(command, message.seq, from_inbox=False)
                return command, message
            self._begin(command, partial(self._load_page, command))
        return None

    async def _load_page(self, command: Command) -> None:
        page = await self._run.worker.read_backlog(command.call.key(self._run_id), self.cursors.position(command))
        self._backlog.add_page(command, page)

    def _begin(self, command: Command, preparation: Callable[[], Awaitable[None]]) -> None:
        work = self._prepare(command, preparation)
        self._preparing.add(start_task(work, loop=self._run.worker.loop, name="edda-wait"))

    async def _prepare(self, command: Command, preparation: Callable[[], Awaitable[None]]) -> None:
        failure: Exception | None = None
        try:
            await preparation()
        except ArgumentError as error:
            failure = error
            self._unanswered.pop(command.id, None)
        except Exception as error:  # of the engine: the run would wait for an answer that never comes
            self._run.fail(error)
            return
        finally:
            self._preparing = {task for task in self._preparing if task is not asyncio.current_task()}
        self._run.on_wait_indexed(command, failure)

    def _schedule_timeout(self, command: Command) -> None:
        self._unanswered.pop(command.id, None)
        if command.due is not None:
            self._timers.add(command.due, command)

    def cancel(self, step: str) -> None:
        self._unanswered.pop(step, None)
        self._registered.discard(step)
        self._not_registered.discard(step)
        self._writes.cancel_wait(step)

    def cancel_stale(self, pending: Pending) -> None:
        """Cancel waits that an earlier owner registered, and that its code had cancelled or today's code does not ask
        for."""
        for step in sorted(self._registered):
            command = pending.get(step)
            # Compared by key: the id of a step has the type of the event but not the match, or is a chosen name.
            key = command.call.key(self._run_id) if command is not None and command.kind in WAITS else None
            if key != self._stored_keys[step]:
                self._backlog.is_disabled = True
                self.cancel(step)

    def accepts(self, command: Command, body: bytes) -> bool:
        """Whether an event is for this wait. A chosen step name may have been used before, and a wait that another
        process registered may have been changed since."""
        if command.kind not in WAITS:
            return False
        call: EventCall | MessageCall = command.call
        if not call.is_named and command.id not in self._inherited:
            return True
        try:
            if isinstance(call, MessageCall):
                return stored_event_type(self._codec, body) == call.type
            event, key = json_format.parse_stored(self._codec.decrypt(body)), call.key(self._run_id)
            index_keys = event_index_keys(event, (call.match_paths,))
            return event.type == call.type and any(one.wait_key == key for one in index_keys)
        except Exception:  # it cannot be read, as when a key is missing: appending its entry parks the run
            return True

    def on_received(self, command: Command, event: int) -> None:
        self._unanswered.pop(command.id, None)
        self._registered.discard(command.id)
        self._inherited.discard(command.id)
        self._backlog.wait_done(command)
        self.cursors.received(command, event)

    def release_event(self, step: str, type: str, event: int, pending: Pending) -> None:
        """Other waits may have been registered past the event's number, so they are registered again."""
        self._registered.discard(step)
        self._inherited.discard(step)
        self.cursors.on_released(type, event)
        others = tuple(self._registered)
        for other in others:
            self.cancel(other)
        for asking in (step, *others):
            if asking in pending:
                self.register(pending[asking])

    def register_again(self, command: Command) -> None:
        """After an event that was not for it."""
        self._registered.discard(command.id)
        self._inherited.discard(command.id)
        if command.kind in WAITS:
            self.register(command)

    def apply_result(self, write: RunWrite, result: BatchResult, pending: Pending) -> bool:
        """Whether the inbox has to be read before the rest can be registered."""
        refused = result.refused.get(self._run_id, frozenset())
        steps = {wait.step for wait in write.waits if wait.step in pending}
        self._registered |= steps - refused
        self._not_registered |= steps & refused
        for step in steps & refused:
            self._backlog.mark_backlog(pending[step])
        for step in steps - refused:
            self._schedule_timeout(pending[step])
        return bool(refused)

    def retry_unregistered(self, pending: Pending) -> None:
        refused, self._not_registered = self._not_registered, set()
        for step in refused:
            if step in pending:
                self.register(pending[step])

    def cancel_tasks(self) -> None:
        for task in self._preparing:
            task.cancel()


class EventCursors:
    """Events of one key are read in order, so the number of the last one is the cursor of the key's next wait.

    An event that was released keeps the cursors of its type below its number until the run has received it: it may fit
    other keys too, and a wait that was registered at the same time may have got a later event. A unique index of the
    database keeps a run from getting an event twice.
    """

    def __init__(self, claimed: ClaimedRun, codec: Codec) -> None:
        self._run_id = claimed.run_id
        self._codec = codec
        self._history: Sequence[Entry] = claimed.entries
        self._cursors: dict[bytes, int] | None = None
        self._released: dict[int, str] = {}
        """Released, and not received since, with their types."""
        self._since: dict[str, int] = {}
        """Cursors of waits with `since`, by step."""
        self._start_cursor = claimed.event_cursor
        self._from_backlog: set[bytes] = set()
        """Keys with messages that were read from the log and not from the inbox: only the cursor knows of them."""

    def is_indexed(self, command: Command, match_paths: MatchPathCache) -> bool:
        """Whether the wait can be registered at once."""
        call: EventCall | MessageCall = command.call
        if call.match_paths is None:
            return True
        if call.since is not None and command.id not in self._since:
            return False
        return match_paths.covers(call.type, call.match_paths, self.position(command))

    async def ensure_indexed(self, command: Command, match_paths: MatchPathCache, storage: Storage) -> None:
        call: EventCall = command.call
        if call.since is not None and command.id not in self._since:
            self._since[command.id] = await storage.last_event(None if call.since == "now" else call.since)
        await match_paths.ensure_indexed(call.type, call.match_paths, self.position(command))

    def has_no_released(self, type: str) -> bool:
        """Whether no event of the type was released, so that every event up to the cursor was received."""
        self._known_cursors()
        return type not in self._released.values()

    def position(self, command: Command) -> int:
        """The number after which the next event may be."""
        cursor = self._cursor(command, command.call.key(self._run_id))
        return self._start_cursor if cursor is None else cursor

    def to_wait(self, command: Command) -> Wait:
        call: EventCall | MessageCall = command.call
        key, target_key = call.key(self._run_id), call.key(self._run_id, own=True)
        cursor = None if call.exclusive else self._cursor(command, key)
        return Wait(command.id, key, target_key, call.type, command.input, command.due, cursor, call.exclusive)

    def _cursor(self, command: Command, key: bytes) -> int | None:
        call: EventCall | MessageCall = command.call
        known = self._known_cursors().get(key)
        if known is not None:
            known = min([known, *(event - 1 for event, type in self._released.items() if type == call.type)])
        cursors = (self._since.get(command.id), known, call.cursor)
        return max((cursor for cursor in cursors if cursor is not None), default=None)

    def received(self, command: Command, event: int, *, from_inbox: bool = True) -> None:
        call: EventCall | MessageCall = command.call
        if call.exclusive:
            return
        key = call.key(self._run_id)
        self._advance_cursor(self._known_cursors(), key, event)
        if not from_inbox:
            self._from_backlog.add(key)

    def on_released(self, type: str, event: int) -> None:
        self._known_cursors()
        self._released[event] = type

    def export(self, subscriptions: Mapping[str, Subscription]) -> bytes:
        """For the next generation. The lowest can be left out: they only save time, the inbox has no event twice."""
        known = self._known_cursors()
        from_inbox = ((cursor, key) for key, cursor in known.items() if key not in self._from_backlog)
        cursors = {key.hex(): cursor for cursor, key in nlargest(MAX_CARRIED_CURSORS, from_inbox)}
        positions = {channel: (str(one.mode), one.cursor) for channel, one in subscriptions.items()}
        from_backlog = {key.hex(): known[key] for key in self._from_backlog}
        return self._codec.encode([cursors, list(self._released.items()), positions, from_backlog])

    def _known_cursors(self) -> dict[bytes, int]:
        if self._cursors is not None:
            return self._cursors
        cursors: dict[bytes, int] = {}
        keys: dict[tuple[EntryKind, str, bytes], bytes] = {}
        for entry in self._history:
            if entry.kind is EntryKind.RECUR:
                from_inbox, released, _, from_backlog = self._codec.decode(entry.value)
                cursors.update((bytes.fromhex(key), cursor) for key, cursor in (from_inbox | from_backlog).items())
                self._from_backlog.update(map(bytes.fromhex, from_backlog))
                self._released.update((event, type) for event, type in released)
            if entry.event is None:
                continue
            if entry.kind is EntryKind.LATE_EVENT:
                self._released[entry.event] = entry.name
                continue
            call = (entry.kind, entry.name, entry.input)
            if call not in keys:
                keys[call] = self._key_of(entry)
            if keys[call]:
                self._advance_cursor(cursors, keys[call], entry.event)
                if entry.inbox_no is None:
                    self._from_backlog.add(keys[call])
        self._history, self._cursors = (), cursors
        return cursors

    def _key_of(self, entry: Entry) -> bytes:
        """Empty for messages of competing channels: no run reads them in order."""
        match = self._codec.decode(entry.input)
        if not isinstance(match, str):  # of a message it is the mode of its channel
            return wait_key(entry.name, match)
        mode = ChannelMode(match)
        return b"" if mode is ChannelMode.COMPETING else channel_key(entry.name, mode, self._run_id)

    def _advance_cursor(self, cursors: dict[bytes, int], key: bytes, event: int) -> None:
        cursors[key] = max(event, cursors.get(key, event))
        self._released.pop(event, None)


class ChannelBacklog:
    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._registered: dict[str, bytes] = {}
        """Keys of the waits that are or were in the database and got no message yet, by step."""
        self._pages: dict[bytes, deque[StoredEvent]] = {}
        """Of keys with a backlog; an empty page means that the next one has to be read."""
        self.is_disabled = False
        """A wait with an unknown key may have put a message into the inbox."""

    def wait_registered(self, command: Command) -> None:
        key = self._key_of(command)
        if key:
            self._registered[command.id] = key
            self._pages.pop(key, None)

    def wait_done(self, command: Command) -> None:
        """Its message came by the inbox."""
        self._registered.pop(command.id, None)

    def mark_backlog(self, command: Command) -> None:
        """The message was stored before the wait was registered."""
        key = self._key_of(command)
        if key:
            self._pages.setdefault(key, deque())

    def can_read(self, command: Command) -> bool:
        key = self._key_of(command)
        return key in self._pages and not self.is_disabled and key not in self._registered.values()

    def add_page(self, command: Command, page: tuple[StoredEvent, ...]) -> None:
        key = self._key_of(command)
        if not page:
            self._pages.pop(key, None)  # the backlog is gone
        elif key in self._pages:
            self._pages[key] = deque(page)

    def next_message(self, command: Command, after: int) -> StoredEvent | None:
        page = self._pages.get(self._key_of(command))
        while page:
            message = page.popleft()
            if message.seq > after:
                return message
        return None

    def _key_of(self, command: Command) -> bytes:
        """Empty for calls that are not read in order."""
        call = command.call
        return call.key(self._run_id) if isinstance(call, MessageCall) and not call.exclusive else b""
