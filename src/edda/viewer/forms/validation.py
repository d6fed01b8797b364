"""Checks a value against its JSON schema (draft 2020-12) and returns every error with its path.

Keywords that are not listed here, such as `unevaluatedProperties`, are ignored: the workflow's own model validates the
value again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from fractions import Fraction
from itertools import chain
from typing import Any
from uuid import UUID

from msgspec import Struct

Schema = Mapping[str, Any]
Path = tuple[str | int, ...]


class SchemaError(Struct, frozen=True):
    path: Path
    reason: str


def find_errors(schema: Schema, value: Any) -> tuple[SchemaError, ...]:
    try:
        return tuple(_Checker(References(schema)).check(schema, value, ()))
    except RecursionError:
        return (SchemaError((), "is nested too deeply"),)


class References:
    """Resolves references within one document, such as `#/$defs/Order`."""

    def __init__(self, document: Schema) -> None:
        self._document = document

    def resolve(self, schema: Schema) -> Schema:
        """Merges the target of `$ref`, or of a single `allOf`, with the keywords beside it, which take precedence."""
        seen: set[str] = set()
        while True:
            parts = schema.get("allOf")
            if "$ref" in schema and schema["$ref"] not in seen:
                seen.add(schema["$ref"])
                target: Any = self.find(schema["$ref"])
            elif isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], Mapping):
                target = parts[0]
            else:
                return schema
            schema = {**target, **{key: part for key, part in schema.items() if key not in ("$ref", "allOf")}}

    def find(self, reference: str) -> Schema:
        found: Any = self._document
        for part in reference.removeprefix("#/").split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, Mapping) else {}
        return found if isinstance(found, Mapping) else {}


def variants_of(schema: Schema) -> list[Schema]:
    return list(schema.get("anyOf") or schema.get("oneOf") or ())


def is_same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and not true."""
    return bool(_comparable(one) == _comparable(other))


def _comparable(value: Any) -> Any:
    match value:
        case bool():
            return ("bool", value)
        case list():
            return ("list", *map(_comparable, value))
        case dict():
            return frozenset((key, _comparable(part)) for key, part in value.items())
        case _:
            return value


class _Checker:
    def __init__(self, references: References) -> None:
        self._references = references
        self._followed: set[tuple[str, int]] = set()
        """References that are being checked, with the id of the value: schemas may refer to each other in a circle."""

    def check(self, schema: Any, value: Any, path: Path) -> Iterator[SchemaError]:
        if not isinstance(schema, Mapping):
            if schema is False:
                yield SchemaError(path, "must not be present")
            return
        if (reason := _type_error(schema, value)) is not None:
            yield SchemaError(path, reason)
            return
        yield from self._check_reference(schema.get("$ref"), value, path)
        yield from self._check_combined(schema, value, path)
        if _is_number(value):
            yield from (SchemaError(path, reason) for reason in _number_errors(schema, value))
        elif isinstance(value, str):
            yield from (SchemaError(path, reason) for reason in _text_errors(schema, value))
        elif isinstance(value, list):
            yield from self._check_items(schema, value, path)
        elif isinstance(value, dict):
            yield from self._check_members(schema, value, path)

    def _is_valid(self, schema: Any, value: Any) -> bool:
        return next(self.check(schema, value, ()), None) is None

    def _check_reference(self, reference: Any, value: Any, path: Path) -> Iterator[SchemaError]:
        step = (reference, id(value))
        if isinstance(reference, str) and step not in self._followed:
            self._followed.add(step)
            try:
                yield from self.check(self._references.find(reference), value, path)
            finally:  # `_is_valid` closes the generator at the first error
                self._followed.discard(step)

    def _check_combined(self, schema: Schema, value: Any, path: Path) -> Iterator[SchemaError]:
        for part in schema.get("allOf", ()):
            yield from self.check(part, value, path)
        for keyword in ("anyOf", "oneOf"):
            yield from self._check_variants(keyword, schema, value, path)
        if "not" in schema and self._is_valid(schema["not"], value):
            yield SchemaError(path, f"must not match {_to_json(schema['not'])}")
        if "if" in schema:
            branch = "then" if self._is_valid(schema["if"], value) else "else"
            yield from self.check(schema.get(branch, True), value, path)

    def _check_variants(self, keyword: str, schema: Schema, value: Any, path: Path) -> Iterator[SchemaError]:
        if not schema.get(keyword):
            return
        discriminator = schema.get("discriminator", {})
        key, mapping = discriminator.get("propertyName", ""), discriminator.get("mapping", {})
        if mapping and isinstance(value, dict):
            yield from self._check_discriminated(key, mapping, value, path)
            return
        errors = [list(self.check(variant, value, path)) for variant in schema[keyword]]
        if all(errors):
            # The variant with the deepest error is most likely the intended one.
            yield from max(errors, key=lambda found: max(len(error.path) for error in found))
        elif keyword == "oneOf" and errors.count([]) > 1:
            yield SchemaError(path, "must match only one of the variants")

    def _check_discriminated(self, key: str, mapping: Schema, value: Schema, path: Path) -> Iterator[SchemaError]:
        name = value.get(key)
        if isinstance(name, str) and name in mapping:
            yield from self.check({"$ref": mapping[name]}, value, path)
        else:
            yield SchemaError((*path, key), "is required" if key not in value else _expected_one_of(list(mapping)))

    def _check_items(self, schema: Schema, value: list[Any], path: Path) -> Iterator[SchemaError]:
        yield from (SchemaError(path, reason) for reason in _length_errors(schema, len(value), "Items", "items"))
        if schema.get("uniqueItems") and len(set(map(_comparable, value))) < len(value):
            yield SchemaError(path, "must not have the same item twice")
        if "contains" in schema:
            count = sum(self._is_valid(schema["contains"], item) for item in value)
            limits = {"minContains": 1, **schema}
            yield from (SchemaError(path, reason) for reason in _length_errors(limits, count, "Contains", "such items"))
        prefix = schema.get("prefixItems", [])
        for index, item in enumerate(value):
            expected = prefix[index] if index < len(prefix) else schema.get("items", True)
            yield from self.check(expected, item, (*path, index))

    def _check_members(self, schema: Schema, value: dict[str, Any], path: Path) -> Iterator[SchemaError]:
        yield from (SchemaError(path, reason) for reason in _length_errors(schema, len(value), "Properties", "members"))
        dependent = schema.get("dependentRequired", {}).items()
        required = [schema.get("required", ()), *(names for key, names in dependent if key in value)]
        for name in chain(*required):
            if name not in value:
                yield SchemaError((*path, name), "is required")
        for name, member in value.items():
            yield from self.check(schema.get("propertyNames", True), name, (*path, name))
            for expected in _member_schemas(schema, name):
                yield from self.check(expected, member, (*path, name))
        for key, part in schema.get("dependentSchemas", {}).items():
            if key in value:
                yield from self.check(part, value, path)


