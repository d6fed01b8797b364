"""Keys that connect a wait with its event through one index lookup.

A match has paths and the values expected there: `{"order.id": "A-17", "@subject": "x"}`. The key of a wait is a digest
of the event type, the sorted paths (the match paths) and the values. An event is stored under one key for each known
list of match paths of its type, so that a lookup does not depend on the number of waits.

A path goes into the event's data: `a.b` is `b` in `a`, `a.0` is the first item of a list, `a\\.b` is one name with a
dot. `@subject` is an attribute of the event (`\\@subject` is data of that name).

Values are compared as JSON. Numbers are compared by their decimal value: 1 = 1.0 = 1e0, and no digit is lost; a float
in a match has the value that Python prints. `"1"`, `1` and `true` are different, `null` is not a missing path, and text
is compared exactly, case and accents included. Attributes are compared as text, because an HTTP header has only text:
there 5 and `"5"` are equal, and so are `True` and `"true"`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, cast
from uuid import UUID
from zlib import crc32

import msgspec
from msgspec import Struct

from .model import EventKey
from .value_path import path_part, repr_short, truncate

MAX_PATHS_BYTES = 1_600
MAX_DEPTH = 64
"""Events with deeper data are refused."""
MAX_DIGITS = 4_300
"""Events with longer numbers are refused."""
BUCKETS = 256

_MISSING = object()
_ATTRIBUTE = re.compile(r"@[a-z0-9]+")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")

_write = msgspec.json.Encoder(decimal_format="number").encode


def parse_match(match: Mapping[str, Any] | None) -> dict[str, Any]:
    """The match as JSON values and decimals; raises for values that no event can have."""
    if match is None:
        return {}
    if not isinstance(match, Mapping):
        raise TypeError(f'match: expected a dict like {{"order_id": "A-17"}}, got {type(match).__qualname__}')
    return {_check_path(path): _normal_value(path, value) for path, value in match.items()}


def match_paths(match: Mapping[str, Any]) -> str:
    """The sorted paths of a match as a JSON array."""
    text = json.dumps(sorted(match), separators=(",", ":"))
    if len(text) > MAX_PATHS_BYTES:
        raise ValueError(
            f"match: its paths take {len(text):,} bytes, more than the limit of {MAX_PATHS_BYTES:,}; "
            "match on fewer or shorter paths, and compare the rest in the received event"
        )
    return text


def wait_key(type: str, match: Mapping[str, Any], target: str | None = None) -> bytes:
    """The key of a wait; `match` comes from `parse_match`. With a target: the key of events for that run alone."""
    paths = sorted(match)
    values = [_canonical_text(match[path]) if path[0] == "@" else _canonical(match[path]) for path in paths]
    return _digest(_address(type, match_paths(match), values), target)


def event_keys(
    type: str, attributes: Mapping[str, Any], data: Any, known_paths: Iterable[str], target: str | None
) -> tuple[EventKey, ...]:
    """One key for each list of match paths that the event has values for. Fractions in `data` must be decimals."""
    keys: list[EventKey] = []
    for paths in known_paths:
        values = [path.read(attributes, data) for path in _parse_paths(paths)]
        if None not in values:
            address = _address(type, paths, cast(list[str], values))
            key = _digest(address)
            keys.append(EventKey(key, key if target is None else _digest(address, target)))
    return tuple(keys)


def bucket(key: bytes) -> int:
    """The number of the lock that transactions on waits and events of this key take."""
    return crc32(key) % BUCKETS


def describe(type: str, match: Mapping[str, Any]) -> str:
    """Text for users: `payment.completed where order_id = "A-17"`."""
    terms = [f"{path} = {truncate(_write(value).decode())}" for path, value in match.items()]
    return f"{type} where {' and '.join(terms)}" if terms else type


def _check_path(path: Any) -> str:
    if not isinstance(path, str):
        raise TypeError(f'match: expected a path like "order.id", got {repr_short(path)}; write it as text')
    if not path:
        raise ValueError(
            'match: a path is empty; name a field of the data like "order.id", or an attribute: "@subject"'
        )
    if path[0] == "@" and not _ATTRIBUTE.fullmatch(path):
        raise ValueError(
            f"match: {repr_short(path)} is not an attribute, whose name has only lowercase letters and digits; "
            "a path into the data has no @ (or \\@, if the field's name has one)"
        )
    return _normal_text(f"match[{repr_short(path)}]", path)


def _normal_value(path: str, value: Any) -> Any:
    where = f"match[{repr_short(path)}]"
    normal = _normal(where, value)
    if path[0] == "@" and not isinstance(normal, str | int):
        raise TypeError(f"{where}: an attribute is text, a whole number, True or False; got {type(value).__qualname__}")
    return normal


def _normal(where: str, value: Any, depth: int = 0) -> Any:
    if isinstance(value, Enum):
        return _normal(where, value.value, depth)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | UUID):
        return _normal_text(where, value)
    if isinstance(value, int | float | Decimal):
        return _normal_number(where, value)
    if depth > MAX_DEPTH:
        raise ValueError(
            f"{where}: is nested more than {MAX_DEPTH} levels deep, which no event is; match on parts of it"
        )
    if isinstance(value, list | tuple):
        return [_normal(f"{where}[{index}]", item, depth + 1) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {
            _normal_key(where, key): _normal(where + path_part(key), item, depth + 1) for key, item in value.items()
        }
    raise TypeError(
        f"{where}: expected text, a number, True, False, None, a list or a dict, "
        f"got {type(value).__qualname__}; give the text or number that the event has there"
    )


def _normal_text(where: str, value: str | UUID) -> str:
    text = str.__str__(value) if isinstance(value, str) else str(value)
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{where}: has half a surrogate pair, which is no text and in no event")
    return text


def _normal_key(where: str, key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(
            f"{where}: has the key {repr_short(key)}, but the keys of a JSON object are text; write it as text"
        )
    return _normal_text(where, key)


def _normal_number(where: str, value: int | float | Decimal) -> int | float | Decimal:
    if isinstance(value, int | float):
        value = int(value) if isinstance(value, int) else float(value)  # a subclass may print itself otherwise
    decimal = _decimal(value)
    if not decimal.is_finite():
        raise ValueError(f"{where}: is {value}, which JSON does not have and no event can match")
    if len(decimal.as_tuple().digits) > MAX_DIGITS:
        raise ValueError(f"{where}: has more than {MAX_DIGITS:,} digits, which no event has; match on something else")
    return value


class _MatchPath(Struct, frozen=True):
    """A parsed path: the name of an attribute, or steps into the data."""

    attribute: str
    steps: tuple[tuple[str, int | None], ...]
    """The key of an object, and the same as an index of a list if it is a number."""

    def read(self, attributes: Mapping[str, Any], data: Any) -> str | None:
        if self.attribute:
            value = attributes.get(self.attribute)
            return None if value is None else _canonical_text(value)
        for name, index in self.steps:
            if isinstance(data, dict):
                data = data.get(name, _MISSING)
            elif isinstance(data, list) and index is not None and index < len(data):
                data = data[index]
            else:
                return None
        return None if data is _MISSING else _canonical(data)


@lru_cache(maxsize=4096)
def _parse_paths(paths: str) -> tuple[_MatchPath, ...]:
    return tuple(
        _MatchPath(path[1:], ()) if path[0] == "@" else _MatchPath("", _steps(path)) for path in json.loads(paths)
    )


def _steps(path: str) -> tuple[tuple[str, int | None], ...]:
    names, characters = [""], iter(path)
    for character in characters:
        if character == ".":
            names.append("")
        else:
            names[-1] += next(characters, character) if character == "\\" else character
    return tuple((name, int(name) if _INDEX.fullmatch(name) else None) for name in names)


def _address(type: str, paths: str, values: Iterable[str]) -> str:
    """The text that is hashed. Every part has its length or its end in it, so that different parts differ in it."""
    return f"{_text(type)}{_text(paths)}{','.join(values)}"


def _digest(address: str, target: str | None = None) -> bytes:
    whole = address if target is None else f"{address}@{_text(target)}"
    return blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _canonical(value: Any) -> str:
    """A text that is equal for equal values only, and from which its end can be told."""
    if isinstance(value, str):
        return _text(value)
    if value is None:
        return "z"
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, int | float | Decimal):
        return _number(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(_text(key) + _canonical(value[key]) for key in sorted(value))}}}"
    raise TypeError(f"{type(value).__qualname__} is not a JSON value")


def _canonical_text(value: str | int | bool) -> str:
    return _text(value if isinstance(value, str) else str(value).lower())


def _text(text: str) -> str:
    return f"s{len(text)}:{text}"


def _number(value: int | float | Decimal) -> str:
    """Digits and exponent; not written out, because 1e999999999 would be a long text."""
    decimal = _decimal(value)
    if not decimal.is_finite():
        return f"n{decimal}"  # matches nothing: `parse_match` refuses such numbers
    sign, digits, exponent = decimal.as_tuple()
    written = "".join(map(str, digits)).lstrip("0")
    short = written.rstrip("0")
    if not short:
        return "n0"
    return f"n{'-' if sign else ''}{short}e{int(exponent) + len(written) - len(short)}"


def _decimal(value: int | float | Decimal) -> Decimal:
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
