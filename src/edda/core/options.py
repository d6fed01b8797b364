"""Options by name: one that does not exist is refused together with those that do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

from edda.core.types.adapters import did_you_mean

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


_OTHER_NAMES = {"max_retries": "max_attempts", "retries": "max_attempts", "attempts": "max_attempts"}
"""Options as other libraries call them, which no likeness of names finds."""


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises `TypeError` for the first option that is not known."""
    known = sorted(known)
    for name in given:
        if name not in known:
            hint = _suggest(name, known) or f"; it takes {', '.join(known)}"
            raise TypeError(f"{what} has no option {name!r}{hint}")


def _suggest(name: str, known: list[str]) -> str:
    other = _OTHER_NAMES.get(name)
    return f"; did you mean {other!r}?" if other in known else did_you_mean(name, known)


def known_options(fn: Callable[..., Any]) -> list[str]:
    return [name for name, one in inspect.signature(fn).parameters.items() if one.kind is one.KEYWORD_ONLY]


def hide_unknown(fn: Callable[..., Any]) -> None:
    """`**unknown` is there to be refused: `help()` and editors need not show it."""
    shown = inspect.signature(fn)
    known = [one for one in shown.parameters.values() if one.kind is not one.VAR_KEYWORD]
    vars(fn)["__signature__"] = shown.replace(parameters=known)


def explained(fn: F) -> F:
    """A function or method with options by name, that refuses others with the names it knows."""
    known = known_options(fn)

    @wraps(fn)
    def call(*args: Any, **options: Any) -> Any:
        if not options.keys() <= set(known):
            refuse_unknown(f"{fn.__name__}()", options, known)
        return fn(*args, **options)

    return cast(F, call)


def explained_class(cls: C) -> C:
    """A dataclass whose fields are given by name."""
    make: Callable[..., None] = vars(cls)["__init__"]
    known = known_options(make)

    @wraps(make)
    def init(self: Any, *args: Any, **options: Any) -> None:
        if not options.keys() <= set(known):
            refuse_unknown(f"{cls.__name__}()", options, known)
        make(self, *args, **options)

    type.__setattr__(cls, "__init__", init)
    return cls
