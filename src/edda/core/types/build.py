"""From an annotation to its shape."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NewType, NotRequired, Required, TypeVar, Union, get_args, get_origin

import msgspec

from .adapters import (
    ANYTHING,
    SCALARS,
    Alias,
    Constrained,
    DictAdapter,
    EnumAdapter,
    InstanceAdapter,
    ListAdapter,
    LiteralAdapter,
    ModelTypeAdapter,
    Scalar,
    TupleAdapter,
    TypeAdapter,
    TypedDictAdapter,
    UnionAdapter,
)
from .hints import alias_target, hints_of, substitute, type_arguments
from .models import ModelAdapter, record_of

MAX_KNOWN = 4096


class _Known(msgspec.Struct, frozen=True):
    annotation: Any
    shape: TypeAdapter


_known: dict[int, _Known] = {}
"""By identity: to Python `A | B` equals `B | A`, but the order decides which one is tried first."""


def shape_of(annotation: Any) -> TypeAdapter:
    known = _known.get(id(annotation))
    if known is not None:
        return known.shape
    shape = _build(annotation)
    if len(_known) >= MAX_KNOWN:
        _known.clear()
    _known[id(annotation)] = _Known(annotation, shape)  # holding it keeps its identity from being given away
    return shape


def _build(annotation: Any) -> TypeAdapter:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in _FORMS:
        return _FORMS[origin](annotation, args)
    if annotation is None:
        return Scalar(NoneType)
    if isinstance(annotation, NewType):
        return shape_of(annotation.__supertype__)
    if isinstance(annotation, TypeVar):
        return _of_variable(annotation)
    cls = origin or annotation
    return _of_class(cls, args, annotation) if isinstance(cls, type) else _of_form(cls, args, annotation)


def _of_variable(variable: TypeVar) -> TypeAdapter:
    if variable.__constraints__:
        return UnionAdapter(map(shape_of, variable.__constraints__))
    return shape_of(variable.__bound__) if variable.__bound__ else ANYTHING


def _of_form(form: Any, args: tuple[Any, ...], annotation: Any) -> TypeAdapter:
    if hasattr(form, "__value__"):
        return Alias(str(annotation), partial(_read_alias, form, args))
    # Required, NotRequired, ReadOnly, Final: these say something of the name, not of the value.
    return shape_of(args[0]) if len(args) == 1 else ANYTHING


def _of_class(cls: Any, args: tuple[Any, ...], annotation: Any) -> TypeAdapter:
    if cls in _SAY_NOTHING or getattr(cls, "_is_protocol", False):
        return ANYTHING
    if cls in SCALARS:
        return Scalar(cls)
    if issubclass(cls, Enum):
        return EnumAdapter(cls)
    if hasattr(cls, "__required_keys__"):  # a TypedDict, of `typing` or of `typing_extensions`
        return TypedDictAdapter(cls.__qualname__, partial(_read_items, cls, annotation))
    if record := record_of(cls):
        return ModelTypeAdapter(record, partial(_read_fields, record, annotation))
    container = _ABSTRACT.get(cls) or next((_CONCRETE[base] for base in cls.__mro__ if base in _CONCRETE), None)
    return container(args) if container else InstanceAdapter(cls)


_SAY_NOTHING = frozenset({Any, object, type, abc.Callable})


def _read_alias(alias: Any, args: tuple[Any, ...]) -> TypeAdapter:
    return shape_of(substitute(alias_target(alias), dict(zip(alias.__type_params__, args, strict=False))))


def _read_items(cls: Any, annotation: Any) -> tuple[dict[str, TypeAdapter], frozenset[str]]:
    hints, known = hints_of(cls), type_arguments(annotation)
    shapes = {key: shape_of(substitute(hint, known)) for key, hint in hints.items()}
    # Python itself does not see a `NotRequired` in an annotation that is a string.
    required = {key for key in cls.__required_keys__ if get_origin(hints[key]) is not NotRequired}
    return shapes, frozenset(required | {key for key, hint in hints.items() if get_origin(hint) is Required})


def _read_fields(record: ModelAdapter, annotation: Any) -> dict[str, TypeAdapter]:
    known = type_arguments(annotation)
    return {name: shape_of(substitute(field.annotation, known)) for name, field in record.fields.items()}


def _union(_: Any, args: tuple[Any, ...]) -> TypeAdapter:
    return UnionAdapter(map(shape_of, args))


def _literal(_: Any, args: tuple[Any, ...]) -> TypeAdapter:
    return LiteralAdapter(args)


def _annotated(annotation: Any, args: tuple[Any, ...]) -> TypeAdapter:
    inner = shape_of(args[0])
    if any(isinstance(item, msgspec.Meta) for item in args):
        return Constrained(inner, partial(msgspec.convert, type=annotation))
    if any(type(item).__module__.partition(".")[0] in {"pydantic", "annotated_types"} for item in args[1:]):
        from pydantic import TypeAdapter

        return Constrained(inner, TypeAdapter(annotation).validate_python)
    return inner


def _item(args: tuple[Any, ...]) -> TypeAdapter:
    return shape_of(args[0]) if args else ANYTHING


def _list(args: tuple[Any, ...]) -> TypeAdapter:
    return ListAdapter(_item(args), list, (list,), (tuple,))


def _set(kind: type, args: tuple[Any, ...]) -> TypeAdapter:
    return ListAdapter(_item(args), kind, (kind,), (set, frozenset, list, tuple))


def _tuple(args: tuple[Any, ...]) -> TypeAdapter:
    if not args or args[1:] == (...,):
        return ListAdapter(_item(args), tuple, (tuple,), (list,))
    return TupleAdapter(map(shape_of, args))


def _table(args: tuple[Any, ...]) -> TypeAdapter:
    key, item = map(shape_of, args) if len(args) == 2 else (ANYTHING, ANYTHING)
    return DictAdapter(key, item)


def _collection(kinds: tuple[type, ...], args: tuple[Any, ...]) -> TypeAdapter:
    return ListAdapter(_item(args), None, kinds)


_FORMS: dict[Any, Callable[[Any, tuple[Any, ...]], TypeAdapter]] = {
    Union: _union,
    UnionType: _union,
    Literal: _literal,
    Annotated: _annotated,
}
_CONCRETE: dict[type, Callable[[tuple[Any, ...]], TypeAdapter]] = {
    list: _list,
    tuple: _tuple,
    set: partial(_set, set),
    frozenset: partial(_set, frozenset),
    dict: _table,
}
_ABSTRACT: dict[type, Callable[[tuple[Any, ...]], TypeAdapter]] = {
    **dict.fromkeys((abc.Sequence, abc.MutableSequence), partial(_collection, (list, tuple))),
    **dict.fromkeys((abc.Iterable, abc.Collection), partial(_collection, (list, tuple, set, frozenset))),
    **dict.fromkeys((abc.Set, abc.MutableSet), partial(_collection, (set, frozenset))),
    **dict.fromkeys((abc.Mapping, abc.MutableMapping), _table),
}
