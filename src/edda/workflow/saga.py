"""Sagas: what to do to undo a step, said beside the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import fields, is_dataclass
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
"""A parameter of this name gets the whole result."""


class Compensation(Activity[P, R]):
    """Made by `@compensation`: an activity that undoes another one."""

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
    """Make a function one that undoes an activity; for `@on_failure` and `register_compensation`."""
    refuse_unknown("@compensation()", unknown, known_options(compensation))
    decorator = CompensationDecorator(name, retry_policy)
    return decorator if fn is None else decorator(fn)


hide_unknown(compensation)


class CompensationDecorator:
    def __init__(self, name: str | None, retry_policy: RetryPolicy | None) -> None:
        self._name = name
        self._retry_policy = retry_policy

    @overload
    def __call__(
        self, fn: Callable[Concatenate[WorkflowContext, P], Coroutine[Any, Any, R]], /
    ) -> Compensation[P, R]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[WorkflowContext, P], R], /) -> Compensation[P, R]: ...

    def __call__(self, fn: Callable[..., Any], /) -> Compensation[Any, Any]:
        check_step("@compensation", fn, self._name, self._retry_policy)
        return Compensation(fn, self._name or fn.__name__, self._retry_policy)


def on_failure(undo: Callable[..., Any]) -> Callable[[F], F]:
    """Under `@activity`: if the run fails or is cancelled after this step, `undo` is called.

    It gets the arguments that its own signature asks for, by name: from the activity's arguments, from the fields of
    its result, and the whole result as `result`.
    """
    if not callable(undo):
        raise TypeError(f"@on_failure needs a function, got {undo!r}")
    step = _as_activity(undo)

    def mark(fn: F) -> F:
        if isinstance(fn, Activity):
            raise TypeError(f"@on_failure belongs under @activity, not above it: {fn.name}")
        remedy = ActivityCompensation(step, Signature(fn))
        setattr(fn, COMPENSATION_ATTRIBUTE, remedy)
        return fn

    setattr(mark, UNFINISHED_MARK, True)
    return mark


class NoopAwaitable:
    """May be awaited, and need not be: it is done."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


def register_compensation(ctx: WorkflowContext, undo: Callable[..., Any], *args: Any, **kwargs: Any) -> NoopAwaitable:
    """If the run fails or is cancelled from here on, `undo` is called with these arguments."""
    if not isinstance(ctx, RunContext):
        raise misplaced(ctx, "register_compensation(ctx, undo, ...)")
    activity = _as_activity(undo)
    signature, codec = activity.signature, ctx.codec
    # Kept as it is now: the workflow may change its lists and dictionaries.
    input = signature.encode(codec, signature.bind(args, kwargs, check=False))

    def run(id: str) -> Coroutine[Any, Any, Any]:
        stored_args, stored_kwargs = signature.decode(codec, input)
        return activity.with_id(id)(ctx, *stored_args, **stored_kwargs)

    ctx.execution.undoing.add(CompensationStep(activity.name, run))
    return NoopAwaitable()


def _as_activity(undo: Any) -> Activity[Any, Any]:
    if isinstance(undo, Activity):
        return undo
    if inspect.iscoroutine(undo):
        undo.close()
        raise TypeError(
            "register_compensation(ctx, refund(...)): the second argument was called already; pass the function "
            "itself, and its arguments after it: register_compensation(ctx, refund, amount)"
        )
    name = getattr(undo, "__name__", None)
    if name is None:
        raise TypeError(f"{undo!r} has no name, which its step needs: wrap it with @compensation(name=...)")
    return Compensation(undo, name, None)


class ActivityCompensation:
    """How an activity is undone."""

    def __init__(self, undo: Activity[Any, Any], signature: Signature) -> None:
        self._undo = undo
        self._signature = signature
        self._refuse_unknown()

    def _refuse_unknown(self) -> None:
        """What can be seen without a result: a parameter that nothing will ever fill."""
        undo, known = self._undo.signature, _names_in(self._signature)
        if known is None:
            return
        missing = [name for name in undo.required if name not in known]
        if missing:
            raise ArgumentError(
                f"@on_failure: {self._undo.name}() needs {_listed(missing)}, but {self._signature.name}() has only "
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
                f"{self._undo.name}() cannot undo {self._signature.name}(): it needs {_listed(missing)}, and there are "
                f"only {_listed(known)}. What {self._signature.name}() did stands; return what its undo needs."
            )
        return known if undo.takes_any else {name: known[name] for name in undo.names if name in known}

    def prepare(self, ctx: WorkflowContext, arguments: dict[str, Any]) -> CompensationStep:
        undo = self._undo
        return CompensationStep(undo.name, lambda id: undo.with_id(id)(ctx, **arguments))


class BoundActivityCompensation:
    """How one call of an activity is undone."""

    def __init__(self, remedy: ActivityCompensation, ctx: WorkflowContext, input: bytes) -> None:
        self._remedy = remedy
        self._ctx = ctx
        self._input = input

    def check(self, result: Any) -> None:
        """Raises `ArgumentError` if the result does not have what undoing needs."""
        self._remedy.arguments(self._ctx.codec, self._input, result)

    def prepare(self, result: Any) -> CompensationStep:
        return self._remedy.prepare(self._ctx, self._remedy.arguments(self._ctx.codec, self._input, result))


def _fields_of(result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return {name: value for name, value in result.items() if isinstance(name, str)}
    if is_dataclass(result):
        return {field.name: getattr(result, field.name) for field in fields(result)}
    model_fields = getattr(type(result), "model_fields", None)
    if model_fields is not None:
        return {name: getattr(result, name) for name in model_fields}
    return dict(getattr(result, "_asdict", dict)())


def _names_in(signature: Signature) -> list[str] | None:
    """All that undoing can be given; None if only the result itself will tell."""
    known = None if signature.takes_any else _names_of_type(signature.returns)
    return None if known is None else [*signature.names, RESULT, *known]


def _names_of_type(returns: Any) -> list[str] | None:
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
