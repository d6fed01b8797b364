"""What nobody is to read in a text that others wrote: the passwords of URLs, and credentials for HTTP."""

from __future__ import annotations

import re

REDACTED = "•••"

# Bounded, so that no text takes long to look through.
# A password may have an @ in it that was not encoded: of several the last one before the end of the host counts.
_URL = re.compile(
    r"(?<![\w+.-])([a-zA-Z][\w+.-]{0,30}://[^\s:/@]{0,200}:)[^\s@]{1,1000}(?:@[^\s@/\"'<>,;]{1,200}){0,5}(?=@)"
)
_QUERY = re.compile(r"(?i)([?&][\w-]{0,40}(?:password|passwd|secret|token|api_?key)=)[^&\s\"'#]{1,1000}")
_CREDENTIALS = re.compile(
    r"(?i)(?<!\w)(bearer\s+|authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:[\w-]{1,30}\s{1,3})?)[^\s\"',;}]{6,}"
)


def redact_credentials(text: str) -> str:
    if "://" in text:
        text = _QUERY.sub(rf"\1{REDACTED}", _URL.sub(rf"\1{REDACTED}", text))
    return _CREDENTIALS.sub(rf"\1{REDACTED}", text)
