"""Activities: the steps of a workflow that do I/O. Their outcomes are recorded and not repeated on replay."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from datetime import timedelta
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from msgspec import Struct

from edda.core.exceptions import decode_failure
from edda.core.model import Entry, EntryKind
from edda.core.options import hide_unknown, known_options, refuse_unknown
from edda.core.retry import RetryPolicy
from edda.core.signature import Signature, returns_of
from edda.core.value_path import repr_short
from edda.errors import NotInWorkflowError

if TYPE_CHECKING:
    from edda.core.codec import Codec

    from .context import WorkflowContext

P = ParamSpec("P")
R = TypeVar("R")

_WORKFLOW_METHODS = frozenset({"start", "run", "options", "handle"})
COMPENSATION_ATTRIBUTE = "__edda_undo__"
"""Attribute of a function in which `@on_failure` stores the compensation for `@activity`."""
UNFINISHED_MARK = "__edda_unfinished__"
"""Attribute of the decorator that `@on_failure(undo)` returns, to detect `@on_failure` without its argument."""
MAX_NAME_LENGTH = 255

Seconds = float | timedelta


@dataclass(frozen=True)
class Happened(Generic[R]):
    """Returned by `reconcile` if an earlier attempt took effect; `result` becomes the result of the step."""

    result: R


class BoundCompensation(Protocol):
    """The compensation of one call of an activity."""

    def check(self, result: Any) -> None:
        """Raises if the result lacks a value that the compensation needs."""
        ...


class CompensationSpec(Protocol):
    """The compensation of an activity."""

    def bind_to(self, ctx: WorkflowContext, input: bytes) -> BoundCompensation: ...


class ActivityLimits(Struct, frozen=True):
    """Time limits of an attempt in seconds, and the limit of concurrent attempts; None: no limit."""

    timeout: float | None = None
    heartbeat_timeout: float | None = None
    max_concurrent: int | None = None

    @classmethod
    def check(
        cls, name: str, timeout: Seconds | None, heartbeat_timeout: Seconds | None, max_concurrent: int | None
    ) -> ActivityLimits:
        """Checks the options of `@activity`; `name` is for the error messages."""
        if timeout is heartbeat_timeout is max_concurrent is None:
            return UNLIMITED
        count: object = max_concurrent  # of any type: the user's type checker may not have seen it
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"activity {name}: max_concurrent must be a whole number, at least 1, not {count!r}")
        times = (_seconds(name, "timeout", timeout), _seconds(name, "heartbeat_timeout", heartbeat_timeout))
        return cls(*times, max_concurrent)


UNLIMITED = ActivityLimits()


def _seconds(name: str, option: str, given: Seconds | None) -> float | None:
    if given is None:
        return None
    value = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"activity {name}: {option} must be seconds or a timedelta, more than 0, not {given!r}")
    return float(value)


class ActivityCall(Struct, eq=False):
    """What the engine needs to run one step."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_async: bool
    takes_context: bool
    retry_policy: RetryPolicy | None
    returns: Any = Any
    limits: ActivityLimits = UNLIMITED
    reconcile: Callable[..., Any] | None = None
    undo: BoundCompensation | None = None

    @property
    def has_timeout(self) -> bool:
        """Whether the step may fail while its function still runs."""
        return self.limits.timeout is not None or self.limits.heartbeat_timeout is not None


class Activity(Generic[P, R]):
    """Created by `@activity`. A call in a workflow runs the function and records its result or error."""

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        retry_policy: RetryPolicy | None,
        *,
        limits: ActivityLimits = UNLIMITED,
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
            _check_reconcile(name, fn, reconcile)
        self.__doc__ = fn.__doc__
        self.__name__ = name
        self.__qualname__ = getattr(fn, "__qualname__", name)
        self.__module__ = fn.__module__
        self.__wrapped__ = fn

    if TYPE_CHECKING:

        def __call__(self, ctx: WorkflowContext, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...

    else:  # `ctx=None`, so that a call without the context gets an error that explains it

        def __call__(self, ctx=None, *args, **kwargs):
            return self._call(ctx, args, kwargs, kwargs.pop("activity_id", None))

        def __getattr__(self, name):
            if name in _WORKFLOW_METHODS and "name" in self.__dict__:
                raise AttributeError(
                    f"{self.name} is an activity, and only workflows have .{name}: call the activity in a workflow, "
                    f"`await {self._usage}`"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _usage(self) -> str:
        """The call for error messages, such as `charge(ctx, amount)`."""
        return f"{self.name}({', '.join(('ctx', *self.signature.names))})"

    def with_id(self, activity_id: str) -> Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]]:
        """This activity with a chosen step id instead of the generated `name:count`."""

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
        input = codec.encode(self.signature.bind(args, kwargs, check=False))
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
        from .context import ActivityContext, RunContext, misplaced  # here, because context imports this module

        if isinstance(ctx, RunContext):
            return error
        if isinstance(ctx, ActivityContext):
            return NotInWorkflowError(
                f"{self.name}() was called in the activity {ctx.activity_id}, but an activity cannot call steps: call "
                f"`await {self._usage}` in the workflow, or `{self.name}.fn(...)` to run its plain function as part of "
                "this activity"
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
    # B004 suggests callable(), which does not tell whether the method is async.
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


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
    """Decorator for a step of a workflow: `async def charge(ctx, amount): ...`. Sync functions run in threads.

    Args:
        name: Name of the step, 1 to 255 characters. Default: the function's name.
        retry_policy: When to repeat a failed attempt. Default None: the app's `default_retry_policy`.
        timeout: Seconds, or a timedelta, that one attempt may take. Default None: no limit.
        heartbeat_timeout: Seconds, or a timedelta, between two calls of `ctx.heartbeat()`. Default None: no limit.
        max_concurrent: Attempts of this activity that run at the same time in one process. Default None: no limit.
        reconcile: Function with the same parameters, called before a step is repeated whose outcome is unknown after
            a crash; it returns `Happened(result)` if the step took effect. Default None: the step is repeated.
    """
    refuse_unknown("@activity()", unknown, known_options(activity))
    decorator = ActivityDecorator(name, retry_policy, (timeout, heartbeat_timeout, max_concurrent), reconcile)
    return decorator if fn is None else decorator(fn)


hide_unknown(activity)


def check_step(decorator: str, fn: Any, name: Any, retry_policy: Any) -> None:
    """Raises `TypeError` if the decorator cannot make a step of `fn`."""
    if isinstance(fn, Activity):
        raise TypeError(f"{decorator}: {fn.name} is an activity already; decorate a function once")
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
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH):
        raise TypeError(f"{decorator}(name={repr_short(name)}): expected a text of 1 to {MAX_NAME_LENGTH} characters")


