"""Workflows: plain `async def` functions that can be started, waited for and found again."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from edda.core.options import explained, hide_unknown, known_options, refuse_unknown
from edda.core.signature import Signature
from edda.core.value_path import repr_short
from edda.errors import NotInWorkflowError, UnknownWorkflowError

from .activity import Activity, check_function, check_name
from .children import running_context, start_child
from .client import current_context, get_client
from .context import ActivityContext, RunContext, WorkflowContext, seconds_to_microseconds
from .handle import WorkflowHandle

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    from .client import Client

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class StartOptions:
    """How a run is started. Times are microseconds."""

    id: str | None = None
    timeout: int | None = None
    delay: int = 0
    detached: bool = False
    """A child that goes on when its parent is cancelled."""
    session: Any = None
    """The caller's own transaction, which it is started in."""


class Workflow(Generic[P, R]):
    """Made by `@workflow`. `start` is durable when it returns; `run` also waits for the result."""

    def __init__(self, fn: Callable[..., Coroutine[Any, Any, Any]], name: str, event_handler: bool = False) -> None:
        self.fn = fn
        self.name = name
        self.event_handler = event_handler
        """Whether an event whose type is the workflow's name starts it."""
        self.signature = Signature(fn)
        self.__doc__ = fn.__doc__
        self.__name__ = name
        self.__qualname__ = getattr(fn, "__qualname__", name)
        self.__module__ = fn.__module__
        self.__wrapped__ = fn

    def start(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, str]:
        return BoundWorkflow(self, StartOptions()).start(*args, **kwargs)

    def run(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        return BoundWorkflow(self, StartOptions()).run(*args, **kwargs)

    if not TYPE_CHECKING:  # for a type checker it cannot be called at all

        def __call__(self, *args, **kwargs):
            raise TypeError(
                f"{self.name} is a workflow, which is not called: `await {self.name}.start(...)` starts a run and "
                f"gives its id, `await {self.name}.run(...)` its result; {self.name}.fn is the plain function"
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
        """`id` makes the start idempotent; `timeout` bounds the whole run; `delay` puts its beginning off (seconds).

        A `detached` child goes on when the workflow that started it is cancelled. With a `session` the run is started
        in the caller's own transaction: it exists if and when that commits.
        """
        if id is not None and (not isinstance(id, str) or not id.strip() or len(id) > 255):
            raise ValueError(f"{self.name}.options(id={id!r}): expected a text of 1 to 255 characters")
        options = StartOptions(id, detached=detached, session=session)
        if timeout is not None:
            options = replace(options, timeout=seconds_to_microseconds(timeout, f"{self.name}.options(timeout=)"))
        if delay is not None:
            options = replace(options, delay=seconds_to_microseconds(delay, f"{self.name}.options(delay=)"))
        return BoundWorkflow(self, options)

    def handle(self, instance_id: str) -> WorkflowHandle[R]:
        return WorkflowHandle(instance_id, get_client(), self.signature.returns)

    def __repr__(self) -> str:
        return f"<workflow {self.name}>"


class BoundWorkflow(Generic[P, R]):
    """A workflow with its start options, ready to be called."""

    def __init__(self, workflow: Workflow[P, R], options: StartOptions, client: Client | None = None) -> None:
        self._workflow = workflow
        self._options = options
        self._client = client

    def on(self, client: Client) -> BoundWorkflow[P, R]:
        return BoundWorkflow(self._workflow, self._options, client)

    def start(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, str]:
        """In a workflow the new run is its child, and a plain function takes the child's id when it is called."""
        ctx = self._parent
        if ctx is not None:
            self._refuse_session("in a workflow's own code")
            return start_child(ctx, self._workflow, self._options, args, kwargs, is_awaited=False)
        starting = (self._client or get_client()).start_workflow(self._workflow, self._options, args, kwargs)
        return _rename(starting, f"{self._workflow.name}.start")

    def run(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        self._refuse_session("with run(), which would wait for a run that is not committed: use start()")
        ctx = self._parent
        if ctx is not None:
            return start_child(ctx, self._workflow, self._options, args, kwargs, is_awaited=True)
        return _rename(self._launch_and_wait(args, kwargs), f"{self._workflow.name}.run")

    @property
    def _parent(self) -> RunContext | None:
        return running_context() if self._client is None else None

    def _refuse_session(self, where: str) -> None:
        if self._options.session is not None:
            raise ValueError(f"{self._workflow.name}.options(session=...) {where}")

    async def _launch_and_wait(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        client = self._client or get_client()
        ctx = current_context.get()
        if isinstance(ctx, ActivityContext) and ctx.has_transaction:
            raise NotInWorkflowError(
                f"{self._workflow.name}.run() in an activity with an open transaction would wait for a run that begins "
                "only when that is committed: use start()"
            )
        instance_id = await client.start_workflow(self._workflow, self._options, args, kwargs)
        result: R = await client.await_result(instance_id, self._workflow.signature.returns, None)
        return result


def _rename(call: Coroutine[Any, Any, R], name: str) -> Coroutine[Any, Any, R]:
    """Python's warning of a coroutine that is not awaited should name what the user wrote."""
    if isinstance(call, CoroutineType):
        call.__qualname__ = name
    return call


def as_starter(what: Any, verb: str) -> BoundWorkflow[Any, Any]:
    """What `app.start` and `app.run` are given first."""
    if isinstance(what, BoundWorkflow):
        return what
    if isinstance(what, Workflow):
        return BoundWorkflow(what, StartOptions())
    if inspect.iscoroutine(what):
        what.close()
        raise TypeError(
            f"{verb}(...): expected a workflow, got a coroutine: write {verb}(order, ...), not {verb}(order(...))"
        )
    if isinstance(what, Activity):
        raise TypeError(f"{verb}({what.name}): expected a workflow, got an activity, which only a workflow can call")
    raise TypeError(
        f"{verb}({repr_short(what)}): expected a workflow, the function itself, decorated with @workflow, "
        "or its options(...)"
    )


class Registry:
    """The workflows of this process, by name."""

    def __init__(self) -> None:
        self._workflows: dict[str, Workflow[Any, Any]] = {}

    def add(self, workflow: Workflow[Any, Any]) -> None:
        known = self._workflows.get(workflow.name)
        if known is not None and known.__module__ != workflow.__module__:
            raise ValueError(
                f"workflow {workflow.name!r} is defined in {known.__module__} and again in {workflow.__module__}: "
                "runs are found by name, so give one of them another one with @workflow(name=...)"
            )
        if known is not None and _are_two(known, workflow):
            logger.warning(
                "workflow %r of %s is replaced by %s, which has the same name: runs are found by name, so give one of "
                "them another one with @workflow(name=...)",
                *(workflow.name, f"{known.__module__}.{known.__qualname__}", workflow.__qualname__),
            )
        self._workflows[workflow.name] = workflow

    def get(self, name: str) -> Workflow[Any, Any]:
        try:
            return self._workflows[name]
        except KeyError:
            known = ", ".join(sorted(self._workflows)) or "none"
            raise UnknownWorkflowError(f"no workflow is named {name!r} in this process; known are: {known}") from None

    def names(self) -> tuple[str, ...]:
        return tuple(self._workflows)


def _are_two(one: Workflow[Any, Any], other: Workflow[Any, Any]) -> bool:
    """Whether they are two functions of a module. The same function again is a module that was reloaded, or a cell of a
    notebook; one that is made inside another function may be made anew at each call."""
    is_local = "<locals>" in one.__qualname__ + other.__qualname__
    return one.__qualname__ != other.__qualname__ and not is_local


registry = Registry()


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
    """Make an `async def` function durable: what its activities returned survives every crash.

    With `event_handler=True` an event whose type is the workflow's name starts it, with its data as arguments.
    """
    refuse_unknown("@workflow()", unknown, known_options(workflow))
    decorator = WorkflowDecorator(name, event_handler)
    return decorator if fn is None else decorator(fn)


hide_unknown(workflow)


class WorkflowDecorator:
    def __init__(self, name: str | None, event_handler: bool) -> None:
        self._name = name
        self._event_handler = event_handler

    def __call__(self, fn: Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]], /) -> Workflow[P, R]:
        check_function("@workflow", fn)
        check_name("@workflow", self._name)
        if isinstance(fn, Activity):
            raise TypeError(f"@workflow: {fn.name} is an activity already; a function is a workflow or an activity")
        if not inspect.iscoroutinefunction(fn):
            what = getattr(fn, "__name__", "<lambda>").replace("<lambda>", "order")
            raise TypeError(f"@workflow needs an `async def` function, got {fn!r}: write `async def {what}(ctx, ...)`")
        made: Workflow[P, R] = Workflow(fn, self._name or fn.__name__, self._event_handler)
        registry.add(made)
        return made
