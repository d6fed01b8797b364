"""Execution: the code of one run in memory. It replays the history, then continues with each new entry.

Entries go in, commands come out:

- Each durable call of the code (a step, a timer, a wait, a child) becomes a `Command`: pending under its id, with a
  future that the calling task awaits. The engine takes new commands from `take_issued` and carries them out.
- `deliver` is the only input. It applies one history entry: the pending command with the entry's id gets its outcome,
  and `WorkflowLoop.run_to_idle` runs the code until all its tasks wait again.
- `start` does the same with all recorded entries. A command that a later entry answers is never seen by the engine.

There is no I/O and no clock here, so the same history always gives the same commands, values and order. A history that
does not fit the code is noticed when an entry has no matching pending command: `NonDeterminismError`, and the run is
parked.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from enum import Enum
from inspect import CORO_CREATED, getcoroutinestate
from threading import get_ident
from types import CodeType
from typing import Any, NoReturn

from msgspec import Struct

from edda.core.model import MICROSECONDS, Entry, EntryKind
from edda.core.value_path import truncate
from edda.errors import NonDeterminismError, NotAwaitedError, NotInWorkflowError, ParkedError

from .compensation import Compensator
from .loop import SuspendedCall, TaskPath, WorkflowFuture, WorkflowLoop, WorkflowTask, WorkflowTimerHandle

STOPS = (EntryKind.CANCEL, EntryKind.TIMEOUT, EntryKind.LIMIT)
"""Entries that cancel the workflow's main task."""
_NO_COMMAND_KINDS = (
    *STOPS,
    EntryKind.LATE,
    EntryKind.HEARTBEAT,
    EntryKind.LATE_EVENT,
    EntryKind.REJECTED,
    EntryKind.RECUR,
)
"""Entries without a pending command; the last three have no effect on the code at all."""

_INTERMEDIATE = {(EntryKind.RETRY, EntryKind.STEP), (EntryKind.START, EntryKind.CHILD)}
"""Kinds of an entry and of its command, if the entry leaves the command pending."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_CALLER_DEPTH = 3
"""Frames from `Execution.call` up to the user's line: `call`, the public function and one helper are in between."""


class RecurRequested(BaseException):
    """Raised by `ctx.recur`: the workflow starts again with this input. Not an error: do not catch it."""

    def __init__(self, input: bytes) -> None:
        super().__init__("the workflow starts again with new input")
        self.input = input


class IdleState(Enum):
    """Why the loop is idle after an entry."""

    DONE = "done"
    BUSY = "busy"
    """An activity runs in this process: the run stays in memory."""
    WAITING = "waiting"
    """All pending commands are durable (timers, events, children): the run can leave memory."""
    STUCK = "stuck"
    """The code is not done and no command is pending: a deadlock."""


class Command(Struct, eq=False):
    """A durable call of the code whose outcome is not recorded yet."""

    kind: EntryKind
    id: str
    name: str
    input: bytes
    decode: Callable[[Entry], Any]
    call: Any = None
    """What the engine needs to carry it out, such as an `ActivityCall`; opaque here."""
    undo: Any = None
    """The bound compensation of a step; None without one."""
    due: int | None = None
    attempt: int = 1
    retry_at: int | None = None
    after_entry: int = 0
    """The number of entries that must be committed before it may have an effect."""
    issued_at: int = 0
    context: Context | None = None
    """The contextvars context that a step's function runs in; None for other commands."""
    future: WorkflowFuture | None = None
    handle: WorkflowTimerHandle | None = None
    last_heartbeat: bytes | None = None
    """The last recorded details: of a step's heartbeat, or of the started child."""
    is_replay: bool = False
    """Issued during replay: an earlier process may have carried it out already."""
    target: str | None = None
    """The id of the run whose end it waits for."""
    check_only: bool = False
    """Issued by `reissue`: only `reconcile` is called, to learn whether the step took effect."""
    started: bool = False
    """The target run exists, and will notify this one when it ends."""

    @property
    def is_uncertain(self) -> bool:
        """Whether it may need a compensation although it failed: after a time-out its function may have continued."""
        return self.undo is not None and bool(self.call.has_timeout)

    def __repr__(self) -> str:
        return f"{self.kind} {self.id!r}"


