"""Activities: the steps of a workflow that touch the world."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from edda.core.exceptions import decode_failure
from edda.core.model import Entry, EntryKind
from edda.core.options import hide_unknown, known_options, refuse_unknown
from edda.core.retry import RetryPolicy
from edda.core.signature import Signature, returns_of
from edda.core.value_path import repr_short
from edda.errors import NotInWorkflowError

from .limits import UNLIMITED, Limits, Seconds, limits_of
from .reconciling import check_parameters

if TYPE_CHECKING:
    from edda.core.codec import Codec

    from .context import WorkflowContext

P = ParamSpec("P")
R = TypeVar("R")

_OF_WORKFLOWS = frozenset({"start", "run", "options", "handle"})
COMPENSATION_ATTRIBUTE = "__edda_undo__"
"""Where `@on_failure` leaves the remedy for `@activity` to find."""
UNFINISHED_MARK = "__edda_unfinished__"
"""On what `@on_failure(undo)` returns, which is no function to decorate."""
LONGEST_NAME = 255


@dataclass(frozen=True)
class Happened(Generic[R]):
    """What `reconcile` returns if the effect of an earlier attempt did happen; `result` becomes that of the step."""

    result: R


class BoundCompensation(Protocol):
    """How one call of an activity is undone."""

    def check(self, result: Any) -> None:
        """Raises if the result does not have what undoing needs."""
        ...


class CompensationSpec(Protocol):
    """How an activity is undone."""

    def bind_to(self, ctx: WorkflowContext, input: bytes) -> BoundCompensation: ...


class ActivityCall:
    """What a driver needs to run a step's body."""

    __slots__ = (
        "args",
        "fn",
        "is_async",
        "kwargs",
        "limits",
        "reconcile",
        "retry_policy",
        "returns",
        "takes_context",
        "undo",
    )

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_async: bool,
        takes_context: bool,
        retry_policy: RetryPolicy | None,
        returns: Any = Any,
        limits: Limits = UNLIMITED,
        reconcile: Callable[..., Any] | None = None,
        undo: BoundCompensation | None = None,
    ) -> None:
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self.is_async = is_async
        self.takes_context = takes_context
        self.retry_policy = retry_policy
        self.returns = returns
        self.limits = limits
        self.reconcile = reconcile
        self.undo = undo

    @property
    def has_timeout(self) -> bool:
        """Whether it may fail while its body goes on."""
        return self.limits.timeout is not None or self.limits.heartbeat_timeout is not None


class Activity(Generic[P, R]):
    """Made by `@activity`. Calling it inside a workflow runs it once and records what it returned or raised."""

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        retry_policy: RetryPolicy | None,
        *,
        limits: Limits = UNLIMITED,
        reconcile: Callable[..., Any] | None = None,
        undo: CompensationSpec | None = None,
    ) -> None:
        self.fn = fn
        self.name = name
        self.retry_policy = retry_policy
        self.limits = limits
        self.reconcile = reconcile
        self.undo = undo
        self.is_async = is_async(fn)
        self.signature = Signature(fn)
        if reconcile is not None:
            check_parameters(name, fn, reconcile)
        self.__doc__ = fn.__doc__
        self.__name__ = name
        self.__qualname__ = getattr(fn, "__qualname__", name)
        self.__module__ = fn.__module__
        self.__wrapped__ = fn

    if TYPE_CHECKING:

        def __call__(self, ctx: WorkflowContext, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...

    else:  # a call without the context is told what is missing

        def __call__(self, ctx=None, *args, **kwargs):
            return self._call(ctx, args, kwargs, kwargs.pop("activity_id", None))

        def __getattr__(self, name):
            if name in _OF_WORKFLOWS and "name" in self.__dict__:
                raise AttributeError(
                    f"{self.name} is an activity, and .{name} belongs to workflows: call it in a workflow, "
                    f"`await {self._usage}`"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _usage(self) -> str:
        """How it is called."""
        return f"{self.name}({', '.join(('ctx', *self.signature.names))})"

    def with_id(self, activity_id: str) -> Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]]:
        """The same activity under an id of your own instead of `name:count`."""

        def call(ctx: WorkflowContext, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
            return self._call(ctx, args, kwargs, activity_id)

        return call

    def _call(
        self, ctx: WorkflowContext, args: tuple[Any, ...], kwargs: dict[str, Any], id: Any
    ) -> Coroutine[Any, Any, R]:
        try:
            codec, execution = ctx.codec, ctx.execution
        except (AttributeError, NotInWorkflowError) as error:
            raise self._misplaced(ctx, error) from None
        returns = self.signature.returns
        input = self.signature.encode(codec, self.signature.bind(args, kwargs, check=False))
        return execution.call(
            EntryKind.STEP,
            self.name,
            input,
            decode=lambda entry: _decode(codec, entry, returns),
            call=ActivityCall(
                self.fn,
                args,
                kwargs,
                self.is_async,
                True,
                self.retry_policy,
                returns,
                self.limits,
                self.reconcile,
                None if self.undo is None else self.undo.bind_to(ctx, input),
            ),
            id=id,
        )

    def _misplaced(self, ctx: Any, error: Exception) -> Exception:
        from .context import ActivityContext, RunContext, misplaced  # they need this module

        if isinstance(ctx, RunContext):
            return error
        if isinstance(ctx, ActivityContext):
            return NotInWorkflowError(
                f"{self.name}() was called in the activity {ctx.activity_id}, and a step cannot have steps of its own: "
                f"call `await {self._usage}` in the workflow, or `{self.name}.fn(...)` to run its plain function as a "
                "part of this activity"
            )
        return misplaced(ctx, self._usage)

    def __repr__(self) -> str:
        return f"<activity {self.name}>"


def inline_step(
    ctx: WorkflowContext, name: str, fn: Callable[..., Any], args: tuple[Any, ...], retry_policy: RetryPolicy | None
) -> Coroutine[Any, Any, Any]:
    codec, returns = ctx.codec, returns_of(fn)
    return ctx.execution.call(
        EntryKind.STEP,
        name,
        codec.encode(list(args)),
        decode=lambda entry: _decode(codec, entry, returns),
        call=ActivityCall(fn, args, {}, is_async(fn), False, retry_policy, returns),
    )


def _decode(codec: Codec, entry: Entry, returns: Any) -> Any:
    if not entry.ok:
        return decode_failure(codec, entry.value)
    return codec.decode_recorded(entry.value, returns, "the result of step", entry.step)


def is_async(fn: Callable[..., Any]) -> bool:
    while hasattr(fn, "func"):  # functools.partial
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004 - callable() says nothing of being async


@overload
def activity(fn: Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]], /) -> Activity[P, R]: ...


