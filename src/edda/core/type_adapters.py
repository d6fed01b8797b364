"""Type adapters: convert a value to the type of an annotation.

`fit` returns a dict as the model that it was, a number as an enum member, and so on; it raises `TypeMismatchError` if
the value does not fit. Stored values and arguments of callers are converted by the same code in two modes.

In a union the first member that fits exactly wins, then the first that fits after a conversion; a model fits exactly if
its fields are the stored ones. So `str | Color` returns a string for a stored member: write the richer type first.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NewType, NotRequired, Required, TypeVar, Union, get_args, get_origin
from uuid import UUID

import msgspec
from msgspec import Struct

from .type_models import (
    ModelAdapter,
    TypeMismatchError,
    alias_target,
    hints_of,
    record_of,
    substitute,
    type_arguments,
)
from .value_path import did_you_mean, truncate


class ConversionMode(Struct, frozen=True):
    restoring: bool
    """Models are restored from their stored fields; otherwise their constructor is called."""
    exact: bool = False
    """Only models and enum members are converted, which are always stored in another form."""

    @property
    def attempts(self) -> tuple[ConversionMode, ...]:
        return (self,) if self.exact else (_EXACT[self.restoring], self)


STORED = ConversionMode(restoring=True)
ARGUMENT = ConversionMode(restoring=False)
_EXACT = {mode.restoring: ConversionMode(mode.restoring, exact=True) for mode in (STORED, ARGUMENT)}


class TypeAdapter:
    """Base class; itself the adapter of `Any`."""

    name = "anything"
    plain = True
    """JSON without tags needs no conversion."""

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        return value

    def mismatch(self, value: Any) -> TypeMismatchError:
        # Without the value: the text is logged and sent to callers, and the field may be secret.
        return TypeMismatchError(f"expected {self.name}, got {type(value).__qualname__}")


ANYTHING = TypeAdapter()


class ScalarAdapter(TypeAdapter):
    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.name = "None" if cls is NoneType else cls.__name__
        self.plain = cls in (str, int, bool, NoneType)
        self.sources = _SOURCES.get(cls, ())

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        kind = type(value)
        if kind is self.cls:
            return value
        # bool is a subclass of int, but True for a number is most likely a mistake.
        if not mode.exact and kind is not bool:
            if isinstance(value, self.cls):
                return value
            if kind in self.sources:
                return self._convert(value)
        raise self.mismatch(value)

    def _convert(self, value: Any) -> Any:
        try:
            return msgspec.convert(value, self.cls)
        except (msgspec.ValidationError, OverflowError):
            raise self.mismatch(value) from None


_SOURCES: dict[type, tuple[type, ...]] = {
    float: (int,),
    Decimal: (int, float, str),
    **dict.fromkeys((datetime, date, time, timedelta, UUID), (str,)),
}
"""Types that are converted, because JSON has no better one."""

SCALARS = frozenset({NoneType, str, int, bool, bytes, bytearray, *_SOURCES})


class InstanceAdapter(TypeAdapter):
    """A class without an adapter of its own: only its instances fit."""

    plain = False

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.name = cls.__qualname__

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        if isinstance(value, self.cls):
            return value
        raise self.mismatch(value)


class EnumAdapter(TypeAdapter):
    plain = False

    def __init__(self, cls: type[Enum]) -> None:
        self.cls = cls
        self.name = f"{cls.__qualname__} ({truncate(', '.join(repr(member.value) for member in cls))})"

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        try:
            return self.cls(value)
        except ValueError:
            raise self.mismatch(value) from None


class LiteralAdapter(TypeAdapter):
    """`Literal["a", "b"]`"""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.name = " or ".join(map(repr, values))
        self.values = values
        self.plain = not any(isinstance(value, Enum) for value in values)

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        for known in self.values:
            if type(known) is type(value) and known == value:
                return known
        for known in self.values:
            if isinstance(known, Enum) and type(known.value) is type(value) and known.value == value:
                return known
        raise self.mismatch(value)


class UnionAdapter(TypeAdapter):
    def __init__(self, members: Iterable[TypeAdapter]) -> None:
        self.members = tuple(members)
        self.name = " | ".join(member.name for member in self.members)
        self.plain = all(member.plain for member in self.members)

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        mismatches = []
        for attempt in mode.attempts:
            for member in self.members:
                try:
                    return member.fit(value, attempt)
                except TypeMismatchError as mismatch:
                    mismatches.append((member, mismatch))
        raise self._worst(mismatches) or self.mismatch(value)

    def _worst(self, mismatches: list[tuple[TypeAdapter, TypeMismatchError]]) -> TypeMismatchError | None:
        """For `Order | None` the error of `Order`, which is more precise."""
        real = [mismatch for member, mismatch in mismatches if member.name != "None"]
        return real[-1] if len(self.members) == 2 and len(real) < len(mismatches) else None


class ListAdapter(TypeAdapter):
    """Lists, sets and tuples with one type of item. Without `build` the value keeps its own type."""

    def __init__(
        self, item: TypeAdapter, build: type | None, exact: tuple[type, ...], convertible: tuple[type, ...] = ()
    ) -> None:
        self.item, self.build = item, build
        self.exact: tuple[Any, ...] = exact
        self.convertible: tuple[Any, ...] = exact + convertible
        self.name = f"{build.__name__ if build else 'collection'} of {item.name}"
        self.plain = item.plain and list in exact

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        if not isinstance(value, self.exact if mode.exact else self.convertible):
            raise self.mismatch(value)
        build: Any = self.build or next(kind for kind in self.convertible if isinstance(value, kind))
        if self.item is ANYTHING and type(value) is build:
            return value
        try:
            return build(self._fit_items(value, mode))
        except TypeError:  # an unhashable item of a set
            raise self.mismatch(value) from None

    def _fit_items(self, value: Iterable[Any], mode: ConversionMode) -> list[Any]:
        items: list[Any] = []
        try:
            for item in value:
                items.append(self.item.fit(item, mode))
        except TypeMismatchError as mismatch:
            mismatch.add_key(len(items))
            raise
        return items


class TupleAdapter(TypeAdapter):
    """`tuple[int, str]`"""

    plain = False

    def __init__(self, items: Iterable[TypeAdapter]) -> None:
        self.items = tuple(items)
        self.name = f"tuple of {', '.join(item.name for item in self.items) or 'nothing'}"

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        if not isinstance(value, tuple if mode.exact else (tuple, list)) or len(value) != len(self.items):
            raise self.mismatch(value)
        fitted: list[Any] = []
        try:
            for adapter, item in zip(self.items, value, strict=True):
                fitted.append(adapter.fit(item, mode))
        except TypeMismatchError as mismatch:
            mismatch.add_key(len(fitted))
            raise
        return tuple(fitted)


class DictAdapter(TypeAdapter):
    """A dict with one type of key and one type of value."""

    def __init__(self, key: TypeAdapter, item: TypeAdapter) -> None:
        self.key, self.item = key, item
        self.name = "dict" if key is item is ANYTHING else f"dict of {key.name} to {item.name}"
        self.plain = item.plain and key.plain

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        if not isinstance(value, dict):
            raise self.mismatch(value)
        if self.key is self.item is ANYTHING:
            return value
        fitted: dict[Any, Any] = {}
        key: Any = None
        try:
            for key, item in value.items():
                fitted[self.key.fit(key, mode)] = self.item.fit(item, mode)
        except TypeMismatchError as mismatch:
            mismatch.add_key(key)
            raise
        return fitted


class TypedDictAdapter(TypeAdapter):
    """A TypedDict. Unknown keys are kept, because it is a dict at run time."""

    plain = False

    def __init__(self, cls: Any, annotation: Any) -> None:
        self.cls, self.annotation, self.name = cls, annotation, cls.__qualname__

    @cached_property
    def content(self) -> tuple[dict[str, TypeAdapter], frozenset[str]]:
        """The items and the required keys; read at the first use, because it may contain itself."""
        hints, known = hints_of(self.cls), type_arguments(self.annotation)
        adapters = {key: adapter_of(substitute(hint, known)) for key, hint in hints.items()}
        # `__required_keys__` ignores a `NotRequired` in an annotation that is a string.
        required = {key for key in self.cls.__required_keys__ if get_origin(hints[key]) is not NotRequired}
        return adapters, frozenset(required | {key for key, hint in hints.items() if get_origin(hint) is Required})

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        items, required = self.content
        if not isinstance(value, dict) or (mode.exact and not value.keys() <= items.keys()):
            raise self.mismatch(value)
        if missing := required - value.keys():
            raise TypeMismatchError(f"expected {self.name}, got a dict without {', '.join(sorted(missing))}")
        return {key: _fit_part(items.get(key, ANYTHING), item, mode, key) for key, item in value.items()}


class ModelTypeAdapter(TypeAdapter):
    plain = False

    def __init__(self, record: ModelAdapter, annotation: Any) -> None:
        self.record, self.annotation = record, annotation
        self.cls, self.name = record.cls, record.cls.__qualname__

    @cached_property
    def fields(self) -> dict[str, TypeAdapter]:
        """Read at the first use, because a model may contain itself."""
        known = type_arguments(self.annotation)
        return {name: adapter_of(substitute(field.annotation, known)) for name, field in self.record.fields.items()}

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        if isinstance(value, self.cls):
            if not mode.restoring:
                self._check(value)
            return value
        content = value if isinstance(value, dict) else self._by_position(value)
        if reason := self.record.mismatch(content):
            raise TypeMismatchError(f"expected {self.name}, got a dict that {reason}")
        if mode.exact and content.keys() - self.record.own_keys != self.fields.keys():
            raise self.mismatch(value)
        return self._restore(content, mode) if mode.restoring else self._construct(content, mode)

    def _check(self, model: Any) -> None:
        """Most classes do not check their fields, and a model with wrong ones could not be restored from its record."""
        for name, value in self.record.take_apart(model).items():
            if name in self.fields:
                self._fit_field(name, value, ARGUMENT)

    def _by_position(self, value: Any) -> dict[str, Any]:
        if isinstance(value, (list, tuple)) and issubclass(self.cls, tuple) and len(value) == len(self.fields):
            return dict(zip(self.fields, value, strict=True))
        raise self.mismatch(value)

    def _restore(self, stored: dict[str, Any], mode: ConversionMode) -> Any:
        try:
            values = {name: adapter.fit(stored[name], mode) for name, adapter in self.fields.items() if name in stored}
        except TypeMismatchError:
            values = {name: self._fit_field(name, stored[name], mode) for name in self.fields if name in stored}
        try:
            return self.record.restore(values, stored)
        except TypeMismatchError:
            raise
        except Exception as error:  # hooks of a user class may raise anything
            raise TypeMismatchError(f"{self.name} cannot be restored: {error}") from error

    def _fit_field(self, name: str, value: Any, mode: ConversionMode) -> Any:
        try:
            return _fit_part(self.fields[name], value, mode, name)
        except TypeMismatchError as mismatch:
            if self.record.fields[name].is_default(value):  # `note: str = None`
                return value
            try:
                return self.record.from_json_form(name, value)
            except Exception:  # the first error is the better one
                raise mismatch from None

    def _construct(self, given: Mapping[str, Any], mode: ConversionMode) -> Any:
        if self.record.validates_itself:
            return self.record.construct(given)
        names = [name for name in given if name not in self.record.own_keys]
        values = {name: _fit_part(self._init_field(name), given[name], mode, name) for name in names}
        try:
            return self.record.construct(values)
        except Exception as error:  # the constructor of a user class may raise anything
            raise TypeMismatchError(f"{self.name} refuses the value: {error}") from error

    def _init_field(self, name: str) -> TypeAdapter:
        field = self.record.fields.get(name)
        if field is None or not field.in_init:
            raise TypeMismatchError(f"{self.name} has no {name!r}{did_you_mean(name, self.fields)}")
        return self.fields[name]


class Constrained(TypeAdapter):
    """`Annotated[int, Field(gt=0)]`: the library of the constraint checks arguments; stored values are not checked."""

    plain = False

    def __init__(self, inner: TypeAdapter, check: Callable[[Any], Any]) -> None:
        self.inner, self.check, self.name = inner, check, inner.name

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        fitted = self.inner.fit(value, mode)
        if mode.restoring:
            return fitted
        try:
            return self.check(fitted)
        except ValueError as error:
            details = getattr(error, "errors", None)
            raise TypeMismatchError(details()[0]["msg"] if details else str(error)) from None


class Alias(TypeAdapter):
    """A type alias, which may contain itself."""

    plain = False

    def __init__(self, alias: Any, args: tuple[Any, ...], annotation: Any) -> None:
        self.alias, self.args, self.name = alias, args, str(annotation)

    @cached_property
    def target(self) -> TypeAdapter:
        known = dict(zip(self.alias.__type_params__, self.args, strict=False))
        return adapter_of(substitute(alias_target(self.alias), known))

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        return self.target.fit(value, mode)


def _fit_part(adapter: TypeAdapter, value: Any, mode: ConversionMode, key: Any) -> Any:
    try:
        return adapter.fit(value, mode)
    except TypeMismatchError as mismatch:
        mismatch.add_key(key)
        raise


# The adapter of an annotation

MAX_KNOWN = 4096


_known: dict[int, tuple[TypeAdapter, Any]] = {}
"""The adapter and its annotation, by the identity of the annotation, because `A | B == B | A`, but the order decides
which one is tried first."""


def adapter_of(annotation: Any) -> TypeAdapter:
    known = _known.get(id(annotation))
    if known is not None:
        return known[0]
    adapter = _build(annotation)
    if len(_known) >= MAX_KNOWN:
        _known.clear()
    _known[id(annotation)] = (adapter, annotation)  # the reference keeps the id from being reused
    return adapter


def _build(annotation: Any) -> TypeAdapter:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in _FORMS:
        return _FORMS[origin](annotation, args)
    if annotation is None:
        return ScalarAdapter(NoneType)
    if isinstance(annotation, NewType):
        return adapter_of(annotation.__supertype__)
    if isinstance(annotation, TypeVar):
        if annotation.__constraints__:
            return UnionAdapter(map(adapter_of, annotation.__constraints__))
        return adapter_of(annotation.__bound__) if annotation.__bound__ else ANYTHING
    cls = origin or annotation
    if isinstance(cls, type):
        return _of_class(cls, args, annotation)
    if hasattr(cls, "__value__"):
        return Alias(cls, args, annotation)
    # Required, NotRequired, ReadOnly, Final qualify the name, not the value.
    return adapter_of(args[0]) if len(args) == 1 else ANYTHING


def _of_class(cls: Any, args: tuple[Any, ...], annotation: Any) -> TypeAdapter:
    if cls in _UNCHECKED or getattr(cls, "_is_protocol", False):
        return ANYTHING
    if cls in SCALARS:
        return ScalarAdapter(cls)
    if issubclass(cls, Enum):
        return EnumAdapter(cls)
    if hasattr(cls, "__required_keys__"):  # a TypedDict, of `typing` or of `typing_extensions`
        return TypedDictAdapter(cls, annotation)
    if record := record_of(cls):
        return ModelTypeAdapter(record, annotation)
    container = _ABSTRACT.get(cls) or next((_CONCRETE[base] for base in cls.__mro__ if base in _CONCRETE), None)
    return container(args) if container else InstanceAdapter(cls)


_UNCHECKED = frozenset({Any, object, type, abc.Callable})


def _annotated(annotation: Any, args: tuple[Any, ...]) -> TypeAdapter:
    inner = adapter_of(args[0])
    if any(isinstance(item, msgspec.Meta) for item in args):
        return Constrained(inner, partial(msgspec.convert, type=annotation))
    if any(type(item).__module__.partition(".")[0] in {"pydantic", "annotated_types"} for item in args[1:]):
        from pydantic import TypeAdapter

        return Constrained(inner, TypeAdapter(annotation).validate_python)
    return inner


def _item(args: tuple[Any, ...]) -> TypeAdapter:
    return adapter_of(args[0]) if args else ANYTHING


def _tuple(args: tuple[Any, ...]) -> TypeAdapter:
    if not args or args[1:] == (...,):
        return ListAdapter(_item(args), tuple, (tuple,), (list,))
    return TupleAdapter(map(adapter_of, args))


def _table(args: tuple[Any, ...]) -> TypeAdapter:
    key, item = map(adapter_of, args) if len(args) == 2 else (ANYTHING, ANYTHING)
    return DictAdapter(key, item)


_FORMS: dict[Any, Callable[[Any, tuple[Any, ...]], TypeAdapter]] = {
    Union: lambda _, args: UnionAdapter(map(adapter_of, args)),
    UnionType: lambda _, args: UnionAdapter(map(adapter_of, args)),
    Literal: lambda _, args: LiteralAdapter(args),
    Annotated: _annotated,
}
_CONCRETE: dict[type, Callable[[tuple[Any, ...]], TypeAdapter]] = {
    list: lambda args: ListAdapter(_item(args), list, (list,), (tuple,)),
    tuple: _tuple,
    set: lambda args: ListAdapter(_item(args), set, (set,), (set, frozenset, list, tuple)),
    frozenset: lambda args: ListAdapter(_item(args), frozenset, (frozenset,), (set, frozenset, list, tuple)),
    dict: _table,
}
_ABSTRACT: dict[type, Callable[[tuple[Any, ...]], TypeAdapter]] = {
    **dict.fromkeys((abc.Sequence, abc.MutableSequence), lambda args: ListAdapter(_item(args), None, (list, tuple))),
    **dict.fromkeys(
        (abc.Iterable, abc.Collection), lambda args: ListAdapter(_item(args), None, (list, tuple, set, frozenset))
    ),
    **dict.fromkeys((abc.Set, abc.MutableSet), lambda args: ListAdapter(_item(args), None, (set, frozenset))),
    **dict.fromkeys((abc.Mapping, abc.MutableMapping), _table),
}
