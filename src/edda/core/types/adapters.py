"""What an annotation asks of a value.

A shape takes a value and returns it as its annotation says: a dict as the model it was, a number as the enum
member it stands for. Restoring a stored value and checking a caller's argument are the same walk in two modes.

In a union the first member that fits exactly wins, then the first that fits after a conversion; models fit exactly if
their fields are the stored ones. So `str | Color` gives back a string for a stored member: name the richer type first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from difflib import get_close_matches
from enum import Enum
from functools import cached_property
from types import NoneType
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Struct

from edda.core.value_path import truncate

from .models import ModelAdapter, TypeMismatchError


class ConversionMode(Struct, frozen=True):
    restoring: bool
    """A model is put together from its stored fields; otherwise it is made by its own constructor."""
    exact: bool = False
    """Nothing is converted but what is always stored in another form: models and enum members."""

    @property
    def attempts(self) -> tuple[ConversionMode, ...]:
        return (self,) if self.exact else (_EXACT[self.restoring], self)


STORED = ConversionMode(restoring=True)
ARGUMENT = ConversionMode(restoring=False)
_EXACT = {mode.restoring: ConversionMode(mode.restoring, exact=True) for mode in (STORED, ARGUMENT)}


class TypeAdapter:
    """Anything at all."""

    name = "anything"
    plain = True
    """JSON without tags already is what it asks for."""

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        return value

    def misfit(self, value: Any) -> TypeMismatchError:
        # Never the value: this text is logged and sent to callers, and the field may be one that is redacted.
        return TypeMismatchError(f"expected {self.name}, got {type(value).__qualname__}")


ANYTHING = TypeAdapter()


class Scalar(TypeAdapter):
    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.name = "None" if cls is NoneType else cls.__name__
        self.plain = cls in (str, int, bool, NoneType)
        self.sources = _SOURCES.get(cls, ())

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        kind = type(value)
        if kind is self.cls:
            return value
        # To Python True is a 1, but who passes it for a number mistook something.
        if not mode.exact and kind is not bool:
            if isinstance(value, self.cls):
                return value
            if kind in self.sources:
                return self._convert(value)
        raise self.misfit(value)

    def _convert(self, value: Any) -> Any:
        try:
            return msgspec.convert(value, self.cls)
        except (msgspec.ValidationError, OverflowError):
            raise self.misfit(value) from None


_SOURCES: dict[type, tuple[type, ...]] = {
    float: (int,),
    Decimal: (int, float, str),
    **dict.fromkeys((datetime, date, time, timedelta, UUID), (str,)),
}
"""What JSON from outside has to be accepted for, since it has nothing better."""

SCALARS = frozenset({NoneType, str, int, bool, bytes, bytearray, *_SOURCES})


class InstanceAdapter(TypeAdapter):
    """A class we know nothing of."""

    plain = False

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.name = cls.__qualname__

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        if isinstance(value, self.cls):
            return value
        raise self.misfit(value)


class EnumAdapter(TypeAdapter):
    plain = False

    def __init__(self, cls: type[Enum]) -> None:
        self.cls = cls
        self.name = f"{cls.__qualname__} ({truncate(', '.join(repr(member.value) for member in cls))})"

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        try:
            return self.cls(value)
        except ValueError:
            raise self.misfit(value) from None


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
        raise self.misfit(value)


class UnionAdapter(TypeAdapter):
    def __init__(self, members: Iterable[TypeAdapter]) -> None:
        self.members = tuple(members)
        self.name = " | ".join(member.name for member in self.members)
        self.plain = all(member.plain for member in self.members)

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        misfits = []
        for attempt in mode.attempts:
            for member in self.members:
                try:
                    return member.fit(value, attempt)
                except TypeMismatchError as misfit:
                    misfits.append((member, misfit))
        raise self._worst(misfits) or self.misfit(value)

    def _worst(self, misfits: list[tuple[TypeAdapter, TypeMismatchError]]) -> TypeMismatchError | None:
        """Of `Order | None` it is the order's complaint that helps."""
        real = [misfit for member, misfit in misfits if member.name != "None"]
        return real[-1] if len(self.members) == 2 and len(real) < len(misfits) else None


class ListAdapter(TypeAdapter):
    """Lists, sets and tuples of one kind of item. Without a `build` the value keeps its own kind."""

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
            raise self.misfit(value)
        build: Any = self.build or next(kind for kind in self.convertible if isinstance(value, kind))
        if self.item is ANYTHING and type(value) is build:
            return value
        try:
            return build(self._fit_items(value, mode))
        except TypeError:  # an item of a set that does not hash
            raise self.misfit(value) from None

    def _fit_items(self, value: Iterable[Any], mode: ConversionMode) -> list[Any]:
        items: list[Any] = []
        try:
            for item in value:
                items.append(self.item.fit(item, mode))
        except TypeMismatchError as misfit:
            misfit.add_key(len(items))
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
            raise self.misfit(value)
        fitted: list[Any] = []
        try:
            for shape, item in zip(self.items, value, strict=True):
                fitted.append(shape.fit(item, mode))
        except TypeMismatchError as misfit:
            misfit.add_key(len(fitted))
            raise
        return tuple(fitted)


