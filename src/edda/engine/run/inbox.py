"""The inbox of one run: each item becomes a history entry, in the order of the numbers."""

from __future__ import annotations

from collections.abc import Iterator

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
from edda.engine.log import RunLog
from edda.errors import EventValidationError
from edda.workflow.channels import MessageCall
from edda.workflow.children import ChildStarted, RunEnded
from edda.workflow.events import EventCall, stored_event_type
from edda.workflow.execution import Command, Execution

from .children import CANCELLED
from .hooks import RunHooks
from .host import AppendEntry
from .waits import EventWaits
from .writes import RunWriteBuffer

_MANY = 10
"""Rejected events of a run that get a log line each; of further ones the hundredth does, the thousandth, and so on."""


def find_misfit(command: Command, body: bytes) -> EventValidationError | None:
    """Why the wait does not accept it, if it has a model."""
    call: EventCall | MessageCall = command.call
    return None if call.check is None else call.check(body)


class InboxReader:
    def __init__(
        self,
        log: RunLog,
        codec: Codec,
        draft: RunWriteBuffer,
        waits: EventWaits,
        herald: RunHooks | None,
        deliver: AppendEntry,
        rejected: int,
    ) -> None:
        """`rejected` is how many entries of this kind the history has."""
        self._log = log
        self._rejected = rejected
        self._codec = codec
        self._draft = draft
        self._waits = waits
        self._herald = herald
        self._deliver = deliver

    def read(self, letter: InboxItem, execution: Execution) -> None:
        if letter.n != self._draft.absorbed + 1 or self._draft.transition is not None:
            return  # read already, or too late to matter
        if letter.event is not None:
            self._read_event(execution, letter, letter.event)
        elif letter.kind is EntryKind.CHILD:
            self._read_end(execution, letter)
        else:
            name = self._codec.decode(letter.value, str) if letter.value else ""
            self._deliver(letter.kind, letter.step, name, n=letter.n)

    def _read_event(self, execution: Execution, letter: InboxItem, event: int) -> None:
        command = execution.pending.get(letter.step)
        if command is None or not letter.value or not self._waits.accepts(command, letter.value):  # over, or pruned
            self._give_back(execution, letter, event)
            return
        if (error := find_misfit(command, letter.value)) is not None:
            self.reject(execution, command, error, event, letter.n)
            return
        self._waits.on_received(command, event)
        if self._herald is not None and command.kind is EntryKind.EVENT:
            self._herald.event_received(execution.length + 1, command, letter.value)
        self._deliver(
            command.kind,
            command.id,
            command.name,
            input=command.input,
            value=letter.value,
            n=letter.n,
            event=event,
        )

    def reject(
        self,
        execution: Execution,
        command: Command,
        error: EventValidationError,
        event: int,
        n: int | None = None,
    ) -> None:
        """The run has had it, so the database does not give it this event again, and its wait is registered anew."""
        self._rejected += 1
        if self._rejected <= _MANY or _is_power_of_ten(self._rejected):
            self._log.write_at(
                execution.length + 1,
                "misfit_rejected",
                step=command.id,
                number=event,
                count=self._rejected,
                error="; ".join(map(str.strip, str(error).splitlines())),
            )
        if n is not None:
            self._waits.on_received(command, event)
        value = encode_failure(self._codec, error)
        self._deliver(
            EntryKind.REJECTED,
            command.id,
            command.name,
            ok=False,
            input=command.input,
            value=value,
            n=n,
            event=event,
        )
        self._waits.register(command)

    def _give_back(self, execution: Execution, letter: InboxItem, event: int) -> None:
        """Its wait was over when it came, or the event was."""
        type = stored_event_type(self._codec, letter.value) if letter.value else ""
        if letter.kind is EntryKind.MESSAGE:  # taken from the others, who can have it now under another number
            self._deliver(EntryKind.STRAY, letter.step, type, n=letter.n)
            self._offer_again(execution, letter)
        else:
            self._deliver(EntryKind.STRAY, letter.step, type, n=letter.n, event=event)
            self._waits.release_event(letter.step, type, event, execution.pending)

    def _offer_again(self, execution: Execution, letter: InboxItem) -> None:
        if letter.value:
            self._draft.attach(StagedEvent(StagedKind.OFFER, letter.value), execution.length)
        if letter.step in execution.pending:
            self._waits.register_again(execution.pending[letter.step])

    def _read_end(self, execution: Execution, letter: InboxItem) -> None:
        ended = RunEnded.unpack(letter.value)
        command = execution.pending.get(letter.step)
        if command is None or command.kind is not EntryKind.CHILD or command.target != ended.run_id:
            self._deliver(EntryKind.LATE, letter.step, ended.run_id, ok=ended.is_ok, n=letter.n)
            return
        value = ended.outcome(self._codec)
        self._deliver(
            EntryKind.CHILD, command.id, command.name, ok=ended.is_ok, input=command.input, value=value, n=letter.n
        )


def _is_power_of_ten(number: int) -> bool:
    return str(number).rstrip("0") == "1"


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
