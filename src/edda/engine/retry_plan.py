"""How many entries of its history a run keeps when it is retried: all before the one that made it fail.

Steps that succeeded are in that history, so they do not run again. If the run did more after its failure, or
compensated a step, it cannot go on from there; then it has to begin from its start.
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
"""Entries that the code continued with. A late outcome is not among them: its step is tried again, as after a crash."""
_ATTEMPT_KINDS = frozenset({EntryKind.RETRY, EntryKind.HEARTBEAT})
_UNDO = "undo:"
_TIMEOUTS = frozenset({EventTimeoutError.__qualname__, MessageTimeoutError.__qualname__})
"""The entry of a wait that timed out has no value."""


def plan_retry(codec: Codec, record: RunRecord, history: Sequence[Entry], *, from_start: bool = False) -> int:
    """The number of entries to keep; raises `ActionRefusedError` if the run's state does not allow it."""
    if record.status is RunStatus.COMPLETED:
        raise ActionRefusedError(f"run {record.run_id} is completed: there is nothing to try again")
    if record.status is RunStatus.PARKED:
        raise ActionRefusedError(f"run {record.run_id} is parked, not ended: resume it")
    if record.status not in ENDED:
        raise ActionRefusedError(f"run {record.run_id} has not ended: wait for its end, or cancel it first")
    least = 1 if history and history[0].kind is EntryKind.RECUR else 0
    if from_start:
        return least
    if has_compensated(history):
        raise _not_retryable(record, "undid what it had done, so there is nothing to go on from")
    keep = _before_open_children(codec, record, history, _failure_index(codec, record, history))
    done = next((entry for entry in history[keep:] if _is_done(codec, entry)), None)
    if done is not None:
        raise _not_retryable(record, f"went on after it had failed, and {done.step} would be done or received again")
    return max(keep, least)


def has_compensated(history: Sequence[Entry]) -> bool:
    return any(entry.kind is EntryKind.SETTLED or entry.step.startswith(_UNDO) for entry in history)


def _is_done(codec: Codec, entry: Entry) -> bool:
    """Whether it must not happen again. A child that was awaited ended with its parent, and is started again."""
    if entry.ok and entry.kind is EntryKind.START:
        return not codec.decode(entry.value, ChildStarted).is_awaited
    return entry.ok and entry.kind in _OUTCOMES


def _not_retryable(record: RunRecord, why: str) -> ActionRefusedError:
    return ActionRefusedError(
        f"run {record.run_id} {why}. Run all of it again: from_start=True (on the command line: --from-start)"
    )


def _failure_index(codec: Codec, record: RunRecord, history: Sequence[Entry]) -> int:
    stop = next((index for index, entry in enumerate(history) if entry.kind in STOPS), None)
    if stop is not None:
        return stop
    failed = [index for index, entry in enumerate(history) if entry.kind in _OUTCOMES and not entry.ok]
    if not failed:
        return len(history)  # the workflow's own code failed
    last = failed[-1]
    went_on = any(entry.ok and entry.kind in _OUTCOMES for entry in history[last + 1 :])
    if went_on and not _caused_failure(codec, record, history[last]):
        return len(history)  # the code caught that failure, and failed later by itself
    # Without the attempts right before it: the step starts with its first attempt again.
    step = history[last].step
    while last and history[last - 1].step == step and history[last - 1].kind in _ATTEMPT_KINDS:
        last -= 1
    return last


def _caused_failure(codec: Codec, record: RunRecord, entry: Entry) -> bool:
    """Whether the run failed with the error of this entry."""
    errors = list(_chain(codec, record.value or b""))
    if not entry.value:
        return any(error.qualname in _TIMEOUTS for error in errors)
    recorded = next(_chain(codec, entry.value), None)
    if recorded is None:
        return False
    name = (recorded.module, recorded.qualname, recorded.message)
    return any((error.module, error.qualname, error.message) == name for error in errors)


def _chain(codec: Codec, value: bytes) -> Iterator[EncodedException]:
    try:
        error = codec.decode(value, EncodedException)
    except PayloadError:
        return
    while isinstance(error, EncodedException):
        yield error
        error = error.cause


def _before_open_children(codec: Codec, record: RunRecord, history: Sequence[Entry], keep: int) -> int:
    """Go back before the start of a child whose end is not kept: its signal was sent already, or is never sent."""
    ended = {entry.step for entry in history[:keep] if entry.kind is EntryKind.CHILD}
    for index, entry in enumerate(history[:keep]):
        if entry.kind is not EntryKind.START or not entry.ok or entry.step in ended:
            continue
        started = codec.decode(entry.value, ChildStarted)
        if started.is_awaited and not started.cancel_with_parent:
            raise _not_retryable(record, f"waited for run {started.run_id}, which goes on without it")
        if started.is_awaited:
            return index
    return keep
