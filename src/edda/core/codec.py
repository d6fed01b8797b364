"""Values to bytes and back.

The *decoded* value is what everybody gets, the first run too, so nothing changes when a run is replayed:
`decode(encode(value), annotation)` is a fixed point. Class names are never read from data, and there is no pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from edda.errors import ArgumentError, PayloadError, PayloadTooLargeError

from .annotations import shape_of
from .paths import step
from .plain import TAG, TAG_BYTES, RefusedError, is_plain, pack, unpack
from .records import MisfitError
from .shapes import ARGUMENT, STORED, Shape

MAX_BYTES = 2 * 1024 * 1024

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
        try:
            data = _write(value) if is_plain(value) else _write(pack(value))
        except (RefusedError, ValueError, RecursionError):
            data = _write_carefully(value)
        if len(data) > self.max_bytes:
            raise self._too_large(value, len(data))
        return data if self._transform is None else self._transform.seal(data)

    def decode(self, data: bytes, annotation: Any = Any) -> Any:
        """The value as annotated; where the annotation is not true, the value as it is."""
        data = self.unseal(data)
        shape = shape_of(annotation)
        tagged = TAG_BYTES in data
        value = _parse(data, tagged)
        return value if shape.plain and not tagged else restore(value, shape)

    def fit(self, value: Any, annotation: Any, where: str) -> Any:
        """The value as an argument of this type; `where` starts the error's text."""
        return fit(value, shape_of(annotation), where)

    def same(self, one: bytes, other: bytes) -> bool:
        """Whether two stored values are the same, however they are encrypted and whatever the order of their keys."""
        return one == other or self._canonical(one) == self._canonical(other)

    def _canonical(self, data: bytes) -> bytes:
        return msgspec.json.encode(_parse(self.unseal(data)), order="deterministic")

    @property
    def is_sealing(self) -> bool:
        """Whether values are kept from whoever reads the database."""
        return self._transform is not None

    def seal(self, data: bytes) -> bytes:
        """Bytes that are JSON already, such as an event."""
        if len(data) > self.max_bytes:
            raise PayloadTooLargeError(f"{len(data):,} bytes are more than the limit of {self.max_bytes:,}")
        return data if self._transform is None else self._transform.seal(data)

    def unseal(self, data: bytes) -> bytes:
        return data if self._transform is None else self._transform.open(data)

    def _too_large(self, value: Any, size: int) -> PayloadTooLargeError:
        path, part = _largest_part(pack(value))
        return PayloadTooLargeError(
            f"the value takes {size:,} bytes, more than the limit of {self.max_bytes:,}; "
            f"its largest part is ${path} with {part:,} bytes: store that elsewhere and pass a reference to it"
        )


def fit(value: Any, shape: Shape, where: str) -> Any:
    try:
        return shape.fit(value, ARGUMENT)
    except MisfitError as misfit:
        raise ArgumentError(f"{where}{misfit.path}: {misfit.reason}") from None


def restore(value: Any, shape: Shape) -> Any:
    try:
        return shape.fit(value, STORED)
    except MisfitError:
        return value


def _write_carefully(value: Any) -> bytes:
    """What looked plain and was not is packed; what cannot be is refused with its place."""
    try:
        return _write(pack(value))
    except RefusedError as refused:
        raise PayloadError(f"${refused.path}: {refused.reason}") from None
    except RecursionError:
        raise PayloadError("$: there is no room left on the call stack to store this") from None


def _parse(data: bytes, tagged: bool = False) -> Any:
    try:
        return unpack(_read(data)) if tagged else _read(data)
    except PayloadError:
        raise
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the stored data is not Edda's JSON: {error}") from error


def _largest_part(packed: Any) -> tuple[str, int]:
    """Go down as long as one part makes up most of the whole."""
    path, size = "", len(_write(packed))
    while parts := [(len(_write(part)), name, part) for name, part in _parts(packed)]:
        largest, name, part = max(parts, key=lambda entry: entry[0])
        if largest * 2 < size:
            break
        path, size, packed = path + name, largest, part
    return path, size


def _parts(packed: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(packed, list):
        yield from ((f"[{index}]", item) for index, item in enumerate(packed))
    elif isinstance(packed, dict) and packed.get(TAG) == "map":
        yield from ((step(unpack(key)), item) for key, item in packed["v"])
    elif isinstance(packed, dict) and TAG in packed:
        yield from _parts(packed["v"])
    elif isinstance(packed, dict):
        yield from ((step(key), item) for key, item in packed.items())
