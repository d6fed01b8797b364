"""Events in HTTP messages: attributes in headers (binary), all in the body (structured), or several (batch)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from msgspec import Struct
from msgspec.structs import replace

from edda.cloudevents import data as contents
from edda.cloudevents import json_format
from edda.cloudevents.attributes import check_name, media_type, refusal
from edda.cloudevents.event import CORE, SPECVERSION, CloudEvent, assemble, attribute_text, check
from edda.cloudevents.json_format import MAX_BATCH
from edda.errors import EventError

STRUCTURED_TYPE = "application/cloudevents+json"
BATCH_TYPE = "application/cloudevents-batch+json"
_PREFIX = b"ce-"

Headers = Sequence[tuple[bytes, bytes]]


class ContentMode(StrEnum):
    BINARY = "binary"
    STRUCTURED = "structured"
    BATCH = "batch"


class HTTPMessage(Struct, frozen=True):
    events: tuple[CloudEvent, ...]
    mode: ContentMode


def parse(headers: Headers, body: bytes, *, max_batch: int = MAX_BATCH) -> HTTPMessage:
    """Parse a message. `headers` are pairs, because a dict would hide a repeated header. `max_batch=0` refuses
    batches."""
    content_type = _content_type_of(headers)
    mode = _mode_of(content_type)
    if mode is ContentMode.BINARY:
        return HTTPMessage((_parse_binary(headers, content_type, body),), mode)
    _check_format(str(content_type), mode, max_batch)
    if mode is ContentMode.STRUCTURED:
        return HTTPMessage((json_format.parse(body),), mode)
    return HTTPMessage(json_format.parse_batch(body, max_batch=max_batch), mode)


def emit(event: CloudEvent, mode: str = ContentMode.BINARY) -> tuple[list[tuple[str, str]], bytes]:
    """Headers and body of a message with this event.

    Two kinds of data are always sent structured: data whose media type is a CloudEvents format, which would be taken
    for the mode of the message, and bytes without a type that are valid JSON, which the receiver would read as JSON.
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
    # latin-1 decodes any bytes; a media type with other than ASCII characters is refused later.
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
        raise EventError(f"only the JSON format of CloudEvents is accepted here: {known}", status=415)
    if not media.is_utf8:
        raise EventError(f"{known} must be in UTF-8", status=415)
    if mode is ContentMode.BATCH and max_batch < 1:
        raise EventError("batches are not accepted here; send each event alone", status=415)


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
            raise refusal(name, "must not be a ce- header; in binary mode it is the Content-Type")
        if name in attributes:
            raise refusal(name, "came more than once")
        attributes[name] = decode_value(name, value)
    return attributes


def _binary_headers(event: CloudEvent) -> list[tuple[str, str]]:
    headers = [("ce-specversion", SPECVERSION)]
    for name in CORE:
        if name != "datacontenttype" and (value := getattr(event, name)) is not None:
            headers.append((f"ce-{name}", encode_value(value)))
    for name, value in event.extensions.items():
        headers.append((f"ce-{name}", encode_value(attribute_text(value))))
    if event.datacontenttype is not None:
        headers.append(("content-type", event.datacontenttype))
    return headers


_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
_BROKEN = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_AS_IS = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


def encode_value(text: str) -> str:
    return quote(text, safe=_AS_IS)


def decode_value(name: str, value: bytes) -> str:
    value = value.strip(b" \t")
    if value.startswith(b'"'):
        quoted = _QUOTED.fullmatch(value)
        if quoted is None:
            raise refusal(name, "begins with a double quote and is not one quoted string")
        value = _ESCAPE.sub(rb"\1", quoted[1])
    if b"%" in value:
        if _BROKEN.search(value):
            raise refusal(name, "has a % without two hexadecimal digits; send a % itself as %25")
        value = unquote_to_bytes(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise refusal(name, "is not UTF-8") from None
