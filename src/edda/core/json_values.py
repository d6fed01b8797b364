"""Values as plain JSON and back, without knowing their types.

What JSON cannot say is tagged: `{"$": "uuid", "v": "…"}`. A dict that is no JSON object (other keys than
strings, or our own `$` among them) is tagged as a list of pairs, so a `$` in the data is always a tag.
Subclasses of the plain types come back as the plain type, enum members as their value, models as dicts:
an annotation turns those into what they were.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from io import IOBase
from math import isfinite
from types import NoneType
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from edda.core.types.models import ModelAdapter, record_of
from edda.errors import PayloadError

from .value_path import LocatedError

TAG = "$"
TAG_BYTES = b'"$"'
"""Its JSON; inside a longer string the quotes would be escaped, so data without these bytes has no tag."""

UNTYPED = "untyped"
UNTYPED_BYTES = b'"untyped"'

MAX_DEPTH = 100
"""Far below Python's own limit: a tag adds levels, and restoring a model takes several calls per level."""

BIG_INT_BITS = 10_000
"""Python refuses to write integers of more than 4,300 digits in decimal; these go in hexadecimal."""

Packer = Callable[[Any, tuple[int, ...]], Any]


class UnstorableError(LocatedError):
    """A value that cannot be stored."""


class Untyped(msgspec.Struct, frozen=True):
    """A value that was not what its annotation says when it was recorded. It is marked, so that a replay can tell it
    from one whose type has changed since."""

    value: Any


def is_untyped(plain: Any) -> bool:
    """Whether this JSON stands for such a value."""
    return type(plain) is dict and plain.get(TAG) == UNTYPED


def is_json_value(value: Any, depth: int = 0) -> bool:
    """Whether JSON alone brings this back exactly. Most values are, so this is written for speed."""
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str or key == TAG:
                return False
            if type(item) not in _ATOMS and not is_json_value(item, depth + 1):
                return False
    elif kind is list:
        for item in value:
            if type(item) not in _ATOMS and not is_json_value(item, depth + 1):
                return False
    else:
        return kind in _ATOMS or (kind is float and isfinite(value))
    return depth < MAX_DEPTH


_ATOMS = frozenset({str, int, bool, NoneType})


def encode_value(value: Any, parents: tuple[int, ...] = ()) -> Any:
    kind: Any = type(value)  # Any, since the type checker takes classes for unhashable
    return (_PACKERS.get(kind) or _packer_of(kind))(value, parents)


def is_storable(value: Any) -> bool:
    try:
        encode_value(value)
    except UnstorableError:
        return False
    return True


@lru_cache(maxsize=4096)
def _packer_of(kind: Any) -> Packer:
    if issubclass(kind, Enum):
        return _pack_member
    if record := record_of(kind):
        return partial(_pack_record, record)
    return next((_PACKERS[base] for base in kind.__mro__ if base in _PACKERS), _reject)


def _enter(value: Any, parents: tuple[int, ...]) -> tuple[int, ...]:
    if id(value) in parents:
        raise UnstorableError("refers back to a value that contains it; store ids instead of references")
    if len(parents) >= MAX_DEPTH:
        raise UnstorableError(f"is nested more than {MAX_DEPTH} levels deep")
    return (*parents, id(value))


def _pack_items(items: Iterable[Any], parents: tuple[int, ...]) -> list[Any]:
    packed: list[Any] = []
    try:
        for item in items:
            packed.append(encode_value(item, parents))
    except UnstorableError as error:
        error.add_key(len(packed))
        raise
    return packed


def _pack_list(value: list[Any], parents: tuple[int, ...]) -> Any:
    return _pack_items(value, _enter(value, parents))


def _pack_tuple(value: tuple[Any, ...], parents: tuple[int, ...]) -> Any:
    return _tagged("tuple", _pack_items(value, _enter(value, parents)))


def _pack_set(name: str, value: Iterable[Any], parents: tuple[int, ...]) -> Any:
    packed = _pack_items(value, _enter(value, parents))
    # A set has another order in every process; its bytes must not, for they are compared with the recorded ones.
    return _tagged(name, sorted(packed, key=msgspec.json.encode))


def _pack_dict(value: dict[Any, Any], parents: tuple[int, ...]) -> Any:
    parents = _enter(value, parents)
    pairs: list[tuple[Any, Any]] = []
    key: Any = None
    try:
        for key, item in value.items():
            pairs.append((encode_value(key, parents), encode_value(item, parents)))
    except UnstorableError as error:
        error.add_key(key)
        raise
    if all(type(key) is str and key != TAG for key, _ in pairs):
        packed: Any = dict(pairs)
        _check_keys(packed.keys(), value)
        return packed
    _check_keys([decode_value(key) for key, _ in pairs], value)
    return _tagged("map", pairs)


def _check_keys(keys: Iterable[Any], value: dict[Any, Any]) -> None:
    try:
        unique = len(set(keys))
    except TypeError:
        raise UnstorableError("has a model as a key; use a list of pairs, or the model's id as the key") from None
    if unique != len(value):
        raise UnstorableError("has two keys that are stored as the same value")


def _pack_record(record: ModelAdapter, value: Any, parents: tuple[int, ...]) -> Any:
    parents = _enter(value, parents)
    packed: dict[str, Any] = {}
    for name, item in record.take_apart(value).items():
        try:
            packed[name] = encode_value(item, parents)
        except UnstorableError as error:
            form = record.json_form(value, name)
            if form is None:
                error.add_key(name)
                raise
            packed[name] = encode_value(form, parents)
    # A model may have an extra field of any name, also our tag's.
    return packed if TAG not in packed else _tagged("map", list(packed.items()))


