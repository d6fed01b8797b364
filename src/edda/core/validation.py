"""Data from outside as the model that the code asks for.

Pydantic does it, for its own models and for everything else it knows: dataclasses, TypedDicts, unions, plain types.
It reads the JSON itself, since JSON has to be forgiven what Python has not: a date there is text. What it does not
know, such as a msgspec struct, is fitted like an argument of that type.

Decimals come from JSON numbers as pydantic reads them, with the precision of a float; from text they are exact.
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

from edda.core.types.adapters import ARGUMENT
from edda.core.types.build import shape_of
from edda.core.types.hints import alias_target, hints_of, substitute, type_arguments
from edda.core.types.models import TypeMismatchError, record_of

from .value_path import path_part, truncate

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema, ErrorDetails, ValidationError

MAX_ERRORS = 100
"""Of a long list in which every item is wrong, the first hundred say enough."""
MAX_MESSAGE = 300
_MAYBE_HUGE = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{300}")
"""In JSON with a number that may be beyond a float; text may look so too."""


class ValidationFailure(Exception):  # noqa: N818 - no error yet: who asked for the model makes one of it
    """Every part of the data that is not as the model says: its path, and what is wrong with it."""

    def __init__(self, errors: tuple[tuple[str, str], ...]) -> None:
        super().__init__("\n".join(f"{path}: {message}" for path, message in errors))
        self.errors = errors


def validate(data: Any, raw_json: bytes | None, model: Any) -> Any:
    """Takes the JSON if there is any, else the data."""
    adapter = find_adapter(model)
    if adapter is None:
        return _fit(data, model)
    from pydantic import ValidationError

    try:
        if raw_json is None:  # a model that was stored has its fields' own names
            return adapter.validate_python(data, by_alias=True, by_name=True)
        if _MAYBE_HUGE.search(raw_json):
            _refuse_infinite(raw_json)
        return adapter.validate_json(raw_json)
    except ValidationError as error:
        raise ValidationFailure(_errors(error)) from None


def _refuse_infinite(raw_json: bytes) -> None:
    """Pydantic reads 1e400 as the float infinity, which no JSON can say and no sender meant."""
    with suppress(msgspec.DecodeError):  # pydantic says what is wrong with it
        _FINITE.decode(raw_json)


def _read_finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValidationFailure((("$", "a number in it is larger than a float can be"),))
    return number


def _fit(data: Any, model: Any) -> Any:
    try:
        return shape_of(model).fit(data, ARGUMENT)
    except TypeMismatchError as misfit:
        raise ValidationFailure(((misfit.path.removeprefix(".") or "$", misfit.reason),)) from None


def _errors(error: ValidationError) -> tuple[tuple[str, str], ...]:
    details = error.errors(include_url=False, include_context=False)
    errors = tuple((_path(detail["loc"]), _message(detail)) for detail in details[:MAX_ERRORS])
    left_out = len(details) - len(errors)
    return (*errors, ("…", f"{left_out:,} more")) if left_out else errors


def _path(keys: tuple[str | int, ...]) -> str:
    return "".join(map(path_part, keys)).removeprefix(".") or "$"


def _message(detail: ErrorDetails) -> str:
    """Without the value: this text is logged, stored and sent to callers, and the field may be one that is redacted."""
    message = _WITHOUT_VALUE.get(detail["type"]) or truncate(detail["msg"], MAX_MESSAGE)
    return message if detail["type"] in _ABOUT_NOTHING else f"{message}, got {type(detail['input']).__qualname__}"


_WITHOUT_VALUE = {"union_tag_invalid": "Input tag is none of those expected"}
"""For the messages of pydantic that repeat what they got."""
_ABOUT_NOTHING = frozenset({"missing", "missing_argument", "json_invalid"})
"""There is no input to tell of: these come with the object around it, or with all of the text."""


def find_adapter(model: Any) -> TypeAdapter[Any] | None:
    """None if pydantic does not know what this is."""
    try:
        hash(model)
    except TypeError:  # an `Annotated` with a `Field`, say
        return _make_adapter(model)
    # With its text, because to Python `A | B` equals `B | A`, but the order decides which one is tried first.
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
    """Before Python 3.12 pydantic refuses the TypedDicts of `typing`, so they get a hook that it asks first."""
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
    """The same TypedDict, of the kind that pydantic takes. One for each, since a TypedDict may contain itself."""
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
