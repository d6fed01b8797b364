"""A state is a colour, a shape and a word: which ones."""

from __future__ import annotations

from dataclasses import dataclass

from edda.control.views import BarState
from edda.core.states import WAITING, RunStatus


@dataclass(frozen=True, slots=True)
class StatusStyle:
    tone: str
    """The class that gives the colour: good, bad, busy, calm, warn, gone."""
    shape: str
    """The name of a shape in `marks.html`."""
    word: str


_RUNS = {
    RunStatus.RUNNING: StatusStyle("busy", "play", "running"),
    RunStatus.WAITING_FOR_EVENT: StatusStyle("calm", "ring", "waits for an event"),
    RunStatus.WAITING_FOR_TIMER: StatusStyle("calm", "clock", "waits for a timer"),
    RunStatus.WAITING_FOR_MESSAGE: StatusStyle("calm", "ring", "waits for a message"),
    RunStatus.WAITING_FOR_CHILD: StatusStyle("calm", "rings", "waits for a child"),
    RunStatus.COMPENSATING: StatusStyle("warn", "back", "undoing"),
    RunStatus.PARKED: StatusStyle("warn", "pause", "parked"),
    RunStatus.COMPLETED: StatusStyle("good", "tick", "completed"),
    RunStatus.FAILED: StatusStyle("bad", "cross", "failed"),
    RunStatus.CANCELLED: StatusStyle("gone", "slash", "cancelled"),
    RunStatus.RECURRED: StatusStyle("gone", "loop", "recurred"),
}
_BARS = {
    BarState.DONE: StatusStyle("good", "tick", "done"),
    BarState.FAILED: StatusStyle("bad", "cross", "failed"),
    BarState.RUNNING: StatusStyle("busy", "play", "running"),
    BarState.WAITING: StatusStyle("calm", "ring", "waiting"),
    BarState.OVER: StatusStyle("gone", "slash", "over"),
}
_OTHERS = {
    "pending": StatusStyle("calm", "ring", "pending"),
    "sending": StatusStyle("busy", "play", "sending"),
    "sent": StatusStyle("good", "tick", "sent"),
    "dead": StatusStyle("bad", "cross", "dead"),
    "alive": StatusStyle("good", "tick", "alive"),
    "lapsed": StatusStyle("bad", "cross", "lapsed"),
}
_LOOKS = _OTHERS | {bar.value: look for bar, look in _BARS.items()} | {run.value: look for run, look in _RUNS.items()}


def style_of(state: str) -> StatusStyle:
    return _LOOKS.get(state) or StatusStyle("gone", "ring", state)


@dataclass(frozen=True, slots=True)
class StatusGroup:
    """Statuses that people filter by together."""

    word: str
    statuses: tuple[str, ...]
    look: StatusStyle


def _group(status: RunStatus, *more: RunStatus, word: str | None = None) -> StatusGroup:
    look = _RUNS[status]
    return StatusGroup(word or look.word, tuple(one.value for one in (status, *more)), look)


GROUPS = (
    _group(RunStatus.FAILED),
    _group(RunStatus.PARKED),
    _group(RunStatus.COMPENSATING),
    _group(RunStatus.RUNNING),
    _group(*(status for status in RunStatus if status in WAITING), word="waiting"),
    _group(RunStatus.COMPLETED),
    _group(RunStatus.CANCELLED),
    _group(RunStatus.RECURRED),
)
