"""Python values as the plain JSON that the rest of the world reads: no tags, nothing that only Edda understands."""

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

from edda.core.json_values import is_json_value
from edda.core.types.models import PydanticRecord, record_of
from edda.core.value_path import LocatedError
from edda.errors import EventError

from .strict_json import MAX_DEPTH, MAX_DIGITS, read_raw

if TYPE_CHECKING:
    from pydantic import BaseModel

_TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep, or contains itself"


class _RefusedError(LocatedError):
    """A value that JSON cannot say."""


def to_json(value: Any) -> Raw:
    """The text of the value, by the rules for what comes in: whatever is sent could be received here."""
    try:
        text = msgspec.json.encode(value if is_json_value(value) else _plain(value, 0))
    except _RefusedError as refused:
        raise EventError(f"data{refused.path} {refused.reason}", attribute="data") from None
    except UnicodeEncodeError:
        raise EventError("data has half a surrogate pair, which is no text", attribute="data") from None
    except RecursionError:
        raise EventError(f"data {_TOO_DEEP}", attribute="data") from None
    except ValueError:
        raise EventError(f"data has an integer of more than {MAX_DIGITS:,} digits", attribute="data") from None
    return read_raw(text, "data")


def _plain(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _RefusedError(_TOO_DEEP)
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
    raise _RefusedError(f"is of {type(value).__qualname__}, which JSON cannot say; give plain data or a model")


def _plain_mapping(mapping: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in mapping.items():
        try:
            name = _key(key)
            if name in plain:
                raise _RefusedError("is a key that two of the keys become in JSON")
            plain[name] = _plain(item, depth + 1)
        except _RefusedError as refused:
            refused.add_key(key)
            raise
    return plain


def _plain_items(items: Iterable[Any], depth: int) -> list[Any]:
    plain: list[Any] = []
    try:
        for item in items:
            plain.append(_plain(item, depth + 1))
    except _RefusedError as refused:
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
    raise _RefusedError(f"is a key of {type(key).__qualname__}; the keys of JSON are strings")


def _write_float(value: float) -> float:
    if not isfinite(value):
        raise _RefusedError("is not a finite number; JSON has no other")
    return float(value)


def _write_decimal(value: Decimal) -> Raw:
    if not value.is_finite():
        raise _RefusedError("is not a finite number; JSON has no other")
    return Raw(str(value).encode())


def _write_model(model: BaseModel) -> Raw:
    """As its own class writes it, under the names that it reads it by."""
    try:
        return Raw(model.model_dump_json(by_alias=True).encode())
    except ValueError as error:
        raise _RefusedError(f"cannot be written by its model: {error}") from error


def _as_is(value: Any) -> Any:
    return value


def _write_int(value: int) -> Any:
    return value if isinstance(value, bool) else int(value)


# Enum first: its members may be strings or numbers too.
_WRITERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Enum, lambda member: _plain(member.value, 0)),
    (str, str.__str__),
    (int, _write_int),
    (float, _write_float),
    (Decimal, _write_decimal),
    ((type(None), Raw, datetime, date, time, timedelta, UUID, bytes, bytearray), _as_is),
)
