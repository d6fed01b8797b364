"""What a run has to write, and how much of it is committed."""

from __future__ import annotations

from edda.core.model import Absorb, Bundle, ClaimedRun, End, Entry, EntryKind, Move, Release, Start, Wait


class Draft:
    def __init__(self, claimed: ClaimedRun, start: Start | None) -> None:
        self._id = (claimed.run_id, claimed.epoch, claimed.gen)
        self._start = start
        self._entries: list[Entry] = []
        self._waits: dict[str, Wait] = {}
        self._asked = set(claimed.waits)
        """Steps whose waits may be in the database."""
        self._drops: set[str] = set()
        self.absorbed = claimed.absorbed
        """How far the inbox is read."""
        self.last: Release | End | None = None
        """How the run leaves memory; nothing is added after it."""
        self._last_sent = False
        self._waiting = False
        """It leaves to wait: there is no reason to once mail has come."""
        self.committed = -1 if start is not None else len(claimed.entries)
        """Entries that are durable; -1 while not even the run itself is."""

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        if entry.n is not None:
            self.absorbed = entry.n

    def ask(self, wait: Wait) -> None:
        self._waits[wait.step] = wait

    def drop(self, step: str) -> None:
        self._waits.pop(step, None)
        if step in self._asked:
            self._asked.discard(step)
            self._drops.add(step)

    def leave(self, last: Release | End, *, waiting: bool = False) -> None:
        """Who leaves otherwise than to wait asks for nothing: whoever goes on with the run asks again."""
        self.last, self._waiting = last, waiting
        if not waiting:
            self._waits.clear()

    def stay(self) -> None:
        """Leaving to wait did not happen, or need not happen any more."""
        if self._waiting:
            self.last, self._last_sent, self._waiting = None, False, False

    def replace(self, last: End) -> None:
        """The entries cannot be written: they are left out, and this is the end."""
        self._entries.clear()
        self.leave(last)
        self._last_sent = False

    @property
    def has_more(self) -> bool:
        leaving = self.last is not None and not self._last_sent
        return bool(self._entries or self._waits or self._drops) or leaving

    def take(self, most: int) -> Bundle | None:
        """The next piece, always from the front: a run's records go in as a prefix of its history."""
        entries = tuple(self._entries[:most])
        del self._entries[: len(entries)]
        start, self._start = self._start, None
        frees = tuple(entry.n for entry in entries if entry.kind is EntryKind.STRAY and entry.n is not None)
        waits, drops = self._take_waits(start is not None, bool(frees))
        move = self._next_move(entries, bool(waits or drops or frees))
        if not entries and start is None and move is None:
            return None
        return Bundle(*self._id, entries, start, move, waits, drops, frees)

    def _take_waits(self, new: bool, freeing: bool) -> tuple[tuple[Wait, ...], tuple[str, ...]]:
        if self._entries:
            return (), ()
        drops, self._drops = tuple(self._drops), set()
        # One statement does not see its own changes, and of a run that is new in it not even the run.
        if freeing or not self._waits.keys().isdisjoint(drops):
            return (), drops
        waits = tuple(wait for wait in self._waits.values() if not new or wait.floor is None)
        for wait in waits:
            del self._waits[wait.step]
            self._asked.add(wait.step)
        return waits, () if new else drops

    def _next_move(self, entries: tuple[Entry, ...], asks: bool) -> Move | None:
        if self.last is not None and not self._last_sent and not self._entries and not self._waits:
            self._last_sent = True
            return self.last
        if asks:
            return Absorb(self.absorbed)
        read = [entry.n for entry in entries if entry.n is not None]
        return Absorb(read[-1]) if read else None

    def settle(self, bundle: Bundle) -> None:
        self.committed = max(self.committed, 0) + len(bundle.entries)
