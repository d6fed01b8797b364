"""The records that a run has to write, and how many of them are committed."""

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

_NO_RUNS = frozenset[RunId]()

FinalTransition = Suspend | End | Recur
Attachment = StagedEvent | OutboxEvent | RunValue | StepCommit


class RunWriteBuffer:
    def __init__(self, claimed: ClaimedRun, start: Start | None) -> None:
        self._id = (claimed.run_id, claimed.epoch, claimed.generation)
        self._start = start
        self._entries: list[Entry] = []
        self._taken = len(claimed.entries)
        """Entries that are committed or in a batch."""
        self._taken_inbox_no = claimed.inbox_read
        """The inbox number of the last item among them."""
        self._children: deque[tuple[int, Start]] = deque()
        self._signals: deque[tuple[int, RunSignal]] = deque()
        """Both with the number of the entry that they are written with: an effect is never ahead of its cause."""
        self._last_signals: tuple[RunSignal, ...] = ()
        """Written with the transition."""
        self._attached: deque[tuple[int, Attachment]] = deque()
        """Other records, each with the number of the entry that it is written with."""
        self._waits: dict[str, Wait] = {}
        self._maybe_registered = {step for step, _ in claimed.waits}
        """Steps whose waits may be in the database."""
        self._to_cancel: set[str] = set()
        self._compensating = False
        self.inbox_read = claimed.inbox_read
        """How far the inbox is read."""
        self.rejected = 0
        """Events that did not fit, since the run was claimed."""
        self.transition: FinalTransition | None = None
        """How the run leaves memory; no entry is added after it."""
        self._is_transition_taken = False
        self._is_suspending = False
        """The transition is a suspend to wait, which an inbox item makes unnecessary."""
        self.committed = -1 if start is not None else len(claimed.entries)
        """Number of committed entries; -1 while the run's own rows are not committed."""
        self.has_more = False
        """Something was added since `take` was called, or left by it."""

    def add(self, entry: Entry) -> None:
        self.has_more = True
        self._entries.append(entry)
        if entry.kind is EntryKind.REJECTED:
            self.rejected += 1
        if entry.inbox_no is not None:
            self.inbox_read = entry.inbox_no

    def start_child(self, child: Start, after_entry: int) -> None:
        self._children.append((after_entry, child))

    def add_signal(self, signal: RunSignal, after_entry: int) -> None:
        self.has_more = True
        self._signals.append((after_entry, signal))

    def attach(self, record: Attachment, after_entry: int) -> None:
        self.has_more = True
        self._attached.append((after_entry, record))

    def mark_compensating(self) -> None:
        """From now on the run compensates its steps."""
        self._compensating = self.has_more = True

    def add_wait(self, wait: Wait) -> None:
        self.has_more = True
        self._waits[wait.step] = wait

    def cancel_wait(self, step: str) -> None:
        self._waits.pop(step, None)
        if step in self._maybe_registered:
            self._maybe_registered.discard(step)
            self._to_cancel.add(step)
            self.has_more = True

    def leave(self, transition: FinalTransition, signals: tuple[RunSignal, ...] = (), *, waiting: bool = False) -> None:
        """Unless the run leaves to wait, its waits are not registered: its next owner registers them."""
        self.transition, self._last_signals, self._is_suspending = transition, signals, waiting
        self.has_more = True
        if not waiting:
            self._waits.clear()

    def cancel_suspend(self) -> None:
        """The suspend to wait was refused, or is not needed any more."""
        if self._is_suspending:
            self.cancel_transition()

    def cancel_transition(self) -> None:
        """The transition was refused."""
        self.transition, self._is_transition_taken, self._is_suspending, self._last_signals = None, False, False, ()

    def replace_with_failure(self, end: End, signals: tuple[RunSignal, ...]) -> None:
        """The entries cannot be written: drop them, and end the run."""
        self._entries.clear()
        self._signals.clear()
        self._children.clear()
        self._attached.clear()
        self.leave(end, signals)
        self._is_transition_taken = False

    @property
    def length(self) -> int:
        """Entries of the history, with those that are still to be written."""
        return self._taken + len(self._entries)

    @property
    def signal_targets(self) -> frozenset[RunId]:
        """The runs that it has signals for."""
        if not self._signals and not self._last_signals:
            return _NO_RUNS
        return frozenset(signal.run_id for signal in (*(one for _, one in self._signals), *self._last_signals))

    @property
    def is_start_taken(self) -> bool:
        """Whether the run's own rows are in a batch, or were written by another process."""
        return self._start is None

    def take(self, limit: int) -> RunWrite | None:
        """The next write, always from the front: a run's records are written as a prefix of its history."""
        if self._children and self._signals:
            limit = self._limit_before_child(limit)
        entries = tuple(self._entries[:limit])
        del self._entries[: len(entries)]
        self._taken += len(entries)
        start, self._start = self._start, None
        beside = self._waits or self._to_cancel or self._children or self._signals or self._attached
        if not (beside or self._compensating or self.transition is not None or self.inbox_read != self._taken_inbox_no):
            self.has_more = bool(self._entries)  # the common case: there are entries only
            return RunWrite(*self._id, entries, start) if entries or start is not None else None
        write = self._take_all(entries, start)
        self.has_more = (self.transition is not None and not self._is_transition_taken) or bool(
            self._entries or self._waits or self._to_cancel or self._signals or self._attached
        )
        return write

    def _take_all(self, entries: tuple[Entry, ...], start: Start | None) -> RunWrite | None:
        read = [entry.inbox_no for entry in entries if entry.inbox_no is not None]
        self._taken_inbox_no = read[-1] if read else self._taken_inbox_no
        released = tuple(
            entry.inbox_no for entry in entries if entry.kind is EntryKind.LATE_EVENT and entry.inbox_no is not None
        )
        waits: tuple[Wait, ...] = ()
        cancelled_waits: tuple[str, ...] = ()
        if not self._entries and (self._waits or self._to_cancel):
            waits, cancelled_waits = self._pop_waits(start is not None, bool(released))
        children = _pop_ready(self._children, self._taken) if self._children else ()
        signals = _pop_ready(self._signals, self._taken) if self._signals else ()
        attachments = _pop_ready(self._attached, self._taken) if self._attached else ()
        compensating, self._compensating = self._compensating, False
        transition: Transition | None = None
        # Signals of earlier entries would be lost with a transition that is refused, so they are in a write before it.
        is_last = not (self._entries or self._waits or signals or self._signals)
        if self.transition is not None and not self._is_transition_taken and is_last:
            self._is_transition_taken = True
            transition, signals = self.transition, self._last_signals
        elif read or waits or cancelled_waits or signals or compensating:
            transition = AckInbox(self._taken_inbox_no)
        if not entries and start is None and transition is None and not attachments:
            return None
        if isinstance(transition, End) and read:
            transition = replace(transition, inbox_read=self._taken_inbox_no)
        write = RunWrite(
            *self._id,
            entries,
            start,
            transition,
            waits,
            cancelled_waits,
            released,
            children,
            signals,
            compensating,
        )
        return _with_attachments(write, attachments) if attachments else write

    def _limit_before_child(self, limit: int) -> int:
        """A signal to a child, and the entry that it is written with, are in a later write than the child's rows: one
        statement does not see its own rows."""
        new = {child.run_id for after, child in self._children if after <= self._taken + limit}
        return min([limit, *(after - 1 - self._taken for after, signal in self._signals if signal.run_id in new)])

    def _pop_waits(self, is_new: bool, releases: bool) -> tuple[tuple[Wait, ...], tuple[str, ...]]:
        cancelled_waits, self._to_cancel = tuple(self._to_cancel), set()
        # One statement does not see its own changes, nor the rows of a run that it inserts.
        if releases or not self._waits.keys().isdisjoint(cancelled_waits):
            return (), cancelled_waits
        waits = tuple(
            wait for wait in self._waits.values() if not is_new or (wait.cursor is None and not wait.exclusive)
        )
        for wait in waits:
            del self._waits[wait.step]
            self._maybe_registered.add(wait.step)
        return waits, () if is_new else cancelled_waits


def _with_attachments(write: RunWrite, records: tuple[Attachment, ...]) -> RunWrite:
    return replace(
        write,
        staged_events=tuple(one for one in records if isinstance(one, StagedEvent)),
        outbox_events=tuple(one for one in records if isinstance(one, OutboxEvent)),
        values=tuple({one.name: one for one in records if isinstance(one, RunValue)}.values()),
        recorded_steps=tuple(one.step for one in records if isinstance(one, StepCommit)),
    )


def _pop_ready(queue: deque[tuple[int, T]], taken: int) -> tuple[T, ...]:
    due: list[T] = []
    while queue and queue[0][0] <= taken:
        due.append(queue.popleft()[1])
    return tuple(due)
