"""Activities: the steps of a workflow that touch the world."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from edda.core.failure import decode_failure
from edda.core.model import Entry, EntryKind
from edda.core.signature import Signature, returns_of

from .limits import UNLIMITED, Limits, Seconds, limits_of
from .reconciling import check_parameters

if TYPE_CHECKING:
    from edda.core.codec import Codec
    from edda.core.retry import RetryPolicy

    from .context import WorkflowContext

P = ParamSpec("P")
R = TypeVar("R")

UNDO_MARK = "__edda_undo__"
"""Where `@on_failure` leaves the remedy for `@activity` to find."""


@dataclass(frozen=True)
class Happened(Generic[R]):
    """What `reconcile` returns if the effect of an earlier attempt did happen; `result` becomes that of the step."""

    result: R


class BoundRemedy(Protocol):
    """How one call of an activity is undone."""

    def check(self, result: Any) -> None:
        """Raises if the result does not have what undoing needs."""
        ...


class Remedy(Protocol):
    """How an activity is undone."""

    def bound(self, ctx: WorkflowContext, input: bytes) -> BoundRemedy: ...


class StepCall:
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
        undo: BoundRemedy | None = None,
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
    def may_be_given_up(self) -> bool:
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
        undo: Remedy | None = None,
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

    def __call__(self, ctx: WorkflowContext, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        return self._call(ctx, args, kwargs, kwargs.pop("activity_id", None))

    def with_id(self, activity_id: str) -> Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]]:
        """The same activity under an id of your own instead of `name:count`."""

        def call(ctx: WorkflowContext, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
            return self._call(ctx, args, kwargs, activity_id)

        return call

    def _call(
        self, ctx: WorkflowContext, args: tuple[Any, ...], kwargs: dict[str, Any], id: Any
    ) -> Coroutine[Any, Any, R]:
        codec, returns = ctx.codec, self.signature.returns
        input = self.signature.encode(codec, self.signature.bind(args, kwargs, check=False))
        return ctx.execution.call(
            EntryKind.STEP,
            self.name,
            input,
            decode=lambda entry: _decode(codec, entry, returns),
            call=StepCall(
                self.fn,
                args,
                kwargs,
                self.is_async,
                True,
                self.retry_policy,
                returns,
                self.limits,
                self.reconcile,
                None if self.undo is None else self.undo.bound(ctx, input),
            ),
            id=id,
        )

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
        call=StepCall(fn, args, {}, is_async=is_async(fn), takes_context=False, retry_policy=retry_policy),
    )


def _decode(codec: Codec, entry: Entry, returns: Any) -> Any:
    return codec.decode(entry.value, returns) if entry.ok else decode_failure(codec, entry.value)


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
) -> Any:
    """Make a function a step: `async def charge(ctx, amount): ...`. Sync functions run in threads."""
    decorator = ActivityDecorator(name, retry_policy, timeout, heartbeat_timeout, max_concurrent, reconcile)
    return decorator if fn is None else decorator(fn)


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
        name = self._name or fn.__name__
        limits = limits_of(name, *self._limits)
        undo = getattr(fn, UNDO_MARK, None)
        return Activity(fn, name, self._retry_policy, limits=limits, reconcile=self._reconcile, undo=undo)
