"""WorkflowLoop: the deterministic asyncio event loop that the code of one run executes on.

A workflow is an ordinary coroutine with ordinary asyncio: `gather`, `TaskGroup`, `wait`, `timeout`, `Queue`. To replay
it, the order of its callbacks must depend on its history alone. Therefore each run in memory has a loop object of its
own, which differs from asyncio's in five ways:

- It has no selector and no thread. `run_to_idle` pops callbacks from a FIFO queue until the queue is empty, and
  returns. `Execution` calls it once per history entry, inside a callback of the real loop: `enter` makes this loop the
  thread's running loop (`_set_running_loop`), `leave` restores the real one.
- `time()` is the time of the last history entry, and does not change between two entries.
- `call_later` and `call_at` create a durable timer command instead of a heap entry. The callback is queued when the
  timer's entry is delivered.
- Futures and tasks hash by their creation number, so that sets of them iterate in the same order in every process.
- Methods that need I/O, threads, processes or signals raise `NotInWorkflowError`.

A run that only waits for durable things leaves memory: `drop` throws `Suspended` into every unfinished coroutine, so
that `finally` blocks and context managers run, and frees the tasks. Later the run is replayed on a new loop.

Four functions of asyncio whose order depends on memory addresses or on the Python version are replaced when this module
is imported; on other loops the originals run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextvars import Context, copy_context
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVarTuple, Unpack

from msgspec import Struct

from edda.errors import NotInWorkflowError, SpinError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

_LIBRARY_FILES = (os.path.dirname(asyncio.__file__), os.path.dirname(os.path.dirname(__file__)))

MAX_CALLBACKS = 200_000
"""In one `run_to_idle`; more is taken for an endless loop."""
_MAX_THROWS = 100

_stuck: list[object] = []
"""Coroutines that did not end. Kept alive, because their deletion would print "coroutine ignored GeneratorExit"."""


class Suspended(BaseException):
    """The run leaves memory, and continues later in a replay. Not an error: do not catch it."""


class TaskPath(Struct, eq=False):
    """Generates the ids of a task's steps: the task's own path, the name, and how often the task used that name."""

    path: str = ""
    counts: dict[str, int] = {}

    def next_id(self, name: str) -> str:
        count = self.counts[name] = self.counts.get(name, 0) + 1
        return f"{self.path}{name}:{count}"


class Handle(Struct, eq=False):
    """A callback in the queue; has the part of `asyncio.Handle` that asyncio's own code uses."""

    callback: Callable[..., object] | None
    args: tuple[Any, ...]
    context: Context

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None


class WorkflowTimerHandle(Handle, eq=False):
    """Returned by `call_later`: a durable timer; `cancel` also cancels the timer command, through `abandon`."""

    due: float
    abandon: Callable[[], None] | None = None

    def when(self) -> float:
        return self.due

    def cancel(self) -> None:
        super().cancel()
        if self.abandon is not None:
            self.abandon()
            self.abandon = None


class WorkflowFuture(asyncio.Future[Any]):
    """Hashes by its creation number instead of its address, so that sets iterate in the same order on replay."""

    number: int

    def __hash__(self) -> int:
        return self.number


class WorkflowTask(asyncio.Task[Any]):
    """A task of the workflow's code; numbered like the futures."""

    number = 0

    def __init__(self, coro: Coroutine[Any, Any, Any], loop: WorkflowLoop, branch: TaskPath, name: str, context: Any):
        self.branch = branch
        self.context = context if context is not None else copy_context()  # Task.get_context exists since 3.12 only
        # `super().__init__` adds the task to asyncio's process-wide set, by its current hash. That must not be the
        # number yet: task 1 of every run in memory would fall into the same bucket.
        super().__init__(coro, loop=loop, name=name, context=self.context)
        loop.last_number += 1
        self.number = loop.last_number
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self.number or object.__hash__(self)


class SuspendedCall(Coroutine[Any, Any, Any]):
    """Returned by steps and waits while the run leaves memory: awaiting it raises `Suspended`. Python does not warn
    if it is never awaited, unlike for a real coroutine."""

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
    """The `Execution`, as the loop sees it: turns timers into durable commands."""

    replaying: bool

    def set_timer(self, branch: TaskPath, handle: WorkflowTimerHandle) -> None: ...


def _refuse(method: str) -> Any:
    def refuse(self: WorkflowLoop, *_args: Any, **_options: Any) -> NoReturn:
        error = NotInWorkflowError(
            f"{method}() was called in the code of a workflow (run {self.name}). Real I/O, threads, processes and "
            "signals cannot be replayed: do it in an @activity, or in an inline step, `await ctx.step(name, fn)`."
        )
        self.forbidden_call = self.forbidden_call or error
        raise error

    refuse.__name__ = method
    return refuse