@overload
def activity(fn: Callable[Concatenate[WorkflowContext, P], R], /) -> Activity[P, R]: ...


@overload
def activity(
    *,
    name: str | None = None,
    retry_policy: RetryPolicy | None = None,
    timeout: Seconds | None = None,
    heartbeat_timeout: Seconds | None = None,
    max_concurrent: int | None = None,
    reconcile: Callable[..., Any] | None = None,
) -> ActivityDecorator: ...


def activity(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    retry_policy: RetryPolicy | None = None,
    timeout: Seconds | None = None,
    heartbeat_timeout: Seconds | None = None,
    max_concurrent: int | None = None,
    reconcile: Callable[..., Any] | None = None,
    **unknown: Any,
) -> Any:
    """Make a function a step: `async def charge(ctx, amount): ...`. Sync functions run in threads."""
    refuse_unknown("@activity()", unknown, known_options(activity))
    decorator = ActivityDecorator(name, retry_policy, timeout, heartbeat_timeout, max_concurrent, reconcile)
    return decorator if fn is None else decorator(fn)


hide_unknown(activity)


def check_step(decorator: str, fn: Any, name: Any, retry_policy: Any) -> None:
    """Raises `TypeError` if the decorator cannot make a step of what it was given."""
    if isinstance(fn, Activity):
        raise TypeError(f"{decorator}: {fn.name} is an activity already; a function is decorated once")
    check_function(decorator, fn)
    check_name(decorator, name)
    if getattr(fn, UNFINISHED_MARK, False):
        raise TypeError(f"{decorator}: @on_failure needs the function that undoes the step, as in @on_failure(refund)")
    if retry_policy is not None and not isinstance(retry_policy, RetryPolicy):
        raise TypeError(
            f"{decorator}(retry_policy={repr_short(retry_policy)}): expected a policy, "
            "such as RetryPolicy(max_attempts=3)"
        )


def check_name(decorator: str, name: Any) -> None:
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= LONGEST_NAME):
        raise TypeError(f"{decorator}(name={repr_short(name)}): expected a text of 1 to {LONGEST_NAME} characters")


def check_function(decorator: str, fn: Any) -> None:
    """A function of a module, that takes the context first and returns."""
    what = getattr(fn, "__qualname__", None) or repr_short(fn)
    if isinstance(fn, str):
        raise TypeError(f"{decorator}({fn!r}): a name is given as {decorator}(name={fn!r})")
    if inspect.isclass(fn):
        raise TypeError(
            f"{decorator}: {what} is a class; decorate a function, `async def {fn.__name__.lower()}(ctx, ...)`"
        )
    if type(fn).__name__ == "Workflow":
        raise TypeError(f"{decorator}: {fn.name} is a workflow already; a function is a workflow or an activity")
    if isinstance(fn, staticmethod | classmethod):
        raise TypeError(f"{decorator}: {fn.__func__.__qualname__} is a method; decorate a function of the module")
    if not callable(fn):
        raise TypeError(f"{decorator}: {what} is not a function")
    if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        raise TypeError(f"{decorator}: {what} is a generator; collect what it yields in a list, and return that")
    first = next(iter(inspect.signature(fn).parameters.values()), None)
    if first is not None and first.name in ("self", "cls"):
        raise TypeError(
            f"{decorator}: {what} is a method; decorate a function of the module, `async def ...(ctx, ...)`"
        )


class ActivityDecorator:
    def __init__(
        self,
        name: str | None,
        retry_policy: RetryPolicy | None,
        timeout: Seconds | None,
        heartbeat_timeout: Seconds | None,
        max_concurrent: int | None,
        reconcile: Callable[..., Any] | None,
    ) -> None:
        self._name = name
        self._retry_policy = retry_policy
        self._limits = (timeout, heartbeat_timeout, max_concurrent)
        self._reconcile = reconcile

    @overload
    def __call__(self, fn: Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]], /) -> Activity[P, R]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[WorkflowContext, P], R], /) -> Activity[P, R]: ...

    def __call__(self, fn: Callable[..., Any], /) -> Activity[Any, Any]:
        check_step("@activity", fn, self._name, self._retry_policy)
        name = self._name or fn.__name__
        limits = limits_of(name, *self._limits)
        undo = getattr(fn, COMPENSATION_ATTRIBUTE, None)
        return Activity(fn, name, self._retry_policy, limits=limits, reconcile=self._reconcile, undo=undo)
