"""What an event carries. The same data is the same value, whichever of the three ways it came."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from edda.errors import EventError

from .attributes import media_type, refusal
from .strict_json import read_raw
from .to_json import to_json

JSON = "application/json"
BINARY = "application/octet-stream"

Content = Raw | str | bytes


def read(content: bytes, datacontenttype: str | None) -> Content:
    """What these bytes are, as their type says; without a type they stay bytes."""
    media = None if datacontenttype is None else media_type(datacontenttype)
    if media is None:
        return content
    if media.is_json:  # in UTF-8 always: RFC 8259 gives a charset no meaning
        return read_raw(content, "data")
    if not media.is_text:
        return content
    try:
        return content.decode("ascii" if media.is_ascii else "utf-8")
    except UnicodeDecodeError:
        return content


def read_untyped(content: bytes) -> tuple[Content, str | None]:
    """The data of a binary message without a Content-Type, and its datacontenttype.

    The Python SDKs send JSON that way by default, and read it so: a body that is JSON is taken as JSON. One that only
    a lenient reader takes for JSON (a member twice, too deep) raises EventError: as bytes it would match no wait, and
    the sender would be told 202.
    """
    try:
        return read_raw(content, "data"), JSON
    except EventError:
        if _is_lenient_json(content):
            raise
        return content, None


def _is_lenient_json(content: bytes) -> bool:
    try:
        msgspec.json.decode(content, type=Raw)
    except msgspec.DecodeError:
        return False
    except RecursionError:
        return True
    return True


def write(value: Any, datacontenttype: str | None) -> tuple[Content, str]:
    """What the value becomes on the wire, and of which type that is."""
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
    return _text(value), str(datacontenttype)


def to_bytes(content: Content, datacontenttype: str | None) -> bytes:
    if not isinstance(content, str):
        return bytes(content)
    media = None if datacontenttype is None else media_type(datacontenttype)
    if media is not None and not media.can_write(content):
        raise refusal("datacontenttype", "has another charset than UTF-8; such text can only be sent structured")
    return content.encode()


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise EventError("data has half a surrogate pair, which is no text", attribute="data") from None
    return value
