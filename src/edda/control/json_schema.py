"""What is wrong with a value, as far as its JSON schema says: every error, each at its place.

Enough of JSON Schema for what pydantic makes of models. What is not known is taken to be fine: the workflow itself
looks at the value again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from fractions import Fraction
from typing import Any
from uuid import UUID

from msgspec import Struct

Schema = Mapping[str, Any]
Path = tuple[str | int, ...]


class SchemaError(Struct, frozen=True):
    path: Path
    reason: str


def find_errors(schema: Schema, value: Any) -> tuple[SchemaError, ...]:
    return tuple(_Checker(References(schema)).check(schema, value, ()))


class References:
    """Schemas that others refer to, by the place they stand at in the whole: `#/$defs/Order`."""

    def __init__(self, whole: Schema) -> None:
        self._whole = whole

    def resolve(self, schema: Schema) -> Schema:
        """Without references; what stands beside one counts more than what it leads to."""
        seen: set[str] = set()
        while True:
            parts = schema.get("allOf")
            if "$ref" in schema and schema["$ref"] not in seen:
                seen.add(schema["$ref"])
                target: Any = self._find(schema["$ref"])
            elif isinstance(parts, list) and len(parts) == 1:
                target = parts[0]
            else:
                return schema
            schema = {**target, **{key: part for key, part in schema.items() if key not in ("$ref", "allOf")}}

    def _find(self, reference: str) -> Schema:
        place: Any = self._whole
        for part in reference.removeprefix("#/").split("/"):
            place = place.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(place, Mapping) else {}
        return place if isinstance(place, Mapping) else {}


def variants_of(schema: Schema) -> list[Schema]:
    return list(schema.get("anyOf") or schema.get("oneOf") or ())


def is_same(one: Any, other: Any) -> bool:
    """As JSON: 1 is not true."""
    return _text_of(one) == _text_of(other)


def _text_of(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: int | float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and (isinstance(value, int) or value.is_integer())


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "string": (lambda value: isinstance(value, str), "a text"),
    "integer": (_is_whole, "a whole number"),
    "number": (_is_number, "a number"),
    "boolean": (lambda value: isinstance(value, bool), "true or false"),
    "array": (lambda value: isinstance(value, list), "a list"),
    "object": (lambda value: isinstance(value, dict), "an object"),
    "null": (lambda value: value is None, "null"),
}


class _Checker:
    def __init__(self, references: References) -> None:
        self._references = references

    def check(self, schema: Any, value: Any, path: Path) -> Iterator[SchemaError]:
        if not isinstance(schema, Mapping):
            if schema is False:
                yield SchemaError(path, "must not be there")
            return
        schema = self._references.resolve(schema)
        wrong = _wrong_kind(schema, value)
        if wrong is not None:
            yield SchemaError(path, wrong)
            return
        yield from self._check_variants(schema, value, path)
        yield from (SchemaError(path, reason) for reason in _wrong_size(schema, value))
        if isinstance(value, list):
            yield from self._check_items(schema, value, path)
        elif isinstance(value, dict):
            yield from self._check_members(schema, value, path)

    def _check_variants(self, schema: Schema, value: Any, path: Path) -> Iterator[SchemaError]:
        variants = variants_of(schema)
        if not variants:
            return
        key, mapping = _discriminator_of(schema)
        if mapping and isinstance(value, dict):
            yield from self._check_named(key, mapping, value, path)
            return
        tried = [list(self.check(variant, value, path)) for variant in variants]
        if all(tried):
            # The variant that went furthest is the one that was meant.
            yield from max(tried, key=lambda errors: max(len(error.path) for error in errors))

    def _check_named(self, key: str, mapping: Schema, value: Schema, path: Path) -> Iterator[SchemaError]:
        """The variant that the value itself says it is."""
        name = value.get(key)
        if isinstance(name, str) and name in mapping:
            yield from self.check({"$ref": mapping[name]}, value, path)
        else:
            reason = "is required" if key not in value else f"must be one of {', '.join(map(_text_of, mapping))}"
            yield SchemaError((*path, key), reason)

    def _check_items(self, schema: Schema, value: list[Any], path: Path) -> Iterator[SchemaError]:
        first = schema.get("prefixItems", [])
        for place, item in enumerate(value):
            wanted = first[place] if place < len(first) else schema.get("items", True)
            yield from self.check(wanted, item, (*path, place))

    def _check_members(self, schema: Schema, value: dict[str, Any], path: Path) -> Iterator[SchemaError]:
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name in schema.get("required", ()):
            if name not in value:
                yield SchemaError((*path, name), "is required")
        for name, member in value.items():
            yield from self.check(known.get(name, others), member, (*path, name))


def _discriminator_of(schema: Schema) -> tuple[str, Schema]:
    discriminator = schema.get("discriminator", {})
    return discriminator.get("propertyName", ""), discriminator.get("mapping", {})


def _wrong_kind(schema: Schema, value: Any) -> str | None:
    types = schema.get("type", ())
    types = [types] if isinstance(types, str) else list(types)
    known = [_TYPES[name] for name in types if name in _TYPES]
    if known and not any(fits(value) for fits, _ in known):
        return f"must be {' or '.join(words for _, words in known)}"
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None and not any(is_same(value, choice) for choice in choices):
        return f"must be one of {', '.join(map(_text_of, choices))}"
    return None


def _wrong_size(schema: Schema, value: Any) -> Iterator[str]:
    if _is_number(value):
        yield from _wrong_number(schema, value)
    elif isinstance(value, str):
        yield from _wrong_length(schema, len(value), "Length", "characters")
        yield from _wrong_text(schema, value)
    elif isinstance(value, list):
        yield from _wrong_length(schema, len(value), "Items", "items")
        if schema.get("uniqueItems") and len({_text_of(item) for item in value}) < len(value):
            yield "must not have the same item twice"
    elif isinstance(value, dict):
        yield from _wrong_length(schema, len(value), "Properties", "members")


_LIMITS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", lambda value, limit: value >= limit, "must be at least {}"),
    ("maximum", lambda value, limit: value <= limit, "must be at most {}"),
    ("exclusiveMinimum", lambda value, limit: value > limit, "must be more than {}"),
    ("exclusiveMaximum", lambda value, limit: value < limit, "must be less than {}"),
    ("multipleOf", lambda value, limit: not Fraction(str(value)) % Fraction(str(limit)), "must be a multiple of {}"),
)


def _wrong_number(schema: Schema, value: float) -> Iterator[str]:
    for name, holds, words in _LIMITS:
        if _is_number(schema.get(name)) and not holds(value, schema[name]):
            yield words.format(schema[name])


def _wrong_length(schema: Schema, length: int, what: str, unit: str) -> Iterator[str]:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}", length)
    if length < least:
        yield f"must have at least {least} {unit}"
    if length > most:
        yield f"must have at most {most} {unit}"


def _wrong_text(schema: Schema, value: str) -> Iterator[str]:
    pattern, format = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str) and not _fits_pattern(pattern, value):
        yield f"must look like {pattern}"
    if format in _FORMATS and not _is_read(_FORMATS[format][0], value):
        yield f"must be {_FORMATS[format][1]}"


def _fits_pattern(pattern: str, value: str) -> bool:
    try:
        return re.search(pattern, value) is not None
    except re.error:  # another dialect: the model itself will look
        return True


def _read_email(text: str) -> None:
    name, at, host = text.rpartition("@")
    if not (name and at and host) or any(character.isspace() for character in text):
        raise ValueError(text)


_FORMATS: dict[str, tuple[Callable[[str], Any], str]] = {
    "date": (date.fromisoformat, "a date such as 2026-07-31"),
    "date-time": (datetime.fromisoformat, "a date and time such as 2026-07-31T18:00:00Z"),
    "time": (time.fromisoformat, "a time such as 18:00:00"),
    "uuid": (UUID, "a UUID"),
    "email": (_read_email, "an email address"),
}


def _is_read(read: Callable[[str], Any], value: str) -> bool:
    try:
        read(value)
    except ValueError:
        return False
    return True