class DictAdapter(TypeAdapter):
    """A dict of one kind of key and one kind of value."""

    def __init__(self, key: TypeAdapter, item: TypeAdapter) -> None:
        self.key, self.item = key, item
        self.name = "dict" if key is item is ANYTHING else f"dict of {key.name} to {item.name}"
        self.plain = item.plain and key.plain

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        if not isinstance(value, dict):
            raise self.misfit(value)
        if self.key is self.item is ANYTHING:
            return value
        fitted: dict[Any, Any] = {}
        key: Any = None
        try:
            for key, item in value.items():
                fitted[self.key.fit(key, mode)] = self.item.fit(item, mode)
        except TypeMismatchError as misfit:
            misfit.add_key(key)
            raise
        return fitted


class TypedDictAdapter(TypeAdapter):
    """A TypedDict. Keys it does not know are kept: it is a dict, and they may be somebody's data."""

    plain = False

    def __init__(self, name: str, read: Callable[[], tuple[dict[str, TypeAdapter], frozenset[str]]]) -> None:
        self.name, self.read = name, read

    @cached_property
    def content(self) -> tuple[dict[str, TypeAdapter], frozenset[str]]:
        """Its items and which of them are required; read when first needed, since it may contain itself."""
        return self.read()

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        items, required = self.content
        if not isinstance(value, dict) or (mode.exact and not value.keys() <= items.keys()):
            raise self.misfit(value)
        if missing := required - value.keys():
            raise TypeMismatchError(f"expected {self.name}, got a dict without {', '.join(sorted(missing))}")
        return {key: _fit_part(items.get(key, ANYTHING), item, mode, key) for key, item in value.items()}


class ModelTypeAdapter(TypeAdapter):
    plain = False

    def __init__(self, record: ModelAdapter, read_fields: Callable[[], dict[str, TypeAdapter]]) -> None:
        self.record, self.read_fields = record, read_fields
        self.cls, self.name = record.cls, record.cls.__qualname__

    @cached_property
    def fields(self) -> dict[str, TypeAdapter]:
        """Read when first needed, since a model may contain itself."""
        return self.read_fields()

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        if isinstance(value, self.cls):
            return value
        content = value if isinstance(value, dict) else self._by_position(value)
        if reason := self.record.mismatch(content):
            raise TypeMismatchError(f"expected {self.name}, got a dict that {reason}")
        if mode.exact and content.keys() - self.record.own_keys != self.fields.keys():
            raise self.misfit(value)
        return self._restore(content, mode) if mode.restoring else self._construct(content, mode)

    def _by_position(self, value: Any) -> dict[str, Any]:
        if isinstance(value, (list, tuple)) and issubclass(self.cls, tuple) and len(value) == len(self.fields):
            return dict(zip(self.fields, value, strict=True))
        raise self.misfit(value)

    def _restore(self, stored: dict[str, Any], mode: ConversionMode) -> Any:
        try:
            values = {name: shape.fit(stored[name], mode) for name, shape in self.fields.items() if name in stored}
        except TypeMismatchError:
            values = {name: self._restore_field(name, stored[name], mode) for name in self.fields if name in stored}
        try:
            return self.record.restore(values, stored)
        except TypeMismatchError:
            raise
        except Exception as error:  # the class is the user's: its hooks may raise anything
            raise TypeMismatchError(f"{self.name} cannot be restored: {error}") from error

    def _restore_field(self, name: str, value: Any, mode: ConversionMode) -> Any:
        try:
            return _fit_part(self.fields[name], value, mode, name)
        except TypeMismatchError as misfit:
            try:
                return self.record.from_json_form(name, value)
            except Exception:  # only a second opinion, whatever is wrong with it
                raise misfit from None

    def _construct(self, given: Mapping[str, Any], mode: ConversionMode) -> Any:
        if self.record.validates_itself:
            return self.record.construct(given)
        names = [name for name in given if name not in self.record.own_keys]
        values = {name: _fit_part(self._init_field(name), given[name], mode, name) for name in names}
        try:
            return self.record.construct(values)
        except Exception as error:  # the class is the user's: its constructor may raise anything
            raise TypeMismatchError(f"{self.name} refuses this: {error}") from error

    def _init_field(self, name: str) -> TypeAdapter:
        field = self.record.fields.get(name)
        if field is None or not field.in_init:
            raise TypeMismatchError(f"{self.name} has no {name!r}{did_you_mean(name, self.fields)}")
        return self.fields[name]


class Constrained(TypeAdapter):
    """`Annotated[int, Field(gt=0)]`: the library of the constraint checks it, for arguments only."""

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
    """A name for a type, which may contain itself."""

    plain = False

    def __init__(self, name: str, read_target: Callable[[], TypeAdapter]) -> None:
        self.name, self.read_target = name, read_target

    @cached_property
    def target(self) -> TypeAdapter:
        return self.read_target()

    def fit(self, value: Any, mode: ConversionMode) -> Any:
        return self.target.fit(value, mode)


def _fit_part(shape: TypeAdapter, value: Any, mode: ConversionMode, key: Any) -> Any:
    try:
        return shape.fit(value, mode)
    except TypeMismatchError as misfit:
        misfit.add_key(key)
        raise


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
