"""An attribute's value in an HTTP header: percent-encoded, and by old senders also quoted."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote_to_bytes

from .attributes import refusal

_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
_BROKEN = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_AS_IS = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


def encode(text: str) -> str:
    return quote(text, safe=_AS_IS)


def decode(name: str, value: bytes) -> str:
    value = value.strip(b" \t")
    if value.startswith(b'"'):
        value = _unquote(name, value)
    if b"%" in value:
        if _BROKEN.search(value):
            raise refusal(name, "has a % without two hexadecimal digits; a % itself is sent as %25")
        value = unquote_to_bytes(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise refusal(name, "is not UTF-8") from None


def _unquote(name: str, value: bytes) -> bytes:
    found = _QUOTED.fullmatch(value)
    if found is None:
        raise refusal(name, "begins with a double quote and is not one quoted string")
    return _ESCAPE.sub(rb"\1", found[1])