def check_function(decorator: str, fn: Any) -> None:
    """Raises `TypeError` unless `fn` is a function: not a class, a method or a generator."""
    what = getattr(fn, "__qualname__", None) or repr_short(fn)
    if isinstance(fn, str):
        raise TypeError(f"{decorator}({fn!r}): expected a function; a name is {decorator}(name={fn!r})")
    if inspect.isclass(fn):
        raise TypeError(
            f"{decorator}: {what} is a class; decorate a function, `async def {fn.__name__.lower()}(ctx, ...)`"
        )
    if type(fn).__name__ == "Workflow":
        raise TypeError(f"{decorator}: {fn.name} is a workflow already; decorate a function once")
    if isinstance(fn, staticmethod | classmethod):
        raise TypeError(f"{decorator}: {fn.__func__.__qualname__} is a method; decorate a function of the module")
    if not callable(fn):
        raise TypeError(f"{decorator}: {what} is not a function")
    if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        raise TypeError(f"{decorator}: {what} is a generator; return a list of the values instead")
    first = next(iter(inspect.signature(fn).parameters.values()), None)
    if first is not None and first.name in ("self", "cls"):
        raise TypeError(
            f"{decorator}: {what} is a method; decorate a function of the module, `async def ...(ctx, ...)`"
        )


def _check_reconcile(name: str, fn: Callable[..., Any], reconcile: Callable[..., Any]) -> None:
    """Raises `TypeError` unless `reconcile` accepts every call that the activity accepts."""
    if differences := list(_differences(fn, reconcile)):
        shown = getattr(reconcile, "__name__", repr(reconcile))
        raise TypeError(
            f"activity {name}: {shown}() must take the context and the activity's own parameters: "
            f"{'; '.join(differences)}"
        )


def _differences(fn: Callable[..., Any], reconcile: Callable[..., Any]) -> Iterator[str]:
    _, *wanted = inspect.signature(fn).parameters.values()
    given = list(inspect.signature(reconcile).parameters.values())
    if not given or given[0].kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
        yield "it has no first parameter for the context"
        return
    given = given[1:]
    if [one.kind for one in given] == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]:
        return
    named, has = {one.name: one for one in wanted}, {one.name: one for one in given}
    yield from (f"it has no {name!r}" for name in named if name not in has)
    yield from (f"the activity has no {name!r}" for name in has if name not in named)
    yield from (
        f"{name!r} {reason}" for name in named.keys() & has if (reason := _parameter_difference(named[name], has[name]))
    )
    if named.keys() == has.keys() and list(named) != list(has):
        yield f"their order is {', '.join(map(repr, named))}"


def _parameter_difference(wanted: Parameter, given: Parameter) -> str:
    if wanted.kind is not given.kind:
        return f"is {wanted.kind.description} in the activity and {given.kind.description} here"
    return "" if wanted.default is Parameter.empty or given.default is not Parameter.empty else "needs a default, too"


@dataclass(frozen=True)
class ActivityDecorator:
    name: str | None
    retry_policy: RetryPolicy | None
    limits: tuple[Seconds | None, Seconds | None, int | None]
    reconcile: Callable[..., Any] | None

    @overload
    def __call__(self, fn: Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]], /) -> Activity[P, R]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[WorkflowContext, P], R], /) -> Activity[P, R]: ...

    def __call__(self, fn: Callable[..., Any], /) -> Activity[Any, Any]:
        check_step("@activity", fn, self.name, self.retry_policy)
        name = self.name or fn.__name__
        limits = ActivityLimits.check(name, *self.limits)
        undo = getattr(fn, COMPENSATION_ATTRIBUTE, None)
        return Activity(fn, name, self.retry_policy, limits=limits, reconcile=self.reconcile, undo=undo)
