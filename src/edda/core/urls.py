"""URLs with passwords in them: showing them without, and sending the password where no log prints it."""

from __future__ import annotations

import re
from base64 import b64encode
from urllib.parse import unquote, urlsplit

from .redact import REDACTED

_SCHEME = re.compile(r"\s*[\"']?\s*([A-Za-z][\w+.-]{0,30})://")


def show_url(url: str) -> str:
    """For messages. The text may be no URL at all, as one in quotes or without a scheme, and have a password anywhere
    before its last `@`, or in its query: of what is not surely a host, a port and a path, nothing is shown."""
    found = _SCHEME.match(url)
    scheme = "" if found is None else f"{found[1]}://"
    if "@" in url:
        place, query, _ = url.rpartition("@")[2].partition("?")
        return f"{scheme}{REDACTED}@{place}{query and '?' + REDACTED}"
    if found is None:
        return REDACTED if re.search("[:=?]", url) else url
    place, query, _ = url[found.end() :].partition("?")
    return f"{scheme}{place}{query and '?' + REDACTED}"


def split_credentials(url: str) -> tuple[str, dict[str, str]]:
    """The URL without user and password, and the header that says the same: HTTP clients log the URL they ask."""
    parts = urlsplit(url)
    if parts.username is None and parts.password is None:
        return url, {}
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return plain, {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
