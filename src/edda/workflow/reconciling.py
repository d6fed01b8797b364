"""Whether a `reconcile` function can be called wherever its activity can."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any

_ANYTHING = [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]


def check_parameters(name: str, fn: Callable[..., Any], reconcile: Callable[..., Any]) -> None:
    if misfits := list(_misfits(fn, reconcile)):
        shown = getattr(reconcile, "__name__", repr(reconcile))
        raise TypeError(
            f"activity {name}: {shown}() must take the context and the activity's own parameters: {'; '.join(misfits)}"
        )


def _misfits(fn: Callable[..., Any], reconcile: Callable[..., Any]) -> Iterator[str]:
    wanted, given = _parameters(fn)[1:], _parameters(reconcile)
    if not given or given[0].kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
        yield "it has no first parameter for the context"
        return
    given = given[1:]
    if [one.kind for one in given] == _ANYTHING:
        return
    named, has = {one.name: one for one in wanted}, {one.name: one for one in given}
    yield from (f"it has no {name!r}" for name in named if name not in has)
    yield from (f"the activity has no {name!r}" for name in has if name not in named)
    yield from (f"{name!r} {reason}" for name in named.keys() & has if (reason := _difference(named[name], has[name])))
    if named.keys() == has.keys() and list(named) != list(has):
        yield f"their order is {', '.join(map(repr, named))}"


def _parameters(fn: Callable[..., Any]) -> list[Parameter]:
    return list(inspect.signature(fn).parameters.values())


def _difference(wanted: Parameter, given: Parameter) -> str:
    if wanted.kind is not given.kind:
        return f"is {wanted.kind.description} in the activity and {given.kind.description} here"
    return "" if wanted.default is Parameter.empty or given.default is not Parameter.empty else "needs a default, too"
