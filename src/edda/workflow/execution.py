"""One incarnation of a run: its code, replayed from the history, then driven on entry by entry.

There is one way in, `deliver`: append one entry, run to idle. What the code asks for comes out as commands.
No I/O and no clock here, so the same history always gives the same commands, values and order.
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

from edda.core.model import MICROSECONDS, Entry, EntryKind
from edda.errors import NonDeterminismError, NotAwaitedError, NotInWorkflowError, ParkedError

from . import asyncio_patches  # noqa: F401 - the workflow loop is deterministic only with it
from .compensation import Compensator
from .loop import SuspendedCall, TaskPath, TimerHandle, WorkflowFuture, WorkflowLoop, WorkflowTask

STOPS = (EntryKind.CANCEL, EntryKind.TIMEOUT, EntryKind.LIMIT)
"""They cancel the workflow's code."""
_NO_COMMAND_KINDS = (*STOPS, EntryKind.LATE, EntryKind.HEARTBEAT, EntryKind.STRAY, EntryKind.REJECTED, EntryKind.RECUR)
"""They end no command that is pending; the last three move no code at all."""

_INTERMEDIATE = {(EntryKind.RETRY, EntryKind.STEP), (EntryKind.START, EntryKind.CHILD)}
"""Entries that do not end the command they are for."""

_EDDA = os.path.dirname(os.path.dirname(__file__))
_CALLER = 3
"""Frames from the user's line to `Execution.call`: the verb and one function of ours are in between."""


class RecurRequested(BaseException):
    """The workflow wants to begin anew, with this input. Not an error: do not catch it."""

    def __init__(self, input: bytes) -> None:
        super().__init__("the workflow begins anew")
        self.input = input


class IdleState(Enum):
    """Where a run stands when nothing in it can go on by itself."""

    DONE = "done"
    BUSY = "busy"
    """Something in memory is on its way: a step's body."""
    WAITING = "waiting"
    """Only durable things are awaited: it can leave memory."""
    STUCK = "stuck"
    """Nothing is on its way, and it is not done."""


class Command:
    """One durable thing the code asked for."""

    __slots__ = (
        "after_entry",
        "attempt",
        "call",
        "check_only",
        "context",
        "decode",
        "due",
        "future",
        "handle",
        "id",
        "input",
        "is_replay",
        "issued_at",
        "kind",
        "last_heartbeat",
        "name",
        "retry_at",
        "started",
        "target",
        "undo",
    )

    def __init__(self, kind: EntryKind, id: str, name: str, input: bytes, decode: Callable[[Entry], Any]) -> None:
        self.kind = kind
        self.id = id
        self.name = name
        self.input = input
        self.decode = decode
        self.call: Any = None
        """What the driver needs to carry it out; the execution does not look at it."""
        self.undo: Any = None
        """How to undo it once it is done; None if there is no way."""
        self.due: int | None = None
        self.attempt = 1
        self.retry_at: int | None = None
        self.after_entry = 0
        """How many entries must be durable before it may have an effect."""
        self.issued_at = 0
        self.context: Context | None = None
        """What the body of a step runs in; nothing else has one."""
        self.future: WorkflowFuture | None = None
        self.handle: TimerHandle | None = None
        self.last_heartbeat: bytes | None = None
        """What was recorded of it so far: how far an earlier attempt had come, or which run was started."""
        self.is_replay = False
        """Issued on replay: what it asks for may have been done before."""
        self.target: str | None = None
        """The run whose end it waits for."""
        self.check_only = False
        """Asked only to know whether it happened."""
        self.started = False
        """That run exists, and will tell."""

    @property
    def is_uncertain(self) -> bool:
        """Whether it may have to be undone though it failed: its body may have gone on after it was given up."""
        return self.undo is not None and bool(self.call.has_timeout)

    def __repr__(self) -> str:
        return f"{self.kind} {self.id!r}"


def _nothing(_entry: Entry) -> None:
    return None


