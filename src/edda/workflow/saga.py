"""Sagas: `@on_failure`, `@compensation` and `register_compensation` declare how a completed step is undone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, get_type_hints, is_typeddict, overload

from edda.core.options import hide_unknown, known_options, refuse_unknown
from edda.core.signature import Signature
from edda.errors import ArgumentError

from .activity import COMPENSATION_ATTRIBUTE, UNFINISHED_MARK, Activity, check_step
from .compensation import CompensationStep
from .context import RunContext, misplaced

if TYPE_CHECKING:
    from edda.core.codec import Codec
    from edda.core.retry import RetryPolicy

    from .context import WorkflowContext

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

RESULT = "result"
"""The compensation's parameter that gets the whole result of the activity."""


class Compensation(Activity[P, R]):
    """Created by `@compensation`: an activity that undoes another one."""

    def __repr__(self) -> str:
        return f"<compensation {self.name}>"


@overload
def compensation(fn: Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]], /) -> Compensation[P, R]: ...


@overload
def compensation(fn: Callable[Concatenate[WorkflowContext, P], R], /) -> Compensation[P, R]: ...


@overload
def compensation(*, name: str | None = None, retry_policy: RetryPolicy | None = None) -> CompensationDecorator: ...


def compensation(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    retry_policy: RetryPolicy | None = None,
    **unknown: Any,
) -> Any:
    """Decorator for a function that undoes an activity; for `@on_failure` and `register_compensation`.

    Args:
        name: Name of the step, 1 to 255 characters. Default: the function's name.
        retry_policy: Policy of the compensation. Default None: the app's `default_retry_policy`.
    """
    refuse_unknown("@compensation()", unknown, known_options(compensation))
    decorator = CompensationDecorator(name, retry_policy)
    return decorator if fn is None else decorator(fn)


hide_unknown(compensation)


@dataclass(frozen=True)
class CompensationDecorator:
    name: str | None
    retry_policy: RetryPolicy | None

    @overload
    def __call__(
        self, fn: Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]], /
    ) -> Compensation[P, R]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[WorkflowContext, P], R], /) -> Compensation[P, R]: ...

    def __call__(self, fn: Callable[..., Any], /) -> Compensation[Any, Any]:
        check_step("@compensation", fn, self.name, self.retry_policy)
        return Compensation(fn, self.name or fn.__name__, self.retry_policy)


def on_failure(undo: Callable[..., Any]) -> Callable[[F], F]:
    """Decorator, placed under `@activity`: if the run fails or is cancelled after this step, `undo` is called.

    The parameters of `undo` are filled by name, from the activity's arguments and from the fields of its result; a
    parameter `result` gets the whole result.
    """
    if not callable(undo):
        raise TypeError(f"@on_failure: expected a function, got {undo!r}")
    step = _as_activity(undo)

    def mark(fn: F) -> F:
        if isinstance(fn, Activity):
            raise TypeError(f"@on_failure: write it under @activity, not above it: {fn.name}")
        setattr(fn, COMPENSATION_ATTRIBUTE, ActivityCompensation(step, Signature(fn)))
        return fn

    setattr(mark, UNFINISHED_MARK, True)
    return mark


