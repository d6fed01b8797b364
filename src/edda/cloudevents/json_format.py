"""The JSON format: one event as an object, several as an array. Events are also stored in this format."""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from decimal import Decimal
from math import isfinite
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from edda.errors import EventError

from . import data as contents
from .attributes import media_type
from .event import CORE, SPECVERSION, CloudEvent, assemble, check
from .strict_json import MAX_DEPTH, exact, read_object, split_array

MAX_BATCH = 100
_REASONS_SHOWN = 3

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_VALUE = msgspec.json.Decoder()
_TEXT = msgspec.json.Decoder(str)


def parse(body: bytes) -> CloudEvent:
    # The event itself is one level: its data may be as deep as in binary mode.
    fields = read_object(body, depth=MAX_DEPTH + 1)
    data, encoded = fields.pop("data", None), fields.pop("data_base64", None)
    if encoded == _NULL:
        encoded = None
    if data is not None and encoded is not None:
        raise EventError("data and data_base64 exclude each other; send one of them", attribute="data_base64")
    event = assemble(_values(fields))
    if encoded is not None:
        return replace(event, data=contents.read(_decode_base64(encoded), event.datacontenttype))
    return event if data is None else _with_data(event, data)


def parse_batch(body: bytes, *, max_batch: int = MAX_BATCH) -> tuple[CloudEvent, ...]:
    """All events of the batch; if one is invalid, the error names all invalid ones by their number."""
    items = split_array(body)
    if len(items) > max_batch:
        raise EventError(f"a batch may have at most {max_batch} events; send several", status=413)
    events, refusals = [], []
    for number, item in enumerate(items, 1):
        try:
            events.append(parse(bytes(item)))
        except EventError as refused:
            refusals.append((number, refused))
    if refusals:
        raise _batch_refusal(refusals, len(items))
    return tuple(events)


def parse_stored(body: bytes) -> CloudEvent:
    """Read what `emit_stored` wrote, without checking it again."""
    fields = _FIELDS.decode(body)
    data, encoded = fields.pop("data", None), fields.pop("data_base64", None)
    attributes = _values(fields)
    del attributes["specversion"]
    core = {name: attributes.pop(name, None) for name in CORE}
    event = CloudEvent(**core, extensions=attributes)
    if encoded is not None:
        return replace(event, data=a2b_base64(_TEXT.decode(encoded)))
    return event if data is None else _with_data(event, data)


def emit(event: CloudEvent) -> bytes:
    check(event)
    return emit_stored(event)


def emit_stored(event: CloudEvent) -> bytes:
    """Like `emit`, for an event that was checked when it was parsed or created."""
    return msgspec.json.encode(_members(event))


def emit_batch(events: Sequence[CloudEvent]) -> bytes:
    for event in events:
        check(event)
    return msgspec.json.encode([_members(event) for event in events])


def value_of(event: CloudEvent) -> Any:
    """The data as a Python value: JSON is parsed, text and bytes are returned unchanged."""
    if not isinstance(event.data, Raw):
        return event.data
    try:
        return _VALUE.decode(event.data)
    except msgspec.ValidationError:  # a number beyond a float
        return _WIDE.decode(event.data)


def exact_value_of(event: CloudEvent) -> Any:
    """Like `value_of`, with fractions as Decimal, so that no digit is lost."""
    return exact.decode(event.data) if isinstance(event.data, Raw) else event.data


def _values(fields: dict[str, Raw]) -> dict[str, Any]:
    """An attribute with the value null is treated as absent."""
    return {name: value for name, raw in fields.items() if (value := exact.decode(raw)) is not None}


def _with_data(event: CloudEvent, data: Raw) -> CloudEvent:
    if event.datacontenttype is None:
        return replace(event, data=data, datacontenttype=contents.JSON)
    media = media_type(event.datacontenttype)
    if media is not None and media.is_json:
        return replace(event, data=data)
    try:
        return replace(event, data=_TEXT.decode(data))
    except msgspec.ValidationError:
        raise EventError(
            "data must be a string, because datacontenttype is not JSON; send binary data as data_base64",
            attribute="data",
        ) from None


def _decode_base64(raw: Raw) -> bytes:
    try:
        text = _TEXT.decode(raw)
        content = a2b_base64(text, strict_mode=True)
        if len(text) == (len(content) + 2) // 3 * 4:  # strict mode lets needless padding pass
            return content
    except ValueError:
        pass
    raise EventError("data_base64 must be a string in base64 (RFC 4648)", attribute="data_base64")


def _members(event: CloudEvent) -> dict[str, Any]:
    members: dict[str, Any] = {"specversion": SPECVERSION}
    for name in CORE:
        if (value := getattr(event, name)) is not None:
            members[name] = value
    members.update(event.extensions)
    if isinstance(event.data, bytes):
        members["data_base64"] = b2a_base64(event.data, newline=False).decode()
    elif event.data is not None:
        members["data"] = event.data
    return members


def _batch_refusal(refusals: list[tuple[int, EventError]], count: int) -> EventError:
    numbers = ", ".join(str(number) for number, _ in refusals)
    reasons = "; ".join(f"event {number}: {refused}" for number, refused in refusals[:_REASONS_SHOWN])
    return EventError(
        f"the batch was refused: of its {count} events, counted from 1, invalid are: {numbers} ({reasons})"
    )


def _widen(text: str) -> float | Decimal:
    number = float(text)
    return number if isfinite(number) else Decimal(text)


_NULL = Raw(b"null")
_WIDE = msgspec.json.Decoder(float_hook=_widen)
