"""Codec: stored values to bytes and back.

Workflow code always gets the decoded value, also the first time, so that replay gives it the same:
`decode(encode(value), annotation)` is a fixed point. Class names are never read from stored data, and pickle is not
used.

Values are stored as JSON. A value that JSON does not have is tagged: `{"$": "uuid", "v": "…"}`. A dict with keys that
are not strings, or with the key `$`, is tagged as a list of pairs, so that a `$` in stored data is always a tag.
Subclasses of plain types are decoded as the plain type, enum members as their value, and models as dicts; the adapter
of the annotation converts those.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from io import IOBase
from itertools import islice
from math import isfinite
from types import NoneType
from typing import Any, Protocol
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from edda.errors import NonDeterminismError, PayloadError, PayloadTooLargeError

from .type_adapters import ANYTHING, STORED, TypeAdapter, adapter_of
from .type_models import ModelAdapter, TypeMismatchError, record_of
from .value_path import LocatedError, path_part

MAX_BYTES = 2 * 1024 * 1024
MAX_DEPTH = 100
"""Far below Python's recursion limit: a tag adds levels, and restoring a model takes several calls per level."""
BIG_INT_BITS = 10_000
"""Larger integers are written in hexadecimal: Python refuses decimal texts of more than 4,300 digits."""

TAG = "$"
TAG_BYTES = b'"$"'
"""The tag in JSON. Quotes inside a string are escaped, so data without these bytes has no tag."""
UNTYPED = "untyped"
UNTYPED_BYTES = b'"untyped"'

_MAX_MEASURED = 100_000
"""Values that are measured on each level to find the largest part of a value over the limit."""
_CHUNK = 64 * 1024
_ATOMS = frozenset({str, int, bool, NoneType})

Packer = Callable[[Any, tuple[int, ...]], Any]

_write = msgspec.json.Encoder().encode
_read = msgspec.json.Decoder().decode


class PayloadTransform(Protocol):
    """Encrypts stored values: `seal` is called last before the database, `open` first after it."""

    def seal(self, data: bytes) -> bytes: ...

    def open(self, data: bytes) -> bytes: ...


class UnstorableError(LocatedError):
    """A value that cannot be stored."""


class Untyped(msgspec.Struct, frozen=True):
    """Marks a value that did not fit its annotation when it was recorded, so that a replay can tell it from a value
    whose annotation has changed since."""

    value: Any