class NoopAwaitable:
    """Returned by `register_compensation`, which is complete: `await` is allowed and does nothing."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


def register_compensation(ctx: WorkflowContext, undo: Callable[..., Any], *args: Any, **kwargs: Any) -> NoopAwaitable:
    """Register a compensation: if the run fails or is cancelled after this call, `undo` is called with these
    arguments. Compensations run in reverse order of their registration."""
    if not isinstance(ctx, RunContext):
        raise misplaced(ctx, "register_compensation(ctx, undo, ...)")
    activity = _as_activity(undo)
    signature, codec = activity.signature, ctx.codec
    # Encoded now: the workflow may change its lists and dictionaries later.
    input = codec.encode(signature.bind(args, kwargs, check=False))

    def run(id: str) -> Coroutine[Any, Any, Any]:
        stored_args, stored_kwargs = signature.decode(codec, input)
        return activity.with_id(id)(ctx, *stored_args, **stored_kwargs)

    ctx.execution.compensator.add(CompensationStep(activity.name, run))
    return NoopAwaitable()


def _as_activity(undo: Any) -> Activity[Any, Any]:
    if isinstance(undo, Activity):
        return undo
    if inspect.iscoroutine(undo):
        undo.close()
        raise TypeError(
            "register_compensation(ctx, refund(...)): expected a function, got a coroutine; pass the function itself "
            "and its arguments: register_compensation(ctx, refund, amount)"
        )
    name = getattr(undo, "__name__", None)
    if name is None:
        raise TypeError(f"{undo!r} has no name for its step: decorate it with @compensation(name=...)")
    return Compensation(undo, name, None)


class ActivityCompensation:
    """The compensation of an activity, and how its arguments are found."""

    def __init__(self, undo: Activity[Any, Any], signature: Signature) -> None:
        self._undo = undo
        self._signature = signature
        # Refuse at import a parameter that neither an argument nor a field of the result type can fill.
        result_fields = None if signature.takes_any else _names_of_type(signature.returns)
        if result_fields is None:
            return
        known = [*signature.names, RESULT, *result_fields]
        missing = [name for name in undo.signature.required if name not in known]
        if missing:
            raise ArgumentError(
                f"@on_failure: {undo.name}() needs {_listed(missing)}, but {signature.name}() has only "
                f"{_listed(known)} to give (its arguments, the fields of its result, and {RESULT!r})"
            )

    def bind_to(self, ctx: WorkflowContext, input: bytes) -> BoundActivityCompensation:
        return BoundActivityCompensation(self, ctx, input)

    def arguments(self, codec: Codec, input: bytes, result: Any) -> dict[str, Any]:
        args, kwargs = self._signature.decode(codec, input)
        given = self._signature.spread_names(self._signature.bind(args, kwargs, check=False))
        known = {**given, RESULT: result, **_fields_of(result)}
        if RESULT in given:
            known[RESULT] = given[RESULT]
        undo = self._undo.signature
        missing = [name for name in undo.required if name not in known]
        if missing:
            raise ArgumentError(
                f"{self._undo.name}() cannot undo {self._signature.name}(): it needs {_listed(missing)}, but only "
                f"{_listed(known)} are available. The effect of {self._signature.name}() remains; let it return the "
                "missing values."
            )
        return known if undo.takes_any else {name: known[name] for name in undo.names if name in known}


@dataclass(frozen=True)
class BoundActivityCompensation:
    """The compensation of one call of an activity."""

    compensation: ActivityCompensation
    ctx: WorkflowContext
    input: bytes

    def check(self, result: Any) -> None:
        """Raises `ArgumentError` if the result lacks a value that the compensation needs."""
        self.compensation.arguments(self.ctx.codec, self.input, result)

    def prepare(self, result: Any) -> CompensationStep:
        undo, arguments = self.compensation._undo, self.compensation.arguments(self.ctx.codec, self.input, result)
        return CompensationStep(undo.name, lambda id: undo.with_id(id)(self.ctx, **arguments))


def _fields_of(result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return {name: value for name, value in result.items() if isinstance(name, str)}
    if is_dataclass(result):
        return {field.name: getattr(result, field.name) for field in fields(result)}
    model_fields = getattr(type(result), "model_fields", None)
    if model_fields is not None:
        return {name: getattr(result, name) for name in model_fields}
    return dict(getattr(result, "_asdict", dict)())


def _names_of_type(returns: Any) -> list[str] | None:
    """The names of the fields of a result; None if its type does not tell."""
    if returns is None or returns in (type(None), str, int, float, bool, bytes):
        return []
    if is_typeddict(returns):
        return list(get_type_hints(returns))
    if is_dataclass(returns) and isinstance(returns, type):
        return [field.name for field in fields(returns)]
    model_fields = getattr(returns, "model_fields", None)
    return list(model_fields) if model_fields is not None else None


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
