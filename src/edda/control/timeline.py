"""Turns a run's history into bars with a start and an end, one for each step, timer, wait and child.

An entry is written when a step ends; its start is not stored. A step can start once the code has reached it, which
happens with an entry; so its start is the time of the latest earlier entry that advanced the code of its branch, of a
branch above it or of one below it. Steps of parallel branches therefore overlap. Two steps that one branch started
together look the same as two in a row: the second is shown as starting when the first one ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from edda.core.model import Entry, EntryKind, RunRecord, Wait
from edda.core.states import ENDED, RunStatus
from edda.workflow.context import as_datetime

from .views import AttemptView, Bar, BarState, ErrorView, Timeline

UNDO = "undo:"
_MOVES_NOTHING = frozenset(
    {EntryKind.RETRY, EntryKind.HEARTBEAT, EntryKind.LATE, EntryKind.LATE_EVENT, EntryKind.REJECTED}
)
_WAITED = frozenset({EntryKind.EVENT, EntryKind.MESSAGE})
_BARS = {
    EntryKind.STEP: "step",
    EntryKind.RETRY: "step",
    EntryKind.HEARTBEAT: "step",
    EntryKind.LATE: "step",
    EntryKind.TIMER: "timer",
    EntryKind.EVENT: "event",
    EntryKind.MESSAGE: "message",
    EntryKind.REJECTED: "event",
    EntryKind.START: "child",
    EntryKind.CHILD: "child",
}
"""Entries of other kinds have no bar: they stop the run, or begin its generation."""
MAX_REJECTED_SHOWN = 10
"""Per wait: a faulty sender may send thousands."""
_PENDING_TIMER = re.compile(r"timer '(.+)'")


class TimelineInput(Struct, frozen=True):
    """What `build_timeline` needs besides the history; `record` is that of the newest generation."""

    record: RunRecord
    generation: int
    created_at: int
    """Of this generation."""
    waits: Sequence[Wait]
    now: int
    explain: Callable[[bytes], ErrorView | None]
    child_of: Callable[[bytes], tuple[str, bool]]
    """Decodes a START entry: the id of the child, and whether the workflow awaits its end."""


def build_timeline(history: Sequence[Entry], inputs: TimelineInput) -> Timeline:
    # After a retry the first entries are older than their generation: they were copied.
    since = min([inputs.created_at, *(entry.at for entry in history[:1])])
    is_open = inputs.generation == inputs.record.generation and inputs.record.status not in ENDED
    builder = _TimelineBuilder(since, inputs)
    for entry in history:
        builder.add(entry)
    if is_open:
        builder.add_open_steps()
    until = history[-1].at if history else since
    if is_open:
        until = inputs.now
    elif inputs.generation == inputs.record.generation and inputs.record.ended_at is not None:
        until = inputs.record.ended_at
    return Timeline(inputs.generation, as_datetime(since), as_datetime(max(since, until)), builder.bars(until, is_open))


class _BarBuilder:
    """Collects the entries of one bar."""

    def __init__(self, step: str, name: str, kind: str, since: int) -> None:
        self.step = step
        self.name = name
        self.kind = "undo" if step.startswith(UNDO) else kind
        self.since = since
        self.until: int | None = None
        self.state: BarState | None = None
        self.attempts: list[AttemptView] = []
        self.attempt_since = since
        self.entries: list[int] = []
        self.child: str | None = None
        self.event: int | None = None
        self.rejected: list[int] = []

    def end_attempt(self, entry: Entry, error: ErrorView | None) -> None:
        begun, ended = as_datetime(self.attempt_since), as_datetime(max(entry.at, self.attempt_since))
        self.attempts.append(AttemptView(entry.attempt, begun, ended, entry.ok, error))
        self.attempt_since = entry.at

    def begin_attempt(self) -> None:
        """Adds the attempt in progress, if there were earlier ones; a single attempt is the bar itself."""
        if self.attempts:
            number = self.attempts[-1].number + 1
            self.attempts.append(AttemptView(number, as_datetime(self.attempt_since), None))

    def bar(self, until: int, open_state: BarState | None) -> Bar:
        """`open_state` is the state of a bar without an end; None if the run has ended."""
        is_over = self.until is not None or open_state is None
        return Bar(
            step=self.step,
            name=self.name,
            kind=self.kind,
            state=self.state or open_state or BarState.OVER,
            since=as_datetime(self.since),
            until=as_datetime(max(self.since, until if self.until is None else self.until)) if is_over else None,
            attempts=tuple(self.attempts),
            entries=(*self.rejected[-MAX_REJECTED_SHOWN:], *self.entries),
            child=self.child,
            event=self.event,
            rejected=len(self.rejected),
        )


class _TimelineBuilder:
    def __init__(self, since: int, inputs: TimelineInput) -> None:
        self._since = since
        self._inputs = inputs
        self._all: list[_BarBuilder] = []
        self._open: dict[str, _BarBuilder] = {}
        self._moved: dict[str, int] = {}
        """Time of the last entry that advanced each branch."""
        self._moved_within: dict[str, int] = {}
        """The same for a branch including the branches below it."""

    def add(self, entry: Entry) -> None:
        kind = _BARS.get(entry.kind)
        if kind is not None:
            self._add_bar(entry, kind)
        if entry.kind not in _MOVES_NOTHING:
            branch = _branch_of(entry.step)
            self._moved[branch] = entry.at
            for above in _lineage(branch):
                self._moved_within[above] = entry.at

    def _add_bar(self, entry: Entry, kind: str) -> None:
        bar = self._find(entry.step, entry.name, kind)
        if entry.kind is EntryKind.REJECTED:
            bar.rejected.append(entry.seq)
            return
        bar.kind = bar.kind if bar.kind == "undo" else kind  # a rejected item may be an event or a message
        bar.entries.append(entry.seq)
        if entry.kind is EntryKind.HEARTBEAT:
            return
        if entry.kind in (EntryKind.RETRY, EntryKind.STEP):
            bar.end_attempt(entry, None if entry.ok else self._inputs.explain(entry.value))
        if entry.kind is EntryKind.RETRY:
            return
        if entry.kind is EntryKind.START and entry.ok:
            bar.child, is_awaited = self._inputs.child_of(entry.value)
            if is_awaited:
                return
        bar.event = entry.event
        bar.until, bar.state = entry.at, _state_of(entry)
        del self._open[entry.step]

    def _find(self, step: str, name: str, kind: str) -> _BarBuilder:
        if step not in self._open:
            self._open[step] = _BarBuilder(step, name, kind, self._beginning(step))
            self._all.append(self._open[step])
        return self._open[step]

    def _beginning(self, step: str) -> int:
        branch = _branch_of(step)
        moved = [self._moved[above] for above in _lineage(branch) if above in self._moved]
        return max((*moved, self._moved_within.get(branch, self._since)))

    def add_open_steps(self) -> None:
        for wait in self._inputs.waits:
            kind, name = ("message", wait.type.partition("/")[2]) if is_channel(wait.type) else ("event", wait.type)
            self._find(wait.step, name, kind).kind = kind
        record = self._inputs.record
        timer = _PENDING_TIMER.fullmatch(record.reason or "")
        if timer is not None and record.status is RunStatus.WAITING_FOR_TIMER:
            self._find(timer[1], "timer", "timer")
        if not self._open and record.owner is not None:
            # Only the worker knows which step is running until the step's entry is written.
            self._find("", "under way", "step")
        for bar in self._open.values():
            bar.begin_attempt()

    def bars(self, until: int, is_open: bool) -> tuple[Bar, ...]:
        ordered = sorted(self._all, key=lambda bar: bar.since)
        return tuple(bar.bar(until, self._open_state(bar) if is_open else None) for bar in ordered)

    def _open_state(self, bar: _BarBuilder) -> BarState:
        is_running = bar.kind in ("step", "undo") and self._inputs.record.owner is not None
        return BarState.RUNNING if is_running else BarState.WAITING


def is_channel(type: str) -> bool:
    return type.startswith("channel/")


def last_progress_at(history: Iterable[Entry]) -> int | None:
    """The time of the last entry that advanced the code."""
    return max((entry.at for entry in history if entry.kind not in _MOVES_NOTHING), default=None)


def _branch_of(step: str) -> str:
    return "" if step.startswith(UNDO) else step.rpartition("/")[0]


def _lineage(branch: str) -> Iterator[str]:
    """The branch, each branch above it, and the run's main branch."""
    while branch:
        yield branch
        branch = branch.rpartition("/")[0]
    yield ""


def _state_of(entry: Entry) -> BarState:
    if entry.kind is EntryKind.LATE or (entry.kind in _WAITED and not entry.ok and not entry.value):
        return BarState.OVER
    return BarState.DONE if entry.ok else BarState.FAILED
