"""Query strings and JSON bodies into records, with an error that names the field."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct, inspect, structs

from edda.cloudevents.strict_json import read_raw
from edda.control.views import MAX_PAGE_SIZE
from edda.errors import EventError

from .responses import HTTPError, error_response

_MAX_FIELDS = 200
_MAX_INT32 = 2**31 - 1
_LOCATION = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
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
_FORMATS = (
    (inspect.IntType, re.compile("-?[0-9]+"), "a whole number"),
    (inspect.DateTimeType, re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}.*"), _TIME),
)
"""Checked before conversion: msgspec would also accept `null`, and a number for a time."""

T = TypeVar("T", bound=Struct)


def read_query(query: bytes, kind: type[T]) -> T:
    """An empty value, as forms send it, counts as not given."""
    values: dict[str, Any] = {}
    for name, value in _pairs(query):
        if name in _list_fields(kind):
            values.setdefault(name, []).append(value)
        elif name in values:
            raise field_error(name, "expected once")
        else:
            pattern, expected = _formats_of(kind).get(name, (None, ""))
            if pattern is not None and not pattern.fullmatch(value):
                raise field_error(name, f"expected {expected}")
            values[name] = value
    try:
        found = msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _validation_error(error) from None
    _check_numbers(found)
    return found


def read_body(body: bytes, kind: type[T]) -> T:
    """An empty body means all defaults."""
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
        pairs = parse_qsl(query.decode("ascii"), errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise field_error(None, f"expected a query of at most {_MAX_FIELDS} fields, percent-encoded UTF-8") from None
    if any("\0" in value for _, value in pairs):
        raise field_error(None, "expected a query without the character U+0000")  # PostgreSQL cannot store it
    return [(name, value) for name, value in pairs if name != "access_token"]


@cache
def _list_fields(kind: type[Struct]) -> frozenset[str]:
    return frozenset(field.name for field in fields_of(kind) if isinstance(field.type, inspect.VarTupleType))


@cache
def _formats_of(kind: type[Struct]) -> dict[str, tuple[re.Pattern[str], str]]:
    return {
        field.name: (pattern, expected)
        for field in fields_of(kind)
        for one, pattern, expected in _FORMATS
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
    if not 1 <= limit <= MAX_PAGE_SIZE:
        raise field_error("limit", f"expected 1 to {MAX_PAGE_SIZE}")
    if generation is not None and not 0 <= generation <= _MAX_INT32:
        raise field_error("generation", f"expected 0 to {_MAX_INT32}")


def _check_texts(found: Struct) -> None:
    """U+0000 is rejected in names and ids, and allowed in the data of a run."""
    for name, value in structs.asdict(found).items():
        if isinstance(value, Struct):
            _check_texts(value)
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and "\0" in text for text in texts) and name != "data":
            raise field_error(name, "expected a text without the character U+0000")


def _validation_error(error: msgspec.ValidationError) -> HTTPError:
    """The message of msgspec, which ends in the path of the field, in the words of our API."""
    text, path = str(error), ""
    if located := _LOCATION.fullmatch(text):
        text, path = located[1], located[2]
    if field := _FIELD.fullmatch(text):
        reason = "is required" if field[1] == "missing required" else "there is no such field"
        return field_error(f"{path}.{field[2]}" if path else field[2], reason)
    if kind := _KIND.fullmatch(text):
        kinds = [_KINDS.get(one, one) for one in kind[1].split(" | ") if one != "null"]
        text = f"expected {' or '.join(kinds)}"
    elif "RFC3339" in text:
        text = f"expected {_TIME}"
    return field_error(path or None, text)
