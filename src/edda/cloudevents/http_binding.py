"""Events in HTTP messages: in headers and body (binary), all in the body (structured), several at once (batch)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from edda.errors import EventError

from . import data as contents
from . import header_value, json_format
from .attributes import check_name, media_type, refusal
from .event import CORE, SPECVERSION, CloudEvent, assemble, attribute_text, check
from .json_format import MAX_BATCH

STRUCTURED_TYPE = "application/cloudevents+json"
BATCH_TYPE = "application/cloudevents-batch+json"
_PREFIX = b"ce-"

Headers = Sequence[tuple[bytes, bytes]]


class ContentMode(StrEnum):
    BINARY = "binary"
    STRUCTURED = "structured"
    BATCH = "batch"


class Message(Struct, frozen=True):
    events: tuple[CloudEvent, ...]
    mode: ContentMode


def parse(headers: Headers, body: bytes, *, max_batch: int = MAX_BATCH) -> Message:
    """What the message says. `headers` are pairs, for a dict would hide that one came twice; no batches with 0."""
    content_type = _content_type_of(headers)
    mode = _mode_of(content_type)
    if mode is ContentMode.BINARY:
        return Message((_parse_binary(headers, content_type, body),), mode)
    _check_format(str(content_type), mode, max_batch)
    if mode is ContentMode.STRUCTURED:
        return Message((json_format.parse(body),), mode)
    return Message(json_format.parse_batch(body, max_batch=max_batch), mode)


def emit(event: CloudEvent, mode: str = ContentMode.BINARY) -> tuple[list[tuple[str, str]], bytes]:
    """Headers and body of a message with this event.

    Two kinds of data cannot travel in binary mode, and are sent structured: data that is itself some format of
    CloudEvents, whose type would say that the message is, and bytes without a type that are JSON by chance, which the
    receiver would take for JSON.
    """
    mode = ContentMode(mode)
    if mode is ContentMode.BATCH:
        return emit_batch([event])
    if (
        mode is ContentMode.STRUCTURED
        or _mode_of(event.datacontenttype) is not ContentMode.BINARY
        or _looks_like_json(event)
    ):
        return [("content-type", STRUCTURED_TYPE)], json_format.emit(event)
    check(event)
    body = b"" if event.data is None else contents.to_bytes(event.data, event.datacontenttype)
    return _binary_headers(event), body


def emit_batch(events: Sequence[CloudEvent]) -> tuple[list[tuple[str, str]], bytes]:
    return [("content-type", BATCH_TYPE)], json_format.emit_batch(events)


def _content_type_of(headers: Headers) -> str | None:
    found = [value for name, value in headers if name.lower() == b"content-type"]
    if not found:
        return None
    if len(found) > 1:
        raise EventError("Content-Type came more than once", attribute="datacontenttype")
    # What is not ASCII is in no media type, so that it does not matter as what it is read.
    return found[0].strip(b" \t").decode("latin-1")


def _mode_of(content_type: str | None) -> ContentMode:
    lowered = (content_type or "").lower()
    if lowered.startswith("application/cloudevents-batch"):
        return ContentMode.BATCH
    return ContentMode.STRUCTURED if lowered.startswith("application/cloudevents") else ContentMode.BINARY


def _check_format(content_type: str, mode: ContentMode, max_batch: int) -> None:
    media = media_type(content_type)
    known = BATCH_TYPE if mode is ContentMode.BATCH else STRUCTURED_TYPE
    if media is None or media.essence != known:
        raise EventError(f"of the formats of CloudEvents only JSON is taken here: {known}", status=415)
    if not media.is_utf8:
        raise EventError(f"{known} must be in UTF-8", status=415)
    if mode is ContentMode.BATCH and max_batch < 1:
        raise EventError("batches are not taken here; send every event alone", status=415)


def _parse_binary(headers: Headers, content_type: str | None, body: bytes) -> CloudEvent:
    attributes = _attributes_of(headers)
    if not attributes:
        raise EventError(
            f"this is not a CloudEvent: it has no ce- headers, and its Content-Type is not {STRUCTURED_TYPE}",
            status=415,
        )
    if content_type is not None:
        attributes["datacontenttype"] = content_type
    event = assemble(attributes)
    if not body:
        return event
    if content_type is None:
        data, datacontenttype = contents.read_untyped(body)
        return replace(event, data=data, datacontenttype=datacontenttype)
    return replace(event, data=contents.read(body, event.datacontenttype))


def _looks_like_json(event: CloudEvent) -> bool:
    if not isinstance(event.data, bytes) or event.datacontenttype is not None:
        return False
    try:
        return contents.read_untyped(event.data)[1] is not None
    except EventError:
        return True


def _attributes_of(headers: Headers) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for header, value in headers:
        if header[:3].lower() != _PREFIX:
            continue
        name = header[3:].lower().decode("latin-1")
        check_name(name)
        if name == "datacontenttype":
            raise refusal(name, "must not come as a ce- header; in binary mode it is the Content-Type")
        if name in attributes:
            raise refusal(name, "came more than once")
        attributes[name] = header_value.decode(name, value)
    return attributes


def _binary_headers(event: CloudEvent) -> list[tuple[str, str]]:
    headers = [("ce-specversion", SPECVERSION)]
    for name in CORE:
        if name != "datacontenttype" and (value := getattr(event, name)) is not None:
            headers.append((f"ce-{name}", header_value.encode(value)))
    for name, value in event.extensions.items():
        headers.append((f"ce-{name}", header_value.encode(attribute_text(value))))
    if event.datacontenttype is not None:
        headers.append(("content-type", event.datacontenttype))
    return headers
