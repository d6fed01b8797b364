"""How much of a history a run keeps that is tried again: all before what made it fail.

Steps that succeeded are not run again, so what is kept ends where the run stood before it failed. If it did more after
that point, or undid anything, it cannot go on from there; then it has to begin from its start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edda.core.codec import Codec
from edda.core.exceptions import EncodedException
from edda.core.model import Entry, EntryKind, RunRecord
from edda.core.states import ENDED, RunStatus
from edda.errors import ActionRefusedError, EventTimeoutError, MessageTimeoutError, PayloadError
from edda.workflow.children import ChildStarted
from edda.workflow.execution import STOPS

_OUTCOMES = frozenset({EntryKind.STEP, EntryKind.CHILD, EntryKind.EVENT, EntryKind.MESSAGE})
"""What the code went on with. A late outcome is not among them: its step is tried again, as it is after a crash."""
_ATTEMPT_KINDS = frozenset({EntryKind.RETRY, EntryKind.HEARTBEAT})
_UNDO = "undo:"
_TIMEOUTS = frozenset({EventTimeoutError.__qualname__, MessageTimeoutError.__qualname__})
"""Nothing is recorded of a wait that was over but that it was."""


def plan_retry(codec: Codec, record: RunRecord, history: Sequence[Entry], *, from_start: bool = False) -> int:
    """The number of entries to keep; raises `ActionRefusedError` if the run's state does not allow it."""
    _check_status(record)
    least = 1 if history and history[0].kind is EntryKind.RECUR else 0
    if from_start:
        return least
    if any(entry.kind is EntryKind.SETTLED or entry.step.startswith(_UNDO) for entry in history):
        raise _not_retryable(record, "undid what it had done, so there is nothing to go on from")
    keep = _before_open_children(codec, record, history, _failure_index(codec, record, history))
    done = next((entry for entry in history[keep:] if _is_done(codec, entry)), None)
    if done is not None:
        raise _not_retryable(record, f"went on after it had failed, and {done.step} would be done or received again")
    return max(keep, least)


def _is_done(codec: Codec, entry: Entry) -> bool:
    """Whether it must not happen again. A child that was waited for ended with its parent, and is started anew."""
    if entry.ok and entry.kind is EntryKind.START:
        return not codec.decode(entry.value, ChildStarted).is_awaited
    return entry.ok and entry.kind in _OUTCOMES


def _check_status(record: RunRecord) -> None:
    if record.status is RunStatus.COMPLETED:
        raise ActionRefusedError(f"run {record.run_id} is completed: there is nothing to try again")
    if record.status is RunStatus.PARKED:
        raise ActionRefusedError(f"run {record.run_id} is parked, not ended: resume it")
    if record.status not in ENDED:
        raise ActionRefusedError(f"run {record.run_id} has not ended: wait for its end, or cancel it first")


def _not_retryable(record: RunRecord, why: str) -> ActionRefusedError:
    return ActionRefusedError(
        f"run {record.run_id} {why}. Run all of it again: from_start=True (on the command line: --from-start)"
    )


def _failure_index(codec: Codec, record: RunRecord, history: Sequence[Entry]) -> int:
    stop = next((place for place, entry in enumerate(history) if entry.kind in STOPS), None)
    if stop is not None:
        return stop
    failed = [place for place, entry in enumerate(history) if entry.kind in _OUTCOMES and not entry.ok]
    if not failed:
        return len(history)  # the workflow's own code failed
    last = failed[-1]
    went_on = any(entry.ok and entry.kind in _OUTCOMES for entry in history[last + 1 :])
    if went_on and not _caused_failure(codec, record, history[last]):
        return len(history)  # that failure was dealt with; the code failed later, by itself
    return _skip_attempts(history, last)


def _skip_attempts(history: Sequence[Entry], place: int) -> int:
    """Without the attempts right before it: the step begins with its first one again."""
    step = history[place].step
    while place and history[place - 1].step == step and history[place - 1].kind in _ATTEMPT_KINDS:
        place -= 1
    return place


def _caused_failure(codec: Codec, record: RunRecord, entry: Entry) -> bool:
    """Whether the run failed with the error that this entry brought."""
    errors = list(_chain(codec, record.value or b""))
    if not entry.value:
        return any(error.qualname in _TIMEOUTS for error in errors)
    brought = next(_chain(codec, entry.value), None)
    return brought is not None and any(_name(error) == _name(brought) for error in errors)


def _chain(codec: Codec, value: bytes) -> Iterator[EncodedException]:
    try:
        error = codec.decode(value, EncodedException)
    except PayloadError:
        return
    while isinstance(error, EncodedException):
        yield error
        error = error.cause


def _name(error: EncodedException) -> tuple[str, str, str]:
    return error.module, error.qualname, error.message


def _before_open_children(codec: Codec, record: RunRecord, history: Sequence[Entry], keep: int) -> int:
    """Go back before the start of a child whose end is not kept: that was told, or never will be."""
    ended = {entry.step for entry in history[:keep] if entry.kind is EntryKind.CHILD}
    for place, entry in enumerate(history[:keep]):
        if entry.kind is not EntryKind.START or not entry.ok or entry.step in ended:
            continue
        started = codec.decode(entry.value, ChildStarted)
        if started.is_awaited and not started.cancel_with_parent:
            raise _not_retryable(record, f"waited for run {started.run_id}, which goes on without it")
        if started.is_awaited:
            return place
    return keep
