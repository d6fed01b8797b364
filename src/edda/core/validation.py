"""Validates data of events and messages against a model, and makes JSON schemas of annotations.

Pydantic validates its own models and all other types that it knows: dataclasses, TypedDicts, unions, plain types. It
reads the JSON text itself, because its JSON mode accepts conversions that its Python mode does not, such as text for a
date. Types that it does not know, such as msgspec structs, are converted like an argument of that type.

A type that pydantic does not know has no schema.

Pydantic reads a decimal from a JSON number with the precision of a float; a decimal from text is exact.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, Any, NewType, NotRequired, Required, get_args, get_origin, is_typeddict

import msgspec

from edda.core.type_adapters import ARGUMENT, adapter_of
from edda.core.type_models import TypeMismatchError, alias_target, hints_of, record_of, substitute, type_arguments

from .signature import Signature
from .value_path import path_part, truncate

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema, ErrorDetails, ValidationError

MAX_ERRORS = 100
"""Further errors of a long list are only counted."""
MAX_MESSAGE = 300
_MAYBE_HUGE = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{300}")
"""Finds JSON that may have a number beyond a float; text can match as well."""


class ValidationFailure(Exception):  # noqa: N818 - callers turn it into an error of their own
    """`errors` has the path and the problem of every invalid part of the data."""

    def __init__(self, errors: tuple[tuple[str, str], ...]) -> None:
        super().__init__("\n".join(f"{path}: {message}" for path, message in errors))
        self.errors = errors


def validate(data: Any, raw_json: bytes | None, model: Any) -> Any:
    """Validate `raw_json` if there is any, else `data`."""
    adapter = find_adapter(model)
    if adapter is None:
        return _fit(data, model)
    from pydantic import ValidationError

    try:
        if raw_json is None:  # a stored model has the names of its fields, not their aliases
            return adapter.validate_python(data, by_alias=True, by_name=True)
        if _MAYBE_HUGE.search(raw_json):
            _refuse_infinite(raw_json)
        return adapter.validate_json(raw_json)
    except ValidationError as error:
        raise ValidationFailure(_errors(error)) from None


def _refuse_infinite(raw_json: bytes) -> None:
    """Pydantic reads 1e400 as the float infinity, which JSON does not have."""
    with suppress(msgspec.DecodeError):  # pydantic reports invalid JSON
        _FINITE.decode(raw_json)


def _read_finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValidationFailure((("$", "a number in it is larger than a float can be"),))
    return number


def _fit(data: Any, model: Any) -> Any:
    try:
        return adapter_of(model).fit(data, ARGUMENT)
    except TypeMismatchError as mismatch:
        raise ValidationFailure(((mismatch.path.removeprefix(".") or "$", mismatch.reason),)) from None


def _errors(error: ValidationError) -> tuple[tuple[str, str], ...]:
    details = error.errors(include_url=False, include_context=False)
    errors = tuple((_path(detail["loc"]), _message(detail)) for detail in details[:MAX_ERRORS])
    left_out = len(details) - len(errors)
    return (*errors, ("…", f"{left_out:,} more")) if left_out else errors


def _path(keys: tuple[str | int, ...]) -> str:
    return "".join(map(path_part, keys)).removeprefix(".") or "$"


def _message(detail: ErrorDetails) -> str:
    """Without the value: the text is logged, stored and sent to callers, and the field may be secret."""
    message = _WITHOUT_VALUE.get(detail["type"]) or truncate(detail["msg"], MAX_MESSAGE)
    return message if detail["type"] in _WITHOUT_INPUT else f"{message}, got {type(detail['input']).__qualname__}"


_WITHOUT_VALUE = {"union_tag_invalid": "Input tag is none of those expected"}
"""Replaces messages of pydantic that repeat the value."""
_WITHOUT_INPUT = frozenset({"missing", "missing_argument", "json_invalid"})
"""Errors whose `input` is not the invalid value: it is the object around it, or the whole text."""


def find_adapter(model: Any) -> TypeAdapter[Any] | None:
    """Pydantic's adapter of a type; None if pydantic does not know it."""
    try:
        hash(model)
    except TypeError:  # unhashable, such as an `Annotated` with a `Field`
        return _make_adapter(model)
    # `repr` is part of the key, because `A | B == B | A`, but the order decides which one is tried first.
    return _known_adapter(model, repr(model))


