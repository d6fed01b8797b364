"""The statuses of a run, and the one table of the changes between them."""

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
    """Running its compensations, after a failure or a cancel."""
    PARKED = "parked"
    """Its code does not fit its history, or cannot continue: tried again with backoff and by every new worker; or its
    step kills its process: it stays parked until an operator resumes it."""
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
_ENDINGS = (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.RECURRED)

TRANSITIONS: dict[RunStatus, frozenset[RunStatus]] = {
    RunStatus.RUNNING: WAITING | {RunStatus.PARKED, RunStatus.COMPENSATING, *_ENDINGS},
    RunStatus.COMPENSATING: frozenset({RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.PARKED}),
    RunStatus.PARKED: frozenset({RunStatus.RUNNING, RunStatus.COMPENSATING}),
    **{status: frozenset({RunStatus.RUNNING}) for status in WAITING},
    **{status: frozenset() for status in _ENDINGS},
}
"""Status -> the statuses that may follow. All else about statuses is derived from this table: the sets below, the
checks of `End` and `Suspend` in `model`, and of each change of a row in the memory storage."""

ENDED = frozenset(status for status, following in TRANSITIONS.items() if not following)
"""Kept in `edda_result`; every other status is a row of `edda_open_run`."""
OPEN = frozenset(TRANSITIONS) - ENDED


def may_follow(before: RunStatus, after: RunStatus) -> bool:
    """Whether a run may change from one status to the other, or be written again with the same one."""
    return after is before or after in TRANSITIONS[before]
