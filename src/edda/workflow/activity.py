"""Activities: the steps of a workflow that touch the world."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from edda.core.failure import decode_failure
from edda.core.model import Entry, EntryKind
from edda.core.signature import Signature, returns_of

if TYPE_CHECKING:
    from edda.core.codec import Codec
    from edda.core.retry import RetryPolicy

    from .context import WorkflowContext

P = ParamSpec("P")
R = TypeVar("R")


class StepCall:
    """What a driver needs to run a step's body."""

    __slots__ = ("args", "fn", "is_async", "kwargs", "retry_policy", "takes_context")

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_async: bool,
        takes_context: bool,
        retry_policy: RetryPolicy | None,
    ) -> None:
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self.is_async = is_async
        self.takes_context = takes_context
        self.retry_policy = retry_policy


class Activity(Generic[P, R]):
    """Made by `@activity`. Calling it inside a workflow runs it once and records what it returned or raised."""

    def __init__(self, fn: Callable[..., Any], name: str, retry_policy: RetryPolicy | None) -> None:
        self.fn = fn
        self.name = name
        self.retry_policy = retry_policy
        self.is_async = _is_async(fn)
        self.signature = Signature(fn)
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
        bound = self.signature.bind(args, kwargs, check=False)
        codec, returns = ctx.codec, self.signature.returns
        return ctx.execution.call(
            EntryKind.STEP,
            self.name,
            self.signature.encode(codec, bound),
            decode=lambda entry: _decode(codec, entry, returns),
            call=StepCall(
                self.fn,
                args,
                kwargs,
                is_async=self.is_async,
                takes_context=True,
                retry_policy=self.retry_policy,
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
        call=StepCall(fn, args, {}, is_async=_is_async(fn), takes_context=False, retry_policy=retry_policy),
    )


def _decode(codec: Codec, entry: Entry, returns: Any) -> Any:
    return codec.decode(entry.value, returns) if entry.ok else decode_failure(codec, entry.value)


def _is_async(fn: Callable[..., Any]) -> bool:
    while hasattr(fn, "func"):  # functools.partial
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004 - callable() says nothing of being async


@overload
def activity(fn: Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]], /) -> Activity[P, R]: ...


@overload
def activity(fn: Callable[Concatenate[WorkflowContext, P], R], /) -> Activity[P, R]: ...


@overload
def activity(*, name: str | None = None, retry_policy: RetryPolicy | None = None) -> ActivityDecorator: ...


def activity(
    fn: Callable[..., Any] | None = None, /, *, name: str | None = None, retry_policy: RetryPolicy | None = None
) -> Any:
    """Make a function a step: `async def charge(ctx, amount): ...`. Sync functions run in threads."""
    decorator = ActivityDecorator(name, retry_policy)
    return decorator if fn is None else decorator(fn)


class ActivityDecorator:
    def __init__(self, name: str | None, retry_policy: RetryPolicy | None) -> None:
        self._name = name
        self._retry_policy = retry_policy

    @overload
    def __call__(self, fn: Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]], /) -> Activity[P, R]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[WorkflowContext, P], R], /) -> Activity[P, R]: ...

    def __call__(self, fn: Callable[..., Any], /) -> Activity[Any, Any]:
        return Activity(fn, self._name or fn.__name__, self._retry_policy)