class Execution:
    """`main` is called with the execution's loop current; its result or error is the run's outcome."""

    def __init__(
        self,
        name: str,
        main: Callable[[], Coroutine[Any, Any, Any]],
        history: Sequence[Entry] = (),
        *,
        started_at: int = 0,
        resumed: bool = False,
        outside: asyncio.AbstractEventLoop | None = None,
        on_abandon: Callable[[Command], None] = lambda command: None,
        same: Callable[[bytes, bytes], bool] = bytes.__eq__,
        encode: Callable[[Any], bytes] = lambda result: b"",
    ) -> None:
        self.name = name
        self.length = 0
        """Entries delivered so far."""
        self.pending: dict[str, Command] = {}
        self.issued: list[Command] = []
        """New commands the driver has not seen yet."""
        self._unawaited: dict[Command, tuple[Coroutine[Any, Any, Any], CodeType, int]] = {}
        """Called and not awaited so far, with the place of the call."""
        self.unfinished: tuple[str, ...] = ()
        """Steps that tasks were still waiting for when the workflow's function returned."""
        self.in_memory = 0
        """Pending commands that die with the process."""
        self.cancelled_children: set[str] = set()
        """Runs that were cancelled with their step here, and have not ended yet."""
        self.undoing = Compensator()
        self.late_cancel: str | None = None
        """Why it was cancelled, if that was when its code was done already."""
        self.replaying = resumed
        """Until it stands where it stood: the code behind the last entry was run before, too."""
        self.now = started_at
        self.loop = WorkflowLoop(self, started_at / MICROSECONDS, name, outside)
        self.on_abandon = on_abandon
        self.on_replayed: Callable[[Command, Entry], None] | None = None
        self._main = main
        self._same = same
        """Whether two arguments that differ in their bytes are the same: encryption makes them differ each time."""
        self._encode = encode
        self.value = b""
        """The result as it is stored. A run whose result cannot be stored fails, and is undone."""
        self._history = history
        self._root: WorkflowTask | None = None

    # Driving

    def start(self) -> None:
        """Replay the whole history; the run then stands where it stood."""
        self._root = self.loop.add_task(self._run(), self.loop.root, "workflow")
        hooks = self.loop.enter()
        try:
            self.loop.run_to_idle()
            while self.length < len(self._history):
                self._apply(self._history[self.length])
                self.loop.run_to_idle()  # after EVERY entry, as it was live
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
        """The result of a run that is done, or its error raised."""
        assert self._root is not None
        return self._root.result()

    def drop(self) -> None:
        """Leave memory. Always called at the end, whatever the end was."""
        self.loop.drop()
        for command in self.pending.values():
            if command.handle is not None:
                command.handle.cancel()  # its callback may refer to it: `as_completed` and its time-out do
            command.handle = command.future = command.call = command.context = None
        self.pending.clear()
        self.issued.clear()
        for awaiting, *_ in self._unawaited.values():
            awaiting.close()  # else Python warns of `_await_command`, a name that no user wrote
        self._unawaited.clear()
        self._root = None

    # What the code calls

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
        """A plain function: the id is taken when the verb is CALLED, in the caller's branch; awaited maybe later."""
        loop = self.loop
        if loop.is_suspending or loop.is_closing_generator:
            return SuspendedCall(loop)
        task = asyncio.current_task(loop) if loop.thread == get_ident() else None
        if type(task) is not WorkflowTask:
            raise NotInWorkflowError(
                f"{name} was called outside the branches of its workflow ({self.name}): call it in the workflow's own "
                "code, not in a callback, a thread or a Task made by hand."
            )
        command = Command(kind, id or task.branch.next_id(label or name), name, input, decode)
        command.call, command.due = call, due
        if call is not None and kind is EntryKind.STEP:
            command.undo = call.undo
        awaiting, caller = self._await_command(command), sys._getframe(_CALLER)
        if target is not None:
            command.target = target(command.id)
            if caller.f_back is not None and caller.f_code.co_filename.startswith(_EDDA):
                caller = caller.f_back  # `order.start` is one call more than `order.options(...).start`
        self._unawaited[command] = (awaiting, caller.f_code, caller.f_lasti)
        return awaiting

    def reissue(self, command: Command) -> Coroutine[Any, Any, Any]:
        """Ask once more for what was abandoned."""
        again = Command(command.kind, command.id, command.name, command.input, command.decode)
        again.call, again.undo = command.call, command.undo
        again.last_heartbeat, again.attempt = command.last_heartbeat, command.attempt
        again.is_replay = again.check_only = True
        return self._await_command(again)

    @property
    def is_at_root(self) -> bool:
        return self.loop.thread == get_ident() and asyncio.current_task(self.loop) is self._root

    def set_timer(self, branch: TaskPath, handle: TimerHandle) -> None:
        command = Command(EntryKind.TIMER, branch.next_id("timer"), "timer", b"", _nothing)
        command.due = _due(handle.when())
        command.handle = handle
        handle.abandon = lambda: self._cancel_command(command)
        self._register(command)

    def cancel(self, message: str | None = None) -> None:
        assert self._root is not None
        if not self.undoing.has_begun:
            self._root.cancel(message)

    async def _run(self) -> Any:
        recurrence: RecurRequested | None = None
        try:
            try:
                result = await self._main()
                self.unfinished = self._steps_under_way()
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
            if not self.loop.is_suspending and self.undoing.is_needed:
                await self.undoing.run(self, failure)
            raise
        finally:
            recurrence = None  # it and its traceback would keep this frame, and the frame would keep it

    def _steps_under_way(self) -> tuple[str, ...]:
        if not self.pending and not self._unawaited:
            return ()
        commands = (*self.pending.values(), *self._unawaited)
        return tuple(command.id for command in commands if command.kind is EntryKind.STEP)

    def _refuse_forgotten(self) -> None:
        """A call that nothing awaited did nothing: a run that is completed without it would hide that."""
        forgotten = [
            f"{command.id}{_place(code, offset)}"
            for command, (awaiting, code, offset) in self._unawaited.items()
            if getcoroutinestate(awaiting) == CORO_CREATED
        ]
        if forgotten:
            raise NotAwaitedError(
                f"the workflow's function returned without awaiting {', '.join(forgotten)}, so it was never done: "
                "write `await` before the call, or await the coroutine that the call returned"
            )

    async def _cancel_leftovers(self) -> None:
        """As `asyncio.run` does: branches left over are cancelled in order of creation, and awaited."""
        me = asyncio.current_task()
        left = [t for t in self.loop.tasks.values() if t is not me and not t.done()]
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
            command.future = None  # or an error, its traceback, this frame and the future would keep each other alive

    def _take_next_entry(self, command: Command) -> tuple[Any] | None:
        """The replay's short cut: nothing else can run and the next entry would wake just this branch."""
        if self.loop.ready or self.length >= len(self._history):
            return None
        entry = self._history[self.length]
        if entry.step != command.id or entry.kind != command.kind or not entry.ok:
            return None
        if not self._matches(command, entry):
            return None  # the slow way names the difference, where the workflow's code cannot catch it
        task = asyncio.current_task(self.loop)
        if task is None or task.cancelling() or command.id in self.pending:
            return None
        try:
            value = command.decode(entry)
        except Exception:  # a value that cannot be read: `_wake` meets it again, where the code cannot catch it
            return None
        command.issued_at = self.now
        self.loop.next_number()  # the future that was not made: numbers stay the same
        self._advance(entry)
        if command.undo is not None:
            self.undoing.on_outcome(command, entry)
        if self.on_replayed is not None:
            self.on_replayed(command, entry)
        return (value,)

    def _register(self, command: Command) -> None:
        if command.id in self.pending:
            raise NonDeterminismError(
                f"run {self.name}: two steps with the id {command.id!r} are pending at once. Give each call its own "
                "activity_id, or leave the ids to Edda."
            )
        command.after_entry = self.length
        command.issued_at = self.now
        if self.replaying:
            command.is_replay = True
        if command.undo is not None:
            self.undoing.track(command)
        if command.kind is EntryKind.STEP:
            command.context = copy_context()
            self.in_memory += 1
        self.pending[command.id] = command
        self.issued.append(command)

    def _cancel_command(self, command: Command) -> None:
        if self.loop.is_suspending or self.pending.get(command.id) is not command:
            return
        self._remove(command)
        self.undoing.abandon(command)
        self.on_abandon(command)

    def _remove(self, command: Command) -> None:
        del self.pending[command.id]
        if command.context is not None:
            self.in_memory -= 1

    # The one way in

    def _advance(self, entry: Entry) -> None:
        self.length += 1
        if entry.at > self.now:
            self.now = entry.at
            self.loop.now = entry.at / MICROSECONDS

    def _apply(self, entry: Entry) -> None:
        is_replay = self.replaying
        self._advance(entry)
        if entry.kind in _NO_COMMAND_KINDS:
            self._apply_apart(entry)
            return
        command = self._expected(entry)
        if entry.kind is not command.kind:
            self._apply_partial(command, entry)
            return
        self._remove(command)
        if command.undo is not None:
            self.undoing.on_outcome(command, entry)
        if is_replay and self.on_replayed is not None:
            self.on_replayed(command, entry)
        self._wake(command, entry)

    def _apply_apart(self, entry: Entry) -> None:
        if entry.kind in STOPS:
            if entry.kind is EntryKind.CANCEL and self.idle is IdleState.DONE:
                self.late_cancel = entry.name
            self.cancel(entry.name or None)
        elif entry.kind is EntryKind.LATE:
            self.cancelled_children.discard(entry.name)
            self.undoing.on_late_outcome(entry)
        elif entry.kind is EntryKind.HEARTBEAT:
            self._apply_heartbeat(entry)

    def _apply_partial(self, command: Command, entry: Entry) -> None:
        if entry.kind is EntryKind.RETRY:
            command.attempt = entry.attempt + 1
            command.retry_at = entry.at
        else:
            command.started, command.last_heartbeat = True, entry.value

    def _apply_heartbeat(self, entry: Entry) -> None:
        command = self.pending.get(entry.step)
        if command is not None:
            command.last_heartbeat = entry.value

    def _expected(self, entry: Entry) -> Command:
        command = self.pending.get(entry.step)
        if command is None or (command.kind is not entry.kind and (entry.kind, command.kind) not in _INTERMEDIATE):
            self._refuse(entry)
        if not self._matches(command, entry):
            self._refuse_arguments(command, entry)
        return command

    def _refuse(self, entry: Entry) -> NoReturn:
        nothing = "nothing: it is done" if self.idle is IdleState.DONE else "nothing that is recorded"
        waits = ", ".join(map(repr, self.pending.values())) or nothing
        raise NonDeterminismError(
            f"run {self.name}, entry {entry.seq}: the history has {entry.kind} {entry.step!r} here, the code waits "
            f"for {waits}. The workflow's code changed while the run was under way: restore the steps that were "
            "recorded, in their order, and the run goes on."
        )

    def _matches(self, command: Command, entry: Entry) -> bool:
        if entry.name != command.name:
            return False
        return entry.input == command.input or entry.kind is EntryKind.RETRY or self._same(entry.input, command.input)

    def _refuse_arguments(self, command: Command, entry: Entry) -> NoReturn:
        raise NonDeterminismError(
            f"run {self.name}, entry {entry.seq}: the history has {entry.step!r} = {entry.name} with arguments "
            f"{_shown(entry.input)}, the code calls {command.name} with {_shown(command.input)}. Arguments must come "
            "from the workflow's input and from recorded steps: use ctx.now(), ctx.uuid4() and ctx.random(), or move "
            "the difference into an activity."
        )

    def _wake(self, command: Command, entry: Entry) -> None:
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


def _due(when: float) -> int:
    """Rounded late: on the loop's own clock, a float, a timer is never early."""
    due = -int(-when * MICROSECONDS // 1)
    return due if due / MICROSECONDS >= when else due + 1


def _place(code: CodeType, offset: int) -> str:
    """Where an instruction stands in the user's file."""
    if code.co_filename.startswith(_EDDA):
        return ""
    line = next((line for start, end, line in code.co_lines() if start <= offset < end), None)
    return f" ({code.co_filename}:{line or code.co_firstlineno})"


def _shown(data: bytes, most: int = 120) -> str:
    text = data.decode("utf-8", "replace")
    return text if len(text) <= most else text[:most] + "…"
