"""Reading what others put into a run's inbox: each letter becomes an entry, in the order of their numbers."""

from __future__ import annotations

from edda.core.codec import Codec
from edda.core.failure import encode_failure
from edda.core.model import EntryKind, InboxItem, StagedEvent, StagedKind
from edda.errors import EventValidationError
from edda.workflow.channels import MessageCall
from edda.workflow.children import RunEnded
from edda.workflow.events import EventCall, stored_event_type
from edda.workflow.execution import Command, Execution

from .draft import RunWriteBuffer
from .entries import AppendEntry
from .herald import RunHooks
from .log import RunLog
from .waits import EventWaits

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
