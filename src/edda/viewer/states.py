"""A state is a colour, a shape and a word: which ones."""

from __future__ import annotations

from dataclasses import dataclass

from edda.control.views import BarState
from edda.core.states import WAITING, RunStatus


@dataclass(frozen=True, slots=True)
class Look:
    tone: str
    """The class that gives the colour: good, bad, busy, calm, warn, gone."""
    shape: str
    """The name of a shape in `marks.html`."""
    word: str


_RUNS = {
    RunStatus.RUNNING: Look("busy", "play", "running"),
    RunStatus.WAITING_FOR_EVENT: Look("calm", "ring", "waits for an event"),
    RunStatus.WAITING_FOR_TIMER: Look("calm", "clock", "waits for a timer"),
    RunStatus.WAITING_FOR_MESSAGE: Look("calm", "ring", "waits for a message"),
    RunStatus.WAITING_FOR_CHILD: Look("calm", "rings", "waits for a child"),
    RunStatus.COMPENSATING: Look("warn", "back", "undoing"),
    RunStatus.PARKED: Look("warn", "pause", "parked"),
    RunStatus.COMPLETED: Look("good", "tick", "completed"),
    RunStatus.FAILED: Look("bad", "cross", "failed"),
    RunStatus.CANCELLED: Look("gone", "slash", "cancelled"),
    RunStatus.RECURRED: Look("gone", "loop", "recurred"),
}
_BARS = {
    BarState.DONE: Look("good", "tick", "done"),
    BarState.FAILED: Look("bad", "cross", "failed"),
    BarState.RUNNING: Look("busy", "play", "running"),
    BarState.WAITING: Look("calm", "ring", "waiting"),
    BarState.OVER: Look("gone", "slash", "over"),
}
_OTHERS = {
    "pending": Look("calm", "ring", "pending"),
    "sending": Look("busy", "play", "sending"),
    "sent": Look("good", "tick", "sent"),
    "dead": Look("bad", "cross", "dead"),
    "alive": Look("good", "tick", "alive"),
    "lapsed": Look("bad", "cross", "lapsed"),
}
_LOOKS = _OTHERS | {bar.value: look for bar, look in _BARS.items()} | {run.value: look for run, look in _RUNS.items()}


def look_of(state: str) -> Look:
    return _LOOKS.get(state) or Look("gone", "ring", state)


@dataclass(frozen=True, slots=True)
class Group:
    """Statuses that people filter by together."""

    word: str
    statuses: tuple[str, ...]
    look: Look


def _group(status: RunStatus, *more: RunStatus, word: str | None = None) -> Group:
    look = _RUNS[status]
    return Group(word or look.word, tuple(one.value for one in (status, *more)), look)


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
