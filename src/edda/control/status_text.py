"""The state of a run as one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from edda.core.model import MICROSECONDS, SUSPECT_DEATHS, RunRecord
from edda.core.states import RunStatus
from edda.core.value_path import truncate
from edda.workflow.context import as_datetime

_PENDING = re.compile(r"(\w+) '(.+)'")
"""`Suspend.reason` of a run that waits: kind and id of its first pending command."""
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
MAX_LENGTH = 300
"""Characters in a list of runs."""
MAX_DETAIL_LENGTH = 2_400
"""Characters for one run: a stored reason of 2,000 and what is added to it. Its end often says what to do."""
LONG_UNCLAIMED = 10 * MICROSECONDS
"""Microseconds. A ready run is claimed within `Settings.poll`, unless all workers are busy or none has its workflow."""


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


def count_of(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def status_text(
    record: RunRecord,
    now: int,
    *,
    outcome: str = "",
    since: int | None = None,
    lost: str | None = None,
    max_length: int = MAX_LENGTH,
) -> str:
    """`outcome` is the error or reason of an ended run, or the error of the last attempt; `since` is when it began to
    wait; `lost` is why its owner does not drive it."""
    state = _RunState(record, now, outcome, since, lost, max_length)
    return truncate(_TEXTS[record.status](state), max_length)


def retried_step(record: RunRecord) -> str | None:
    """The step whose retry the run waits for, if any."""
    found = _PENDING.fullmatch(record.reason or "")
    if record.status is not RunStatus.WAITING_FOR_TIMER or found is None or found[1] != "step":
        return None
    return found[2]


@dataclass(frozen=True)
class _RunState:
    record: RunRecord
    now: int
    outcome: str
    since: int | None
    lost: str | None
    max_length: int

    @property
    def reason(self) -> str:
        return self.record.reason or "something"

    @property
    def pending(self) -> tuple[str, str]:
        """Kind and id of the command that it waits for."""
        found = _PENDING.fullmatch(self.reason)
        return (found[1], found[2]) if found else ("", self.reason)

    @property
    def takeover(self) -> str:
        """What happens to a run whose owner does not drive it."""
        return f"its worker {self.record.owner} {self.lost}; another worker takes it over as soon as one is running"

    @property
    def rest(self) -> str | None:
        """The time until `ready_at`, as text."""
        due = self.record.ready_at
        return None if due is None or due <= self.now else format_duration(due - self.now)


def _running_text(run: _RunState) -> str:
    deaths = run.record.deaths
    died = "a process death" if deaths == 1 else f"{deaths} process deaths"
    if run.lost is not None:
        return f"has stopped: {run.takeover}"
    if run.record.owner is not None:
        return f"runs on worker {run.record.owner}{f', after {died} without progress' if deaths else ''}"
    if deaths >= SUSPECT_DEATHS and run.record.ready_at is None:
        return f"waits until a worker runs it apart from others, after {died} without progress"
    if run.rest is not None:
        return f"begins in {run.rest}"
    to_cancel = " to cancel it" if run.record.has_cancel else ""
    since = run.record.ready_at or run.now  # ready_at is 0 for a run that an inbox item made ready
    if run.now - since < LONG_UNCLAIMED:
        return f"is ready, and no worker that has the workflow {run.record.workflow} has taken it yet{to_cancel}"
    return (
        f"is ready, and no worker has taken it{to_cancel} for {format_duration(run.now - since)}: is a worker running "
        f"that has the workflow {run.record.workflow}?"
    )


def _waiting_text(run: _RunState) -> str:
    due = run.record.ready_at
    if due is None or due <= run.now:
        return f"waits for {run.reason}"
    if run.since is not None and run.since < due:
        return f"waits for {run.reason}, {format_duration(run.now - run.since)} of {format_duration(due - run.since)}"
    return f"waits for {run.reason}, {run.rest} more at most"


def _timer_text(run: _RunState) -> str:
    kind, id = run.pending
    if kind == "step":
        trouble = f": {run.outcome}" if run.outcome else ""
        return f"tries {id} again {f'in {run.rest}' if run.rest else 'now'}{trouble}"
    if run.record.ready_at is None or run.rest is None:
        return "wakes up now"
    return f"sleeps until {as_datetime(run.record.ready_at):%Y-%m-%d %H:%M:%S} UTC, {run.rest} more"


def _child_text(run: _RunState) -> str:
    kind, id = run.pending
    return "waits for its running steps and children to end" if kind == "settled" else f"waits for its child {id}"


def _compensating_text(run: _RunState) -> str:
    if run.lost is not None:
        return f"has stopped compensating: {run.takeover}"
    where = "" if run.record.owner is None else f", on worker {run.record.owner}"
    return f"runs its compensations{where}"


_STORED_CANCEL = (
    "; a cancel is stored and is carried out when the code fits again; cancel it once more to end it now, without "
    "compensation"
)


def _parked_text(run: _RunState) -> str:
    again = f" (tried again in {run.rest})" if run.rest else ""
    parked = f"is parked{again}: {run.reason}"
    return truncate(parked, run.max_length - len(_STORED_CANCEL)) + _STORED_CANCEL if run.record.has_cancel else parked


def _completed_text(run: _RunState) -> str:
    if run.record.ended_at is None:
        return "completed"
    return f"completed in {format_duration(run.record.ended_at - run.record.created_at)}"


_TEXTS: dict[RunStatus, Callable[[_RunState], str]] = {
    RunStatus.RUNNING: _running_text,
    RunStatus.WAITING_FOR_EVENT: _waiting_text,
    RunStatus.WAITING_FOR_MESSAGE: _waiting_text,
    RunStatus.WAITING_FOR_TIMER: _timer_text,
    RunStatus.WAITING_FOR_CHILD: _child_text,
    RunStatus.COMPENSATING: _compensating_text,
    RunStatus.PARKED: _parked_text,
    RunStatus.COMPLETED: _completed_text,
    RunStatus.FAILED: lambda run: f"failed: {run.outcome}",
    RunStatus.CANCELLED: lambda run: f"was cancelled: {run.outcome}",
    RunStatus.RECURRED: lambda run: "went on as the next generation",
}
