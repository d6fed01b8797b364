"""Annotations, also those that are strings, and models: the fields of dataclasses, pydantic models, msgspec structs and
named tuples, and how to restore them.

A stored model is restored from its recorded fields without validation: validators and `__post_init__` ran when it was
created, and might give another result now.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, partial
from inspect import unwrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, UNSET, Struct, structs

from .value_path import LocatedError

if TYPE_CHECKING:
    from pydantic import BaseModel, TypeAdapter
    from pydantic.fields import FieldInfo


def hints_of(thing: Any) -> dict[str, Any]:
    """The evaluated annotations of a function or class; one that cannot be evaluated is `Any`."""
    while isinstance(thing, partial):
        thing = thing.func
    if not isinstance(thing, type) and not hasattr(thing, "__annotations__"):
        thing = type(thing).__call__
    try:
        return get_type_hints(thing, include_extras=True)
    except Exception:  # evaluating runs expressions of user code, which may raise anything
        return {name: _resolve(raw, scope) for name, raw, scope in _annotations(thing)}


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


def _resolve(raw: Any, scope: dict[str, Any]) -> Any:
    holder = SimpleNamespace(__annotations__={"it": raw})
    try:
        return get_type_hints(holder, scope, include_extras=True)["it"]
    except Exception:  # usually a name that is imported under TYPE_CHECKING only
        return Any


def alias_target(alias: Any) -> Any:
    """The type that an alias stands for; it may name itself in quotes."""
    return _resolve(alias.__value__, vars(sys.modules[alias.__module__]))


def type_arguments(annotation: Any) -> dict[TypeVar, Any]:
    """The types for the type variables of `Page[Order]`, or of a class that inherits from it."""
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


# Models


class TypeMismatchError(LocatedError):
    """A value that does not fit its annotation."""


class ModelField(Struct, frozen=True):
    annotation: Any
    default: Callable[[], Any] | None = None
    in_init: bool = True

    def is_default(self, value: Any) -> bool:
        return self.default is not None and type(value) is type(default := self.default()) and bool(value == default)


class ModelAdapter:
    """Reads, restores and constructs the instances of one class."""

    validates_itself = False
    own_keys: frozenset[str] = frozenset()
    """Keys that are stored beside the fields, such as the tag of a struct."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    @cached_property
    def fields(self) -> dict[str, ModelField]:
        """Read at the first use: annotations may name classes that are defined later."""
        return self._read_fields()

    def _read_fields(self) -> dict[str, ModelField]:
        raise NotImplementedError

    def take_apart(self, model: Any) -> dict[str, Any]:
        try:
            return {name: getattr(model, name) for name in self.fields}
        except AttributeError:  # a field was never set
            return {name: getattr(model, name) for name in self.fields if hasattr(model, name)}

    def restore(self, values: dict[str, Any], stored: dict[str, Any]) -> Any:
        """The model with these field values; `stored` has all stored keys, also unknown ones."""
        raise NotImplementedError

    def construct(self, values: Mapping[str, Any]) -> Any:
        """A new model, made by its constructor."""
        return self.cls(**values)

    def mismatch(self, stored: Mapping[str, Any]) -> str | None:
        """Why the stored keys cannot be of this class; None if they can."""
        return None

    def json_form(self, model: Any, name: str) -> Any:
        """The JSON value of a field whose type only the model's library can write; None if it cannot either."""
        return None

    def from_json_form(self, name: str, form: Any) -> Any:
        raise TypeMismatchError("is of a type that only its own library can read")

    def _complete(self, values: dict[str, Any]) -> dict[str, Any]:
        """Adds the defaults of fields that the class got after the model was stored."""
        if len(values) == len(self.fields):
            return values
        return {name: values[name] if name in values else _default(name, field) for name, field in self.fields.items()}


def _default(name: str, field: ModelField) -> Any:
    if field.default is None:
        raise TypeMismatchError(f"has no {name!r}")
    return field.default()


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


class DataclassRecord(ModelAdapter):
    def _read_fields(self) -> dict[str, ModelField]:
        hints = hints_of(self.cls)
        return {
            field.name: ModelField(hints.get(field.name, Any), _dataclass_default(field), field.init)
            for field in dataclasses.fields(self.cls)
        }

    def restore(self, values: dict[str, Any], stored: dict[str, Any]) -> Any:
        new: Any = self.cls.__new__
        model = new(self.cls)
        for name, value in self._complete(values).items():
            object.__setattr__(model, name, value)  # works for frozen classes too
        return model


def _dataclass_default(field: dataclasses.Field[Any]) -> Callable[[], Any] | None:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    return None if field.default is dataclasses.MISSING else _constant(field.default)


