"""Reading what others put into a run's inbox: each letter becomes an entry, in the order of their numbers."""

from __future__ import annotations

from edda.core.codec import Codec
from edda.core.model import Delivery, Dispatch, DispatchKind, EntryKind
from edda.workflow.children import Ended
from edda.workflow.events import stored_type
from edda.workflow.execution import Execution

from .draft import Draft
from .entries import Deliver
from .herald import Herald
from .waits import Waits


class Mailbox:
    def __init__(self, codec: Codec, draft: Draft, waits: Waits, herald: Herald | None, deliver: Deliver) -> None:
        self._codec = codec
        self._draft = draft
        self._waits = waits
        self._herald = herald
        self._deliver = deliver

    def read(self, letter: Delivery, execution: Execution) -> None:
        if letter.n != self._draft.absorbed + 1 or self._draft.last is not None:
            return  # read already, or too late to matter
        if letter.event is not None:
            self._read_event(execution, letter, letter.event)
        elif letter.kind is EntryKind.CHILD:
            self._read_end(execution, letter)
        else:
            name = self._codec.decode(letter.value, str) if letter.value else ""
            self._deliver(letter.kind, letter.step, name, n=letter.n)

    def _read_event(self, execution: Execution, letter: Delivery, event: int) -> None:
        command = execution.pending.get(letter.step)
        if command is None or not letter.value or not self._waits.takes(command, letter.value):  # over, or pruned
            self._give_back(execution, letter, event)
            return
        self._waits.received(command, event)
        if self._herald is not None and command.kind is EntryKind.EVENT:
            self._herald.tell_received(execution.length + 1, command, letter.value)
        self._deliver(
            command.kind,
            command.id,
            command.name,
            input=command.input,
            value=letter.value,
            n=letter.n,
            event=event,
        )

    def _give_back(self, execution: Execution, letter: Delivery, event: int) -> None:
        """Its wait was over when it came, or the event was."""
        type = stored_type(self._codec, letter.value) if letter.value else ""
        if letter.kind is EntryKind.MESSAGE:  # taken from the others, who can have it now under another number
            self._deliver(EntryKind.STRAY, letter.step, type, n=letter.n)
            self._offer_again(execution, letter)
        else:
            self._deliver(EntryKind.STRAY, letter.step, type, n=letter.n, event=event)
            self._waits.give_back(letter.step, type, event, execution.pending)

    def _offer_again(self, execution: Execution, letter: Delivery) -> None:
        if letter.value:
            self._draft.add_part(Dispatch(DispatchKind.OFFER, letter.value), execution.length)
        if letter.step in execution.pending:
            self._waits.ask_again(execution.pending[letter.step])

    def _read_end(self, execution: Execution, letter: Delivery) -> None:
        ended = Ended.unpack(letter.value)
        command = execution.pending.get(letter.step)
        if command is None or command.kind is not EntryKind.CHILD or command.target != ended.run_id:
            self._deliver(EntryKind.LATE, letter.step, ended.run_id, ok=ended.is_ok, n=letter.n)
            return
        value = ended.outcome(self._codec)
        self._deliver(
            EntryKind.CHILD, command.id, command.name, ok=ended.is_ok, input=command.input, value=value, n=letter.n
        )
