"""The event loop of one run: deterministic, without I/O, with durable timers.

Workflow code runs on a loop of its own so that `gather`, `TaskGroup`, `wait`, `timeout`, `Queue` and the
rest work as people write them and always in the same order: callbacks are first in, first out, time
stands still between two entries of the history, sets of tasks iterate in order of creation, and every
timer is a durable command. The real loop runs it in slices, from one idle point to the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio import _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVarTuple, Unpack

from edda.errors import NotInWorkflowError, SpinError

from .suspension import Suspended, close_generator, close_if_fresh, unwind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

_NOT_THE_USERS = (os.path.dirname(asyncio.__file__), os.path.dirname(os.path.dirname(__file__)))

MOST_CALLBACKS = 200_000
"""In one slice; more is a loop that waits for nothing."""


class TaskPath:
    """A task's place in the run: the path its steps' ids begin with, and how often each name was used."""

    __slots__ = ("counts", "path")

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.counts: dict[str, int] = {}

    def next_id(self, name: str) -> str:
        count = self.counts[name] = self.counts.get(name, 0) + 1
        return f"{self.path}{name}:{count}"


class Handle:
    """A callback in the queue; the little of `asyncio.Handle` that asyncio's own code uses."""

    __slots__ = ("args", "callback", "context")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context if context is not None else copy_context()

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None


class TimerHandle(Handle):
    """What `call_later` gives back: a durable timer, abandoned when it is cancelled."""

    __slots__ = ("_when", "abandon")

    def __init__(self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None):
        super().__init__(callback, args, context)
        self._when = when
        self.abandon: Callable[[], None] | None = None

    def when(self) -> float:
        return self._when

    def cancel(self) -> None:
        super().cancel()
        if self.abandon is not None:
            self.abandon()
            self.abandon = None


class WorkflowFuture(asyncio.Future[Any]):
    """Hashes by its number, so that sets iterate in order of creation and not by address."""

    number: int

    def __hash__(self) -> int:
        return self.number


class WorkflowTask(asyncio.Task[Any]):
    """A branch of a run; numbered like its futures."""

    number = 0

    def __init__(self, coro: Coroutine[Any, Any, Any], loop: WorkflowLoop, branch: TaskPath, name: str, context: Any):
        self.branch = branch
        self.context = context if context is not None else copy_context()  # asyncio's own is out of reach before 3.12
        # asyncio keeps all tasks of the process in one set, by the hash of this moment: it must not be the number yet,
        # or the first task of every run in memory would collide with those of all others.
        super().__init__(coro, loop=loop, name=name, context=self.context)
        self.number = loop.next_number()
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self.number or object.__hash__(self)


class SuspendedCall(Coroutine[Any, Any, Any]):
    """What a verb gives back while the run leaves memory; unlike a real coroutine it may be left unawaited."""

    __slots__ = ("_loop",)

    def __init__(self, loop: WorkflowLoop) -> None:
        self._loop = loop

    def __await__(self) -> Generator[None, None, NoReturn]:
        while self._loop.ignores_suspend:
            yield
        self._loop.raise_suspended()

    def send(self, value: Any) -> NoReturn:
        self._loop.raise_suspended()

    def throw(self, *error: Any) -> NoReturn:
        raise error[0]

    def close(self) -> None:
        pass


class TimerFactory(Protocol):
    """Who keeps the run's commands."""

    replaying: bool

    def set_timer(self, branch: TaskPath, handle: TimerHandle) -> None: ...


def _refuse(method: str) -> Any:
    def refuse(self: WorkflowLoop, *_args: Any, **_options: Any) -> NoReturn:
        error = NotInWorkflowError(
            f"{method}() was called in the body of a workflow ({self.name}). Real I/O, threads, processes and "
            "signals cannot be replayed: do it in an @activity, or in an inline step, `await ctx.step(name, fn)`."
        )
        self.forbidden_call = self.forbidden_call or error
        raise error

    refuse.__name__ = method
    return refuse


