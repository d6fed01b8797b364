"""Messages that a subscriber reads out of the log itself, many at a time.

A wait that is registered costs a commit and gets one message. Whoever has a backlog reads on in the log instead: the
messages of a key appear there in the order of their numbers, and every number that was received is in the history. That
is safe only while nobody else can put a message of the key into the run's inbox, that is, while no wait for it stands
in the database. A wait that was dropped may have brought something before it went, so its key is not read any more
until the run has left memory.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from edda.core.model import StoredEvent
from edda.workflow.channels import MessageCall

if TYPE_CHECKING:
    from edda.workflow.execution import Command

PAGE_SIZE = 64


class ChannelBacklog:
    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._standing: dict[str, bytes] = {}
        """Keys of the waits that are or were in the database and were not answered, by step."""
        self._pages: dict[bytes, deque[StoredEvent]] = {}
        """Of keys with a backlog; those with an empty page have to be read on."""
        self._is_shut = False

    def disable(self) -> None:
        """A wait of which nobody knows the key may have brought something."""
        self._is_shut = True

    def wait_registered(self, command: Command) -> None:
        key = self._key_of(command)
        if key:
            self._standing[command.id] = key
            self._pages.pop(key, None)

    def wait_done(self, command: Command) -> None:
        """By the letter that answered it."""
        self._standing.pop(command.id, None)

    def mark_backlog(self, command: Command) -> None:
        """What was asked for was there already."""
        key = self._key_of(command)
        if key:
            self._pages.setdefault(key, deque())

    def can_read(self, command: Command) -> bool:
        key = self._key_of(command)
        return key in self._pages and not self._is_shut and key not in self._standing.values()

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
        """Nothing for what is not read in order."""
        call = command.call
        return call.key(self._run_id) if isinstance(call, MessageCall) and not call.once else b""
