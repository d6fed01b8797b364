"""Reading what stands behind the question mark, and JSON bodies, into records."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct, inspect, structs

from edda.cloudevents.strict_json import read_raw
from edda.control.operations import MOST_ROWS
from edda.errors import EventError

from .responses import HTTPError, error_response

_MOST_FIELDS = 200
_LARGEST = 2**31 - 1
_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*?)`", re.DOTALL)
_KIND = re.compile(r"Expected `(.*?)`(, got `.*`)?")
_TIME = "a time with its zone, such as 2026-01-31T18:30:00Z"
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a JSON object",
    "datetime": _TIME,
}
_FORMS = (
    (inspect.IntType, re.compile("-?[0-9]+"), "a whole number"),
    (inspect.DateTimeType, re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}.*"), _TIME),
)
"""How they have to be written. The library would also take `null`, and a number for a time."""

T = TypeVar("T", bound=Struct)


def read_query(query: bytes, kind: type[T]) -> T:
    """A field that was left empty in a form counts as not given."""
    given: dict[str, Any] = {}
    for name, value in _pairs(query):
        if name in _lists_of(kind):
            given.setdefault(name, []).append(value)
        elif name in given:
            raise field_error(name, "expected once")
        else:
            _check_form(name, value, kind)
            given[name] = value
    try:
        found = msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _validation_error(error) from None
    _check_numbers(found)
    return found


def read_body(body: bytes, kind: type[T]) -> T:
    """An empty body is an order with nothing but defaults."""
    try:
        found = msgspec.json.decode(read_raw(body or b"{}", "body"), type=kind)
    except EventError as error:
        raise HTTPError(error_response(400, str(error))) from None
    except msgspec.ValidationError as error:
        raise _validation_error(error) from None
    search = getattr(found, "search", None)
    _check_numbers(found if search is None else search)
    _check_texts(found)
    return found


def field_error(field: str | None, expected: str) -> HTTPError:
    return HTTPError(error_response(422, f"{field}: {expected}" if field else expected, attribute=field))


def _pairs(query: bytes) -> list[tuple[str, str]]:
    try:
        pairs = parse_qsl(query.decode("ascii"), errors="strict", max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise field_error(None, f"expected a query of at most {_MOST_FIELDS} fields, percent-encoded UTF-8") from None
    if any("\0" in value for _, value in pairs):
        raise field_error(None, "expected a query without the character 0")  # which no database takes
    return [(name, value) for name, value in pairs if name != "access_token"]


@cache
def _lists_of(kind: type[Struct]) -> frozenset[str]:
    return frozenset(field.name for field in fields_of(kind) if isinstance(field.type, inspect.VarTupleType))


def _check_form(name: str, value: str, kind: type[Struct]) -> None:
    form = _forms_of(kind).get(name)
    if form is not None and not form[0].fullmatch(value):
        raise field_error(name, f"expected {form[1]}")


@cache
def _forms_of(kind: type[Struct]) -> dict[str, tuple[re.Pattern[str], str]]:
    return {
        field.name: (pattern, words)
        for field in fields_of(kind)
        for one, pattern, words in _FORMS
        if is_or_contains(field.type, one)
    }


def fields_of(kind: type[Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


def is_or_contains(kind: inspect.Type, wanted: type[inspect.Type]) -> bool:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return any(isinstance(one, wanted) for one in kinds)


def _check_numbers(found: Struct) -> None:
    limit, generation = getattr(found, "limit", 1), getattr(found, "generation", None)
    if not 1 <= limit <= MOST_ROWS:
        raise field_error("limit", f"expected 1 to {MOST_ROWS}")
    if generation is not None and not 0 <= generation <= _LARGEST:
        raise field_error("generation", f"expected 0 to {_LARGEST}")


def _check_texts(found: Struct) -> None:
    """Names and ids; in what a run is given every character may be."""
    for name, value in structs.asdict(found).items():
        if isinstance(value, Struct):
            _check_texts(value)
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and "\0" in text for text in texts) and name != "data":
            raise field_error(name, "expected a text without the character 0")


def _validation_error(error: msgspec.ValidationError) -> HTTPError:
    """What the library says, in words for who asks; it names the place at the end."""
    text, place = str(error), ""
    if placed := _PLACE.fullmatch(text):
        text, place = placed[1], placed[2]
    if field := _FIELD.fullmatch(text):
        told = "is required" if field[1] == "missing required" else "there is no such field"
        return field_error(f"{place}.{field[2]}" if place else field[2], told)
    return field_error(place or None, _translate(text))


def _translate(text: str) -> str:
    if kind := _KIND.fullmatch(text):
        kinds = [_KINDS.get(one, one) for one in kind[1].split(" | ") if one != "null"]
        return f"expected {' or '.join(kinds)}"
    return f"expected {_TIME}" if "RFC3339" in text else text
