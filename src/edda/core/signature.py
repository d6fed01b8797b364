"""A function's parameters: what a caller may pass, what is stored of it, and how it comes back.

The input is stored by name, in the order of the parameters, so that it can be read and compared. Defaults are applied
when the call is made and stored with it: a default that changes later does not change a run that has begun.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from inspect import Parameter
from typing import Any, NoReturn, Unpack, get_origin

from msgspec import Struct

from edda.core.types.adapters import ANYTHING, ARGUMENT, TypeAdapter, did_you_mean
from edda.core.types.build import shape_of
from edda.core.types.hints import Namespace, hints_of
from edda.core.types.models import TypeMismatchError
from edda.errors import ArgumentError

from .codec import Codec, decode_as, fit_recorded, fits
from .json_values import Untyped, is_storable

_PLAIN = (str, int, float, bool, bytes, dict, list, tuple, set)
_PLAIN_NAMES = tuple(kind.__name__ for kind in _PLAIN)
_STARS: dict[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


class BoundArguments(Struct, frozen=True):
    """The arguments of one call by name; what `*args` and `**kwargs` take is under these names, stars included."""

    values: dict[str, Any]


class Signature:
    """The first parameter is the context and no part of the input.

    `namespace` has the names that string annotations may use beside the module's own: a function that is defined
    inside another one may need the other's variables.
    """

    def __init__(self, fn: Callable[..., Any], namespace: Namespace | None = None) -> None:
        self.name = getattr(fn, "__name__", repr(fn))
        self._fn, self._namespace = fn, namespace
        parameters = self._without_context(list(inspect.signature(fn).parameters.values()))
        named = [parameter for parameter in parameters if parameter.kind not in _STARS]
        self._parameters = parameters
        self._names = tuple(one.name for one in named)
        self._positional = tuple(one.name for one in named if one.kind is not Parameter.KEYWORD_ONLY)
        self._only_positional = sum(one.kind is Parameter.POSITIONAL_ONLY for one in named)
        self._keywords = frozenset(one.name for one in named if one.kind is not Parameter.POSITIONAL_ONLY)
        self._rest, self._extra = (_starred(parameters, kind) for kind in _STARS)
        self._defaults = {one.name: one.default for one in named if one.default is not Parameter.empty}
        # A default that cannot be stored is left to the function.
        self._stored_defaults = {name: value for name, value in self._defaults.items() if is_storable(value)}

    def _without_context(self, parameters: list[Parameter]) -> list[Parameter]:
        if not parameters or parameters[0].kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            self._refuse(f"needs a first parameter for the context: def {self.name}(ctx, ...)")
        first = parameters[0]
        if first.annotation in _PLAIN or first.annotation in _PLAIN_NAMES:
            kind = getattr(first.annotation, "__name__", first.annotation)
            self._refuse(
                f"has {first.name!r}, {kind}, as its first parameter, where the context belongs: "
                f"def {self.name}(ctx: WorkflowContext, {first.name}: {kind}, ...)"
            )
        return parameters[1:]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], check: bool = True) -> BoundArguments:
        """Match the arguments with the parameters and, if `check` says so, with their types."""
        given = self._match_simply(args, kwargs)
        if given is not None:
            return BoundArguments(self._check(given) if check else given)
        given = self._match(args, kwargs)
        return BoundArguments(self._arrange(self._check(given) if check else given))

    def encode(self, codec: Codec, bound: BoundArguments) -> bytes:
        return codec.encode(bound.values)

    def encode_input(self, codec: Codec, bound: BoundArguments) -> bytes:
        """Of a run, for `decode_input`: defaults and the fields of dataclasses need not be what their annotations
        say, and are marked then."""
        data = codec.encode(bound.values)
        untyped = [key for key, value in bound.values.items() if not fits(value, self._shapes[key])]
        if not untyped:
            return data
        return codec.encode(bound.values | {key: Untyped(bound.values[key]) for key in untyped})

    def decode(self, codec: Codec, data: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call the function with; an argument that does not fit its annotation is passed as it is."""
        stored = codec.decode(data)
        self._check_stored(stored)
        shapes = self._shapes
        values = {key: decode_as(value, shapes[key]) if key in shapes else value for key, value in stored.items()}
        return self._spread(values)

    def decode_input(self, codec: Codec, data: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call a workflow's function with. Raises `NonDeterminismError` if an argument fitted its annotation
        when the run was started, and does not now."""
        stored, untyped = codec.decode_input(data)
        self._check_stored(stored)
        shapes, what = self._shapes, f"the input of {self.name}(), argument"
        values = {
            key: decode_as(value, shapes.get(key, ANYTHING))
            if key in untyped
            else fit_recorded(value, shapes.get(key, ANYTHING), what, key)
            for key, value in stored.items()
        }
        return self._spread(values)

    def _check_stored(self, stored: Any) -> None:
        if not isinstance(stored, dict) or (stored.keys() != self._shapes.keys() and self._has_changed(stored)):
            self._refuse_stored(stored)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The annotations of the named parameters, the context left out."""
        return {name: self._hints.get(name, Any) for name in self._names}

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    @property
    def defaults(self) -> Mapping[str, Any]:
        return self._defaults

    @property
    def required(self) -> tuple[str, ...]:
        """Those without a default."""
        return tuple(name for name in self._names if name not in self._defaults)

    def spread_names(self, bound: BoundArguments) -> dict[str, Any]:
        """All that has a name, with what `**kwargs` took."""
        extra = bound.values.get(self._extra, {}) if self._extra else {}
        return {name: value for name, value in bound.values.items() if name in self._names} | extra

    @property
    def takes_any(self) -> bool:
        """Whether it has `**kwargs`."""
        return self._extra is not None

    @cached_property
    def returns(self) -> Any:
        return self._hints.get("return", Any)

    @cached_property
    def _hints(self) -> dict[str, Any]:
        """Read when first needed: annotations may name classes that are defined later."""
        return hints_of(self._fn, self._namespace)

    @cached_property
    def _shapes(self) -> dict[str, TypeAdapter]:
        return {_key(one): shape_of(_annotation(one, self._hints.get(one.name, Any))) for one in self._parameters}

    def _match_simply(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Each parameter has its argument and there are no others, as in most calls; None if that is not so."""
        count = len(args)
        if count + len(kwargs) != len(self._names) or not self._only_positional <= count <= len(self._positional):
            return None
        given = dict(zip(self._names, args, strict=False))
        try:
            for name in self._names[count:]:
                given[name] = kwargs[name]
        except KeyError:
            return None
        return given

    def _match(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        rest = args[len(self._positional) :]
        if rest and self._rest is None:
            takes = (
                f"takes {len(self._positional)} positional arguments beside the context ({_listed(self._positional)})"
            )
            is_context = any(hasattr(one, "instance_id") and hasattr(one, "workflow_name") for one in args)
            self._refuse(f"{takes}, got {len(args)}{': the context is among them, leave it out' if is_context else ''}")
        given = dict(zip(self._positional, args, strict=False))
        extra = self._match_names(given, kwargs)
        if missing := [name for name in self._names if name not in given and name not in self._defaults]:
            self._refuse(f"needs {_listed(missing)}")
        if rest and self._rest:
            given[self._rest] = list(rest)
        if extra and self._extra:
            given[self._extra] = extra
        return given

    def _match_names(self, given: dict[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Add the arguments that were passed by name; returns those that are no parameter."""
        extra: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name not in self._keywords:
                if self._extra is None:
                    self._refuse_unexpected(name)
                extra[name] = value
            elif name in given:
                self._refuse(f"got {name!r} twice, by position and by name")
            else:
                given[name] = value
        return extra

    def _check(self, given: dict[str, Any]) -> dict[str, Any]:
        shapes, fitted, key = self._shapes, {}, ""
        try:
            for key, value in given.items():
                fitted[key] = shapes[key].fit(value, ARGUMENT)
        except TypeMismatchError as misfit:
            raise ArgumentError(f"{self.name}() argument {key!r}{misfit.path}: {misfit.reason}") from None
        return fitted

    def _arrange(self, given: dict[str, Any]) -> dict[str, Any]:
        """In the order of the parameters, whatever the order of the call, and with the defaults."""
        known = self._stored_defaults | given
        return {key: known[key] for key in map(_key, self._parameters) if key in known}

    def _spread(self, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = values.pop(self._rest, ()) if self._rest else ()
        extra = values.pop(self._extra, {}) if self._extra else {}
        args = [values.pop(name) if name in values else self._defaults[name] for name in self._positional]
        return (*args, *rest), values | extra

    def _has_changed(self, stored: dict[str, Any]) -> bool:
        unknown = any(key not in self._shapes for key in stored) and self._extra is None
        return unknown or any(name not in stored and name not in self._defaults for name in self._names)

    def _refuse_stored(self, stored: Any) -> NoReturn:
        has = _listed(stored) if isinstance(stored, dict) else type(stored).__qualname__
        takes = _listed(map(_key, self._parameters))
        raise ArgumentError(
            f"the stored input of {self.name}() has {has}, but the function takes {takes}; "
            "keep old parameters, and give new ones a default, as long as runs with the old ones are open"
        )

    def _refuse_unexpected(self, name: str) -> NoReturn:
        self._refuse(
            f"has no parameter {name!r}{did_you_mean(name, self._names) or f'; it takes {_listed(self._names)}'}"
        )

    def _refuse(self, reason: str) -> NoReturn:
        raise ArgumentError(f"{self.name}() {reason}")


def returns_of(fn: Callable[..., Any]) -> Any:
    """The return annotation of anything that can be called."""
    return hints_of(fn).get("return", Any)


def _key(parameter: Parameter) -> str:
    return _STARS.get(parameter.kind, "") + parameter.name


def _starred(parameters: Iterable[Parameter], kind: Any) -> str | None:
    return next((_key(parameter) for parameter in parameters if parameter.kind is kind), None)


def _annotation(parameter: Parameter, hint: Any) -> Any:
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return list[hint]
    if parameter.kind is Parameter.VAR_KEYWORD and not _is_unpacked(hint):
        return dict[str, hint]
    return hint


def _is_unpacked(hint: Any) -> bool:
    """`**kwargs: Unpack[Options]` describes all of them at once."""
    return get_origin(hint) is Unpack


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
