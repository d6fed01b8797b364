"""The inbox of one run: each item becomes a history entry, in the order of the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from edda.core.codec import Codec
from edda.core.exceptions import encode_failure
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
from edda.errors import EventValidationError
from edda.workflow.channels import MessageCall
from edda.workflow.children import ChildStarted, RunEnded
from edda.workflow.events import EventCall, stored_event_type
from edda.workflow.execution import Command, Execution

from .children import CANCELLED
from .writes import RunWriteBuffer

if TYPE_CHECKING:
    from .run import LiveRun

_LOGGED_EACH = 10
"""Rejected events of a run with a log line each; further lines come with the hundredth, the thousandth, and so on."""


def find_misfit(command: Command, body: bytes) -> EventValidationError | None:
    """The error of the wait's model, if the event does not fit it."""
    call: EventCall | MessageCall = command.call
    return None if call.check is None else call.check(body)


class InboxReader:
    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._codec = run.services.codec
        self._writes = run.writes
        self._waits = run.waits
        self._append = run.append_entry
        self._rejected = sum(entry.kind is EntryKind.REJECTED for entry in run.claimed.entries)

    def read(self, item: InboxItem, execution: Execution) -> None:
        if item.inbox_no != self._writes.inbox_read + 1 or self._writes.transition is not None:
            return  # read already, or the run leaves memory
        if item.event is not None:
            self._read_event(execution, item, item.event)
        elif item.kind is EntryKind.CHILD:
            self._read_end(execution, item)
        else:
            name = self._codec.decode(item.value, str) if item.value else ""
            self._append(item.kind, item.step, name, inbox_no=item.inbox_no)

    def _read_event(self, execution: Execution, item: InboxItem, event: int) -> None:
        command = execution.pending.get(item.step)
        if command is None or not item.value or not self._waits.accepts(command, item.value):  # over, or pruned
            self._release(execution, item, event)
            return
        if (error := find_misfit(command, item.value)) is not None:
            self.reject(execution, command, error, event, item.inbox_no)
            return
        self._waits.on_received(command, event)
        if self._run.hooks is not None and command.kind is EntryKind.EVENT:
            self._run.hooks.event_received(execution.length + 1, command, item.value)
        kind, id, name, given = command.kind, command.id, command.name, command.input
        self._append(kind, id, name, input=given, value=item.value, inbox_no=item.inbox_no, event=event)

    def reject(
        self,
        execution: Execution,
        command: Command,
        error: EventValidationError,
        event: int,
        inbox_no: int | None = None,
    ) -> None:
        """Record that the event did not fit. The run has received it, so it does not get it again; its wait is
        registered again."""
        self._rejected += 1
        is_power_of_ten = str(self._rejected).rstrip("0") == "1"
        if self._rejected <= _LOGGED_EACH or is_power_of_ten:
            self._run.log.write_at(
                execution.length + 1,
                "misfit_rejected",
                step=command.id,
                number=event,
                count=self._rejected,
                error="; ".join(map(str.strip, str(error).splitlines())),
            )
        if inbox_no is not None:
            self._waits.on_received(command, event)
        kind, id, name, given = EntryKind.REJECTED, command.id, command.name, command.input
        value = encode_failure(self._codec, error)
        self._append(kind, id, name, ok=False, input=given, value=value, inbox_no=inbox_no, event=event)
        self._waits.register(command)

    def _release(self, execution: Execution, item: InboxItem, event: int) -> None:
        """The wait was over when the event arrived, or the event was pruned."""
        type = stored_event_type(self._codec, item.value) if item.value else ""
        if item.kind is EntryKind.MESSAGE:  # of a competing channel: other runs can get it under a new number
            self._append(EntryKind.LATE_EVENT, item.step, type, inbox_no=item.inbox_no)
            if item.value:
                self._writes.attach(StagedEvent(StagedKind.REDELIVERY, item.value), execution.length)
            if item.step in execution.pending:
                self._waits.register_again(execution.pending[item.step])
        else:
            self._append(EntryKind.LATE_EVENT, item.step, type, inbox_no=item.inbox_no, event=event)
            self._waits.release_event(item.step, type, event, execution.pending)

    def _read_end(self, execution: Execution, item: InboxItem) -> None:
        ended = RunEnded.unpack(item.value)
        command = execution.pending.get(item.step)
        if command is None or command.kind is not EntryKind.CHILD or command.target != ended.run_id:
            self._append(EntryKind.LATE, item.step, ended.run_id, ok=ended.is_ok, inbox_no=item.inbox_no)
            return
        id, value = command.id, ended.outcome(self._codec)
        self._append(
            EntryKind.CHILD, id, command.name, ok=ended.is_ok, input=command.input, value=value, inbox_no=item.inbox_no
        )


_MAX_NAMED = 20


def read_all(claimed: ClaimedRun, writes: RunWriteBuffer, codec: Codec, now: int) -> None:
    """Record the inbox without running the workflow's code."""
    for item in claimed.inbox:
        if item.inbox_no == writes.inbox_read + 1:
            writes.add(_entry(item, writes.length + 1, codec, now))
            if item.event is not None and item.kind is EntryKind.MESSAGE and item.value:
                writes.attach(StagedEvent(StagedKind.REDELIVERY, item.value), writes.length)


def _entry(item: InboxItem, seq: int, codec: Codec, now: int) -> Entry:
    if item.event is not None:
        event = None if item.kind is EntryKind.MESSAGE else item.event
        type = stored_event_type(codec, item.value) if item.value else ""
        return Entry(seq, EntryKind.LATE_EVENT, item.step, type, True, now, inbox_no=item.inbox_no, event=event)
    if item.kind is EntryKind.CHILD:
        ended = RunEnded.unpack(item.value)
        return Entry(seq, EntryKind.LATE, item.step, ended.run_id, ended.is_ok, now, inbox_no=item.inbox_no)
    name = codec.decode(item.value, str) if item.value else ""
    return Entry(seq, item.kind, item.step, name, True, now, inbox_no=item.inbox_no)


def cancel_reason(claimed: ClaimedRun, codec: Codec, error: Exception) -> str:
    """Why the run was cancelled, and which steps were not undone."""
    reasons = [codec.decode(one.value, str) for one in claimed.inbox if one.kind is EntryKind.CANCEL and one.value]
    reasons += [entry.name for entry in claimed.entries if entry.kind is EntryKind.CANCEL and entry.name]
    steps = [entry.step for entry in claimed.entries if entry.kind is EntryKind.STEP and entry.ok]
    done = ", ".join(steps[:_MAX_NAMED]) + (f" and {len(steps) - _MAX_NAMED} more" if len(steps) > _MAX_NAMED else "")
    undone = f"none of its compensations ran; recorded steps: {done}" if steps else "it had recorded no step"
    why = reasons[0] if reasons else "cancelled"
    return f"{why} (it was parked and could not be replayed, so {undone}; {type(error).__name__}: {error})"[:2000]


def child_cancels(claimed: ClaimedRun, codec: Codec) -> Iterator[RunSignal]:
    """Cancels for the children that end with it, unless the history has their end."""
    ended = {entry.step for entry in claimed.entries if entry.kind is EntryKind.CHILD}
    for entry in claimed.entries:
        if entry.kind is EntryKind.START and entry.ok and entry.step not in ended:
            started = codec.decode(entry.value, ChildStarted)
            if started.cancel_with_parent:
                yield RunSignal(RunId(started.run_id), EntryKind.CANCEL, value=codec.encode(CANCELLED))