@lru_cache(maxsize=1024)
def _known_adapter(model: Any, _text: str) -> TypeAdapter[Any] | None:
    return _make_adapter(model)


def _make_adapter(model: Any) -> TypeAdapter[Any] | None:
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticSchemaGenerationError

    if sys.version_info < (3, 12):
        _replace_typed_dicts(model, set())
    try:
        return TypeAdapter(model)
    except PydanticSchemaGenerationError:
        return None


def _replace_typed_dicts(annotation: Any, seen: set[Any]) -> None:
    """Before Python 3.12 pydantic refuses `typing.TypedDict`: add a hook with the schema of a copy."""
    for part in _parts(annotation, seen):
        _replace_typed_dicts(part, seen)
    origin = get_origin(annotation) or annotation
    if is_typeddict(origin) and not hasattr(origin, "__get_pydantic_core_schema__"):
        origin.__get_pydantic_core_schema__ = _twin_schema


def _parts(annotation: Any, seen: set[Any]) -> Iterator[Any]:
    yield from get_args(annotation)
    origin = get_origin(annotation) or annotation
    if isinstance(origin, NewType):
        yield origin.__supertype__
    elif isinstance(origin, type) and origin not in seen and (is_typeddict(origin) or record_of(origin)):
        seen.add(origin)
        yield from hints_of(origin).values()
    elif hasattr(origin, "__value__") and origin not in seen:
        seen.add(origin)
        yield alias_target(origin)


def _twin_schema(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    return handler.generate_schema(_adapted_type(source))


@lru_cache(maxsize=1024)
def _adapted_type(source: Any) -> Any:
    """The same TypedDict from `typing_extensions`. Cached, because a TypedDict may contain itself."""
    import typing_extensions

    cls, known = get_origin(source) or source, type_arguments(source)
    items = {key: _item(cls, key, substitute(hint, known)) for key, hint in hints_of(cls).items()}
    make: Any = typing_extensions.TypedDict
    twin = make(cls.__name__, items)
    if config := getattr(cls, "__pydantic_config__", None):
        twin.__pydantic_config__ = config
    return twin


def _item(cls: Any, key: str, hint: Any) -> Any:
    if get_origin(hint) in (Required, NotRequired):
        return hint
    return Required[hint] if key in cls.__required_keys__ else NotRequired[hint]


_FINITE = msgspec.json.Decoder(float_hook=_read_finite)


# JSON schemas


def load_pydantic() -> None:
    """Import pydantic, which is slow: call it in a thread before the first schema is made."""
    import pydantic.json_schema
    import pydantic.type_adapter  # noqa: F401 - loaded for later imports


def schema_of(annotation: Any) -> dict[str, Any] | None:
    """The schema of one JSON value, such as the data of an event."""
    from pydantic.errors import PydanticUserError

    adapter = find_adapter(annotation)
    if adapter is None:
        return None
    try:
        return adapter.json_schema(by_alias=True)
    except PydanticUserError:  # it can be validated but has no schema, such as a callable
        return None


def input_schema(signature: Signature) -> dict[str, Any]:
    """The schema of an object with the arguments of a function by name."""
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for name, annotation in signature.parameters.items():
        # A parameter without a schema accepts anything in the form.
        described = {} if annotation is Any else schema_of(annotation) or {}
        definitions |= described.pop("$defs", {})
        properties[name] = described | _default(signature, name)
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(signature.required)}
    if not signature.takes_any:
        schema["additionalProperties"] = False
    return schema | ({"$defs": definitions} if definitions else {})


def _default(signature: Signature, name: str) -> dict[str, Any]:
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    if name not in signature.defaults:
        return {}
    try:
        return {"default": to_jsonable_python(signature.defaults[name])}
    except (PydanticSerializationError, ValueError):
        return {}