def _pack_untyped(value: Untyped, parents: tuple[int, ...]) -> Any:
    return _tagged(UNTYPED, encode_value(value.value, parents))


def _pack_member(value: Enum, parents: tuple[int, ...]) -> Any:
    return encode_value(value.value, parents)


def _pack_str(value: str, _: tuple[int, ...]) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UnstorableError("has half a surrogate pair, which is no text; store it as bytes") from None
    return str.__str__(value)


def _pack_int(value: int, _: tuple[int, ...]) -> Any:
    return int(value) if value.bit_length() <= BIG_INT_BITS else _tagged("int", hex(value))


def _pack_float(value: float, _: tuple[int, ...]) -> Any:
    if not isfinite(value):
        raise UnstorableError(f"is {value!r}, which JSON does not have; store None or a Decimal")
    return float(value)


def _pack_as_is(value: Any, _: tuple[int, ...]) -> Any:
    return value


def _pack_text(name: str, write: Callable[[Any], str], value: Any, _: tuple[int, ...]) -> Any:
    return _tagged(name, write(value))


def _pack_moment(kind: type[datetime] | type[time], value: Any, _: tuple[int, ...]) -> Any:
    # A zone's name decides what the next day is, so it is kept beside the offset.
    zone = value.tzinfo.key if isinstance(value.tzinfo, ZoneInfo) else None
    text = kind.isoformat(value)
    return _tagged(kind.__name__, [text, zone, value.fold] if zone or value.fold else text)


def _pack_timedelta(value: timedelta, _: tuple[int, ...]) -> Any:
    return _tagged("timedelta", [value.days, value.seconds, value.microseconds])


def _write_base64(value: bytes | bytearray) -> str:
    return b2a_base64(value, newline=False).decode()


def _reject(value: Any, _: tuple[int, ...]) -> Any:
    cure = next((cure for kind, cure in _CURES if isinstance(value, kind)), _CURE)
    raise UnstorableError(f"{type(value).__qualname__} cannot be stored; {cure}")


_CURES: tuple[tuple[type, str], ...] = (
    (Awaitable, "await it first"),
    (IOBase, "store its path or what it contains"),
    (Iterator, "make a list of it"),
    (type, "store its name"),
    (complex, "store its two parts"),
    (BaseException, "store its text"),
)
_CURE = "store plain data, a dataclass or a model, and make the object where it is used"


def _tagged(name: str, content: Any) -> dict[str, Any]:
    return {TAG: name, "v": content}


_PACKERS: dict[type, Packer] = {
    NoneType: _pack_as_is,
    bool: _pack_as_is,
    str: _pack_str,
    int: _pack_int,
    float: _pack_float,
    list: _pack_list,
    dict: _pack_dict,
    tuple: _pack_tuple,
    set: partial(_pack_set, "set"),
    frozenset: partial(_pack_set, "frozenset"),
    datetime: partial(_pack_moment, datetime),
    time: partial(_pack_moment, time),
    timedelta: _pack_timedelta,
    date: partial(_pack_text, "date", date.isoformat),
    Decimal: partial(_pack_text, "decimal", str),
    UUID: partial(_pack_text, "uuid", str),
    bytes: partial(_pack_text, "bytes", _write_base64),
    bytearray: partial(_pack_text, "bytearray", _write_base64),
    Untyped: _pack_untyped,
}


def decode_value(plain: Any) -> Any:
    if type(plain) is list or type(plain) is tuple:
        return [decode_value(item) for item in plain]
    if type(plain) is not dict:
        return plain
    if TAG not in plain:
        return {key: decode_value(item) for key, item in plain.items()}
    return _untag(plain[TAG], plain.get("v"))


def _untag(name: Any, content: Any) -> Any:
    reader = _READERS.get(name) if isinstance(name, str) else None
    if reader is None:
        raise PayloadError(f"the stored data has a {name!r}, which this release does not know; a newer one wrote it")
    try:
        return reader(decode_value(content))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise PayloadError(f"the stored data has a broken {name}: {error}") from error


def _read_set(kind: type[set[Any]] | type[frozenset[Any]], items: list[Any]) -> Any:
    try:
        return kind(items)
    except TypeError:
        return items  # models, which are dicts until an annotation restores them


def _read_moment(kind: type[datetime] | type[time], content: Any) -> Any:
    if isinstance(content, str):
        return kind.fromisoformat(content)
    text, zone, fold = content
    moment = kind.fromisoformat(text).replace(fold=fold)
    try:
        return moment.replace(tzinfo=ZoneInfo(zone)) if zone else moment
    except ZoneInfoNotFoundError:
        return moment  # this machine does not know the zone; the offset still names the same instant


_READERS: dict[str, Callable[[Any], Any]] = {
    "map": dict,
    "tuple": tuple,
    "set": partial(_read_set, set),
    "frozenset": partial(_read_set, frozenset),
    "int": partial(int, base=16),
    "datetime": partial(_read_moment, datetime),
    "time": partial(_read_moment, time),
    "timedelta": lambda parts: timedelta(*parts),
    "date": date.fromisoformat,
    "decimal": Decimal,
    "uuid": UUID,
    "bytes": a2b_base64,
    "bytearray": lambda text: bytearray(a2b_base64(text)),
    UNTYPED: lambda value: value,
}
