"""From which event on a run asks, key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest
from typing import TYPE_CHECKING

from edda.core.channels import ChannelMode, channel_key
from edda.core.codec import Codec
from edda.core.event_match import wait_key
from edda.core.model import ClaimedRun, Entry, EntryKind, Wait
from edda.storage.ports import Storage

if TYPE_CHECKING:
    from edda.engine.events.match_paths import MatchPathCache
    from edda.workflow.channels import MessageCall, Subscription
    from edda.workflow.events import EventCall
    from edda.workflow.execution import Command


MAX_CARRIED_CURSORS = 1_000
"""Floors that go over from one generation to the next."""


class EventCursors:
    """Events of one key are read in order, so the last one that came by it is the floor for the next.

    An event that was given back keeps the floors of its type below it until the run has it: it may fit other keys too,
    and a wait that was registered at the same time may have got a later one. That no run gets an event twice is seen to
    by the database.
    """

    def __init__(self, claimed: ClaimedRun, codec: Codec) -> None:
        self._run_id = claimed.run_id
        self._codec = codec
        self._history: Sequence[Entry] = claimed.entries
        self._floors: dict[bytes, int] | None = None
        self._released: dict[int, str] = {}
        """Given back, and not received since, with their types."""
        self._since: dict[str, int] = {}
        """Floors that a wait asked for itself, by step."""
        self._start_seq = claimed.start_seq
        self._from_backlog: set[bytes] = set()
        """Keys with messages that no letter brought: that the run has them is known only here."""

    def is_indexed(self, command: Command, book: MatchPathCache) -> bool:
        """Whether it can be asked for at once."""
        call: EventCall | MessageCall = command.call
        if call.shape is None:
            return True
        if call.since is not None and command.id not in self._since:
            return False
        return book.covers(call.type, call.shape, self._lower_bound(command))

    async def ensure_indexed(self, command: Command, book: MatchPathCache, storage: Storage) -> None:
        call: EventCall = command.call
        if call.since is not None and command.id not in self._since:
            self._since[command.id] = await storage.last_event(None if call.since == "now" else call.since)
        await book.ensure_indexed(call.type, call.shape, self._lower_bound(command))

    def has_no_released(self, type: str) -> bool:
        """Whether no event of the type was given back, so that everything up to the floors was received."""
        self._known_floors()
        return type not in self._released.values()

    def position(self, command: Command) -> int:
        """The number after which the next one may be."""
        return self._lower_bound(command)

    def to_wait(self, command: Command) -> Wait:
        call: EventCall | MessageCall = command.call
        key, own_key = call.key(self._run_id), call.key(self._run_id, own=True)
        floor = None if call.once else self._floor(command, key)
        return Wait(command.id, key, own_key, call.type, command.input, command.due, floor, call.once)

    def _floor(self, command: Command, key: bytes) -> int | None:
        call: EventCall | MessageCall = command.call
        floors = (self._since.get(command.id), self._known_floor(call.type, key), call.floor)
        return max((floor for floor in floors if floor is not None), default=None)

    def _known_floor(self, type: str, key: bytes) -> int | None:
        floor = self._known_floors().get(key)
        if floor is None:
            return None
        return min([floor, *(event - 1 for event, of in self._released.items() if of == type)])

    def _lower_bound(self, command: Command) -> int:
        floor = self._floor(command, command.call.key(self._run_id))
        return self._start_seq if floor is None else floor

    def received(self, command: Command, event: int, *, by_letter: bool = True) -> None:
        call: EventCall | MessageCall = command.call
        if call.once:
            return
        key = call.key(self._run_id)
        self._advance_cursor(self._known_floors(), key, event)
        if not by_letter:
            self._from_backlog.add(key)

    def on_released(self, type: str, event: int) -> None:
        self._known_floors()
        self._released[event] = type

    def export(self, subscriptions: Mapping[str, Subscription]) -> bytes:
        """For the next generation. The lowest can be left out: no run gets a letter twice, so they only save time."""
        known = self._known_floors()
        lettered = ((floor, key) for key, floor in known.items() if key not in self._from_backlog)
        floors = {key.hex(): floor for floor, key in nlargest(MAX_CARRIED_CURSORS, lettered)}
        places = {channel: (str(one.mode), one.floor) for channel, one in subscriptions.items()}
        paged = {key.hex(): known[key] for key in self._from_backlog}
        return self._codec.encode([floors, list(self._released.items()), places, paged])

    def _unpack(self, floors: dict[bytes, int], carried: bytes) -> None:
        kept, free, _, paged = self._codec.decode(carried)
        floors.update((bytes.fromhex(key), floor) for key, floor in (kept | paged).items())
        self._from_backlog.update(map(bytes.fromhex, paged))
        self._released.update((event, type) for event, type in free)

    def _known_floors(self) -> dict[bytes, int]:
        if self._floors is None:
            self._floors = self._read_floors()
        return self._floors

    def _read_floors(self) -> dict[bytes, int]:
        floors: dict[bytes, int] = {}
        keys: dict[tuple[EntryKind, str, bytes], bytes] = {}
        for entry in self._history:
            if entry.kind is EntryKind.RECUR:
                self._unpack(floors, entry.value)
            if entry.event is None:
                continue
            if entry.kind is EntryKind.STRAY:
                self._released[entry.event] = entry.name
                continue
            asked = (entry.kind, entry.name, entry.input)
            if asked not in keys:
                keys[asked] = self._key_of(entry)
            if keys[asked]:
                self._advance_cursor(floors, keys[asked], entry.event)
                if entry.n is None:
                    self._from_backlog.add(keys[asked])
        self._history = ()
        return floors

    def _key_of(self, entry: Entry) -> bytes:
        """Nothing for messages that are taken from others: they are not read in order by anybody."""
        asked = self._codec.decode(entry.input)
        if not isinstance(asked, str):  # a match; of a message it is the mode of its channel
            return wait_key(entry.name, asked)
        mode = ChannelMode(asked)
        return b"" if mode is ChannelMode.COMPETING else channel_key(entry.name, mode, self._run_id)

    def _advance_cursor(self, floors: dict[bytes, int], key: bytes, event: int) -> None:
        floors[key] = max(event, floors.get(key, event))
        self._released.pop(event, None)
