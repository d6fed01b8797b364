"""Values to bytes and back.

The *decoded* value is what everybody gets, the first run too, so nothing changes when a run is replayed:
`decode(encode(value), annotation)` is a fixed point. Class names are never read from data, and there is no pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import msgspec

from edda.core.types.adapters import ANYTHING, ARGUMENT, STORED, TypeAdapter
from edda.core.types.build import shape_of
from edda.core.types.models import TypeMismatchError
from edda.errors import ArgumentError, NonDeterminismError, PayloadError, PayloadTooLargeError

from .json_values import (
    TAG,
    TAG_BYTES,
    UNTYPED_BYTES,
    UnstorableError,
    Untyped,
    decode_value,
    encode_value,
    is_json_value,
    is_untyped,
)
from .value_path import path_part

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

    def encode_typed(self, value: Any, annotation: Any) -> bytes:
        """For `decode_recorded`: a value that is not what its annotation says is marked."""
        data = self.encode(value)
        try:
            is_typed = fits(value, shape_of(annotation))
        except Exception:  # nobody can read the annotation: what has happened is recorded all the same
            return data
        return data if is_typed else self.encode(Untyped(value))

    def decode_recorded(self, data: bytes, annotation: Any, what: str, name: str) -> Any:
        """What `encode_typed` wrote, as annotated now. Raises `NonDeterminismError` if the value was what its
        annotation said, and is not any more: the code has changed, and is not given what it does not expect.

        `what` and the `name` start the error's text.
        """
        data = self.decrypt(data)
        value, shape = _parse(data, TAG_BYTES in data), shape_of(annotation)
        if UNTYPED_BYTES in data and is_untyped(_read(data)):
            return decode_as(value, shape)
        return fit_recorded(value, shape, what, name)

    def decode_input(self, data: bytes) -> tuple[Any, frozenset[str]]:
        """The stored arguments by name, and the names of those that are marked."""
        data = self.decrypt(data)
        arguments = _parse(data, TAG_BYTES in data)
        if UNTYPED_BYTES not in data:
            return arguments, frozenset()
        return arguments, frozenset(name for name, value in _read(data).items() if is_untyped(value))

    def convert(self, value: Any, annotation: Any, where: str) -> Any:
        """The value as an argument of this type; `where` starts the error's text."""
        return convert(value, shape_of(annotation), where)

    def equal(self, one: bytes, other: bytes) -> bool:
        """Whether two stored values are the same, however they are encrypted and whatever the order of their keys."""
        return one == other or self._canonical(one) == self._canonical(other)

    def _canonical(self, data: bytes) -> bytes:
        value = _parse(data := self.decrypt(data))
        if UNTYPED_BYTES in data and type(value) is dict:  # an annotation that is corrected changes no argument
            value = {key: item["v"] if is_untyped(item) else item for key, item in value.items()}
        return msgspec.json.encode(value, order="deterministic")

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


def fit_recorded(value: Any, shape: TypeAdapter, what: str, name: str) -> Any:
    try:
        fitted = shape.fit(value, STORED)
    except TypeMismatchError as misfit:
        place = f"${misfit.path}: " if misfit.path else ""
        raise NonDeterminismError(
            f"{what} {name!r} was recorded, and does not fit {shape.name} now: {place}{misfit.reason}. The type "
            "changed while the run was under way. Give a new field a default, let the type take what was recorded, or "
            "deploy the code that recorded it, and the run goes on."
        ) from misfit
    return value if shape.plain else fitted


def fits(value: Any, shape: TypeAdapter) -> bool:
    """Whether a value that can be stored comes back as annotated."""
    if shape is ANYTHING:
        return True
    try:
        if shape.plain and is_json_value(value):
            shape.fit(value, STORED)
        else:
            shape.fit(decode_value(encode_value(value)), STORED)
    except TypeMismatchError:
        return False
    return True


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