def _nothing(_entry: Entry) -> None:
    return None


class Execution:
    """Runs `main`, the workflow's coroutine function, on a `WorkflowLoop`; its result or error is the run's outcome.

    `on_abandon` is called with each command that the code cancelled. `same` compares stored arguments that differ in
    their bytes: encryption gives other bytes each time. `encode` stores the result.
    """

    def __init__(
        self,
        name: str,
        main: Callable[[], Coroutine[Any, Any, Any]],
        history: Sequence[Entry] = (),
        *,
        started_at: int = 0,
        resumed: bool = False,
        real_loop: asyncio.AbstractEventLoop | None = None,
        on_abandon: Callable[[Command], None] = lambda command: None,
        same: Callable[[bytes, bytes], bool] = bytes.__eq__,
        encode: Callable[[Any], bytes] = lambda result: b"",
    ) -> None:
        self.name = name
        self.length = 0
        """Entries delivered so far."""
        self.pending: dict[str, Command] = {}
        self.issued: list[Command] = []
        """New commands that `take_issued` has not returned yet."""
        self._unawaited: dict[Command, tuple[Coroutine[Any, Any, Any], CodeType, int]] = {}
        """Calls whose coroutine was not awaited yet, with the code object and instruction offset of the caller."""
        self.unfinished: tuple[str, ...] = ()
        """Steps that tasks were still waiting for when the workflow's function returned."""
        self.in_memory = 0
        """Pending steps: their activities run in this process, and end with it."""
        self.cancelled_children: set[str] = set()
        """Child runs whose command was cancelled, and whose end is not recorded yet."""
        self.compensator = Compensator()
        self.late_cancel: str | None = None
        """The reason of a cancellation that was recorded after the code was done."""
        self.replaying = resumed
        """True until `start` returns: the code after the last entry ran before as well."""
        self.now = started_at
        self.loop = WorkflowLoop(self, started_at / MICROSECONDS, name, real_loop)
        self.on_abandon = on_abandon
        self.on_replayed: Callable[[Command, Entry], None] | None = None
        self._main = main
        self._same = same
        self._encode = encode
        self.value = b""
        """The encoded result. Encoded within the run, so that a result that cannot be stored fails it and starts its
        compensations."""
        self._history = history
        self._root: WorkflowTask | None = None

    # Called by the engine

    def start(self) -> None:
        """Run the code and apply the whole history; all tasks then wait where they waited before."""
        self._root = self.loop.add_task(self._run(), self.loop.root, "workflow")
        hooks = self.loop.enter()
        try:
            self.loop.run_to_idle()
            while self.length < len(self._history):
                self._apply(self._history[self.length])
                self.loop.run_to_idle()  # after each entry, as `deliver` did: else tasks would run in another order
        finally:
            self.loop.leave(hooks)
        self.replaying = False
        self._history = ()

    def deliver(self, entry: Entry) -> None:
        self._apply(entry)
        hooks = self.loop.enter()
        try:
            self.loop.run_to_idle()
        finally:
            self.loop.leave(hooks)

    def take_issued(self) -> list[Command]:
        issued, self.issued = self.issued, []
        return issued

    @property
    def idle(self) -> IdleState:
        if self._root is None or self._root.done():
            return IdleState.DONE
        if self.in_memory:
            return IdleState.BUSY
        return IdleState.WAITING if self.pending else IdleState.STUCK

    def outcome(self) -> Any:
        """The result of a run that is done; raises the run's error."""
        assert self._root is not None
        return self._root.result()

    def drop(self) -> None:
        """Unwind the code and free the memory. Called once for every execution, also after its end."""
        self.loop.drop()
        for command in self.pending.values():
            if command.handle is not None:
                command.handle.cancel()  # breaks the cycle of `as_completed` with its time-out callback
            command.handle = command.future = command.call = command.context = None
        self.pending.clear()
        self.issued.clear()
        for awaiting, *_ in self._unawaited.values():
            awaiting.close()  # else Python warns about `_await_command`, a name that users do not know
        self._unawaited.clear()
        self._root = None

    # Called by the workflow's code

    def call(
        self,
        kind: EntryKind,
        name: str,
        input: bytes = b"",
        *,
        decode: Callable[[Entry], Any] = _nothing,
        call: Any = None,
        due: int | None = None,
        id: str | None = None,
        label: str | None = None,
        target: Callable[[str], str] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Create a command; the returned coroutine issues it when it is awaited.

        Not `async`, because the id has to be assigned at the call, by the calling task: `asyncio.gather(a(ctx),
        b(ctx))` awaits each coroutine in a new task, later.
        """
        loop = self.loop
        if loop.is_suspending or loop.is_closing_generator:
            return SuspendedCall(loop)
        task = asyncio.current_task(loop) if loop.thread == get_ident() else None
        if type(task) is not WorkflowTask:
            raise NotInWorkflowError(
                f"{name} was called outside the tasks of its workflow (run {self.name}): call it in the workflow's "
                "function, not in a callback, a thread or an asyncio.Task that was created directly."
            )
        command = Command(kind, id or task.branch.next_id(label or name), name, input, decode, call, due=due)
        if call is not None and kind is EntryKind.STEP:
            command.undo = call.undo
        awaiting, caller = self._await_command(command), sys._getframe(_CALLER_DEPTH)
        if target is not None:
            command.target = target(command.id)
            if caller.f_back is not None and caller.f_code.co_filename.startswith(_PACKAGE):
                caller = caller.f_back  # `order.start` is one frame deeper than `order.options(...).start`
        self._unawaited[command] = (awaiting, caller.f_code, caller.f_lasti)
        return awaiting

    def reissue(self, command: Command) -> Coroutine[Any, Any, Any]:
        """Issue a cancelled step again, to learn from `reconcile` whether it took effect."""
        again = Command(
            *(command.kind, command.id, command.name, command.input, command.decode, command.call, command.undo),
            attempt=command.attempt,
            last_heartbeat=command.last_heartbeat,
            is_replay=True,
            check_only=True,
        )
        return self._await_command(again)

    @property
    def is_at_root(self) -> bool:
        return self.loop.thread == get_ident() and asyncio.current_task(self.loop) is self._root

    def set_timer(self, branch: TaskPath, handle: WorkflowTimerHandle) -> None:
        """Called by `WorkflowLoop.call_at`."""
        # In microseconds, rounded up, so that the timer is not early on the loop's clock, which is a float.
        due = -int(-handle.due * MICROSECONDS // 1)
        if due / MICROSECONDS < handle.due:
            due += 1
        command = Command(EntryKind.TIMER, branch.next_id("timer"), "timer", b"", _nothing, due=due, handle=handle)
        handle.abandon = lambda: self._cancel_command(command)
        self._register(command)

    def cancel(self, message: str | None = None) -> None:
        """Cancel the main task; compensations that have started are not cancelled."""
        assert self._root is not None
        if not self.compensator.has_begun:
            self._root.cancel(message)

    async def _run(self) -> Any:
        recurrence: RecurRequested | None = None
        try:
            try:
                result = await self._main()
                commands = (*self.pending.values(), *self._unawaited)
                self.unfinished = tuple(command.id for command in commands if command.kind is EntryKind.STEP)
            except RecurRequested as wanted:
                recurrence = wanted
            finally:
                if not self.loop.is_suspending:
                    await self._cancel_leftovers()
            if self._unawaited:
                self._refuse_forgotten()
            if recurrence is not None:
                raise recurrence
            self.value = self._encode(result)
            return result
        except (ParkedError, RecurRequested, KeyboardInterrupt):
            raise
        except BaseException as failure:
            if not self.loop.is_suspending and self.compensator.is_needed:
                await self.compensator.run(self, failure)
            raise
        finally:
            recurrence = None  # breaks the cycle: exception, traceback, this frame, exception

    def _refuse_forgotten(self) -> None:
        """Fail the run if a call was not awaited: its step did not run, and a completed run would hide that."""
        forgotten = [
            f"{command.id}{_source_line(code, offset)}"
            for command, (awaiting, code, offset) in self._unawaited.items()
            if getcoroutinestate(awaiting) == CORO_CREATED
        ]
        if forgotten:
            raise NotAwaitedError(
                f"the workflow's function returned without awaiting {', '.join(forgotten)}, so it did not run: "
                "write `await` before the call, or await the coroutine that the call returned"
            )

    async def _cancel_leftovers(self) -> None:
        """Cancel the remaining tasks in order of creation and await them, as `asyncio.run` does."""
        current = asyncio.current_task()
        left = [t for t in self.loop.tasks.values() if t is not current and not t.done()]
        for task in left:
            task.cancel()
        while left := [t for t in left if not t.done()]:
            with suppress(CancelledError):
                await asyncio.wait(left)

    async def _await_command(self, command: Command) -> Any:
        self._unawaited.pop(command, None)
        loop = self.loop
        if loop.is_suspending or loop.is_closing_generator:
            await SuspendedCall(loop)
        if self.replaying:
            taken = self._take_next_entry(command)
            if taken is not None:
                return taken[0]
        command.future = loop.create_future()
        self._register(command)
        try:
            return await command.future
        except CancelledError:
            self._cancel_command(command)
            raise
        finally:
            command.future = None  # breaks the cycle: error, traceback, this frame, command, future

    def _take_next_entry(self, command: Command) -> tuple[Any] | None:
        """The fast path of replay, which skips the future and the loop: if no callback is ready and the next entry is
        the outcome of this command, apply the entry and return its value in a tuple. None: take the general path."""
        if self.loop.ready or self.length >= len(self._history):
            return None
        entry = self._history[self.length]
        if entry.step != command.id or entry.kind != command.kind or not entry.ok:
            return None
        if not self._matches(command, entry):
            return None  # `_apply` then raises the error outside the workflow's code, which could catch it here
        task = asyncio.current_task(self.loop)
        if task is None or task.cancelling() or command.id in self.pending:
            return None
        try:
            value = command.decode(entry)
        except Exception:  # `_complete` then raises the error outside the workflow's code
            return None
        command.issued_at = self.now
        self.loop.last_number += 1  # the number of the skipped future, so that later numbers are the same
        self._advance(entry)
        if command.undo is not None:
            self.compensator.on_outcome(command, entry)
        if self.on_replayed is not None:
            self.on_replayed(command, entry)
        return (value,)

    def _register(self, command: Command) -> None:
        if command.id in self.pending:
            raise NonDeterminismError(
                f"run {self.name}: two steps with the id {command.id!r} are pending at the same time. Give each call "
                "its own activity_id, or leave the ids to Edda."
            )
        command.after_entry = self.length
        command.issued_at = self.now
        if self.replaying:
            command.is_replay = True
        if command.undo is not None:
            self.compensator.is_needed = True
        if command.kind is EntryKind.STEP:
            command.context = copy_context()
            self.in_memory += 1
        self.pending[command.id] = command
        self.issued.append(command)

    def _cancel_command(self, command: Command) -> None:
        if self.loop.is_suspending or self.pending.get(command.id) is not command:
            return
        del self.pending[command.id]
        if command.context is not None:
            self.in_memory -= 1
        if command.undo is not None:
            self.compensator.abandon(command)
        self.on_abandon(command)

    # Applying an entry

    def _advance(self, entry: Entry) -> None:
        self.length += 1
        if entry.at > self.now:
            self.now = entry.at
            self.loop.now = entry.at / MICROSECONDS

    def _apply(self, entry: Entry) -> None:
        self._advance(entry)
        if entry.kind in _NO_COMMAND_KINDS:
            self._apply_without_command(entry)
            return
        command = self.pending.get(entry.step)
        if command is None or (entry.kind is not command.kind and (entry.kind, command.kind) not in _INTERMEDIATE):
            self._refuse(entry)
        if not self._matches(command, entry):
            self._refuse_arguments(command, entry)
        if entry.kind is EntryKind.RETRY:
            command.attempt = entry.attempt + 1
            command.retry_at = entry.at
        elif entry.kind is not command.kind:
            command.started, command.last_heartbeat = True, entry.value
        else:
            self._complete(command, entry)

    def _apply_without_command(self, entry: Entry) -> None:
        if entry.kind in STOPS:
            if entry.kind is EntryKind.CANCEL and self.idle is IdleState.DONE:
                self.late_cancel = entry.name
            self.cancel(entry.name or None)
        elif entry.kind is EntryKind.LATE:
            self.cancelled_children.discard(entry.name)
            self.compensator.on_late_outcome(entry)
        elif entry.kind is EntryKind.HEARTBEAT and (command := self.pending.get(entry.step)) is not None:
            command.last_heartbeat = entry.value

    def _complete(self, command: Command, entry: Entry) -> None:
        """Queue the timer's callback, or set the future that the calling task awaits."""
        del self.pending[command.id]
        if command.context is not None:
            self.in_memory -= 1
        if command.undo is not None:
            self.compensator.on_outcome(command, entry)
        if self.replaying and self.on_replayed is not None:
            self.on_replayed(command, entry)
        if command.handle is not None:
            handle, command.handle = command.handle, None
            handle.abandon = None
            if handle.callback is not None:
                self.loop.ready.append(handle)
        elif command.future is not None and not command.future.done():
            value = command.decode(entry)
            if entry.ok:
                command.future.set_result(value)
            else:
                command.future.set_exception(value)

    def _refuse(self, entry: Entry) -> NoReturn:
        nothing = "nothing: it has returned" if self.idle is IdleState.DONE else "nothing durable"
        waits = ", ".join(map(repr, self.pending.values())) or nothing
        raise NonDeterminismError(
            f"run {self.name}, entry {entry.seq}: the history has {entry.kind} {entry.step!r} here, the code waits "
            f"for {waits}. The workflow's code changed after the run had started: restore the recorded steps in their "
            "order, and the run continues."
        )

    def _matches(self, command: Command, entry: Entry) -> bool:
        if entry.name != command.name:
            return False
        return entry.input == command.input or entry.kind is EntryKind.RETRY or self._same(entry.input, command.input)

    def _refuse_arguments(self, command: Command, entry: Entry) -> NoReturn:
        recorded, given = (truncate(data.decode("utf-8", "replace"), 121) for data in (entry.input, command.input))
        raise NonDeterminismError(
            f"run {self.name}, entry {entry.seq}: the history has {entry.step!r} = {entry.name} with arguments "
            f"{recorded}, the code calls {command.name} with {given}. Compute "
            "arguments from the workflow's input and from recorded steps only: use ctx.now(), ctx.uuid4() and "
            "ctx.random(), or move the code that differs into an activity."
        )


def _source_line(code: CodeType, offset: int) -> str:
    """File and line of an instruction in user code."""
    if code.co_filename.startswith(_PACKAGE):
        return ""
    line = next((line for start, end, line in code.co_lines() if start <= offset < end), None)
    return f" ({code.co_filename}:{line or code.co_firstlineno})"