def _member_schemas(schema: Schema, name: str) -> list[Any]:
    patterns = schema.get("patternProperties", {})
    found = [part for pattern, part in patterns.items() if _matches(pattern, name)]
    if name in schema.get("properties", {}):
        found.append(schema["properties"][name])
    return found or [schema.get("additionalProperties", True)]


# One value


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "string": (lambda value: isinstance(value, str), "a text"),
    "integer": (lambda value: _is_number(value) and value == int(value), "a whole number"),
    "number": (_is_number, "a number"),
    "boolean": (lambda value: isinstance(value, bool), "true or false"),
    "array": (lambda value: isinstance(value, list), "a list"),
    "object": (lambda value: isinstance(value, dict), "an object"),
    "null": (lambda value: value is None, "null"),
}


def _type_error(schema: Schema, value: Any) -> str | None:
    types = schema.get("type", ())
    known = [_TYPES[name] for name in ([types] if isinstance(types, str) else types) if name in _TYPES]
    if known and not any(has_type(value) for has_type, _ in known):
        return f"must be {' or '.join(text for _, text in known)}"
    for choices in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if choices is not None and not any(is_same(value, choice) for choice in choices):
            return _expected_one_of(choices)
    return None


def _expected_one_of(choices: Sequence[Any]) -> str:
    return f"must be one of {', '.join(map(_to_json, choices))}"


def _to_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


_LIMITS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", lambda value, limit: value >= limit, "must be at least {}"),
    ("maximum", lambda value, limit: value <= limit, "must be at most {}"),
    ("exclusiveMinimum", lambda value, limit: value > limit, "must be more than {}"),
    ("exclusiveMaximum", lambda value, limit: value < limit, "must be less than {}"),
    ("multipleOf", lambda value, limit: not Fraction(str(value)) % Fraction(str(limit)), "must be a multiple of {}"),
)


def _number_errors(schema: Schema, value: float) -> Iterator[str]:
    for name, holds, text in _LIMITS:
        if _is_number(schema.get(name)) and not holds(value, schema[name]):
            yield text.format(schema[name])


def _length_errors(schema: Schema, length: int, noun: str, unit: str) -> Iterator[str]:
    minimum, maximum = schema.get(f"min{noun}", 0), schema.get(f"max{noun}", length)
    if length < minimum:
        yield f"must have at least {minimum} {unit}"
    if length > maximum:
        yield f"must have at most {maximum} {unit}"


def _text_errors(schema: Schema, value: str) -> Iterator[str]:
    yield from _length_errors(schema, len(value), "Length", "characters")
    pattern, format = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str) and not _matches(pattern, value):
        yield f"must match {pattern}"
    if format in _FORMATS:
        parse, text = _FORMATS[format]
        try:
            parse(value)
        except ValueError:
            yield f"must be {text}"


def _matches(pattern: str, value: str) -> bool:
    try:
        return re.search(pattern, value) is not None
    except re.error:  # a dialect that Python cannot compile: the model itself checks it
        return True


def _parse_email(text: str) -> None:
    name, at, host = text.rpartition("@")
    if not (name and at and host) or any(character.isspace() for character in text):
        raise ValueError(text)


_FORMATS: dict[str, tuple[Callable[[str], Any], str]] = {
    "date": (date.fromisoformat, "a date such as 2026-07-31"),
    "date-time": (datetime.fromisoformat, "a date and time such as 2026-07-31T18:00:00Z"),
    "time": (time.fromisoformat, "a time such as 18:00:00"),
    "uuid": (UUID, "a UUID"),
    "email": (_parse_email, "an email address"),
}
