"""Values to bytes and back.

The *decoded* value is what everybody gets, the first run too, so nothing changes when a run is replayed:
`decode(encode(value), annotation)` is a fixed point. Class names are never read from data, and there is no pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import msgspec

from edda.errors import ArgumentError, PayloadError, PayloadTooLargeError

from .annotations import shape_of
from .paths import path_part
from .plain import TAG, TAG_BYTES, UnstorableError, decode_value, encode_value, is_json_value
from .records import TypeMismatchError
from .shapes import ARGUMENT, STORED, TypeAdapter

MAX_BYTES = 2 * 1024 * 1024

_MOST_MEASURED = 100_000
"""So many values are looked at, on each level, to find the largest part of one that is too large."""
_CHUNK = 64 * 1024

_write = msgspec.json.Encoder().encode
_read = msgspec.json.Decoder().decode


class PayloadTransform(Protocol):
    """Encrypts what is stored: the last thing before the database and the first after it."""

    def seal(self, data: bytes) -> bytes: ...

    def open(self, data: bytes) -> bytes: ...


class Codec:
    def __init__(self, *, max_bytes: int = MAX_BYTES, transform: PayloadTransform | None = None) -> None:
        self.max_bytes = max_bytes
        self._transform = transform

    def encode(self, value: Any) -> bytes:
        packed = value
        try:
            if not is_json_value(value):
                packed = encode_value(value)
            data = _write(packed)
        except (UnstorableError, ValueError, RecursionError):
            packed, data = _write_carefully(value)
        if (size := len(data)) > self.max_bytes:
            del data  # the error is built without another copy: memory may be what is short
            raise self._too_large(packed, size)
        return data if self._transform is None else self._transform.seal(data)

    def decode(self, data: bytes, annotation: Any = Any) -> Any:
        """The value as annotated; where the annotation is not true, the value as it is."""
        data = self.decrypt(data)
        shape = shape_of(annotation)
        tagged = TAG_BYTES in data
        value = _parse(data, tagged)
        return value if shape.plain and not tagged else decode_as(value, shape)

    def convert(self, value: Any, annotation: Any, where: str) -> Any:
        """The value as an argument of this type; `where` starts the error's text."""
        return convert(value, shape_of(annotation), where)

    def equal(self, one: bytes, other: bytes) -> bool:
        """Whether two stored values are the same, however they are encrypted and whatever the order of their keys."""
        return one == other or self._canonical(one) == self._canonical(other)

    def _canonical(self, data: bytes) -> bytes:
        return msgspec.json.encode(_parse(self.decrypt(data)), order="deterministic")

    @property
    def is_sealing(self) -> bool:
        """Whether values are kept from whoever reads the database."""
        return self._transform is not None

    def encrypt(self, data: bytes) -> bytes:
        """Bytes that are JSON already, such as an event."""
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


def convert(value: Any, shape: TypeAdapter, where: str) -> Any:
    try:
        return shape.fit(value, ARGUMENT)
    except TypeMismatchError as misfit:
        raise ArgumentError(f"{where}{misfit.path}: {misfit.reason}") from None


def decode_as(value: Any, shape: TypeAdapter) -> Any:
    try:
        return shape.fit(value, STORED)
    except TypeMismatchError:
        return value


def _write_carefully(value: Any) -> tuple[Any, bytes]:
    """What looked plain and was not is packed; what cannot be is refused with its place."""
    try:
        packed = encode_value(value)
        return packed, _write(packed)
    except UnstorableError as refused:
        raise PayloadError(f"${refused.path}: {refused.reason}") from None
    except RecursionError:
        raise PayloadError("$: there is no room left on the call stack to store this") from None


def _parse(data: bytes, tagged: bool = False) -> Any:
    try:
        return decode_value(_read(data)) if tagged else _read(data)
    except PayloadError:
        raise
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the stored data is not Edda's JSON: {error}") from error


def _largest_part(packed: Any, size: int) -> tuple[str, int]:
    """Go down as long as one part makes up most of the whole. No part is encoded as a whole again: a process that has
    no memory left for it would die in `msgspec`."""
    path = ""
    while True:
        ruler = _Ruler(_MOST_MEASURED)
        parts = ((ruler.measure(part), name, part) for name, part in islice(_parts(packed), _MOST_MEASURED))
        largest, name, part = max(parts, key=lambda entry: entry[0], default=(0, "", None))
        if largest * 2 < size or not name:
            return path, size
        path, size, packed = path + name, largest, part


class _Ruler:
    """Measures values as JSON, piece by piece. When it has looked at so many, it goes by the average of what it saw."""

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
