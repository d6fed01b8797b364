"""The state of a run as one would say it."""

from __future__ import annotations

import re
from collections.abc import Callable

from edda.core.model import MICROSECONDS, SUSPECT_DEATHS, RunRecord
from edda.core.states import RunStatus
from edda.core.value_path import truncate
from edda.workflow.context import as_datetime

_PENDING = re.compile(r"(\w+) '(.+)'")
"""What a run that leaves memory says of the first thing it waits for."""
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
MAX_LENGTH = 300
LONG_UNCLAIMED = 10 * MICROSECONDS
"""A run that is ready is claimed within a poll, unless workers are busy or there is none for it."""


def format_duration(microseconds: int) -> str:
    """Two units at most: `1 h 20 min`, `5 min`, `3.2 s`, `40 ms`."""
    if microseconds < MICROSECONDS:
        return f"{max(microseconds, 0) // 1000} ms"
    seconds = microseconds / MICROSECONDS
    if seconds < 10 and seconds % 1 >= 0.1:
        return f"{seconds:.1f} s"
    rest = round(seconds)
    parts = []
    for size, unit in _UNITS:
        if rest >= size:
            parts.append(f"{rest // size} {unit}")
            rest %= size
        elif parts:
            break
    return " ".join(parts[:2])


def status_text(
    record: RunRecord, now: int, *, outcome: str = "", since: int | None = None, lost: str | None = None
) -> str:
    """`outcome` is the error or the reason of one that ended, or of the last try; `since` when it began to wait; both
    if that is known. `lost` says why its owner does not drive it (`open_runs.say_lost`)."""
    return truncate(_SAY[record.status](_RunState(record, now, outcome, since, lost)), MAX_LENGTH)


def retried_step(record: RunRecord) -> str | None:
    """The step that will be tried again, if the run waits for that."""
    found = _PENDING.fullmatch(record.reason or "")
    is_retried = record.status is RunStatus.WAITING_FOR_TIMER and found is not None and found[1] == "step"
    return found[2] if found is not None and is_retried else None


class _RunState:
    def __init__(self, record: RunRecord, now: int, outcome: str, since: int | None, lost: str | None) -> None:
        self.record = record
        self.now = now
        self.outcome = outcome
        self.since = since
        self.lost = lost

    @property
    def reason(self) -> str:
        return self.record.reason or "something"

    @property
    def pending(self) -> tuple[str, str]:
        """Kind and id of what it waits for."""
        found = _PENDING.fullmatch(self.reason)
        return (found[1], found[2]) if found else ("", self.reason)

    @property
    def takeover(self) -> str:
        """What happens with a run whose owner does not drive it."""
        return f"its worker {self.record.owner} {self.lost}; another worker takes it over as soon as one is running"

    @property
    def rest(self) -> str | None:
        """How long until it goes on by itself."""
        due = self.record.ready_at
        return None if due is None or due <= self.now else format_duration(due - self.now)


def _say_running(run: _RunState) -> str:
    deaths = run.record.deaths
    if run.lost is not None:
        return f"has stopped: {run.takeover}"
    if run.record.owner is not None:
        died = f", after {say_deaths(deaths)} without progress" if deaths else ""
        return f"runs on worker {run.record.owner}{died}"
    if deaths >= SUSPECT_DEATHS and run.record.ready_at is None:
        return f"waits until a worker runs it apart from others, after {say_deaths(deaths)} without progress"
    if run.rest is not None:
        return f"begins in {run.rest}"
    since = run.record.ready_at or run.now  # what something arrived for has no time of its own
    if run.now - since < LONG_UNCLAIMED:
        return "is ready, and no worker has taken it yet"
    return (
        f"is ready, and no worker has taken it for {format_duration(run.now - since)}: is a worker running that has "
        f"the workflow {run.record.workflow}?"
    )


def say_deaths(deaths: int) -> str:
    return "a process death" if deaths == 1 else f"{deaths} process deaths"


def _say_waiting(run: _RunState) -> str:
    due = run.record.ready_at
    if due is None or due <= run.now:
        return f"waits for {run.reason}"
    if run.since is not None and run.since < due:
        return f"waits for {run.reason}, {format_duration(run.now - run.since)} of {format_duration(due - run.since)}"
    return f"waits for {run.reason}, {run.rest} more at most"


def _say_timer(run: _RunState) -> str:
    kind, id = run.pending
    if kind == "step":
        trouble = f": {run.outcome}" if run.outcome else ""
        return f"tries {id} again {f'in {run.rest}' if run.rest else 'now'}{trouble}"
    if run.record.ready_at is None or run.rest is None:
        return "wakes up now"
    return f"sleeps until {as_datetime(run.record.ready_at):%Y-%m-%d %H:%M:%S} UTC, {run.rest} more"


def _say_child(run: _RunState) -> str:
    kind, id = run.pending
    return "waits until what it began has ended" if kind == "settled" else f"waits for its child {id}"


def _say_undoing(run: _RunState) -> str:
    if run.lost is not None:
        return f"has stopped undoing what it did: {run.takeover}"
    where = "" if run.record.owner is None else f", on worker {run.record.owner}"
    return f"undoes what it did{where}"


_STORED_CANCEL = (
    "; a cancel is stored and is carried out when the code fits again; cancel it once more to end it now, without "
    "compensation"
)


def _say_parked(run: _RunState) -> str:
    again = f" (tried again in {run.rest})" if run.rest else ""
    parked = f"is parked{again}: {run.reason}"
    return truncate(parked, MAX_LENGTH - len(_STORED_CANCEL)) + _STORED_CANCEL if run.record.has_cancel else parked


def _say_completed(run: _RunState) -> str:
    record = run.record
    return (
        "completed"
        if record.ended_at is None
        else f"completed in {format_duration(record.ended_at - record.created_at)}"
    )


_SAY: dict[RunStatus, Callable[[_RunState], str]] = {
    RunStatus.RUNNING: _say_running,
    RunStatus.WAITING_FOR_EVENT: _say_waiting,
    RunStatus.WAITING_FOR_MESSAGE: _say_waiting,
    RunStatus.WAITING_FOR_TIMER: _say_timer,
    RunStatus.WAITING_FOR_CHILD: _say_child,
    RunStatus.COMPENSATING: _say_undoing,
    RunStatus.PARKED: _say_parked,
    RunStatus.COMPLETED: _say_completed,
    RunStatus.FAILED: lambda run: f"failed: {run.outcome}",
    RunStatus.CANCELLED: lambda run: f"was cancelled: {run.outcome}",
    RunStatus.RECURRED: lambda run: "went on as the next generation",
}
