"""The data of an event: bytes into values, and Python values into plain JSON without Edda's tags.

The same data gives the same value in binary, structured and batch mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
from msgspec import Raw

from edda.cloudevents.attributes import media_type, refusal
from edda.cloudevents.strict_json import MAX_DEPTH, MAX_DIGITS, read_raw
from edda.core.codec import is_json_value
from edda.core.type_models import PydanticRecord, record_of
from edda.core.value_path import LocatedError
from edda.errors import EventError

if TYPE_CHECKING:
    from pydantic import BaseModel


JSON = "application/json"
BINARY = "application/octet-stream"
_HALF_PAIR = "data has half a surrogate pair, which is not valid text"

Content = Raw | str | bytes


def read(content: bytes, datacontenttype: str | None) -> Content:
    """The bytes as JSON text, text or bytes, by their media type; without a type they stay bytes."""
    media = None if datacontenttype is None else media_type(datacontenttype)
    if media is None:
        return content
    if media.is_json:  # always UTF-8: RFC 8259 does not define a charset parameter
        return read_raw(content, "data")
    if not media.is_text:
        return content
    try:
        return content.decode("ascii" if media.is_ascii else "utf-8")
    except UnicodeDecodeError:
        return content


def read_untyped(content: bytes) -> tuple[Content, str | None]:
    """The data of a binary message without a Content-Type, and its datacontenttype.

    The Python SDKs send JSON that way by default, so a body that is JSON is read as JSON. A body that only a lenient
    parser accepts (a key twice, too deep) raises EventError: stored as bytes it would match no wait, although the
    sender got a 202.
    """
    try:
        return read_raw(content, "data"), JSON
    except EventError:
        try:
            msgspec.json.decode(content, type=Raw)
        except msgspec.DecodeError:
            return content, None
        except RecursionError:
            pass
        raise


def write(value: Any, datacontenttype: str | None) -> tuple[Content, str]:
    """The content for a Python value, and its media type."""
    if isinstance(value, bytes | bytearray | memoryview):
        content = bytes(value)
        return (content, BINARY) if datacontenttype is None else (read(content, datacontenttype), datacontenttype)
    media = media_type(datacontenttype or JSON)
    if media is None or media.is_json:
        return to_json(value), datacontenttype or JSON
    if not isinstance(value, str):
        raise EventError("data of a type other than JSON must be a string or bytes", attribute="data")
    if not media.can_write(value):
        raise refusal("datacontenttype", "has another charset than UTF-8; give the data as bytes in that charset")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise EventError(_HALF_PAIR, attribute="data") from None
    return value, str(datacontenttype)


def to_bytes(content: Content, datacontenttype: str | None) -> bytes:
    if not isinstance(content, str):
        return bytes(content)
    media = None if datacontenttype is None else media_type(datacontenttype)
    if media is not None and not media.can_write(content):
        raise refusal("datacontenttype", "has another charset than UTF-8; such text can only be sent structured")
    return content.encode()


_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep, or contains itself"


class _NotJSONError(LocatedError):
    """A value that JSON does not have."""


def to_json(value: Any) -> Raw:
    """The JSON text of a value, checked by the same rules as received data."""
    try:
        text = msgspec.json.encode(value if is_json_value(value) else _plain(value, 0))
    except _NotJSONError as refused:
        raise EventError(f"data{refused.path} {refused.reason}", attribute="data") from None
    except UnicodeEncodeError:
        raise EventError(_HALF_PAIR, attribute="data") from None
    except RecursionError:
        raise EventError(f"data {_TOO_DEEP}", attribute="data") from None
    except ValueError:
        raise EventError(f"data has an integer of more than {MAX_DIGITS:,} digits", attribute="data") from None
    return read_raw(text, "data")


def _plain(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _NotJSONError(_TOO_DEEP)
    writer = next((write for kind, write in _WRITERS if isinstance(value, kind)), None)
    if writer is not None:
        return writer(value)
    kind: Any = type(value)  # Any, since the type checker takes classes for unhashable
    if record := record_of(kind):
        if isinstance(record, PydanticRecord):
            return _write_model(value)
        return _plain_mapping(record.take_apart(value), depth)
    if isinstance(value, Mapping):
        return _plain_mapping(value, depth)
    if isinstance(value, Sequence | Set):
        return _plain_items(value, depth)
    raise _NotJSONError(f"is of {type(value).__qualname__}, which JSON does not have; use plain data or a model")


def _plain_mapping(mapping: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in mapping.items():
        try:
            name = _key(key)
            if name in plain:
                raise _NotJSONError("is the JSON text of two keys")
            plain[name] = _plain(item, depth + 1)
        except _NotJSONError as refused:
            refused.add_key(key)
            raise
    return plain


def _plain_items(items: Iterable[Any], depth: int) -> list[Any]:
    plain: list[Any] = []
    try:
        for item in items:
            plain.append(_plain(item, depth + 1))
    except _NotJSONError as refused:
        refused.add_key(len(plain))
        raise
    return plain


def _key(key: Any) -> str:
    if isinstance(key, Enum):
        return _key(key.value)
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int | UUID | date) and not isinstance(key, bool):
        return str(key) if not isinstance(key, date) else key.isoformat()
    raise _NotJSONError(f"is a key of {type(key).__qualname__}; the keys of JSON are strings")


def _write_fraction(value: float | Decimal) -> float | Raw:
    if not (value.is_finite() if isinstance(value, Decimal) else isfinite(value)):
        raise _NotJSONError("is not a finite number; JSON has no other numbers")
    return Raw(str(value).encode()) if isinstance(value, Decimal) else float(value)


def _write_model(model: BaseModel) -> Raw:
    """The model's own JSON, with the aliases of its fields."""
    try:
        return Raw(model.model_dump_json(by_alias=True).encode())
    except ValueError as error:
        raise _NotJSONError(f"cannot be written by its model: {error}") from error


# Enum first, because members may also be strings or numbers.
_WRITERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Enum, lambda member: _plain(member.value, 0)),
    (str, str.__str__),
    (int, lambda value: value if isinstance(value, bool) else int(value)),
    ((float, Decimal), _write_fraction),
    ((type(None), Raw, datetime, date, time, timedelta, UUID, bytes, bytearray), lambda value: value),
)
