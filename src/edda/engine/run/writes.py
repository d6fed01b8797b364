"""What a run has to write, and how much of it is committed."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from msgspec.structs import replace

from edda.core.model import (
    AckInbox,
    ClaimedRun,
    End,
    Entry,
    EntryKind,
    OutboxEvent,
    Recur,
    RunId,
    RunSignal,
    RunValue,
    RunWrite,
    StagedEvent,
    Start,
    StepCommit,
    Suspend,
    Transition,
    Wait,
)

T = TypeVar("T")

_NOBODY = frozenset[RunId]()

FinalTransition = Suspend | End | Recur
Attachment = StagedEvent | OutboxEvent | RunValue | StepCommit


class RunWriteBuffer:
    def __init__(self, claimed: ClaimedRun, start: Start | None) -> None:
        self._id = (claimed.run_id, claimed.epoch, claimed.gen)
        self._start = start
        self._entries: list[Entry] = []
        self._taken = len(claimed.entries)
        """Entries that are committed or on their way."""
        self._taken_inbox_no = claimed.absorbed
        """The last letter among them."""
        self._children: deque[tuple[int, Start]] = deque()
        self._letters: deque[tuple[int, RunSignal]] = deque()
        """Both with the number of the entry that they go in with: an effect is never ahead of its cause."""
        self._last_letters: tuple[RunSignal, ...] = ()
        self._parts: deque[tuple[int, Attachment]] = deque()
        """What else goes in with an entry."""
        self._waits: dict[str, Wait] = {}
        self._asked = {step for step, _ in claimed.waits}
        """Steps whose waits may be in the database."""
        self._drops: set[str] = set()
        self._undoing = False
        self.absorbed = claimed.absorbed
        """How far the inbox is read."""
        self.rejected = 0
        """Events that did not fit, since the run was claimed."""
        self.transition: FinalTransition | None = None
        """How the run leaves memory; nothing is added after it."""
        self._last_sent = False
        self._waiting = False
        """It leaves to wait: there is no reason to once mail has come."""
        self.committed = -1 if start is not None else len(claimed.entries)
        """Entries that are durable; -1 while not even the run itself is."""

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        if entry.kind is EntryKind.REJECTED:
            self.rejected += 1
        if entry.n is not None:
            self.absorbed = entry.n

    def start_child(self, child: Start, needs: int) -> None:
        self._children.append((needs, child))

    def add_signal(self, letter: RunSignal, needs: int) -> None:
        self._letters.append((needs, letter))

    def attach(self, part: Attachment, needs: int) -> None:
        self._parts.append((needs, part))

    def mark_compensating(self) -> None:
        """From now on the run undoes what it did."""
        self._undoing = True

    def add_wait(self, wait: Wait) -> None:
        self._waits[wait.step] = wait

    def cancel_wait(self, step: str) -> None:
        self._waits.pop(step, None)
        if step in self._asked:
            self._asked.discard(step)
            self._drops.add(step)

    def leave(self, last: FinalTransition, letters: tuple[RunSignal, ...] = (), *, waiting: bool = False) -> None:
        """Who leaves otherwise than to wait asks for nothing: whoever goes on with the run asks again."""
        self.transition, self._last_letters, self._waiting = last, letters, waiting
        if not waiting:
            self._waits.clear()

    def cancel_suspend(self) -> None:
        """Leaving to wait did not happen, or need not happen any more."""
        if self._waiting:
            self.cancel_transition()

    def cancel_transition(self) -> None:
        """It cannot leave like this."""
        self.transition, self._last_sent, self._waiting, self._last_letters = None, False, False, ()

    def replace_with_failure(self, last: End, letters: tuple[RunSignal, ...]) -> None:
        """The entries cannot be written: they are left out, and this is the end."""
        self._entries.clear()
        self._letters.clear()
        self._children.clear()
        self._parts.clear()
        self.leave(last, letters)
        self._last_sent = False

    @property
    def length(self) -> int:
        """Entries of the history, those included that are still to be written."""
        return self._taken + len(self._entries)

    @property
    def signal_targets(self) -> frozenset[RunId]:
        """Whom it has letters for."""
        if not self._letters and not self._last_letters:
            return _NOBODY
        return frozenset(letter.run_id for letter in (*(one for _, one in self._letters), *self._last_letters))

    @property
    def is_start_taken(self) -> bool:
        """Whether the run's own rows are in a batch, or were never to be written here."""
        return self._start is None

    @property
    def has_more(self) -> bool:
        leaving = self.transition is not None and not self._last_sent
        return leaving or bool(
            self._entries or self._waits or self._drops or self._letters or self._parts or self._undoing
        )

    @property
    def _has_entries_only(self) -> bool:
        """As most runs have most of the time."""
        beside = self._waits or self._drops or self._children or self._letters or self._parts or self._undoing
        return not beside and self.transition is None and self.absorbed == self._taken_inbox_no

    def take(self, most: int) -> RunWrite | None:
        """The next piece, always from the front: a run's records go in as a prefix of its history."""
        if self._children and self._letters:
            most = self._limit_before_child(most)
        entries = tuple(self._entries[:most])
        del self._entries[: len(entries)]
        self._taken += len(entries)
        if self._has_entries_only:
            start, self._start = self._start, None
            return RunWrite(*self._id, entries, start) if entries or start is not None else None
        read, frees = self._inbox_of(entries)
        start, self._start = self._start, None
        waits, drops = self._pop_waits(start is not None, bool(frees))
        children, letters = _pop_ready(self._children, self._taken), _pop_ready(self._letters, self._taken)
        undoing, self._undoing = self._undoing, False
        move = self._next_transition(bool(read or waits or drops or letters or undoing), bool(letters))
        parts = _pop_ready(self._parts, self._taken)
        if not entries and start is None and move is None and not parts:
            return None
        if move is self.transition:
            letters = self._last_letters
        if isinstance(move, End) and read:
            move = replace(move, absorbed=self._taken_inbox_no)
        bundle = RunWrite(*self._id, entries, start, move, waits, drops, frees, children, letters, undoing)
        return _with_parts(bundle, parts) if parts else bundle

    def _limit_before_child(self, most: int) -> int:
        """A letter to a child comes after its birth, and so does the entry that the letter goes in with."""
        born = {child.run_id for needs, child in self._children if needs <= self._taken + most}
        return min([most, *(needs - 1 - self._taken for needs, letter in self._letters if letter.run_id in born)])

    def _inbox_of(self, entries: tuple[Entry, ...]) -> tuple[bool, tuple[int, ...]]:
        """Whether letters are among them, and those of them that are given back."""
        read = [entry.n for entry in entries if entry.n is not None]
        self._taken_inbox_no = read[-1] if read else self._taken_inbox_no
        return bool(read), tuple(entry.n for entry in entries if entry.kind is EntryKind.STRAY and entry.n is not None)

    def _pop_waits(self, new: bool, freeing: bool) -> tuple[tuple[Wait, ...], tuple[str, ...]]:
        if self._entries or not (self._waits or self._drops):
            return (), ()
        drops, self._drops = tuple(self._drops), set()
        # One statement does not see its own changes, and of a run that is new in it not even the run.
        if freeing or not self._waits.keys().isdisjoint(drops):
            return (), drops
        waits = tuple(wait for wait in self._waits.values() if not new or (wait.floor is None and not wait.once))
        for wait in waits:
            del self._waits[wait.step]
            self._asked.add(wait.step)
        return waits, () if new else drops

    def _next_transition(self, touches: bool, writes: bool) -> Transition | None:
        # Letters of its own would be held back with a move that does not happen, so they go ahead of it.
        ready = not (self._entries or self._waits or writes or self._letters)
        if self.transition is not None and not self._last_sent and ready:
            self._last_sent = True
            return self.transition
        return AckInbox(self._taken_inbox_no) if touches else None

    def mark_committed(self, bundle: RunWrite) -> None:
        self.committed = max(self.committed, 0) + len(bundle.entries)


def _with_parts(bundle: RunWrite, parts: tuple[Attachment, ...]) -> RunWrite:
    return replace(
        bundle,
        dispatches=tuple(part for part in parts if isinstance(part, StagedEvent)),
        outgoing=tuple(part for part in parts if isinstance(part, OutboxEvent)),
        facts=tuple({part.name: part for part in parts if isinstance(part, RunValue)}.values()),
        recorded=tuple(part.step for part in parts if isinstance(part, StepCommit)),
    )


def _pop_ready(queue: deque[tuple[int, T]], taken: int) -> tuple[T, ...]:
    if not queue:
        return ()
    due: list[T] = []
    while queue and queue[0][0] <= taken:
        due.append(queue.popleft()[1])
    return tuple(due)
