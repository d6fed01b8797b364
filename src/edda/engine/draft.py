"""What a run has to write, and how much of it is committed."""

from __future__ import annotations

from edda.core.model import Absorb, Bundle, End, Entry, Move, Release, RunId, Start


class Draft:
    def __init__(self, run_id: RunId, epoch: int, gen: int, start: Start | None, recorded: int) -> None:
        self._id = (run_id, epoch, gen)
        self._start = start
        self._entries: list[Entry] = []
        self.last: Release | End | None = None
        """How the run leaves memory; nothing is added after it."""
        self.committed = -1 if start is not None else recorded
        """Entries that are durable; -1 while not even the run itself is."""

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)

    def replace(self, last: End) -> None:
        """The entries cannot be written: they are left out, and this is the end."""
        self._entries.clear()
        self.last = last

    def take(self, most: int) -> Bundle | None:
        """The next piece, always from the front: a run's records go in as a prefix of its history."""
        entries = tuple(self._entries[:most])
        del self._entries[: len(entries)]
        start, self._start = self._start, None
        move = self.last if not self._entries else None
        bundle = Bundle(*self._id, entries, start, move if move is not None else _absorbed_by(entries))
        return bundle if entries or start is not None or bundle.move is not None else None

    def settle(self, bundle: Bundle) -> None:
        self.committed = max(self.committed, 0) + len(bundle.entries)


def _absorbed_by(entries: tuple[Entry, ...]) -> Move | None:
    read = [entry.n for entry in entries if entry.n is not None]
    return Absorb(read[-1]) if read else None
