"""Workflows: `@workflow` functions, how their runs are started, the handle that reads and controls one run, and the
registry that finds workflows by name."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from edda.core.channels import is_storable_text
from edda.core.model import CancelOutcome
from edda.core.options import explained, hide_unknown, known_options, refuse_unknown
from edda.core.signature import Signature
from edda.core.states import RunStatus
from edda.core.value_path import repr_short
from edda.errors import NotInWorkflowError, UnknownWorkflowError

from .activity import Activity, check_function, check_name
from .children import await_run, start_child, with_timeout
from .client import current_context, get_client, running_context
from .context import ActivityContext, WorkflowContext, seconds_to_microseconds

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from edda.core.model import Entry

    from .client import Client

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


MAX_ID_BYTES = 255
"""MySQL's id columns hold so many bytes. The limit is the same everywhere, so that a run fits each database."""


@dataclass(frozen=True)
class StartOptions:
    """Options of a new run. Times are in microseconds."""

    id: str | None = None
    timeout: int | None = None
    delay: int = 0
    detached: bool = False
    """The child run continues when its parent is cancelled."""
    session: Any = None
    """The SQLAlchemy session in whose transaction the run is stored."""


class Workflow(Generic[P, R]):
    """Created by `@workflow`. `start` stores a new run and returns its id; `run` also waits for the result."""

    def __init__(self, fn: Callable[..., Coroutine[Any, Any, Any]], name: str, event_handler: bool = False) -> None:
        self.fn = fn
        self.name = name
        self.event_handler = event_handler
        """Whether an event starts a run if its type is the workflow's name."""
        self.signature = Signature(fn)
        self.__doc__ = fn.__doc__
        self.__name__ = name
        self.__qualname__ = getattr(fn, "__qualname__", name)
        self.__module__ = fn.__module__
        self.__wrapped__ = fn

    def start(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, str]:
        return BoundWorkflow(self).start(*args, **kwargs)

    def run(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        return BoundWorkflow(self).run(*args, **kwargs)

    if not TYPE_CHECKING:  # type checkers report the call themselves

        def __call__(self, *args, **kwargs):
            raise TypeError(
                f"{self.name} is a workflow and cannot be called: `await {self.name}.start(...)` starts a run and "
                f"returns its id, `await {self.name}.run(...)` returns its result; {self.name}.fn is the plain function"
            )

    @explained
    def options(
        self,
        *,
        id: str | None = None,
        timeout: float | timedelta | None = None,
        delay: float | timedelta | None = None,
        detached: bool = False,
        session: AsyncSession | None = None,
    ) -> BoundWorkflow[P, R]:
        """This workflow with options for its next `start` or `run`.

        Args:
            id: Id of the run, 1 to 255 bytes in UTF-8; a second start with the same id and input returns the existing
                run. Default None: generated.
            timeout: Seconds, or a timedelta, after which the run is stopped with `WorkflowTimeoutError`. Default
                None: no limit.
            delay: Seconds, or a timedelta, before the run begins. Default None: at once.
            detached: The child run continues when the run that started it is cancelled. Default False.
            session: SQLAlchemy session in whose transaction the run is stored; it exists when that commits. Default
                None: a transaction of Edda's own.
        """
        if id is not None and not (
            isinstance(id, str) and id.strip() and is_storable_text(id) and len(id.encode()) <= MAX_ID_BYTES
        ):
            raise ValueError(f"{self.name}.options(id={id!r}): expected a text of 1 to 255 bytes in UTF-8, without NUL")
        limit = None if timeout is None else seconds_to_microseconds(timeout, f"{self.name}.options(timeout=)")
        pause = 0 if delay is None else seconds_to_microseconds(delay, f"{self.name}.options(delay=)")
        return BoundWorkflow(self, StartOptions(id, limit, pause, detached, session))

    def handle(self, instance_id: str) -> WorkflowHandle[R]:
        return WorkflowHandle(instance_id, get_client(), self.signature.returns)

    def __repr__(self) -> str:
        return f"<workflow {self.name}>"


@dataclass(frozen=True)
class BoundWorkflow(Generic[P, R]):
    """A workflow with its start options."""

    _workflow: Workflow[P, R]
    _options: StartOptions = StartOptions()
    _client: Client | None = None

    def on(self, client: Client) -> BoundWorkflow[P, R]:
        return replace(self, _client=client)

    def start(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, str]:
        """Store a new run and return its id. In a workflow's code the run is a child; its step id is assigned at the
        call, not at the `await`."""
        ctx = running_context() if self._client is None else None
        if ctx is not None:
            self._refuse_session("in a workflow's own code")
            return start_child(ctx, self._workflow, self._options, args, kwargs, is_awaited=False)
        starting = (self._client or get_client()).start_workflow(self._workflow, self._options, args, kwargs)
        if isinstance(starting, CoroutineType):  # for Python's "was never awaited" warning
            starting.__qualname__ = f"{self._workflow.name}.start"
        return starting

    def run(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Start a run and wait for its result."""
        self._refuse_session("with run(), which would wait for a run that is not committed: use start()")
        ctx = running_context() if self._client is None else None
        if ctx is not None:
            return start_child(ctx, self._workflow, self._options, args, kwargs, is_awaited=True)
        running = self._launch_and_wait(args, kwargs)
        if isinstance(running, CoroutineType):
            running.__qualname__ = f"{self._workflow.name}.run"
        return running

    def _refuse_session(self, where: str) -> None:
        if self._options.session is not None:
            raise ValueError(f"{self._workflow.name}.options(session=...) {where}")

    async def _launch_and_wait(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        client = self._client or get_client()
        ctx = current_context.get()
        if isinstance(ctx, ActivityContext) and ctx.has_transaction:
            raise NotInWorkflowError(
                f"{self._workflow.name}.run() in an activity with an open transaction would wait for a run that begins "
                "only after its commit: use start()"
            )
        instance_id = await client.start_workflow(self._workflow, self._options, args, kwargs)
        result: R = await client.await_result(instance_id, self._workflow.signature.returns, None)
        return result


class WorkflowHandle(Generic[R]):
    """One run, by its id. In a workflow's code `status`, `result`, `cancel`, `retry` and `resume` are recorded steps;
    `history`, `get` and `wait` have to be called in an activity."""

    def __init__(self, instance_id: Any, client: Client, returns: Any = Any) -> None:
        if not isinstance(instance_id, str):
            if inspect.iscoroutine(instance_id):
                instance_id.close()
            raise TypeError(
                f"handle({repr_short(instance_id)}): expected the id of a run, which `await order.start(...)` returns"
            )
        self.instance_id = instance_id
        self._client = client
        self._returns = returns

    def status(self) -> Coroutine[Any, Any, RunStatus]:
        """The current status; `InstanceNotFoundError` if no run has this id."""
        ctx = running_context()
        return self._status() if ctx is None else ctx.step("status", self._status)

    def result(self, timeout: float | None = None) -> Coroutine[Any, Any, R]:
        """Wait for the end of the run and return its result; raises the run's error.

        `TimeoutError` after `timeout` seconds (default None: no limit); the run continues.
        """
        ctx = running_context()
        if ctx is None:
            return self._client.await_result(self.instance_id, self._returns, timeout)
        ended = await_run(ctx, self.instance_id, self._returns)
        return ended if timeout is None else with_timeout(ended, timeout, self.instance_id)

    def cancel(self, reason: str = "cancelled") -> Coroutine[Any, Any, bool]:
        """Request cancellation; False if the run has ended already. The run ends after its `finally` blocks and
        compensations."""
        ctx = running_context()
        return self._cancel(reason) if ctx is None else ctx.step("cancel", self._cancel, reason)

    def retry(self, *, from_start: bool = False) -> Coroutine[Any, Any, None]:
        """Continue a failed or cancelled run: completed steps keep their results, failed steps run again.

        With `from_start=True` all steps run again. `ActionRefusedError` if the run's state does not allow it.
        """
        ctx = running_context()
        return self._retry(from_start) if ctx is None else ctx.step("retry", self._retry, from_start)

    def resume(self) -> Coroutine[Any, Any, None]:
        """Replay a waiting or parked run now, with the current code; it then continues, or waits for what that code
        waits for. `ActionRefusedError` if the run is running or has ended.
        """
        ctx = running_context()
        return self._resume() if ctx is None else ctx.step("resume", self._resume)

    async def history(self, generation: int | None = None) -> tuple[Entry, ...]:
        """The entries of a generation; the first is 0. Default None: the newest one."""
        _refuse_in_workflow("history")
        return await self._client.read_history(self.instance_id, generation)

    async def get(self, key: str, default: Any = None, *, type: Any = Any) -> Any:
        """The last value that the run set with `ctx.set(key, ...)`, or `default`; `type` converts it."""
        _refuse_in_workflow("get")
        stored = await self._client.get_value(self.instance_id, key)
        return default if stored is None else self._client.codec.decode(stored.value, type)

    async def wait(self, key: str, timeout: float | None = None, *, type: Any = Any) -> Any:
        """Like `get`, but wait until the run has set the value; `ValueNotSetError` if it ends without doing so,
        `TimeoutError` after `timeout` seconds (default None: no limit)."""
        _refuse_in_workflow("wait")
        stored = await self._client.wait_value(self.instance_id, key, timeout)
        return self._client.codec.decode(stored.value, type)

    async def _status(self) -> RunStatus:
        return (await self._client.read_run(self.instance_id)).status

    async def _cancel(self, reason: str) -> bool:
        return await self._client.request_cancel(self.instance_id, reason) is not CancelOutcome.ENDED

    async def _retry(self, from_start: bool) -> None:
        await self._client.retry_run(self.instance_id, from_start)

    async def _resume(self) -> None:
        await self._client.resume_run(self.instance_id)

    def __repr__(self) -> str:
        return f"<handle of run {self.instance_id}>"


def _refuse_in_workflow(function: str) -> None:
    if running_context() is not None:
        raise NotInWorkflowError(f"handle.{function}() in the code of a workflow: call it in an activity instead")


def as_starter(what: Any, method: str) -> BoundWorkflow[Any, Any]:
    """Checks the first argument of `app.start` and `app.run`."""
    if isinstance(what, BoundWorkflow):
        return what
    if isinstance(what, Workflow):
        return BoundWorkflow(what)
    if inspect.iscoroutine(what):
        what.close()
        raise TypeError(
            f"{method}(...): expected a workflow, got a coroutine: write {method}(order, ...), not {method}(order(...))"
        )
    if isinstance(what, Activity):
        raise TypeError(f"{method}({what.name}): expected a workflow, got an activity, which only a workflow can call")
    raise TypeError(
        f"{method}({repr_short(what)}): expected a workflow, the function itself, decorated with @workflow, "
        "or its options(...)"
    )


class WorkflowRegistry:
    """The workflows of this process, by name."""

    def __init__(self) -> None:
        self._workflows: dict[str, Workflow[Any, Any]] = {}

    def add(self, workflow: Workflow[Any, Any]) -> None:
        known = self._workflows.get(workflow.name)
        if known is not None and known.__module__ != workflow.__module__:
            raise ValueError(
                f"workflow {workflow.name!r} is defined in {known.__module__} and again in {workflow.__module__}: "
                "runs find their workflow by its name, so rename one of them with @workflow(name=...)"
            )
        # The same qualified name is a reloaded module or a notebook cell; a function inside another one may be defined
        # at each call.
        is_local = known is not None and "<locals>" in known.__qualname__ + workflow.__qualname__
        if known is not None and known.__qualname__ != workflow.__qualname__ and not is_local:
            logger.warning(
                "workflow %r of %s is replaced by %s, which has the same name: runs find their workflow by its name, "
                "so rename one of them with @workflow(name=...)",
                *(workflow.name, f"{known.__module__}.{known.__qualname__}", workflow.__qualname__),
            )
        self._workflows[workflow.name] = workflow

    def get(self, name: str) -> Workflow[Any, Any]:
        try:
            return self._workflows[name]
        except KeyError:
            known = ", ".join(sorted(self._workflows)) or "none"
            raise UnknownWorkflowError(f"this process has no workflow {name!r}; it has: {known}") from None

    def names(self) -> tuple[str, ...]:
        return tuple(self._workflows)


registry = WorkflowRegistry()


@overload
def workflow(fn: Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]], /) -> Workflow[P, R]: ...


@overload
def workflow(*, name: str | None = None, event_handler: bool = False) -> WorkflowDecorator: ...


def workflow(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    event_handler: bool = False,
    **unknown: Any,
) -> Any:
    """Decorator for a durable `async def` function: after a crash it continues with the recorded results of its steps.

    Args:
        name: Name of the workflow, 1 to 255 characters; stored with its runs. Default: the function's name.
        event_handler: Start a run for every event whose type is the workflow's name, with its data as arguments.
            Default False.
    """
    refuse_unknown("@workflow()", unknown, known_options(workflow))
    decorator = WorkflowDecorator(name, event_handler)
    return decorator if fn is None else decorator(fn)


hide_unknown(workflow)


@dataclass(frozen=True)
class WorkflowDecorator:
    name: str | None
    event_handler: bool

    def __call__(self, fn: Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]], /) -> Workflow[P, R]:
        check_function("@workflow", fn)
        check_name("@workflow", self.name)
        if isinstance(fn, Activity):
            raise TypeError(f"@workflow: {fn.name} is an activity already; decorate a function once")
        if not inspect.iscoroutinefunction(fn):
            what = getattr(fn, "__name__", "<lambda>").replace("<lambda>", "order")
            raise TypeError(
                f"@workflow: expected an `async def` function, got {fn!r}: write `async def {what}(ctx, ...)`"
            )
        made: Workflow[P, R] = Workflow(fn, self.name or fn.__name__, self.event_handler)
        registry.add(made)
        return made