def _place(coro: Any) -> str:
    """The innermost line of the user's own: a task's stack shows its outermost coroutine only."""
    place = "not started"
    while coro is not None:
        frame = getattr(coro, "cr_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        coro = getattr(coro, "cr_await", None)
    return place


class WorkflowLoop(asyncio.AbstractEventLoop):
    def __init__(
        self, owner: TimerFactory, now: float, name: str, outside: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.owner: TimerFactory | None = owner
        self.real_loop = outside
        """The loop that is running around every slice; asking for it each time costs a system call before 3.12."""
        self.name = name
        self.now = now
        self.root = TaskPath()
        self.ready: deque[Handle] = deque()
        self.tasks: dict[int, WorkflowTask] = {}
        self.thread: int | None = None
        self.is_suspending = False
        """The run leaves memory: nothing works any more."""
        self.is_closing_generator = False
        """An abandoned generator is closed: verbs raise, callbacks work (it may release a lock)."""
        self.forbidden_call: NotInWorkflowError | None = None
        """The first forbidden call; kept because code may swallow the error."""
        self._numbers = 0
        self._raised = 0
        self._prune_at = 50

    # What asyncio's own code calls

    def time(self) -> float:
        """The time of the last entry: the same on replay."""
        return self.now

    def call_soon(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None) -> Any:
        handle = Handle(callback, args, context)
        if not self.is_suspending:
            self.ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> Any:
        if when <= self.now:
            return self.call_soon(callback, *args, context=context)
        handle = TimerHandle(when, callback, args, context)
        if not self.is_suspending and self.owner is not None:
            self.owner.set_timer(self.current_branch(), handle)
        return handle

    def create_future(self) -> WorkflowFuture:
        if (self.is_suspending or self.is_closing_generator) and not self.ignores_suspend:
            self.raise_suspended()  # TaskGroup.__aexit__ and Condition.wait would wait for ever
        future = WorkflowFuture(loop=self)
        self._numbers += 1
        future.number = self._numbers
        return future

    def create_task(  # newer Pythons pass options of their own, such as eager_start, which are ignored on purpose
        self, coro: Any, *, name: str | None = None, context: Context | None = None, **_options: Any
    ) -> WorkflowTask:
        if self.is_suspending or self.is_closing_generator:
            coro.close()
            if self.is_closing_generator and not self.is_suspending:
                self.raise_suspended()
            # Not raised: the other coroutines in the `gather` of a `finally` would warn that nobody awaited them.
            return self.add_task(SuspendedCall(self), TaskPath(), "leaving")
        path = self.current_branch().next_id(getattr(coro, "__name__", type(coro).__name__))
        # Unnamed tasks get the path: a process-wide "Task-4711" would leak into texts, and texts into arguments.
        return self.add_task(coro, TaskPath(path + "/"), name or path, context)

    def add_task(self, coro: Any, branch: TaskPath, name: str, context: Context | None = None) -> WorkflowTask:
        task = WorkflowTask(coro, self, branch, name, context)
        self.tasks[task.number] = task
        if len(self.tasks) > self._prune_at:  # cheaper than a done callback for each
            self.tasks = {number: t for number, t in self.tasks.items() if not t.done()}
            self._prune_at = 2 * len(self.tasks) + 50
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def get_task_factory(self) -> None:
        return None

    def get_exception_handler(self) -> None:
        return None

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_suspending and self.owner is not None and not self.owner.replaying:
            logger.error("run %s: %s", self.name, context.get("message"), exc_info=context.get("exception"))

    async def shutdown_asyncgens(self) -> None:
        pass

    def _timer_handle_cancelled(self, handle: Any) -> None:
        pass

    # The run's side

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def current_branch(self) -> TaskPath:
        task = asyncio.current_task(self)
        return task.branch if isinstance(task, WorkflowTask) else self.root

    def raise_suspended(self) -> NoReturn:
        self._raised += 1
        raise Suspended("the run leaves memory")

    @property
    def ignores_suspend(self) -> bool:
        """Code that catches `Suspended` and asks again, over and over, must be made to yield instead."""
        return self._raised > 1000

    def enter(self) -> Any:
        """Make this the running loop; `leave` puts back what was there."""
        hooks = sys.get_asyncgen_hooks()
        _set_running_loop(self)
        self.thread = get_ident()
        sys.set_asyncgen_hooks(None, self._close_abandoned)
        return hooks

    def leave(self, hooks: Any) -> None:
        sys.set_asyncgen_hooks(*hooks)
        _set_running_loop(self.real_loop)
        self.thread = None

    def run_to_idle(self) -> None:
        ready, count = self.ready, 0
        while ready:
            handle = ready.popleft()
            callback = handle.callback
            if callback is None:
                continue
            try:
                handle.context.run(callback, *handle.args)
            except KeyboardInterrupt:
                raise
            except SystemExit:
                pass  # a task re-raises it after keeping it as its outcome: it ends the run, not the worker
            except BaseException as error:  # as asyncio does: a callback's error is reported, the loop goes on
                self.call_exception_handler({"message": f"exception in {callback!r}", "exception": error})
            count += 1
            if count > MOST_CALLBACKS:
                raise SpinError(
                    f"run {self.name}: {MOST_CALLBACKS} callbacks without waiting for anything durable. A loop such "
                    "as `while not done: await asyncio.sleep(0)` never ends here: wait for an asyncio.Event, a "
                    "timer or a step instead."
                )

    def stacks(self) -> str:
        """Where each unfinished branch stands, for people."""
        lines = []
        for task in self.tasks.values():
            if not task.done():
                lines.append(f"{task.get_name()} at {_place(task.get_coro())}")
        return "; ".join(lines)

    def _close_abandoned(self, generator: AsyncGenerator[Any, Any]) -> None:
        before, self.is_closing_generator = self.is_closing_generator, True
        try:
            close_generator(generator)
        finally:
            self.is_closing_generator = before

    def drop(self) -> None:
        """Unwind every branch, newest first, and break the cycles, so that reference counts free it all."""
        self.is_suspending = True
        self.ready.clear()
        hooks = self.enter()
        try:
            for task in reversed([t for t in self.tasks.values() if not t.done()]):
                self._unwind_task(task)
            for task in self.tasks.values():
                self._break_cycles(task)
        finally:
            self.leave(hooks)
        self.tasks.clear()
        self.ready.clear()
        self.owner = None

    def _unwind_task(self, task: WorkflowTask) -> None:
        coro: Any = task.get_coro()
        if getattr(coro, "cr_frame", None) is None or close_if_fresh(coro):
            return
        task.context.run(unwind, coro)

    def _break_cycles(self, future: Any) -> None:
        """Cut the callbacks, also of what it waits for: a cancelled `gather` keeps its own till its branches end."""
        for callback, _ in future._callbacks or ():
            future.remove_done_callback(callback)
        for below in (getattr(future, "_fut_waiter", None), *getattr(future, "_children", ())):
            if below is not None and below._callbacks:
                self._break_cycles(below)

    # What cannot be replayed

    run_in_executor = _refuse("run_in_executor")
    create_connection = _refuse("create_connection")
    create_server = _refuse("create_server")
    create_unix_connection = _refuse("create_unix_connection")
    create_unix_server = _refuse("create_unix_server")
    create_datagram_endpoint = _refuse("create_datagram_endpoint")
    getaddrinfo = _refuse("getaddrinfo")
    getnameinfo = _refuse("getnameinfo")
    sock_recv = _refuse("sock_recv")
    sock_recv_into = _refuse("sock_recv_into")
    sock_recvfrom = _refuse("sock_recvfrom")
    sock_recvfrom_into = _refuse("sock_recvfrom_into")
    sock_connect = _refuse("sock_connect")
    sock_sendall = _refuse("sock_sendall")
    sock_sendto = _refuse("sock_sendto")
    sock_sendfile = _refuse("sock_sendfile")
    sock_accept = _refuse("sock_accept")
    add_reader = _refuse("add_reader")
    remove_reader = _refuse("remove_reader")
    add_writer = _refuse("add_writer")
    remove_writer = _refuse("remove_writer")
    subprocess_exec = _refuse("subprocess_exec")
    subprocess_shell = _refuse("subprocess_shell")
    connect_read_pipe = _refuse("connect_read_pipe")
    connect_write_pipe = _refuse("connect_write_pipe")
    connect_accepted_socket = _refuse("connect_accepted_socket")
    add_signal_handler = _refuse("add_signal_handler")
    remove_signal_handler = _refuse("remove_signal_handler")
    call_soon_threadsafe = _refuse("call_soon_threadsafe")
    start_tls = _refuse("start_tls")
    sendfile = _refuse("sendfile")
    set_task_factory = _refuse("set_task_factory")
    set_default_executor = _refuse("set_default_executor")
    set_debug = _refuse("set_debug")
    set_exception_handler = _refuse("set_exception_handler")
    run_forever = _refuse("run_forever")
    run_until_complete = _refuse("run_until_complete")
    stop = _refuse("stop")
    close = _refuse("close")
    shutdown_default_executor = _refuse("shutdown_default_executor")
