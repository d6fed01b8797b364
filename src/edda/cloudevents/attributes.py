"""Checks of the context attributes of an event: names, text, URIs, times, media types.

Errors do not repeat values, because they are sent to the client and logged. The patterns use possessive quantifiers
(`*+`, `++`), which do not backtrack, so that no input makes them slow.
"""

from __future__ import annotations

import re
from datetime import date
from functools import lru_cache
from typing import Any

from msgspec import Struct

from edda.errors import EventError

MAX_ID_BYTES = 1024
"""Limit of `id` and of `source` each: together they are a database key."""
MAX_TYPE_CHARACTERS = 255
_MAX_NAME_SHOWN = 64

_NAME = re.compile(r"[a-z0-9]++")
_FORBIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF) for plane in range(17))
    + "]"
)

_PCHAR = r"[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2}"
_AUTHORITY = (
    r"(?:(?:[A-Za-z0-9\-._~!$&'()*+,;=:]|%[0-9A-Fa-f]{2})*+@)?"
    r"(?:\[[0-9A-Za-z:.\-_~!$&'()*+,;=]++\]|(?:[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})*+)"
    r"(?::[0-9]*+)?"
)
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*+)?(?:#(?:{_PCHAR}|[/?])*+)?"
_HIERARCHY = rf"(?://{_AUTHORITY}(?:/(?:{_PCHAR})*+)*+|(?!//)(?:{_PCHAR}|/)*+)"
_URI = re.compile(rf"[A-Za-z][A-Za-z0-9+.\-]*+:{_HIERARCHY}{_TAIL}")
# The first segment of a relative reference has no colon: "1a:b" is neither URI nor relative reference.
_RELATIVE = re.compile(rf"(?![^/?#:]*+:){_HIERARCHY}{_TAIL}")

_TIME = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})[Tt](?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]++)?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)

_WORD = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_PARAMETER = rf'({_WORD})=({_WORD}|"(?:[\t !#-\[\]-~]|\\[\t -~])*+")'
_MEDIA_TYPE = re.compile(rf"({_WORD}/{_WORD})((?:[ \t]*+;[ \t]*+(?:{_PARAMETER})?+)*+)[ \t]*+")
_PARAMETERS = re.compile(_PARAMETER)


def refusal(name: str, problem: str, status: int = 400) -> EventError:
    shown = name if len(name) <= _MAX_NAME_SHOWN else f"{name[:_MAX_NAME_SHOWN]}…"
    return EventError(f"{shown} {problem}", attribute=shown, status=status)


def check_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise EventError("an attribute's name must have lower-case letters a-z and digits only")


def check_text(name: str, value: Any) -> None:
    if type(value) is not str:
        raise refusal(name, "must be a string")
    if not (value.isascii() and value.isprintable()) and _FORBIDDEN.search(value):
        raise refusal(name, "has a control character, a noncharacter or half a surrogate pair, which are not allowed")


def check_filled(name: str, value: Any) -> None:
    if value is None:
        raise refusal(name, "is missing; every event must have one")
    check_text(name, value)
    if not value:
        raise refusal(name, "must not be empty")


def check_id(value: Any) -> None:
    check_filled("id", value)
    _check_size("id", value)


def check_type(value: Any) -> None:
    check_filled("type", value)
    if len(value) > MAX_TYPE_CHARACTERS:
        raise refusal("type", f"is longer than {MAX_TYPE_CHARACTERS} characters")


def check_source(value: Any) -> None:
    check_filled("source", value)
    _check_size("source", value)
    if not (_URI.fullmatch(value) or _RELATIVE.fullmatch(value)):
        raise refusal("source", "must be a URI-reference (RFC 3986), such as /orders or urn:example:orders")


def check_dataschema(value: Any) -> None:
    """A fragment is allowed: it often names the schema within a document."""
    check_filled("dataschema", value)
    if not _URI.fullmatch(value):
        raise refusal("dataschema", "must be an absolute URI (RFC 3986), such as https://example.com/order.json")


def check_time(value: Any) -> None:
    check_filled("time", value)
    if not is_time(value):
        raise refusal("time", "must be a time as in RFC 3339 with seconds and offset, such as 2026-01-31T18:30:00Z")


def check_datacontenttype(value: Any) -> None:
    check_filled("datacontenttype", value)
    if media_type(value) is None:
        raise refusal("datacontenttype", "must be a media type (RFC 2046), such as application/json")


def _check_size(name: str, value: str) -> None:
    if len(value.encode()) > MAX_ID_BYTES:
        raise refusal(name, f"is longer than {MAX_ID_BYTES} bytes in UTF-8")


def is_time(text: str) -> bool:
    found = _TIME.fullmatch(text)
    if found is None:
        return False
    year, month, day = map(int, found.groups())
    try:
        date(year or 4, month, day)  # RFC 3339 has the leap year 0, which Python does not support
    except ValueError:
        return False
    return True


class MediaType(Struct, frozen=True):
    essence: str
    """Lower-case, without parameters."""
    charset: str | None

    @property
    def is_json(self) -> bool:
        return self.essence.endswith(("/json", "+json"))

    @property
    def is_utf8(self) -> bool:
        return self.charset in (None, "utf-8")

    @property
    def is_ascii(self) -> bool:
        return self.charset == "us-ascii"

    @property
    def is_text(self) -> bool:
        """Whether data of this type is text in UTF-8 or in US-ASCII, a subset of it."""
        is_readable = self.is_utf8 or self.is_ascii
        return is_readable and (self.essence.startswith("text/") or self.essence.endswith(("/xml", "+xml")))

    def can_write(self, text: str) -> bool:
        """Whether the text has the same bytes in UTF-8 and in this charset."""
        return self.is_utf8 or (self.is_ascii and text.isascii())


@lru_cache(maxsize=64)
def media_type(text: str) -> MediaType | None:
    found = _MEDIA_TYPE.fullmatch(text)
    if found is None:
        return None
    charset = next(
        (value.strip('"').lower() for name, value in _PARAMETERS.findall(found[2]) if name.lower() == "charset"), None
    )
    return MediaType(found[1].lower(), charset)