def _innermost_line(coro: Any) -> str:
    """The innermost line of user code that a coroutine waits at: `Task.get_stack` has the outermost frame only."""
    line = "not started"
    while coro is not None:
        frame = getattr(coro, "cr_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(_LIBRARY_FILES):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        coro = getattr(coro, "cr_await", None)
    return line


class WorkflowLoop(asyncio.AbstractEventLoop):
    def __init__(
        self, owner: TimerFactory, now: float, name: str, real_loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.owner: TimerFactory | None = owner
        self.real_loop = real_loop
        """Restored by `leave`. A parameter, because `get_running_loop` costs a system call before Python 3.12."""
        self.name = name
        self.now = now
        self.root = TaskPath()
        self.ready: deque[Handle] = deque()
        self.tasks: dict[int, WorkflowTask] = {}
        self.thread: int | None = None
        self.is_suspending = False
        """`drop` is unwinding the coroutines: steps, waits and new futures raise `Suspended`, callbacks are ignored."""
        self.is_closing_generator = False
        """An abandoned async generator is being closed: steps and waits raise `Suspended`, but callbacks are queued,
        because its `finally` may release a lock."""
        self.forbidden_call: NotInWorkflowError | None = None
        """The first forbidden call; kept because user code may swallow the error."""
        self.last_number = 0
        """Of the tasks and futures, in the order of their creation."""
        self._suspended_count = 0
        self._prune_at = 50

    # Methods that asyncio's own code calls

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None) -> Any:
        handle = Handle(callback, args, context if context is not None else copy_context())
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
        handle = WorkflowTimerHandle(callback, args, context if context is not None else copy_context(), when)
        if not self.is_suspending and self.owner is not None:
            self.owner.set_timer(self.current_branch(), handle)
        return handle

    def create_future(self) -> WorkflowFuture:
        if (self.is_suspending or self.is_closing_generator) and not self.ignores_suspend:
            self.raise_suspended()  # TaskGroup.__aexit__ and Condition.wait would wait forever
        future = WorkflowFuture(loop=self)
        self.last_number += 1
        future.number = self.last_number
        return future

    def create_task(  # newer Pythons pass more options, such as eager_start; ignored, so that all replay alike
        self, coro: Any, *, name: str | None = None, context: Context | None = None, **_options: Any
    ) -> WorkflowTask:
        if self.is_suspending or self.is_closing_generator:
            coro.close()
            if self.is_closing_generator and not self.is_suspending:
                self.raise_suspended()
            # Raising here, in a `gather` of a `finally`, would leave its other coroutines unawaited, with a warning.
            return self.add_task(SuspendedCall(self), TaskPath(), "leaving")
        path = self.current_branch().next_id(getattr(coro, "__name__", type(coro).__name__))
        # asyncio's default name, "Task-4711", counts over the process: code that uses it in arguments could not replay.
        return self.add_task(coro, TaskPath(path + "/"), name or path, context)

    def add_task(self, coro: Any, branch: TaskPath, name: str, context: Context | None = None) -> WorkflowTask:
        task = WorkflowTask(coro, self, branch, name, context)
        self.tasks[task.number] = task
        if len(self.tasks) > self._prune_at:  # cheaper than a done callback on each task
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

    # Methods that Execution calls

    def current_branch(self) -> TaskPath:
        task = asyncio.current_task(self)
        return task.branch if isinstance(task, WorkflowTask) else self.root

    def raise_suspended(self) -> NoReturn:
        self._suspended_count += 1
        raise Suspended("the run leaves memory")

    @property
    def ignores_suspend(self) -> bool:
        """The code catches `Suspended` and calls again, in a loop. Calls then yield, so that `unwind` gets control
        back and can give the coroutine up."""
        return self._suspended_count > 1000

    def enter(self) -> Any:
        """Make this the thread's running loop; the result is for `leave`, which restores the real one."""
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
        """Run callbacks, also those that they add, until the queue is empty."""
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
                pass  # the task has stored it as its outcome before re-raising: it ends the run, not the worker
            except BaseException as error:  # like asyncio: log the error of a callback, and continue
                self.call_exception_handler({"message": f"exception in {callback!r}", "exception": error})
            count += 1
            if count > MAX_CALLBACKS:
                raise SpinError(
                    f"run {self.name}: {MAX_CALLBACKS} callbacks without waiting for anything durable. A loop such "
                    "as `while not done: await asyncio.sleep(0)` never ends here: wait for an asyncio.Event, a "
                    "timer or a step instead."
                )

    def stacks(self) -> str:
        """Name and current line of each unfinished task, for error messages."""
        unfinished = (task for task in self.tasks.values() if not task.done())
        return "; ".join(f"{task.get_name()} at {_innermost_line(task.get_coro())}" for task in unfinished)

    def _close_abandoned(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Close an async generator that its consumer left with `break`, without an event loop."""
        before, self.is_closing_generator = self.is_closing_generator, True
        closing = generator.aclose()
        try:
            closing.send(None)
            unwind(closing)
        except BaseException:  # noqa: S110 - the outcome is ignored, StopIteration included
            pass
        finally:
            self.is_closing_generator = before

    def drop(self) -> None:
        """Throw `Suspended` into every unfinished task, newest first, and break reference cycles, so that reference
        counting frees the tasks at once."""
        self.is_suspending = True
        self.ready.clear()
        hooks = self.enter()
        try:
            for task in reversed([t for t in self.tasks.values() if not t.done()]):
                coro: Any = task.get_coro()
                if getattr(coro, "cr_frame", None) is None:
                    continue
                if coro.cr_await is None and coro.cr_frame.f_lasti <= 0:
                    coro.close()  # it never ran: there is nothing to unwind, and `throw` would warn of that
                else:
                    task.context.run(unwind, coro)
            for task in self.tasks.values():
                _break_cycles(task)
        finally:
            self.leave(hooks)
        self.tasks.clear()
        self.ready.clear()
        self.owner = None

    # Methods that cannot be replayed

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


def unwind(coro: Coroutine[Any, Any, Any]) -> None:
    """Throw `Suspended` until the coroutine ends: it may catch it, or yield again in a `finally`. The coroutine's task
    is not involved: its loop does not run any more, and the outcome is ignored."""
    for _ in range(_MAX_THROWS):
        try:
            coro.throw(Suspended("the run leaves memory"))
        except BaseException:  # the outcome is ignored, StopIteration included
            return
    logger.error("%r does not end: it catches BaseException in a loop, and stays in memory", coro)
    _stuck.append(coro)


def _break_cycles(future: Any) -> None:
    """Remove the done callbacks of a future and of those it waits for: a cancelled `gather` keeps its callbacks until
    all its children are done."""
    for callback, _ in future._callbacks or ():
        future.remove_done_callback(callback)
    for below in (getattr(future, "_fut_waiter", None), *getattr(future, "_children", ())):
        if below is not None and below._callbacks:
            _break_cycles(below)


# Functions of asyncio that are replaced


def _in_workflow() -> bool:
    return isinstance(_get_running_loop(), WorkflowLoop)


def _order_as_completed() -> None:
    """The original collects the coroutines in a set, and starts them in the order of their addresses."""
    original = asyncio.as_completed

    def as_completed(fs: Iterable[Awaitable[Any]], *, timeout: float | None = None) -> Any:
        if _in_workflow():
            fs = [asyncio.ensure_future(f) for f in fs]
        return original(fs, timeout=timeout)

    as_completed.__doc__ = original.__doc__
    _replace("as_completed", as_completed)


def _order_wait_for() -> None:
    """Python 3.11 wraps the awaitable in a task, 3.12 does not: a history of one would not replay on the other."""
    original = asyncio.wait_for

    async def wait_for(fut: Awaitable[Any], timeout: float | None) -> Any:
        if timeout is None or timeout <= 0 or not _in_workflow():
            return await original(fut, timeout)
        async with asyncio.timeout(timeout):
            return await fut

    wait_for.__doc__ = original.__doc__
    _replace("wait_for", wait_for)


def _order_all_tasks() -> None:
    """The original filters all tasks of the process, in the order of their addresses."""
    original = asyncio.all_tasks

    def all_tasks(loop: asyncio.AbstractEventLoop | None = None) -> set[asyncio.Task[Any]]:
        of_loop = loop if loop is not None else _get_running_loop()
        if isinstance(of_loop, WorkflowLoop):
            return {task for task in of_loop.tasks.values() if not task.done()}
        return original(loop)

    all_tasks.__doc__ = original.__doc__
    _replace("all_tasks", all_tasks)


def _order_gatherings() -> None:
    """A set of `gather()` futures would iterate in the order of their addresses: hash each by its first child."""
    gathering: Any = vars(asyncio.tasks)["_GatheringFuture"]
    gathering.__hash__ = lambda self: hash(self._children[0]) if self._children else 0


def _replace(name: str, function: Any) -> None:
    setattr(asyncio, name, function)
    setattr(asyncio.tasks, name, function)


_order_as_completed()
_order_all_tasks()
_order_gatherings()
if sys.version_info < (3, 12):
    _order_wait_for()
