"""Ending a run that was cancelled while it was parked, and still cannot be replayed.

Its code cannot read the inbox, so each letter is recorded as one that moves no code: an event is free again, a message
that other runs could have had is offered to them.
"""

from __future__ import annotations

from collections.abc import Iterator

from edda.core.codec import Codec
from edda.core.model import (
    ClaimedRun,
    Entry,
    EntryKind,
    InboxItem,
    RunId,
    RunSignal,
    StagedEvent,
    StagedKind,
)
from edda.workflow.children import ChildStarted, RunEnded
from edda.workflow.events import stored_event_type

from .children import CANCELLED
from .draft import RunWriteBuffer

_MOST_NAMED = 20


def absorb(claimed: ClaimedRun, draft: RunWriteBuffer, codec: Codec, now: int) -> None:
    for letter in claimed.mail:
        if letter.n == draft.absorbed + 1:
            draft.add(_entry(letter, draft.length + 1, codec, now))
            if letter.event is not None and letter.kind is EntryKind.MESSAGE and letter.value:
                draft.attach(StagedEvent(StagedKind.OFFER, letter.value), draft.length)


def _entry(letter: InboxItem, seq: int, codec: Codec, now: int) -> Entry:
    if letter.event is not None:
        event = None if letter.kind is EntryKind.MESSAGE else letter.event
        type = stored_event_type(codec, letter.value) if letter.value else ""
        return Entry(seq, EntryKind.STRAY, letter.step, type, True, now, n=letter.n, event=event)
    if letter.kind is EntryKind.CHILD:
        ended = RunEnded.unpack(letter.value)
        return Entry(seq, EntryKind.LATE, letter.step, ended.run_id, ended.is_ok, now, n=letter.n)
    name = codec.decode(letter.value, str) if letter.value else ""
    return Entry(seq, letter.kind, letter.step, name, True, now, n=letter.n)


def reason(claimed: ClaimedRun, codec: Codec, error: Exception) -> str:
    """Why it was cancelled, and what was not undone."""
    asked = [codec.decode(one.value, str) for one in claimed.mail if one.kind is EntryKind.CANCEL and one.value]
    asked += [entry.name for entry in claimed.entries if entry.kind is EntryKind.CANCEL and entry.name]
    steps = [entry.step for entry in claimed.entries if entry.kind is EntryKind.STEP and entry.ok]
    done = ", ".join(steps[:_MOST_NAMED]) + (
        f" and {len(steps) - _MOST_NAMED} more" if len(steps) > _MOST_NAMED else ""
    )
    undone = f"no compensation was run for its recorded steps ({done})" if steps else "it had recorded no step"
    why = asked[0] if asked else "cancelled"
    return f"{why} (it was parked and could not be replayed, so {undone}; {type(error).__name__}: {error})"[:2000]


def cancels(claimed: ClaimedRun, codec: Codec) -> Iterator[RunSignal]:
    """For the children that are cancelled with it and have not ended, as far as it knows."""
    ended = {entry.step for entry in claimed.entries if entry.kind is EntryKind.CHILD}
    for entry in claimed.entries:
        if entry.kind is EntryKind.START and entry.ok and entry.step not in ended:
            started = codec.decode(entry.value, ChildStarted)
            if started.cancel_with_parent:
                yield RunSignal(RunId(started.run_id), EntryKind.CANCEL, value=codec.encode(CANCELLED))
