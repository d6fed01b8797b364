"""From which event on a run asks, key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest
from typing import TYPE_CHECKING

from edda.core.channels import ChannelMode, channel_key
from edda.core.codec import Codec
from edda.core.match import wait_key
from edda.core.model import ClaimedRun, Entry, EntryKind, Wait
from edda.storage.ports import Storage

if TYPE_CHECKING:
    from edda.workflow.channels import MessageCall, Subscription
    from edda.workflow.events import EventCall
    from edda.workflow.execution import Command

    from .shapes import MatchPathCache


MOST_CARRIED = 1_000
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
        self._free: dict[int, str] = {}
        """Given back, and not received since, with their types."""
        self._since: dict[str, int] = {}
        """Floors that a wait asked for itself, by step."""
        self._start_seq = claimed.start_seq
        self._paged: set[bytes] = set()
        """Keys with messages that no letter brought: that the run has them is known only here."""

    def is_ready(self, command: Command, book: MatchPathCache) -> bool:
        """Whether it can be asked for at once."""
        call: EventCall | MessageCall = command.call
        if call.shape is None:
            return True
        if call.since is not None and command.id not in self._since:
            return False
        return book.serves(call.type, call.shape, self._lowest(command))

    async def prepare(self, command: Command, book: MatchPathCache, storage: Storage) -> None:
        call: EventCall = command.call
        if call.since is not None and command.id not in self._since:
            self._since[command.id] = await storage.last_event(None if call.since == "now" else call.since)
        await book.teach(call.type, call.shape, self._lowest(command))

    def are_final(self, type: str) -> bool:
        """Whether no event of the type was given back, so that everything up to the floors was received."""
        self._known_floors()
        return type not in self._free.values()

    def reached(self, command: Command) -> int:
        """The number after which the next one may be."""
        return self._lowest(command)

    def wait_of(self, command: Command) -> Wait:
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
        return min([floor, *(event - 1 for event, of in self._free.items() if of == type)])

    def _lowest(self, command: Command) -> int:
        floor = self._floor(command, command.call.key(self._run_id))
        return self._start_seq if floor is None else floor

    def received(self, command: Command, event: int, *, by_letter: bool = True) -> None:
        call: EventCall | MessageCall = command.call
        if call.once:
            return
        key = call.key(self._run_id)
        self._raise(self._known_floors(), key, event)
        if not by_letter:
            self._paged.add(key)

    def given_back(self, type: str, event: int) -> None:
        self._known_floors()
        self._free[event] = type

    def pack(self, subscriptions: Mapping[str, Subscription]) -> bytes:
        """For the next generation. The lowest can be left out: no run gets a letter twice, so they only save time."""
        known = self._known_floors()
        lettered = ((floor, key) for key, floor in known.items() if key not in self._paged)
        floors = {key.hex(): floor for floor, key in nlargest(MOST_CARRIED, lettered)}
        places = {channel: (str(one.mode), one.floor) for channel, one in subscriptions.items()}
        paged = {key.hex(): known[key] for key in self._paged}
        return self._codec.encode([floors, list(self._free.items()), places, paged])

    def _unpack(self, floors: dict[bytes, int], carried: bytes) -> None:
        kept, free, _, paged = self._codec.decode(carried)
        floors.update((bytes.fromhex(key), floor) for key, floor in (kept | paged).items())
        self._paged.update(map(bytes.fromhex, paged))
        self._free.update((event, type) for event, type in free)

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
                self._free[entry.event] = entry.name
                continue
            asked = (entry.kind, entry.name, entry.input)
            if asked not in keys:
                keys[asked] = self._key_of(entry)
            if keys[asked]:
                self._raise(floors, keys[asked], entry.event)
                if entry.n is None:
                    self._paged.add(keys[asked])
        self._history = ()
        return floors

    def _key_of(self, entry: Entry) -> bytes:
        """Nothing for messages that are taken from others: they are not read in order by anybody."""
        asked = self._codec.decode(entry.input)
        if not isinstance(asked, str):  # a match; of a message it is the mode of its channel
            return wait_key(entry.name, asked)
        mode = ChannelMode(asked)
        return b"" if mode is ChannelMode.COMPETING else channel_key(entry.name, mode, self._run_id)

    def _raise(self, floors: dict[bytes, int], key: bytes, event: int) -> None:
        floors[key] = max(event, floors.get(key, event))
        self._free.pop(event, None)
