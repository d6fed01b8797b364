"""A run's history as bars on a line: what was done or waited for, from when to when.

An entry is written when a step ends; when it began is not stored. A step can begin as soon as the code has moved to it,
which it does with an entry; so its beginning is that of the latest entry before it that moved the code of its branch,
of a branch above it or of one below it. Steps of parallel branches therefore overlap. Two that one branch began at the
same moment cannot be told from two in a row: the second is shown as beginning when the first one ended.
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
_MOVES_NOTHING = frozenset({EntryKind.RETRY, EntryKind.HEARTBEAT, EntryKind.LATE, EntryKind.STRAY, EntryKind.REJECTED})
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
"""Entries of other kinds have no bar of their own: they stop the run, or open it."""
MAX_REJECTED_SHOWN = 10
"""Of the events that one wait has rejected: a faulty sender may send thousands."""
_PENDING_TIMER = re.compile(r"timer '(.+)'")


class TimelineInput(Struct, frozen=True):
    """What is needed besides the history; `record` is of the newest generation."""

    record: RunRecord
    generation: int
    created_at: int
    """Of this generation."""
    waits: Sequence[Wait]
    now: int
    explain: Callable[[bytes], ErrorView | None]
    child_of: Callable[[bytes], tuple[str, bool]]
    """The run that was started, and whether its end is waited for."""


def build_timeline(history: Sequence[Entry], glance: TimelineInput) -> Timeline:
    # A run that was tried again has entries that are older than its generation.
    since = min([glance.created_at, *(entry.at for entry in history[:1])])
    is_open = glance.generation == glance.record.gen and glance.record.status not in ENDED
    drawing = _TimelineBuilder(since, glance)
    for entry in history:
        drawing.add(entry)
    if is_open:
        drawing.add_open_steps()
    until = glance.now if is_open else _end_of(history, glance, since)
    return Timeline(glance.generation, as_datetime(since), as_datetime(max(since, until)), drawing.bars(until, is_open))


def _end_of(history: Sequence[Entry], glance: TimelineInput, since: int) -> int:
    if glance.generation == glance.record.gen and glance.record.ended_at is not None:
        return glance.record.ended_at
    return history[-1].at if history else since


class _BarBuilder:
    """One bar while it is being drawn."""

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

    def end(self, at: int, state: BarState) -> None:
        self.until, self.state = at, state

    def end_attempt(self, entry: Entry, error: ErrorView | None) -> None:
        begun, ended = as_datetime(self.attempt_since), as_datetime(max(entry.at, self.attempt_since))
        self.attempts.append(AttemptView(entry.attempt, begun, ended, entry.ok, error))
        self.attempt_since = entry.at

    def begin_attempt(self) -> None:
        """The one that goes on; only if there was one before, else the bar says it all."""
        if self.attempts:
            number = self.attempts[-1].number + 1
            self.attempts.append(AttemptView(number, as_datetime(self.attempt_since), None))

    def bar(self, until: int, open_state: BarState | None) -> Bar:
        """`open_state` is that of a bar without an end, None if its run has ended."""
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
    def __init__(self, since: int, glance: TimelineInput) -> None:
        self._since = since
        self._glance = glance
        self._all: list[_BarBuilder] = []
        self._open: dict[str, _BarBuilder] = {}
        self._moved: dict[str, int] = {}
        """When the code of each branch moved last."""
        self._moved_within: dict[str, int] = {}
        """The same of a branch with those below it."""

    def add(self, entry: Entry) -> None:
        kind = _BARS.get(entry.kind)
        if kind is not None:
            self._draw(entry, kind)
        if entry.kind not in _MOVES_NOTHING:
            branch = _branch_of(entry.step)
            self._moved[branch] = entry.at
            for above in _lineage(branch):
                self._moved_within[above] = entry.at

    def _draw(self, entry: Entry, kind: str) -> None:
        drawn = self._find(entry.step, entry.name, kind)
        if entry.kind is EntryKind.REJECTED:
            drawn.rejected.append(entry.seq)
            return
        drawn.kind = drawn.kind if drawn.kind == "undo" else kind  # what was rejected may have been either
        drawn.entries.append(entry.seq)
        if entry.kind is EntryKind.HEARTBEAT:
            return
        if entry.kind in (EntryKind.RETRY, EntryKind.STEP):
            drawn.end_attempt(entry, None if entry.ok else self._glance.explain(entry.value))
        if entry.kind is EntryKind.RETRY:
            return
        if entry.kind is EntryKind.START and entry.ok:
            drawn.child, is_awaited = self._glance.child_of(entry.value)
            if is_awaited:
                return
        drawn.event = entry.event
        drawn.end(entry.at, _state_of(entry))
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
        for wait in self._glance.waits:
            kind, name = ("message", wait.type.partition("/")[2]) if is_channel(wait.type) else ("event", wait.type)
            self._find(wait.step, name, kind).kind = kind
        record = self._glance.record
        timer = _PENDING_TIMER.fullmatch(record.reason or "")
        if timer is not None and record.status is RunStatus.WAITING_FOR_TIMER:
            self._find(timer[1], "timer", "timer")
        if not self._open and record.owner is not None:
            # Which step it is, is known to its worker alone until it has ended.
            self._find("", "under way", "step")
        for drawn in self._open.values():
            drawn.begin_attempt()

    def bars(self, until: int, is_open: bool) -> tuple[Bar, ...]:
        ordered = sorted(self._all, key=lambda drawn: drawn.since)
        return tuple(drawn.bar(until, self._open_state(drawn) if is_open else None) for drawn in ordered)

    def _open_state(self, drawn: _BarBuilder) -> BarState:
        is_running = drawn.kind in ("step", "undo") and self._glance.record.owner is not None
        return BarState.RUNNING if is_running else BarState.WAITING


def is_channel(type: str) -> bool:
    return type.startswith("channel/")


def last_progress_at(history: Iterable[Entry]) -> int | None:
    """Since when a run does what it does now, or waits."""
    return max((entry.at for entry in history if entry.kind not in _MOVES_NOTHING), default=None)


def _branch_of(step: str) -> str:
    return "" if step.startswith(UNDO) else step.rpartition("/")[0]


def _lineage(branch: str) -> Iterator[str]:
    """It, those above it, and the run's own."""
    while branch:
        yield branch
        branch = branch.rpartition("/")[0]
    yield ""


def _state_of(entry: Entry) -> BarState:
    if entry.kind is EntryKind.LATE or (entry.kind in _WAITED and not entry.ok and not entry.value):
        return BarState.OVER
    return BarState.DONE if entry.ok else BarState.FAILED
