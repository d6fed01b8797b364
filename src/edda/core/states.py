"""The states of a run, and the only moves between them."""

from __future__ import annotations

from enum import StrEnum


class RunStatus(StrEnum):
    RUNNING = "running"
    """Owned by a worker, or ready for one."""
    WAITING_FOR_EVENT = "waiting_for_event"
    WAITING_FOR_TIMER = "waiting_for_timer"
    WAITING_FOR_MESSAGE = "waiting_for_message"
    WAITING_FOR_CHILD = "waiting_for_child"
    COMPENSATING = "compensating"
    """Undoing what it did, after a failure or a cancel."""
    PARKED = "parked"
    """Its code does not fit its history, or cannot go on: tried again with backoff and by every new worker; or its step
    kills its process: it rests until it is resumed by hand."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RECURRED = "recurred"
    """This generation ended by starting the next one under the same id."""


WAITING = frozenset(
    {
        RunStatus.WAITING_FOR_EVENT,
        RunStatus.WAITING_FOR_TIMER,
        RunStatus.WAITING_FOR_MESSAGE,
        RunStatus.WAITING_FOR_CHILD,
    }
)
ENDED = frozenset({RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.RECURRED})
"""Kept in `edda_result`; every other status is a row of `edda_sched`."""

OPEN = frozenset(RunStatus) - ENDED

TRANSITIONS: dict[RunStatus, frozenset[RunStatus]] = {
    RunStatus.RUNNING: WAITING | ENDED | {RunStatus.PARKED, RunStatus.COMPENSATING},
    RunStatus.COMPENSATING: frozenset({RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.PARKED}),
    RunStatus.PARKED: frozenset({RunStatus.RUNNING, RunStatus.COMPENSATING}),
    **{status: frozenset({RunStatus.RUNNING}) for status in WAITING},
    **{status: frozenset() for status in ENDED},
}
