"""What annotations mean, also when they are strings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from inspect import unwrap
from types import SimpleNamespace
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Namespace = Mapping[str, Any]


def hints_of(thing: Any, namespace: Namespace | None = None) -> dict[str, Any]:
    """The resolved annotations of a function or class; what cannot be resolved here is `Any`."""
    thing, local = _source(thing), dict(namespace) if namespace else None
    try:
        return get_type_hints(thing, localns=local, include_extras=True)
    except Exception:  # resolving runs the expressions users wrote: anything can come out of it
        return {name: _resolve(raw, scope, local) for name, raw, scope in _annotations(thing)}


def _source(thing: Any) -> Any:
    """The function or class that has the annotations."""
    while isinstance(thing, partial):
        thing = thing.func
    return thing if isinstance(thing, type) or hasattr(thing, "__annotations__") else type(thing).__call__


def _annotations(thing: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    if not isinstance(thing, type):
        scope = getattr(unwrap(thing), "__globals__", {})
        return [(name, raw, scope) for name, raw in getattr(thing, "__annotations__", {}).items()]
    return [
        (name, raw, vars(sys.modules[base.__module__]))
        for base in reversed(thing.__mro__)
        if base.__module__ in sys.modules
        for name, raw in vars(base).get("__annotations__", {}).items()
    ]


def _resolve(raw: Any, scope: dict[str, Any], local: dict[str, Any] | None) -> Any:
    holder = SimpleNamespace(__annotations__={"it": raw})
    try:
        return get_type_hints(holder, scope, local, include_extras=True)["it"]
    except Exception:  # the same; a name that only a type checker imports is the usual one
        return Any


def alias_target(alias: Any) -> Any:
    """What a type alias stands for; inside it may name itself in quotes."""
    return _resolve(alias.__value__, vars(sys.modules[alias.__module__]), None)


def type_arguments(annotation: Any) -> dict[TypeVar, Any]:
    """What stands for the type variables of `Page[Order]`, or of a class that inherits from it."""
    origin = get_origin(annotation) or annotation
    known = dict(zip(getattr(origin, "__parameters__", ()), get_args(annotation), strict=False))
    for base in getattr(origin, "__orig_bases__", ()):
        inherited = type_arguments(base)
        known = {variable: substitute(value, known) for variable, value in inherited.items()} | known
    return known


def substitute(annotation: Any, known: Mapping[TypeVar, Any]) -> Any:
    if isinstance(annotation, TypeVar):
        return known.get(annotation, annotation)
    variables = getattr(annotation, "__parameters__", ())
    if not variables or isinstance(annotation, type):
        return annotation
    return annotation[tuple(known.get(variable, variable) for variable in variables)]
