"""One incarnation of a run under test: an `Execution` that notes all it does and is fed by hand."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from edda.core.model import MICROSECONDS, Entry, EntryKind
from edda.workflow.compensation import CompensationStep
from edda.workflow.execution import Command, Execution

STARTED_AT = 1_700_000_000 * MICROSECONDS


class StepFailedError(Exception):
    """What a recorded failure is raised as here."""


class Flow:
    """What a body under test is given: the verbs."""

    def __init__(self) -> None:
        self.execution: Execution | None = None

    def step(self, name: str, *args: Any, id: str | None = None) -> Coroutine[Any, Any, Any]:
        assert self.execution is not None
        return self.execution.call(EntryKind.STEP, name, msgspec.json.encode(args), decode=decode, id=id)

    def nap(self, seconds: int) -> Coroutine[Any, Any, Any]:
        assert self.execution is not None
        return self.execution.call(EntryKind.TIMER, "nap", due=self.execution.now + seconds * MICROSECONDS)

    def deed(self, *args: Any) -> Coroutine[Any, Any, Any]:
        """A step that is undone if the run fails."""
        assert self.execution is not None
        call = Reversible(Remedy(self, args), is_hasty(args))
        return self.execution.call(EntryKind.STEP, DEED, msgspec.json.encode(args), decode=decode, call=call)

    def promise(self, *args: Any) -> None:
        """Something to undo that no step did."""
        assert self.execution is not None
        self.execution.compensator.add(CompensationStep("undo", lambda id: self.step("undo", "promise", *args, id=id)))

    def child(self, name: str, *args: Any, run_id: str | None = None, follows: bool = True) -> Coroutine[Any, Any, Any]:
        """Start a run, or watch one that exists, and wait for its end."""
        return self._call_child(EntryKind.CHILD, name, args, run_id, follows)

    def start_child(self, name: str, *args: Any) -> Coroutine[Any, Any, Any]:
        return self._call_child(EntryKind.START, name, args, None, True)

    def _call_child(
        self, kind: EntryKind, name: str, args: Any, run_id: str | None, follows: bool
    ) -> Coroutine[Any, Any, Any]:
        assert self.execution is not None
        input = msgspec.json.encode(args)
        return self.execution.call(
            kind, name, input, decode=decode, call=follows, target=lambda step: run_id or f"child-{step}"
        )


DEED = "deed"


@dataclass(frozen=True)
class Remedy:
    """Undoes a deed; tells what it was and what came of it."""

    flow: Flow
    args: tuple[Any, ...]

    def prepare(self, result: Any) -> CompensationStep:
        return CompensationStep("undo", lambda id: self.flow.step("undo", DEED, list(self.args), result, id=id))


@dataclass(frozen=True)
class Reversible:
    undo: Remedy
    has_timeout: bool


def is_hasty(args: Sequence[Any]) -> bool:
    """A deed whose body is given up after a while, and may yet have its effect."""
    return bool(args[0] % 2)


Body = Callable[[Flow], Coroutine[Any, Any, Any]]


def decode(entry: Entry) -> Any:
    value = msgspec.json.decode(entry.value)
    return value if entry.ok else StepFailedError(value)


@dataclass(frozen=True)
class Lost:
    """A cancelled wait for a step or a child's end, whose outcome may still be recorded."""

    id: str
    name: str
    input: bytes
    is_child: bool = False


def abandon_child(flow: Flow, command: Command) -> Lost:
    """As the engine does: one that follows its parent is cancelled, and undoing waits for its end."""
    assert command.target is not None
    assert flow.execution is not None
    if command.call:
        flow.execution.cancelled_children.add(command.target)
    return Lost(command.id, command.target, b"", is_child=True)


class Incarnation(Execution):
    def __init__(self, body: Body, history: Sequence[Entry] = (), name: str = "run") -> None:
        flow = Flow()
        notes: list[str] = []
        lost: list[Lost] = []

        def abandon(command: Command) -> None:
            notes.append(f"abandon {command!r}")
            if command.kind is EntryKind.STEP:
                lost.append(Lost(command.id, command.name, command.input))
            elif command.kind is EntryKind.CHILD and command.started:
                lost.append(abandon_child(flow, command))

        super().__init__(
            name, lambda: body(flow), history, started_at=STARTED_AT, resumed=bool(history), on_abandon=abandon
        )
        self.history = list(history)
        self.notes = notes
        """What was asked for and given up, in order."""
        self.lost = lost
        self._flow = flow
        flow.execution = self

    # Notes. The short cut of the replay issues nothing, but it stands for an issue.

    def _register(self, command: Command) -> None:
        super()._register(command)
        self.notes.append(f"issue {command!r} at {command.issued_at} due {command.due} {command.input!r}")

    def _take_next_entry(self, command: Command) -> Any:
        taken = super()._take_next_entry(command)
        if taken is not None:
            self.notes.append(f"issue {command!r} at {command.issued_at} due {command.due} {command.input!r}")
        return taken

    @property
    def numbers(self) -> int:
        """How many tasks and futures were made."""
        return self.loop.last_number

    @property
    def waits(self) -> list[tuple[object, ...]]:
        return [
            (
                c.kind,
                c.id,
                c.name,
                c.input,
                c.due,
                c.attempt,
                c.retry_at,
                c.after_entry,
                c.issued_at,
                c.last_heartbeat,
                c.started,
            )
            for c in self.pending.values()
        ]

    # Feeding

    def deliver(self, entry: Entry) -> None:
        self.history.append(entry)
        super().deliver(entry)

    def complete(self, id: str, value: Any = None, *, after: float = 0) -> None:
        self._settle(self.pending[id], value, ok=True, after=after)

    def fail(self, id: str, value: Any = "failed") -> None:
        self._settle(self.pending[id], value, ok=False)

    def request_cancel(self, reason: str = "stop") -> None:
        self.deliver(Entry(self.length + 1, EntryKind.CANCEL, "", reason, ok=True, at=self.now))

    def _settle(self, command: Command, value: Any, *, ok: bool, after: float = 0) -> None:
        at = max(self.now + int(after * MICROSECONDS), command.due or 0)
        recorded = b"" if command.kind is EntryKind.TIMER else msgspec.json.encode(value)
        self.deliver(
            Entry(self.length + 1, command.kind, command.id, command.name, ok, at, input=command.input, value=recorded)
        )

    # Leaving

    def drop(self) -> None:
        super().drop()
        self._flow.execution = None  # as the engine does: the code's context would keep the execution alive


def started(body: Body, history: Sequence[Entry] = ()) -> Incarnation:
    run = Incarnation(body, history)
    run.start()
    return run


@contextmanager
def running(body: Body, history: Sequence[Entry] = ()) -> Iterator[Incarnation]:
    run = Incarnation(body, history)
    try:
        run.start()
        yield run
    finally:
        run.drop()