class Codec:
    """Encodes inputs, results, events and messages as JSON.

    Args:
        max_bytes: Size limit of one value in bytes. Default 2 MiB.
        transform: Encrypts the bytes. Default None: they are stored as JSON.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES, transform: PayloadTransform | None = None) -> None:
        self.max_bytes = max_bytes
        self._transform = transform

    def encode(
        self, value: Any, annotation: Any = Any, on_mismatch: Callable[[TypeMismatchError], None] | None = None
    ) -> bytes:
        """With an annotation for `decode_recorded`: a value that does not fit is reported to `on_mismatch` and marked
        as `Untyped`."""
        packed = value
        try:
            if not is_json_value(value):
                packed = encode_value(value)
            data = _write(packed)
        except (UnstorableError, ValueError, RecursionError):
            packed, data = _write_carefully(value)
        if (size := len(data)) > self.max_bytes:
            del data  # frees the memory before `_too_large` measures the value
            raise self._too_large(packed, size)
        if annotation is not Any:
            try:
                adapter = adapter_of(annotation)
                adapter.fit(value if adapter.plain and packed is value else decode_value(packed), STORED)
            except TypeMismatchError as mismatch:
                if on_mismatch is not None:
                    on_mismatch(mismatch)
                return self.encode(Untyped(value))
            except Exception:  # noqa: S110 - the annotation cannot be evaluated: recorded without a mark
                pass
        return data if self._transform is None else self._transform.seal(data)

    def decode(self, data: bytes, annotation: Any = Any) -> Any:
        """The value as annotated; a value that does not fit its annotation is returned as plain data."""
        value, data = self._parse(data)
        adapter = adapter_of(annotation)
        return value if adapter.plain and TAG_BYTES not in data else decode_as(value, adapter)

    def decode_recorded(self, data: bytes, annotation: Any, what: str, name: str) -> Any:
        """Decode what `encode` wrote for an annotation, with the current one. Raises `NonDeterminismError` if the value
        fitted its annotation when it was recorded and does not now: the code has changed.

        `what` and `name` begin the error message.
        """
        value, data = self._parse(data)
        adapter = adapter_of(annotation)
        if UNTYPED_BYTES in data and _is_untyped(_read(data)):
            return decode_as(value, adapter)
        return fit_recorded(value, adapter, what, name)

    def decode_input(self, data: bytes) -> tuple[Any, frozenset[str]]:
        """The stored arguments by name, and the names of those marked as `Untyped`."""
        arguments, data = self._parse(data)
        if UNTYPED_BYTES not in data:
            return arguments, frozenset()
        return arguments, frozenset(name for name, value in _read(data).items() if _is_untyped(value))

    def _parse(self, data: bytes) -> tuple[Any, bytes]:
        """The value without its tags, and its JSON."""
        if self._transform is not None:
            data = self._transform.open(data)
        try:
            value = _read(data)
            return (decode_value(value) if TAG_BYTES in data else value), data
        except PayloadError:
            raise
        except (ValueError, RecursionError) as error:
            raise PayloadError(f"the stored data is not Edda's JSON: {error}") from error

    def equal(self, one: bytes, other: bytes) -> bool:
        """Whether two stored values are equal after decryption, with any order of their keys."""
        return one == other or self._canonical(one) == self._canonical(other)

    def _canonical(self, data: bytes) -> bytes:
        data = self.decrypt(data)
        try:
            value = _read(data)
        except (ValueError, RecursionError) as error:
            raise PayloadError(f"the stored data is not Edda's JSON: {error}") from error
        if UNTYPED_BYTES in data and type(value) is dict:  # a corrected annotation removes the mark, not the equality
            value = {key: item["v"] if _is_untyped(item) else item for key, item in value.items()}
        return msgspec.json.encode(value, order="deterministic")

    @property
    def is_sealing(self) -> bool:
        """Whether values are encrypted in the database."""
        return self._transform is not None

    def encrypt(self, data: bytes) -> bytes:
        """Checks the size of JSON bytes, such as an event, and encrypts them."""
        if len(data) > self.max_bytes:
            raise PayloadTooLargeError(f"{len(data):,} bytes are more than the limit of {self.max_bytes:,}")
        return data if self._transform is None else self._transform.seal(data)

    def decrypt(self, data: bytes) -> bytes:
        return data if self._transform is None else self._transform.open(data)

    def _too_large(self, packed: Any, size: int) -> PayloadTooLargeError:
        path, part = _largest_part(packed, size)
        return PayloadTooLargeError(
            f"the value takes {size:,} bytes, more than the limit of {self.max_bytes:,}; "
            f"its largest part is ${path} with {part:,} bytes: store that elsewhere and pass a reference to it"
        )


def decode_as(value: Any, adapter: TypeAdapter) -> Any:
    try:
        return adapter.fit(value, STORED)
    except TypeMismatchError:
        return value


def fit_recorded(value: Any, adapter: TypeAdapter, what: str, name: str) -> Any:
    try:
        fitted = adapter.fit(value, STORED)
    except TypeMismatchError as mismatch:
        path = f"${mismatch.path}: " if mismatch.path else ""
        raise NonDeterminismError(
            f"{what} {name!r} was recorded, and does not fit {adapter.name} now: {path}{mismatch.reason}. The type "
            "changed after the run had started. Give a new field a default, let the type accept the recorded value, or "
            "deploy the code that recorded it, and the run continues."
        ) from mismatch
    return value if adapter.plain else fitted


def fits(value: Any, adapter: TypeAdapter) -> bool:
    """Whether a storable value is decoded as annotated."""
    if adapter is ANYTHING:
        return True
    is_plain = adapter.plain and (type(value) in _ATOMS or is_json_value(value))
    try:
        adapter.fit(value if is_plain else decode_value(encode_value(value)), STORED)
    except TypeMismatchError:
        return False
    return True


def _write_carefully(value: Any) -> tuple[Any, bytes]:
    """The slow path: encodes the value, or raises `PayloadError` with the path to the part that cannot be stored."""
    try:
        packed = encode_value(value)
        return packed, _write(packed)
    except UnstorableError as refused:
        raise PayloadError(f"${refused.path}: {refused.reason}") from None
    except RecursionError:
        raise PayloadError("$: the call stack is too deep to store this") from None


def _is_untyped(plain: Any) -> bool:
    """Whether this JSON is an `Untyped` value."""
    return type(plain) is dict and plain.get(TAG) == UNTYPED


# Values to tagged JSON


def is_json_value(value: Any, depth: int = 0) -> bool:
    """Whether plain JSON restores the value exactly. Most values are of this kind, so this is written for speed."""
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
        return lambda member, parents: encode_value(member.value, parents)
    if record := record_of(kind):
        return partial(_pack_record, record)
    return next((_PACKERS[base] for base in kind.__mro__ if base in _PACKERS), _reject)


def _enter(value: Any, parents: tuple[int, ...]) -> tuple[int, ...]:
    if id(value) in parents:
        raise UnstorableError("refers to a value that contains it; store ids instead of references")
    if len(parents) >= MAX_DEPTH:
        raise UnstorableError(f"is nested more than {MAX_DEPTH} levels deep")
    return (*parents, id(value))


def _pack_list(items: Iterable[Any], parents: tuple[int, ...]) -> list[Any]:
    parents = _enter(items, parents)
    packed: list[Any] = []
    try:
        for item in items:
            packed.append(encode_value(item, parents))
    except UnstorableError as error:
        error.add_key(len(packed))
        raise
    return packed


def _pack_set(name: str, value: Iterable[Any], parents: tuple[int, ...]) -> Any:
    # Sorted, because the order of a set differs between processes, and replay compares the bytes.
    return _tagged(name, sorted(_pack_list(value, parents), key=msgspec.json.encode))


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
    # A model may have an extra field with the name of the tag.
    return packed if TAG not in packed else _tagged("map", list(packed.items()))


def _pack_str(value: str, _: tuple[int, ...]) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UnstorableError("has half a surrogate pair, which is not valid text; store it as bytes") from None
    return str.__str__(value)


def _pack_int(value: int, _: tuple[int, ...]) -> Any:
    return int(value) if value.bit_length() <= BIG_INT_BITS else _tagged("int", hex(value))


def _pack_float(value: float, _: tuple[int, ...]) -> Any:
    if not isfinite(value):
        raise UnstorableError(f"is {value!r}, which JSON does not have; store None or a Decimal")
    return float(value)


def _pack_text(name: str, write: Callable[[Any], str], value: Any, _: tuple[int, ...]) -> Any:
    return _tagged(name, write(value))


def _pack_moment(kind: type[datetime] | type[time], value: Any, _: tuple[int, ...]) -> Any:
    # The zone's name is kept beside the offset: date arithmetic across a clock change needs it.
    zone = value.tzinfo.key if isinstance(value.tzinfo, ZoneInfo) else None
    text = kind.isoformat(value)
    return _tagged(kind.__name__, [text, zone, value.fold] if zone or value.fold else text)


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
    NoneType: lambda value, _: value,
    bool: lambda value, _: value,
    str: _pack_str,
    int: _pack_int,
    float: _pack_float,
    list: _pack_list,
    dict: _pack_dict,
    tuple: lambda value, parents: _tagged("tuple", _pack_list(value, parents)),
    set: partial(_pack_set, "set"),
    frozenset: partial(_pack_set, "frozenset"),
    datetime: partial(_pack_moment, datetime),
    time: partial(_pack_moment, time),
    timedelta: lambda value, _: _tagged("timedelta", [value.days, value.seconds, value.microseconds]),
    date: partial(_pack_text, "date", date.isoformat),
    Decimal: partial(_pack_text, "decimal", str),
    UUID: partial(_pack_text, "uuid", str),
    bytes: partial(_pack_text, "bytes", _write_base64),
    bytearray: partial(_pack_text, "bytearray", _write_base64),
    Untyped: lambda value, parents: _tagged(UNTYPED, encode_value(value.value, parents)),
}


# Tagged JSON to values


def decode_value(plain: Any) -> Any:
    if type(plain) is list or type(plain) is tuple:
        return [decode_value(item) for item in plain]
    if type(plain) is not dict:
        return plain
    if TAG not in plain:
        return {key: decode_value(item) for key, item in plain.items()}
    name = plain[TAG]
    reader = _READERS.get(name) if isinstance(name, str) else None
    if reader is None:
        raise PayloadError(
            f"the stored data has the tag {name!r}, which this release does not know; a newer one wrote it"
        )
    try:
        return reader(decode_value(plain.get("v")))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise PayloadError(f"the stored data has a broken {name}: {error}") from error


def _read_set(kind: type[set[Any]] | type[frozenset[Any]], items: list[Any]) -> Any:
    try:
        return kind(items)
    except TypeError:
        return items  # models, which are unhashable dicts until an annotation restores them


def _read_moment(kind: type[datetime] | type[time], content: Any) -> Any:
    if isinstance(content, str):
        return kind.fromisoformat(content)
    text, zone, fold = content
    value = kind.fromisoformat(text).replace(fold=fold)
    try:
        return value.replace(tzinfo=ZoneInfo(zone)) if zone else value
    except ZoneInfoNotFoundError:
        return value  # this machine does not know the zone; the offset gives the same instant


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


# The part to blame for a value over the size limit


def _largest_part(packed: Any, size: int) -> tuple[str, int]:
    """Descend while one part takes more than half of the bytes. Parts are measured in chunks, not encoded as a whole:
    msgspec would abort a process that has no memory left for it."""
    path = ""
    while True:
        sizer = _Sizer(_MAX_MEASURED)
        parts = ((sizer.measure(part), name, part) for name, part in islice(_parts(packed), _MAX_MEASURED))
        largest, name, part = max(parts, key=lambda entry: entry[0], default=(0, "", None))
        if largest * 2 < size or not name:
            return path, size
        path, size, packed = path + name, largest, part


class _Sizer:
    """Measures values as JSON, part by part; after `left` values it extrapolates from the average size."""

    def __init__(self, left: int) -> None:
        self._left = left

    def measure(self, packed: Any) -> int:
        self._left -= 1
        if isinstance(packed, str):
            chunks = (packed[start : start + _CHUNK] for start in range(0, len(packed), _CHUNK))
            return 2 + sum(len(_write(chunk)) - 2 for chunk in chunks)
        if isinstance(packed, list | tuple):
            return self._sum(len(packed), map(self.measure, packed))
        if isinstance(packed, dict):
            # the key, a colon, the value
            return self._sum(len(packed), (self.measure(k) + 1 + self.measure(v) for k, v in packed.items()))
        return len(_write(packed))

    def _sum(self, count: int, sizes: Iterator[int]) -> int:
        total = measured = 0
        while measured < count and (self._left > 0 or not measured):
            total, measured = total + next(sizes), measured + 1
        return 2 + max(count - 1, 0) + (total * count // measured if measured else 0)


def _parts(packed: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(packed, list):
        yield from ((f"[{index}]", item) for index, item in enumerate(packed))
    elif isinstance(packed, dict) and packed.get(TAG) == "map":
        yield from ((path_part(decode_value(key)), item) for key, item in packed["v"])
    elif isinstance(packed, dict) and TAG in packed:
        yield from _parts(packed["v"])
    elif isinstance(packed, dict):
        yield from ((path_part(key), item) for key, item in packed.items())
