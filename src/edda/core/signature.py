"""Signature: binds, checks, encodes and decodes the arguments of workflows and activities.

The input is stored by name, in the order of the parameters. Defaults are applied at the call and stored with it: a
default that changes later does not affect runs that exist.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cached_property
from inspect import Parameter
from typing import Any, NoReturn, Unpack, get_origin

from edda.core.type_adapters import ANYTHING, ARGUMENT, TypeAdapter, adapter_of
from edda.core.type_models import TypeMismatchError, hints_of
from edda.core.value_path import did_you_mean
from edda.errors import ArgumentError

from .codec import Codec, Untyped, decode_as, fit_recorded, fits, is_storable

_PLAIN = (str, int, float, bool, bytes, dict, list, tuple, set)
_PLAIN_NAMES = tuple(kind.__name__ for kind in _PLAIN)
_STARS: dict[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


class Signature:
    """The parameters of a function after the first, which is the context."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name = getattr(fn, "__name__", repr(fn))
        self._fn = fn
        parameters = self._without_context(list(inspect.signature(fn).parameters.values()))
        named = [parameter for parameter in parameters if parameter.kind not in _STARS]
        self._parameters = parameters
        self.names = tuple(one.name for one in named)
        self._positional = tuple(one.name for one in named if one.kind is not Parameter.KEYWORD_ONLY)
        self._only_positional = sum(one.kind is Parameter.POSITIONAL_ONLY for one in named)
        self._keywords = frozenset(one.name for one in named if one.kind is not Parameter.POSITIONAL_ONLY)
        self._rest, self._extra = (_starred(parameters, kind) for kind in _STARS)
        self.defaults = {one.name: one.default for one in named if one.default is not Parameter.empty}
        self.required = tuple(name for name in self.names if name not in self.defaults)
        """The names of parameters without a default."""
        self.takes_any = self._extra is not None
        """Whether it has `**kwargs`."""
        # A default that cannot be stored is applied by the function itself.
        self._stored_defaults = {name: value for name, value in self.defaults.items() if is_storable(value)}

    def _without_context(self, parameters: list[Parameter]) -> list[Parameter]:
        if not parameters or parameters[0].kind not in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            self._refuse(f"needs a first parameter for the context: def {self.name}(ctx, ...)")
        first = parameters[0]
        if first.annotation in _PLAIN or first.annotation in _PLAIN_NAMES:
            kind = getattr(first.annotation, "__name__", first.annotation)
            self._refuse(
                f"has {first.name!r}, {kind}, as its first parameter, which must be the context: "
                f"def {self.name}(ctx: WorkflowContext, {first.name}: {kind}, ...)"
            )
        return parameters[1:]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], check: bool = True) -> dict[str, Any]:
        """The arguments by name, in the order of the parameters; those of `*args` and `**kwargs` are under these names,
        stars included. With `check` they are converted to the types of the parameters."""
        names, count = self.names, len(args)
        is_exact = (
            count + len(kwargs) == len(names)
            and self._only_positional <= count <= len(self._positional)
            and (not kwargs or all(name in kwargs for name in names[count:]))
        )
        if is_exact:  # the common case: one argument for each parameter
            given = dict(zip(names, args, strict=False))
            for name in names[count:]:
                given[name] = kwargs[name]
        else:
            given = self._match(args, kwargs)
        if check:
            key = ""
            try:
                for key, value in given.items():
                    given[key] = self._adapters[key].fit(value, ARGUMENT)
            except TypeMismatchError as mismatch:
                raise ArgumentError(f"{self.name}() argument {key!r}{mismatch.path}: {mismatch.reason}") from None
        return given if is_exact else self._arrange(given)

    def encode_input(self, codec: Codec, bound: dict[str, Any]) -> bytes:
        """Encode the input of a run for `decode_input`: values that do not fit their annotation, such as defaults, are
        marked as `Untyped`."""
        data = codec.encode(bound)
        untyped = {key: Untyped(value) for key, value in bound.items() if not fits(value, self._adapters[key])}
        return codec.encode(bound | untyped) if untyped else data

    def decode(self, codec: Codec, data: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for the function; one that does not fit its annotation is passed as plain data."""
        stored = codec.decode(data)
        return self._restore(stored, stored)

    def decode_input(self, codec: Codec, data: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for a workflow's function. Raises `NonDeterminismError` if an argument fitted its annotation
        when the run was started and does not now."""
        return self._restore(*codec.decode_input(data))

    def _restore(self, stored: Any, untyped: Container[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        adapters, what, values = self._adapters, f"the input of {self.name}(), argument", {}
        if not isinstance(stored, dict) or (stored.keys() != adapters.keys() and self._has_changed(stored)):
            self._refuse_stored(stored)
        for key, value in stored.items():
            adapter = adapters.get(key, ANYTHING)
            values[key] = decode_as(value, adapter) if key in untyped else fit_recorded(value, adapter, what, key)
        rest = values.pop(self._rest, ()) if self._rest else ()
        extra = values.pop(self._extra, {}) if self._extra else {}
        args = [values.pop(name) if name in values else self.defaults[name] for name in self._positional]
        return (*args, *rest), values | extra

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The annotations of the named parameters, without the context."""
        return {name: self._hints.get(name, Any) for name in self.names}

    def spread_names(self, bound: dict[str, Any]) -> dict[str, Any]:
        """All named arguments, including those of `**kwargs`."""
        extra = bound.get(self._extra, {}) if self._extra else {}
        return {name: value for name, value in bound.items() if name in self.names} | extra

    @cached_property
    def returns(self) -> Any:
        return self._hints.get("return", Any)

    @cached_property
    def _hints(self) -> dict[str, Any]:
        """Evaluated at the first use: annotations may name classes that are defined later."""
        return hints_of(self._fn)

    @cached_property
    def _adapters(self) -> dict[str, TypeAdapter]:
        return {_key(one): adapter_of(_annotation(one, self._hints.get(one.name, Any))) for one in self._parameters}

    def _match(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        rest = args[len(self._positional) :]
        if rest and self._rest is None:
            takes = (
                f"takes {len(self._positional)} positional arguments beside the context ({_listed(self._positional)})"
            )
            is_context = any(hasattr(one, "instance_id") and hasattr(one, "workflow_name") for one in args)
            self._refuse(f"{takes}, got {len(args)}{': do not pass the context' if is_context else ''}")
        given = dict(zip(self._positional, args, strict=False))
        extra = self._match_names(given, kwargs)
        if missing := [name for name in self.names if name not in given and name not in self.defaults]:
            self._refuse(f"needs {_listed(missing)}")
        if rest and self._rest:
            given[self._rest] = list(rest)
        if extra and self._extra:
            given[self._extra] = extra
        return given

    def _match_names(self, given: dict[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Add the arguments that were passed by name; returns those without a parameter."""
        extra: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name not in self._keywords:
                if self._extra is None:
                    hint = did_you_mean(name, self.names) or f"; it takes {_listed(self.names)}"
                    self._refuse(f"has no parameter {name!r}{hint}")
                extra[name] = value
            elif name in given:
                self._refuse(f"got {name!r} twice, by position and by name")
            else:
                given[name] = value
        return extra

    def _arrange(self, given: dict[str, Any]) -> dict[str, Any]:
        """In the order of the parameters, with the defaults."""
        known = self._stored_defaults | given
        return {key: known[key] for key in map(_key, self._parameters) if key in known}

    def _has_changed(self, stored: dict[str, Any]) -> bool:
        unknown = any(key not in self._adapters for key in stored) and self._extra is None
        return unknown or any(name not in stored and name not in self.defaults for name in self.names)

    def _refuse_stored(self, stored: Any) -> NoReturn:
        has = _listed(stored) if isinstance(stored, dict) else type(stored).__qualname__
        takes = _listed(map(_key, self._parameters))
        raise ArgumentError(
            f"the stored input of {self.name}() has {has}, but the function takes {takes}; "
            "keep old parameters, and give new ones a default, while runs with the old ones are open"
        )

    def _refuse(self, reason: str) -> NoReturn:
        raise ArgumentError(f"{self.name}() {reason}")


def returns_of(fn: Callable[..., Any]) -> Any:
    """The return annotation of a callable."""
    return hints_of(fn).get("return", Any)


def _key(parameter: Parameter) -> str:
    return _STARS.get(parameter.kind, "") + parameter.name


def _starred(parameters: Iterable[Parameter], kind: Any) -> str | None:
    return next((_key(parameter) for parameter in parameters if parameter.kind is kind), None)


def _annotation(parameter: Parameter, hint: Any) -> Any:
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return list[hint]
    if parameter.kind is Parameter.VAR_KEYWORD and get_origin(hint) is not Unpack:  # Unpack[Options] types all of them
        return dict[str, hint]
    return hint


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