class StructRecord(ModelAdapter):
    cls: type[Struct]

    def __init__(self, cls: type[Struct]) -> None:
        super().__init__(cls)
        self.tag, self.tag_field = cls.__struct_config__.tag, cls.__struct_config__.tag_field
        self.own_keys = frozenset({self.tag_field} if self.tag_field else ())

    def _read_fields(self) -> dict[str, ModelField]:
        hints = hints_of(self.cls)
        return {
            field.name: ModelField(hints.get(field.name, Any), _struct_default(field))
            for field in structs.fields(self.cls)
        }

    def take_apart(self, model: Any) -> dict[str, Any]:
        values = {name: value for name, value in super().take_apart(model).items() if value is not UNSET}
        return {self.tag_field: self.tag} | values if self.tag_field else values

    def mismatch(self, stored: Mapping[str, Any]) -> str | None:
        if self.tag_field is None or stored.get(self.tag_field, self.tag) == self.tag:
            return None
        return f"has another {self.tag_field} than {self.tag!r}"

    def restore(self, values: dict[str, Any], stored: dict[str, Any]) -> Any:
        complete = self._complete(values)
        model = self.cls(**complete)
        # A struct cannot be created without its __post_init__; set the recorded values again after it.
        for name, value in complete.items():
            structs.force_setattr(model, name, value)
        return model


def _struct_default(field: structs.FieldInfo) -> Callable[[], Any] | None:
    if field.default_factory is not NODEFAULT:
        factory: Callable[[], Any] = field.default_factory
        return factory
    return None if field.default is NODEFAULT else _constant(field.default)


class NamedTupleRecord(ModelAdapter):
    cls: Any

    def _read_fields(self) -> dict[str, ModelField]:
        hints, defaults = hints_of(self.cls), self.cls._field_defaults
        return {
            name: ModelField(hints.get(name, Any), _constant(defaults[name]) if name in defaults else None)
            for name in self.cls._fields
        }

    def restore(self, values: dict[str, Any], stored: dict[str, Any]) -> Any:
        return tuple.__new__(self.cls, self._complete(values).values())


class PydanticRecord(ModelAdapter):
    validates_itself = True
    cls: type[BaseModel]

    def _read_fields(self) -> dict[str, ModelField]:
        self.cls.model_rebuild(raise_errors=False)
        return {
            name: ModelField(info.annotation, _pydantic_default(info)) for name, info in self.cls.model_fields.items()
        }

    def take_apart(self, model: BaseModel) -> dict[str, Any]:
        # Only the fields: the model's dict also has cached properties.
        values = {name: value for name, value in vars(model).items() if name in self.fields}
        return values | (model.model_extra or {})

    def restore(self, values: dict[str, Any], stored: dict[str, Any]) -> Any:
        if len(values) < len(self.fields):
            return self.construct(stored)  # stored by an older version of the class: its validators may migrate it
        extra = None
        if self.cls.model_config.get("extra") == "allow":
            extra = {name: value for name, value in stored.items() if name not in values}
        model = self.cls.__new__(self.cls)
        state = {
            "__dict__": values,
            "__pydantic_extra__": extra,
            "__pydantic_fields_set__": set(values),
            "__pydantic_private__": None,
        }
        model.__setstate__(state)
        if self.cls.__pydantic_post_init__:
            # Creates the private attributes, which are not stored; set the recorded values again after it.
            recorded = dict(values)
            model.model_post_init(None)
            vars(model).update(recorded)
        return model

    def construct(self, values: Mapping[str, Any]) -> Any:
        from pydantic import ValidationError

        try:
            return self.cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            mismatch = TypeMismatchError(first["msg"])
            for key in reversed(first["loc"]):
                mismatch.add_key(key)
            raise mismatch from None

    def json_form(self, model: BaseModel, name: str) -> Any:
        try:
            form = model.model_dump(mode="json", include={name}, warnings=False).get(name)
            same = self.from_json_form(name, form) == getattr(model, name)
        except Exception:  # a custom serialiser may raise anything
            return None
        return form if same else None  # a SecretStr, for example, is written as asterisks

    def from_json_form(self, name: str, form: Any) -> Any:
        return _adapter_of(self.cls, name).validate_python(form)


def _pydantic_default(info: FieldInfo) -> Callable[[], Any] | None:
    # A factory may take the other fields; what it returns is not known here.
    return None if info.is_required() or info.default_factory else _constant(info.default)


@lru_cache(maxsize=1024)
def _adapter_of(cls: type[BaseModel], name: str) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(cls.model_fields[name].rebuild_annotation())


@lru_cache(maxsize=4096)
def record_of(cls: type) -> ModelAdapter | None:
    if _is_pydantic(cls):
        return PydanticRecord(cls)
    if issubclass(cls, Struct):
        return StructRecord(cls)
    if dataclasses.is_dataclass(cls):
        return DataclassRecord(cls)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return NamedTupleRecord(cls)
    return None


def _is_pydantic(cls: type) -> bool:
    """Does not import pydantic: a class can only be pydantic's if pydantic is loaded.

    While another thread imports pydantic, the module may exist without its classes.
    """
    base = getattr(sys.modules.get("pydantic.main"), "BaseModel", None)
    return base is not None and issubclass(cls, base)
