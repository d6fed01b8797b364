"""Errors for unknown keyword options, with the options that exist and the closest match."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

from edda.core.value_path import did_you_mean

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


_OTHER_NAMES = {"max_retries": "max_attempts", "retries": "max_attempts", "attempts": "max_attempts"}
"""Names of options in other libraries, which are too different for `did_you_mean`."""


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises `TypeError` for the first option that is not known."""
    known = sorted(known)
    for name in given:
        if name not in known:
            other = _OTHER_NAMES.get(name)
            hint = f"; did you mean {other!r}?" if other in known else did_you_mean(name, known)
            hint = hint or f"; it takes {', '.join(known)}"
            raise TypeError(f"{what} has no option {name!r}{hint}")


def known_options(fn: Callable[..., Any]) -> list[str]:
    return [name for name, one in inspect.signature(fn).parameters.items() if one.kind is one.KEYWORD_ONLY]


def hide_unknown(fn: Callable[..., Any]) -> None:
    """Removes `**unknown`, which exists only for the error message, from the signature that `help()` shows."""
    shown = inspect.signature(fn)
    known = [one for one in shown.parameters.values() if one.kind is not one.VAR_KEYWORD]
    vars(fn)["__signature__"] = shown.replace(parameters=known)


def explained(fn: F, name: str | None = None) -> F:
    """Decorator for a function with keyword options: unknown ones raise `TypeError` with the known names."""
    known = known_options(fn)

    @wraps(fn)
    def call(*args: Any, **options: Any) -> Any:
        if not options.keys() <= set(known):
            refuse_unknown(f"{name or fn.__name__}()", options, known)
        return fn(*args, **options)

    return cast(F, call)


def explained_class(cls: C) -> C:
    """Like `explained`, for a dataclass with keyword fields."""
    type.__setattr__(cls, "__init__", explained(vars(cls)["__init__"], cls.__name__))
    return cls
