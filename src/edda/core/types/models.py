"""How models are taken apart and put together: dataclasses, pydantic models, msgspec structs, named tuples.

A stored model is put together from its recorded fields, not validated again: validators and
`__post_init__` ran when it was made, and need not do the same the second time.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from msgspec import NODEFAULT, UNSET, Struct, structs

from edda.core.value_path import LocatedError

from .hints import hints_of

if TYPE_CHECKING:
    from pydantic import BaseModel, TypeAdapter


class TypeMismatchError(LocatedError):
    """A value that is not what its annotation says."""


class Field(Struct, frozen=True):
    annotation: Any
    default: Callable[[], Any] | None = None
    in_init: bool = True


class ModelAdapter:
    """One class of models."""

    validates_itself = False
    own_keys: frozenset[str] = frozenset()
    """What is stored beside the fields."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    @cached_property
    def fields(self) -> dict[str, Field]:
        """Read when first needed: their annotations may name classes that are defined later."""
        return self._read_fields()

    def _read_fields(self) -> dict[str, Field]:
        raise NotImplementedError

    def take_apart(self, model: Any) -> dict[str, Any]:
        try:
            return {name: getattr(model, name) for name in self.fields}
        except AttributeError:  # a field that was never set
            return {name: getattr(model, name) for name in self.fields if hasattr(model, name)}

    def restore(self, values: dict[str, Any], stored: dict[str, Any]) -> Any:
        """Make the model that had these values; `stored` is all there was, known or not."""
        raise NotImplementedError

    def construct(self, values: Mapping[str, Any]) -> Any:
        """Make a new model through its own constructor."""
        return self.cls(**values)

    def mismatch(self, stored: Mapping[str, Any]) -> str | None:
        """Why this cannot be a model of this class, if that is plain to see."""
        return None

    def json_form(self, model: Any, name: str) -> Any:
        """What to store for a field that only the model's library knows how to write; None if nobody does."""
        return None

    def from_json_form(self, name: str, form: Any) -> Any:
        raise TypeMismatchError("is of a type that only its own library knows")

    def _complete(self, values: dict[str, Any]) -> dict[str, Any]:
        """Fields that came into the class after the model was stored get their defaults."""
        if len(values) == len(self.fields):
            return values
        return {name: values[name] if name in values else _default(name, field) for name, field in self.fields.items()}


def _default(name: str, field: Field) -> Any:
    if field.default is None:
        raise TypeMismatchError(f"has no {name!r}")
    return field.default()


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


class DataclassRecord(ModelAdapter):
    def _read_fields(self) -> dict[str, Field]:
        hints = hints_of(self.cls)
        return {
            field.name: Field(hints.get(field.name, Any), _dataclass_default(field), field.init)
            for field in dataclasses.fields(self.cls)
        }

    def restore(self, values: dict[str, Any], stored: dict[str, Any]) -> Any:
        new: Any = self.cls.__new__
        model = new(self.cls)
        for name, value in self._complete(values).items():
            object.__setattr__(model, name, value)  # also where the class is frozen
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

    def _read_fields(self) -> dict[str, Field]:
        hints = hints_of(self.cls)
        return {
            field.name: Field(hints.get(field.name, Any), _struct_default(field)) for field in structs.fields(self.cls)
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
        # A struct cannot be made without its __post_init__; the recorded values have the last word.
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

    def _read_fields(self) -> dict[str, Field]:
        hints, defaults = hints_of(self.cls), self.cls._field_defaults
        return {
            name: Field(hints.get(name, Any), _constant(defaults[name]) if name in defaults else None)
            for name in self.cls._fields
        }

    def restore(self, values: dict[str, Any], stored: dict[str, Any]) -> Any:
        return tuple.__new__(self.cls, self._complete(values).values())


class PydanticRecord(ModelAdapter):
    validates_itself = True
    cls: type[BaseModel]

    def _read_fields(self) -> dict[str, Field]:
        self.cls.model_rebuild(raise_errors=False)
        return {name: Field(info.annotation) for name, info in self.cls.model_fields.items()}

    def take_apart(self, model: BaseModel) -> dict[str, Any]:
        # Only the fields: cached properties are in the model's dict as well.
        values = {name: value for name, value in vars(model).items() if name in self.fields}
        return values | (model.model_extra or {})

    def restore(self, values: dict[str, Any], stored: dict[str, Any]) -> Any:
        if len(values) < len(self.fields):
            return self.construct(stored)  # stored by an older class: its validators may know how to migrate it
        extra = None
        if self.cls.model_config.get("extra") == "allow":
            extra = {name: value for name, value in stored.items() if name not in values}
        return self._revive(values, extra)

    def _revive(self, values: dict[str, Any], extra: dict[str, Any] | None) -> BaseModel:
        model = self.cls.__new__(self.cls)
        state = {
            "__dict__": values,
            "__pydantic_extra__": extra,
            "__pydantic_fields_set__": set(values),
            "__pydantic_private__": None,
        }
        model.__setstate__(state)
        if self.cls.__pydantic_post_init__:
            # Makes the private attributes, which are not stored; the recorded values have the last word.
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
            misfit = TypeMismatchError(first["msg"])
            for key in reversed(first["loc"]):
                misfit.add_key(key)
            raise misfit from None

    def json_form(self, model: BaseModel, name: str) -> Any:
        try:
            form = model.model_dump(mode="json", include={name}, warnings=False).get(name)
            same = self.from_json_form(name, form) == getattr(model, name)
        except Exception:  # a type's own serialiser may raise anything; then nobody knows how to write it
            return None
        return form if same else None  # a SecretStr, say, is written as stars

    def from_json_form(self, name: str, form: Any) -> Any:
        return self._adapter(name).validate_python(form)

    def _adapter(self, name: str) -> TypeAdapter[Any]:
        return _adapter_of(self.cls, name)


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
    """A class can only be pydantic's if pydantic is loaded; this does not load it.

    Another thread may be loading it just now: then the module is there, and its classes are not.
    """
    base = getattr(sys.modules.get("pydantic.main"), "BaseModel", None)
    return base is not None and issubclass(cls, base)
