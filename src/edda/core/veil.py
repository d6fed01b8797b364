"""What nobody is to read in a text that others wrote: the passwords of URLs, and credentials for HTTP."""

from __future__ import annotations

import re

HIDDEN = "•••"

# Bounded, so that no text takes long to look through.
_URL = re.compile(r"(?<![\w+.-])([a-zA-Z][\w+.-]{0,30}://[^\s:/@]{0,200}:)[^\s@]{1,1000}(?=@)")
_CREDENTIALS = re.compile(
    r"(?i)(?<!\w)(bearer\s+|authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:[\w-]{1,30}\s{1,3})?)[^\s\"',;}]{6,}"
)


def veil(text: str) -> str:
    if "://" in text:
        text = _URL.sub(rf"\1{HIDDEN}", text)
    return _CREDENTIALS.sub(rf"\1{HIDDEN}", text)
